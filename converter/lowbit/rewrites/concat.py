"""Concat of quantized tensors -> QuantizeLinear, or of codes on one grid, becomes LowBitConcat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int
from lowbit.graph.constants import constant
from lowbit.graph.normal_form import NormalForm, Quantization, is_op, rank_of
from lowbit.graph.opsets import has_code_kernel
from lowbit.graph.quantization import CODE_TYPES, CodeRange, Grid
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import CodesOutput, Order, Stored, channels_last, identity
from lowbit.rewrites.clipped import clipped_at, real_numbers
from lowbit.rewrites.epilogue import Bounds
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region

_ONE = Grid(np.ones((), np.float32), np.zeros((), np.int32))


@dataclass
class ConcatRegion(Region):
    """Tensors joined along an axis, each brought to the output's grid."""

    core: ir.Node
    nodes: Sequence[ir.Node]
    operands: list[Activation]
    axis: int
    result: ir.Value
    quantization: Quantization | None
    bounds: Bounds
    range: CodeRange

    @property
    def codes(self) -> list[ir.Value]:
        """The operands."""
        return [operand.codes for operand in self.operands]

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        order = self._order(lowering)
        stored = [lowering.codes_in(operand.codes, order) for operand in self.operands]
        if self.quantization is not None:
            output, attributes = lowering.quantized_output(
                self.quantization, *self.bounds.codes(self.quantization)
            )
        else:
            # Codes that have no quantizer of their own: on a grid of scale 1 they are copied.
            plain = Quantization(self.result, self.result, _ONE, replace(self.range, bipolar=False), ())
            output, attributes = lowering.quantized_output(plain, self.range.low, self.range.high)
        copied = [
            s
            for s, o in zip(stored, self.operands, strict=True)
            if o.grid.scale == output.scale
            and lowering.zero_point(s, o.grid) == output.zero_point
            and s.signed == output.signed
        ]
        attributes |= _bounds(copied, output, all_copied=len(copied) == len(stored))
        value = lowering.node(
            "LowBitConcat",
            {
                "x_scales": np.array([operand.grid.scale for operand in self.operands], np.float32),
                "x_zero_points": np.array(
                    [int(lowering.zero_point(s, o.grid)) for s, o in zip(stored, self.operands, strict=True)],
                    np.int32,
                ),
                **output.inputs,
                "x": [s.value for s in stored],
            },
            {
                "axis": order.index(self.axis),
                "x_encodings": ",".join(s.encoding for s in stored) if any(s.signed for s in stored) else "",
                **attributes,
            },
            self.result,
            output.dtype,
            order,
            origins=self.nodes,
        )
        lowering.define_codes(self.result, output.stored(value, order))
        return value

    def _order(self, lowering: Lowering) -> Order:
        """As most operands are stored, channels last among them; constants are stored as the others are."""
        orders = Counter(lowering.plain(codes).order for codes in self.codes if constant(codes) is None)
        rank = lowering.rank(self.result)
        if len(orders) > 1 and channels_last(rank) in orders:
            return channels_last(rank)
        return max(orders, key=orders.__getitem__, default=identity(rank))


def _unsplit(form: NormalForm, operands: list[Activation], axis: int) -> list[Activation]:
    """Operands that are all parts of one Split along the same axis, in order, become what it cuts.

    As where half of the channels of a block are joined with what is made of the other half.
    """
    joined: list[Activation] = []
    while operands:
        first = operands[0]
        node = first.codes.producer()
        if node is not None and is_op(node, "Split"):
            whole, parts = node.inputs[0], operands[: len(node.outputs)]
            code_range = None if whole is None else form.code_range(whole)
            rank = None if whole is None else rank_of(whole)
            if (
                whole is not None
                and code_range is not None
                and rank is not None
                and from_front(get_int(node, "axis", 0), rank) == axis
                and [part.codes for part in parts] == list(node.outputs)
                and all(part.grid.equals(first.grid) for part in parts)
            ):
                joined.append(Activation(whole, first.grid, code_range))
                operands = operands[len(parts) :]
                continue
        joined.append(first)
        operands = operands[1:]
    return joined


def _bounds(copied: list[Stored], output: CodesOutput, *, all_copied: bool) -> dict[str, Any]:
    """The attributes that decide whether codes on the output's grid are copied, or clipped one by one.

    The node copies them where it has no bounds of its own. Those that the bit width implies must be stated
    where a producer's codes exceed them, and stated ones that nothing can exceed are dropped.
    """
    within = all(output.low <= s.low and s.high <= output.high for s in copied)
    if not within:
        return {"y_min": [output.low], "y_max": [output.high]}
    return {"y_min": [], "y_max": []} if all_copied else {}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    form = context.form
    if is_op(sink, "Concat") and all(v is not None and v.dtype in CODE_TYPES for v in sink.inputs):
        ranges = [form.code_range(value) for value in sink.inputs if value is not None]
        union = form.code_range(sink.outputs[0])
        rank = rank_of(sink.outputs[0])
        if rank is None or union is None:
            return Refusal("the rank of its codes is unknown")
        alone = not any(_is_made(form_value) for form_value in sink.inputs)
        if alone and sink.outputs[0] not in context.wanted and has_code_kernel(form.graph, sink, union.dtype):
            return None
        operands = [
            Activation(value, _ONE, code_range)
            for value, code_range in zip(sink.inputs, ranges, strict=True)
            if value is not None and code_range is not None
        ]
        axis = from_front(get_int(sink, "axis", 0), rank)
        if axis is None:
            return _no_axis(sink, rank)
        return ConcatRegion(sink, [sink], operands, axis, sink.outputs[0], None, Bounds(), union)

    clipped = clipped_at(form, sink, ("Concat",), laws=True)
    if clipped is None:
        return None
    operands = []
    for i, value in enumerate(clipped.core.inputs):
        activation = read_activation(form, value, f"operand {i}")
        if isinstance(activation, Refusal):
            return activation
        operands.append(activation)
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    assert clipped.quantization is not None
    refusal = clipped.refuse_rounding(np.concatenate([real_numbers(operand) for operand in operands]))
    if refusal is not None:
        return refusal
    rank = rank_of(operands[0].codes)
    assert rank is not None
    axis = from_front(get_int(clipped.core, "axis", 0), rank)
    if axis is None:
        return _no_axis(clipped.core, rank)
    return ConcatRegion(
        clipped.core,
        clipped.nodes,
        _unsplit(form, operands, axis),
        axis,
        clipped.result,
        clipped.quantization,
        clipped.bounds,
        clipped.quantization.range,
    )


def _no_axis(node: ir.Node, rank: int) -> Refusal:
    return Refusal(f"its operands, of rank {rank}, have no axis {get_int(node, 'axis', 0)}")


def _is_made(value: ir.Value | None) -> bool:
    return value is not None and value.producer() is not None
