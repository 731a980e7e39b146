"""Every QONNX graph: converted, run in ONNX Runtime, equal in every element to its float32 chain."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lowbit.rewrites.clipped import OTHER_ROUNDING
from onnx import helper, numpy_helper

from tests.conftest import FULL
from tests.dialects import qonnx_oracle
from tests.dialects.graphs.builder import Built, Case
from tests.dialects.graphs.qonnx import CASES
from tests.support import FLOAT_MATMULS, all_nodes, interface, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")
cli = pytest.importorskip("lowbit.cli").cli

QONNX = "qonnx.custom_op.general"

_NAMES = sorted(CASES)


def _flavours(name: str) -> list[int]:
    """One flavour of scales in the default run, two of the three in the full one."""
    first = _NAMES.index(name) % 3
    return [first, (first + 1) % 3] if FULL else [first]


def assert_equals_the_oracle(case: Case, built: Built, result, note: str) -> None:
    session = lowbit_session(result.model)
    for k, sizes in enumerate(built.sizes):
        feeds = built.feed(k, **sizes)
        for ours, meant in zip(session.run(None, feeds), qonnx_oracle.run(built.model, feeds), strict=True):
            assert ours.shape == meant.shape, note
            assert ours.dtype == meant.dtype, note
            if case.left:
                # A float product rounds its sum in ONNX Runtime's order: codes behind may flip at ties, which
                # two of the three flavours of scales are full of, and a flip spreads through the next layer.
                near = np.isclose(ours, meant, rtol=1e-5, atol=1e-5 * float(np.abs(meant).max()))
                assert near.mean() >= 0.75, f"{note}: {(~near).sum()} of {near.size} elements differ"
            elif case.float_tail:
                np.testing.assert_allclose(ours, meant, rtol=1e-6, atol=1e-30, err_msg=note)
            else:
                different = int((ours != meant).sum())
                assert not different, f"{note}: {different} of {ours.size} elements differ"


def assert_report_names_every_node(model: onnx.ModelProto, report) -> None:
    """Each node of the input appears, and what stayed says why."""
    # A newer opset has no Upsample; what stands for it has no name.
    named = {n.name for n in model.graph.node if n.op_type not in ("Constant", "Upsample")}
    assert named <= {n.name for n in report.nodes}
    assert all(n.reason for n in report.kept)


@pytest.mark.parametrize("name", _NAMES)
def test_conversion_is_exact(name: str) -> None:
    require_native()
    case = CASES[name]
    for seed in _flavours(name):
        built = case.build(seed)
        source = built.model.SerializeToString(deterministic=True)
        result = lowbit.convert(built.model)
        assert built.model.SerializeToString(deterministic=True) == source, "the input model was changed"
        assert interface(result.model) == interface(built.model)
        assert_report_names_every_node(built.model, result.report)
        domains = {node.domain for node in all_nodes(result.model.graph)}
        assert domains <= {"", "ai.onnx", "ai.lowbit"}, "ONNX Runtime knows no other"

        reasons = "; ".join(f"{n.op_type} {n.name}: {n.reason}" for n in result.report.kept)
        left = {node.op_type for node in all_nodes(result.model.graph) if node.op_type in FLOAT_MATMULS}
        assert left == set(case.left), f"seed {seed}: {reasons}"
        for pattern in case.left.values():
            assert re.search(pattern, reasons), reasons
        assert_equals_the_oracle(case, built, result, f"seed {seed}")


def test_thresholds_need_no_order() -> None:
    """How many of them an element reaches does not depend on it."""
    built = CASES["multithreshold_unsigned"].build(1)
    tensor = next(t for t in built.model.graph.initializer if t.name.startswith("thresholds"))
    values = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values[:, ::-1].copy(), tensor.name))
    assert_equals_the_oracle(CASES["multithreshold_unsigned"], built, lowbit.convert(built.model), "reversed")


def test_strict_refuses_what_stays() -> None:
    built = CASES["sixteen_bit_activation"].build(1)
    with pytest.raises(lowbit.UnsupportedError, match="16 bits"):
        lowbit.convert(built.model, strict=True)


def test_weights_take_their_bits() -> None:
    """Float weights behind a Quant become packed codes: the file shrinks to about its bits."""
    sizes = {
        bits: lowbit.convert(CASES[f"weights_{bits}_bits"].build(1).model).model.ByteSize()
        for bits in (2, 4, 8)
    }
    assert sizes[2] < sizes[4] < sizes[8]


# -- the same operators in ONNX's own domain, as early exports of Brevitas have them


def _early(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in all_nodes(copy.graph):
        node.domain = ""
    left = [entry for entry in copy.opset_import if not entry.domain]
    del copy.opset_import[:]
    copy.opset_import.extend(left)
    return copy


EARLY = ["between_relu", "bipolar", "trunc_v1", "trunc_v1_round", "trunc_v2", "multithreshold_signed",
         "sixteen_bit_activation", "brevitas_domain_not_imported"]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in EARLY if name in CASES])
def test_default_domain(name: str) -> None:
    """Nothing but the domain differs, so that the conversion is the same and what stays loads."""
    built = CASES[name].build(1)
    early = _early(built.model)
    source = early.SerializeToString(deterministic=True)
    result, expected = lowbit.convert(early), lowbit.convert(built.model)
    assert early.SerializeToString(deterministic=True) == source, "the input model was changed"
    assert result.model.graph == expected.model.graph
    assert [n.reason for n in result.report.nodes] == [n.reason for n in expected.report.nodes]
    assert interface(result.model) == interface(early)
    lowbit_session(result.model).run(None, built.feed())


def test_default_domain_at_the_command_line(tmp_path) -> None:
    """Each command reads such a file; ``run`` and ``verify`` have it in standard ops."""
    require_native()
    built = CASES["trunc_v1"].build(1)
    source, target, outputs = (str(tmp_path / name) for name in ("model.onnx", "out.onnx", "outputs.npz"))
    onnx.save(_early(built.model), source)
    done = CliRunner().invoke(cli, ["convert", source, "-o", target])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["verify", target, "--against", source, "-n", "1"])
    assert done.exit_code == 0, done.output
    assert "verified" in done.stdout
    done = CliRunner().invoke(cli, ["inspect", source])
    assert done.exit_code == 0, done.output
    assert "QONNX (" in done.stdout
    feeds = built.feed()
    np.savez(tmp_path / "feeds.npz", **feeds)
    done = CliRunner().invoke(cli, ["run", source, "--input", str(tmp_path / "feeds.npz"), "-o", outputs])
    assert done.exit_code == 0, done.output
    assert "standard ops" in done.stderr
    (meant,) = qonnx_oracle.run(built.model, feeds)
    (ours,) = np.load(outputs).values()
    np.testing.assert_allclose(ours, meant, rtol=1e-5, atol=1e-5 * np.abs(meant).max())


# -- a quantizer that the user states for a float input


def _image(shape: tuple[int, ...]) -> np.ndarray:
    codes = np.random.default_rng(3).integers(0, 256, shape)
    return (codes.astype(np.float32) / np.float32(255)).astype(np.float32)


@pytest.mark.parametrize("stated", ["scale=1/255,bits=8,unsigned", "image:scale=0.003921569,bits=8,unsigned"])
def test_input_quant(stated: str) -> None:
    """With its input's quantizer stated the first convolution is an integer one."""
    built = CASES["float_images"].build(0)
    result = lowbit.convert(built.model, input_quant=stated)
    assert not {node.op_type for node in result.model.graph.node} & FLOAT_MATMULS
    assert interface(result.model) == interface(built.model)
    assert any("image" in warning and "--input-quant" in warning for warning in result.report.warnings)
    options = next(p.value for p in result.model.metadata_props if p.key == "lowbit.options")
    assert stated in options

    feeds = {"image": _image((1, 3, 8, 8))}
    (ours,) = lowbit_session(result.model).run(None, feeds)
    (meant,) = qonnx_oracle.run(_with_input_quant(built.model), feeds)
    np.testing.assert_array_equal(ours, meant)


