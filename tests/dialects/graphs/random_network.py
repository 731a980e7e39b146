"""Random quantized networks: the constructs of the other files in combinations that nobody thought of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.dialects.graphs.blocks import conv_layer, gemm_weight
from tests.dialects.graphs.builder import TYPES, Built, Graph, Quant

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Tensor:
    """Codes of an activation [N, C, H, W], and how to read them."""

    codes: str
    quant: Quant
    shape: Shape

    @property
    def channels(self) -> int:
        return int(self.shape[1])

    @property
    def size(self) -> tuple[int, int]:
        return int(self.shape[2]), int(self.shape[3])


class RandomNetwork:
    """Grows a network step by step; every step takes tensors that exist and adds one."""

    def __init__(self, seed: int):
        self.g = Graph("random_network", seed)
        self.rng = self.g.rng
        self.g.opset, self.g.ir_version = (25, 13) if self.chance(0.3) else (21, 10)
        self.batch: int | str = self.pick([1, 2, "N"])
        self.default_kind = self.pick(["u8", "u8", "s8"])
        if self.chance(0.2):
            self.g.constants = "node"
        size = int(self.rng.integers(6, 13))
        shape: Shape = (self.batch, int(self.pick([1, 3, 4, 5])), size, int(size + self.rng.integers(0, 3)))
        quant = self.g.act(0.03, self.default_kind)
        x = self.g.input(shape, step=float(quant.scale))
        self.tensors = [Tensor(self.g.q(x, quant), quant, shape)]
        self._reads: dict[str, list[str]] = {}

    # -- helpers
    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    def recent(self) -> Tensor:
        """Mostly the last tensor, sometimes an older one."""
        return self.tensors[-1] if self.chance(0.7) else self.pick(self.tensors)

    def real(self, tensor: Tensor) -> str:
        """A DequantizeLinear of its own, or one that already reads these codes."""
        known = self._reads.setdefault(tensor.codes, [])
        if not known or self.chance(0.6):
            known.append(self.g.dq(tensor.codes, tensor.quant))
        return self.pick(known)

    def keep(self, real: str, quant: Quant, shape: Shape) -> None:
        self.tensors.append(Tensor(self.g.q(real, quant), quant, shape))

    def kind(self) -> str:
        return self.default_kind if self.chance(0.75) else self.pick(["u8", "s8", "u4", "s4"])

    def like(self, tensor: Tensor, factor: float = 1.0) -> Quant:
        """The tensor's own quantizer, or another of about its range."""
        if factor == 1.0 and self.chance(0.5):
            return tensor.quant
        kind = self.kind()
        levels = [t[2] - t[1] for t in (TYPES[tensor.quant.kind], TYPES[kind])]
        return self.g.act(float(tensor.quant.scale) * factor * levels[0] / levels[1], kind)

    # -- steps
    def convolution(self) -> None:
        x = self.recent()
        c, (h, w) = x.channels, x.size
        group = int(self.pick([1, 1, 1, c, *([2] if c % 2 == 0 else [])]))
        out = group * int(self.rng.integers(1, 4)) if group > 1 else int(self.rng.integers(1, 11))
        kernel = [int(self.rng.integers(1, 1 + min(4, n))) for n in (h, w)]
        options: dict = {"group": group}
        if self.chance(0.2):
            options["auto_pad"] = self.pick(["SAME_UPPER", "SAME_LOWER"])
            pads = None
        else:
            pads = [int(self.rng.integers(0, 3)) for _ in range(4)]
            options["pads"] = pads
        options["strides"] = [int(self.rng.integers(1, 3)) for _ in range(2)]
        weights = self.pick(
            ["s8", "s8", "s8", "u8", "s4", "u4"] + (["s2", "u2"] if self.g.opset >= 25 else [])
        )
        options |= {
            "w_kind": weights, "per_channel": self.chance(0.7), "symmetric": self.chance(0.7),
            "bias": self.pick(["int", "int", "float", None]), "y_kind": self.kind(),
            "y_zero": self.pick(["random", "low"]),
        }  # fmt: skip
        if weights in ("s8", "u8") and self.chance(0.2):
            options["weights"] = "float"
        if weights == "s8" and self.chance(0.2):
            options["w_range"] = self.pick([(-8, 7), (-2, 1), (-64, 63)])
        then: list[Callable[[str], str]] = []
        if self.chance(0.3):
            then.append(lambda v: self.g.node("Relu", [v]))
        elif self.chance(0.15):
            scale = float(x.quant.scale)
            bounds = [self.g.floats(-3.3 * scale), self.g.floats(900 * scale)]
            then.append(lambda v: self.g.node("Clip", [v, *bounds]))
        real, quant = self.layer(x, (out, c // group, *kernel), then, options)
        if pads is None:
            size = [-(-n // s) for n, s in zip((h, w), options["strides"], strict=True)]
        else:
            size = [
                (n + pads[i] + pads[i + 2] - k) // s + 1
                for i, (n, k, s) in enumerate(zip((h, w), kernel, options["strides"], strict=True))
            ]
        self.found(real, quant, (self.batch, out, *size))

    def layer(self, x: Tensor, shape: tuple[int, ...], then: list, options: dict) -> tuple[str, Quant]:
        return conv_layer(self.g, self.real(x), x.quant, shape, then=then, **options)

    def found(self, real: str, quant: Quant, shape: Shape) -> None:
        """Registers a tensor that conv_layer has already quantized: the codes behind its DequantizeLinear."""
        codes = next(n for n in reversed(self.g.nodes) if n.output and n.output[0] == real).input[0]
        self._reads[codes] = [real]
        self.tensors.append(Tensor(codes, quant, shape))

    def transposed_convolution(self) -> None:
        x = self.recent()
        out = int(self.rng.integers(1, 7))
        kernel = [int(self.rng.integers(2, 4)) for _ in range(2)]
        strides = [int(self.rng.integers(1, 3)) for _ in range(2)]
        if max(x.size) > 12:
            return
        options = {
            "strides": strides,
            "transposed": True,
            "per_channel": self.chance(0.5),
            "y_kind": self.kind(),
        }
        real, quant = self.layer(x, (x.channels, out, *kernel), [], options)
        size = [(n - 1) * s + k for n, s, k in zip(x.size, strides, kernel, strict=True)]
        self.found(real, quant, (self.batch, out, *size))

    def pool(self) -> None:
        x = self.recent()
        if min(x.size) < 2:
            return
        kernel = [int(self.rng.integers(1, 3)) for _ in range(2)]
        strides = [int(self.rng.integers(1, 3)) for _ in range(2)]
        op = self.pick(["MaxPool", "AveragePool"])
        y = self.g.node(op, [self.real(x)], kernel_shape=kernel, strides=strides)
        size = [(n - k) // s + 1 for n, k, s in zip(x.size, kernel, strides, strict=True)]
        self.keep(y, self.like(x), (self.batch, x.channels, *size))

    def addition(self) -> None:
        a = self.recent()
        same = [t for t in self.tensors if t.shape == a.shape]
        b = self.pick(same)
        op = "Add" if self.chance(0.7) else "Mul"
        total = self.g.node(op, [self.real(a), self.real(b)])
        if self.chance(0.4):
            total = self.g.node("Relu", [total])
        _, low, high = TYPES[b.quant.kind]
        factor = 1.5 if op == "Add" else float(b.quant.scale) * (high - low) / 2
        self.keep(total, self.like(a, factor), a.shape)

    def residual(self) -> None:
        """A convolution that keeps the shape, added to its input."""
        x = self.recent()
        shape = (x.channels, x.channels, 3, 3)
        options = {"pads": [1, 1, 1, 1], "y_kind": self.kind(), "bias": self.pick(["int", "float", None])}
        real, quant = self.layer(x, shape, [], options)
        self.found(real, quant, x.shape)
        operands = [self.real(x), real]
        total = self.g.node("Add", operands if self.chance(0.5) else operands[::-1])
        if self.chance(0.5):
            total = self.g.node("Relu", [total])
        self.keep(total, self.like(self.tensors[-1], 1.3), x.shape)

    def concatenation(self) -> None:
        a = self.recent()
        axis = int(self.pick([1, 1, 1, 2, 3]))

        def rest(t: Tensor) -> tuple:
            return t.shape[:axis] + t.shape[axis + 1 :]

        fitting = [t for t in self.tensors if rest(t) == rest(a)]
        parts = [self.pick(fitting) for _ in range(int(self.rng.integers(1, 3)))] + [a]
        if sum(int(t.shape[axis]) for t in parts) > 24:
            return
        y = self.g.node("Concat", [self.real(t) for t in parts], axis=axis)
        shape = list(a.shape)
        shape[axis] = sum(int(t.shape[axis]) for t in parts)
        self.keep(y, self.like(a), tuple(shape))

    def unary(self) -> None:
        x = self.recent()
        op = self.pick(["Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Relu", "Neg"])
        bounded = op in ("Sigmoid", "Tanh")
        real = self.real(x)
        y = self.g.node(op, [real])
        if op == "Sigmoid" and self.chance(0.5):
            y, bounded = self.g.node("Mul", [real, y]), False
        self.keep(y, self.g.act(0.01, self.kind()) if bounded else self.like(x), x.shape)

    def batch_normalization(self) -> None:
        x = self.recent()
        c = x.channels
        scale = float(x.quant.scale) * 50
        gamma, variance = self.rng.uniform(0.2, 1.5, c), self.rng.uniform(0.4, 2, c)
        beta, mean = self.rng.normal(size=(2, c)) * scale
        parameters = [self.g.floats(p, "bn") for p in (gamma, beta, mean, variance)]
        y = self.g.node("BatchNormalization", [self.real(x), *parameters])
        if self.chance(0.5):
            y = self.g.node("Relu", [y])
        self.keep(y, self.like(x, 1.2), x.shape)

    def gate(self) -> None:
        """Squeeze and excite."""
        x = self.recent()
        mean_quant = self.like(x, 0.3)
        mean = self.g.qdq(self.g.node("GlobalAveragePool", [self.real(x)]), mean_quant)
        real, _ = conv_layer(self.g, mean, mean_quant, (x.channels, x.channels, 1, 1))
        gate = self.g.qdq(self.g.node("Sigmoid", [real]), self.g.act(1 / 256, "u8", zero=0))
        self.keep(self.g.node("Mul", [self.real(x), gate]), self.like(x), x.shape)

    def slicing(self) -> None:
        x = self.recent()
        axis, step = int(self.pick([2, 3])), int(self.pick([1, 2]))
        if min(x.size) < 3:
            return
        ints = self.g.ints
        y = self.g.node("Slice", [self.real(x), ints([1]), ints([1000]), ints([axis]), ints([step])])
        shape = list(x.shape)
        shape[axis] = -(-(int(shape[axis]) - 1) // step)
        self.keep(y, self.like(x), tuple(shape))

    def padding(self) -> None:
        x = self.recent()
        top, left, bottom, right = (int(v) for v in self.rng.integers(0, 2, 4))
        y = self.g.node("Pad", [self.real(x), self.g.ints([0, 0, top, left, 0, 0, bottom, right])])
        self.keep(
            y, self.like(x), (self.batch, x.channels, x.size[0] + top + bottom, x.size[1] + left + right)
        )

    def transposition(self) -> None:
        x = self.recent()
        y = self.g.node("Transpose", [self.real(x)], perm=[0, 1, 3, 2])
        self.keep(y, self.like(x), (self.batch, x.channels, *x.size[::-1]))

    def shuffling(self) -> None:
        x = self.recent()
        if x.channels % 2:
            return
        y = self.g.node("Reshape", [self.real(x), self.g.ints([0, 2, x.channels // 2, *x.size])])
        y = self.g.node("Transpose", [y], perm=[0, 2, 1, 3, 4])
        y = self.g.node("Reshape", [y, self.g.ints([0, x.channels, *x.size])])
        self.keep(y, self.like(x), x.shape)

    def resizing(self) -> None:
        x = self.recent()
        if max(x.size) > 12:
            return
        factors = [2, int(self.pick([1, 2]))]
        mode = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        scales = self.g.floats([1, 1, *factors])
        y = self.g.node("Resize", [self.real(x), "", scales], mode="nearest", **mode)
        size = [n * f for n, f in zip(x.size, factors, strict=True)]
        self.keep(y, self.like(x), (self.batch, x.channels, *size))

    def splitting(self) -> None:
        x = self.recent()
        if x.channels < 2:
            return
        parts = self.g.ints([1, x.channels - 1])
        y = self.g.node("Split", [self.real(x), parts], outputs=2, axis=1)[1]
        self.keep(y, self.like(x), (self.batch, x.channels - 1, *x.size))

    def finish(self) -> None:
        """Outputs: a classifier, some feature maps as real numbers, some as codes."""
        x = self.tensors[-1]
        flat = self.g.node("Flatten", [self.real(x)])
        k = x.channels * x.size[0] * x.size[1]
        w, w_quant = gemm_weight(self.g, k, 7, transposed=True)
        y = self.g.node("Gemm", [flat, w, self.g.bias(7, x.quant, w_quant)], transB=1)
        if self.chance(0.5):
            y = self.g.qdq(y, self.g.after(x.quant, w_quant, k))
        self.g.output(y, (self.batch, 7))
        chosen = {self.pick(self.tensors).codes for _ in range(2)}
        for tensor in self.tensors:
            if tensor.codes in chosen:
                if tensor.quant.kind in ("u8", "s8") and self.chance(0.3):
                    self.g.output(tensor.codes, tensor.shape, TYPES[tensor.quant.kind][0])
                else:
                    self.g.output(self.g.dq(tensor.codes, tensor.quant), tensor.shape)


# Steps and how often each is drawn.
STEPS = {
    RandomNetwork.convolution: 6,
    RandomNetwork.residual: 2,
    RandomNetwork.addition: 2,
    RandomNetwork.concatenation: 2,
    RandomNetwork.pool: 2,
    RandomNetwork.unary: 2,
    RandomNetwork.gate: 1,
    RandomNetwork.batch_normalization: 1,
    RandomNetwork.transposed_convolution: 1,
    RandomNetwork.slicing: 1,
    RandomNetwork.padding: 1,
    RandomNetwork.transposition: 1,
    RandomNetwork.shuffling: 1,
    RandomNetwork.resizing: 1,
    RandomNetwork.splitting: 1,
}


def random_network(seed: int) -> Built:
    """A network of 3 to 10 random steps."""
    network = RandomNetwork(seed)
    steps = [step for step, weight in STEPS.items() for _ in range(weight)]
    network.convolution()
    for _ in range(int(network.rng.integers(2, 10))):
        network.pick(steps)(network)
    network.finish()
    return Built(network.g.proto(), network.g.feeds, seed)
