"""Slice of codes, with its axes rewritten to where those are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_ints
from lowbit.graph.constants import integers
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class SliceRegion(MoveRegion):
    """A Slice of given axes."""

    axes: list[int]

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        stored_axes = [stored.axis(axis) for axis in self.axes]
        if "starts" in self.core.attributes:  # the form that ended with opset 9
            attributes = {name: get_ints(self.core, name) for name in ("starts", "ends")}
            value = lowering.standard(
                "Slice",
                [stored.value],
                attributes | {"axes": stored_axes},
                output,
                stored_type(stored),
                order=stored.order,
            )
        else:
            axes = lowering.constant(output, "axes", np.array(stored_axes, np.int64))
            if self.core.inputs[1] is not None and self.core.inputs[1].dtype == ir.DataType.INT32:
                axes = lowering.constant(output, "axes", np.array(stored_axes, np.int32))
            inputs = [stored.value, self.core.inputs[1], self.core.inputs[2], axes, *self.core.inputs[4:]]
            value = lowering.standard("Slice", inputs, {}, output, stored_type(stored), order=stored.order)
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Slice")
    if unread is None or isinstance(unread, Refusal):
        return unread
    assert sink.inputs[0] is not None
    rank = rank_of(sink.inputs[0])
    assert rank is not None
    if "starts" in sink.attributes:
        axes = get_ints(sink, "axes") or list(range(len(get_ints(sink, "starts") or [])))
    elif len(sink.inputs) > 3 and sink.inputs[3] is not None:
        given = integers(sink.inputs[3])
        if given is None:
            return Refusal("its axes are computed at run time")
        axes = given
    else:
        starts = sink.inputs[1]
        if starts is None or starts.shape is None or not isinstance(starts.shape[0], int):
            return Refusal("the number of its axes is unknown")
        axes = list(range(starts.shape[0]))
    return SliceRegion(sink, unread, [axis % rank for axis in axes])
