"""The four epilogues: from the exact integer accumulator of a convolution or matrix product to its output.

Shared by LowBitConv, APConv, LowBitConvTranspose, LowBitGemm and APGemm, whose inputs from ``bias`` on and
whose output attributes are the fields of :class:`Epilogue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields

import numpy as np

from lowbit.errors import LowBitError
from lowbit.ops.codes import Array, Floats, Ints, dequantize, output_range, quantize, saturate, storage
from lowbit.ops.functions import FUNCTIONS, REAL_FUNCTIONS
from lowbit.ops.ties import ROUNDING, Attributes, Chain, Count, Reals, reachable, real_values, step_of, ulps

INT32 = np.iinfo(np.int32)

_OPERANDS = ("x", "w", "x_scale", "x_zero_point", "w_scale", "w_zero_point")


@dataclass(frozen=True)
class Epilogue:
    """Inputs and attributes of a node that say what happens to ``acc``. All names are those of the schema."""

    x_scale: Array
    w_scale: Array
    bias: Array | None = None
    y_scale: Array | None = None
    y_zero_point: Array | None = None
    thresholds: Array | None = None
    threshold_base: Array | None = None
    threshold_dir: Array | None = None
    tail_bias: Array | None = None
    tail_scale: Array | None = None
    tail_shift: Array | None = None
    residual: Array | None = None
    residual_scale: Array | None = None
    residual_zero_point: Array | None = None
    inner_scale: Array | None = None
    inner_zero_point: Array | None = None
    _: KW_ONLY
    y_bits: int = 8
    y_encoding: str = "unsigned"
    y_min: Sequence[int] = ()
    y_max: Sequence[int] = ()
    epilogue: str = "requantize"
    tail: str = ""
    clip_min: float = 0.0
    clip_max: float = 0.0
    inner_min: Sequence[int] = ()
    inner_max: Sequence[int] = ()
    inner_encoding: str = "unsigned"
    residual_encoding: str = "unsigned"

    def apply(self, acc: Ints) -> Array:
        """The output of the node for the accumulator ``acc`` [..., out_channels], still without the bias.

        Returns codes (uint8 or int8), or float32.

        Raises:
            LowBitError: if the sum with the bias leaves int32, which no kernel would compute.
        """
        if self.bias is not None:
            acc = acc + self.bias.astype(np.int64)
        if acc.size and (acc.min() < INT32.min or acc.max() > INT32.max):
            raise LowBitError("the accumulator leaves int32: such a node is refused, split K")
        formulas = {
            "requantize": self.requantize,
            "float": self.real,
            "thresholds": self.count_thresholds,
            "tail": self.run_tail,
        }
        if self.epilogue not in formulas:
            raise LowBitError(f"epilogue must be one of {', '.join(formulas)}, got '{self.epilogue}'")
        with np.errstate(all="ignore"):  # inf and NaN are defined, see saturate
            return formulas[self.epilogue](acc)

    def real(self, acc: Ints) -> Floats:
        """``f32(acc) * f32(x_scale * w_scale[c])``."""
        product: Floats = acc.astype(np.float32) * (self.x_scale * self.w_scale)
        return product

    def requantize(self, acc: Ints) -> Array:
        """One multiplication, one rounding; with a residual a second quantizer behind the first."""
        if self.residual is None:
            multiplier = (self.x_scale * self.w_scale) / _given(self.y_scale, "y_scale")
            low, high = output_range(self.y_bits, self.y_encoding, self.y_min, self.y_max)
            zero_point = _or_zero(self.y_zero_point)
            return saturate(
                np.rint(acc.astype(np.float32) * multiplier), zero_point, low, high, self.y_encoding
            )

        inner_scale = _given(self.inner_scale, "inner_scale")
        inner_zero_point = _or_zero(self.inner_zero_point)
        low, high = output_range(8, self.inner_encoding, self.inner_min, self.inner_max)
        multiplier = (self.x_scale * self.w_scale) / inner_scale
        inner = saturate(
            np.rint(acc.astype(np.float32) * multiplier), inner_zero_point, low, high, self.inner_encoding
        )
        return self._quantize(dequantize(inner, inner_scale, inner_zero_point) + self._residual())

    def count_thresholds(self, acc: Ints) -> Array:
        """``base[c] + #{k : dir[c] * acc >= dir[c] * T[c, k]}``."""
        thresholds = _given(self.thresholds, "thresholds").astype(np.int64)
        base = _given(self.threshold_base, "threshold_base").astype(np.int64)
        direction = _given(self.threshold_dir, "threshold_dir").astype(np.int64)
        y = np.empty(acc.shape, np.int64)
        for c in range(acc.shape[-1]):
            # The row dir * T[c] ascends, so counting its members up to dir * acc is a binary search.
            reached = np.searchsorted(direction[c] * thresholds[c], direction[c] * acc[..., c], side="right")
            y[..., c] = base[c] + reached
        return y.astype(storage(self.y_encoding))

    def run_tail(self, acc: Ints) -> Array:
        """The float32 chain of the file: its steps in their order, then the quantizer if there is one."""
        v = self.real(acc)
        for step in filter(None, self.tail.split(",")):
            if step == "bias":
                v = v + _given(self.tail_bias, "tail_bias")
            elif step == "affine":
                v = v * _given(self.tail_scale, "tail_scale")
                v = v + _given(self.tail_shift, "tail_shift")
            elif step == "residual":
                v = v + self._residual()
            elif step == "relu":
                v = np.maximum(v, np.float32(0))
            elif step == "clip":
                v = np.minimum(np.maximum(v, np.float32(self.clip_min)), np.float32(self.clip_max))
            elif step in FUNCTIONS:
                v = FUNCTIONS[step](v)
            else:
                expected = ", ".join(("bias, affine, residual, relu, clip", *FUNCTIONS))
                raise LowBitError(f"a tail step must be one of {expected}; got '{step}'")
        return v if self.y_scale is None else self._quantize(v)

    def _residual(self) -> Floats:
        residual = _given(self.residual, "residual")
        return dequantize(
            residual, _given(self.residual_scale, "residual_scale"), _or_zero(self.residual_zero_point)
        )

    def _quantize(self, real: Floats) -> Array:
        low, high = output_range(self.y_bits, self.y_encoding, self.y_min, self.y_max)
        scale = _given(self.y_scale, "y_scale")
        return quantize(real, scale, _or_zero(self.y_zero_point), low, high, self.y_encoding)


