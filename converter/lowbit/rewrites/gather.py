"""Gather of codes, with its axis rewritten to where it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int
from lowbit.graph.normal_form import dims_of, rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, identity
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class GatherRegion(MoveRegion):
    """A Gather along an axis, whose place the dims of the indices take."""

    axis: int
    indices: ir.Value
    index_rank: int

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        if stored.axis(self.axis) == len(stored.order) - 1 and self._takes_many():
            stored = lowering.codes_in(self.source, identity(len(stored.order)), bipolar=True)
        order = tuple(self._order(stored.order))
        value = lowering.standard(
            "Gather",
            [stored.value, lowering.original(self.indices)],
            {"axis": stored.axis(self.axis)},
            output,
            stored_type(stored),
            order=order,
        )
        lowering.define_codes(output, replace(stored, value=value, order=order))
        return value

    def _takes_many(self) -> bool:
        """Whether ONNX Runtime gathers sooner along another axis than the last, a Transpose included.

        Along the last axis it copies bytes one by one: 8.7 ns each on one core of an AMD EPYC, where a
        Transpose takes about 1 ns for a byte of the whole tensor.
        """
        taken = [size for size in dims_of(self.indices) if size != 1]
        (channels,) = dims_of(self.source)[self.axis : self.axis + 1]
        return channels is None or None in taken or 8 * math.prod(size or 0 for size in taken) > channels

    @property
    def reals(self) -> list[ir.Value]:
        """The indices, which something else computes."""
        return [self.indices]

    def _order(self, order: Order) -> Iterator[int]:
        """The axes of the output as they are stored."""
        for axis in order:
            if axis == self.axis:
                yield from range(axis, axis + self.index_rank)
            else:
                yield axis if axis < self.axis else axis + self.index_rank - 1


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Gather")
    if unread is None or isinstance(unread, Refusal):
        return unread
    source, indices = sink.inputs[0], sink.inputs[1]
    assert source is not None
    assert indices is not None
    rank, index_rank = rank_of(source), rank_of(indices)
    assert rank is not None
    if index_rank is None:
        return Refusal("the rank of its indices is unknown")
    axis = from_front(get_int(sink, "axis", 0), rank)
    if axis is None:
        return Refusal(f"its input, of rank {rank}, has no axis {get_int(sink, 'axis', 0)}")
    return GatherRegion(sink, unread, axis, indices, index_rank)