def _with_input_quant(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with the quantizer written into it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name, value in (("s", 1 / 255), ("z", 0.0), ("b", 8.0)):
        copy.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    for node in copy.graph.node:
        node.input[:] = ["quantized" if i == "image" else i for i in node.input]
    domain = "qonnx.custom_op.general"
    node = onnx.helper.make_node(
        "Quant", ["image", "s", "z", "b"], ["quantized"], domain=domain, signed=0, narrow=0
    )
    copy.graph.node.insert(0, node)
    return copy


def test_input_quant_on_the_command_line(tmp_path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(CASES["float_images"].build(0).model, source)
    arguments = ["convert", str(source), "-o", str(tmp_path / "out.onnx"), "--strict"]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 3
    assert "--input-quant" in refused.stderr
    done = CliRunner().invoke(cli, [*arguments, "--input-quant", "image:scale=1/255,bits=8,unsigned"])
    assert done.exit_code == 0, done.output
    assert "warning: input 'image' is rounded to 8 unsigned bits" in done.stderr


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("scale=1/255,bits=8", "one of signed and unsigned"),
        ("bits=8,unsigned", "expected a scale"),
        ("scale=0,bits=8,unsigned", "positive scale"),
        ("scale=1/0,bits=8,unsigned", "expected numbers"),
        ("scale=1,bits=9,unsigned", "1 to 8 bits"),
        ("scale=1,bits=8,unsigned,zero_point=300", "zero point from 0 to 255"),
        ("scale=1,bits=8,unsigned,colour=red", "cannot read 'colour=red'"),
        ("nobody:scale=1,bits=8,unsigned", "a float32 input 'nobody'"),
    ],
)
def test_input_quant_that_makes_no_sense(stated: str, message: str) -> None:
    with pytest.raises(lowbit.LowBitError, match=re.escape(message)):
        lowbit.convert(CASES["float_images"].build(0).model, input_quant=stated)


