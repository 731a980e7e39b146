"""Pad of codes: the pads move with their axes, the pad value is a code."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_string
from lowbit.graph.constants import integers, scalar
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class PadRegion(MoveRegion):
    """A Pad.

    Attributes:
        pads: begin and end per axis of the model's tensor.
        value: the pad code in the model's terms; None in the modes that repeat codes.
        mode: the op's mode.
    """

    pads: list[tuple[int, int]]
    value: int | None
    mode: str

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source)
        begins = [self.pads[axis][0] for axis in stored.order]
        ends = [self.pads[axis][1] for axis in stored.order]
        inputs: list[ir.Value | None] = [
            stored.value,
            lowering.constant(output, "pads", np.array(begins + ends, np.int64)),
        ]
        low, high = stored.low, stored.high
        if self.value is not None:
            code = self.value + stored.offset
            low, high = min(low, code), max(high, code)
            fill = np.array(code, np.int8 if stored.signed else np.uint8)
            inputs.append(lowering.constant(output, "value", fill))
        value = lowering.standard(
            "Pad", inputs, {"mode": self.mode}, output, stored_type(stored), order=stored.order
        )
        lowering.define_codes(output, replace(stored, value=value, low=low, high=high))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Pad")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    rank = rank_of(sink.inputs[0])
    assert rank is not None
    pads = read_pads(sink, rank)
    if isinstance(pads, Refusal):
        return pads
    mode = get_string(sink, "mode", "constant")
    value = None
    if mode == "constant":
        given = sink.inputs[2] if len(sink.inputs) > 2 else None
        number = 0 if given is None else scalar(given)
        if number is None:
            return Refusal("its pad value is computed at run time")
        value = int(number)
    return PadRegion(sink, unread, pads, value, mode)


def read_pads(node: ir.Node, rank: int) -> list[tuple[int, int]] | Refusal:
    """Begin and end of every axis, from the inputs of a Pad."""
    pads = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if pads is None:
        return Refusal("its pads are computed at run time")
    axes = list(range(rank))
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        given = integers(node.inputs[3])
        if given is None:
            return Refusal("its axes are computed at run time")
        axes = [axis % rank for axis in given]
    if len(pads) != 2 * len(axes):
        return Refusal(f"it has {len(pads)} pads for {len(axes)} axes")
    out = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        out[axis] = (pads[i], pads[len(axes) + i])
    return out
