"""Softmax of a quantized tensor [-> Relu, Clip] -> QuantizeLinear becomes LowBitSoftmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int
from lowbit.graph.normal_form import dims_of, may_return
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.ops.softmax import softmax_table
from lowbit.rewrites.clipped import clipped_at
from lowbit.rewrites.operands import read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion

_ONE_AXIS = 13
"""The first opset whose Softmax has one axis; before, all dims from it on make one row."""


@dataclass
class SoftmaxRegion(UnaryRegion):
    """A Softmax.

    Attributes:
        axis: the axis of the model's tensor along which the results add up to 1.
        place: where that is stored, once the operand has been read.
    """

    axis: int
    place: int = -1

    op_type = "LowBitSoftmax"

    def read_x(self, lowering: Lowering) -> Stored:
        """The operand, in whatever order it has."""
        x = lowering.plain(self.x.codes)
        self.place = x.axis(self.axis)
        return x

    def geometry(self) -> dict[str, Any]:
        """The axis."""
        return {"axis": self.place}

    def extra_inputs(self) -> dict[str, Any]:
        """The exponentials of the distances between two codes."""
        return {"table": softmax_table(float(self.x.grid.scale))}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("Softmax",))
    if clipped is None:
        return None
    if may_return(clipped.core):
        return Refusal("ONNX Runtime computes QLinearSoftmax in fixed point, whose numbers are its own")
    x = read_activation(context.form, clipped.core.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    axis = _axis(clipped.core, dims_of(x.codes))
    return axis if isinstance(axis, Refusal) else SoftmaxRegion(x, clipped, clipped.nodes, axis)


def _axis(node: ir.Node, dims: list[int | None]) -> int | Refusal:
    """The axis of a Softmax, counted from the front."""
    assert node.graph is not None
    one_axis = node.graph.opset_imports.get("", _ONE_AXIS) >= _ONE_AXIS
    stated = get_int(node, "axis", -1 if one_axis else 1)
    axis = from_front(stated, len(dims))
    if axis is None:
        return Refusal(f"its input, of rank {len(dims)}, has no axis {stated}")
    if not one_axis and any(dim != 1 for dim in dims[axis + 1 :]):
        return Refusal(f"before opset {_ONE_AXIS} its rows run over all dims from axis {axis} on")
    return axis
