"""Intervals and tests for numbers that were measured on a sample of the world.

Every interval covers the true value with a probability of about 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Interval = tuple[float, float]

Z = 1.959963984540054
"""The standard normal distribution's 97.5 % quantile."""

RESAMPLES = 2000
_CHUNK = 1 << 22  # numbers that one chunk of resamples holds

WILSON = "Wilson"
AGRESTI_MIN = "Agresti-Min"
BOOTSTRAP = "bootstrap"


def wilson(hits: int, count: int) -> Interval:
    """Wilson's score interval of a proportion: right also near 0 and 1, where the textbook's has no width."""
    share, z2 = hits / count, Z * Z
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(gained: int, lost: int, count: int) -> Interval:
    """Agresti and Min's interval of a difference between two proportions of the same samples.

    It is the textbook's interval with half a sample added to each of the four cells.

    Args:
        gained: samples that the first has right and the second wrong.
        lost: the other way round.
        count: all samples.
    """
    n, b, c = count + 2, gained + 0.5, lost + 0.5
    centre = (b - c) / n
    half = Z * math.sqrt(b + c - (b - c) ** 2 / n) / n
    return max(-1.0, centre - half), min(1.0, centre + half)


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact test, two-sided: how likely so uneven a split is where neither model is better."""
    changed = gained + lost
    ways = tail = 1
    for k in range(min(gained, lost)):
        ways = ways * (changed - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / (1 << changed))


def bootstrap(values: Array, statistic: Callable[[Array], Array], seed: int = 0) -> Interval:
    """The percentile interval of a statistic of sums, from resampled samples.

    Args:
        values: [samples, k].
        statistic: of means [resamples, k], gives [resamples].
        seed: equal seeds give equal intervals.

    Returns:
        Its ends; NaN of a single sample, which says nothing about how much samples differ.
    """
    count = len(values)
    if count < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // count)
    found = []
    for start in range(0, RESAMPLES, chunk):
        drawn = rng.integers(0, count, (min(chunk, RESAMPLES - start), count))
        found.append(statistic(np.stack([column[drawn].mean(axis=1) for column in values.T], axis=1)))
    # Never between two values: one of them may be infinite.
    low, high = np.percentile(np.concatenate(found), (2.5, 97.5), method="nearest")
    return float(low), float(high)
