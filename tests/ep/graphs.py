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


class Network(Chain):
    """Layers of any channels, all their activations quantized."""

    def grid(self, x: str) -> str:
        return self.quantized(x, float(self.rng.uniform(0.02, 0.06)))

    def layer(self, x: str, channels: int, out: int, kernel: int = 1, *, depthwise: bool = False) -> str:
        shape = (out, 1 if depthwise else channels, kernel, kernel)
        grid = [self.const(np.full(out, 0.3 / np.prod(shape[1:]) ** 0.5 / 32, np.float32), "scale"),
                self.const(np.zeros(out, np.int8), "zero")]  # fmt: skip
        w = self.const(self.rng.integers(-127, 128, shape).astype(np.int8), "weights")
        w = self.node("DequantizeLinear", [w, *grid], axis=0)
        bias = self.const(self.rng.normal(0, 0.3, out).astype(np.float32), "bias")
        y = self.node("Conv", [x, w, bias], pads=[kernel // 2] * 4, kernel_shape=[kernel] * 2,
                      group=channels if depthwise else 1)  # fmt: skip
        return self.grid(y)


def bottleneck(seed: int) -> onnx.ModelProto:
    """An inverted bottleneck with squeeze-and-excite and a shortcut, then a second convolution beside it."""
    net = Network(3)
    net.rng = np.random.default_rng(seed)
    narrow, wide, squeezed = (int(c) for c in net.rng.integers([8, 17, 8], [24, 60, 16]))
    x = net.layer(net.grid("x"), 3, narrow, 3)
    y = net.grid(net.node("HardSwish", [net.layer(x, narrow, wide)]))
    y = net.layer(y, wide, wide, int(net.rng.choice([3, 5])), depthwise=True)
    gate = net.grid(net.node("GlobalAveragePool", [y]))
    gate = net.grid(net.node("Relu", [net.layer(gate, wide, squeezed)]))
    gate = net.grid(net.node("HardSigmoid", [net.layer(gate, squeezed, wide)]))
    y = net.layer(net.grid(net.node("Mul", [y, gate])), wide, narrow)
    y = net.grid(net.node("Add", [x, y]))
    pooled = net.node("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2])
    joined = net.node("Concat", [net.layer(pooled, narrow, 5), net.layer(pooled, narrow, 20)], axis=1)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, "H", "W"])
              for n, c in (("x", 3), (joined, 25))]  # fmt: skip
    graph = helper.make_graph(net.nodes, "bottleneck", values[:1], values[1:], net.constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return lowbit.convert(made).model


def images(*shape: int, seed: int = 0) -> np.ndarray:
    """An input of the shape, somewhat wider than its grid."""
    return np.random.default_rng(seed).normal(0, 1.2, shape).astype(np.float32)
