"""QONNX graphs: one small case per construct, as Brevitas, QKeras' converter and FINN write them.

`CASES` maps a name to its `Case`. The builder is that of the QDQ graphs with QONNX' own quantizers; the
seed's flavours (ties, ordinary, near ties) are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.dialects.graphs.blocks import batch_norm
from tests.dialects.graphs.builder import Case, Graph

CASES: dict[str, Case] = {}

ROUNDINGS = ["ROUND", "round", "HALF_EVEN", "CEIL", "FLOOR", "UP", "DOWN", "HALF_UP", "half_down"]


@dataclass(frozen=True)
class Quant:
    """Parameters of one QONNX quantizer; ``bits`` 0 stands for a BipolarQuant."""

    scale: np.ndarray
    bits: int = 4
    zero: float = 0.0
    signed: int = 1
    narrow: int | None = 0
    rounding: str | None = "ROUND"

    @property
    def levels(self) -> int:
        """How many integers it has."""
        return 2 if self.bits == 0 else 2**self.bits

    @property
    def deviation(self) -> float:
        """About the standard deviation of its integers."""
        return 1.0 if self.levels == 2 else self.levels / 3.5


class QonnxGraph(Graph):
    """A QONNX graph under construction."""

    def __init__(self, name: str, seed: int):
        super().__init__(name, seed)
        self.qonnx_domain = "qonnx.custom_op.general"
        self.op = "Quant"
        self.stored = "initializer"  # or "node", "folded": how a quantizer's parameters are given
        self.scale_rank = 0  # rank of a per-tensor scale
        self.extra_opsets = {self.qonnx_domain: 1}

    def speak(self, domain: str, version: int = 1) -> None:
        """Chooses the domain of the quantizers."""
        self.qonnx_domain, self.extra_opsets = domain, {domain: version}

    def parameter(self, value, hint: str) -> str:
        value = np.asarray(value, np.float32)
        if self.stored == "node":
            self.constants = "node"
            name = self.const(value, hint)
            self.constants = "initializer"
            return name
        if self.stored == "folded":  # (v * 4) / 2^2, exactly v again
            four = self.node("Mul", [self.const(value, hint), self.floats(4.0)])
            return self.node("Div", [four, self.node("Pow", [self.floats(2.0), self.floats(2.0)])])
        return self.const(value, hint)

    def _scale(self, quant: Quant) -> np.ndarray:
        scale = np.asarray(quant.scale, np.float32)
        return scale.reshape((1,) * self.scale_rank) if scale.ndim == 0 else scale

    def quant(self, x: str, quant: Quant) -> str:
        """A Quant, IntQuant or BipolarQuant."""
        scale = self.parameter(self._scale(quant), "scale")
        if quant.bits == 0:
            return self.node("BipolarQuant", [x, scale], domain=self.qonnx_domain)
        inputs = [x, scale, self.parameter(quant.zero, "zeropt"), self.parameter(quant.bits, "bitwidth")]
        attributes = {
            "signed": quant.signed, "narrow": quant.narrow, "rounding_mode": quant.rounding
        }  # fmt: skip
        given = {name: value for name, value in attributes.items() if value is not None}
        return self.node(self.op, inputs, domain=self.qonnx_domain, **given)

    def trunc(self, x: str, scale, in_bits: int, out_bits: int, *, out_scale=None, **attributes) -> str:
        """A Trunc: version 1, or version 2 where an output scale is given."""
        inputs = [
            x, *(self.parameter(v, h) for v, h in ((scale, "scale"), (0.0, "zeropt"), (in_bits, "bitwidth")))
        ]  # fmt: skip
        if out_scale is not None:
            inputs.append(self.parameter(out_scale, "out_scale"))
            self.extra_opsets[self.qonnx_domain] = 2
        inputs.append(self.parameter(out_bits, "out_bits"))
        return self.node("Trunc", inputs, domain=self.qonnx_domain, **attributes)

    def multithreshold(self, x: str, thresholds, **attributes) -> str:
        attributes.setdefault("out_dtype", "UINT4")
        return self.node(
            "MultiThreshold",
            [x, self.floats(thresholds, "thresholds")],
            domain=self.qonnx_domain,
            **attributes,
        )

    def act_quant(self, about: float, bits: int = 4, **options) -> Quant:
        return Quant(self.scale(about), bits, **options)

    def weights(self, shape: Sequence[int], quant: Quant, axis: int = 0) -> str:
        """A float initializer behind a quantizer, slightly off the grid and some of it outside."""
        scale = np.asarray(quant.scale, np.float32)
        half = 1.2 if quant.bits == 0 else quant.levels / 2
        middle = 0.0 if quant.signed else quant.levels / 2
        steps = self.rng.uniform(-half, half, shape) + middle - quant.zero
        value = self.const((steps * scale).astype(np.float32), "weight")
        return self.quant(value, quant)

    def weight_quant(self, channels: int | None, bits: int = 4, *, rank: int = 4, axis: int = 0, **options):
        scale = self.scale(0.05, channels)
        if channels is not None:
            shape = [1] * rank
            shape[axis] = -1
            scale = scale.reshape(shape)
        return Quant(scale, bits, **({"narrow": 1} | options))

    def after(self, x: Quant, w: Quant, terms: int, bits: int = 4, **options) -> Quant:
        """Quantizer of a sum of products such that most integers occur."""
        product = float(np.mean(x.scale)) * float(np.min(w.scale))
        spread = np.sqrt(terms) * x.deviation * w.deviation * product
        about = spread * 5 / (2 ** max(bits, 1))
        if self.flavour == "near ties":
            scale = product * np.exp2(np.rint(np.log2(about / product)))
            return Quant(np.asarray(scale, np.float32), bits, **options)
        return self.act_quant(about, bits, **options)


def case(**expected) -> Callable:
    """Registers a graph function under its own name."""

    def register(function: Callable[[QonnxGraph], None], name: str | None = None):
        name = name or function.__name__
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = _Case(name, function, **expected)
        return function

    return register


class _Case(Case):
    def build(self, seed: int = 0):
        from tests.dialects.graphs.builder import Built

        g = QonnxGraph(self.name, seed)
        self.build_into(g)
        return Built(g.proto(), g.feeds, seed)


# -- pieces


def entry(g: QonnxGraph, shape: Sequence[int | str], quant: Quant | None = None) -> tuple[str, Quant]:
    """A float graph input and its quantizer: (tensor, quantizer)."""
    quant = quant or g.act_quant(0.1, 4)
    x = g.input(shape, step=float(np.mean(quant.scale)), about=float(np.mean(quant.scale)) * 0.15)
    return g.quant(x, quant), quant


def conv(
    g: QonnxGraph, x: str, xq: Quant, shape: Sequence[int], wq: Quant | None = None, bias=None, **attributes
) -> tuple[str, Quant, int]:
    """A Conv on quantized weights: (result, weight quantizer, terms per sum)."""
    wq = wq or g.weight_quant(shape[0], rank=len(shape))
    inputs = [x, g.weights(shape, wq)]
    if bias is not None:
        inputs.append(bias)
    return g.node("Conv", inputs, **attributes), wq, int(np.prod(shape[1:]))


def close(g: QonnxGraph, x: str, xq: Quant, shape: Sequence[int], out: Sequence[int | str]) -> None:
    """A last convolution that reads what was built, and the graph's output."""
    y, wq, terms = conv(g, x, xq, shape)
    g.output(g.quant(y, g.after(xq, wq, terms, 6)), out)


