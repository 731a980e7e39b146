"""LowBitMul: product of two quantized tensors, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.ops.codes import Array, dequantize, quantize_or_float
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_mul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    a_encoding: str = "unsigned",
    b_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``v = (f32(a - a_zero_point) * a_scale) * (f32(b - b_zero_point) * b_scale)``, then quantized.

    Each factor rounds to float32 before the product does. Shapes broadcast as in numpy. Without y_scale v
    itself is the output.
    """
    real = dequantize(a, a_scale, a_zero_point) * dequantize(b, b_scale, b_zero_point)
    return quantize_or_float(real, y_scale, y_zero_point, y_bits, y_encoding, y_min, y_max)


def mul_chain(
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
    """The exact product of the two real numbers."""
    value = real_values(a, a_scale, a_zero_point) * real_values(b, b_scale, b_zero_point)
    return Chain(value, ulps(8, value, y_scale=y_scale, y_zero_point=y_zero_point), step_of(y_scale))
