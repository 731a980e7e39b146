"""Export: what a lowbit model becomes means the same in every element, and converts back to the same.

The exported graph is executed by the oracle of its dialect, which shares nothing with the exporter. For QONNX
that is the float32 chain on exact accumulators; convolutions of integers are exact in float32 anyway as long
as they stay below 2^24.
"""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.conftest import FULL
from tests.dialects import oracle, qonnx_oracle
from tests.dialects.graphs import CASES
from tests.dialects.graphs import qonnx as qonnx_graphs
from tests.dialects.graphs.random_network import random_network
from tests.numerics import random_nodes
from tests.support import interface, lowbit_session, require_native, stock_run

lowbit = pytest.importorskip("lowbit")


ORACLES = {"qonnx": qonnx_oracle.run, "qdq": oracle.run}
QONNX = "qonnx.custom_op.general"

# One of every kind of epilogue, layout and element type; the full run adds a quarter of all there are.
SOME_CASES = [
    "constructs.conv_flatten_gemm",
    "constructs.dense_block",
    "constructs.between_concat",
    "constructs.between_pad",
    "constructs.gate_with_another_reader",
    "constructs.global_average_pool_to_gemm",
    "constructs.matmul_default_transpose",
    "exporters.tf2onnx_classifier",
    "left_alone.sixteen_bit_contrib",
    "narrow_types.w_s2_a_u4",
    "narrow_types.w_s4_a_u4",
    "ort_quantizer.float_bias",
    "ort_quantizer.u8_activations_s8_weights",
    "qoperator.kept_around_converted",
]
MORE_CASES = [name for name in CASES if not CASES[name].left][::4] if FULL else []
SOME_QONNX_CASES = [
    "rounding_CEIL_unsigned",
    "rounding_FLOOR_signed",
    "between_batch_norm",
    "between_batch_norm_relu",
    "between_batch_norm_bipolar",
]


def run(target: str, exported: onnx.ModelProto, feeds) -> list[np.ndarray]:
    return ORACLES[target](exported, feeds)


