"""Any function of one quantized tensor [-> QuantizeLinear] becomes LowBitLookup.

Between the codes that go in and those that come out may stand any elementwise nodes: Sigmoid, HardSwish, x *
Sigmoid(x), arithmetic with constants, further Q/DQ pairs. Functions in a row are one where nobody else reads
the codes between them. The function is not looked at: ONNX Runtime runs the model's own nodes on all codes
once, here, and the results are the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.constants import Array, constant
from lowbit.graph.evaluate import evaluate_nodes
from lowbit.graph.normal_form import (
    ELEMENTWISE,
    Dequantization,
    NormalForm,
    Quantization,
    dims_of,
    is_dequantize,
    is_op,
    is_quantizer,
    rank_of,
)
from lowbit.graph.quantization import CODE_TYPES, CodeRange
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.rewrites.chain import LONGEST_CHAIN, quantization_at
from lowbit.rewrites.rule import Context, Region


@dataclass
class LookupRegion(Region):
    """A function given by its table.

    Attributes:
        source: the codes that go in.
        quantization: the quantizer at the end.
        table: output codes in the model's terms, [n] or [C, n], for all n codes of the input's type.
        first: the input code of table entry 0.
    """

    source: ir.Value
    quantization: Quantization
    table: npt.NDArray[np.int16]
    first: int
    core: ir.Node
    nodes: Sequence[ir.Node]

    @property
    def codes(self) -> list[ir.Value]:
        """The codes that go in."""
        return [self.source]

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node, its table in terms of the codes as they are stored."""
        per_channel = self.table.ndim == 2
        x = lowering.channels_last(self.source) if per_channel else lowering.plain(self.source)
        codes = self.quantization.codes
        low, high = int(self.table.min()), int(self.table.max())
        output, _ = lowering.quantized_output(self.quantization, low, high)
        table = output.store(by_stored_byte(self.table, self.first, x))
        value = lowering.node(
            "LowBitLookup",
            {"x": x.value, "table": table.view(np.uint8)},
            {"x_encoding": x.encoding, "y_encoding": "signed" if output.signed else "unsigned"},
            codes,
            output.dtype,
            x.order,
            origins=[self.core, *self.nodes],
        )
        lowering.define_codes(codes, output.stored(value, x.order))
        return value


def by_stored_byte(table: Array, first: int, x: Stored) -> Array:
    """A table with one entry for every byte that may store a code: entry u serves the byte u.

    Args:
        table: [n] or [C, n], for n codes in the model's terms.
        first: the code of entry 0.
        x: how the codes are stored.
    """
    stored = np.arange(256)
    stored = np.where(stored > 127, stored - 256, stored) if x.signed else stored
    entries: Array = table[..., np.clip(stored - x.offset - first, 0, table.shape[-1] - 1)]
    return entries


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    form = context.form
    quantization = quantization_at(form, sink, laws=True, half=True)
    if not isinstance(quantization, Quantization):
        return None
    functions = functions_of(form, quantization.source, quantization.nodes)
    found: LookupRegion | Refusal | None = None
    for source, nodes in reversed(list(itertools.islice(functions, LONGEST_CHAIN))):
        if any(is_op(node, *ELEMENTWISE) for node in nodes):
            found = _tabulated(form, quantization, source, nodes)
            if isinstance(found, LookupRegion):
                break
    return found


def _tabulated(
    form: NormalForm, quantization: Quantization, source: ir.Value, nodes: list[ir.Node]
) -> LookupRegion | Refusal:
    code_range = form.code_range(source)
    if code_range is None or code_range.dtype not in CODE_TYPES or rank_of(source) is None:
        return Refusal(f"codes of type {source.dtype} are not supported")
    entries = tabulate(form, quantization.codes, source, nodes, code_range)
    if isinstance(entries, Refusal):
        return entries
    table = entries.astype(np.int16)
    core = next(node for node in nodes if is_op(node, *ELEMENTWISE))
    first = CODE_TYPES[code_range.dtype][0]
    return LookupRegion(source, quantization, table, first, core, nodes)


def function_of(
    form: NormalForm, value: ir.Value, behind: Sequence[ir.Node]
) -> tuple[ir.Value, list[ir.Node]] | None:
    """The nearest tensor of codes that a float tensor is a function of, see :func:`functions_of`."""
    return next(functions_of(form, value, behind), None)


