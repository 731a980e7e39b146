"""LowBitAdd: sum of two quantized tensors, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, dequantize, quantize_or_float
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_add(
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    b_table: Array | None = None,
    *,
    a_encoding: str = "unsigned",
    b_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``v = f32(a - a_zero_point) * a_scale + f32(b - b_zero_point) * b_scale``, then the quantizer, if any.

    Each product rounds to float32 before the sum does. With b_table the second summand is its entry for the
    byte of b. Shapes broadcast as in numpy.
    """
    second = dequantize(b, b_scale, b_zero_point) if b_table is None else b_table[b.view(np.uint8)]
    real = dequantize(a, a_scale, a_zero_point) + second
    return quantize_or_float(real, y_scale, y_zero_point, y_bits, y_encoding, y_min, y_max)


def add_chain(
    attrs: Attributes,
    a: Array,
    a_scale: Array,
    a_zero_point: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    b_table: Array | None = None,
) -> Chain:
    """The exact sum; QLinearAdd rounds terms of its own, those of both zero points among them."""
    left = real_values(a, a_scale, a_zero_point)
    if b_table is None:
        right = real_values(b, b_scale, b_zero_point)
    else:
        right = b_table[b.view(np.uint8)].astype(np.float64)
    zeros = np.abs(a_zero_point * a_scale) + np.abs(b_zero_point * b_scale)  # terms of QLinearAdd's formula
    error = ulps(8, left, right, zeros, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(left + right, error, step_of(y_scale), size=np.abs(left) + np.abs(right))
