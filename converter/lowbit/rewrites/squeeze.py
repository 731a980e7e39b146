"""Squeeze and Unsqueeze of codes, with their axes rewritten to where those are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_ints
from lowbit.graph.constants import integers
from lowbit.graph.normal_form import dims_of, is_op
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class SqueezeRegion(MoveRegion):
    """A Squeeze or Unsqueeze.

    Attributes:
        axes: the axes that vanish (of the input) or appear (in the output), counted from the front.
    """

    axes: list[int]

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        output = self.core.outputs[0]
        stored = lowering.plain(self.source, bipolar=True)
        if is_op(self.core, "Squeeze"):
            stored_axes = [stored.axis(axis) for axis in self.axes]
            left = [axis for axis in range(len(stored.order)) if axis not in self.axes]
            order = tuple(left.index(axis) for axis in stored.order if axis not in self.axes)
        else:
            # New dims of size 1 may stand anywhere in the stored tensor; where the model has them they keep a
            # tensor in the model's order that way.
            old = [axis for axis in range(lowering.rank(output)) if axis not in self.axes]
            order_list = [old[axis] for axis in stored.order]
            for axis in sorted(self.axes):
                order_list.insert(axis, axis)
            order, stored_axes = tuple(order_list), sorted(self.axes)
        further, attributes = lowering.axes_operand(output, stored_axes)
        value = lowering.standard(
            self.core.op_type, [stored.value, *further], attributes, output, stored_type(stored), order=order
        )
        lowering.define_codes(output, replace(stored, value=value, order=order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    for op_type in ("Squeeze", "Unsqueeze"):
        unread = moves_codes(context, sink, op_type)
        if unread is None:
            continue
        if isinstance(unread, Refusal):
            return unread
        source, output = sink.inputs[0], sink.outputs[0]
        assert source is not None
        given = sink.inputs[1] if len(sink.inputs) > 1 else None
        axes = integers(given) if given is not None else get_ints(sink, "axes")
        if given is None and axes is None and op_type == "Squeeze":
            dims = dims_of(source)
            if None in dims:
                return Refusal("it squeezes all dims of size 1, but some dims are dynamic")
            axes = [axis for axis, dim in enumerate(dims) if dim == 1]
        if axes is None:
            return Refusal("its axes are computed at run time")
        fewer, more = (output, source) if op_type == "Squeeze" else (source, output)
        rank = Lowering.rank(more)
        counted = {from_front(axis, rank) for axis in axes}
        if None in counted or Lowering.rank(fewer) + len(counted) != rank:
            return Refusal(f"its axes {axes} do not fit the shape that its output is said to have")
        return SqueezeRegion(sink, unread, sorted(axis for axis in counted if axis is not None))
    return None
