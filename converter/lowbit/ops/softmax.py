"""LowBitSoftmax: softmax of a row of codes, by a table of exp at their distances from the largest one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowbit.ops.codes import Array, output_range, saturate, values
from lowbit.ops.ties import ROUNDING, Attributes, Chain, real_values, step_of, ulps

ENTRY_BITS = 24
"""Table entries are integers up to 2^24: the largest that float32 holds without a gap."""


def low_bit_softmax(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    table: Array,
    y_scale: Array,
    y_zero_point: Array,
    *,
    axis: int = -1,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``e = table[max(row) - x]``, ``g = 1 / (f32(sum e) * y_scale)``, ``rint(f32(e) * g)`` as a code.

    The sum is exact, every float32 operation rounds once. ``x_scale`` and ``x_zero_point`` tell what the
    table was made of.
    """
    if x.size == 0:
        return np.zeros(x.shape, saturate(np.zeros(0, np.float32), 0, 0, 0, y_encoding).dtype)
    codes = values(x, 0)
    entries = table.astype(np.int64)[codes.max(axis=axis, keepdims=True) - codes]
    total = entries.sum(axis=axis, keepdims=True).astype(np.float32)
    with np.errstate(all="ignore"):
        multiplier = np.float32(1) / (total * y_scale.astype(np.float32))
        rounded = np.rint(entries.astype(np.float32) * multiplier)
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    return saturate(rounded, y_zero_point, low, high, y_encoding)


def softmax_table(x_scale: float) -> npt.NDArray[np.int32]:
    """What the converter writes as the table: ``rint(exp(-d * x_scale) * 2^24)`` for d in 0..255."""
    exact = np.exp(-np.arange(256) * np.float64(x_scale)) * 2.0**ENTRY_BITS
    return np.rint(exact).astype(np.int32)


def softmax_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    table: Array,
    y_scale: Array,
    y_zero_point: Array,
) -> Chain:
    """The exact share that an entry of the table has of the sum of its row."""
    axis = attrs.get("axis", -1)
    codes = values(x, 0)
    entries = table.astype(np.float64)[np.max(codes, axis=axis, keepdims=True, initial=-128) - codes]
    share = entries / np.maximum(entries.sum(axis=axis, keepdims=True), 1.0)
    # An entry is half a unit of 2^-24 from exp, which stock takes of numbers that have been rounded, and the
    # sum of a row of them is rounded at every step.
    reach = float(np.max(np.abs(real_values(x, x_scale, x_zero_point)), initial=0.0))
    error = ulps(2 * x.shape[axis] + 24 + 4 * reach, share, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(share, error + ROUNDING, step_of(y_scale), size=(1 + 2 * reach) * share)
