"""LowBitMatMul: matrix product of two quantized tensors, both fed, with one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.ops.codes import Array, output_range, saturate, values
from lowbit.ops.ties import Attributes, Chain, real_values, rounded_operands, step_of, ulps


def low_bit_mat_mul(
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
    a_perm: Sequence[int] = (),
    b_perm: Sequence[int] = (),
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``acc = sum over k of (A[m, k] - a_zero_point) * (B[k, n] - b_zero_point)``, exact, then one product.

    ``A`` and ``B`` are a and b with their dims permuted by a_perm and b_perm. With y_scale
    ``clip(rint(f32(acc) * f32(f32(a_scale * b_scale) / y_scale)) + y_zero_point, y_min, y_max)``, without it
    ``f32(acc) * f32(a_scale * b_scale)``. The dims before the last two broadcast as in numpy.
    """
    left, right = values(a, a_zero_point), values(b, b_zero_point)
    left = left.transpose(a_perm) if len(a_perm) else left
    right = right.transpose(b_perm) if len(b_perm) else right
    # Sums that fit int32 are exact in float64, whose product is much faster than that of integers.
    total = np.matmul(left.astype(np.float64), right.astype(np.float64)).astype(np.float32)
    scale = a_scale * b_scale
    if y_scale is None:
        real: Array = total * scale
        return real
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    rounded = np.rint(total * (scale / y_scale))
    return saturate(rounded, 0 if y_zero_point is None else y_zero_point, low, high, y_encoding)


def mat_mul_chain(
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
    """The exact matrix product, whose terms the error follows."""
    left, right = real_values(a, a_scale, a_zero_point), real_values(b, b_scale, b_zero_point)
    left = left.transpose(attrs["a_perm"]) if attrs.get("a_perm") else left
    right = right.transpose(attrs["b_perm"]) if attrs.get("b_perm") else right
    size = np.abs(left) @ np.abs(right)
    error = ulps(left.shape[-1] + 3, size, y_scale=y_scale, y_zero_point=y_zero_point)
    chain = Chain(left @ right, error, step_of(y_scale), roundings=1)

    def of_rounded_operands() -> list[Chain]:
        return [replace(chain, value=a @ b) for a, b in rounded_operands(left, right)]

    return replace(chain, of_rounded_operands=of_rounded_operands)
