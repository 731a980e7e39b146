"""Cyclic coordinate descent on the codes, with the scale of every row refitted between sweeps.

With all other codes fixed, the error ``(w^ - t) H (w^ - t)'`` is a parabola in one of them, with its minimum
at ``w^_j + ((t - w^) H)_j / H_jj``: the nearest code to that is the best of all codes, not only of the two
beside the float weight. No step raises the error, so the sweeps end. AdaRound optimizes the same error with a
relaxed choice between two codes.
"""

from __future__ import annotations

import numpy as np

from lowbit.quantizer.rounding.gptq import gptq
from lowbit.quantizer.rounding.problem import WORK, Array, Problem, first_scale

_BLOCK = 64


def descent(problem: Problem, sweeps: int, start: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """Codes and scales, from GPTQ's.

    Args:
        problem: the layer.
        sweeps: at most so many passes over all columns.
        start: codes [groups, rows, columns] and scales [groups, rows]; None: those of GPTQ, once with the
            scales of :func:`first_scale`, and once with the ones that fit its codes.
    """
    if start is None:
        scale = first_scale(problem)
        codes = gptq(problem, scale)
        again = problem.refit(codes, scale)
        second = gptq(problem, again)
        better = problem.error(second * again[..., None]) < problem.error(codes * scale[..., None])
        if not problem.per_channel:
            better = np.full_like(better, bool(better.mean() > 0.5))
        codes = np.where(better[..., None], second, codes)
        scale = np.where(better, again, scale)
    else:
        codes, scale = start
    for _ in range(sweeps):
        refitted = problem.refit(codes, scale)
        changed = _sweep(problem, codes, refitted)
        settled = np.allclose(refitted, scale, rtol=1e-4, atol=0)
        scale = refitted
        if changed <= codes.size * 1e-4 and settled:
            break
    return codes, problem.refit(codes, scale)


def _sweep(problem: Problem, codes: Array, scale: Array) -> int:
    """One pass over all columns; changes the codes in place and returns how many changed."""
    changed = 0
    for block, metric in zip(problem.blocks, problem.metric, strict=True):
        size = metric.shape[-1]
        dtype = np.float32 if size > WORK else np.float64
        h: Array = metric.astype(dtype)
        s = scale.astype(dtype)
        # Columns come first in memory: the loop works on one after the other, [columns, groups, rows].
        first = np.ascontiguousarray(np.moveaxis(codes[..., block], -1, 0), dtype)
        error = (problem.target[..., block] - codes[..., block] * scale[..., None]).astype(dtype)
        residual = np.ascontiguousarray(np.moveaxis(error @ h, -1, 0))
        inverse = 1 / (np.einsum("gkk->kg", h)[..., None] * s)
        for start in range(0, size, _BLOCK):
            stop = min(size, start + _BLOCK)
            steps = np.zeros_like(residual[start:stop])
            for j in range(start, stop):
                best = problem.round(first[j] + residual[j] * inverse[j])
                best -= first[j]
                if not best.any():
                    continue
                changed += int(np.count_nonzero(best))
                first[j] += best
                best *= s
                steps[j - start] = best
                residual[j:stop] -= h[:, j, j:stop].T[..., None] * best
            # What lies in front is not looked at again: the next sweep begins with a residual of its own.
            residual[stop:] -= np.einsum("gij,igr->jgr", h[:, start:stop, stop:], steps, optimize=True)
        codes[..., block] = np.moveaxis(first, 0, -1)
    return changed
