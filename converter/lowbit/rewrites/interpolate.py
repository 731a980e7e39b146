"""Linear or cubic Resize of a quantized tensor [-> Relu, Clip] -> QuantizeLinear becomes LowBitResize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from lowbit.graph.attributes import get_string
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_resize
from lowbit.rewrites.clipped import clipped_at
from lowbit.rewrites.move import holds_codes
from lowbit.rewrites.operands import read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion


@dataclass
class InterpolateRegion(UnaryRegion):
    """A Resize that computes new numbers from those around."""

    attributes: dict[str, Any]

    op_type = "LowBitResize"

    def geometry(self) -> dict[str, Any]:
        """Its mode, its coordinates and its sizes."""
        return self.attributes


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("Resize",))
    if clipped is None or get_string(clipped.core, "mode", "nearest") == "nearest":
        return None
    if holds_codes(context.form, clipped.core.inputs[0]):
        return None
    x = read_activation(context.form, clipped.core.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    geometry = read_resize(clipped.core)
    if isinstance(geometry, Refusal):
        return geometry
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    return InterpolateRegion(x, clipped, clipped.nodes, geometry)
