"""Small models for the tools: the shipped digits network, converted once, and a hand-made QDQ convolution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support import require_native

DIGITS = Path(__file__).resolve().parents[2] / "models" / "digits"


@pytest.fixture(scope="session")
def source() -> Path:
    """An unconverted QDQ model."""
    path = DIGITS / "digits_w8a8.onnx"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory) -> Path:
    """The same model, converted."""
    require_native()
    import lowbit

    output = tmp_path_factory.mktemp("converted") / "digits_lowbit.onnx"
    lowbit.convert(source, output)
    return output


def qdq_conv(*, weight_is_input: bool = False, dynamic: bool = False) -> onnx.ModelProto:
    """x -> Q -> DQ -> Conv -> Q -> DQ -> y; with weights fed at run time it cannot be converted."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-128, 128, (4, 3, 3, 3)).astype(np.int8)
    constants = {
        "xs": np.float32(0.05), "xz": np.uint8(120), "ws": np.float32(0.01), "wz": np.int8(0),
        "ys": np.float32(0.1), "yz": np.uint8(128),
    }  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"] if dynamic else [1, 3, 8, 8])
    ]
    if weight_is_input:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.INT8, weights.shape))
    else:
        constants["w"] = weights
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], "q_x"),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], "dq_x"),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], "dq_w"),
        helper.make_node("Conv", ["xd", "wd"], ["c"], "conv", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("QuantizeLinear", ["c", "ys", "yz"], ["yq"], "q_y"),
        helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"], "dq_y"),
    ]
    out = helper.make_tensor_value_info(
        "y", TensorProto.FLOAT, ["N", 4, "H", "W"] if dynamic else [1, 4, 8, 8]
    )
    graph = helper.make_graph(
        nodes, "qdq_conv", inputs, [out],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
