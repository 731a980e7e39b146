"""What Add, Sub and Mul of two quantized tensors have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import Array, constant
from lowbit.graph.normal_form import rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, channels_last, identity
from lowbit.rewrites.clipped import Clipped, clipped_at, real_numbers
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region

_BY_ROWS = ("LowBitGemm", "APGemm", "LowBitMatMul", "LowBitNormalization")
"""Ops that write the model's own order of axes, features last."""
_ELEMENTWISE = ("LowBitAdd", "LowBitMul", "LowBitAffine", "LowBitLookup", "LowBitRequantize")
_FAR = 6
"""Elementwise ops between a product and an addition, at most: bias, activation, scale."""


def _in_rows(value: ir.Value) -> bool:
    """Whether a stored tensor was written by rows, elementwise ops behind that aside."""
    for _ in range(_FAR):
        maker = value.producer()
        if maker is None or maker.op_type not in _ELEMENTWISE:
            break
        fed = [given for given in maker.inputs if given is not None and given.producer() is not None]
        if not fed:
            return False
        value = fed[0]
    maker = value.producer()
    return maker is not None and maker.op_type in _BY_ROWS


@dataclass
class BinaryRegion(Region):
    """Two quantized tensors, one op, one rounding."""

    op_type: str
    clipped: Clipped
    a: Activation
    b: Activation
    nodes: Sequence[ir.Node]

    @property
    def core(self) -> ir.Node:  # type: ignore[override]
        """The Add, Sub or Mul."""
        return self.clipped.core

    @property
    def codes(self) -> list[ir.Value]:
        """Both operands."""
        return [self.a.codes, self.b.codes]

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node; both operands get the same order of axes."""
        rank = max(lowering.rank(self.a.codes), lowering.rank(self.b.codes))
        order = self._order(lowering, rank)
        a, b = (self._read(lowering, operand, order) for operand in (self.a, self.b))
        return self.write(lowering, a, b, order)

    def write(self, lowering: Lowering, a: Stored, b: Stored, order: Order, **geometry: Any) -> ir.Value:
        """Writes the node for two stored operands, its output in an order of axes."""
        output, attributes = self.clipped.output(lowering)
        b_value, b_zero_point = self.second(lowering, b)
        value = lowering.node(
            self.op_type,
            {
                "a": a.value,
                "a_scale": self.a.grid.scale,
                "a_zero_point": lowering.zero_point(a, self.a.grid),
                "b": b_value,
                "b_scale": self.b.grid.scale,
                "b_zero_point": b_zero_point,
                **(output.inputs if output else {}),
                **self.extra_inputs(b),
            },
            {"a_encoding": a.encoding, "b_encoding": b.encoding, **geometry, **attributes},
            self.clipped.result,
            output.dtype if output else ir.DataType.FLOAT,
            order,
            origins=self.nodes,
        )
        self.clipped.define(lowering, value, output, order)
        return value

    def second(self, lowering: Lowering, b: Stored) -> tuple[ir.Value, Array]:
        """The codes and the zero point of the second operand as the node reads them."""
        return b.value, lowering.zero_point(b, self.b.grid)

    def extra_inputs(self, b: Stored) -> dict[str, Array]:
        """Further inputs of the node, for the second operand as it is stored."""
        return {}

    def _order(self, lowering: Lowering, rank: int) -> Order:
        """As both operands of full rank are stored; else channels last if one of them is.

        What a matrix product or a normalization wrote stays in the model's order, which the next one reads.
        """
        full = [
            x.codes for x in (self.a, self.b) if lowering.rank(x.codes) == rank and constant(x.codes) is None
        ]
        orders = {lowering.plain(codes).order for codes in full}
        if len(orders) == 1:
            return orders.pop()
        if any(_in_rows(lowering.plain(codes).value) for codes in full):
            return identity(rank)
        return channels_last(rank) if channels_last(rank) in orders else identity(rank)

    def _read(self, lowering: Lowering, operand: Activation, order: Order) -> Stored:
        """An operand in an order of axes; one of lower rank is aligned from the right, as numpy does."""
        rank, missing = len(order), len(order) - lowering.rank(operand.codes)
        array = constant(operand.codes)
        if array is not None:
            stored = lowering.codes(operand.codes)
            array = array.reshape((1,) * missing + array.shape).transpose(order)
            value = lowering.constant(self.clipped.result, "operand", array)
            return Stored(value, order, 0, stored.signed, stored.low, stored.high)
        if missing == 0:
            return lowering.codes_in(operand.codes, order)
        stored = lowering.codes_in(operand.codes, identity(rank - missing))
        if order == identity(rank):
            return stored
        shape = [1] * missing + list(stored.value.shape or [])
        assert stored.value.dtype is not None
        further, attributes = lowering.axes_operand(operand.codes, range(missing))
        wide = lowering.standard(
            "Unsqueeze", [stored.value, *further], attributes, operand.codes, stored.value.dtype, shape=shape
        )
        perm = {"perm": list(order)}
        turned = lowering.standard(
            "Transpose", [wide], perm, operand.codes, stored.value.dtype, shape=[shape[i] for i in order]
        )
        return Stored(turned, order, stored.offset, stored.signed, stored.low, stored.high)


def read_operands(context: Context, node: ir.Node) -> tuple[Activation, Activation] | Refusal:
    """Both operands of a node, each a quantized tensor."""
    a = read_activation(context.form, node.inputs[0], "operand 0")
    if isinstance(a, Refusal):
        return a
    b = read_activation(context.form, node.inputs[1], "operand 1")
    return b if isinstance(b, Refusal) else (a, b)


_RESULTS = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}


def match_binary(
    context: Context, sink: ir.Node, onnx_op: str, op_type: str, made: type[BinaryRegion] = BinaryRegion
) -> Region | Refusal | None:
    """A binary op between two quantized tensors, with a quantizer behind it."""
    clipped = clipped_at(context.form, sink, (onnx_op,), laws=True)
    if clipped is None:
        return None
    operands = read_operands(context, clipped.core)
    if isinstance(operands, Refusal):
        return operands
    a, b = operands
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    if max(rank_of(a.codes) or 0, rank_of(b.codes) or 0) == 0:
        return Refusal("both operands are scalars")
    pairs = np.meshgrid(real_numbers(a), real_numbers(b))
    refusal = clipped.refuse_rounding(_RESULTS[onnx_op](*pairs))
    if refusal is not None:
        return refusal
    return made(op_type, clipped, a, b, clipped.nodes)
