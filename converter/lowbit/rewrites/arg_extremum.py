"""ArgMax and ArgMin of a quantized tensor read its codes, with their axis rewritten to where it is stored.

``f32(q - z) * s`` rises strictly with q where one positive s serves all: the place of the largest number is
the place of the largest code, and equal numbers are equal codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_flag, get_int
from lowbit.graph.normal_form import is_op, rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import StoredReal
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region


@dataclass
class ArgExtremumRegion(Region):
    """An ArgMax or ArgMin along an axis."""

    core: ir.Node
    x: Activation
    axis: int
    keepdims: bool

    @property
    def nodes(self) -> Sequence[ir.Node]:  # type: ignore[override]
        """The op alone."""
        return [self.core]

    @property
    def codes(self) -> list[ir.Value]:
        """The operand."""
        return [self.x.codes]

    @property
    def passive(self) -> bool:
        """Codes are no better to read than the real numbers that something has computed."""
        return True

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor, whose codes become float32 numbers for it.

        ONNX Runtime's kernels for other types take up to twenty times as long as that for float32.
        """
        output = self.core.outputs[0]
        stored = lowering.plain(self.x.codes, bipolar=True)
        order = stored.order
        if not self.keepdims:
            order = tuple(axis - (axis > self.axis) for axis in order if axis != self.axis)
        attributes = dict(self.core.attributes) | {"axis": ir.AttrInt64("axis", stored.axis(self.axis))}
        numbers = lowering.standard(
            "Cast",
            [stored.value],
            {"to": int(ir.DataType.FLOAT)},
            self.x.codes,
            ir.DataType.FLOAT,
            order=stored.order,
        )
        value = lowering.standard(
            self.core.op_type, [numbers], attributes, output, ir.DataType.INT64, order=order
        )
        lowering.define_real(output, StoredReal(value, order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    if not is_op(sink, "ArgMax", "ArgMin") or context.form.dequantization(sink.inputs[0]) is None:
        return None
    x = read_activation(context.form, sink.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    rank = rank_of(x.codes)
    assert rank is not None
    axis = from_front(get_int(sink, "axis", 0), rank)
    if axis is None:
        return Refusal(f"its input, of rank {rank}, has no axis {get_int(sink, 'axis', 0)}")
    return ArgExtremumRegion(sink, x, axis, get_flag(sink, "keepdims", default=True))