def _given(value: Array | None, name: str) -> Array:
    if value is None:
        raise LowBitError(f"this epilogue needs the input '{name}'")
    return value


def _or_zero(value: Array | None) -> Array:
    return np.zeros((), np.int32) if value is None else value


class Operands:
    """The inputs of a convolution or matrix product by their names in the schema."""

    def __init__(self, inputs: Sequence[Array | None]):
        own = [each.name for each in fields(Epilogue) if not each.kw_only and each.name not in _OPERANDS]
        self._given = dict(zip((*_OPERANDS, *own), inputs, strict=False))

    def get(self, name: str) -> Array | None:
        """An input; None where it is absent."""
        return self._given.get(name)

    def __getitem__(self, name: str) -> Array:
        """An input; 0 where it is absent."""
        value = self.get(name)
        return np.zeros((), np.int32) if value is None else value


_FLOAT16_ROUNDINGS = {"relu": 0, "clip": 0, "bias": 1, **dict.fromkeys(("affine", "residual", *FUNCTIONS), 2)}
"""How often an original in float16 rounds in a step of a tail, its second operand included."""


def epilogue_chain(attrs: Attributes, given: Operands, total: Reals, magnitude: Reals, terms: int) -> Chain:
    """The real result of the node.

    Args:
        attrs: its attributes.
        given: its inputs.
        total: the integer sums without bias.
        magnitude: the sums of their absolute terms.
        terms: how many terms one has.
    """
    if attrs.get("epilogue") == "thresholds":
        thresholds = reachable(given["thresholds"].astype(np.float64), 2.0**31 - 1)
        bias = given["bias"].astype(np.float64)
        # A float bias inside the chain is as large as the thresholds that it moves.
        moved = np.abs(bias) + np.nanmax(np.abs(thresholds), axis=1, initial=0.0)
        middle = thresholds - 0.5 * given["threshold_dir"].reshape(-1, 1)
        error = (terms + 8) * ROUNDING * (magnitude + moved)
        half = np.abs(total) + moved
        return Count(total + bias, error, None, size=half, roundings=8, ties=middle, between=0.5)
    scale = given["x_scale"].astype(np.float64) * given["w_scale"].astype(np.float64)
    bias = given["bias"].astype(np.float64)
    value, size, count = (total + bias) * scale, (magnitude + np.abs(bias)) * scale, terms + 3
    half = np.abs(total * scale) + np.abs(bias * scale)  # what roundings to float16 are relative to
    residual = None
    if given.get("residual") is not None:
        residual = real_values(given["residual"], given["residual_scale"], given["residual_zero_point"])
        residual_size = np.abs(residual) + np.abs(given["residual_zero_point"] * given["residual_scale"])

    y_scale = given.get("y_scale")
    kind = attrs.get("epilogue", "requantize")
    if kind == "requantize" and residual is not None:
        # The inner code may itself have been rounded the other way: that moves the sum by one inner step.
        inner_scale = given["inner_scale"].astype(np.float64)
        inner = Chain(value, count * ROUNDING * size, inner_scale, size=half, roundings=1)
        low, high = _inner_range(attrs)
        zero = given["inner_zero_point"].astype(np.float64)
        code = np.clip(np.rint(value / inner_scale) + zero, low, high)
        value = (code - zero) * inner_scale + residual
        size = np.abs((code - zero) * inner_scale) + np.abs(zero * inner_scale) + residual_size
        error = ulps(8, size, y_scale=y_scale, y_zero_point=given.get("y_zero_point"))
        return Chain(value, error, step_of(y_scale), inner, size)
    off_grid, roundings = np.zeros(()), 1
    if kind == "tail":
        for step in filter(None, str(attrs.get("tail", "")).split(",")):
            count += 2
            roundings += _FLOAT16_ROUNDINGS[step]
            if step == "bias":
                bias = given["tail_bias"].astype(np.float64)
                # Where ONNX Runtime fuses a float bias it rounds it to the accumulator's grid.
                off_grid = off_grid + np.abs(bias - np.rint(bias / scale) * scale)
                value, size, half = value + bias, size + np.abs(bias), half + np.abs(bias)
            elif step == "affine":
                factor, shift = given["tail_scale"].astype(np.float64), given["tail_shift"].astype(np.float64)
                value, size = value * factor + shift, size * np.abs(factor) + np.abs(shift)
                half, off_grid = half * np.abs(factor) + np.abs(shift), off_grid * np.abs(factor)
            elif step == "residual" and residual is not None:
                value, size, half = value + residual, size + residual_size, half + np.abs(residual)
            elif step == "relu":
                value = np.maximum(value, 0)
            elif step == "clip":
                value = np.clip(value, attrs.get("clip_min", 0.0), attrs.get("clip_max", 0.0))
            elif step in FUNCTIONS:
                # Their slopes are 1.5 at most; 16 roundings are what other formulas of a sigmoid take.
                off_grid = 1.5 * off_grid + 16 * count * ROUNDING * np.abs(value)
                size, half = 1.5 * size, 1.5 * half
                value = REAL_FUNCTIONS[step](value)
    error = count * ROUNDING * size + off_grid
    return Chain(value, error, step_of(y_scale), size=half, roundings=roundings)


def _inner_range(attrs: Attributes) -> tuple[int, int]:
    low, high = (-128, 127) if attrs.get("inner_encoding") == "signed" else (0, 255)
    (first,), (last,) = attrs.get("inner_min") or [low], attrs.get("inner_max") or [high]
    return first, last