# -- zero points, which a quantizer adds before it rounds


_ONE_OPERAND: dict[str, tuple[dict[str, object], list[int]]] = {
    "GlobalAveragePool": ({}, [1, 6, 1, 1]),
    "AveragePool": ({"kernel_shape": [3, 3], "pads": [0, 1, 1, 0]}, [1, 6, 3, 3]),
    "Resize": ({"mode": "linear"}, [1, 6, 8, 8]),
}
"""Attributes and the shape of the result."""


def _between_quantizers(op: str, scales: tuple[float, float, float], zero: int) -> onnx.ModelProto:
    """An op between asymmetric quantizers of 4 bits: two operands, or one."""

    def constant(name: str, value: float) -> str:
        initializers.append(onnx.numpy_helper.from_array(np.float32(value), name))
        return name

    initializers: list[onnx.TensorProto] = []
    nodes = []
    for name, source, scale in zip(("qa", "qb", "z"), ("a", "b", "y"), scales, strict=True):
        given = [source, constant(f"{name}_s", scale), constant(f"{name}_z", zero), constant(f"{name}_b", 4)]
        attributes = {"signed": 0, "narrow": 0, "rounding_mode": "ROUND", "domain": "qonnx.custom_op.general"}
        nodes.append(helper.make_node("Quant", given, [name], name=name, **attributes))
    two = {"axis": 1} if op == "Concat" else {}, [1, 12 if op == "Concat" else 6, 4, 4]
    attributes, result = _ONE_OPERAND.get(op, two)
    operands = ["qa"] if op in _ONE_OPERAND else ["qa", "qb"]
    if op == "Resize":
        initializers.append(onnx.numpy_helper.from_array(np.float32([1, 1, 2, 2]), "sizes"))
        operands += ["", "sizes"]
    nodes.insert(2, helper.make_node(op, operands, ["y"], name=op, **attributes))
    shape = [1, 6, 4, 4]
    shapes = {"a": shape, "b": shape, "z": result}
    values = {
        k: helper.make_tensor_value_info(k, onnx.TensorProto.FLOAT, shape) for k, shape in shapes.items()
    }
    graph = helper.make_graph(nodes, op, [values["a"], values["b"]], [values["z"]], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("qonnx.custom_op.general", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("op", ["Add", "Mul", "Concat", "MatMul", *_ONE_OPERAND])
@pytest.mark.parametrize("zero", [6, 7])
def test_ops_between_quantizers_with_zero_points(op: str, zero: int) -> None:
    """They round as QuantizeLinear does wherever no result is a tie, which is tried on all codes."""
    model = _between_quantizers(op, (0.11, 0.0713, 0.193), zero)
    result = lowbit.convert(model, all_regions=True)  # a pool alone stays where its layout costs more
    assert f"LowBit{op}" in {node.op_type for node in result.model.graph.node}, result.report.kept
    session, rng = lowbit_session(result.model), np.random.default_rng(zero)
    for _ in range(3):
        feeds = {name: rng.normal(0, 0.6, (1, 6, 4, 4)).astype(np.float32) for name in "ab"}
        (meant,) = qonnx_oracle.run(model, feeds)
        assert np.array_equal(session.run(None, feeds)[0], meant)


def _resized_between_convolutions(opset: int) -> onnx.ModelProto:
    """A map, resized to the size that the image has when the model runs, between two convolutions."""
    rng = np.random.default_rng(0)
    constants = {
        name: np.asarray(value, np.float32)
        for name, value in {
            "s": 0.125,
            "z": 0,
            "b": 4,
            "w0": rng.normal(0, 0.3, (5, 3, 3, 3)),
            "w1": rng.normal(0, 0.3, (4, 5, 3, 3)),
        }.items()
    } | {name: np.array([value]) for name, value in (("zero", 0), ("two", 2), ("four", 4))}

    def quant(x: str, y: str) -> onnx.NodeProto:
        domain = "qonnx.custom_op.general"
        return helper.make_node(
            "Quant", [x, "s", "z", "b"], [y], y, domain=domain, signed=1, narrow=0, rounding_mode="ROUND"
        )

    axes = {"axes": [2, 3]} if opset >= 18 else {}
    nodes = [
        *(quant(x, f"{x}_q") for x in ("image", "w0", "w1")),
        helper.make_node("Conv", ["image_q", "w0_q"], ["a"], "a", strides=[2, 2], pads=[1] * 4),
        quant("a", "a_q"),
        helper.make_node("Shape", ["a_q"], ["small"], "small"),
        helper.make_node("Shape", ["image_q"], ["large"], "large"),
        helper.make_node("Slice", ["small", "zero", "two"], ["outer"], "outer"),
        helper.make_node("Slice", ["large", "two", "four"], ["spatial"], "spatial"),
        helper.make_node("Concat", ["outer", "spatial"], ["all"], "all", axis=0),
        helper.make_node(
            "Resize", ["a_q", "", "", "spatial" if axes else "all"], ["r"], "r", mode="linear", **axes
        ),
        quant("r", "r_q"),
        helper.make_node("Conv", ["r_q", "w1_q"], ["c"], "c", pads=[1] * 4),
        quant("c", "y"),
    ]
    graph = helper.make_graph(
        nodes if not axes else [node for node in nodes if node.name not in ("small", "outer", "all")],
        "resized",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4, "h2", "w2"])],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("qonnx.custom_op.general", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("opset", [13, 18])
def test_a_linear_resize_that_stays_works_channels_last(opset: int) -> None:
    """Nothing is transposed for it: its quantizers stand around it as the convolutions have them."""
    model = _resized_between_convolutions(opset)
    result = lowbit.convert(model)
    ops = [node.op_type for node in result.model.graph.node]
    assert ops.count("LowBitConv") == 2
    assert "Resize" in ops
    assert "Transpose" not in ops
    moves = {"to_channels_first", "to_channels_last"}
    moving = [node.name for node in result.model.graph.node if moves & {a.name for a in node.attribute}]
    assert len(moving) == 2, moving  # the edges of the graph
    for shape in ((1, 3, 8, 8), (2, 3, 6, 10)):
        feeds = {"image": np.random.default_rng(1).normal(0, 0.5, shape).astype(np.float32)}
        (meant,) = qonnx_oracle.run(model, feeds)  # exact: weights are quarters, scales powers of two
        for optimize in (False, True):
            session = lowbit_session(result.model, optimize=optimize)
            assert np.array_equal(session.run(None, feeds)[0], meant)


@pytest.mark.parametrize("op", ["Add", "Mul", "MatMul", *_ONE_OPERAND])
def test_ties_with_an_odd_zero_point_stay(op: str) -> None:
    """With scales of powers of two many results are ties, which go to the other code.

    A product or a pool then gives real numbers, and its quantizer stays.
    """
    model = _between_quantizers(op, (0.5, 0.5, 1.0), 7)
    result = lowbit.convert(model)
    kept = {node.name: node.reason for node in result.report.kept}
    assert "z" in kept
    assert (op not in kept) == (op in ("MatMul", "AveragePool"))
    assert "rounds in another way than QuantizeLinear" in kept.get(op, OTHER_ROUNDING)
    feeds = {name: np.random.default_rng(1).normal(0, 2, (1, 6, 4, 4)).astype(np.float32) for name in "ab"}
    (meant,) = qonnx_oracle.run(model, feeds)
    assert np.array_equal(lowbit_session(result.model).run(None, feeds)[0], meant)


@pytest.mark.parametrize("mode", ["ROUND", "CEIL", "FLOOR", "UP", "DOWN", "HALF_UP", "HALF_DOWN"])
@pytest.mark.parametrize("zero", [0.0, 3.0])
def test_codes_of_more_than_8_bits_are_rounded_in_standard_ops(mode: str, zero: float) -> None:
    """Which way halves go included: the inputs lie on them."""
    x = (np.arange(-40, 41, dtype=np.float32) / 4).reshape(1, 81)
    attributes = {"signed": 1, "narrow": 0, "rounding_mode": mode}
    node = helper.make_node("Quant", ["x", "s", "z", "b"], ["y"], "q", domain=QONNX, **attributes)
    constants = {"s": 0.5, "z": zero, "b": 12.0}
    graph = helper.make_graph(
        [node], "wide", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, x.shape)],
        [numpy_helper.from_array(np.float32(value), name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(QONNX, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    ours = lowbit_session(lowbit.convert(model).model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(ours, qonnx_oracle.run(model, {"x": x})[0])
