"""Ranges of activations, from histograms of every value of every calibration image.

A float32 number's own leading bits choose its bin: sign, exponent and six bits of the mantissa, 64 bins for
every factor of 2. So one pass is enough, whatever the range turns out to be, memory does not depend on the
data, and one huge outlier leaves the other values their bins. Zeros, half of all values behind a ReLU, are
counted apart: every grid holds them exactly.

The mean square error of a grid is exact for values that are spread evenly within each bin. With
``q(u) = clip(rint(u / s), lo, hi)`` the error integrates to ``F(v) = k s^3 / 12 + (v - k s)^3 / 3`` with
``k = q(v)``: each whole step contributes ``s^3 / 12``, the last, partial or clipped one the cubic term. So a
bin ``a..b`` has the mean error ``(F(b) - F(a)) / (b - a)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.errors import ModelError
from lowbit.graph.quantization import Grid
from lowbit.quantizer.config import Config
from lowbit.quantizer.report import Decision, Histogram, TensorRecord
from lowbit.quantizer.sites import Plan

Array = npt.NDArray[Any]

_MANTISSA = 6
_SHIFT = 23 - _MANTISSA
_BINS = 1 << (9 + _MANTISSA)
"""Bins of all floats: the lower half positive, the upper half negative."""

_CHANNEL_MANTISSA = 4
_CHANNEL_OCTAVES = (-20, 16)
"""Bins of a tensor with one range per channel: 16 for every factor of 2 between 2^-20 and 2^16."""

_SMALLEST = 1e-30
"""A range below this counts as zero: its scale would leave float32's normal numbers."""


_RARE, _FAR = 1e-3, 30
"""A range 30 times what all but one value in a thousand stay below is worth a warning."""


