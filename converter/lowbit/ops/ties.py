"""How near to a rounding tie a result was: which differences from ONNX Runtime floating point explains.

ONNX Runtime computes some nodes with another float32 formula than the file's (QLinearAdd, float convolutions,
...). Two formulas for one real number may round it to neighbouring codes, but only where the number lies
within their combined rounding error of a tie. For one node and its inputs, :func:`chain` gives that real
number in float64 and a bound on the error of any sensible float32 evaluation: numerics.md's ``(K + 3) * 2^-24
* sum |terms|``, K the number of terms added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.ops import DEFINITIONS
from lowbit.ops.codes import Array, values
from lowbit.ops.conv import convolve, weight_values
from lowbit.ops.conv_transpose import convolve_transposed
from lowbit.ops.resize import axis_taps, blend, positions
from lowbit.ops.windows import Windows
from lowbit.schemas import signatures

Reals = npt.NDArray[np.float64]
Attributes = Mapping[str, Any]

ROUNDING = 2.0**-24
"""Relative error of one float32 operation."""


@dataclass
class Chain:
    """The real result of a node before its last rounding."""

    value: Reals
    error: Reals  # bound on |float32 evaluation - value|
    step: Reals | None  # the output's scale; None: a float output
    extra_steps: Reals | float = 0.0  # more whole steps that an inner rounding may move the result by

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where the difference of two results of this node is one of float rounding near a tie.

        NaN is near every tie: no standard says which code it becomes. QuantizeLinear gives the lowest one in
        ONNX Runtime, as the definitions do, and a Cast to integers whatever its processor makes of it.
        """
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        if self.step is None:
            return apart <= self.error
        steps, off = self.value / self.step, self.error / self.step
        with np.errstate(invalid="ignore"):  # infinite inputs are near no tie
            ties = np.floor(steps + off - 0.5) - np.ceil(steps - off - 0.5) + 1
            near: npt.NDArray[np.bool_] = apart <= ties
        inner: npt.NDArray[np.bool_] = np.asarray(self.extra_steps > 0)
        return near | (inner & (apart <= 1 + np.ceil(self.extra_steps))) | np.isnan(self.value)


@dataclass
class Nudged(Chain):
    """The real result behind inner roundings: each may fall the other way where it meets a tie."""

    others: Sequence[Reals] = ()  # the result with inner roundings nudged up or down

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where the difference is that of a tie, of the last rounding or of those before it."""
        near = super().explains(got, expected)
        if self.step is None or not self.others:
            return near
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        codes = np.rint(self.value / self.step)
        moved = np.max([np.abs(np.rint(other / self.step) - codes) for other in self.others], axis=0)
        explained: npt.NDArray[np.bool_] = near | (apart <= moved)
        return explained


@dataclass
class Count(Chain):
    """The number whose thresholds a node counts; ``value`` and ``error`` are in that number's units.

    The threshold of an integer is the first integer beyond a tie, which lies up to 1 before it.
    """

    ties: Reals = field(default_factory=lambda: np.zeros((1, 1)))  # [C or 1, n]
    between: float = 0.0  # how far from there the tie itself may be

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where two counts differ by one threshold that the number is nearest to."""
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        channels = self.value.reshape(-1, self.value.shape[-1])
        near = np.zeros(channels.shape, bool)
        with np.errstate(invalid="ignore"):
            for k in range(self.ties.shape[1]):
                distance = np.abs(channels - self.ties[:, k])
                near |= distance <= self.error.reshape(channels.shape) + self.between
        explained: npt.NDArray[np.bool_] = (apart <= 1) & near.reshape(apart.shape)
        return explained | np.isnan(self.value)


