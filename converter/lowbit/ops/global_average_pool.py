"""LowBitGlobalAveragePool: average over all spatial positions, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, output_range, saturate, values
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_global_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    keepdims: int = 1,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``S = sum over pixels of (x - x_zero_point)``, exact, then one multiplication.

    With y_scale ``clip(rint(f32(S) * (x_scale / f32(y_scale * f32(pixels)))) + y_zero_point, y_min, y_max)``,
    without it ``f32(S) * f32(x_scale / f32(pixels))``. Returns [N, 1.., C], or [N, C] with keepdims 0.
    """
    axes = tuple(range(1, x.ndim - 1))
    pixels = np.float32(np.prod(x.shape[1:-1]))
    total = values(x, x_zero_point).sum(axis=axes, keepdims=bool(keepdims)).astype(np.float32)
    if y_scale is None:
        average: Array = total * (x_scale / pixels)
        return average
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    rounded = np.rint(total * (x_scale / (y_scale * pixels)))
    return saturate(rounded, 0 if y_zero_point is None else y_zero_point, low, high, y_encoding)


def global_average_pool_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    """The exact average over all spatial positions."""
    real = real_values(x, x_scale, x_zero_point)
    axes, keep = tuple(range(1, x.ndim - 1)), bool(attrs.get("keepdims", 1))
    size = np.abs(real).mean(axis=axes, keepdims=keep)
    count = int(np.prod(x.shape[1:-1])) + 4
    error = ulps(count, size, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(real.mean(axis=axes, keepdims=keep), error, step_of(y_scale), size=size)
