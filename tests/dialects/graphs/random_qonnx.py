"""Random QONNX networks: quantizers of every kind around layers of every kind, in random order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.dialects.graphs.builder import Built
from tests.dialects.graphs.qonnx import ROUNDINGS, QonnxGraph, Quant

_DOMAINS = ["qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general"]


class _Network:
    """A network that grows layer by layer; ``shape`` is that of the tensor at its end, with a batch of 1."""

    def __init__(self, seed: int):
        self.g = QonnxGraph("random QONNX network", seed)
        self.rng = self.g.rng
        self.g.speak(self.pick(_DOMAINS))
        self.g.opset = self.pick([9, 11, 13, 17])
        self.g.ir_version = 8 if self.g.opset >= 13 else 6
        self.g.stored = self.pick(["initializer", "initializer", "node", "folded"])
        self.g.op = self.pick(["Quant", "IntQuant"])
        self.integers = self.rng.random() < 0.2  # scales of 1 and MultiThresholds, as FINN streamlines them
        spatial = self.pick([0, 1, 2, 2, 2])
        self.shape = [1, self.pick([3, 4, 8]), *[self.pick([6, 8, 9]) for _ in range(spatial)]]
        if not spatial:
            self.shape[1] = 24
        self.quant = self.activation(0.2)
        x = self.g.input(
            ["N", *self.shape[1:]], step=float(self.quant.scale), about=float(self.quant.scale) * 0.1
        )
        self.x = self.g.quant(x, self.quant)

    def pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    def activation(self, about: float) -> Quant:
        """A quantizer whose integers cover about five times ``about``."""
        bits = self.pick([0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 8])
        scale = np.asarray(1.0 if self.integers else about * 5 / 2 ** max(bits, 1), np.float32)
        if not self.integers:
            scale = self.g.scale(float(scale))
        if bits == 0:
            return Quant(scale, 0)
        signed = self.pick([0, 1])
        narrow = self.pick([0, 0, 1]) if bits > 1 else 0
        rounding = self.pick(ROUNDINGS) if self.rng.random() < 0.4 else "ROUND"
        zero = 0.0
        if self.rng.random() < 0.15 and not signed and bits > 1:
            zero = float(self.rng.integers(1, 2**bits - 1))
        return Quant(scale, bits, zero, signed, narrow, rounding)

    def weight_quant(self, channels: int, rank: int, axis: int = 0) -> Quant:
        bits = self.pick([0, 0, 2, 2, 3, 4, 8])
        per_channel = None if self.rng.random() < 0.4 else channels
        quant = self.g.weight_quant(per_channel, bits, rank=rank, axis=axis)
        if self.integers:
            return replace(quant, scale=np.float32(1))
        return replace(quant, narrow=self.pick([0, 1]))

    def product(self) -> None:
        """A convolution or matrix product, what stands behind it, and a quantizer."""
        g, rank = self.g, len(self.shape)
        channels = self.shape[1]
        if rank == 2:
            width = self.pick([8, 16, 24])
            wq = self.weight_quant(width, 2)
            weight = g.node("Transpose", [g.weights((width, channels), wq)], perm=[1, 0])
            y, terms = g.node("MatMul", [self.x, weight]), channels
            self.shape = [1, width]
        else:
            depthwise = self.rng.random() < 0.2
            width = channels if depthwise else self.pick([4, 8])
            window = [self.pick([1, 3]) if size >= 3 else 1 for size in self.shape[2:]]
            pads = [k // 2 if self.rng.random() < 0.6 else 0 for k in window]
            weights = (width, 1 if depthwise else channels, *window)
            wq = self.weight_quant(width, len(weights))
            inputs = [self.x, g.weights(weights, wq)]
            terms = int(np.prod(weights[1:]))
            if self.rng.random() < 0.4:
                inputs.append(self.bias(wq, width, terms))
            y = g.node("Conv", inputs, pads=[*pads, *pads], group=channels if depthwise else 1)
            size = [s + 2 * p - k + 1 for s, p, k in zip(self.shape[2:], pads, window, strict=True)]
            self.shape = [1, width, *size]
        spread = float(np.mean(self.quant.scale) * np.mean(wq.scale) * np.sqrt(terms))
        spread *= self.quant.deviation * wq.deviation
        for _ in range(int(self.rng.integers(0, 4))):
            y = self.between(y, spread)
        self.close(y, spread)

    def bias(self, wq: Quant, width: int, terms: int) -> str:
        g = self.g
        grid = (np.asarray(self.quant.scale, np.float32) * np.asarray(wq.scale, np.float32)).astype(
            np.float32
        )
        spread = float(np.mean(grid)) * np.sqrt(terms) * self.quant.deviation * wq.deviation
        real = g.floats(self.rng.normal(size=width) * spread, "bias")
        if self.rng.random() < 0.5:
            return real
        scale = grid.reshape(-1) if grid.size > 1 else grid.reshape(())
        return g.quant(real, Quant(scale, self.pick([16, 32])))

    def between(self, y: str, spread: float) -> str:
        """One float operation."""
        g, rng = self.g, self.rng
        channels = (1, self.shape[1], *[1] * (len(self.shape) - 2))
        kind = self.pick(
            ["norm", "relu", "mul", "div", "add", "sub", "clip", "leaky", "neg", "tanh", "channels"]
        )
        if kind == "norm":
            n = self.shape[1]
            gamma = rng.uniform(-1.5, 1.5, n)
            gamma[0] = 0.0
            parts = [gamma, rng.normal(size=n) * spread, rng.normal(size=n) * spread, rng.uniform(0.5, 2, n)]
            return g.node("BatchNormalization", [y, *(g.floats(p, "bn") for p in parts)], epsilon=1e-5)
        if kind == "relu":
            return g.node("Relu", [y])
        if kind in ("mul", "div"):
            return g.node(kind.capitalize(), [y, g.floats(rng.uniform(0.4, 1.9))])
        if kind in ("add", "sub"):
            return g.node(kind.capitalize(), [y, g.floats([rng.normal() * spread * 0.3])])
        if kind == "clip" and g.opset >= 11:
            return g.node("Clip", [y, g.floats(-spread), g.floats(spread * 1.5)])
        if kind == "leaky":
            return g.node("LeakyRelu", [y], alpha=0.125)
        if kind == "neg":
            return g.node("Neg", [y])
        if kind == "tanh":
            return g.node("Mul", [g.node("Tanh", [y]), g.floats(spread)])
        return g.node("Mul", [y, g.floats(rng.uniform(-1.5, 1.5, channels))])

    def close(self, y: str, spread: float) -> None:
        """A quantizer or a MultiThreshold."""
        g = self.g
        if self.integers and self.rng.random() < 0.6:
            count = self.pick([1, 3, 7])
            rows = self.pick([1, self.shape[1]])
            thresholds = np.sort(self.rng.normal(size=(rows, count)) * spread, axis=1)
            bias = self.pick([0.0, -float(count // 2 + 1)])
            layout = {2: "NC", 3: "NCW", 4: "NCHW"}[len(self.shape)]
            self.x = g.multithreshold(y, np.rint(thresholds), data_layout=layout, out_bias=bias)
            self.quant = Quant(np.float32(1), int(count).bit_length(), -bias, 0)
            return
        self.quant = self.activation(spread)
        if self.rng.random() < 0.2 and min([*self.shape[2:], 9]) >= 2 and len(self.shape) == 4:
            y = g.node("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2])
            self.shape = [*self.shape[:2], *[s // 2 for s in self.shape[2:]]]
        self.x = g.quant(y, self.quant)

    def move(self) -> None:
        """Something between quantized tensors."""
        g, spatial = self.g, self.shape[2:]
        kind = self.pick(["pool", "average", "resize", "depth", "flatten", "residual", "identity"])
        if len(spatial) == 2 and min(spatial) >= 2 and kind in ("pool", "average"):
            op = "MaxPool" if kind == "pool" else "AveragePool"
            self.x = g.node(op, [self.x], kernel_shape=[2, 2], strides=[2, 2])
            self.shape = [*self.shape[:2], *[s // 2 for s in spatial]]
            if kind == "average":
                self.quant = replace(self.activation(float(self.quant.scale) * self.quant.deviation))
                self.x = g.quant(self.x, self.quant)
        elif len(spatial) == 2 and max(spatial) <= 6 and kind == "resize" and g.opset >= 11:
            self.x = g.node(
                "Resize", [self.x, g.floats([]), g.floats([1, 1, 2, 2])], mode="nearest",
                coordinate_transformation_mode="asymmetric", nearest_mode="floor",
            )  # fmt: skip
            self.shape = [*self.shape[:2], *[2 * s for s in spatial]]
        elif len(spatial) == 2 and max(spatial) <= 6 and kind == "depth" and self.shape[1] % 4 == 0:
            mode = self.pick(["DCR", "CRD"]) if g.opset >= 11 else None
            self.x = g.node(
                "DepthToSpace", [self.x], blocksize=2, **({"mode": mode} if mode is not None else {})
            )
            self.shape = [1, self.shape[1] // 4, *[2 * s for s in spatial]]
        elif spatial and kind == "flatten" and np.prod(self.shape) <= 400:
            self.x = g.node("Flatten", [self.x])
            self.shape = [1, int(np.prod(self.shape))]
        elif kind == "residual" and self.quant.bits != 0:
            other = g.quant(g.node("Mul", [self.x, g.floats(0.75)]), self.quant)
            total = g.node("Add", [self.x, other])
            self.quant = replace(self.quant, zero=0.0, rounding="ROUND")
            self.x = g.quant(total, self.quant)
        elif kind == "identity":
            self.x = g.node("Identity", [self.x])


def random_qonnx(seed: int) -> Built:
    """A network of two to four layers."""
    network = _Network(seed)
    for _ in range(int(network.rng.integers(2, 5))):
        network.product()
        if network.rng.random() < 0.5:
            network.move()
    network.g.output(network.x, ["N", *[None] * (len(network.shape) - 1)])
    return Built(network.g.proto(), network.g.feeds, seed)
