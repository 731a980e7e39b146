"""Transpose of codes: another reading of the same bytes, no node at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import get_ints
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes
from lowbit.rewrites.rule import Context, Region


@dataclass
class TransposeRegion(MoveRegion):
    """A Transpose. Stored axis k held axis a of the input, which is axis ``perm.index(a)`` of the output."""

    perm: list[int]

    def move(self, lowering: Lowering) -> None:
        """Defines the output as the same tensor in another order of axes."""
        stored = lowering.plain(self.source, bipolar=True)
        order = tuple(self.perm.index(axis) for axis in stored.order)
        lowering.define_codes(self.core.outputs[0], replace(stored, order=order))


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Transpose")
    if unread is None or isinstance(unread, Refusal):
        return unread
    rank = len(sink.outputs[0].shape or ())
    perm = get_ints(sink, "perm", range(rank)[::-1])
    assert perm is not None
    source = sink.inputs[0]
    assert source is not None
    if sorted(perm) != list(range(rank_of(source) or 0)):
        return Refusal(f"its perm {list(perm)} does not fit a tensor of rank {rank_of(source)}")
    return TransposeRegion(sink, unread, perm)
