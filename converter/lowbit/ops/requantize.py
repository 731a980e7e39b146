"""LowBitRequantize: from one quantization grid to another."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.ops.codes import Array, dequantize, output_range, quantize
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_requantize(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    *,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``clip(rint((f32(x - x_zero_point) * x_scale) / y_scale) + y_zero_point, y_min, y_max)``.

    Scales and zero points are scalars or [C], along the last dim.
    """
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    return quantize(dequantize(x, x_scale, x_zero_point), y_scale, y_zero_point, low, high, y_encoding)


def requantize_chain(
    attrs: Attributes, x: Array, x_scale: Array, x_zero_point: Array, y_scale: Array, y_zero_point: Array
) -> Chain:
    """The real numbers that the codes stand for."""
    value = real_values(x, x_scale, x_zero_point)
    return Chain(value, ulps(4, value, y_scale=y_scale, y_zero_point=y_zero_point), step_of(y_scale))
