"""Add of two quantized tensors [-> Relu, Clip] -> QuantizeLinear becomes LowBitAdd.

One of them may be a function of a quantized tensor that is not rounded itself, as NVIDIA's tools leave the
branch of a residual block that ends in ``x * Sigmoid(x)``: its real numbers go along as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import Array
from lowbit.graph.normal_form import rank_of
from lowbit.graph.quantization import CODE_TYPES, Grid
from lowbit.graph.reasons import Refusal
from lowbit.lowering.stored import Stored
from lowbit.rewrites.binary import BinaryRegion, match_binary
from lowbit.rewrites.clipped import clipped_at
from lowbit.rewrites.lookup import by_stored_byte, function_of, tabulate
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region

_ONE = Grid(np.ones((), np.float32), np.zeros((), np.int32))


@dataclass
class TableSumRegion(BinaryRegion):
    """A quantized tensor plus a function of another one.

    Attributes:
        table: the function's real numbers, for all codes of b's type.
        first: the code of entry 0.
    """

    table: Array
    first: int

    def extra_inputs(self, b: Stored) -> dict[str, Array]:
        """The table by stored bytes."""
        return {"b_table": by_stored_byte(self.table, self.first, b)}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    found = match_binary(context, sink, "Add", "LowBitAdd")
    return (_with_function(context, sink) or found) if isinstance(found, Refusal) else found


def _with_function(context: Context, sink: ir.Node) -> Region | None:
    """The region of an Add one of whose operands is a function of codes; None if none is."""
    form = context.form
    clipped = clipped_at(form, sink, ("Add",))
    if clipped is None or clipped.quantization is None or clipped.refuse_output() is not None:
        return None
    for path in (1, 0):
        value = clipped.core.inputs[path]
        a = read_activation(form, clipped.core.inputs[1 - path], "operand")
        if isinstance(a, Refusal) or value is None or not form.used_once(value):
            continue
        function = function_of(form, value, ())
        if function is None:
            continue
        source, nodes = function
        code_range = form.code_range(source)
        if code_range is None or code_range.dtype not in CODE_TYPES or not rank_of(source):
            continue
        table = tabulate(form, value, source, nodes, code_range)
        if isinstance(table, Refusal) or table.ndim > 1 or not np.all(np.isfinite(table)):
            continue
        b = Activation(source, _ONE, code_range)
        covered: Sequence[ir.Node] = [*nodes, *clipped.nodes]
        first = CODE_TYPES[code_range.dtype][0]
        return TableSumRegion("LowBitAdd", clipped, a, b, covered, table.astype(np.float32), first)
    return None
