"""LowBitNormalization: layer, group and instance normalization of a quantized tensor, channels last."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, quantize_or_float, values
from lowbit.ops.ties import ROUNDING, Attributes, Chain, real_values, step_of, ulps


def low_bit_normalization(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    gamma: Array,
    beta: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    axis: int = -1,
    groups: int = 1,
    epsilon: float = 1e-5,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``f32(f32(f32(f32(q - x_zero_point) - mean) * gain) * gamma) + beta``, then the quantizer, if any.

    The dims of x from ``axis`` on are normalized together, the last of them in ``groups`` parts. With n the
    elements of a part, ``S1`` the sum of ``q - x_zero_point`` and ``S2`` that of its squares, both exact:
    ``mean = f32(S1 / n)``, ``gain = f32(x_scale / sqrt(x_scale^2 * (n * S2 - S1^2) / n^2 + epsilon))``, every
    operation in float64. gamma and beta have one element, one per channel (last dim), or one per normalized
    element.
    """
    first = axis % x.ndim
    lead, normalized = x.shape[:first], x.shape[first:]
    shape = (
        *lead,
        math.prod(normalized[:-1]),
        groups,
        normalized[-1] // groups,
    )
    parts = values(x, x_zero_point).reshape(shape)
    count = parts.shape[-3] * parts.shape[-1]
    over = (-3, -1)
    total = parts.sum(over, keepdims=True)
    spread = count * (parts * parts).sum(over, keepdims=True) - total * total
    scale = np.float64(x_scale)
    with np.errstate(divide="ignore", invalid="ignore"):  # x may be empty
        variance = scale * scale * spread.astype(np.float64) / np.float64(count * count)
        mean = (total.astype(np.float64) / np.float64(count)).astype(np.float32)
    gain = (scale / np.sqrt(variance + np.float64(np.float32(epsilon)))).astype(np.float32)
    centred = ((parts.astype(np.float32) - mean) * gain).reshape(x.shape)
    real = centred * _spread(gamma, normalized) + _spread(beta, normalized)
    return quantize_or_float(real, y_scale, y_zero_point, y_bits, y_encoding, y_min, y_max)


def _spread(array: Array, normalized: tuple[int, ...]) -> Array:
    """One number, one per channel, or one per normalized element, as something that broadcasts with x."""
    flat = array.astype(np.float32).reshape(-1)
    return flat if flat.size in (1, normalized[-1]) else flat.reshape(normalized)


def normalization_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    gamma: Array,
    beta: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    """The exact normalization; the errors of mean and variance are those of their sums."""
    first = attrs.get("axis", -1) % x.ndim
    normalized, epsilon = x.shape[first:], float(np.float32(attrs.get("epsilon", 1e-5)))
    whole = (*x.shape[:first], math.prod(normalized[:-1]), attrs.get("groups", 1), -1)
    real, over = real_values(x, x_scale, x_zero_point).reshape(whole), (-3, -1)
    count = real.shape[-3] * real.shape[-1]
    mean, variance = real.mean(over, keepdims=True), real.var(over, keepdims=True) + epsilon
    deviation = np.sqrt(variance)
    # Sums of n terms are off by n roundings; E[x^2] - E[x]^2, as some runtimes have it, by those of E[x^2].
    off_mean = (count + 3) * ROUNDING * np.abs(real).mean(over, keepdims=True)
    off_variance = 2 * (count + 3) * ROUNDING * (real * real).mean(over, keepdims=True)
    centred = (real - mean) / deviation
    off = (off_mean + 2 * ROUNDING * (np.abs(real) + np.abs(mean))) / deviation
    off = off + np.abs(centred) * (off_variance / (2 * variance) + 4 * ROUNDING)
    factor, summand = (_spread(array, normalized) for array in (gamma, beta))
    product = centred.reshape(x.shape) * factor
    error = off.reshape(x.shape) * np.abs(factor)
    error = error + ulps(4, product, summand, y_scale=y_scale, y_zero_point=y_zero_point)
    size = (np.abs(real) + np.abs(mean)) / deviation
    size = size.reshape(x.shape) * np.abs(factor) + np.abs(summand)
    return Chain(product + summand, error, step_of(y_scale), size=size)
