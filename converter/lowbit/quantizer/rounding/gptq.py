"""GPTQ: column after column, what rounding one column did is made up for by those behind it.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022. The
columns are never reordered, which depthwise and grouped layers do not survive.

With ``H = M' M`` and M lower triangular the error of a row is ``|M (w^ - t)|^2``, whose i-th term holds the
columns up to i alone. So column i is best rounded from ``t_i - sum_{j<i} M_ij (w^_j - t_j) / M_ii``: what the
inverse Hessian does in the paper, without an inverse. M is a Cholesky factor of H with its rows and columns
in reverse order, reversed again.
"""

from __future__ import annotations

import numpy as np

from lowbit.quantizer.rounding.problem import WORK, Array, Problem

_BLOCK = 64


def gptq(problem: Problem, scale: Array) -> Array:
    """Codes for given scales.

    Args:
        problem: the layer.
        scale: [groups, rows].

    Returns:
        Codes [groups, rows, columns].
    """
    codes = np.empty_like(problem.target)
    for block, factor in zip(problem.blocks, problem.factors, strict=True):
        codes[..., block] = _round_block(problem, problem.target[..., block], factor, scale)
    return codes


def _round_block(problem: Problem, target: Array, factor: Array, scale: Array) -> Array:
    size = target.shape[-1]
    dtype = np.float32 if size > WORK else np.float64
    # Rows of M divided by their diagonal: what is added up is the correction itself.
    m = (factor / np.einsum("gkk->gk", factor)[..., None]).astype(dtype)
    # Columns come first in memory: the loop works on one after the other.
    t, s = np.ascontiguousarray(np.moveaxis(target, -1, 0), dtype), scale.astype(dtype)
    codes, error = np.empty_like(t), np.zeros_like(t)
    for start in range(0, size, _BLOCK):
        stop = min(size, start + _BLOCK)
        # [columns, groups, rows] of corrections by all blocks in front.
        before = np.einsum("gij,jgr->igr", m[:, start:stop, :start], error[:start], optimize=True)
        for i in range(start, stop):
            wanted = t[i] - before[i - start]
            if i > start:
                wanted -= np.einsum("gj,jgr->gr", m[:, i, start:i], error[start:i])
            codes[i] = problem.round(wanted / s)
            error[i] = codes[i] * s - t[i]
    return np.moveaxis(codes, 0, -1)
