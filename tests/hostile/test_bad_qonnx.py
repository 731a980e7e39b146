"""QONNX files that contradict themselves: one clear error each, or a conversion that is right."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.dialects import qonnx_oracle
from tests.dialects.graphs.qonnx import CASES, QonnxGraph, Quant, conv, entry
from tests.support import lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")

SCALE, ZERO, BITS = 1, 2, 3


@pytest.fixture
def model() -> onnx.ModelProto:
    """A convolution between two quantizers, and one more."""
    require_native()
    return CASES["between_relu"].build(1).model


def _activation_quant(model: onnx.ModelProto) -> onnx.NodeProto:
    """The Quant behind the Relu."""
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    return next(node for node in model.graph.node if relu.output[0] in node.input)


def _weight_quant(model: onnx.ModelProto) -> onnx.NodeProto:
    quantized = next(node for node in model.graph.node if node.op_type == "Conv").input[1]
    return next(node for node in model.graph.node if quantized in node.output)


def _set(model: onnx.ModelProto, node: onnx.NodeProto, index: int, value) -> None:
    """Gives a node another constant for one of its parameters."""
    name = f"changed_{index}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    node.input[index] = name


def _refuse(model: onnx.ModelProto, node: onnx.NodeProto, *patterns: str) -> None:
    with pytest.raises(lowbit.LowBitError) as caught:
        lowbit.convert(model)
    message = str(caught.value)
    assert node.name in message
    assert "\n" not in message
    assert "expected" in message
    for pattern in patterns:
        assert re.search(pattern, message), message


@pytest.mark.parametrize("which", [_activation_quant, _weight_quant], ids=["activation", "weight"])
@pytest.mark.parametrize(
    ("index", "value", "pattern"),
    [
        (BITS, 0.0, "bit width 0"),
        (BITS, -4.0, "bit width -4"),
        (BITS, 31.5, r"bit width 31\.5"),
        (BITS, 33.0, "bit width 33"),
        (BITS, np.nan, "bit width nan"),
        (BITS, np.inf, "bit width inf"),
        (BITS, 1e30, "bit width 1e"),
        (BITS, [4.0, 4.0], r"bit width of shape \[2\]"),
        (BITS, np.zeros(0), "bit width"),
        (SCALE, 0.0, r"scale 0\.0"),
        (SCALE, -0.1, r"scale -0\.1"),
        (SCALE, np.nan, "scale nan"),
        (SCALE, np.inf, "scale inf"),
        (SCALE, np.ones(5), r"scale of shape \[5\].*broadcast"),
        (SCALE, np.ones((7, 1, 1)), r"scale of shape \[7, 1, 1\].*broadcast"),
        (SCALE, np.ones((2, 1, 1, 1, 1)), r"scale of shape \[2, 1, 1, 1, 1\].*broadcast"),
        (SCALE, np.zeros(0), "scale"),
        (ZERO, np.nan, "zero point nan"),
        (ZERO, np.ones(5), r"zero point of shape \[5\].*broadcast"),
    ],
)
def test_parameter_that_no_quantizer_has(model, which, index: int, value, pattern: str) -> None:
    node = which(model)
    _set(model, node, index, np.asarray(value, np.float32))
    _refuse(model, node, pattern)


def test_parameter_of_a_wrong_type(model) -> None:
    node = _activation_quant(model)
    model.graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [], [b"four"]))
    node.input[BITS] = "text"
    _refuse(model, node, "bit width of type")


def test_parameter_computed_at_run_time(model) -> None:
    node = _activation_quant(model)
    model.graph.input.append(helper.make_tensor_value_info("fed", TensorProto.FLOAT, []))
    node.input[SCALE] = "fed"
    _refuse(model, node, "scale at run time")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_missing_parameters(model, count: int) -> None:
    node = _activation_quant(model)
    del node.input[count:]
    _refuse(model, node, "has no")


def test_unknown_rounding(model) -> None:
    node = _activation_quant(model)
    next(a for a in node.attribute if a.name == "rounding_mode").s = b"SIDEWAYS"
    _refuse(model, node, "SIDEWAYS", "HALF_UP")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rounding_mode", b"ROUN\xd4"), ("rounding_mode", 3), ("signed", "yes"), ("narrow", 0.5)],
)
def test_attribute_of_a_wrong_type(model, name: str, value) -> None:
    node = _activation_quant(model)
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    with pytest.raises(lowbit.LowBitError, match=f"'{node.name}'.*{name}.*, not "):
        lowbit.convert(model)


@pytest.mark.parametrize("element", [TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8])
def test_quantizer_of_integers(model, element: int) -> None:
    first = model.graph.node[0]
    model.graph.input[0].type.tensor_type.elem_type = element
    _refuse(model, first, "quantizes a tensor of type", "Cast")


def test_float_quant(model) -> None:
    node = _activation_quant(model)
    node.op_type = "FloatQuant"
    with pytest.raises(lowbit.LowBitError, match=f"FloatQuant '{node.name}'.*floating-point"):
        lowbit.convert(model)


@pytest.mark.parametrize("bits", [9, 16, 24, 32])
def test_wide_activations_stay_in_float(model, bits: int) -> None:
    """They are valid; ONNX Runtime computes them in float."""
    node = _activation_quant(model)
    _set(model, node, SCALE, np.float32(0.001))
    _set(model, node, BITS, np.float32(bits))
    result = lowbit.convert(model)
    kept = next(entry for entry in result.report.kept if entry.name == node.name)
    assert f"{bits} bits" in kept.reason
    feeds = CASES["between_relu"].build(1).feed()
    (ours,), (meant,) = lowbit_session(result.model).run(None, feeds), qonnx_oracle.run(model, feeds)
    np.testing.assert_allclose(ours, meant, rtol=1e-5, atol=1e-5 * np.abs(meant).max())


@pytest.mark.parametrize("op_type", ["Quant", "MultiThreshold"])
def test_quantizer_in_a_subgraph(model, op_type: str) -> None:
    """Nothing is converted there, but what ONNX Runtime could not run is written in standard ops."""
    node = _activation_quant(model)
    if op_type == "MultiThreshold":
        thresholds = numpy_helper.from_array(np.array([[0.5, 1.5, 2.5]], np.float32), "thresholds")
        model.graph.initializer.append(thresholds)
        made = helper.make_node(
            op_type, [node.input[0], "thresholds"], list(node.output), node.name, domain=node.domain
        )
        node.CopyFrom(made)
    feeds = CASES["between_relu"].build(1).feed()
    meant = qonnx_oracle.run(model, feeds)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    output = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    inner.output[0] = "inner"
    branch = helper.make_graph([inner], "branch", [], [output])
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(True), "always"))
    outer = helper.make_node("If", ["always"], list(node.output), then_branch=branch, else_branch=branch)
    outer.name = "branches"
    node.CopyFrom(outer)
    result = lowbit.convert(model)
    kept = next(entry for entry in result.report.kept if entry.name == "branches")
    assert op_type in kept.reason
    assert "subgraph" in kept.reason
    with pytest.raises(lowbit.UnsupportedError, match="subgraph"):
        lowbit.convert(model, strict=True)
    for ours, expected in zip(lowbit_session(result.model).run(None, feeds), meant, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# -- MultiThreshold


@pytest.mark.parametrize(
    ("thresholds", "pattern"),
    [
        (np.ones((8, 3, 1)), r"shape \[8, 3, 1\]"),
        (np.ones((5, 3)), r"shape \[5, 3\].*\[8, n\]"),
        (np.ones((8, 0)), r"shape \[8, 0\]"),
        (np.full((8, 3), np.nan), "no number"),
    ],
)
def test_bad_thresholds(thresholds, pattern: str) -> None:
    model = CASES["multithreshold_unsigned"].build(1).model
    node = next(n for n in model.graph.node if n.op_type == "MultiThreshold")
    _set(model, node, 1, thresholds.astype(np.float32))
    _refuse(model, node, pattern)


@pytest.mark.parametrize(
    ("attribute", "value", "pattern"),
    [
        ("out_scale", np.inf, "gives inf"),
        ("out_bias", np.nan, "nan"),
        ("data_layout", "NHWDC", "layout NHWDC on a tensor of rank 4"),
    ],
)
def test_bad_results_and_layouts_of_thresholds(attribute: str, value, pattern: str) -> None:
    model = CASES["multithreshold_unsigned"].build(1).model
    node = next(n for n in model.graph.node if n.op_type == "MultiThreshold")
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    _refuse(model, node, pattern)


def test_weights_that_are_not_numbers(model) -> None:
    node = _weight_quant(model)
    weights = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[0])
    array = numpy_helper.to_array(weights).copy()
    array.flat[0] = np.nan
    weights.CopyFrom(numpy_helper.from_array(array, weights.name))
    _refuse(model, node, "not a number")


def test_more_thresholds_than_codes() -> None:
    """They cannot be codes, but they can be counted in float."""
    built = CASES["multithreshold_unsigned"].build(1)
    node = next(n for n in built.model.graph.node if n.op_type == "MultiThreshold")
    _set(built.model, node, 1, np.sort(np.random.default_rng(0).normal(size=(8, 300)) * 9).astype(np.float32))
    result = lowbit.convert(built.model)
    kept = next(entry for entry in result.report.kept if entry.name == node.name)
    assert "300" in kept.reason
    feeds = built.feed()
    (ours,), (meant,) = lowbit_session(result.model).run(None, feeds), qonnx_oracle.run(built.model, feeds)
    np.testing.assert_allclose(ours, meant, rtol=1e-6)


# -- graphs


def test_cycle(model) -> None:
    first, last = model.graph.node[0], model.graph.node[-1]
    first.input[0] = last.output[0]
    with pytest.raises(lowbit.LowBitError, match="cycle"):
        lowbit.convert(model)


def _row(op: str, count: int) -> onnx.ModelProto:
    """Many equal nodes in a row behind a convolution."""
    g = QonnxGraph(f"row of {op}", 1)
    x, xq = entry(g, [1, 4, 3, 3], Quant(np.float32(0.1), 4))
    y, _, _ = conv(g, x, xq, (4, 4, 1, 1))
    parameters = [g.floats(v) for v in (0.1, 0.0, 4.0)]

    def quant(value: str) -> str:
        return g.node("Quant", [value, *parameters], domain=g.qonnx_domain, signed=1, narrow=0)

    one = g.floats(1.0)
    for _ in range(count):
        if op == "Quant":
            y = quant(y)
        elif op == "Mul":
            y = g.node("Mul", [y, one])
        elif op == "Transpose":
            y = g.node("Transpose", [y], perm=[0, 1, 3, 2])
        elif op == "MaxPool":
            y = g.node("MaxPool", [quant(y)], kernel_shape=[1, 1])
        elif op == "constant":
            one = g.node("Mul", [one, one])
        else:
            y = g.node(op, [y])
    g.output(quant(g.node("Mul", [y, one])), [1, 4, 3, 3])
    return g.proto()


# Python's own limit of recursion is 1,000.
_LONG = 1_100


@pytest.mark.parametrize("op", ["Relu", "Mul", "Quant", "Transpose", "MaxPool", "constant"])
def test_many_nodes_in_a_row(op: str) -> None:
    """No recursion: a row of nodes as long as one likes is converted."""
    require_native()
    model = _row(op, _LONG)
    result = lowbit.convert(model, verify=False)
    feeds = {"input0": np.random.default_rng(0).normal(size=(1, 4, 3, 3)).astype(np.float32)}
    (ours,), (meant,) = lowbit_session(result.model).run(None, feeds), qonnx_oracle.run(model, feeds)
    np.testing.assert_array_equal(ours, meant)
