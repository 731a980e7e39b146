"""LowBitThreshold: any monotone quantizer of a float tensor into few codes."""

from __future__ import annotations

import numpy as np

from lowbit.ops import codes
from lowbit.ops.codes import Array
from lowbit.ops.ties import ROUNDING, Attributes, Chain, Count, reachable


def low_bit_threshold(
    x: Array,
    thresholds: Array,
    base: Array,
    dir: Array,
    *,
    to_channels_last: int = 0,
    y_bits: int = 8,
    y_encoding: str = "unsigned",
) -> Array:
    """``base[c] + #{k : dir[c] * x >= dir[c] * thresholds[c, k]}``, compared in float32.

    ``dir`` +1 counts the thresholds that x reaches, -1 those that it does not exceed. NaN gives ``base``; a
    threshold of -dir * infinity is reached by every number.

    Args:
        x: float32, any shape; [N, C, D1..] with to_channels_last, which gives codes [N, D1.., C].
        thresholds: [C, n] or [1, n]; in every row ``dir[c] * thresholds[c, k]`` ascends.
        base: scalar or [C], the smallest code.
        dir: scalar or [C], +1 (codes rise with x) or -1 (they fall).
        y_bits: the codes ``base .. base + n`` lie in the range of y_bits and y_encoding.
    """
    real = np.moveaxis(x, 1, -1) if to_channels_last else x
    sign = np.asarray(dir, np.float32).reshape(-1)
    directed = real.astype(np.float32) * sign
    rows = thresholds.astype(np.float32) * sign[:, None]
    y = np.zeros(real.shape, np.int32) + np.asarray(base, np.int32).reshape(-1)
    for k in range(rows.shape[1]):
        y += directed >= rows[:, k]
    return y.reshape(real.shape).astype(codes.storage(y_encoding))


def threshold_chain(attrs: Attributes, x: Array, thresholds: Array, base: Array, direction: Array) -> Chain:
    """The numbers themselves, which ties are the thresholds of."""
    value = (np.moveaxis(x, 1, -1) if attrs.get("to_channels_last") else x).astype(np.float64)
    rows = reachable(thresholds.astype(np.float64), np.inf)
    error = np.broadcast_to(8 * ROUNDING * np.nanmax(np.abs(rows), axis=1, initial=0.0), value.shape)
    return Count(value, error, None, ties=rows)
