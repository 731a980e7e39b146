"""How near to a rounding tie a result was: which differences from ONNX Runtime floating point explains.

ONNX Runtime computes some nodes with another float32 formula than the file's (QLinearAdd, float convolutions,
...). Two formulas for one real number may round it to neighbouring codes, but only where the number lies
within their combined rounding error of a tie. For one node and its inputs, the chain of its op
(:func:`lowbit.ops.chain`, one beside each definition) gives that real number in float64 and a bound on the
error of any sensible float32 evaluation: numerics.md's ``(K + 3) * 2^-24 * sum |terms|``, K the number of
terms added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.ops.codes import Array, values

Reals = npt.NDArray[np.float64]
Attributes = Mapping[str, Any]

ROUNDING = 2.0**-24
"""Relative error of one float32 operation."""


@dataclass
class Chain:
    """The real result of a node before its last rounding."""

    value: Reals
    error: Reals  # bound on |float32 evaluation - value|
    step: Reals | None  # the output's scale; None: a float output
    extra_steps: Reals | float = 0.0  # more whole steps that an inner rounding may move the result by

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where the difference of two results of this node is one of float rounding near a tie.

        NaN is near every tie: no standard says which code it becomes. QuantizeLinear gives the lowest one in
        ONNX Runtime, as the definitions do, and a Cast to integers whatever its processor makes of it.
        """
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        if self.step is None:
            return apart <= self.error
        steps, off = self.value / self.step, self.error / self.step
        with np.errstate(invalid="ignore"):  # infinite inputs are near no tie
            ties = np.floor(steps + off - 0.5) - np.ceil(steps - off - 0.5) + 1
            near: npt.NDArray[np.bool_] = apart <= ties
        inner: npt.NDArray[np.bool_] = np.asarray(self.extra_steps > 0)
        return near | (inner & (apart <= 1 + np.ceil(self.extra_steps))) | np.isnan(self.value)


@dataclass
class Nudged(Chain):
    """The real result behind inner roundings: each may fall the other way where it meets a tie."""

    others: Sequence[Reals] = ()  # the result with inner roundings nudged up or down

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where the difference is that of a tie, of the last rounding or of those before it."""
        near = super().explains(got, expected)
        if self.step is None or not self.others:
            return near
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        codes = np.rint(self.value / self.step)
        moved = np.max([np.abs(np.rint(other / self.step) - codes) for other in self.others], axis=0)
        explained: npt.NDArray[np.bool_] = near | (apart <= moved)
        return explained


@dataclass
class Count(Chain):
    """The number whose thresholds a node counts; ``value`` and ``error`` are in that number's units.

    The threshold of an integer is the first integer beyond a tie, which lies up to 1 before it.
    """

    ties: Reals = field(default_factory=lambda: np.zeros((1, 1)))  # [C or 1, n]
    between: float = 0.0  # how far from there the tie itself may be

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where two counts differ by one threshold that the number is nearest to."""
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        channels = self.value.reshape(-1, self.value.shape[-1])
        near = np.zeros(channels.shape, bool)
        with np.errstate(invalid="ignore"):
            for k in range(self.ties.shape[1]):
                distance = np.abs(channels - self.ties[:, k])
                near |= distance <= self.error.reshape(channels.shape) + self.between
        explained: npt.NDArray[np.bool_] = (apart <= 1) & near.reshape(apart.shape)
        return explained | np.isnan(self.value)


def real_values(codes: Array, scale: Array, zero_point: Array) -> Reals:
    """The real numbers that codes stand for."""
    return np.asarray(values(codes, zero_point) * scale.astype(np.float64))


def ulps(
    count: float, *terms: Reals | float, y_scale: Array | None = None, y_zero_point: Array | None = None
) -> Reals:
    """``count`` roundings of a sum of terms, with the zero point, which ORT adds before it rounds."""
    total: Reals = sum((np.abs(term) for term in terms), np.zeros(()))
    if y_scale is not None and y_zero_point is not None:
        total = total + np.abs(y_zero_point.astype(np.float64)) * y_scale
    return count * ROUNDING * total


def step_of(y_scale: Array | None) -> Reals | None:
    """The output's scale; None of a float output."""
    return None if y_scale is None else y_scale.astype(np.float64)


def reachable(thresholds: Reals, limit: float) -> Reals:
    """Thresholds, with NaN, which nothing is near to, for those out of reach or always reached."""
    return np.where(np.abs(thresholds) >= limit, np.nan, thresholds)
