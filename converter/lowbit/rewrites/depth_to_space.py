"""DepthToSpace of codes becomes LowBitDepthToSpace: blocks of channels become blocks of pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_string
from lowbit.graph.lowering import Lowering
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class DepthToSpaceRegion(MoveRegion):
    """A rearrangement of channels into pixels."""

    blocksize: int
    mode: str

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        output = self.core.outputs[0]
        stored = lowering.channels_last(self.source, bipolar=True)
        value = lowering.node(
            "LowBitDepthToSpace",
            {"x": stored.value},
            {"x_encoding": stored.byte_encoding, "blocksize": self.blocksize, "mode": self.mode},
            output,
            stored_type(stored),
            stored.order,
            origins=self.nodes,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "DepthToSpace")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    blocksize, mode = get_int(sink, "blocksize", 0), get_string(sink, "mode", "DCR")
    if rank_of(sink.inputs[0]) != 4 or blocksize < 1 or mode not in ("DCR", "CRD"):
        return Refusal(f"its block size {blocksize} and mode {mode} do not fit a tensor of its rank")
    return DepthToSpaceRegion(sink, unread, blocksize, mode)