def functions_of(
    form: NormalForm, value: ir.Value, behind: Sequence[ir.Node]
) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """The tensors of codes that a float tensor is a function of, and the nodes of the functions, in order.

    The nodes are collected backwards from the value; at a DequantizeLinear whose codes have other readers
    the search stops. Where several tensors of codes are left, the search goes on behind those that
    nobody else reads. So it does behind one, for the next function.

    Args:
        form: the graph.
        value: the float tensor.
        behind: nodes behind it that belong to the function: its quantizer.
    """
    first = _Search(form)
    search = first.narrowed() if first.visit(value) else None
    last = behind[-1] if behind else value.producer()
    while search is not None:
        (source,), nodes = search.sources, search.nodes
        covered = [node for node in form.graph if node in nodes or node in behind]
        inside = set(covered)
        for node in covered:
            if is_dequantize(node) or node is last:
                continue
            for output in node.outputs:
                if output.is_graph_output() or any(user not in inside for user in output.consumers()):
                    return
        yield source, covered
        wider = search.beyond(source)
        search = None if wider is None else wider.narrowed()


class _Search:
    """Nodes found so far, and the tensors of codes where the search stopped, in the order of the search."""

    def __init__(self, form: NormalForm):
        self.form = form
        self.nodes: set[ir.Node] = set()
        self.sources: dict[ir.Value, None] = {}

    def visit(self, value: ir.Value) -> bool:
        """Collects what computes a value; False if it is not elementwise all the way."""
        waiting = [value]
        while waiting:
            given = waiting.pop()
            if constant(given) is not None:
                continue
            node = given.producer()
            if node is None or node.graph is not self.form.graph:
                return False
            if node in self.nodes:
                continue
            if is_dequantize(node):
                codes = node.inputs[0]
                assert codes is not None
                if constant(codes) is None:
                    self.sources[codes] = None
            elif is_op(node, *ELEMENTWISE) and len(node.outputs) == 1:
                waiting.extend(operand for operand in node.inputs if operand is not None)
            else:
                return False
            self.nodes.add(node)
        return True

    def narrowed(self) -> _Search | None:
        """This search, or one that goes on behind some of its tensors, where that has but one of them."""
        search = self
        while len(search.sources) > 1:
            wider = next(filter(None, map(search.beyond, search.sources)), None)
            if wider is None:
                return None
            search = wider
        return search if search.sources else None

    def beyond(self, codes: ir.Value) -> _Search | None:
        """The search behind a tensor of codes that is computed for this function alone.

        An example is Q(Sigmoid(DQ(x))) in x * sigmoid(x).
        """
        quantization = self.form.quantization(codes, half=True)
        if not isinstance(quantization, Quantization) or codes.is_graph_output():
            return None
        if any(user not in self.nodes for user in codes.consumers()):
            return None
        wider = _Search(self.form)
        wider.nodes = self.nodes | set(quantization.nodes)
        wider.sources = {source: None for source in self.sources if source is not codes}
        return wider if wider.visit(quantization.source) else None


def tabulate(
    form: NormalForm, result: ir.Value, source: ir.Value, nodes: Sequence[ir.Node], code_range: CodeRange
) -> Array | Refusal:
    """Runs the nodes on every code; the codes go along the batch, so that channels stay channels.

    The batch is no dim of any constant, so that one which varies along it does not broadcast.
    """
    dims = dims_of(source)
    low, high = CODE_TYPES[code_range.dtype]
    codes = np.arange(low, high + 1)
    arrays = [constant(value) for node in nodes for value in node.inputs]
    taken = {size for array in arrays if array is not None for size in array.shape}
    batch = next(size for size in itertools.count(codes.size) if size not in taken)
    shape = [batch] + [1] * (len(dims) - 1)
    axes = _axes(form, nodes)
    if axes - {1}:
        return Refusal(f"its scales are per entry of axis {sorted(axes)}; expected the channels (1)")
    if len(dims) > 1 and (axes or any(array is not None and array.size > 1 for array in arrays)):
        if dims[1] is None:
            return Refusal("the number of its channels is unknown")
        shape[1] = dims[1]
    grid = np.broadcast_to(np.resize(codes, batch).reshape([-1] + [1] * (len(shape) - 1)), shape)
    values = evaluate_nodes(form.graph, nodes, source, grid, result)
    if isinstance(values, Refusal):
        return values
    if not dims:
        values = values.reshape(batch)
    if values.shape != tuple(shape):
        return Refusal("a constant operand varies along another axis than the channels")
    table = values[: codes.size].reshape(codes.size, -1).T
    return table[0] if np.all(table == table[0]) else np.ascontiguousarray(table)


def _axes(form: NormalForm, nodes: Sequence[ir.Node]) -> set[int]:
    """The axes of the grids between."""
    values = [node.outputs[0] for node in nodes if is_quantizer(node) or is_dequantize(node)]
    reads = [form.quantization(value, half=True) or form.dequantization(value, half=True) for value in values]
    return {
        read.grid.axis
        for read in reads
        if isinstance(read, (Quantization, Dequantization)) and read.grid.axis is not None
    }