def assert_equal_models(
    target: str,
    model: onnx.ModelProto,
    feeds: list[dict],
    note: str = "",
    exported: onnx.ModelProto | None = None,
) -> onnx.ModelProto:
    """Exports a lowbit model, compares in every element, converts it back and compares again.

    `exported` is the model exported already. Returns what it was converted back to.
    """
    if exported is None:
        exported = lowbit.export(model, to=target).model
    assert interface(exported) == interface(model), note
    assert not any(node.domain == "ai.lowbit" for node in exported.graph.node), note
    session = lowbit_session(model)
    converted = lowbit.convert(exported).model
    back = lowbit_session(converted)
    has_sigmoid = any(
        a.name == "tail" and b"silu" in a.s for node in model.graph.node for a in node.attribute
    )
    for feed in feeds:
        ours = session.run(None, feed)
        results = (run(target, exported, feed), back.run(None, feed))
        for what, result in zip(("exported", "converted back"), results, strict=True):
            for i, (a, b) in enumerate(zip(ours, result, strict=True)):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{note}: {what}, output {i}"
                different = int((a != b).sum())
                if has_sigmoid and what == "exported":  # a Sigmoid by whoever runs it
                    assert different <= max(1, a.size // 100), f"{note}: output {i}: {different} differ"
                    continue
                assert not different, f"{note}: {what}, output {i}: {different} of {a.size} elements differ"
    return converted


REASONS = {
    "qdq": "thresholds|scales per channel|cubic|resizes pictures",
    "qonnx": "exact sum|adds up|resizes pictures",
}


def exported_to(target: str, model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The model exported; None where a target cannot say it, which nodes known for that must explain."""
    try:
        return lowbit.export(model, to=target).model
    except lowbit.UnsupportedError as error:
        message = str(error)
    reason = rf"(LowBit|AP)\w+ '[^']+': .*({REASONS[target]})"
    assert re.search(reason, message), message
    return None


def counts(model: onnx.ModelProto) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in model.graph.node:
        found[node.op_type] = found.get(node.op_type, 0) + 1
    return found


# ---- whole models


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize("part", range(3))
def test_random_networks(target: str, part: int, seeds) -> None:
    require_native()
    for seed in (part + 3 * s for s in seeds(3)):
        built = random_network(seed)
        model = lowbit.convert(built.model).model
        feeds = [built.feed(k, **sizes) for k, sizes in enumerate(built.sizes)]
        assert_equal_models(target, model, feeds, f"seed {seed}")


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize("name", sorted({*SOME_CASES, *MORE_CASES}))
def test_constructs(target: str, name: str, seeds) -> None:
    require_native()
    for seed in seeds(1):
        built = CASES[name].build(seed + 1)
        model = lowbit.convert(built.model).model
        if not any(node.domain == "ai.lowbit" for node in model.graph.node):
            pytest.skip("nothing of it becomes a lowbit node")
        feeds = [built.feed(k, **sizes) for k, sizes in enumerate(built.sizes)]
        exported = exported_to(target, model)
        if exported is not None:
            assert_equal_models(target, model, feeds, f"seed {seed}", exported)


@pytest.mark.parametrize("name", list(qonnx_graphs.CASES)[::3] if FULL else SOME_QONNX_CASES)
def test_qonnx_constructs_go_back_to_qonnx(name: str, seeds) -> None:
    require_native()
    for seed in seeds(1):
        case = qonnx_graphs.CASES[name]
        built = case.build(seed)
        model = lowbit.convert(built.model).model
        if case.left or not any(node.domain == "ai.lowbit" for node in model.graph.node):
            continue
        feeds = [built.feed(k, **sizes) for k, sizes in enumerate(built.sizes)]
        assert_equal_models("qonnx", model, feeds, f"seed {seed}")


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize("name", ["zero_point_below_the_codes", "multithreshold_channels_last"])
def test_standard_nodes_between_lowbits_are_passed_on(target: str, name: str) -> None:
    """Quantizers that lowbit has no node for, written in standard ops, and ONNX's own around them."""
    require_native()
    built = qonnx_graphs.CASES[name].build(1)
    model = lowbit.convert(built.model).model
    feeds = [built.feed(k, **sizes) for k, sizes in enumerate(built.sizes)]
    exported = exported_to(target, model)
    if exported is not None:
        assert_equal_models(target, model, feeds, exported=exported)


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize("bits", ["w8a8", "w4a4", "w2a2", "w1a2"])
def test_digits(target: str, bits: str) -> None:
    """The shipped networks: exact both ways, and the way back finds the same nodes."""
    require_native()
    from lowbit.models.digits import model_path

    model = lowbit.convert(model_path(bits)).model
    images = np.random.default_rng(1).uniform(0, 16, (4, 1, 8, 8)).astype(np.float32)
    (value,) = model.graph.input
    images = images.reshape(-1, *(d.dim_value for d in value.type.tensor_type.shape.dim[1:]))
    back = assert_equal_models(target, model, [{value.name: images}], bits)
    left = {node.op_type for node in back.graph.node if node.domain != "ai.lowbit"}
    assert not left & {"Conv", "Gemm", "MatMul", "Add", "Mul", "ReduceSum"}


NETWORKS = [("resnet18", 8, 8), ("mobilenetv2", 4, 4)]


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize(("name", "w_bits", "a_bits"), NETWORKS)
@pytest.mark.skipif(not FULL, reason="whole networks take a while; LOWBIT_FULL=1 exports them")
def test_networks(target: str, name: str, w_bits: int, a_bits: int) -> None:
    require_native()
    from lowbit.models import build

    model = lowbit.convert(build(name, w_bits, a_bits, image=32, classes=10)).model
    image = np.random.default_rng(2).normal(size=(1, 3, 32, 32)).astype(np.float32)
    back = assert_equal_models(target, model, [{"input": image}])
    if name == "resnet18" and w_bits == 8:
        assert counts(back) == counts(model), "residual regions and the mean are found again"


# ---- single nodes: every op and epilogue, whether the converter writes it today or not


def single_node(node: random_nodes.Node) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    """A model of one lowbit node, its feeds, and what the definition of the op says."""
    from lowbit import _native, ops

    schema = next(s for s in _native.schemas() if s["name"] == node.op_type)
    names, constants, inputs, feeds = [], [], [], {}
    for i, array in enumerate(node.inputs):
        spec = schema["inputs"][min(i, len(schema["inputs"]) - 1)]
        name = "" if array is None else f"{spec['name']}{i}"
        names.append(name)
        if array is None:
            continue
        array = np.asarray(array)
        if spec["constant"]:
            constants.append(numpy_helper.from_array(array, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
            feeds[name] = array
    while not names[-1]:
        names.pop()
    expected = ops.evaluate(node.op_type, node.attrs, node.inputs)
    attributes = {k: v for k, v in node.attrs.items() if not isinstance(v, (list, tuple)) or len(v)}
    proto = helper.make_node(node.op_type, names, ["y"], name="n", domain="ai.lowbit", **attributes)
    y = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(expected.dtype), expected.shape)
    graph = helper.make_graph([proto], "one", inputs, [y], constants)
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("ai.lowbit", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds, expected


def _ops() -> list[str]:
    from lowbit.ops import DEFINITIONS

    return list(DEFINITIONS)


@pytest.mark.parametrize("target", ["qonnx", "qdq"])
@pytest.mark.parametrize("op_type", _ops())
def test_single_nodes(target: str, op_type: str, seeds) -> None:
    require_native()
    from lowbit import _native, ops

    if op_type not in {schema["name"] for schema in _native.schemas()}:
        pytest.skip(f"the native module has no {op_type}")
    for seed in seeds(12):
        node = random_nodes.make(op_type, np.random.default_rng([seed, 4]))
        model, feeds, expected = single_node(node)
        exported = exported_to(target, model)
        if exported is None:
            continue
        (got,) = run(target, exported, feeds)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), node
        same = (got == expected) | ((got != got) & (expected != expected))
        if op_type in ("LowBitQuantize", "LowBitThreshold"):  # which code a NaN gets, ONNX leaves open
            nan = np.isnan(next(iter(feeds.values())))
            same |= np.moveaxis(nan, 1, -1) if node.attrs.get("to_channels_last") else nan
        if op_type == "LowBitNormalization":  # float operators, which sum in another order
            with np.errstate(all="ignore"):
                chain = ops.chain(op_type, node.attrs, node.inputs)
            assert chain is not None
            same |= chain.explains(got, expected)
        assert same.all(), f"seed {seed}: {(~same).sum()} of {same.size} differ: {node}"


EXACT_IN_STOCK = [
    "LowBitAdd", "LowBitMul", "LowBitAffine", "LowBitRequantize", "LowBitConcat", "LowBitLookup",
    "LowBitMaxPool", "LowBitResize",
]  # fmt: skip


@pytest.mark.parametrize("op_type", EXACT_IN_STOCK)
def test_stock_onnxruntime_computes_exported_qdq(op_type: str, seeds) -> None:
    """Elementwise ops and moves are exact in stock ONNX Runtime too, without its optimizations."""
    require_native()
    for seed in seeds(8):
        node = random_nodes.make(op_type, np.random.default_rng([seed, 5]))
        if node.attrs.get("mode", "nearest") != "nearest":  # a Resize that computes, in an order of its own
            continue
        model, feeds, expected = single_node(node)
        (got,) = stock_run(lowbit.export(model, to="qdq").model, feeds, optimize=False)
        np.testing.assert_array_equal(got, expected, err_msg=f"seed {seed}")


@pytest.mark.parametrize("bits", ["w8a8", "w4a4", "w2a2", "w1a2"])
@pytest.mark.parametrize("optimize", [False, True])
def test_stock_onnxruntime_runs_exported_digits(bits: str, optimize: bool) -> None:
    require_native()
    from lowbit.models.digits import model_path

    result = lowbit.convert(model_path(bits))
    exported = lowbit.export(result.model, to="qdq").model
    (value,) = exported.graph.input
    shape = (4, *(d.dim_value for d in value.type.tensor_type.shape.dim[1:]))
    feeds = {value.name: np.random.default_rng(3).uniform(0, 16, shape).astype(np.float32)}
    (theirs,) = stock_run(exported, feeds, optimize=optimize)
    (ours,) = lowbit_session(result.model).run(None, feeds)
    assert (theirs.argmax(axis=1) == ours.argmax(axis=1)).all()
    # Their float convolutions and fused averages round differently at ties; whole codes may flip.
    assert np.abs(theirs - ours).max() <= 0.1 * np.abs(ours).max()


# ---- what the graphs look like


def test_a_requantizing_convolution_in_qonnx_words() -> None:
    """Conv -> Mul(multiplier) -> Quant of scale 1, integers all along."""
    require_native()
    rng = np.random.default_rng(0)
    x = random_nodes.codes(rng, [1, 5, 5, 3])
    w = rng.integers(-8, 8, (4, 27)).astype(np.int8)
    scales = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    zero = np.zeros((), np.int32)
    node = random_nodes.Node(
        "LowBitConv",
        {"kernel_shape": [3, 3], "in_channels": 3, "out_channels": 4, "w_bits": 4, "w_encoding": "signed",
         "y_bits": 4},
        [x, lowbit.ops.pack(w, 4), np.float32(0.05), zero, scales, zero, None, np.float32(0.7), zero],
    )  # fmt: skip
    model, _, _ = single_node(node)
    exported = lowbit.export(model, to="qonnx").model
    values = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    nodes = {n.op_type: n for n in exported.graph.node}
    assert nodes["Conv"].name == "n"
    multiplier = np.float32(np.float32(0.05) * scales) / np.float32(0.7)
    np.testing.assert_array_equal(values[nodes["Mul"].input[1]].reshape(-1), multiplier)
    quants = [n for n in exported.graph.node if n.op_type == "Quant"]
    assert all(values[n.input[1]] == 1 and values[n.input[2]] == 0 for n in quants)
    weights = values[quants[0].input[0]]
    np.testing.assert_array_equal(weights, np.moveaxis(w.reshape(4, 3, 3, 3), -1, 1))
    assert [float(values[n.input[3]]) for n in quants] == [4, 4]


def test_bipolar_weights_and_activations_in_qonnx_words() -> None:
    require_native()
    for seed in range(40):
        node = random_nodes.make("APConv", np.random.default_rng(seed), bipolar=True, x_bits=1, w_bits=1)
        if node.attrs["x_encoding"] == "bipolar":
            break
    model, feeds, expected = single_node(node)
    exported = lowbit.export(model, to="qonnx").model
    assert counts(exported)["BipolarQuant"] == 1
    (got,) = run("qonnx", exported, feeds)
    np.testing.assert_array_equal(got, expected)


def batch_normalization(gamma: list[float], y_bits: int = 2) -> random_nodes.Node:
    """A 1x1 convolution that counts the thresholds of BatchNormalization -> quantizer of scale 1."""
    rng = np.random.default_rng(7)
    channels, count = len(gamma), 2**y_bits - 1
    w = rng.integers(-8, 8, (channels, 6)).astype(np.int8)
    acc = np.arange(-15 * 48, 15 * 48 + 1)
    thresholds = np.zeros((channels, count), np.int32)
    for c, slope in enumerate(gamma):
        v = (acc.astype(np.float32) * np.float32(0.01)) * np.float32(slope) + np.float32(0.3 * c)
        codes = np.clip(np.rint(v), 0, count)
        for k in range(count):
            reached = acc[codes > k]
            if slope >= 0:
                thresholds[c, k] = reached[0] if reached.size else 2**31 - 1
            else:
                thresholds[c, k] = reached[-1] if reached.size else -(2**31)
    direction = np.where(np.asarray(gamma) < 0, -1, 1).astype(np.int32)
    zero = np.zeros((), np.int32)
    return random_nodes.Node(
        "LowBitConv",
        {"kernel_shape": [1, 1], "in_channels": 6, "out_channels": channels, "w_bits": 4, "x_bits": 4,
         "w_encoding": "signed", "y_bits": y_bits, "epilogue": "thresholds"},
        [random_nodes.codes(rng, [2, 4, 4, 6], 4), lowbit.ops.pack(w, 4), np.float32(0.1), zero,
         np.float32(0.1), zero, None, None, None, thresholds, np.zeros(channels, np.int32), direction],
    )  # fmt: skip


def test_thresholds_on_a_line_are_a_quantizer() -> None:
    """QDQ says what BatchNormalization and a quantizer count, falling and constant channels too."""
    require_native()
    node = batch_normalization([0.97, 0.37, -2.2, 0.0])
    model, feeds, expected = single_node(node)
    assert len(np.unique(expected)) == 4
    exported = lowbit.export(model, to="qdq").model
    assert {"Conv", "Mul", "Add", "QuantizeLinear"} <= set(counts(exported))
    (got,) = run("qdq", exported, feeds)
    np.testing.assert_array_equal(got, expected)
    assert_equal_models("qdq", model, [feeds])
    assert_equal_models("qonnx", model, [feeds])


def test_thresholds_off_a_line_are_refused() -> None:
    require_native()
    node = batch_normalization([1.0, 0.37])
    node.inputs[9][1] = [10, 11, 600]
    model, _, _ = single_node(node)
    with pytest.raises(lowbit.UnsupportedError, match=r"LowBitConv 'n'.*thresholds"):
        lowbit.export(model, to="qdq")
    assert counts(lowbit.export(model, to="qonnx").model)["MultiThreshold"] == 1


def test_names_and_metadata() -> None:
    require_native()
    from lowbit.models.digits import model_path

    result = lowbit.convert(model_path("w4a4"))
    onnx.helper.set_model_props(
        result.model, {**{p.key: p.value for p in result.model.metadata_props}, "author": "somebody"}
    )
    original = onnx.load(model_path("w4a4"))
    for target in ("qonnx", "qdq"):
        exported = lowbit.export(result.model, to=target)
        told = {p.key: p.value for p in exported.model.metadata_props}
        assert told["author"] == "somebody"
        assert told["lowbit.exported_to"] == target
        assert told["lowbit.version"] == lowbit.__version__
        assert len(told["lowbit.source_sha256"]) == 64
        assert "lowbit.provenance" not in told
        convs = {n.name for n in original.graph.node if n.op_type == "Conv"}
        assert convs == {n.name for n in exported.model.graph.node if n.op_type == "Conv"}
        codes = {n.output[0] for n in original.graph.node if n.op_type == "QuantizeLinear"}
        present = {name for n in exported.model.graph.node for name in n.output}
        assert len(codes & present) >= len(convs), "tensors of codes keep their names"
        assert all(node.form for node in exported.nodes)
        json.dumps(exported.to_dict())


@pytest.mark.parametrize("name", ["narrow_types.w_s4_a_u4", "narrow_types.w_s2_a_u4"])
def test_sub_byte_weights(name: str) -> None:
    require_native()
    built = CASES[name].build(1)
    model = lowbit.convert(built.model).model
    exported = lowbit.export(model, to="qdq", sub_byte=True).model
    kinds = {onnx.TensorProto.DataType.Name(t.data_type) for t in exported.graph.initializer}
    assert kinds & {"INT4", "INT2", "UINT4", "UINT2"}
    feeds = built.feed(**built.sizes[0])
    (ours,), (theirs,) = lowbit_session(model).run(None, feeds), run("qdq", exported, feeds)
    np.testing.assert_array_equal(ours, theirs)
    back = lowbit_session(lowbit.convert(exported).model).run(None, feeds)
    np.testing.assert_array_equal(ours, back[0])


def test_tables_come_back_as_tables(seeds) -> None:
    """A Gather from a table of codes, one for all channels or one each, is read as LowBitLookup again."""
    require_native()
    ranks = set()
    for seed in seeds(12):
        node = random_nodes.make("LowBitLookup", np.random.default_rng([seed, 9]))
        ranks.add(node.inputs[1].ndim)
        model, feeds, expected = single_node(node)
        back = lowbit.convert(lowbit.export(model, to="qdq").model).model
        assert "LowBitLookup" in counts(back)
        assert not {"Gather", "Cast"} & set(counts(back))
        np.testing.assert_array_equal(lowbit_session(back).run(None, feeds)[0], expected)
    assert ranks == {1, 2}


# ---- what cannot be exported


def test_thresholds_are_refused_by_qdq_with_every_node_named() -> None:
    require_native()
    for seed in range(20):
        node = random_nodes.make("LowBitThreshold", np.random.default_rng(seed))
        model, _, _ = single_node(node)
        with pytest.raises(lowbit.UnsupportedError, match=r"LowBitThreshold 'n'.*thresholds"):
            lowbit.export(model, to="qdq")


def test_other_models_are_refused(tmp_path) -> None:
    require_native()
    built = CASES["ort_quantizer.no_bias"].build(0)
    with pytest.raises(lowbit.ModelError, match="lowbit convert"):
        lowbit.export(built.model, to="qdq")
    with pytest.raises(lowbit.LowBitError, match="qonnx, qdq"):
        lowbit.export(built.model, to="tflite")
    with pytest.raises(lowbit.ModelError, match="no such file"):
        lowbit.export(tmp_path / "none.onnx", to="qdq")


def test_files_are_written_whole_and_never_over_the_input(tmp_path) -> None:
    require_native()
    source, target = tmp_path / "lowbit.onnx", tmp_path / "qdq.onnx"
    lowbit.convert(CASES["ort_quantizer.no_bias"].build(0).model, source)
    before = source.read_bytes()
    assert lowbit.export(source, target, to="qdq").output == target
    with pytest.raises(lowbit.OutputError, match="exists already"):
        lowbit.export(source, target, to="qonnx")
    lowbit.export(source, target, to="qonnx", overwrite=True)
    assert any(node.domain == QONNX for node in onnx.load(target).graph.node)
    with pytest.raises(lowbit.OutputError, match="never overwritten"):
        lowbit.export(source, source, to="qdq", overwrite=True)
    assert source.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lowbit.onnx", "qdq.onnx"]


def test_export_is_deterministic_and_leaves_its_input_alone() -> None:
    require_native()
    model = lowbit.convert(CASES["constructs.dense_block"].build(1).model).model
    before = model.SerializeToString(deterministic=True)
    for target in ("qonnx", "qdq"):
        first, second = (
            lowbit.export(model, to=target).model.SerializeToString(deterministic=True) for _ in range(2)
        )
        assert first == second
    assert model.SerializeToString(deterministic=True) == before
