"""LowBitAffine: per-channel multiply and add on codes, channels last."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.ops.codes import Array, dequantize, quantize_or_float


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
