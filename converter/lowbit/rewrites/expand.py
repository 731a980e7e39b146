"""Expand of codes, with its shape rewritten to where the axes are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import integers
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import identity
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class ExpandRegion(MoveRegion):
    """An Expand.

    Attributes:
        shape: what it broadcasts with; None where that is computed at run time.
    """

    shape: list[int] | None

    @property
    def reals(self) -> list[ir.Value]:
        """The shape, where something computes it."""
        given = self.core.inputs[1]
        return [given] if self.shape is None and given is not None else []

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor.

        A shape that is unknown, or that adds dims in front, needs the model's own axes.
        """
        output = self.core.outputs[0]
        rank, new_rank = lowering.rank(self.source), lowering.rank(output)
        stored = lowering.plain(self.source, bipolar=True)
        if self.shape is None or rank != new_rank:
            stored = lowering.codes_in(self.source, identity(rank), bipolar=True)
        order = stored.order if rank == new_rank else identity(new_rank)
        if self.shape is None:
            (shape,) = map(lowering.original, self.reals)
        else:
            wide = [1] * (new_rank - len(self.shape)) + self.shape
            shape = lowering.constant(output, "shape", np.array([wide[axis] for axis in order], np.int64))
        value = lowering.standard(
            "Expand", [stored.value, shape], {}, output, stored_type(stored), order=order
        )
        lowering.define_codes(output, replace(stored, value=value, order=order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Expand")
    if unread is None or isinstance(unread, Refusal):
        return unread
    return ExpandRegion(sink, unread, integers(sink.inputs[1]))
