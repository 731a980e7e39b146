"""AdaRound from the same sums: up or down, chosen by gradient descent on a relaxed variable.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020. The loss is quadratic in
the rounding, so its gradient is one product with H and a step does not depend on the number of images. With
``w^ = s (floor(t / s) + h(v))``, h the rectified sigmoid of the paper, and the regularizer that pulls h to 0
or 1.
"""

from __future__ import annotations

import numpy as np

from lowbit.quantizer.rounding.problem import Array, Problem, first_scale

_STRETCH = (-0.1, 1.1)
_RATE, _BETA1, _BETA2 = 0.02, 0.9, 0.999


def adaround(problem: Problem, steps: int = 1000) -> tuple[Array, Array]:
    """Codes [groups, rows, columns] and scales [groups, rows]."""
    scale = first_scale(problem)
    if (problem.low, problem.high) == (-1, 0):
        return problem.round(problem.target / scale[..., None]), scale
    base = np.floor(problem.target / scale[..., None])
    rest = problem.target / scale[..., None] - base
    low, high = _STRETCH
    v = -np.log((high - low) / (np.clip(rest, 0.01, 0.99) - low) - 1)
    # The loss in units of one step of the mean column, so that one rate fits all layers.
    unit = np.mean([np.einsum("gkk->g", h).mean() / h.shape[-1] for h in problem.metric])
    first, second = np.zeros_like(v), np.zeros_like(v)
    for step in range(1, steps + 1):
        sigmoid = 1 / (1 + np.exp(-v))
        soft = np.clip(sigmoid * (high - low) + low, 0, 1)
        slope = np.where((soft > 0) & (soft < 1), sigmoid * (1 - sigmoid) * (high - low), 0)
        codes = np.clip(base + soft, problem.low, problem.high)
        gradient = np.empty_like(v)
        for block, metric in zip(problem.blocks, problem.metric, strict=True):
            d = codes[..., block] - problem.target[..., block] / scale[..., None]
            gradient[..., block] = 2 * (d @ metric) / unit
        progress = step / steps
        if progress > 0.2:
            beta = 2 + 18 * (1 - (progress - 0.2) / 0.8)
            edge = 2 * soft - 1
            gradient -= 0.01 * 2 * beta * np.sign(edge) * np.abs(edge) ** (beta - 1)
        gradient *= slope
        first = _BETA1 * first + (1 - _BETA1) * gradient
        second = _BETA2 * second + (1 - _BETA2) * gradient**2
        v -= _RATE * (first / (1 - _BETA1**step)) / (np.sqrt(second / (1 - _BETA2**step)) + 1e-8)
    soft = np.clip(1 / (1 + np.exp(-v)) * (high - low) + low, 0, 1)
    codes = np.clip(base + (soft >= 0.5), problem.low, problem.high)
    return codes, problem.refit(codes, scale)