class Values:
    """What a tensor's values are: a histogram, their ends, and how many are zero.

    Attributes:
        low: the smallest value seen, at most 0.
        high: the largest one, at least 0.
        zeros: how many are exactly 0.
        total: how many there are.
    """

    def __init__(self) -> None:
        self.low, self.high, self.zeros, self.total = 0.0, 0.0, 0, 0
        self.counts = np.zeros(_BINS, np.int64)

    def add(self, name: str, array: Array) -> None:
        """Counts all values of an array.

        Raises:
            ModelError: if one is NaN or infinite.
        """
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ModelError(
                f"'{name}' is NaN or infinite for a calibration image; expected finite values. Check the "
                "preprocessing, or exclude what computes it (--nodes-to-exclude)"
            )
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.counts += np.bincount(flat.view(np.uint32) >> _SHIFT, minlength=_BINS)
        self.zeros += int(flat.size - np.count_nonzero(flat))
        self.total += flat.size

    def merged(self, other: Values) -> Values:
        """Both tensors' values."""
        made = Values()
        made.low, made.high = min(self.low, other.low), max(self.high, other.high)
        made.zeros, made.total = self.zeros + other.zeros, self.total + other.total
        made.counts = self.counts + other.counts
        return made

    def bins(self) -> tuple[Array, Array, Array]:
        """Left ends, right ends and counts of the bins that are not empty, zeros left out; float64."""
        counts = self.counts.copy()
        zero_bins = [0, _BINS // 2]
        # A zero lies in the first bin of its sign, together with subnormal numbers, which count as zeros.
        counts[zero_bins] = 0
        found = np.flatnonzero(counts)
        ends = [
            (((found + i) << _SHIFT).astype(np.uint32)).view(np.float32).astype(np.float64) for i in (0, 1)
        ]
        left = np.where(ends[0] < 0, ends[1], ends[0])
        right = np.where(ends[0] < 0, ends[0], ends[1])
        right = np.where(np.isfinite(right), right, np.finfo(np.float32).max)
        left = np.where(np.isfinite(left), left, -float(np.finfo(np.float32).max))
        return np.maximum(left, self.low), np.minimum(right, self.high), counts[found].astype(np.float64)

    def quantile(self, part: float) -> tuple[float, float]:
        """The ends of a range that leaves out a part of the values on each side."""
        left, right, counts = self.bins()
        order = np.argsort(left, kind="stable")
        left, right, counts = left[order], right[order], counts[order]
        below, above = counts * (right <= 0), counts * (left >= 0)
        outside = part * self.total
        low = self._tail(left[::1], right, below, outside, negative=True)
        high = self._tail(left, right, above, outside, negative=False)
        return low, high

    @staticmethod
    def _tail(left: Array, right: Array, counts: Array, outside: float, *, negative: bool) -> float:
        if negative:
            reached = np.flatnonzero(np.cumsum(counts) > outside)
            return min(0.0, float(left[reached[0]])) if reached.size and counts.sum() else 0.0
        backwards = np.flatnonzero(np.cumsum(counts[::-1]) > outside)
        return max(0.0, float(right[::-1][backwards[0]])) if backwards.size and counts.sum() else 0.0

    def power(self) -> float:
        """Mean square."""
        left, right, counts = self.bins()
        return float(np.sum(counts * (left**2 + left * right + right**2) / 3) / max(1, self.total))

    def error(self, scale: Array, zero_point: Array, low: int, high: int) -> Array:
        """Mean square error of rounding to grids, float64 of the scales' shape [n].

        Args:
            scale: [n].
            zero_point: [n], integers.
            low: smallest code.
            high: largest code.
        """
        left, right, counts = self.bins()
        s, z = scale[:, None], zero_point[:, None]
        # Where one bin ends the next one begins, most of the time: half of the work.
        ends, places = np.unique(np.concatenate([left, right]), return_inverse=True)
        integral = _integral(ends, s, low - z, high - z)
        areas = integral[:, places[len(left) :]] - integral[:, places[: len(left)]]
        width = right - left
        # A bin of no width holds one value, whose error is the limit.
        point = left - s * np.clip(np.rint(left / s), low - z, high - z)
        mean = np.where(width > 0, areas / np.where(width > 0, width, 1), point**2)
        return np.asarray((mean * counts).sum(axis=1) / max(1, self.total))

    def histogram(self, bins: int = 128) -> Histogram:
        """Equal bins for the report."""
        left, right, counts = self.bins()
        low, high = self.low, self.high if self.high > self.low else self.low + 1
        edges = np.linspace(low, high, bins + 1)
        made = np.zeros(bins)
        firsts, lasts = (
            np.clip(np.searchsorted(edges, ends, "right") - 1, 0, bins - 1).tolist() for ends in (left, right)
        )
        # Most of these bins lie in one of the equal ones, which takes no array to tell.
        parts = zip(firsts, lasts, left.tolist(), right.tolist(), counts.tolist(), strict=True)
        for first, last, a, b, count in parts:
            # Spread evenly over the equal bins that this one overlaps.
            if first == last or b <= a:
                made[first] += count
                continue
            cuts = np.clip(edges[first : last + 2], a, b)
            made[first : last + 1] += count * np.diff(cuts) / (b - a)
        made[np.clip(np.searchsorted(edges, 0.0, "right") - 1, 0, bins - 1)] += self.zeros
        return Histogram(float(low), float(high), [round(count) for count in made])


def _integral(value: Array, s: Array, low: Array | int, high: Array | int) -> Array:
    k = np.clip(np.rint(value / s), low, high)
    result: Array = k * s**3 / 12 + (value - k * s) ** 3 / 3
    return result


class ChannelValues:
    """The same for every channel (axis 1) of a tensor that is never negative."""

    def __init__(self, channels: int) -> None:
        self.high = np.zeros(channels)
        self.total = 0
        self._first = (127 + _CHANNEL_OCTAVES[0]) << _CHANNEL_MANTISSA
        self.bins = (_CHANNEL_OCTAVES[1] - _CHANNEL_OCTAVES[0]) << _CHANNEL_MANTISSA
        self.counts = np.zeros((channels, self.bins), np.int64)

    def add(self, array: Array) -> None:
        """Counts all values of [N, C, ...]."""
        channels = len(self.high)
        by_channel = np.ascontiguousarray(np.moveaxis(array, 1, 0), np.float32).reshape(channels, -1)
        self.high = np.maximum(self.high, by_channel.max(axis=1))
        places = (by_channel.view(np.uint32) >> (23 - _CHANNEL_MANTISSA)).astype(np.int64) - self._first
        seen = (by_channel > 0) & (places >= 0)
        places = np.minimum(places, self.bins - 1) + np.arange(channels)[:, None] * self.bins
        self.counts += np.bincount(places[seen], minlength=self.counts.size).reshape(self.counts.shape)
        self.total += by_channel.shape[1]

    def scales(self, levels: int) -> Array:
        """The scale of least mean square error for each channel, float64 [C]; 0 for one that is always 0."""
        first = self._first << (23 - _CHANNEL_MANTISSA)
        step = 1 << (23 - _CHANNEL_MANTISSA)
        edges = (
            (first + step * np.arange(self.bins + 1)).astype(np.uint32).view(np.float32).astype(np.float64)
        )
        best, chosen = np.full(len(self.high), np.inf), self.high / levels
        for ratio in 2.0 ** (-np.arange(0, 40) / 8):
            scale = self.high * ratio / levels
            safe = np.where(scale > 0, scale, 1.0)[:, None]
            ends = np.minimum(edges, np.maximum(self.high, edges[0])[:, None])
            areas = np.diff(_integral(ends, safe, 0, levels), axis=1)
            width = np.diff(ends, axis=1)
            error = (self.counts * areas / np.where(width > 0, width, 1)).sum(axis=1)
            better = error < best
            best, chosen = np.where(better, error, best), np.where(better, scale, chosen)
        return np.asarray(chosen)


@dataclass
class Statistics:
    """The values of all tensors of a plan."""

    values: dict[str, Values]
    channels: dict[str, ChannelValues]


def code_bounds(bits: int, *, signed: bool) -> tuple[int, int]:
    """The smallest and largest code of an activation."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def share_concats(plan: Plan, statistics: Statistics, config: Config) -> None:
    """Operands and result of a Concat share one grid where their ranges are within a factor of 4."""
    for output, operands in plan.concats.items():
        names = list(dict.fromkeys([output, *operands]))
        if config.rule("concat"):
            sizes = [max(-v.low, v.high) for v in (statistics.values[name] for name in names)]
            ratio = max(sizes) / max(min(sizes), _SMALLEST)
            if ratio <= 4:
                for name in operands:
                    plan.join(output, name)
                plan_note = f"one grid with {', '.join(operands)} (ranges within a factor of {ratio:.2g})"
            else:
                plan_note = f"a grid of its own: ranges differ by a factor of {ratio:.3g}"
        else:
            plan_note = "a grid of its own"
        plan.decisions.append(Decision("concat", output, plan_note))


def choose_grids(
    plan: Plan, statistics: Statistics, config: Config
) -> tuple[dict[str, tuple[Grid, int, int]], list[TensorRecord], list[str]]:
    """The grid of every site.

    Returns:
        Site -> its grid, the smallest and the largest code; a record for each; warnings.
    """
    grids: dict[str, tuple[Grid, int, int]] = {}
    records, warnings = [], []
    for name in plan.sites:
        leader = plan.leader(name)
        site = plan.sites[leader]
        if site.signed and site.bits == 1:
            site.bits = 2
            warnings.append(f"'{leader}' has a sign, which 1 bit cannot hold beside 0; it has 2 bits")
        if leader not in grids:
            members = plan.members(leader)
            values = statistics.values[members[0]]
            for member in members[1:]:
                values = values.merged(statistics.values[member])
            tail = max(np.abs(values.quantile(_RARE)))
            if tail > 0 and max(values.high, -values.low) > _FAR * tail:
                warnings.append(
                    f"'{leader}' reaches {max(values.high, -values.low):.3g}, where {1 - _RARE:.1%} of its "
                    f"values stay below {tail:.3g}: a few images may decide its range; look at them, or "
                    "take --calibration-method percentile"
                )
            if max(values.high, -values.low) < _SMALLEST:
                warnings.append(f"'{leader}' is always 0 in the calibration data; its range is arbitrary")
            if plan.raw & set(members):
                grids[leader] = _grid(1.0, 0), 0, 255
            else:
                grids[leader] = _choose(site.bits, site.signed, values, config)
            if site.channels is not None:
                grids[leader] = _per_channel(statistics.channels[leader], site.bits)
        grid, low, high = grids[name] = grids[leader]
        records.append(_record(plan, name, grid, low, high, statistics.values[name], config))
    return grids, records, warnings


def _choose(bits: int, signed: bool, values: Values, config: Config) -> tuple[Grid, int, int]:
    low, high = code_bounds(bits, signed=signed)
    largest = max(values.high, -values.low) if signed else values.high
    if largest < _SMALLEST:
        return _grid(1.0, 0), low, high
    method = config.calibration_method
    ends = values.low, values.high
    if method == "percentile":
        found = values.quantile(1 - config.percentile / 100)
        ends = found if max(found[1], -found[0]) > _SMALLEST else ends
    elif method == "entropy":
        bound = _entropy(values, largest)
        ends = max(values.low, -bound), min(values.high, bound)
    zero = np.zeros(1)
    scale = np.array([_scale_of(*ends, low, high)])
    if method == "mse":
        scale = _best(values, float(scale[0]), low, high)
    chosen = _grid(float(scale[0]), 0)
    if not (signed and bits == 8 and config.rule("asymmetric")) or values.high <= 0:
        return chosen, low, high
    ratios = 2.0 ** (-np.arange(0, 33) / 16) if method == "mse" else np.ones(1)
    scales = (ends[1] - ends[0]) * ratios / 255
    zeros = np.clip(np.rint(-ends[0] * ratios / scales), 0, 255)
    errors = values.error(scales, zeros, 0, 255)
    best = int(errors.argmin())
    if errors[best] < 0.9 * float(values.error(scale, zero, low, high)[0]):
        return _grid(float(scales[best]), int(zeros[best])), 0, 255
    return chosen, low, high


def _scale_of(low: float, high: float, first: int, last: int) -> float:
    """The scale that holds a range on a grid with zero point 0."""
    return max(high / last if last else 0.0, low / first if first else 0.0)


def _best(values: Values, scale: float, low: int, high: int) -> Array:
    """The scale of least mean square error, [1]: a coarse search over 20 octaves, then a fine one."""
    tried = scale * 2.0 ** (-np.arange(0, 161) / 8)
    best = tried[int(values.error(tried, np.zeros(len(tried)), low, high).argmin())]
    tried = np.minimum(best * 2.0 ** np.linspace(-1 / 8, 1 / 8, 17), scale)
    best = tried[int(values.error(tried, np.zeros(len(tried)), low, high).argmin())]
    return np.array([best])


def _entropy(values: Values, largest: float, bins: int = 2048, levels: int = 128) -> float:
    """The bound of least Kullback-Leibler divergence, as TensorRT's calibrator has it."""
    left, right, counts = values.bins()
    centre = np.abs((left + right) / 2)
    places = np.minimum((centre / largest * bins).astype(np.int64), bins - 1)
    histogram = np.bincount(places, counts, bins)
    histogram[0] += values.zeros
    best, bound = np.inf, largest
    for end in range(levels, bins + 1, 8):
        p = histogram[:end].copy()
        p[-1] += histogram[end:].sum()
        group = np.minimum(np.arange(end) * levels // end, levels - 1)
        used = histogram[:end] > 0
        mass = np.bincount(group, histogram[:end], levels)
        q = np.where(used, (mass / np.maximum(np.bincount(group, used, levels), 1))[group], 0)
        inside = (p > 0) & (q > 0)
        lost = p[(p > 0) & (q == 0)].sum()
        p, q = p / p.sum(), q / max(q.sum(), 1e-30)
        divergence = float(np.sum(p[inside] * np.log(p[inside] / q[inside]))) + (1.0 if lost else 0.0)
        if divergence < best:
            best, bound = divergence, largest * end / bins
    return bound


def _grid(scale: float, zero_point: int) -> Grid:
    return Grid(np.array(scale, np.float32), np.array(zero_point, np.int32))


def _per_channel(values: ChannelValues, bits: int) -> tuple[Grid, int, int]:
    """One scale per channel; a channel that is always 0 gets the mean scale of the others."""
    levels = (1 << bits) - 1
    scales = values.scales(levels)
    alive = scales > _SMALLEST
    scales = np.where(alive, scales, scales[alive].mean() if alive.any() else 1.0)
    return Grid(scales.astype(np.float32), np.zeros(len(scales), np.int32), 1), 0, levels


def decibels(signal: float, noise: float) -> float | None:
    """``10 log10(signal / noise)``; None where either is 0 or no number."""
    if not (signal > 0 and noise > 0 and np.isfinite(signal) and np.isfinite(noise)):
        return None
    return float(10 * np.log10(signal / noise))


def _record(
    plan: Plan, name: str, grid: Grid, low: int, high: int, values: Values, config: Config
) -> TensorRecord:
    site = plan.grid(name)
    scale, zero = float(grid.scale.max()), int(grid.zero_point.max())
    noise = None
    if grid.per_tensor:
        noise = float(values.error(np.array([scale]), np.array([zero]), low, high)[0])
    return TensorRecord(
        name, site.bits, low < 0 or zero > 0, not grid.per_tensor,
        config.calibration_method if grid.per_tensor else "mse",
        (low - zero) * scale, (high - zero) * scale, values.low, values.high, scale, zero,
        None if noise is None else decibels(values.power(), noise), site.rule,
        [other for other in plan.members(plan.leader(name)) if other != name], values.histogram(),
    )  # fmt: skip


def collect(plan: Plan, feeds: Mapping[str, Array] | None, statistics: Statistics) -> None:
    """Counts the values of one feed."""
    for name in plan.sites:
        if feeds is None or name not in feeds:
            continue
        statistics.values.setdefault(name, Values()).add(name, feeds[name])
        site = plan.sites[name]
        if site.channels is not None:
            statistics.channels.setdefault(name, ChannelValues(site.channels)).add(feeds[name])
