"""Float16 around int8, read as float32: the conversion of the same model in float32."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lowbit.cli import cli
from lowbit.frontends.half import SUFFIX, has_half, is_around_codes, widened
from lowbit.models.half import in_half
from onnx import TensorProto, helper, numpy_helper

from tests.dialects.graphs import CASES
from tests.dialects.graphs.builder import Graph, Quant
from tests.dialects.graphs.random_network import random_network
from tests.support import lowbit_session, stock_run

_HALF, _FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def fits(model: onnx.ModelProto) -> bool:
    """Whether ONNX has the model in float16: not every operator is defined there."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:
        return False
    return True


def lowbit_ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.op_type.startswith(("LowBit", "AP")))


def test_constructs_convert_as_in_float32() -> None:
    """Every other one: what float16 stands around differs less than what is in it."""
    compared = 0
    for name, case in itertools.islice(CASES.items(), 0, None, 2):
        model = case.build(0).model
        if has_half(model):
            continue
        half = in_half(model, ends=compared % 2 == 0)
        if not fits(half) or not is_around_codes(half):
            continue
        expected = lowbit_ops(lowbit.convert(model, all_regions=True).model)
        if not expected:
            continue
        result = lowbit.convert(half, all_regions=True)
        # A scale that float16 makes 0 or a power of two has other rules.
        assert lowbit_ops(result.model) == expected or "scale" in name, name
        compared += 1
    assert compared > 50


FITTING = [seed for seed in range(8) if fits(in_half(random_network(seed).model, ends=False))]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("seed", FITTING)
def test_numbers_are_those_of_float32(seed: int, ends: bool) -> None:
    built = random_network(seed)
    half = in_half(built.model, ends=ends)
    result = lowbit.convert(half)
    assert has_half(half)
    assert any("float32" in warning for warning in result.report.warnings)
    for given, kept in zip(half.graph.output, result.model.graph.output, strict=True):
        assert given == kept
    feeds = {
        name: array.astype(np.float16) if ends and array.dtype == np.float32 else array
        for name, array in built.feed(0, **built.sizes[0]).items()
    }
    wide = widened(half)
    onnx.checker.check_model(wide, full_check=True)
    float32 = lowbit.convert(wide)
    expected = lowbit_session(float32.model).run(None, feeds)
    for found, wanted in zip(lowbit_session(result.model).run(None, feeds), expected, strict=True):
        assert np.array_equal(found, wanted)
    report = lowbit.verify(result, half, data=feeds if not ends else None, samples=1)
    assert report.ok
    assert report.float16 is not None
    assert report.float16.total("equal") > 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "float16" in str(case.left)])
def test_float16_behind_casts(name: str) -> None:
    """Quantizers in float32 and layers in float16, or the other way around."""
    built = CASES[name].build(0)
    result = lowbit.convert(built.model)
    assert lowbit_ops(result.model)["LowBitConv"] == 1
    report = lowbit.verify(result, built.model, data=built.feed(0, **built.sizes[0]))
    assert report.float16 is not None
    assert report.ok


def test_verify_explains_roundings_to_float16_and_nothing_else() -> None:
    """A scale in front of a convolution that is 2 % larger is no rounding."""
    g = Graph("conv", 1)
    grid, fine = Quant(np.float32(0.02), np.asarray(0), "s8"), Quant(np.float32(0.002), np.asarray(0), "s8")
    codes = g.const(g.rng.integers(-127, 128, (8, 16, 3, 3)).astype(np.int8))
    weights = g.dq(codes, Quant(np.full(8, 0.0003, np.float32), np.zeros(8), "s8", 0))
    y = g.node("Conv", [g.dq(g.q(g.input((4, 16, 16, 16)), grid), grid), weights])
    g.output(g.dq(g.q(y, fine), fine), (4, 8, 14, 14))
    half = in_half(g.proto(), ends=False)
    feed = {"input0": g.rng.normal(0, 1, (4, 16, 16, 16)).astype(np.float32)}
    result = lowbit.convert(half)
    letter = lowbit.verify(result, half, data=feed).float16
    assert letter is not None
    assert letter.ok
    (conv,) = (node for node in letter.nodes if node.op_type == "LowBitConv")
    assert 0 < conv.near_tie < 0.1 * conv.equal
    assert not lowbit.verify(result, scaled(half, np.float16(0.0003), 1.02), data=feed).ok


