"""The axes of reductions, with every default resolved."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_flag, get_ints
from lowbit.graph.constants import integers
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal

_FIRST_ON_CODES = 12
"""The first opset whose ReduceMax and ReduceMin take uint8 and int8."""
AXES_AS_INPUT = 18
"""The first opset whose ReduceMax, ReduceMin and ReduceMean take their axes as an input."""


@dataclass(frozen=True)
class Reduction:
    """What a Reduce op does to the dims of its input.

    Attributes:
        axes: the axes that it reduces, ascending, counted from the front.
        keepdims: whether they stay, with size 1.
    """

    axes: tuple[int, ...]
    keepdims: bool


def read_reduction(node: ir.Node) -> Reduction | Refusal:
    """The axes of a ReduceMax or ReduceMin that may run on codes."""
    source = node.inputs[0]
    if source is None or (rank := rank_of(source)) is None:
        return Refusal("the rank of its input is unknown")
    if node.graph is not None and node.graph.opset_imports.get("", _FIRST_ON_CODES) < _FIRST_ON_CODES:
        return Refusal(f"before opset {_FIRST_ON_CODES} it takes no codes")
    axes = get_ints(node, "axes")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        if node.graph is not None and node.graph.opset_imports.get("", AXES_AS_INPUT) < AXES_AS_INPUT:
            return Refusal(f"before opset {AXES_AS_INPUT} its axes are no input")
        axes = integers(node.inputs[1])
        if axes is None:
            return Refusal("its axes are computed at run time")
    if not axes:
        axes = [] if get_flag(node, "noop_with_empty_axes", default=False) else list(range(rank))
    reduced = {from_front(axis, rank) for axis in axes}
    if None in reduced:
        return Refusal(f"it reduces the axes {axes} of a tensor of rank {rank}")
    kept = get_flag(node, "keepdims", default=True)
    return Reduction(tuple(sorted(axis for axis in reduced if axis is not None)), kept)
