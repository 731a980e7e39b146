"""Tile of codes, with its repeats rewritten to where the axes are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import integers
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import identity
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class TileRegion(MoveRegion):
    """A Tile.

    Attributes:
        repeats: one per axis of the model's tensor; None where they are computed at run time.
    """

    repeats: list[int] | None

    @property
    def reals(self) -> list[ir.Value]:
        """The repeats, where something computes them."""
        given = self.core.inputs[1]
        return [given] if self.repeats is None and given is not None else []

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor, which must have the model's axes if the repeats are unknown."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        if self.repeats is None:
            stored = lowering.codes_in(self.source, identity(len(stored.order)), bipolar=True)
            (repeats,) = map(lowering.original, self.reals)
        else:
            by_place = [self.repeats[axis] for axis in stored.order]
            repeats = lowering.constant(output, "repeats", np.array(by_place, np.int64))
        value = lowering.standard(
            "Tile", [stored.value, repeats], {}, output, stored_type(stored), order=stored.order
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Tile")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    repeats = integers(sink.inputs[1])
    if repeats is not None and len(repeats) != rank_of(sink.inputs[0]):
        return Refusal(f"it has {len(repeats)} repeats for {rank_of(sink.inputs[0])} axes")
    return TileRegion(sink, unread, repeats)
