"""Rounding one layer: the way and the ridge that do best on images that rounding did not see."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

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
_LARGE_RIDGES = (1.0, 5.0, 30.0)
"""They all but keep the weights. That is right where the images tell little: for a handful of them, and for a
classifier, which meets one column per image (ResNet-8 w3a8 of 100 images: 5, and .078 instead of .094 of 2000
other images change their class)."""

_CLEARLY = 0.95
"""A large ridge, or another method than descent, must gain this much: the final rounding sees more images
than the one that is judged here, and what follows has to make up for what it keeps (SqueezeNet w2a8: a gain
of half a percent in two layers made the divergence of the outputs half as large again)."""

_LARGEST_CHOICE = 1200
"""Columns beyond which neither ridge nor method are chosen: that takes a solution for each."""

_MANY_WEIGHTS = 1 << 24
"""Weights of a layer beyond which they are rounded once: VGG-16's first Gemm has 103 million."""

_BINS = 96

_AT_ONCE = 1 << 23
"""Weights that are rounded together: each takes some tens of bytes meanwhile."""


@dataclass
class Rounded:
    """Weights of few bits.

    Attributes:
        codes: [groups, rows, columns], int8.
        scale: [groups, rows].
        method: how they were found.
        ridge: of the problem.
        error: of the output, relative to its variance, over all images.
        held_out: the same over held-out images, from a solution that did not see them; None without any.
        nearest: the error of rounding to nearest.
        power: summed square of the weights.
        noise: that of what rounding did to them.
        histogram: of the weights in units of their rows' scales: equal bins over half as much again as the
            codes reach.
        mean: of the output, less what the rounded weights make of the input's, [groups, rows].
        moves_bias: whether the difference of the means belongs into the bias; with a handful of images only
            where it holds on those that rounding did not use.
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
    moves_bias: bool
    power: float = 0.0
    noise: float = 0.0
    histogram: Array = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    mean: Array = field(default_factory=lambda: np.zeros((1, 1)))


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
    bias: Array | None = None,
    few: bool = False,
) -> Rounded:
    """Codes and scales of a layer.

    Args:
        weights: [groups, rows, columns].
        fit: sums over the images to round for; used up.
        held: sums over the images that judge; None without any. The result is for both. Layers that
            :func:`chooses` says no of need none.
        bits: of the codes.
        method: nearest, gptq, descent, adaround, or auto: of the first three what is best on ``held``.
            AdaRound measures as descent does and takes four times as long.
        ridge: None: chosen.
        sweeps: of coordinate descent.
        per_channel: one scale per row.
        bias: of the float layer, [groups, rows].
        few: whether there is a handful of images.
        feedback: see :func:`lowbit.quantizer.rounding.problem.solve`.
    """
    problem_of = functools.partial(
        solve, weights, blocks=fit.blocks, bits=bits, per_channel=per_channel, feedback=feedback
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

    moves_bias = True
    way = method if method != "auto" else "descent" if weights.size <= _MANY_WEIGHTS else "gptq"
    chosen, judged = RIDGE if ridge is None else ridge, None
    if held is not None and held.count and method != "nearest" and chooses(weights.shape[-1]):
        gram, cross = centred(fit)
        ridges = (*_RIDGES, *_LARGE_RIDGES) if ridge is None else (ridge,)
        best = np.inf
        for amount in ridges:
            problem = problem_of(gram, cross, power=_power(fit), ridge=amount)
            codes, scale = run(problem, "gptq" if way == "descent" else way)
            error = output_error(codes * scale[..., None], held, fit)
            # Of two that are as good the first one stays: chance alone shall not decide.
            if error < best * (_CLEARLY if amount in _LARGE_RIDGES and not few else 0.995):
                best, chosen, kept = error, amount, problem
                if few and bias is not None:
                    moves_bias = _bias_holds(codes * scale[..., None], bias, held, fit)
            elif error > best and amount in _LARGE_RIDGES:
                break  # still larger ones only go on from there
        judged = best
        if method == "auto" and np.isfinite(best):
            errors = {"gptq": best}
            for other in ("descent", "nearest"):
                codes, scale = run(kept, other)
                errors[other] = output_error(codes * scale[..., None], held, fit)
            errors["descent"] *= _CLEARLY
            way = min(errors, key=lambda each: errors[each])
            judged = errors[way] / (_CLEARLY if way == "descent" else 1)
    total = fit if held is None or not held.count else plus(fit, held)
    power, out = _power(total), np.stack(total.out, -1).sum(axis=-1) / max(1, total.count)
    parts, variance = _spread(total), _variance(total)
    gram, cross = centred(total, consume=total.gram[0].dtype == np.float32)
    # A problem of its own for each part of the rows: VGG-16's first Gemm has 4096 of 25088 columns.
    problem = problem_of(gram, cross, power=power, ridge=chosen, consume=True)
    groups, rows, columns = weights.shape
    step = max(1, _AT_ONCE // (groups * columns)) if per_channel else rows
    made = Rounded(
        np.empty(weights.shape, np.int8), np.empty((groups, rows)), way, chosen, 0.0, judged, 0.0, 0.0,
        moves_bias,
    )  # fmt: skip
    for start in range(0, rows, step):
        these = slice(start, start + step)
        part = problem.of_rows(these)
        codes, scale = run(part, way)
        plain, plain_scale = nearest(part)
        made.codes[:, these], made.scale[:, these] = codes, scale
        # In the weights' own precision: a product with a Gram matrix of float32 would make a copy of it.
        real, near = (
            (q * s[..., None]).astype(weights.dtype, copy=False)
            for q, s in ((codes, scale), (plain, plain_scale))
        )
        units = np.clip(part.weights / scale[..., None], 1.5 * part.low - 0.5, 1.5 * part.high + 0.5)
        made.histogram += np.histogram(units, _BINS, (1.5 * part.low - 0.5, 1.5 * part.high + 0.5))[0]
        made.power += float(np.square(part.weights).sum())
        made.noise += float(np.square(part.weights - real).sum())
        spread = float(parts[:, these].sum())
        made.error += spread + _changed(real, problem.metric, cross[:, these], total.blocks, problem.ridge)
        made.nearest += spread + _changed(near, problem.metric, cross[:, these], total.blocks, problem.ridge)
        made.alone += _changed(part.weights - real, problem.metric, None, total.blocks, problem.ridge)
    for name in ("error", "nearest", "alone"):
        setattr(made, name, max(getattr(made, name), 0.0) / variance if variance else 0.0)
    made.mean = out - made.scale * np.einsum("grk,gk->gr", made.codes, total.mean_q / max(1, total.count))
    return made


def chooses(columns: int) -> bool:
    """Whether a layer of so many columns has some images judge what the others round."""
    return columns <= _LARGEST_CHOICE


def _power(moments: Moments) -> list[Array]:
    """Mean of ``E x^2`` over the columns of each block, [groups]."""
    count = max(1, moments.count)
    return [np.einsum("gkk->g", g) / (count * g.shape[-1]) for g in moments.gram]


def _bias_holds(rounded: Array, bias: Array, held: Moments, fit: Moments) -> bool:
    """Whether the bias that makes the means equal on some images beats the float one on others."""

    def rest(moments: Moments) -> Array:
        n = max(1, moments.count)
        return np.asarray(moments.out[0] / n - np.einsum("grk,gk->gr", rounded, moments.mean_q / n))

    own = rest(held)
    return bool(np.square(own - rest(fit)).sum() <= np.square(own - bias).sum())


def centred(
    moments: Moments, around: Moments | None = None, *, consume: bool = False
) -> tuple[list[Array], Array]:
    """G per block, and c: means of products, less the means' product.

    With ``around`` the means are those of other images: ``E (y - m)(x - n)' = E y x' - m E x' - E y n' + m
    n'``. With ``consume`` the sums themselves become the result, in their own precision.
    """
    around = around or moments
    n, k = max(1, moments.count), max(1, around.count)
    grams, cross = [], moments.cross if consume else np.empty_like(moments.cross)
    for i, block in enumerate(moments.blocks):
        u, v = moments.out[i] / n, moments.mean_q[:, block] / n
        a, b = around.out[i] / k, around.mean_q[:, block] / k
        if consume:
            gram = moments.gram[i]
            gram /= n
            gram -= _outer(v, v).astype(gram.dtype)
            cross[..., block] = moments.cross[..., block] / n - _outer(u, v).astype(cross.dtype)
            grams.append(gram)
            continue
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
    total = float(_spread(moments, around).sum()) + _changed(rounded, gram, cross, moments.blocks)
    variance = _variance(moments)
    return max(total, 0.0) / variance if variance else 0.0


def _spread(moments: Moments, around: Moments | None = None) -> Array:
    """``E y^2`` less the means of other images, [groups, rows], summed over the blocks."""
    around = around or moments
    n, k = max(1, moments.count), max(1, around.count)
    found = np.zeros(moments.out[0].shape)
    for out, power, other in zip(moments.out, moments.out_power, around.out, strict=True):
        mean = out / n
        found += np.maximum(power / n - mean**2, 0) + (mean - other / k) ** 2
    return found


def _changed(
    rounded: Array,
    gram: list[Array],
    cross: Array | None,
    blocks: list[slice],
    ridge: list[Array] | None = None,
) -> float:
    """``w^ G w^' - 2 c w^'`` over all rows; ``gram`` is H where its ridge is given."""
    total = 0.0
    for i, (block, g) in enumerate(zip(blocks, gram, strict=True)):
        q = rounded[..., block]
        product = q @ g
        if ridge is not None:
            product -= ridge[i].astype(product.dtype) * q
        if cross is not None:
            product -= 2 * cross[..., block]
        total += float((product * q).sum(dtype=np.float64))
    return total


def _variance(moments: Moments) -> float:
    n = max(1, moments.count)
    return float(np.maximum(moments.signal / n - (moments.signal_mean / n) ** 2, 0).sum())
