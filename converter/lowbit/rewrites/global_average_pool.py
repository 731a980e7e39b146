"""GlobalAveragePool, or ReduceMean over all spatial dims, on codes becomes LowBitGlobalAveragePool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_flag, get_ints
from lowbit.graph.constants import integers
from lowbit.graph.normal_form import dims_of, is_op, rank_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.reductions import AXES_AS_INPUT
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, channels_last, identity
from lowbit.rewrites.clipped import MOST_RESULTS, OTHER_ROUNDING, Clipped, clipped_at
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion


@dataclass
class GlobalAveragePoolRegion(UnaryRegion):
    """An average over all spatial positions.

    Attributes:
        keepdims: whether the spatial dims stay, with size 1.
        order: the order of x's axes that puts the channels last; the model's own one in an NHWC model.
    """

    keepdims: int
    order: Order

    op_type = "LowBitGlobalAveragePool"

    def read_x(self, lowering: Lowering) -> Stored:
        """The operand with the axis last that is not averaged over."""
        return lowering.codes_in(self.x.codes, self.order)

    def geometry(self) -> dict[str, Any]:
        """Whether the spatial dims stay, with size 1."""
        return {"keepdims": self.keepdims}

    def output_order(self, lowering: Lowering, x: Stored) -> Order:
        """Like x, or [N, C]."""
        return x.order if self.keepdims else identity(2)


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("GlobalAveragePool", "ReduceMean"), laws=True)
    if clipped is None:
        return None
    node = clipped.core
    x = read_activation(context.form, node.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    rank = rank_of(x.codes)
    assert rank is not None
    if rank < 3:
        return Refusal(f"its input has rank {rank}; expected [N, C, D1..]")
    keepdims, order = 1, channels_last(rank)
    if is_op(node, "ReduceMean"):
        keepdims = int(get_flag(node, "keepdims", default=True))
        opset = context.form.graph.opset_imports.get("", AXES_AS_INPUT)
        if len(node.inputs) > 1 and opset < AXES_AS_INPUT:
            return Refusal(f"before opset {AXES_AS_INPUT} its axes are no input")
        axes = integers(node.inputs[1]) if len(node.inputs) > 1 else get_ints(node, "axes")
        reduced = {from_front(axis, rank) for axis in axes or []}
        if reduced == set(range(1, rank - 1)):
            order = identity(rank)
        elif reduced != set(range(2, rank)):
            return Refusal(f"it reduces axes {axes}; expected all spatial ones, {list(range(2, rank))}")
    if (refusal := clipped.refuse_output()) is not None:
        return refusal
    pixels = [dims_of(x.codes)[axis] for axis in order[1:-1]]
    region = GlobalAveragePoolRegion(x, clipped, clipped.nodes, keepdims, order)
    return _refuse_rounding(clipped, x, pixels) or region


def _refuse_rounding(clipped: Clipped, x: Activation, sizes: Sequence[int | None]) -> Refusal | None:
    """A refusal where the quantizer and the node round a sum of codes in two ways."""
    quantization = clipped.quantization
    if quantization is None or quantization.linear:
        return None
    pixels = math.prod(size or 0 for size in sizes)
    low, high = (pixels * (end - int(x.grid.zero_point)) for end in (x.range.low, x.range.high))
    if not 0 < high - low <= MOST_RESULTS:
        return Refusal(OTHER_ROUNDING)
    multiplier = x.grid.scale / (quantization.grid.scale * np.float32(pixels))
    return clipped.refuse_rounding(np.arange(low, high + 1).astype(np.float32) * multiplier, divided=True)