# -- quantizers of activations


def _activation_case(name: str, quant: Callable[[QonnxGraph, Quant, Quant, int], Quant], **expected) -> None:
    """Conv -> quantizer -> Conv -> Quant."""

    def build(g: QonnxGraph) -> None:
        x, xq = entry(g, [1, 6, 7, 6])
        y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
        yq = quant(g, xq, wq, terms)
        close(g, g.quant(y, yq), yq, (4, 8, 1, 1), [1, 4, 7, 6])

    case(**expected)(build, name)


for _mode in ROUNDINGS:
    for _signed in (0, 1):
        _activation_case(
            f"rounding_{_mode}_{'signed' if _signed else 'unsigned'}",
            lambda g, x, w, k, m=_mode, s=_signed: g.after(x, w, k, 3, rounding=m, signed=s),
        )
for _bits in (1, 2, 3, 4, 5, 6, 7, 8):
    for _signed in (0, 1):
        for _narrow in (0, 1, None):
            if _bits == 1 and _narrow and not _signed:
                continue  # no integer but 0
            _activation_case(
                f"bits_{_bits}_{'su'[1 - _signed]}_narrow_{_narrow}",
                lambda g, x, w, k, b=_bits, s=_signed, n=_narrow: g.after(x, w, k, b, signed=s, narrow=n),
            )
for _mode in ("CEIL", "HALF_UP", "DOWN"):
    _activation_case(f"rounding_{_mode}_8_bits", lambda g, x, w, k, m=_mode: g.after(x, w, k, 8, rounding=m))
for _zero in (1.0, 2.0, 7.0, 15.0):
    _activation_case(
        f"zero_point_{_zero:.0f}", lambda g, x, w, k, z=_zero: g.after(x, w, k, 4, signed=0, zero=z)
    )
_activation_case(
    "zero_point_below_the_codes",
    lambda g, x, w, k: g.after(x, w, k, 4, signed=0, zero=-3.0),
    left={"Conv": "its zero point -3 is outside"},
)
_activation_case("zero_point_signed", lambda g, x, w, k: g.after(x, w, k, 4, zero=3.0, rounding="FLOOR"))
_activation_case("zero_point_8_bits", lambda g, x, w, k: g.after(x, w, k, 8, signed=0, zero=101.0))
_activation_case("no_rounding_mode", lambda g, x, w, k: g.after(x, w, k, 4, rounding=None))
_activation_case("bipolar", lambda g, x, w, k: g.after(x, w, k, 0))


@case(left={"Conv": "its zero point 0.5 is no code"})
def zero_point_fraction(g: QonnxGraph) -> None:
    """No integer stands for it, so that the convolution behind stays."""
    x, xq = entry(g, [1, 6, 7, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3))
    yq = replace(g.after(xq, wq, terms, 4), zero=0.5)
    close(g, g.quant(y, yq), yq, (4, 8, 1, 1), [1, 4, 5, 4])