def chain(op_type: str, attrs: Attributes, inputs: Sequence[Array | None]) -> Chain | None:
    """The real result of a node; None for ops that only move codes, where nothing explains a difference."""
    if op_type not in DEFINITIONS:
        raise KeyError(op_type)
    if op_type in ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm"):
        return _matmul(op_type, attrs, dict(zip(signatures()[op_type].inputs, inputs, strict=False)))
    formulas: dict[str, Callable[..., Chain]] = {
        "LowBitAdd": _add,
        "LowBitMul": _mul,
        "LowBitMatMul": _mat_mul,
        "LowBitAffine": _affine,
        "LowBitAveragePool": _average_pool,
        "LowBitGlobalAveragePool": _global_average_pool,
        "LowBitNormalization": _normalization,
        "LowBitConcat": _concat,
        "LowBitResize": _resize,
        "LowBitSoftmax": _softmax,
        "LowBitRequantize": _requantize,
        "LowBitQuantize": _quantize,
        "LowBitThreshold": _threshold,
        "LowBitDequantize": _dequantize,
    }
    if op_type == "LowBitResize" and attrs.get("mode", "nearest") == "nearest":
        return None
    return formulas[op_type](attrs, *inputs) if op_type in formulas else None


def _real(codes: Array, scale: Array, zero_point: Array) -> Reals:
    return np.asarray(values(codes, zero_point) * scale.astype(np.float64))


def _ulps(
    count: float, *terms: Reals | float, y_scale: Array | None = None, y_zero_point: Array | None = None
) -> Reals:
    """``count`` roundings of a sum of terms, with the zero point, which ORT adds before it rounds."""
    total: Reals = sum((np.abs(term) for term in terms), np.zeros(()))
    if y_scale is not None and y_zero_point is not None:
        total = total + np.abs(y_zero_point.astype(np.float64)) * y_scale
    return count * ROUNDING * total


def _step(y_scale: Array | None) -> Reals | None:
    return None if y_scale is None else y_scale.astype(np.float64)


def _matmul(op_type: str, attrs: Attributes, given: dict[str, Array | None]) -> Chain | None:
    def need(name: str) -> Array:
        value = given.get(name)
        return np.zeros((), np.int32) if value is None else value

    total, magnitude, terms = _accumulate(op_type, attrs, need)
    if attrs.get("epilogue") == "thresholds":
        thresholds = _finite(need("thresholds").astype(np.float64), 2.0**31 - 1)
        bias = need("bias").astype(np.float64)
        # A float bias inside the chain is as large as the thresholds that it moves.
        size = magnitude + np.abs(bias) + np.nanmax(np.abs(thresholds), axis=1, initial=0.0)
        middle = thresholds - 0.5 * need("threshold_dir").reshape(-1, 1)
        return Count(total + bias, (terms + 8) * ROUNDING * size, None, ties=middle, between=0.5)
    scale = need("x_scale").astype(np.float64) * need("w_scale").astype(np.float64)
    bias = need("bias").astype(np.float64)
    value, size, count = (total + bias) * scale, (magnitude + np.abs(bias)) * scale, terms + 3
    residual = None
    if given.get("residual") is not None:
        residual = _real(need("residual"), need("residual_scale"), need("residual_zero_point"))
        residual_size = np.abs(residual) + np.abs(need("residual_zero_point") * need("residual_scale"))

    y_scale = given.get("y_scale")
    kind = attrs.get("epilogue", "requantize")
    if kind == "requantize" and residual is not None:
        # The inner code may itself have been rounded the other way: that moves the sum by one inner step.
        inner_scale = need("inner_scale").astype(np.float64)
        inner = Chain(value, count * ROUNDING * size, inner_scale)
        steps = inner.value / inner_scale
        flips = np.abs(steps - np.floor(steps) - 0.5) <= inner.error / inner_scale
        low, high = _inner_range(attrs)
        zero = need("inner_zero_point").astype(np.float64)
        code = np.clip(np.rint(steps) + zero, low, high)
        value = (code - zero) * inner_scale + residual
        size = np.abs((code - zero) * inner_scale) + np.abs(zero * inner_scale) + residual_size
        error = _ulps(8, size, y_scale=y_scale, y_zero_point=given.get("y_zero_point"))
        return Chain(value, error, _step(y_scale), np.where(flips, inner_scale / need("y_scale"), 0.0))
    off_grid = np.zeros(())
    if kind == "tail":
        for step in filter(None, str(attrs.get("tail", "")).split(",")):
            count += 2
            if step == "bias":
                bias = need("tail_bias").astype(np.float64)
                # Where ONNX Runtime fuses a float bias it rounds it to the accumulator's grid.
                off_grid = off_grid + np.abs(bias - np.rint(bias / scale) * scale)
                value, size = value + bias, size + np.abs(bias)
            elif step == "affine":
                factor, shift = need("tail_scale").astype(np.float64), need("tail_shift").astype(np.float64)
                value, size = value * factor + shift, size * np.abs(factor) + np.abs(shift)
                off_grid = off_grid * np.abs(factor)
            elif step == "residual" and residual is not None:
                value, size = value + residual, size + residual_size
            elif step == "relu":
                value = np.maximum(value, 0)
            elif step == "clip":
                value = np.clip(value, attrs.get("clip_min", 0.0), attrs.get("clip_max", 0.0))
    return Chain(value, count * ROUNDING * size + off_grid, _step(y_scale))


