"""Reshape and Flatten of codes; flattening for a Gemm is put off until somebody else needs it.

A Reshape that splits and joins axes does so wherever they are stored: a shuffle of channels (Reshape,
Transpose, Reshape) keeps the image channels last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_flag, get_int
from lowbit.graph.constants import integers
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, identity
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class ReshapeRegion(MoveRegion):
    """A Reshape or Flatten.

    Attributes:
        flattens: n if the output is the input with all dims from n on made one; None otherwise.
    """

    flattens: int | None

    def move(self, lowering: Lowering) -> ir.Value | None:
        """Puts a flattening off; reshapes the codes as they are stored where that can be said."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        if _same_dims(self.source, output):
            lowering.define_codes(output, stored)
            return None
        if self.flattens is not None and stored.order[: self.flattens] == identity(self.flattens):
            lowering.define_codes(output, replace(stored, flattened=self.flattens))
            return None
        where, order, target = _in_place(self.source, output, stored.order)
        stored = lowering.codes_in(self.source, where, bipolar=True)
        op_type, attributes, shape = self.core.op_type, dict(self.core.attributes), self.core.inputs[1:]
        if target is not None:
            op_type, attributes = "Reshape", {}
            shape = [lowering.constant(output, "shape", np.array(target, np.int64))]
        value = lowering.standard(
            op_type, [stored.value, *shape], attributes, output, stored_type(stored), order=order
        )
        lowering.define_codes(output, replace(stored, value=value, order=order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    for op_type in ("Reshape", "Flatten"):
        unread = moves_codes(context, sink, op_type)
        if unread is not None:
            return unread if isinstance(unread, Refusal) else ReshapeRegion(sink, unread, _flattens(sink))
    return None


def _in_place(source: ir.Value, output: ir.Value, order: Order) -> tuple[Order, Order, list[int] | None]:
    """How to reshape a tensor that is stored in some order of axes.

    Returns:
        The order that the stored tensor has to have, with axes that are joined side by side; the order of the
        result; the shape to give to the stored tensor, None if it is the node's own.
    """
    own = identity(len(order)), identity(len(output.shape or ())), None
    groups = _groups(source, output)
    if groups is None:
        return own
    # A group stands where the first of its axes is stored.
    groups.sort(key=lambda group: min(order.index(axis) for axis in group[0]))
    where = tuple(axis for axes, _ in groups for axis in axes)
    if where == identity(len(order)):
        return own
    result = tuple(axis for _, axes in groups for axis in axes)
    dims = dims_of(output)
    target = [-1 if (dim := dims[axis]) is None else dim for axis in result]
    for axes, made in groups:
        if len(axes) == len(made) == 1 and where.index(axes[0]) == result.index(made[0]):
            target[result.index(made[0])] = 0  # Reshape copies such a dim
    return (where, result, target) if target.count(-1) <= 1 else own


def _groups(source: ir.Value, output: ir.Value) -> list[tuple[list[int], list[int]]] | None:
    """Runs of axes of a Reshape's input and the runs of the output's axes that they become.

    None where dynamic dims leave it open.
    """
    before, after = _sizes(source), _sizes(output)
    if 0 in before or 0 in after:
        return None
    names = [Counter(size for size in sizes if isinstance(size, str)) for sizes in (before, after)]
    mine, theirs = list((names[0] - names[1]).elements()), list((names[1] - names[0]).elements())
    if len(mine) == len(theirs) == 1 and _product(before) == _product(after):
        # All other dims are the same, and so is the one that each side has alone.
        before = [theirs[0] if size == mine[0] else size for size in before]
    groups = []
    i = j = 0
    while i < len(before) and j < len(after):
        axes, made = [i], [j]
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if isinstance(left, str) or isinstance(right, str):
                return None
            sizes, axis = (before, i) if left < right else (after, j)
            size = sizes[axis] if axis < len(sizes) else ""
            if isinstance(size, str):
                return None
            if left < right:
                axes, left, i = [*axes, i], left * size, i + 1
            else:
                made, right, j = [*made, j], right * size, j + 1
        groups.append((axes, made))
    if not groups or any(size != 1 for size in (*before[i:], *after[j:])):
        return None
    groups[-1][0].extend(range(i, len(before)))
    groups[-1][1].extend(range(j, len(after)))
    return groups


def _sizes(value: ir.Value) -> list[int | str]:
    """The dims of a tensor: a number, or the name of a dynamic dim; one without a name gets one."""
    assert value.shape is not None
    return [
        dim if isinstance(dim, int) else dim.value or f"{value.name} {axis}"
        for axis, dim in enumerate(value.shape)
    ]


def _product(sizes: Sequence[int | str]) -> int:
    return math.prod(size for size in sizes if isinstance(size, int))


def _same_dims(a: ir.Value, b: ir.Value) -> bool:
    dims = dims_of(a)
    return None not in dims and dims == dims_of(b)


def _flattens(node: ir.Node) -> int | None:
    """The axis from which on a node flattens its input, if that is all it does."""
    source = node.inputs[0]
    assert source is not None
    dims = dims_of(source)
    if is_op(node, "Flatten"):
        # Flatten also joins the dims before its axis; only axis 1 leaves them alone.
        return 1 if get_int(node, "axis", 1) == 1 and len(dims) > 1 else None
    target = integers(node.inputs[1])
    if (
        target is None
        or not 1 < len(target) < len(dims)
        or (0 in target and get_flag(node, "allowzero", default=False))
    ):
        return None
    axis = len(target) - 1
    features = dims[axis:]
    if any(dim is None for dim in features) or target[-1] not in (
        -1,
        math.prod(d for d in features if d is not None),
    ):
        return None
    # One -1 among the leading dims is what the features leave over, which is the input's own dim.
    leading = [
        t in (0, d) or (t == -1 and target[-1] != -1) for t, d in zip(target, dims[:axis], strict=False)
    ]
    return axis if all(leading) else None
