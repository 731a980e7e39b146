"""Rounding one layer: the way and the ridge that do best on images that rounding did not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.quantizer.gram import Moments, plus
from lowbit.quantizer.rounding.adaround import adaround
from lowbit.quantizer.rounding.descent import descent
from lowbit.quantizer.rounding.gptq import gptq
from lowbit.quantizer.rounding.nearest import nearest
from lowbit.quantizer.rounding.problem import Array, Problem, first_scale, solve

RIDGE = 0.05
"""Where there are too few images to choose it."""

_RIDGES = (0.01, 0.05, 0.2)
_LARGEST_CHOICE = 1200
"""Columns beyond which the ridge is not chosen: that takes a solution for each."""


@dataclass
class Rounded:
    """Weights of few bits.

    Attributes:
        codes: [groups, rows, columns], whole numbers.
        scale: [groups, rows].
        method: how they were found.
        ridge: of the problem.
        error: of the output, relative to its variance, over all images.
        held_out: the same over held-out images, from a solution that did not see them; None without any.
        nearest: the error of rounding to nearest.
        alone: the error where the input is exact but for what its own quantizer did.
    """

    codes: Array
    scale: Array
    method: str
    ridge: float
    error: float
    held_out: float | None
    nearest: float
    alone: float


def round_layer(
    weights: Array,
    fit: Moments,
    held: Moments | None,
    bits: int,
    *,
    method: str,
    ridge: float | None,
    sweeps: int,
    per_channel: bool,
    feedback: bool,
) -> Rounded:
    """Codes and scales of a layer.

    Args:
        weights: [groups, rows, columns].
        fit: sums over the images to round for; used up.
        held: sums over the images that judge; None without any. The result is for both.
        bits: of the codes.
        method: auto, nearest, gptq, descent or adaround.
        ridge: None: chosen.
        sweeps: of coordinate descent.
        per_channel: one scale per row.
        feedback: see :func:`lowbit.quantizer.rounding.problem.solve`.
    """

    def problem_of(moments: Moments, amount: float) -> Problem:
        gram, cross = centred(moments)
        count = max(1, moments.count)
        power = [np.einsum("gkk->g", g) / (count * g.shape[-1]) for g in moments.gram]
        return solve(
            weights,
            gram,
            cross,
            moments.blocks,
            power,
            bits,
            amount,
            per_channel=per_channel,
            feedback=feedback,
        )

    def run(problem: Problem, way: str) -> tuple[Array, Array]:
        if way == "nearest":
            return nearest(problem)
        if way == "gptq":
            scale = first_scale(problem)
            codes = gptq(problem, scale)
            return codes, problem.refit(codes, scale)
        if way == "adaround":
            return adaround(problem)
        return descent(problem, sweeps)

    way = "descent" if method == "auto" else method
    chosen, judged = RIDGE if ridge is None else ridge, None
    small = weights.shape[-1] <= _LARGEST_CHOICE
    if held is not None and held.count and method != "nearest" and small:
        ridges = _RIDGES if ridge is None else (ridge,)
        best = np.inf
        for amount in ridges:
            codes, scale = run(problem_of(fit, amount), "gptq" if way == "descent" else way)
            error = output_error(codes * scale[..., None], held, fit)
            # Of two that are as good the first one stays: chance alone shall not decide.
            if error < best * 0.995:
                best, chosen = error, amount
        judged = best
    total = fit if held is None or not held.count else plus(fit, held)
    problem = problem_of(total, chosen)
    codes, scale = run(problem, way)
    plain, plain_scale = nearest(problem)
    error = output_error(codes * scale[..., None], total, total)
    worst = output_error(plain * plain_scale[..., None], total, total)
    gram, _ = centred(total)
    d = weights - codes * scale[..., None]
    alone = sum(
        float(np.einsum("grk,grk->", d[..., block] @ g, d[..., block]))
        for block, g in zip(total.blocks, gram, strict=True)
    )
    variance = _variance(total)
    return Rounded(codes, scale, way, chosen, error, judged, worst, alone / variance if variance else 0.0)


def centred(moments: Moments, around: Moments | None = None) -> tuple[list[Array], Array]:
    """G per block, and c: means of products, less the means' product.

    With ``around`` the means are those of other images: ``E (y - m)(x - n)' = E y x' - m E x' - E y n' + m
    n'``.
    """
    around = around or moments
    n, k = max(1, moments.count), max(1, around.count)
    grams, cross = [], np.empty_like(moments.cross)
    for i, block in enumerate(moments.blocks):
        u, v = moments.out[i] / n, moments.mean_q[:, block] / n
        a, b = around.out[i] / k, around.mean_q[:, block] / k
        grams.append(moments.gram[i] / n - _outer(b, v) - _outer(v, b) + _outer(b, b))
        cross[..., block] = moments.cross[..., block] / n - _outer(a, v) - _outer(u, b) + _outer(a, b)
    return grams, cross


def _outer(a: Array, b: Array) -> Array:
    result: Array = a[:, :, None] * b[:, None, :]
    return result


def output_error(rounded: Array, moments: Moments, around: Moments) -> float:
    """Mean square error of the output relative to its variance, its bias being that of the images ``around``.

    ``E (y - w^ x^)^2 = E y^2 - 2 c w^' + w^ G w^'``, all of them less those means.
    """
    gram, cross = centred(moments, around)
    n, k = max(1, moments.count), max(1, around.count)
    total = 0.0
    for i, block in enumerate(moments.blocks):
        mean, q = moments.out[i] / n, rounded[..., block]
        spread = np.maximum(moments.out_power[i] / n - mean**2, 0) + (mean - around.out[i] / k) ** 2
        quadratic = np.einsum("grk,grk->", q @ gram[i], q)
        total += float(spread.sum() + quadratic - 2 * np.einsum("grk,grk->", cross[..., block], q))
    variance = _variance(moments)
    return max(total, 0.0) / variance if variance else 0.0


def _variance(moments: Moments) -> float:
    n = max(1, moments.count)
    return float(np.maximum(moments.signal / n - (moments.signal_mean / n) ** 2, 0).sum())
