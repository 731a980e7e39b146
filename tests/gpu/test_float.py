"""Float convolutions and products with operands of each precision."""

from __future__ import annotations

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

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
    if precision == "winograd":
        direct = opened(model).run(None, {"x": x})[0]
        assert not np.array_equal(y, direct), "nothing was transformed"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        lowbit.LowBitError, match=r"float_precision.*expected float32, winograd, 3xtf32, tf32, float16"
    ):
        opened(float_network(), float_precision="int4")
