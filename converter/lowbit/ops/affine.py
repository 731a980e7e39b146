"""LowBitAffine: per-channel multiply and add on codes, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, dequantize, quantize_or_float
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_affine(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    scale: Array,
    shift: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``v = f32(f32(f32(x - x_zero_point) * x_scale) * scale[c]) + shift[c]``, then the quantizer, if any."""
    real = dequantize(x, x_scale, x_zero_point) * scale + shift
    return quantize_or_float(real, y_scale, y_zero_point, y_bits, y_encoding, y_min, y_max)


def affine_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    scale: Array,
    shift: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    """The exact product and sum."""
    product = real_values(x, x_scale, x_zero_point) * scale
    error = ulps(16, product, shift.astype(np.float64), y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(product + shift, error, step_of(y_scale), size=np.abs(product) + np.abs(shift))