@case(left={"Conv": "quantizes to 16 bits"})
def sixteen_bit_activation(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 6, 7, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3))
    yq = replace(g.after(xq, wq, terms, 8), bits=16)
    yq = replace(yq, scale=np.float32(yq.scale / 64))
    close(g, g.quant(y, yq), yq, (4, 8, 1, 1), [1, 4, 5, 4])


# -- how parameters are said


def _form_case(name: str, prepare: Callable[[QonnxGraph], None]) -> None:
    def build(g: QonnxGraph) -> None:
        prepare(g)
        x, xq = entry(g, ["N", 6, 7, 6])
        y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
        yq = g.after(xq, wq, terms, 4, signed=0)
        close(g, g.quant(g.node("Relu", [y]), yq), yq, (4, 8, 1, 1), ["N", 4, 7, 6])

    case()(build, name)


for _domain in ("onnx.brevitas", "finn.custom_op.general"):
    _form_case(f"domain_{_domain.replace('.', '_')}", lambda g, d=_domain: g.speak(d))
for _rank in (1, 3, 4):
    _form_case(f"scale_of_rank_{_rank}", lambda g, r=_rank: setattr(g, "scale_rank", r))
for _stored in ("node", "folded"):
    _form_case(f"parameters_{_stored}", lambda g, s=_stored: setattr(g, "stored", s))
_form_case("initializers_are_inputs", lambda g: setattr(g, "constants", "input"))
_form_case("int_quant", lambda g: setattr(g, "op", "IntQuant"))
for _opset, _ir in ((9, 4), (9, 6), (10, 5), (11, 6), (17, 8), (21, 10)):

    def _versions(g: QonnxGraph, opset: int = _opset, version: int = _ir) -> None:
        g.opset, g.ir_version = opset, version

    _form_case(f"opset_{_opset}_ir_{_ir}", _versions)


@case()
def no_opset_import(g: QonnxGraph) -> None:
    """Brevitas' first exports do not import the domain that they use."""
    g.speak("onnx.brevitas")
    g.extra_opsets, g.opset, g.ir_version = {}, 9, 6
    x, xq = entry(g, [1, 6, 7, 6])
    close(g, x, xq, (4, 6, 3, 3), [1, 4, 5, 4])


# -- weights


def _weight_case(name: str, quant: Callable[[QonnxGraph], Quant], **expected) -> None:
    def build(g: QonnxGraph) -> None:
        x, xq = entry(g, [1, 6, 7, 6], g.act_quant(0.1, 4, signed=0))
        y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), quant(g), pads=[1, 1, 1, 1])
        g.output(g.quant(y, g.after(xq, wq, terms, 4)), [1, 8, 7, 6])

    case(**expected)(build, f"weights_{name}")


for _bits in (0, 1, 2, 3, 4, 5, 6, 7, 8):
    _weight_case(f"{_bits}_bits_per_channel", lambda g, b=_bits: g.weight_quant(8, b))
    _weight_case(f"{_bits}_bits", lambda g, b=_bits: g.weight_quant(None, b))
_weight_case("wide", lambda g: g.weight_quant(8, 4, narrow=0))
_weight_case("unsigned", lambda g: g.weight_quant(8, 3, signed=0, narrow=0))
_weight_case("zero_point", lambda g: g.weight_quant(8, 4, signed=0, narrow=0, zero=7.0))
_weight_case("floor", lambda g: g.weight_quant(8, 4, rounding="FLOOR"))
_weight_case(
    "sixteen_bits", lambda g: g.weight_quant(8, 16), left={"Conv": "its weights: it quantizes to 16 bits"}
)
_weight_case(
    "two_axes",
    lambda g: Quant(g.scale(0.05, 48).reshape(8, 6, 1, 1), 4),
    left={"Conv": "its scale has the shape"},
)


@case()
def weights_transposed(g: QonnxGraph) -> None:
    """QuantLinear: the weight is quantized as [out, in] and turned for the MatMul."""
    x, xq = entry(g, [3, 20])
    wq = g.weight_quant(12, 3, rank=2)
    w = g.node("Transpose", [g.weights((12, 20), wq)], perm=[1, 0])
    y = g.node("MatMul", [x, w])
    g.output(g.quant(y, g.after(xq, wq, 20, 4)), [3, 12])


# -- biases


def _bias_case(name: str, bits: int, on_grid: bool, op: str = "Conv") -> None:
    def build(g: QonnxGraph) -> None:
        x, xq = entry(g, [2, 6, 7, 6] if op == "Conv" else [2, 24])
        shape = (8, 6, 3, 3) if op == "Conv" else (8, 24)
        wq = g.weight_quant(8, 4, rank=len(shape))
        terms = int(np.prod(shape[1:]))
        grid = (np.asarray(xq.scale, np.float32) * wq.scale).astype(np.float32).reshape(-1)
        scale = grid if on_grid else np.asarray(g.scale(0.01))
        spread = np.sqrt(terms) * xq.deviation * wq.deviation * float(np.mean(grid))
        real = g.floats(g.rng.normal(size=8) * spread, "bias")
        bias = g.quant(real, Quant(scale, bits))
        y = g.node(op, [x, g.weights(shape, wq), bias], **({} if op == "Conv" else {"transB": 1}))
        g.output(g.quant(y, g.after(xq, wq, terms, 4)), [2, 8, 5, 4] if op == "Conv" else [2, 8])

    case()(build, f"bias_{name}")