def scaled(model: onnx.ModelProto, scale: np.float16, factor: float) -> onnx.ModelProto:
    """A model whose float16 constants of one value are another one."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float16 and np.all(array == scale):
            tensor.CopyFrom(numpy_helper.from_array((array * factor).astype(np.float16), tensor.name))
    return model


def test_what_gains_nothing_stays_in_float16() -> None:
    """Weights alone that are quantized; activations whose scale is computed; inputs that are cast at once."""
    for build in (weights_alone, computed_scale):
        half = in_half(build(), ends=True)
        result = lowbit.convert(half)
        assert has_half(result.model)
        assert not any("float32" in warning for warning in result.report.warnings)
    once = lowbit.convert(in_half(random_network(FITTING[0]).model, ends=True)).model
    assert not has_half(once)
    assert not lowbit.convert(once).report.converted, "a converted model is no float16 one"


def weights_alone() -> onnx.ModelProto:
    g = Graph("weights_alone", 1)
    codes = g.const(g.rng.integers(-127, 128, (16, 8)).astype(np.int8))
    weights = g.dq(codes, Quant(np.float32(0.01), np.asarray(0), "s8"))
    g.output(g.node("MatMul", [g.input((2, 16)), weights]), (2, 8))
    return g.proto()


def computed_scale() -> onnx.ModelProto:
    g = Graph("computed_scale", 1)
    x = g.input((2, 16))
    scale = g.node("Mul", [g.node("ReduceMax", [g.node("Abs", [x])], keepdims=0), g.const(np.float32(0.01))])
    zero = g.const(np.zeros((), np.int8))
    codes = g.node("QuantizeLinear", [x, scale, zero])
    g.output(g.node("DequantizeLinear", [codes, scale, zero]), (2, 16))
    return g.proto()


def test_interface_and_inner_graphs() -> None:
    """Constants, Casts, subgraphs, and an input that is an output."""
    half = np.float16
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["then_y"])],
        "then",
        [],
        [helper.make_tensor_value_info("then_y", _HALF, [2])],
        [numpy_helper.from_array(np.ones(2, half), "one")],
    )
    other = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.full(2, 0.5, half))),
         helper.make_node("Sub", ["x", "c"], ["else_y"])],
        "else",
        [],
        [helper.make_tensor_value_info("else_y", _HALF, [2])],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other),
         helper.make_node("Cast", ["count"], ["z"], to=_HALF)],
        "inner",
        [helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
         helper.make_tensor_value_info("x", _HALF, [2]),
         helper.make_tensor_value_info("count", TensorProto.INT64, [1]),
         helper.make_tensor_value_info("same", _HALF, [1])],
        [helper.make_tensor_value_info("y", _HALF, [2]), helper.make_tensor_value_info("z", _HALF, [1]),
         helper.make_tensor_value_info("same", _HALF, [1])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    wide = widened(model)
    onnx.checker.check_model(wide, full_check=True)
    assert list(wide.graph.input) == list(graph.input)
    assert list(wide.graph.output) == list(graph.output)
    assert {f"x{SUFFIX}", f"y{SUFFIX}"} <= {name for node in wide.graph.node for name in node.output}
    for flag in (True, False):
        feeds = {
            "flag": np.asarray(flag), "x": np.asarray([0.25, 3], half), "count": np.asarray([7]),
            "same": np.asarray([2], half),
        }  # fmt: skip
        for found, wanted in zip(
            stock_run(wide, feeds, optimize=False), stock_run(model, feeds, optimize=False), strict=True
        ):
            assert found.dtype == half
            assert np.array_equal(found, wanted)


def test_command(tmp_path: Path) -> None:
    source, target = tmp_path / "half.onnx", tmp_path / "half.lowbit.onnx"
    onnx.save(in_half(random_network(FITTING[0]).model, ends=False), source)
    done = CliRunner().invoke(cli, ["convert", str(source), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "computed in float32" in done.output + done.stderr
    kept = tmp_path / "kept.onnx"
    done_kept = CliRunner().invoke(cli, ["convert", str(source), "-o", str(kept), "--keep-float16"])
    assert done_kept.exit_code == 0, done_kept.output
    assert has_half(onnx.load(kept))
    assert not has_half(onnx.load(target))
    done = CliRunner().invoke(cli, ["verify", str(target), "--against", str(source), "-n", "1"])
    assert done.exit_code == 0, done.output
