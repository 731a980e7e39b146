"""MaxPool of codes becomes LowBitMaxPool: the largest code is the code of the largest real number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.lowering import Lowering
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import Window, read_max_pool
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class MaxPoolRegion(MoveRegion):
    """A maximum over windows."""

    window: Window
    ceil_mode: int

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        output = self.core.outputs[0]
        stored = lowering.channels_last(self.source, bipolar=True)
        value = lowering.node(
            "LowBitMaxPool",
            {"x": stored.value},
            {"x_encoding": stored.byte_encoding, **self.window.attributes(), "ceil_mode": self.ceil_mode},
            output,
            stored_type(stored),
            stored.order,
            origins=self.nodes,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "MaxPool")
    if unread is None or isinstance(unread, Refusal):
        return unread
    window = read_max_pool(sink)
    if isinstance(window, Refusal):
        return window
    return MaxPoolRegion(sink, unread, window, get_int(sink, "ceil_mode", 0))