_bias_case("32_bits", 32, True)
_bias_case("16_bits", 16, True)
_bias_case("8_bits_other_scale", 8, False)
_bias_case("16_bits_other_scale", 16, False)
_bias_case("gemm_32_bits", 32, True, "Gemm")


@case()
def bias_float(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 6, 7, 6])
    bias = g.floats(g.rng.normal(size=8) * 0.05)
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), bias=bias)
    g.output(g.quant(y, g.after(xq, wq, terms, 4)), [1, 8, 5, 4])


# -- what stands between a convolution and the next quantizer


def _between_case(
    name: str, between: Callable[[QonnxGraph, str, float], str], bits: int = 3, signed: int = 1, **expected
) -> None:
    """``between`` gets the tensor and about its standard deviation."""

    def build(g: QonnxGraph) -> None:
        x, xq = entry(g, [1, 6, 8, 8])
        y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
        yq = g.after(xq, wq, terms, bits, signed=signed)
        spread = float(np.mean(xq.scale) * np.mean(wq.scale) * np.sqrt(terms) * xq.deviation * wq.deviation)
        y = g.quant(between(g, y, spread), yq)
        w2 = g.weight_quant(4)
        z = g.node("Conv", [y, g.weights((4, 8, 1, 1), w2)])
        g.output(g.quant(z, g.after(yq, w2, 8, 6)), [1, 4, None, None])

    case(**expected)(build, f"between_{name}")


def _norm(g: QonnxGraph, y: str, spread: float) -> str:
    """A BatchNormalization to about the spread that it found; gamma 0 and negative gammas occur."""
    down = g.node("Mul", [y, g.floats(1 / spread)])
    return g.node("Mul", [batch_norm(g, down, 8), g.floats(spread)])


def _plain_norm(g: QonnxGraph, y: str, spread: float) -> str:
    gamma = g.rng.uniform(-1.5, 1.5, 8)
    gamma[3] = 0.0
    parts = [gamma, g.rng.normal(size=8) * spread, g.rng.normal(size=8) * spread, g.rng.uniform(0.5, 2, 8)]
    return g.node("BatchNormalization", [y, *(g.floats(p, "bn") for p in parts)], epsilon=1e-5)


def _channels(g: QonnxGraph, shape: Sequence[int] = (1, 8, 1, 1), low: float = -1.5) -> str:
    return g.floats(g.rng.uniform(low, 1.5, 8).reshape(shape))


def _clip(g: QonnxGraph, y: str, low: float, high: float) -> str:
    return g.node("Clip", [y, g.floats(low), g.floats(high)])


_between_case("relu", lambda g, y, s: g.node("Relu", [y]), signed=0)
_between_case("batch_norm", _plain_norm)
_between_case("batch_norm_relu", lambda g, y, s: g.node("Relu", [_plain_norm(g, y, s)]), signed=0)
_between_case("batch_norm_relu_8_bits", lambda g, y, s: g.node("Relu", [_plain_norm(g, y, s)]), 8, 0)
_between_case("batch_norm_8_bits", _plain_norm, 8)
_between_case("batch_norm_bipolar", _plain_norm, 0)
_between_case("two_norms", lambda g, y, s: _plain_norm(g, _plain_norm(g, y, s), s))
_between_case("mul_norm_mul", _norm)
_between_case("hard_tanh", lambda g, y, s: _clip(g, y, -s, s))
_between_case("relu6", lambda g, y, s: _clip(g, y, 0.0, s * 1.3), signed=0)
_between_case("mul", lambda g, y, s: g.node("Mul", [y, g.floats(1.7)]))
_between_case("mul_per_channel", lambda g, y, s: g.node("Mul", [y, _channels(g)]))
_between_case("mul_from_the_left", lambda g, y, s: g.node("Mul", [_channels(g), y]))
_between_case("div", lambda g, y, s: g.node("Div", [y, g.floats([0.77])]))
_between_case("div_per_channel", lambda g, y, s: g.node("Div", [y, _channels(g, (8, 1, 1), 0.5)]))
_between_case("sub", lambda g, y, s: g.node("Sub", [y, g.floats(s * 0.3)]))
_between_case("sub_from_a_constant", lambda g, y, s: g.node("Sub", [g.floats(s * 0.3), y]))
_between_case(
    "add_per_channel", lambda g, y, s: g.node("Add", [y, g.floats(g.rng.normal(size=(8, 1, 1)) * s)])
)
_between_case(
    "chain",
    lambda g, y, s: g.node(
        "Add",
        [
            g.node(
                "Mul", [g.node("Div", [g.node("Sub", [y, g.floats(0.1 * s)]), _channels(g)]), g.floats(1.3)]
            ),
            g.floats(0.2 * s),
        ],
    ),
)
_between_case("neg_abs", lambda g, y, s: g.node("Neg", [y]))
_between_case("leaky_relu", lambda g, y, s: g.node("LeakyRelu", [y], alpha=0.1))
_between_case("prelu", lambda g, y, s: g.node("PRelu", [y, _channels(g, (8, 1, 1), 0.1)]))
_between_case("sigmoid", lambda g, y, s: g.node("Mul", [g.node("Sigmoid", [y]), g.floats(s)]), signed=0)
_between_case("tanh", lambda g, y, s: g.node("Mul", [g.node("Tanh", [y]), g.floats(s)]))
_between_case("identity_cast", lambda g, y, s: g.node("Cast", [g.node("Identity", [y])], to=1))
_between_case("max_pool", lambda g, y, s: g.node("MaxPool", [y], kernel_shape=[2, 2], strides=[2, 2]))
_between_case(
    "norm_max_pool",
    lambda g, y, s: g.node("MaxPool", [_plain_norm(g, y, s)], kernel_shape=[2, 2], strides=[2, 2]),
)
_between_case(
    "relu_then_pool",
    lambda g, y, s: g.node("MaxPool", [g.node("Relu", [y])], kernel_shape=[2, 2], strides=[2, 2]),
    signed=0,
)
_between_case("double_quant", lambda g, y, s: g.quant(y, Quant(g.scale(s / 40), 8)))
_between_case(
    "resize",
    lambda g, y, s: g.node(
        "Resize", [y, "", g.floats([1, 1, 2, 2])], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    ),
)  # fmt: skip


