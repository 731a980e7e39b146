"""Gather from a constant table by codes becomes LowBitLookup: how ``lowbit export --to qdq`` writes tables.

The index is ``Cast(codes)``, to which constants may be added, one number or one per channel (a table per
channel, one behind the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.constants import constant
from lowbit.graph.normal_form import dims_of, is_op, rank_of
from lowbit.graph.quantization import CODE_TYPES, CodeRange
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.rewrites.lookup import by_stored_byte
from lowbit.rewrites.rule import Context, Region

_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclass
class TableRegion(Region):
    """A table of codes.

    Attributes:
        source: the codes that go in.
        table: output codes in the model's terms, [n] or [C, n], for all n codes of the input's type.
        first: the input code of table entry 0.
        axis: the axis of the C tables.
    """

    source: ir.Value
    table: npt.NDArray[np.int16]
    first: int
    axis: int
    core: ir.Node
    nodes: Sequence[ir.Node]

    @property
    def codes(self) -> list[ir.Value]:
        """The codes that go in."""
        return [self.source]

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node, its table in terms of the codes as they are stored."""
        result = self.core.outputs[0]
        assert result.dtype is not None
        if self.table.ndim == 2:
            others = [axis for axis in range(lowering.rank(self.source)) if axis != self.axis]
            x = lowering.codes_in(self.source, (*others, self.axis))
        else:
            x = lowering.plain(self.source)
        offset, signed = lowering.storage(result, *CODE_TYPES[result.dtype])
        entries = (by_stored_byte(self.table, self.first, x) + offset).astype(np.int8 if signed else np.uint8)
        value = lowering.node(
            "LowBitLookup",
            {"x": x.value, "table": entries.view(np.uint8)},
            {"x_encoding": x.encoding, "y_encoding": "signed" if signed else "unsigned"},
            result,
            ir.DataType.INT8 if signed else ir.DataType.UINT8,
            x.order,
            origins=self.nodes,
        )
        low, high = int(self.table.min()) + offset, int(self.table.max()) + offset
        lowering.define_codes(result, Stored(value, x.order, offset, signed, low, high))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    if not is_op(sink, "Gather") or get_int(sink, "axis", 0) != 0:
        return None
    entries, index = constant(sink.inputs[0]), sink.inputs[1]
    if entries is None or entries.ndim != 1 or sink.outputs[0].dtype not in _BYTES or index is None:
        return None
    nodes, summands = [sink], []
    node = index.producer()
    while is_op(node, "Add") and node is not None and context.form.used_once(node.outputs[0]):
        summand = constant(node.inputs[1])
        if summand is None or node.inputs[0] is None:
            return None
        summands.append(summand)
        nodes.append(node)
        node = node.inputs[0].producer()
    if node is None or not is_op(node, "Cast") or get_int(node, "to", 0) not in _INTEGERS:
        return None
    if context.form.used_once(node.outputs[0]):
        nodes.append(node)
    source = node.inputs[0]
    code_range = None if source is None else context.form.code_range(source)
    if source is None or code_range is None or source.dtype not in CODE_TYPES:
        return None
    axis = _axis(summands, rank_of(source))
    if isinstance(axis, Refusal):
        return axis
    table = _tabulate(entries, summands, code_range)
    if isinstance(table, Refusal):
        return table
    if table.ndim == 2 and dims_of(source)[axis] != len(table):
        return Refusal(f"it has {len(table)} tables for an input of shape {dims_of(source)}")
    return TableRegion(source, table, CODE_TYPES[code_range.dtype][0], axis, sink, nodes)


def _axis(summands: Sequence[npt.NDArray[Any]], rank: int | None) -> int | Refusal:
    """The one axis, counted from the front, along which what is added to the index varies."""
    if rank is None:
        return Refusal("the rank of its index is unknown")
    axes = {i - array.ndim + rank for array in summands for i, size in enumerate(array.shape) if size != 1}
    if len(axes) > 1 or any(array.ndim > rank for array in summands):
        return Refusal("what is added to its index varies along more than the channels")
    return axes.pop() if axes else rank - 1


def _tabulate(
    entries: npt.NDArray[Any], summands: Sequence[npt.NDArray[Any]], codes: CodeRange
) -> npt.NDArray[np.int16] | Refusal:
    """The output code of every input code; of those that do not occur, any."""
    least, most = CODE_TYPES[codes.dtype]
    index = np.arange(least, most + 1, dtype=np.int64)[None]
    for summand in summands:
        index = index + summand.astype(np.int64).reshape(-1, 1)
    occurring = index[:, codes.low - least : codes.high - least + 1]
    if occurring.min() < -entries.size or occurring.max() >= entries.size:
        return Refusal("its index leaves the table")
    rows: npt.NDArray[np.int16] = entries[np.clip(index, -entries.size, entries.size - 1)].astype(np.int16)
    return rows[0] if len(rows) == 1 else rows
