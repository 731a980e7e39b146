"""ReduceMax and ReduceMin of codes on one grid, with their axes rewritten to where those are stored.

The largest code stands for the largest number, so that the op runs on codes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.reasons import Refusal
from lowbit.graph.reductions import AXES_AS_INPUT, Reduction, read_reduction
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class ExtremumRegion(MoveRegion):
    """A ReduceMax or ReduceMin over some axes."""

    reduction: Reduction

    def move(self, lowering: Lowering) -> ir.Value | None:
        """Writes the op on the stored tensor."""
        output, axes = self.core.outputs[0], self.reduction.axes
        stored = lowering.plain(self.source, bipolar=True)
        if not axes:
            lowering.define_codes(output, stored)
            return None
        order = stored.order
        if not self.reduction.keepdims:
            left = [axis for axis in range(len(order)) if axis not in axes]
            order = tuple(left.index(axis) for axis in order if axis not in axes)
        places = sorted(stored.axis(axis) for axis in axes)
        inputs: list[ir.Value | None] = [stored.value]
        attributes: dict[str, int | list[int]] = {"keepdims": int(self.reduction.keepdims)}
        if lowering.graph.opset_imports.get("", 13) < AXES_AS_INPUT:
            attributes["axes"] = places
        else:
            inputs.append(lowering.constant(output, "axes", np.array(places, np.int64)))
        value = lowering.standard(
            self.core.op_type, inputs, attributes, output, stored_type(stored), order=order
        )
        lowering.define_codes(output, replace(stored, value=value, order=order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    for op_type in ("ReduceMax", "ReduceMin"):
        unread = moves_codes(context, sink, op_type)
        if unread is not None and not isinstance(unread, Refusal):
            reduction = read_reduction(sink)
            return reduction if isinstance(reduction, Refusal) else ExtremumRegion(sink, unread, reduction)
        if unread is not None:
            return unread
    return None
