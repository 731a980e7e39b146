"""The problem that every way of rounding solves, and what each needs of it.

For one row w^ of a layer's rounded weights, x^ its quantized input and y what it shall compute, both less
their means (the bias takes those), the error of the output is

    E (y - w^ x^)^2 = var(y) - 2 c w^' + w^ G w^',    G = cov(x^, x^),  c = cov(y, x^).

A ridge keeps w^ near the float weights w where the images say nothing: it adds ``r |w^ - w|^2``. With
``H = G + r I`` the best real weights are ``t = (c + r w) H^-1``, and for any w^ the error is
``(w^ - t) H (w^ - t)'`` plus what no w^ changes. So rounding is a lattice problem with the metric H around t,
row by row; ``w^ = scale * codes``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WORK = 1 << 6
"""Columns beyond which codes are searched in float32; the metric's factors stay float64."""

_CACHED = 1 << 16
"""Weights whose scales are tried together: as many float64 as a core's second cache holds."""

LEAST_RIDGE = 1e-5
"""Of the ridge, as a part of the mean square of the input: products are float32, and G is the difference of
two of them."""


@dataclass
class Problem:
    """One layer: independent groups, each of some rows over some blocks of columns.

    Attributes:
        weights: float weights w, [groups, rows, columns]; float64 where the Gram matrix is.
        target: t, of the same shape and type.
        metric: H, one [groups, k, k] per block of columns.
        factors: lower triangular M with ``H = M' M``, the same: H's Cholesky factor from its other end.
        ridge: r, the same as [groups, 1, 1].
        blocks: the blocks.
        low: the smallest code.
        high: the largest one.
        per_channel: one scale per row, else one for all.
    """

    weights: Array
    target: Array
    metric: list[Array]
    factors: list[Array]
    ridge: list[Array]
    blocks: list[slice]
    low: int
    high: int
    per_channel: bool = True

    def of_rows(self, rows: slice) -> Problem:
        """The problem of some rows of each group; metric and factors are shared."""
        return replace(self, weights=self.weights[:, rows], target=self.target[:, rows])

    def round(self, values: Array) -> Array:
        """The nearest codes of values in units of the scale; one bit has the codes -1 and +1."""
        if (self.low, self.high) == (-1, 0):
            return np.where(values >= 0, 1.0, -1.0).astype(values.dtype)
        rounded = np.rint(values)
        # Two ufuncs take half the time of np.clip on the short rows of the inner loops.
        np.maximum(rounded, self.low, out=rounded)
        return np.minimum(rounded, self.high, out=rounded)

    def error(self, rounded: Array) -> Array:
        """``(w^ - t) H (w^ - t)'``, [groups, rows]."""
        total = np.zeros(self.target.shape[:2])
        for block, metric in zip(self.blocks, self.metric, strict=True):
            d = (rounded[..., block] - self.target[..., block]).astype(metric.dtype, copy=False)
            total += np.einsum("grk,grk->gr", d @ metric, d)
        return total

    def refit(self, codes: Array, scale: Array) -> Array:
        """The scale of least error for given codes: ``t H q' / q H q'``; the old one where that is none."""
        above, below = np.zeros(codes.shape[:2]), np.zeros(codes.shape[:2])
        for block, metric in zip(self.blocks, self.metric, strict=True):
            q = codes[..., block]
            hq = q @ metric
            above += np.einsum("grk,grk->gr", hq, self.target[..., block])
            below += np.einsum("grk,grk->gr", hq, q)
        if not self.per_channel:
            above, below = (np.broadcast_to(v.sum(), v.shape) for v in (above, below))
        with np.errstate(divide="ignore", invalid="ignore"):
            fitted = above / below
        return np.where((below > 0) & (fitted > 0.1 * scale) & np.isfinite(fitted), fitted, scale)