@case()
def max_pool_on_integers(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 6, 8, 8])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms, 0)
    y = g.node("MaxPool", [g.quant(y, yq)], kernel_shape=[2, 2], strides=[2, 2])
    close(g, y, yq, (4, 8, 3, 3), [1, 4, 2, 2])


# -- pools and Trunc


def _trunc_case(name: str, out_scale: bool, bits: int = 4, **attributes) -> None:
    def build(g: QonnxGraph) -> None:
        """TruncAvgPool2d: AveragePool, times the window, cut to the output's bits."""
        xq = g.act_quant(0.125, bits, signed=0)
        if g.flavour == "ordinary":
            xq = replace(xq, scale=np.float32(0.11))
        x, xq = entry(g, [1, 6, 8, 8], xq)
        pooled = g.node("AveragePool", [x], kernel_shape=[2, 2], strides=[2, 2])
        total = g.node("Mul", [pooled, g.floats(4.0)])
        given = {} if not out_scale else {"out_scale": np.float32(xq.scale) * np.float32(4)}
        y = g.trunc(total, xq.scale, bits + 2, bits, **given, **attributes)
        yq = replace(xq, scale=np.float32(xq.scale) * np.float32(4) if out_scale else xq.scale)
        close(g, y, yq, (4, 6, 1, 1), [1, 4, 4, 4])

    case()(build, f"trunc_{name}")


_trunc_case("v1", False, rounding_mode="FLOOR")
_trunc_case("v1_default", False)
_trunc_case("v1_round", False, rounding_mode="ROUND")
_trunc_case("v1_ceil", False, rounding_mode="ceil")
_trunc_case("v2", True, rounding_mode="FLOOR", signed=0, narrow=0)
_trunc_case("v2_round_narrow", True, rounding_mode="ROUND", signed=0, narrow=1)
_trunc_case("v2_8_bits", True, 8, rounding_mode="HALF_UP", signed=0)


@case()
def average_pool_quant(g: QonnxGraph) -> None:
    x, _ = entry(g, [1, 6, 8, 8], g.act_quant(0.1, 4, signed=0))
    y = g.node("AveragePool", [x], kernel_shape=[2, 2], strides=[2, 2])
    yq = g.act_quant(0.1, 4, signed=0)
    close(g, g.quant(y, yq), yq, (4, 6, 1, 1), [1, 4, 4, 4])


@case()
def global_average_pool_quant(g: QonnxGraph) -> None:
    x, _ = entry(g, [1, 6, 7, 7], g.act_quant(0.1, 4, signed=0))
    yq = g.act_quant(0.01, 4, signed=0)
    y = g.quant(g.node("GlobalAveragePool", [x]), yq)
    close(g, y, yq, (4, 6, 1, 1), [1, 4, 1, 1])


# -- layers


@case()
def conv_1d(g: QonnxGraph) -> None:
    x, xq = entry(g, ["N", 5, 21])
    y, wq, terms = conv(g, x, xq, (8, 5, 5), pads=[2, 2])
    yq = g.after(xq, wq, terms, 3)
    y, wq2, terms = conv(g, g.quant(y, yq), yq, (4, 8, 3), strides=[2])
    g.output(g.quant(y, g.after(yq, wq2, terms, 4)), ["N", 4, None])


@case()
def depthwise(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 8, 7, 7])
    y, wq, terms = conv(g, x, xq, (8, 1, 3, 3), pads=[1, 1, 1, 1], group=8)
    yq = g.after(xq, wq, terms, 3, signed=0)
    y = g.quant(g.node("Relu", [_plain_norm(g, y, float(yq.scale) * 2)]), yq)
    close(g, y, yq, (4, 8, 1, 1), [1, 4, 7, 7])


