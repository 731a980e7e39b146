"""How near to a rounding tie a result was: which differences from ONNX Runtime floating point explains.

ONNX Runtime computes some nodes with another float32 formula than the file's (QLinearAdd, float convolutions,
...). Two formulas for one real number may round it to neighbouring codes, but only where the number lies
within their combined rounding error of a tie. For one node and its inputs, the chain of its op
(:func:`lowbit.ops.chain`, one beside each definition) gives that real number in float64 and a bound on the
error of any sensible float32 evaluation: numerics.md's ``(K + 3) * 2^-24 * sum |terms|``, K the number of
terms added up. Originals that compute in float16 round every result to it, which is a bound of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.ops.codes import Array, values

Reals = npt.NDArray[np.float64]
Attributes = Mapping[str, Any]

ROUNDING = 2.0**-24
"""Relative error of one float32 operation."""
FLOAT16_ROUNDING = 2.0**-11
"""The same of float16, down to 2^-14."""


@dataclass
class Chain:
    """The real result of a node before its last rounding."""

    value: Reals
    error: Reals  # bound on |float32 evaluation - value|
    step: Reals | None  # the output's scale; None: a float output
    inner: Chain | None = None  # what is rounded first, so that the result may move by whole steps of that
    size: Reals | None = None  # what roundings to float16 are relative to; None: the magnitude of the value
    roundings: int = 3  # to float16, of operands and results
    of_rounded_operands: Callable[[], list[Chain]] | None = None  # if stated, only results count as roundings

    def in_float16(self) -> Chain:
        """The same for an original that rounds operands and results to float16, but not what it sums.

        ONNX Runtime leaves out some of these roundings: the error reaches what any of them make.
        """
        return self._reaching([] if self.of_rounded_operands is None else self.of_rounded_operands())

    def _reaching(self, others: Sequence[Chain]) -> Chain:
        size = np.abs(self.value) if self.size is None else self.size
        rounding = ((1 + FLOAT16_ROUNDING) ** self.roundings - 1) * size
        apart = [np.zeros_like(self.value), *(np.abs(other.value - self.value) for other in others)]
        error = self.error + rounding + np.max(apart, axis=0)
        inner = self.inner and self.inner._reaching([other.inner for other in others if other.inner])
        return replace(self, error=error, inner=inner)

    def ties_near(self) -> Reals:
        """How many ties lie within the error of the value."""
        assert self.step is not None
        steps, off = self.value / self.step, self.error / self.step
        count: Reals = np.floor(steps + off - 0.5) - np.ceil(steps - off - 0.5) + 1
        return count

    def explains(self, got: Array, expected: Array) -> npt.NDArray[np.bool_]:
        """Where the difference of two results of this node is one of float rounding near a tie.

        NaN is near every tie: no standard says which code it becomes. QuantizeLinear gives the lowest one in
        ONNX Runtime, as the definitions do, and a Cast to integers whatever its processor makes of it.
        """
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
        if self.step is None:
            return apart <= self.error
        with np.errstate(invalid="ignore"):  # infinite inputs are near no tie
            near: npt.NDArray[np.bool_] = apart <= self.ties_near()
        if self.inner is not None and self.inner.step is not None:
            moved = self.inner.ties_near() * self.inner.step / self.step
            near = near | ((moved > 0) & (apart <= 1 + np.ceil(moved)))
        return near | np.isnan(self.value)


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


def rounded_operands(left: Reals, right: Reals) -> list[tuple[Reals, Reals]]:
    """Two operands of which either, or both, are the nearest numbers of float16."""
    with np.errstate(over="ignore"):
        a, b = (operand.astype(np.float16).astype(np.float64) for operand in (left, right))
    return [(a, b), (a, right), (left, b)]


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
