"""DepthToSpace of codes becomes LowBitDepthToSpace: blocks of channels become blocks of pixels."""

from __future__ import annotations

import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_string
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.move import SpatialMoveRegion, moves_codes
from lowbit.rewrites.rule import Context, Region


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "DepthToSpace")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    blocksize, mode = get_int(sink, "blocksize", 0), get_string(sink, "mode", "DCR")
    if rank_of(sink.inputs[0]) != 4 or blocksize < 1 or mode not in ("DCR", "CRD"):
        return Refusal(f"its block size {blocksize} and mode {mode} do not fit a tensor of its rank")
    return SpatialMoveRegion(sink, unread, "LowBitDepthToSpace", {"blocksize": blocksize, "mode": mode})
