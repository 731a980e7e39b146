"""LowBitQuantize: QuantizeLinear that can also move the channels last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops import codes
from lowbit.ops.codes import Array
from lowbit.ops.ties import Attributes, Chain, step_of, ulps


def low_bit_quantize(
    x: Array,
    y_scale: Array,
    y_zero_point: Array,
    *,
    to_channels_last: int = 0,
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``clip(rint(x / y_scale) + y_zero_point, y_min, y_max)``, real float32 division, NaN gives y_min.

    Args:
        x: float32, any shape; [N, C, D1..] with to_channels_last, which gives codes [N, D1.., C].
        y_scale: scalar, or [C] along the last dim of the output.
    """
    low, high = codes.output_range(y_bits, y_encoding, y_min, y_max)
    real = np.moveaxis(x, 1, -1) if to_channels_last else x
    with np.errstate(all="ignore"):
        return codes.quantize(np.asarray(real, np.float32), y_scale, y_zero_point, low, high, y_encoding)


def quantize_chain(attrs: Attributes, x: Array, y_scale: Array, y_zero_point: Array) -> Chain:
    """The numbers themselves, before the division by y_scale."""
    value = (np.moveaxis(x, 1, -1) if attrs.get("to_channels_last") else x).astype(np.float64)
    return Chain(value, ulps(2, value), step_of(y_scale))
