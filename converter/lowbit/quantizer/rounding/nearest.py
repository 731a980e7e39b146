"""Every weight to its nearest code: what the other ways are measured against."""

from __future__ import annotations

from lowbit.quantizer.rounding.problem import Array, Problem, first_scale


def nearest(problem: Problem) -> tuple[Array, Array]:
    """Codes [groups, rows, columns] and scales [groups, rows]; the scales minimize the weights' own error."""
    scale = first_scale(problem, plain=True)
    return problem.round(problem.weights / scale[..., None]), scale
