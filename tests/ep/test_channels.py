"""Regions whose tensors get channels (ep/region/channels.h) compute what custom ops compute."""

from __future__ import annotations

from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.ep.graphs import Chain, images
from tests.ep.test_context import compiled
from tests.support import lowbit_session


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


@pytest.mark.parametrize("seed", range(6))
def test_odd_channels(devices, seed: int) -> None:
    model = bottleneck(seed)
    ours, alone = devices.session(model), lowbit_session(model)
    for shape in ((2, 3, 14, 10), (1, 3, 9, 9)):
        x = images(*shape, seed=seed)
        np.testing.assert_array_equal(ours.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])


def test_a_compiled_model_has_them_again(devices, tmp_path: Path) -> None:
    model = bottleneck(7)
    ours, alone = devices.session(compiled(devices, tmp_path, model)), lowbit_session(model)
    x = images(1, 3, 12, 12)
    np.testing.assert_array_equal(ours.run(None, {"x": x})[0], alone.run(None, {"x": x})[0])
