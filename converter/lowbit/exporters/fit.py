"""Thresholds as a straight line: ``clip(rint(acc * slope[c] + offset[c]))`` where that counts the same.

Most thresholds come from a chain that is a line, such as BatchNormalization and a quantizer. Then QDQ can
say them after all, with a multiplication and an addition in front of QuantizeLinear. A line is proposed in
float64 and accepted only if its float32 chain gives the same code on both sides of every threshold; in
between both only rise (or fall), so that they agree for every accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.exporters.nodes import Node, accumulator_range
from lowbit.ops.codes import Floats, Ints, code_range

_NEAR = 1e-9
"""How far bounds that meet may miss each other by float64's rounding; the proof is in float32."""


@dataclass(frozen=True)
class Line:
    """``rint(v * slope[c] + offset[c])``, clipped, of a product's real value ``v = f32(acc) * f32(sx * sw)``.

    Attributes:
        slope: float32 [C]; negative where codes fall.
        offset: float32 [C].
        low: smallest code.
        high: largest code.
    """

    slope: Floats
    offset: Floats
    low: int
    high: int


def fit_thresholds(node: Node) -> Line | None:
    """The line that counts a product's thresholds; None if none does, or float32 is too coarse for it."""
    rows = node.need("thresholds").astype(np.int64)
    channels, count = rows.shape
    base = np.broadcast_to(node.need("threshold_base").astype(np.int64).reshape(-1), channels)
    sign = np.broadcast_to(node.need("threshold_dir").astype(np.int64).reshape(-1), channels)
    allowed = code_range(node.attributes["y_bits"], node.attributes["y_encoding"])
    low, high = max(allowed[0], int(base.min())), min(allowed[1], int(base.max()) + count)
    ends = accumulator_range(node)
    first, last = np.where(sign > 0, ends[0], -ends[1]), np.where(sign > 0, ends[1], -ends[0])
    scale = np.broadcast_to(node.real_scale.reshape(-1), channels)
    directed = rows * sign[:, None]
    slopes, offsets = np.zeros(channels), np.zeros(channels)
    for c in range(channels):
        line = _line(directed[c], int(first[c]), int(last[c]), int(base[c]))
        if line is None:
            return None
        slopes[c], offsets[c] = line[0] * sign[c] / np.float64(scale[c]), line[1]
    found = Line(slopes.astype(np.float32), offsets.astype(np.float32), low, high)
    return found if _counts_the_same(found, directed, sign, base, first, last, scale) else None


def _line(thresholds: Ints, first: int, last: int, low: int) -> tuple[float, float] | None:
    """A line ``slope * x + offset`` whose rounding rises by one at every threshold.

    With ``L[k] = low + k + 1/2``, k = 0.., the line must be at least ``L[k]`` at the threshold and below it
    one step before. Two such demands bound the slope; in the middle of these bounds, each bounds the offset.
    Bounds may meet: half to even sends a line that is at ``L[k]`` up or down.

    Args:
        thresholds: ascending.
        first: the smallest x.
        last: the largest x.
        low: the code below all thresholds.
    """
    levels = low + np.arange(len(thresholds)) + 0.5
    reached, missed = thresholds <= last, thresholds - 1 >= first
    at, above = np.maximum(thresholds, first)[reached].astype(np.float64), levels[reached]
    before, below = np.minimum(thresholds - 1, last)[missed].astype(np.float64), levels[missed]
    if not at.size or not before.size:  # one code for all
        return 0.0, float(low + reached.sum())
    run = at[:, None] - before[None, :]
    rise = above[:, None] - below[None, :]
    if np.any((run == 0) & (rise >= 0)):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = rise / run
    least = max(0.0, float(np.max(ratio, where=run > 0, initial=0.0)))
    most = float(np.min(ratio, where=run < 0, initial=np.inf))
    if least > most * (1 + _NEAR):
        return None
    slope = (least + most) / 2 if np.isfinite(most) else max(2 * least, 1.0)
    lowest, highest = float(np.max(above - slope * at)), float(np.min(below - slope * before))
    return (slope, (lowest + highest) / 2) if lowest <= highest + _NEAR else None


def _counts_the_same(
    line: Line, directed: Ints, sign: Ints, base: Ints, first: Ints, last: Ints, scale: Floats
) -> bool:
    """Compares the float32 chain of a line with the count, on both sides of every threshold.

    The clip is the same for all channels; a channel that it does not stop where its counting ends differs.
    """
    x = np.concatenate([directed, directed - 1, first[:, None], last[:, None]], axis=1)
    x = np.clip(x, first[:, None], last[:, None])
    counted = base[:, None] + (x[:, :, None] >= directed[:, None, :]).sum(axis=2)
    v = (x * sign[:, None]).astype(np.float32) * scale[:, None]
    rounded = np.rint(v * line.slope[:, None] + line.offset[:, None])
    return bool(np.array_equal(np.clip(rounded, line.low, line.high), counted))
