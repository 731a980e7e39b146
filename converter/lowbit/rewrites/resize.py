"""Nearest-neighbour Resize of codes becomes LowBitResize."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from lowbit.graph.lowering import Lowering
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_resize
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class ResizeRegion(MoveRegion):
    """A nearest-neighbour resize of the spatial dims."""

    geometry: dict[str, Any]

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        output = self.core.outputs[0]
        stored = lowering.channels_last(self.source, bipolar=True)
        value = lowering.node(
            "LowBitResize",
            {"x": stored.value},
            {"x_encoding": stored.byte_encoding, **self.geometry},
            output,
            stored_type(stored),
            stored.order,
            origins=self.nodes,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Resize")
    if unread is None or isinstance(unread, Refusal):
        return unread
    geometry = read_resize(sink)
    return geometry if isinstance(geometry, Refusal) else ResizeRegion(sink, unread, geometry)
