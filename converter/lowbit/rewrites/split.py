"""Split of codes, with its axis rewritten to where it is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class SplitRegion(MoveRegion):
    """A Split along an axis."""

    axis: int

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        stored = lowering.plain(self.source, bipolar=True)
        attributes = dict(self.core.attributes) | {"axis": ir.AttrInt64("axis", stored.axis(self.axis))}
        values = lowering.standard_many(
            "Split",
            [stored.value, *self.core.inputs[1:]],
            attributes,
            self.core.outputs,
            stored_type(stored),
            order=stored.order,
        )
        for output, value in zip(self.core.outputs, values, strict=True):
            lowering.define_codes(output, replace(stored, value=value))
        return values[0]


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Split")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    rank = rank_of(sink.inputs[0])
    assert rank is not None
    axis = from_front(get_int(sink, "axis", 0), rank)
    if axis is None:
        return Refusal(f"its input, of rank {rank}, has no axis {get_int(sink, 'axis', 0)}")
    return SplitRegion(sink, unread, axis)
