"""Float convolutions and products with operands of each precision."""

from __future__ import annotations

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

CHANNELS, OUTPUTS, CLASSES = 48, 72, 40
BITS = {"float32": 21, "3xtf32": 19.5, "tf32": 9.9, "float16": 9.9}
"""Errors are within 2^-bits of the sum of the magnitudes of 432 products (docs/numerics.md)."""


def float_network() -> onnx.ModelProto:
    """Convolution, Relu, pooling, Gemm; both products are outputs."""
    rng = np.random.default_rng(5)
    shapes = {"w": (OUTPUTS, CHANNELS, 3, 3), "b": (OUTPUTS,), "m": (OUTPUTS, CLASSES), "c": (CLASSES,)}
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["sums"], pads=[1, 1, 1, 1], strides=[2, 2]),
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
    model = float_network()
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


def residual_network() -> onnx.ModelProto:
    """Additions: of two convolutions, of one and its input, of one and a bias, of one that is read twice."""
    rng = np.random.default_rng(6)
    constants = [
        numpy_helper.from_array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12, f"w{i}")
        for i in range(5)
    ]
    constants.append(numpy_helper.from_array(rng.standard_normal((16, 1, 1)).astype(np.float32), "b"))

    def conv(x: str, w: int, y: str) -> onnx.NodeProto:
        return helper.make_node("Conv", [x, f"w{w}"], [y], pads=[1, 1, 1, 1])

    nodes = [
        conv("x", 0, "left"),
        conv("x", 1, "right"),
        helper.make_node("Add", ["right", "left"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["first"]),
        conv("first", 2, "second"),
        helper.make_node("Add", ["first", "second"], ["third"]),
        conv("third", 3, "fourth"),
        helper.make_node("Add", ["fourth", "b"], ["fifth"]),
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


def test_an_addition_behind_a_product_is_a_part_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    model = residual_network()
    x = np.random.default_rng(7).standard_normal((2, 16, 11, 9), dtype=np.float32)
    apart = opened(model, reference="1").run(None, {"x": x})[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_PRINT_PLAN", "1")
        fused = opened(model).run(None, {"x": x})[0]
    plan = capfd.readouterr().err
    assert plan.count("float_conv") == 5
    # One for the bias, which has other dims, and two behind the product that is read twice.
    assert plan.count("float_binary") == 2
    assert "unary" not in plan
    assert np.array_equal(fused, apart), "fusing changed a number"
    expected = lowbit.session(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(fused, expected, rtol=0, atol=2e-5)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(lowbit.LowBitError, match=r"float_precision.*expected float32, 3xtf32, tf32, float16"):
        opened(float_network(), float_precision="int4")