def _inner_range(attrs: Attributes) -> tuple[int, int]:
    low, high = (-128, 127) if attrs.get("inner_encoding") == "signed" else (0, 255)
    (first,), (last,) = attrs.get("inner_min") or [low], attrs.get("inner_max") or [high]
    return first, last


def _accumulate(op_type: str, attrs: Attributes, need: Callable[[str], Array]) -> tuple[Reals, Reals, int]:
    """The integer sums without bias, the sums of their absolute terms, and how many terms one has."""
    x = values(need("x"), need("x_zero_point"), attrs.get("x_encoding", "unsigned"))
    gemm = op_type.endswith("Gemm")
    out = attrs["out_features"] if gemm else attrs["out_channels"]
    kernel = [1] if gemm else list(attrs["kernel_shape"])
    group = attrs.get("group", 1)
    depth = attrs["in_features"] if gemm else attrs["in_channels"] // group
    w = weight_values(
        need("w"),
        need("w_zero_point"),
        out,
        kernel,
        depth,
        attrs.get("w_bits", 8),
        attrs.get("w_encoding", "unsigned"),
    )

    def product(x: Any, w: Any) -> Reals:
        if gemm:
            axis = attrs.get("axis", -1) % x.ndim
            rows = x.reshape(*x.shape[:axis], depth)
            return np.asarray(rows.astype(np.float64) @ w[:, 0].T.astype(np.float64))
        geometry = (attrs.get("strides", ()), attrs.get("pads", ()), attrs.get("dilations", ()))
        if op_type == "LowBitConvTranspose":
            return convolve_transposed(x, w, *geometry, attrs.get("output_padding", ()), group).astype(
                np.float64
            )
        return convolve(x, w, *geometry, group).astype(np.float64)

    return product(x, w), product(np.abs(x), np.abs(w)), depth * int(np.prod(kernel))


