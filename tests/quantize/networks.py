"""Small float networks of the ops that `lowbit quantize` accepts, seeded, and random ones of many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]


class Builder:
    """A float graph with one image input."""

    def __init__(self, seed: int = 0, shape: Sequence[int | str] = ("N", 3, 16, 16), opset: int = 17) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape, self.opset = list(shape), opset
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.channels: dict[str, int] = {"x": int(shape[1])}
        self.count = 0

    def constant(self, array: Array) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def random(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def node(self, op: str, inputs: Sequence[str], channels: int | None = None, **attributes: Any) -> str:
        self.count += 1
        output = f"t{self.count}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], f"{op}{self.count}", **attributes))
        self.channels[output] = channels if channels is not None else self.channels[inputs[0]]
        return output

    def conv(
        self, x: str, out: int, kernel: int = 3, *, group: int = 1, bias: bool = True, **more: Any
    ) -> str:
        fan = self.channels[x] // group * kernel * kernel
        inputs = [x, self.random(out, self.channels[x] // group, kernel, kernel, scale=fan**-0.5 * 1.4)]
        if bias:
            inputs.append(self.random(out, scale=0.1))
        more.setdefault("pads", [kernel // 2] * 4)
        return self.node("Conv", inputs, out, group=group, **more)

    def depthwise(self, x: str) -> str:
        return self.conv(x, self.channels[x], group=self.channels[x])

    def batch_norm(self, x: str) -> str:
        c = self.channels[x]
        positive = [self.constant(self.rng.uniform(0.5, 1.5, c).astype(np.float32)) for _ in range(2)]
        return self.node("BatchNormalization", [x, positive[0], self.random(c), self.random(c), positive[1]])

    def relu6(self, x: str) -> str:
        return self.node("Clip", [x, *(self.constant(np.array(v, np.float32)) for v in (0, 6))])

    def silu(self, x: str) -> str:
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def gate(self, x: str) -> str:
        """Squeeze and excitation."""
        pooled = self.node("GlobalAveragePool", [x])
        small = self.node("Relu", [self.conv(pooled, 4, 1)])
        return self.node("Mul", [x, self.node("Sigmoid", [self.conv(small, self.channels[x], 1)])])

    def head(self, x: str, classes: int = 5) -> str:
        flat = self.node("Flatten", [self.node("GlobalAveragePool", [x])])
        weight = self.random(self.channels[x], classes)
        return self.node("Add", [self.node("MatMul", [flat, weight]), self.random(classes)])

    def model(self, *outputs: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "network", [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "classes"]) for name in outputs],
            self.tensors,
        )  # fmt: skip
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        onnx.checker.check_model(made)
        return made


def images(count: int = 10, shape: Sequence[int] = (3, 16, 16), seed: int = 5) -> Array:
    """Smooth random images: neighbours are alike, as in photos."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, *shape)).astype(np.float32)
    for axis in range(2, x.ndim):
        x = (x + np.roll(x, 1, axis) + np.roll(x, 2, axis)) / np.float32(1.7)
    return x


def residual(seed: int = 0) -> onnx.ModelProto:
    """Two residual blocks, one with a convolution on its shortcut, and a classifier."""
    b = Builder(seed)
    x = b.node("Relu", [b.batch_norm(b.conv("x", 8, bias=False))])
    y = b.conv(b.node("Relu", [b.conv(x, 8)]), 8)
    x = b.node("Relu", [b.node("Add", [y, x])])
    y = b.conv(b.node("Relu", [b.conv(x, 16, strides=[2, 2])]), 16)
    x = b.node("Relu", [b.node("Add", [b.conv(x, 16, 1, strides=[2, 2], pads=[0] * 4), y])])
    return b.model(b.node("Softmax", [b.head(x)]))


def inverted(seed: int = 0) -> onnx.ModelProto:
    """Inverted bottlenecks with depthwise convolutions and linear trunks."""
    b = Builder(seed)
    x = b.relu6(b.conv("x", 8, strides=[2, 2]))
    x = b.conv(b.relu6(b.depthwise(x)), 6, 1)
    for _ in range(2):
        y = b.relu6(b.depthwise(b.relu6(b.conv(x, 24, 1))))
        x = b.node("Add", [x, b.conv(y, 6, 1)])
    return b.model(b.head(b.relu6(b.conv(x, 24, 1))))


def tokens() -> onnx.ModelProto:
    """A layer of a transformer: a product with a matrix and an Add of its bias, of rank 3."""
    b = Builder(2)
    x = b.node("Relu", [b.conv("x", 8)])
    x = b.node("Transpose", [b.node("Reshape", [x, b.constant(np.array([0, 8, -1]))])], perm=[0, 2, 1])
    x = b.node("Add", [b.node("MatMul", [x, b.random(8, 12)], 12), b.random(12)])
    return b.model(b.node("ReduceMean", [b.node("MatMul", [x, b.random(12, 5)], 5)], axes=[1], keepdims=0))


def random_network(seed: int) -> onnx.ModelProto:
    """A network of random ops, 4 to 9 of them between its first convolution and its classifier."""
    b = Builder(seed, opset=int(np.random.default_rng(seed).choice([13, 17, 18, 20])))
    rng = b.rng
    activations: list[Callable[[str], str]] = [
        lambda v: b.node("Relu", [v]), b.relu6, b.silu,
        lambda v: b.node("HardSwish", [v]) if b.opset > 13 else v,
        lambda v: b.node("LeakyRelu", [v], alpha=0.1), lambda v: b.node("Sigmoid", [v]), lambda v: v,
    ]  # fmt: skip

    def activate(v: str) -> str:
        return activations[rng.integers(len(activations))](v)

    def add(v: str) -> str:
        return activate(b.node("Add", [v, b.conv(activate(b.conv(v, 12)), b.channels[v])]))

    def concat(v: str) -> str:
        parts = [v, activate(b.conv(v, 4)), activate(b.conv(v, 4, 1, pads=[0] * 4))]
        return b.node("Concat", parts, sum(b.channels[p] for p in parts), axis=1)

    def shuffle(v: str) -> str:
        return b.node("DepthToSpace", [b.conv(v, 16)], 4, blocksize=2)

    def resize(v: str) -> str:
        scales = b.constant(np.array([1, 1, 2, 2], np.float32))
        mode = str(rng.choice(["nearest", "linear"]))
        return b.node("Resize", [v, "", scales], mode=mode)

    def transposed(v: str) -> str:
        weight = b.random(b.channels[v], 6, 2, 2, scale=0.3)
        return activate(b.node("ConvTranspose", [v, weight, b.random(6)], 6, strides=[2, 2]))

    def affine(v: str) -> str:
        return b.node("Relu", [b.batch_norm(v)])

    def channels_last(v: str) -> str:
        return b.node("Transpose", [b.node("Transpose", [v], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2])

    steps: list[Callable[[str], str]] = [
        lambda v: activate(b.conv(v, 8)), lambda v: activate(b.batch_norm(b.conv(v, 8, bias=False))),
        lambda v: activate(b.depthwise(v)),
        lambda v: activate(b.conv(v, 2 * b.channels[v], group=b.channels[v])),
        lambda v: b.node("MaxPool", [v], kernel_shape=[2, 2]),
        add, concat, b.gate, shuffle, resize, transposed,
        lambda v: b.node("AveragePool", [v], kernel_shape=[3, 3], pads=[1] * 4), affine, channels_last, add,
    ]  # fmt: skip
    x = activate(b.conv("x", 8))
    for _ in range(int(rng.integers(4, 10))):
        x = steps[rng.integers(len(steps))](x)
    return b.model(b.head(x))