@case()
def bipolar_padding(g: QonnxGraph) -> None:
    """Padding is a real 0, which no bipolar code stands for."""
    xq = g.act_quant(0.5, 0)
    x, xq = entry(g, [1, 6, 6, 6], xq)
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), g.weight_quant(None, 0), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms, 0)
    y, _, _ = conv(g, g.quant(_plain_norm(g, y, 1.0), yq), yq, (4, 8, 3, 3), pads=[1, 1, 1, 1])
    g.output(y, [1, 4, 6, 6])


@case()
def mlp(g: QonnxGraph) -> None:
    """MatMul, BatchNormalization, sign; the last layer's sums are float."""
    x, _ = entry(g, ["N", 1, 6, 6], g.act_quant(0.5, 0))
    y = g.node("Reshape", [x, g.ints([-1, 36])])
    for width, before in ((16, 36), (16, 16)):
        wq = g.weight_quant(None, 0)
        w = g.node("Transpose", [g.weights((width, before), wq)], perm=[1, 0])
        y = g.node("MatMul", [y, w])
        parts = [g.rng.normal(size=width), *(g.rng.normal(size=(2, width))), g.rng.uniform(1, 20, width)]
        y = g.node("BatchNormalization", [y, *(g.floats(p, "bn") for p in parts)])
        y = g.quant(y, Quant(np.float32(1), 0))
    g.output(g.node("MatMul", [y, g.weights((16, 10), g.weight_quant(None, 0))]), ["N", 10])


@case(float_tail=True)
def mlp_with_a_float_tail(g: QonnxGraph) -> None:
    """TensorNorm behind the last product: Sub, Div by a computed constant, Mul, Add."""
    x, _ = entry(g, [2, 20], g.act_quant(0.3, 2))
    y = g.node("MatMul", [x, g.weights((20, 10), g.weight_quant(None, 0))])
    root = g.node("Pow", [g.floats([318.2]), g.floats(0.5)])
    y = g.node("Div", [g.node("Sub", [y, g.floats([0.45])]), root])
    y = g.node("Add", [g.node("Mul", [y, g.floats([0.73])]), g.floats([-1.14])])
    g.output(y, [2, 10])


@case()
def flatten_between(g: QonnxGraph) -> None:
    x, xq = entry(g, ["N", 6, 5, 5])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3))
    yq = g.after(xq, wq, terms, 2)
    y = g.node("Flatten", [g.quant(y, yq)])
    w2 = g.weight_quant(None, 2)
    g.output(g.node("MatMul", [y, g.weights((72, 10), w2)]), ["N", 10])


@case()
def flatten_before_the_quantizer(g: QonnxGraph) -> None:
    x, xq = entry(g, ["N", 6, 5, 5])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3))
    yq = g.after(xq, wq, terms, 2)
    y = g.quant(g.node("Flatten", [g.node("Relu", [y])]), yq)
    w2 = g.weight_quant(None, 2)
    g.output(g.node("MatMul", [y, g.weights((72, 10), w2)]), ["N", 10])


@case()
def subpixel(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 6, 5, 6])
    y, wq, terms = conv(g, x, xq, (12, 6, 3, 3), g.weight_quant(None, 4), pads=[1, 1, 1, 1])
    y = g.node("DepthToSpace", [y], blocksize=2, mode="CRD")
    g.output(g.quant(g.node("Relu", [y]), g.after(xq, wq, terms, 8, signed=0)), [1, 3, 10, 12])


@case()
def depth_to_space_on_integers(g: QonnxGraph) -> None:
    x, xq = entry(g, ["N", 6, 5, 6])
    y, wq, terms = conv(g, x, xq, (16, 6, 3, 3), g.weight_quant(None, 0), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms, 0)
    y = g.node("DepthToSpace", [g.quant(y, yq)], blocksize=2)
    close(g, y, yq, (4, 4, 3, 3), ["N", 4, 8, 10])


@case()
def resize_on_integers(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 6, 5, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 1, 1))
    yq = g.after(xq, wq, terms, 4, signed=0)
    y = g.node(
        "Resize", [g.quant(g.node("Relu", [y]), yq), "", g.floats([1, 1, 2, 2])], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    close(g, y, yq, (4, 8, 3, 3), [1, 4, 8, 10])


@case()
def upsample_opset_9(g: QonnxGraph) -> None:
    g.opset, g.ir_version = 9, 4
    x, xq = entry(g, [1, 6, 5, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 1, 1))
    yq = g.after(xq, wq, terms, 4, signed=0)
    y = g.node("Upsample", [g.quant(g.node("Relu", [y]), yq), g.floats([1, 1, 2, 2])], mode="nearest")
    close(g, y, yq, (4, 8, 3, 3), [1, 4, 8, 10])


@case()
def nhwc_input(g: QonnxGraph) -> None:
    """QKeras: a channels-last input, transposed for the first convolution."""
    xq = g.act_quant(0.1, 4, signed=0)
    x = g.input(["N", 8, 8, 3], step=float(xq.scale), about=float(xq.scale) * 0.15)
    x = g.node("Transpose", [g.quant(x, xq)], perm=[0, 3, 1, 2])
    close(g, x, xq, (4, 3, 3, 3), ["N", 4, 6, 6])


@case()
def nhwc_between_layers(g: QonnxGraph) -> None:
    x, xq = entry(g, ["N", 6, 8, 8])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3))
    yq = g.after(xq, wq, terms, 3, signed=0)
    y = g.node("Relu", [g.node("Transpose", [y], perm=[0, 2, 3, 1])])
    y = g.node("Transpose", [g.quant(y, yq)], perm=[0, 3, 1, 2])
    close(g, y, yq, (4, 8, 3, 3), ["N", 4, 4, 4])


