"""Small converted models for the execution provider's tests."""

from __future__ import annotations

from collections.abc import Sequence

import lowbit
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 3
DYNAMIC: tuple[int | str, ...] = ("N", CHANNELS, "H", "W")


class Chain:
    """A float graph of one tensor after the other, quantized convolutions among it."""

    def __init__(self, channels: int = CHANNELS) -> None:
        self.channels = channels
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.names = 0

    def fresh(self, hint: str) -> str:
        self.names += 1
        return f"{hint}_{self.names}"

    def const(self, value: np.ndarray, hint: str) -> str:
        name = self.fresh(hint)
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: Sequence[str], **attributes) -> str:
        y = self.fresh(op.lower())
        self.nodes.append(helper.make_node(op, list(inputs), [y], f"node_{y}", **attributes))
        return y

    def quantized(self, x: str, scale: float) -> str:
        grid = [self.const(np.float32(scale), "scale"), self.const(np.uint8(128), "zero")]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *grid]), *grid])

    def conv(self, x: str) -> str:
        """A quantized 3x3 convolution that keeps the size, with its input and output on grids."""
        weights = self.rng.integers(-128, 128, (self.channels, self.channels, 3, 3)).astype(np.int8)
        weights_grid = [self.const(np.float32(0.004), "scale"), self.const(np.int8(0), "zero")]
        w = self.node("DequantizeLinear", [self.const(weights, "weights"), *weights_grid])
        y = self.node("Conv", [self.quantized(x, 0.02), w], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
        return self.quantized(y, 0.03)

    def model(
        self, outputs: Sequence[str], shape: Sequence[int | str] = DYNAMIC, converted: bool = True
    ) -> onnx.ModelProto:
        """The model with input "x" and these outputs, all of one shape."""
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ["x", *outputs]]
        graph = helper.make_graph(self.nodes, "chain", values[:1], values[1:], self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return lowbit.convert(made).model if converted else made


def chain(*pieces: str, shape: Sequence[int | str] = DYNAMIC, converted: bool = True) -> onnx.ModelProto:
    """x through the pieces: "conv", or a unary float op."""
    graph, y = Chain(shape[1] if isinstance(shape[1], int) else CHANNELS), "x"
    for piece in pieces:
        y = graph.conv(y) if piece == "conv" else graph.node(piece, [y])
    return graph.model([y], shape, converted)


def images(*shape: int, seed: int = 0) -> np.ndarray:
    """An input of the shape, somewhat wider than its grid."""
    return np.random.default_rng(seed).normal(0, 1.2, shape).astype(np.float32)