def _add(
    attrs: Attributes,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    left, right = _real(a, a_scale, a_zero_point), _real(b, b_scale, b_zero_point)
    zeros = np.abs(a_zero_point * a_scale) + np.abs(b_zero_point * b_scale)  # terms of QLinearAdd's formula
    error = _ulps(8, left, right, zeros, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(left + right, error, _step(y_scale))


def _mul(
    attrs: Attributes,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    value = _real(a, a_scale, a_zero_point) * _real(b, b_scale, b_zero_point)
    return Chain(value, _ulps(8, value, y_scale=y_scale, y_zero_point=y_zero_point), _step(y_scale))


def _mat_mul(
    attrs: Attributes,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    left, right = _real(a, a_scale, a_zero_point), _real(b, b_scale, b_zero_point)
    left = left.transpose(attrs["a_perm"]) if attrs.get("a_perm") else left
    right = right.transpose(attrs["b_perm"]) if attrs.get("b_perm") else right
    size = np.abs(left) @ np.abs(right)
    error = _ulps(left.shape[-1] + 3, size, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(left @ right, error, _step(y_scale))


def _affine(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    scale: Array,
    shift: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    product = _real(x, x_scale, x_zero_point) * scale
    error = _ulps(16, product, shift.astype(np.float64), y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(product + shift, error, _step(y_scale))


def _average_pool(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    windows = Windows.of(
        x,
        attrs["kernel_shape"],
        attrs.get("strides", ()),
        (),
        attrs.get("pads", ()),
        attrs.get("ceil_mode", 0),
    )
    real = windows.padded(_real(x, x_scale, x_zero_point), 0)
    taps = windows.tap_counts(bool(attrs.get("count_include_pad", 0))).astype(np.float64)
    value = np.add.reduce([seen for _, seen in windows.taps(real)]) / taps
    size = np.add.reduce([seen for _, seen in windows.taps(np.abs(real))]) / taps
    count = int(np.prod(attrs["kernel_shape"])) + 4
    return Chain(value, _ulps(count, size, y_scale=y_scale, y_zero_point=y_zero_point), _step(y_scale))


def _global_average_pool(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    real = _real(x, x_scale, x_zero_point)
    axes, keep = tuple(range(1, x.ndim - 1)), bool(attrs.get("keepdims", 1))
    size = np.abs(real).mean(axis=axes, keepdims=keep)
    count = int(np.prod(x.shape[1:-1])) + 4
    error = _ulps(count, size, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(real.mean(axis=axes, keepdims=keep), error, _step(y_scale))


def _normalization(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    gamma: Array,
    beta: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    first = attrs.get("axis", -1) % x.ndim
    normalized, epsilon = x.shape[first:], float(np.float32(attrs.get("epsilon", 1e-5)))
    whole = (*x.shape[:first], math.prod(normalized[:-1]), attrs.get("groups", 1), -1)
    real, over = _real(x, x_scale, x_zero_point).reshape(whole), (-3, -1)
    count = real.shape[-3] * real.shape[-1]
    mean, variance = real.mean(over, keepdims=True), real.var(over, keepdims=True) + epsilon
    deviation = np.sqrt(variance)
    # Sums of n terms are off by n roundings; E[x^2] - E[x]^2, as some runtimes have it, by those of E[x^2].
    off_mean = (count + 3) * ROUNDING * np.abs(real).mean(over, keepdims=True)
    off_variance = 2 * (count + 3) * ROUNDING * (real * real).mean(over, keepdims=True)
    centred = (real - mean) / deviation
    off = (off_mean + 2 * ROUNDING * (np.abs(real) + np.abs(mean))) / deviation
    off = off + np.abs(centred) * (off_variance / (2 * variance) + 4 * ROUNDING)
    factor, summand = (_per_element(array, normalized) for array in (gamma, beta))
    product = centred.reshape(x.shape) * factor
    error = off.reshape(x.shape) * np.abs(factor)
    error = error + _ulps(4, product, summand, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(product + summand, error, _step(y_scale))


def _per_element(array: Array, normalized: tuple[int, ...]) -> Reals:
    flat: Reals = array.astype(np.float64).reshape(-1)
    return flat if flat.size in (1, normalized[-1]) else flat.reshape(normalized)


def _concat(
    attrs: Attributes, x_scales: Array, x_zero_points: Array, y_scale: Array, y_zero_point: Array, *x: Array
) -> Chain:
    parts = [_real(*part) for part in zip(x, x_scales, x_zero_points, strict=True)]
    value = np.concatenate(parts, axis=attrs["axis"])
    return Chain(value, _ulps(4, value, y_scale=y_scale, y_zero_point=y_zero_point), _step(y_scale))


def _resize(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
) -> Chain:
    zero_point = np.zeros((), np.int32) if x_zero_point is None else x_zero_point
    y_zero = np.zeros((), np.int32) if y_zero_point is None else y_zero_point
    value = _real(x, x_scale, zero_point)
    # The terms of a formula that takes the zero point off at the end.
    size = np.abs(value) + np.abs(zero_point * x_scale.astype(np.float64))
    drift, count = np.zeros(x.shape), 4
    cubic = attrs["mode"] == "cubic"
    steep = 1 + abs(attrs.get("cubic_coeff_a", -0.75)) if cubic else 1.0
    for axis, length in enumerate(x.shape[1:-1], start=1):
        indices, weights = axis_taps(attrs, axis - 1, length)
        # A position is a few roundings off, and a weight by that times its slope and its own roundings.
        unsure = ROUNDING * steep * (12 * (np.abs(positions(attrs, axis - 1, length)) + 1) + 100 * cubic)
        drift = blend(drift, axis, indices, np.abs(weights))
        drift = drift + blend(size, axis, indices, np.broadcast_to(unsure, weights.shape))
        value, size = blend(value, axis, indices, weights), blend(size, axis, indices, np.abs(weights))
        count += 2 * len(indices)
    return Chain(value, _ulps(count, size, y_scale=y_scale, y_zero_point=y_zero) + drift, _step(y_scale))


def _softmax(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    table: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Chain:
    axis = attrs.get("axis", -1)
    codes = values(x, 0)
    entries = table.astype(np.float64)[np.max(codes, axis=axis, keepdims=True, initial=-128) - codes]
    share = entries / np.maximum(entries.sum(axis=axis, keepdims=True), 1.0)
    # An entry is half a unit of 2^-24 from exp, which stock takes of numbers that have been rounded, and the
    # sum of a row of them is rounded at every step.
    reach = float(np.max(np.abs(_real(x, x_scale, x_zero_point)), initial=0.0))
    error = _ulps(2 * x.shape[axis] + 24 + 4 * reach, share, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(share, error + ROUNDING, _step(y_scale))


def _requantize(
    attrs: Attributes, x: Array, x_scale: Array, x_zero_point: Array, y_scale: Array, y_zero_point: Array
) -> Chain:
    value = _real(x, x_scale, x_zero_point)
    return Chain(value, _ulps(4, value, y_scale=y_scale, y_zero_point=y_zero_point), _step(y_scale))


def _quantize(attrs: Attributes, x: Array, y_scale: Array, y_zero_point: Array) -> Chain:
    value = (np.moveaxis(x, 1, -1) if attrs.get("to_channels_last") else x).astype(np.float64)
    return Chain(value, _ulps(2, value), _step(y_scale))


def _threshold(attrs: Attributes, x: Array, thresholds: Array, base: Array, direction: Array) -> Chain:
    value = (np.moveaxis(x, 1, -1) if attrs.get("to_channels_last") else x).astype(np.float64)
    rows = _finite(thresholds.astype(np.float64), np.inf)
    error = np.broadcast_to(8 * ROUNDING * np.nanmax(np.abs(rows), axis=1, initial=0.0), value.shape)
    return Count(value, error, None, ties=rows)


def _finite(thresholds: Reals, limit: float) -> Reals:
    """Thresholds, with NaN, which nothing is near to, for those out of reach or always reached."""
    return np.where(np.abs(thresholds) >= limit, np.nan, thresholds)


def _dequantize(attrs: Attributes, x: Array, x_scale: Array, x_zero_point: Array) -> Chain:
    value = _real(x, x_scale, x_zero_point)
    value = np.moveaxis(value, -1, 1) if attrs.get("to_channels_first") else value
    return Chain(value, _ulps(2, value), None)
