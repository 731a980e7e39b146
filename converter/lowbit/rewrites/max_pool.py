"""MaxPool of codes becomes LowBitMaxPool: the largest code is the code of the largest real number."""

from __future__ import annotations

import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_max_pool
from lowbit.rewrites.move import SpatialMoveRegion, moves_codes
from lowbit.rewrites.rule import Context, Region


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "MaxPool")
    if unread is None or isinstance(unread, Refusal):
        return unread
    window = read_max_pool(sink)
    if isinstance(window, Refusal):
        return window
    geometry = {**window.attributes(), "ceil_mode": get_int(sink, "ceil_mode", 0)}
    return SpatialMoveRegion(sink, unread, "LowBitMaxPool", geometry)
