"""Reshape and Flatten of codes; flattening for a Gemm is put off until somebody else needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.constants import integers
from lowbit.graph.lowering import Lowering, identity
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal
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
        """Puts a flattening off; reshapes the codes in the model's order of axes otherwise."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        if _same_dims(self.source, output):
            lowering.define_codes(output, stored)
            return None
        if self.flattens is not None and stored.order[: self.flattens] == identity(self.flattens):
            lowering.define_codes(output, replace(stored, flattened=self.flattens))
            return None
        stored = lowering.codes_in(self.source, identity(lowering.rank(self.source)), bipolar=True)
        inputs = [stored.value, *self.core.inputs[1:]]
        value = lowering.standard(
            self.core.op_type, inputs, self.core.attributes, output, stored_type(stored)
        )
        lowering.define_codes(output, replace(stored, value=value, order=identity(lowering.rank(output))))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    for op_type in ("Reshape", "Flatten"):
        unread = moves_codes(context, sink, op_type)
        if unread is not None:
            return unread if isinstance(unread, Refusal) else ReshapeRegion(sink, unread, _flattens(sink))
    return None


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
    if target is None or not 1 < len(target) < len(dims) or (0 in target and get_int(node, "allowzero", 0)):
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