def code_bounds(bits: int) -> tuple[int, int]:
    """Codes of weights: symmetric at 8 bits, all of them below, where each is a large part of the whole."""
    return (-127, 127) if bits == 8 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def solve(
    weights: Array,
    gram: list[Array],
    cross: Array,
    blocks: list[slice],
    power: list[Array],
    bits: int,
    ridge: float,
    *,
    per_channel: bool,
    feedback: bool,
    consume: bool = False,
) -> Problem:
    """The problem of a layer.

    Args:
        weights: [groups, rows, columns].
        gram: G, one [groups, k, k] per block.
        cross: c, [groups, rows, columns].
        blocks: the blocks of columns.
        power: mean of ``E x^2`` over the columns of each block, [groups]: G's own rounding errors follow it.
        bits: of the codes.
        ridge: what is added to the diagonal, as a part of its mean.
        per_channel: one scale per row.
        feedback: whether the target is that of the float output; else ``t = w``.
        consume: whether H may take the place of G.
    """
    target = np.array(weights, dtype=weights.dtype)
    low, high = code_bounds(bits)
    made = Problem(weights, target, [], [], [], blocks, low, high, per_channel)
    for block, g, squares in zip(blocks, gram, power, strict=True):
        h = g if consume else g.copy()
        factor, added = _regularize(h, ridge, squares)
        made.metric.append(h)
        made.factors.append(factor)
        made.ridge.append(added)
        if feedback:
            right = cross[..., block] + added.astype(weights.dtype) * weights[..., block]
            right = right.astype(h.dtype, copy=False)
            target[..., block] = np.linalg.solve(h, right.transpose(0, 2, 1)).transpose(0, 2, 1)
    return made


def _regularize(h: Array, ridge: float, squares: Array) -> tuple[Array, Array]:
    """Adds to the diagonal of G in place; returns M and what was added, [groups, 1, 1]."""
    diagonal = np.einsum("gkk->gk", h)
    own, least = diagonal.copy(), LEAST_RIDGE
    while True:
        # A little is always added: fewer images than columns make G singular.
        floor = np.where(squares > 0, least * squares, 1.0)
        added = np.maximum(ridge * own.sum(axis=1) / own.shape[1], floor)[:, None, None]
        diagonal[...] = own + added[..., 0]
        try:
            return np.linalg.cholesky(h[:, ::-1, ::-1])[:, ::-1, ::-1].transpose(0, 2, 1), added
        except np.linalg.LinAlgError:
            # Values that hardly differ from their mean: their covariance drowns in float32's rounding of
            # squares, the more columns the deeper.
            if least > 1:
                raise
            least *= 10


def first_scale(problem: Problem, *, plain: bool = False, steps: int = 48) -> Array:
    """The scale of least error weighted by the metric's diagonal, float64 [groups, rows].

    Of 48 scales between a quarter of the one that cuts nothing off and that itself.

    Args:
        problem: the layer.
        plain: for the float weights, all columns alike, instead of the target.
        steps: how many scales.
    """
    if plain:
        target, diagonal = problem.weights, np.ones((1, 1, problem.weights.shape[-1]), problem.weights.dtype)
    else:
        target = problem.target
        diagonal = np.concatenate([np.einsum("gkk->gk", h) for h in problem.metric], axis=1)[:, None, :]
    if (problem.low, problem.high) == (-1, 0):
        weight = diagonal.sum(axis=-1)
        scale = (np.abs(target) * diagonal).sum(axis=-1) / np.where(weight > 0, weight, 1)
    else:
        low = target.min(axis=-1) / problem.low if problem.low else 0
        reach = np.maximum(target.max(axis=-1) / problem.high, low).astype(np.float64)
        reach = np.where(reach > 0, reach, 1.0)
        if not problem.per_channel:
            reach = np.full_like(reach, reach.max())
        ratios = np.linspace(0.25, 1.0, steps)
        errors = np.empty((steps, *reach.shape))
        groups, rows, columns = target.shape
        some = max(1, _CACHED // (groups * columns))
        for start in range(0, rows, some):
            these = slice(start, start + some)
            t = target[:, these]
            for error, ratio in zip(errors, ratios, strict=True):
                tried = (reach[:, these, None] * ratio).astype(t.dtype)
                d = t - tried * problem.round(t / tried)
                error[:, these] = (d * d * diagonal).sum(axis=-1)
        if not problem.per_channel:
            errors = errors.sum(axis=(1, 2), keepdims=True)
        scale = reach * ratios[errors.argmin(axis=0)]
    if not problem.per_channel:
        scale = np.full_like(scale, scale.mean())
    return np.where(scale > 1e-30, scale, 1.0)
