"""The exact choice of widths: a knapsack with one item of every group, as an integer program for HiGHS.

``u[g, b]`` is 1 where group g has its width b. What a layer costs may depend on the widths of its weights and
of its input together; ``z[l, w, a]`` is their product, which ``sum_w z[l, w, a] = u[a]`` and
``sum_a z[l, w, a] = u[w]`` make exact for whole u, so that z itself may be real.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.errors import LowBitError
from lowbit.searcher.groups import Group, Widths

Pair = tuple[int, int]
"""Bits of weights and of the input."""


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs.

    Attributes:
        weights: the group of its weights.
        activations: the group of its input; None where that changes nothing.
        cost: bytes or milliseconds by bits of weights and of the input, 0 where that changes nothing; a pair
            that is missing is not offered.
    """

    weights: str
    activations: str | None
    cost: Mapping[Pair, float]


def total_cost(costs: Sequence[LayerCost], widths: Widths) -> float:
    """The sum over all layers; infinite where a pair is not offered."""
    return sum(cost.cost.get(_pair(cost, widths), np.inf) for cost in costs)


def _pair(cost: LayerCost, widths: Widths) -> Pair:
    return widths[cost.weights], 0 if cost.activations is None else widths[cost.activations]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Some versions of HiGHS print to the process's own stdout, where one JSON document may be expected."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def choose(
    groups: Sequence[Group],
    harm: Mapping[str, Mapping[int, float]],
    costs: Sequence[LayerCost],
    budget: float,
    least: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
) -> Widths | None:
    """The widths of least summed harm within a budget; None where there are none.

    Args:
        groups: what has a width.
        harm: what each width of each group does to the output.
        costs: what the layers cost.
        budget: of their sum.
        least: bits that groups must have at least.
        most: bits that groups may have at most.

    Raises:
        LowBitError: without scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise LowBitError("the search needs scipy: pip install 'lowbit[quantize]'") from error
    variables: list[float] = []
    upper: list[float] = []
    place: dict[tuple[str, int], int] = {}
    for group in groups:
        for bits in group.widths:
            place[group.name, bits] = len(variables)
            variables.append(harm[group.name][bits])
            allowed = (least or {}).get(group.name, 0) <= bits <= (most or {}).get(group.name, 99)
            upper.append(float(allowed))
    whole = len(variables)
    rows: list[dict[int, float]] = [
        {place[group.name, bits]: 1.0 for bits in group.widths} for group in groups
    ]
    equal = [1.0] * len(rows)
    spent: dict[int, float] = {}
    by_name = {group.name: group for group in groups}
    for cost in costs:
        weights = by_name[cost.weights]
        activations = None if cost.activations is None else by_name[cost.activations]
        if activations is None:
            for bits in weights.widths:
                at = place[weights.name, bits]
                if (bits, 0) in cost.cost:
                    spent[at] = spent.get(at, 0.0) + cost.cost[bits, 0]
                else:
                    upper[at] = 0.0
            continue
        products: dict[Pair, int] = {}
        for bits in weights.widths:
            for a in activations.widths:
                products[bits, a] = len(variables)
                spent[len(variables)] = cost.cost.get((bits, a), 0.0)
                variables.append(0.0)
                upper.append(float((bits, a) in cost.cost))
        for bits in weights.widths:
            row = {products[bits, a]: 1.0 for a in activations.widths}
            rows.append(row | {place[weights.name, bits]: -1.0})
        for a in activations.widths:
            row = {products[bits, a]: 1.0 for bits in weights.widths}
            rows.append(row | {place[activations.name, a]: -1.0})
        equal += [0.0] * (len(weights.widths) + len(activations.widths))
    # The solver's tolerances are absolute: harm and cost in units of their own size.
    objective = np.array(variables)
    objective = objective / max(float(np.abs(objective).max(initial=0.0)), 1e-300)
    unit = max((abs(value) for value in spent.values()), default=0.0) or 1.0
    # Of equal harm the cheaper one.
    share = 1.0 if not np.any(objective) else 1e-7
    for at, value in spent.items():
        objective[at] += share * value / unit
    count = len(rows)
    index = [(i, j, v) for i, row in enumerate(rows) for j, v in row.items()]
    index += [(count, j, v / unit) for j, v in spent.items()]
    i, j, v = (np.array(column) for column in zip(*index, strict=True))
    matrix = coo_array((v, (i.astype(int), j.astype(int))), shape=(count + 1, len(variables))).tocsr()
    low = np.array([*equal, -np.inf])
    high = np.array([*equal, budget / unit + 1e-9])
    with _silence():
        solved = milp(
            objective,
            integrality=np.array([1] * whole + [0] * (len(variables) - whole)),
            bounds=Bounds(np.zeros(len(variables)), np.array(upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 0.0},
        )
    if solved.x is None:
        return None
    return {
        group.name: max(group.widths, key=lambda bits: solved.x[place[group.name, bits]]) for group in groups
    }
