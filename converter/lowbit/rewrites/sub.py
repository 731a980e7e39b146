"""Sub of two quantized tensors [-> Relu, Clip] -> QuantizeLinear becomes LowBitAdd.

a - b is a + (-b), also where it is rounded, and mirrored codes on a mirrored zero point are the negated
numbers: of bytes 255 - u, of int8 -1 - q. The codes of a constant are mirrored here, others by a table.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import Array, constant
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.rewrites.binary import BinaryRegion, match_binary
from lowbit.rewrites.rule import Context, Region


class DifferenceRegion(BinaryRegion):
    """A quantized tensor less another one."""

    def second(self, lowering: Lowering, b: Stored) -> tuple[ir.Value, Array]:
        """The negated operand."""
        zero_point = np.asarray((-1 if b.signed else 255) - lowering.zero_point(b, self.b.grid), np.int32)
        stored = constant(b.value)
        if stored is not None:
            return lowering.constant(self.clipped.result, "negated", np.invert(stored)), zero_point
        assert b.value.dtype is not None
        assert b.value.shape is not None
        value = lowering.node(
            "LowBitLookup",
            {"x": b.value, "table": np.invert(np.arange(256, dtype=np.uint8))},
            {"x_encoding": b.encoding, "y_encoding": b.encoding},
            self.b.codes,
            b.value.dtype,
            b.order,
            origins=self.nodes,
            shape=list(b.value.shape),
        )
        return value, zero_point


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    return match_binary(context, sink, "Sub", "LowBitAdd", DifferenceRegion)