@case()
def residual_add(g: QonnxGraph) -> None:
    """Two branches on one scale, added, quantized again."""
    x, xq = entry(g, [1, 8, 6, 6], g.act_quant(0.1, 4, signed=0))
    y, _, _ = conv(g, x, xq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    branch = replace(xq, signed=1)
    total = g.node("Add", [g.quant(y, branch), x])
    yq = g.act_quant(0.12, 4, signed=0)
    close(g, g.quant(g.node("Relu", [total]), yq), yq, (4, 8, 1, 1), [1, 4, 6, 6])


@case()
def residual_add_of_norms(g: QonnxGraph) -> None:
    """Both operands of the Add are told by thresholds: behind normalizations."""
    x, xq = entry(g, [1, 8, 6, 6], g.act_quant(0.1, 4, signed=0))
    operands = []
    for size in (3, 1):
        y, wq, terms = conv(g, x, xq, (8, 8, size, size), pads=[size // 2] * 4)
        branch = g.after(xq, wq, terms, 4)
        spread = float(np.mean(branch.scale)) * 3
        operands.append(g.quant(_norm(g, y, spread), branch))
    yq = g.act_quant(0.12, 4, signed=0)
    total = g.node("Relu", [g.node("Add", operands)])
    close(g, g.quant(total, yq), yq, (4, 8, 1, 1), [1, 4, 6, 6])


@case()
def residual_without_inner_quantizer(g: QonnxGraph) -> None:
    x, xq = entry(g, [1, 8, 6, 6], g.act_quant(0.1, 4, signed=0))
    y, wq, terms = conv(g, x, xq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms, 4, signed=0)
    y = g.quant(g.node("Relu", [g.node("Add", [y, x])]), yq)
    close(g, y, yq, (4, 8, 1, 1), [1, 4, 6, 6])


@case()
def two_readers(g: QonnxGraph) -> None:
    """One Quant, two convolutions."""
    x, xq = entry(g, [1, 6, 6, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms, 2)
    y = g.quant(y, yq)
    for _ in range(2):
        z, w2, terms = conv(g, y, yq, (4, 8, 1, 1))
        g.output(g.quant(z, g.after(yq, w2, terms, 4)), [1, 4, 6, 6])


@case()
def two_quantizers_of_one_sum(g: QonnxGraph) -> None:
    """A sum is read by two quantizers."""
    x, xq = entry(g, [1, 6, 6, 6])
    y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), pads=[1, 1, 1, 1])
    for bits in (0, 4):
        yq = g.after(xq, wq, terms, bits)
        z, w2, k = conv(g, g.quant(y, yq), yq, (4, 8, 1, 1))
        g.output(g.quant(z, g.after(yq, w2, k, 4)), [1, 4, 6, 6])


# -- MultiThreshold


def _threshold_case(
    name: str, *, out_scale: float = 1.0, out_bias: float = 0.0, count: int = 7, channels: int = 8,
    layout: str | None = "NCHW", integers: bool = True, **expected,
) -> None:  # fmt: skip
    def build(g: QonnxGraph) -> None:
        """FINN: integers all the way, thresholds on the sums."""
        g.speak("finn.custom_op.general" if integers else "qonnx.custom_op.general")
        xq = Quant(np.float32(1), 4)
        x, xq = entry(g, [1, 6, 7, 6], xq)
        wq = Quant(np.float32(1), 3, narrow=1)
        y, wq, terms = conv(g, x, xq, (8, 6, 3, 3), wq)
        spread = np.sqrt(terms) * xq.deviation * wq.deviation
        thresholds = np.sort(g.rng.normal(size=(channels, count)) * spread, axis=1)
        if g.flavour == "ties":
            thresholds = np.rint(thresholds)
        attributes = {"out_scale": out_scale, "out_bias": out_bias}
        if layout is not None:
            attributes["data_layout"] = layout
        if layout == "NHWC":
            y = g.node("Transpose", [y], perm=[0, 2, 3, 1])
        y = g.multithreshold(y, thresholds, **attributes)
        if layout == "NHWC":
            y = g.node("Transpose", [y], perm=[0, 3, 1, 2])
        w2 = Quant(np.float32(1), 3, narrow=1)
        g.output(g.node("Conv", [y, g.weights((4, 8, 1, 1), w2)]), [1, 4, 5, 4])

    case(**expected)(build, f"multithreshold_{name}")


_threshold_case("unsigned")
_threshold_case("one_row_for_all", channels=1)
_threshold_case("signed", out_bias=-4.0)
_threshold_case("scaled", out_scale=0.37, out_bias=0.0)
_threshold_case("scaled_signed", out_scale=0.25, out_bias=-1.0)
_threshold_case("sign", out_scale=2.0, out_bias=-1.0, count=1)
_threshold_case("single", count=1)
_threshold_case("channels_last", layout="NHWC")
_threshold_case("no_layout", layout=None)
_threshold_case("six_bits", count=63)
_threshold_case("descending_output", out_scale=-1.0, out_bias=7.0, left={"Conv": "multiples of one scale"})


@case()
def multithreshold_at_the_entry(g: QonnxGraph) -> None:
    """A float tensor goes into thresholds directly."""
    x = g.input([1, 6, 7, 6], about=0.05)
    thresholds = np.sort(g.rng.normal(size=(6, 7)), axis=1)
    x = g.multithreshold(x, thresholds, data_layout="NCHW")
    close(g, x, Quant(np.float32(1), 3, signed=0), (4, 6, 3, 3), [1, 4, 5, 4])


@case()
def multithreshold_matmul(g: QonnxGraph) -> None:
    x, _ = entry(g, [3, 20], Quant(np.float32(1), 0))
    w1, w2 = g.weight_quant(None, 0), g.weight_quant(None, 0)
    y = g.node("MatMul", [x, g.weights((20, 12), replace(w1, scale=np.float32(1)))])
    y = g.multithreshold(y, np.sort(g.rng.normal(size=(12, 3)) * 4, axis=1), out_dtype="INT2", out_bias=-2.0)
    g.output(g.node("MatMul", [y, g.weights((12, 10), replace(w2, scale=np.float32(1)))]), [3, 10])


# -- entries


@case()
def norm_before_the_first_quantizer(g: QonnxGraph) -> None:
    """2x - 1 between the input and the first quantizer, as in BNN exports."""
    x = g.input([2, 3, 6, 6], about=0.01)
    x = g.node("Sub", [g.node("Mul", [x, g.floats(2.0)]), g.floats([1.0])])
    xq = Quant(np.float32(1), 0)
    close(g, g.quant(x, xq), xq, (4, 3, 3, 3), [2, 4, 4, 4])


@case()
def norm_of_floats(g: QonnxGraph) -> None:
    """A BatchNormalization with a gamma of 0 on a float tensor: 0 times infinity is no code's concern."""
    x = g.input([2, 8, 6, 6], about=0.02)
    xq = g.act_quant(0.02, 8)
    close(g, g.quant(g.node("Relu", [_plain_norm(g, x, 1.0)]), xq), xq, (4, 8, 3, 3), [2, 4, 4, 4])


@case(left={"Conv": "--input-quant"})
def float_images(g: QonnxGraph) -> None:
    """The first convolution reads pixels that nobody quantized."""
    x = g.input([1, 3, 8, 8], name="image")
    wq = g.weight_quant(8)
    y = g.node("Conv", [x, g.weights((8, 3, 3, 3), wq)])
    yq = g.act_quant(0.2, 4, signed=0)
    close(g, g.quant(g.node("Relu", [y]), yq), yq, (4, 8, 3, 3), [1, 4, 4, 4])


@case()
def vectors(g: QonnxGraph) -> None:
    """Tensors of rank 1, quantized by laws that become thresholds."""
    xq = g.act_quant(0.1, rounding="FLOOR")
    x = g.quant(g.input([24], about=0.1), xq)
    y = g.node("MatMul", [x, g.weights((24, 10), g.weight_quant(None))])
    yq = g.act_quant(0.2, 3, rounding="CEIL")
    g.output(g.quant(y, yq), [10])


@case()
def one_threshold_behind_a_reshape(g: QonnxGraph) -> None:
    """It counts 0 or 1 in front of the Reshape as well, where the tensor has another rank."""
    x, _ = entry(g, [3, 12], Quant(np.float32(1), 4))
    y = g.node("MatMul", [x, g.weights((12, 16), Quant(np.float32(1), 4))])
    y = g.node("Reshape", [y, g.ints([3, 4, 2, 2])])
    y = g.multithreshold(y, np.array([[2.5]]), out_dtype="UINT1", data_layout="NCHW")
    close(g, y, Quant(np.float32(1), 1, signed=0), (4, 4, 1, 1), [3, 4, 2, 2])


@case()
def channels_from_one(g: QonnxGraph) -> None:
    """A grey image that a constant spreads over three channels, in front of thresholds."""
    x = g.node(
        "Mul", [g.input([2, 1, 6, 6], about=0.05), g.floats(np.array([2.0, 1.5, -1.0]).reshape(1, 3, 1, 1))]
    )
    xq = g.act_quant(0.05, rounding="FLOOR")
    close(g, g.quant(x, xq), xq, (4, 3, 3, 3), [2, 4, 4, 4])


@case()
def rank_from_a_constant(g: QonnxGraph) -> None:
    """A factor of more dims than the pooled tensor, whose quantizer must not move in front of the pool."""
    x, xq = entry(g, [2, 3, 8, 8])
    y = g.node("MaxPool", [conv(g, x, xq, (4, 3, 3, 3))[0]], kernel_shape=[2, 2])
    y = g.node("Mul", [y, g.floats(np.full((1, 1, 1, 1, 1), 0.5, np.float32))])
    g.output(g.quant(y, g.act_quant(0.2)), [1, 2, 4, 5, 5])
