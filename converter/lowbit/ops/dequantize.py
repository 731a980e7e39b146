"""LowBitDequantize: DequantizeLinear that can also move the channels first."""

from __future__ import annotations

import numpy as np

from lowbit.ops import codes
from lowbit.ops.codes import Array
from lowbit.ops.ties import Attributes, Chain, real_values, ulps


def low_bit_dequantize(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    *,
    to_channels_first: int = 0,
    x_encoding: str = "unsigned",
) -> Array:
    """``f32(x - x_zero_point) * x_scale``, scalars or [C] along the last dim of x.

    Args:
        x: codes; [N, D1.., C] with to_channels_first, which gives float32 [N, C, D1..].
    """
    real = codes.dequantize(x, x_scale, x_zero_point)
    return np.ascontiguousarray(np.moveaxis(real, -1, 1)) if to_channels_first else real


def dequantize_chain(attrs: Attributes, x: Array, x_scale: Array, x_zero_point: Array) -> Chain:
    """The exact product with the scale."""
    value = real_values(x, x_scale, x_zero_point)
    value = np.moveaxis(value, -1, 1) if attrs.get("to_channels_first") else value
    return Chain(value, ulps(2, value), None)
