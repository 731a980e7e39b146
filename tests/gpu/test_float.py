"""Float convolutions and products with operands of each precision."""

from __future__ import annotations

import json

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.ep.graphs import Network

CHANNELS, OUTPUTS, CLASSES = 48, 72, 40
BITS = {"float32": 21, "winograd": 19.5, "3xtf32": 19.5, "tf32": 9.9, "float16": 9.9}
"""Errors are within 2^-bits of the sum of the magnitudes of 432 products (docs/numerics.md)."""


def float_network(stride: int = 2) -> onnx.ModelProto:
    """Convolution, Relu, pooling, Gemm; both products are outputs."""
    rng = np.random.default_rng(5)
    shapes = {"w": (OUTPUTS, CHANNELS, 3, 3), "b": (OUTPUTS,), "m": (OUTPUTS, CLASSES), "c": (CLASSES,)}
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["sums"], pads=[1, 1, 1, 1], strides=[stride, stride]),
        helper.make_node("Relu", ["sums"], ["y"]),
        helper.make_node("GlobalAveragePool", ["y"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "m", "c"], ["z"]),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", CHANNELS, "H", "W"])
    made = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", CLASSES]),
    ]
    graph = helper.make_graph(nodes, "floats", [image], made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def opened(model: onnx.ModelProto, **options: str) -> ort.InferenceSession:
    whole = ort.SessionOptions()
    whole.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return lowbit.session(
        model, device="cuda", sess_options=whole, provider_options={"float_regions": "1", **options}
    )


def magnitudes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network of the magnitudes of its constants."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.abs(numpy_helper.to_array(tensor)), tensor.name))
    return out


@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("batch", [1, 40])
def test_products_are_within_their_bounds(precision: str, batch: int) -> None:
    model = float_network(1 if precision == "winograd" else 2)
    x = np.random.default_rng(batch).standard_normal((batch, CHANNELS, 21, 13), dtype=np.float32)
    session = opened(model, float_precision=precision)
    y, z = session.run(None, {"x": x})
    again = opened(model, float_precision=precision, cuda_graph="0").run(None, {"x": x})
    assert np.array_equal(y, again[0]), "another bit from run to run"
    assert np.array_equal(z, again[1]), "another bit from run to run"

    expected_y, expected_z = lowbit.session(model).run(None, {"x": x})
    terms_y, terms_z = lowbit.session(magnitudes(model)).run(None, {"x": np.abs(x)})
    bound = 2.0 ** -BITS[precision]
    assert np.all(np.abs(y - expected_y) <= bound * terms_y)
    assert np.all(np.abs(z - expected_z) <= 2 * bound * terms_z)
    if precision in ("tf32", "float16"):
        assert not np.allclose(y, expected_y, rtol=0, atol=1e-6), "operands were not rounded"
    if precision == "winograd" and batch > 1:  # one image this small takes less time as it is
        direct = opened(model).run(None, {"x": x})[0]
        assert not np.array_equal(y, direct), "nothing was transformed"


@pytest.mark.parametrize("relu", [False, True])
def test_a_float_first_layer_makes_codes(
    relu: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Network(5)
    weights = net.const(net.rng.normal(0, 0.2, (20, 3, 3, 3)).astype(np.float32), "floats")
    y = net.node("Conv", ["x", weights], pads=[1] * 4, strides=[2, 2])
    last = net.layer(net.grid(net.node("Relu", [y]) if relu else y), 20, 12, 3)
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", channels, "H", "W"])
        for name, channels in (("x", 3), (last, 12))
    ]
    graph = helper.make_graph(net.nodes, "codes", values[:1], values[1:], net.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    converted = lowbit.convert(model).model
    x = np.random.default_rng(9).standard_normal((2, 3, 19, 22), dtype=np.float32)
    with monkeypatch.context() as printing:
        printing.setenv("LOWBIT_PRINT_PLAN", "json")
        made = opened(converted).run(None, {"x": x})[0]
    (plan,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"region"' in line]
    assert len(plan["steps"][0]["nodes"]) == (3 if relu else 2)
    assert "to codes" in plan["steps"][0]["kernel"]
    assert np.array_equal(made, opened(converted, reference="1").run(None, {"x": x})[0])


def residual_network() -> onnx.ModelProto:
    """Additions: of two convolutions, of one and its input, of one and means, of one that is read twice."""
    rng = np.random.default_rng(6)
    constants = [
        numpy_helper.from_array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12, f"w{i}")
        for i in range(5)
    ]

    def conv(x: str, w: int, y: str) -> onnx.NodeProto:
        return helper.make_node("Conv", [x, f"w{w}"], [y], pads=[1, 1, 1, 1])

    nodes = [
        conv("x", 0, "left"),
        conv("x", 1, "right"),
        helper.make_node("Add", ["right", "left"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["first"]),
        conv("first", 2, "second"),
        helper.make_node("Add", ["first", "second"], ["third"]),
        helper.make_node("GlobalAveragePool", ["third"], ["means"]),
        conv("third", 3, "fourth"),
        helper.make_node("Add", ["fourth", "means"], ["fifth"]),
        helper.make_node("Clip", ["fifth", "low", "high"], ["sixth"]),
        conv("sixth", 4, "seventh"),
        helper.make_node("Add", ["seventh", "sixth"], ["eighth"]),
        helper.make_node("Add", ["seventh", "eighth"], ["y"]),
    ]
    constants += [numpy_helper.from_array(np.float32(v), n) for n, v in (("low", -1), ("high", 2))]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 16, "H", "W"])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16, "H", "W"])
    graph = helper.make_graph(nodes, "residuals", [image], [made], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("precision", ["float32", "winograd", "tf32"])
def test_an_addition_behind_a_product_is_a_part_of_it(
    precision: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = residual_network()
    for shape in ((2, 16, 11, 9), (3, 16, 8, 8)):
        x = np.random.default_rng(7).standard_normal(shape, dtype=np.float32)
        apart = opened(model, float_precision=precision, reference="1").run(None, {"x": x})[0]
        capfd.readouterr()
        with monkeypatch.context() as printing:
            printing.setenv("LOWBIT_PRINT_PLAN", "json")
            fused = opened(model, float_precision=precision).run(None, {"x": x})[0]
        (plan,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"region"' in line]
        kernels = [step["kernel"] for step in plan["steps"] if len(step["nodes"]) > 1]
        # The means have other dims; what is read twice is added by steps of their own. What two convolutions
        # read is turned for both of them.
        counts = [len(step["nodes"]) for step in plan["steps"] if step["nodes"]]
        assert counts == [1, 3, 2, 1, 3, 1, 1, 1]
        assert len(plan["steps"]) - len(counts) == (1 if precision == "tf32" else 0)
        assert ["float_binary" in kernel for kernel in kernels] == [False, False, True]
        assert np.array_equal(fused, apart), "fusing changed a number"
        expected = lowbit.session(model).run(None, {"x": x})[0]
        np.testing.assert_allclose(fused, expected, rtol=0, atol=2e-2 if precision == "tf32" else 2e-5)


@pytest.mark.parametrize("precision", ["3xtf32", "float16"])
def test_images_between_convolutions_have_their_channels_last(
    precision: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    constants, nodes = [], []

    def conv(x: str, outputs: int, channels: int, kernel: int, y: str) -> None:
        weights = rng.standard_normal((outputs, channels, kernel, kernel)) / np.sqrt(channels * kernel**2)
        constants.append(numpy_helper.from_array(weights.astype(np.float32), f"w_{y}"))
        nodes.append(helper.make_node("Conv", [x, f"w_{y}"], [y], pads=[kernel // 2] * 4))

    def node(op: str, inputs: list[str], y: str, **attributes: object) -> None:
        nodes.append(helper.make_node(op, inputs, [y], **attributes))

    conv("x", 24, 3, 5, "stem")
    node("MaxPool", ["stem"], "pooled", kernel_shape=[3, 3], strides=[2, 2])
    conv("pooled", 24, 24, 3, "left")
    conv("pooled", 24, 24, 1, "right")
    node("Add", ["left", "right"], "sum")
    node("Relu", ["sum"], "block")
    conv("block", 20, 24, 3, "odd")  # channels that are no multiple of 8
    node("Sigmoid", ["odd"], "y")
    node("GlobalAveragePool", ["block"], "means")
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"])
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "means")]
    graph = helper.make_graph(nodes, "nhwc", [image], made, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = rng.standard_normal((2, 3, 22, 19), dtype=np.float32)
    with monkeypatch.context() as printing:
        printing.setenv("LOWBIT_PRINT_PLAN", "json")
        y, means = opened(model, float_precision=precision).run(None, {"x": x})
    (plan,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"region"' in line]
    form = "(nhwc float16)" if precision == "float16" else "(nhwc)"
    # What leaves, and what a Sigmoid reads, lie as ONNX has them.
    assert [form in step["to"] for step in plan["steps"]] == [True] * 4 + [False] * 3
    # float32 tensors lie so without another bit; as float16 what is added and averaged has been rounded.
    plain = opened(model, float_precision=precision, reference="1").run(None, {"x": x})
    tolerance = 4e-3 if precision == "float16" else 0
    np.testing.assert_allclose(y, plain[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(means, plain[1], rtol=0, atol=tolerance)
    expected = lowbit.session(model).run(None, {"x": x})
    np.testing.assert_allclose(y, expected[0], rtol=0, atol=4e-3 if precision == "float16" else 1e-5)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        lowbit.LowBitError, match=r"float_precision.*expected float32, winograd, 3xtf32, tf32, float16"
    ):
        opened(float_network(), float_precision="int4")
