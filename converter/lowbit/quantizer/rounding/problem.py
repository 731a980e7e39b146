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

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WORK = 1 << 6
"""Columns beyond which codes are searched in float32; the metric's factors stay float64."""


LEAST_RIDGE = 1e-5
"""Part of the mean square of the input: products are float32, and G is the difference of two of them."""


@dataclass
class Problem:
    """One layer: independent groups, each of some rows over some blocks of columns.

    Attributes:
        weights: float weights w, [groups, rows, columns], float64 unless they are many.
        target: t, of the same shape and type.
        metric: H, one [groups, k, k] per block of columns.
        blocks: the blocks.
        low: the smallest code.
        high: the largest one.
        per_channel: one scale per row, else one for all.
    """

    weights: Array
    target: Array
    metric: list[Array]
    blocks: list[slice]
    low: int
    high: int
    per_channel: bool = True

    @functools.cached_property
    def factors(self) -> list[Array]:
        """Lower triangular M with ``H = M' M``, for each block: H's Cholesky factor from its other end."""
        return [
            np.linalg.cholesky(metric[:, ::-1, ::-1])[:, ::-1, ::-1].transpose(0, 2, 1)
            for metric in self.metric
        ]

    def of_rows(self, rows: slice) -> Problem:
        """The problem of some rows of each group; metric and factors are shared."""
        part = replace(self, weights=self.weights[:, rows], target=self.target[:, rows])
        part.__dict__["factors"] = self.factors
        return part

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
            d = rounded[..., block] - self.target[..., block]
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
    least: float = LEAST_RIDGE,
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
        least: of the ridge, as a part of ``power``.
    """
    target = np.array(weights, dtype=weights.dtype)
    metric = []
    for block, g, squares in zip(blocks, gram, power, strict=True):
        size = g.shape[-1]
        mean = np.einsum("gkk->g", g) / size
        # A little is always added: fewer images than columns make G singular.
        floor = np.where(squares > 0, least * squares, 1.0)
        added = np.maximum(ridge * mean, floor)[:, None, None]
        h = g.copy()
        np.einsum("gkk->gk", h)[...] += added[..., 0]
        metric.append(h)
        if feedback:
            right = (cross[..., block] + added * weights[..., block]).astype(h.dtype, copy=False)
            target[..., block] = np.linalg.solve(h, right.transpose(0, 2, 1)).transpose(0, 2, 1)
    low, high = code_bounds(bits)
    return Problem(weights, target, metric, blocks, low, high, per_channel)


def first_scale(problem: Problem, steps: int = 48) -> Array:
    """The scale of least error weighted by the metric's diagonal, float64 [groups, rows].

    Of 48 scales between a quarter of the one that cuts nothing off and that itself.
    """
    diagonal = np.concatenate([np.einsum("gkk->gk", h) for h in problem.metric], axis=1)[:, None, :]
    t = problem.target
    if (problem.low, problem.high) == (-1, 0):
        weight = diagonal.sum(axis=-1)
        scale = (np.abs(t) * diagonal).sum(axis=-1) / np.where(weight > 0, weight, 1)
    else:
        reach = np.maximum(t.max(axis=-1) / problem.high, t.min(axis=-1) / problem.low if problem.low else 0)
        reach = np.where(reach > 0, reach, 1.0)
        if not problem.per_channel:
            reach = np.full_like(reach, reach.max())
        best, scale = np.full(reach.shape, np.inf), reach
        for ratio in np.linspace(0.25, 1.0, steps):
            tried = reach * ratio
            d = t - tried[..., None] * problem.round(t / tried[..., None])
            error = (d * d * diagonal).sum(axis=-1)
            if not problem.per_channel:
                error = np.full_like(error, error.sum())
            better = error < best
            best, scale = np.where(better, error, best), np.where(better, tried, scale)
    if not problem.per_channel:
        scale = np.full_like(scale, scale.mean())
    return np.where(scale > 1e-30, scale, 1.0)
