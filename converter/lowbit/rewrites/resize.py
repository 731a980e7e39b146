"""Nearest-neighbour Resize of codes becomes LowBitResize."""

from __future__ import annotations

import onnx_ir as ir

from lowbit.graph.attributes import get_string
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_resize
from lowbit.rewrites.move import SpatialMoveRegion, moves_codes
from lowbit.rewrites.rule import Context, Region


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Resize")
    if unread is None or isinstance(unread, Refusal):
        return unread
    if get_string(sink, "mode", "nearest") != "nearest":
        return Refusal("it computes with codes as with integers; put it between quantizers")
    geometry = read_resize(sink)
    return (
        geometry
        if isinstance(geometry, Refusal)
        else SpatialMoveRegion(sink, unread, "LowBitResize", geometry)
    )
