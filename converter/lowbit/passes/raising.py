"""Raising quantizers above ops that several quantizers read, or that join tensors.

NVIDIA's tools quantize the inputs of Conv, Gemm, MatMul and one branch of an Add alone, so that the Concat,
Split, Slice, Resize and MaxPool between layers read and write real numbers. Each element of their results is
one of their operands', so that quantizing the operands gives the same codes, in a quarter of the bytes, and
where a layer makes an operand it may round itself.

Readers may round to several grids. Then an op is repeated on the codes of each, if that moves fewer bytes
than real numbers do. The parts of a Split that go to different grids become convolutions of their own: each
has some of the output channels of the one that is cut.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_int
from lowbit.graph.constants import add_initializer, constant, integers
from lowbit.graph.normal_form import (
    CODE_MOVERS,
    DIVIDES,
    ELEMENTWISE,
    NormalForm,
    Quantization,
    dims_of,
    is_dequantize,
    is_op,
    is_quantize,
    rank_of,
)
from lowbit.graph.reasons import for_each, has_to_stay
from lowbit.passes.moves import (
    may_hold,
    moves_exactly,
    on_codes,
    parameters,
    raise_quantize,
    remember_rounded,
    take_place,
)

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SUMS = (
    *_PRODUCTS,
    *("AveragePool", "GlobalAveragePool", "ReduceMean", "Softmax", "Resize"),
    *("LayerNormalization", "GroupNormalization", "InstanceNormalization"),
)
"""Ops that round once together with a quantizer behind them, which is another number than rounding twice."""
_FREE = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
"""Ops that move nothing in memory."""
_LONGEST_CHAIN = 40
"""Elementwise nodes behind a convolution beyond which it is not cut into parts."""


def raise_quantizers(graph: ir.Graph) -> None:
    """Rewrites ``Q(op(x, ..))`` to ``op(Q(x), ..)`` where quantizers alone read the results of op."""
    before = len(graph)
    for_each(reversed(graph), functools.partial(_raise_above, graph))
    if len(graph) != before:
        graph.sort()  # a quantizer may stand behind a node that now reads its codes


def _raise_above(graph: ir.Graph, node: ir.Node) -> None:
    if node.graph is not graph or not is_op(node, "Concat", *CODE_MOVERS):
        return
    form = NormalForm(graph)
    readers = _readers(form, node)
    if not readers:
        return
    made: Iterable[ir.Node] = ()
    if is_op(node, "Concat"):
        if _pays(form, node, readers):
            made = _raise_above_concat(graph, node, readers)
    elif (
        not _cut_convolution(graph, form, node)
        and _moves(graph, node, readers)
        and _pays(form, node, readers)
    ):
        made = _raise_above_mover(graph, node, readers)
    for quantizer in made:
        at: ir.Node | None = quantizer
        while at is not None and at.graph is graph:
            at = raise_quantize(graph, at)


def _readers(form: NormalForm, node: ir.Node) -> list[Quantization]:
    """The quantizers that alone read the outputs of a node; none if anything else does."""
    found: list[Quantization] = []
    for output in node.outputs:
        if output.is_graph_output():
            return []
        for user in output.consumers():
            codes = user.outputs[0]
            if len(codes.consumers()) == 1 and is_op(codes.consumers()[0], "Clip"):
                codes = codes.consumers()[0].outputs[0]
            read = form.quantization(codes) if is_quantize(user) else None
            if not isinstance(read, Quantization) or read.law is not None or not read.grid.per_tensor:
                return []
            if read.source is not output or (read.codes.is_graph_output() and len(output.uses()) > 1):
                return []
            if len(read.nodes) > 1 and not form.used_once(read.nodes[0].outputs[0]):
                return []
            if any(each.graph is not form.graph or has_to_stay(each) for each in read.nodes):
                return []
            found.append(read)
    return found


def _same(a: Quantization, b: Quantization) -> bool:
    return a.range == b.range and a.grid.equals(b.grid)


def _distinct(readers: list[Quantization]) -> list[Quantization]:
    """One of the quantizers for each grid."""
    found: list[Quantization] = []
    for reader in readers:
        if not any(_same(reader, other) for other in found):
            found.append(reader)
    return found


# What pays ------------------------------------------------------------------------------------------------


def _pays(form: NormalForm, node: ir.Node, readers: list[Quantization]) -> bool:
    """Whether an op on the codes of each grid moves fewer bytes than it and the quantizers do on reals.

    A dim that nobody knows counts as one everywhere.
    """
    operands = [value for value in _operands(node) if constant(value) is None]
    reals = [value for value in operands if not is_dequantize(value.producer())]
    if any(value.shape is None for value in (*operands, *node.outputs)):
        return False
    if is_op(node, "Concat") and not any(map(_comes_of_codes, operands)):
        return False  # real numbers of elsewhere gain little, and more nodes cost something
    grids = _distinct(readers)
    if not reals and len(readers) == 1:
        return False  # codes are joined already
    if len(grids) == 1 and all(form.used_once(value) for value in reals):
        return True  # whatever makes them rounds them
    size = sum(map(_elements, operands))
    whole = sum(map(_elements, node.outputs))
    rounded = sum(_elements(reader.source) for reader in readers)
    touched = min(size, whole) if is_op(node, "Slice", "Split", "Gather") else size
    moved = 0 if is_op(node, *_FREE) else touched + whole
    return (5 * sum(map(_elements, reals)) + moved) * len(grids) < 4 * moved + 5 * rounded


def _operands(node: ir.Node) -> list[ir.Value]:
    given = node.inputs if is_op(node, "Concat") else node.inputs[:1]
    return [value for value in given if value is not None]


def _elements(value: ir.Value) -> int:
    return int(np.prod([dim or 1 for dim in dims_of(value)]))


def _comes_of_codes(value: ir.Value) -> bool:
    """Whether real numbers come from codes, or from a layer of codes and elementwise ops behind it."""
    seen, waiting = {value}, [value]
    while waiting and len(seen) <= _LONGEST_CHAIN:
        node = waiting.pop().producer()
        if is_dequantize(node) or is_op(node, *_PRODUCTS):
            return True
        if node is None or not is_op(node, "Concat", *ELEMENTWISE, *CODE_MOVERS):
            continue
        fresh = [given for given in node.inputs if given is not None and given not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return False


# Raising --------------------------------------------------------------------------------------------------


def _moves(graph: ir.Graph, node: ir.Node, readers: list[Quantization]) -> bool:
    """Whether an op moves real numbers that are no codes yet as it moves their codes."""
    source = node.inputs[0]
    if source is None or constant(source) is not None or is_dequantize(source.producer()):
        return False
    if is_op(node, "Pad", "SpaceToDepth") or rank_of(source) is None:
        return False  # what they gain depends on more; a single reader's quantizer is raised above them
    return all(
        rank_of(reader.source) is not None
        and moves_exactly(node, reader.range.dtype)
        and may_hold(graph, node, reader.range.dtype)
        for reader in readers
    )


def _raise_above_mover(graph: ir.Graph, node: ir.Node, readers: list[Quantization]) -> list[ir.Node]:
    source = node.inputs[0]
    assert source is not None
    made = []
    divides = not NormalForm(graph).used_once(source)
    for grid in _distinct(readers):
        codes, quantizer = _quantized(graph, source, grid, divides)
        made.append(quantizer)
        moved = on_codes(graph, node, [codes, *parameters(node)], grid.range.dtype)
        for output, new in zip(node.outputs, moved.outputs, strict=True):
            named = False
            for reader in [each for each in readers if each.source is output and _same(each, grid)]:
                old = reader.codes
                name, old.name = old.name, f"{old.name}.replaced"
                old.replace_all_uses_with(new, replace_graph_outputs=True)
                if not named:
                    named, new.name = True, name
                    take_place(new, old)
                for each in reversed(reader.nodes):
                    graph.remove(each, safe=True)
    graph.remove(node, safe=True)
    return made


def _raise_above_concat(graph: ir.Graph, node: ir.Node, readers: list[Quantization]) -> list[ir.Node]:
    """A pair around every operand, which the quantizer behind the Concat then leaves as it is."""
    made = []
    for reader in readers:
        operands: list[ir.Value | None] = []
        for value in _operands(node):
            if is_dequantize(value.producer()):
                operands.append(value)
                continue
            codes, quantizer = _quantized(graph, value, reader, divides=True)
            made.append(quantizer)
            output = ir.val(f"{value.name}.rounded", value.dtype, value.shape)
            output.meta["lowbit.made"] = True
            pattern = reader.nodes[0]
            pair = ir.Node(pattern.domain, "DequantizeLinear", [codes, *pattern.inputs[1:]], outputs=[output])
            graph.insert_before(node, pair)
            operands.append(output)
        output = ir.val(f"{node.outputs[0].name}.raised", node.outputs[0].dtype, node.outputs[0].shape)
        output.meta["lowbit.made"] = True
        copy = ir.Node(node.domain, node.op_type, operands, node.attributes, outputs=[output], name=node.name)
        copy.meta.update(node.meta)
        graph.insert_before(node, copy)
        reader.nodes[0].replace_input_with(0, output)
    graph.remove(node, safe=True)
    return made


def _quantized(
    graph: ir.Graph, value: ir.Value, like: Quantization, divides: bool
) -> tuple[ir.Value, ir.Node]:
    """The codes of a value on a quantizer's grid, and the node that rounds: one that is there, or a copy.

    Args:
        graph: the graph.
        value: real numbers.
        like: the quantizer.
        divides: whether it has to round what a sum has been rounded to, see :data:`DIVIDES`.
    """
    form = NormalForm(graph)
    twin = next((read for read in _quantizers(form, value) if _same(read, like)), None)
    if twin is None:
        last: ir.Value = value
        nodes = []
        for pattern in like.nodes:
            output = ir.val(f"{value.name}.{pattern.op_type}", like.range.dtype, value.shape)
            output.meta["lowbit.made"] = True
            inputs = [last, *pattern.inputs[1:]]
            copy = ir.Node(
                pattern.domain,
                pattern.op_type,
                inputs,
                pattern.attributes,
                outputs=[output],
                name=pattern.name,
            )
            copy.meta.update(pattern.meta)
            nodes.append(copy)
            last = output
        remember_rounded(last, value, like)
        producer = value.producer()
        if producer is None or producer.graph is not graph:
            graph.insert_before(graph[0], nodes)
        else:
            graph.insert_after(producer, nodes)
    else:
        nodes, last = list(twin.nodes), twin.codes
    if divides and _is_sum(value):
        nodes[0].meta[DIVIDES] = True
    return last, nodes[0]


def _quantizers(form: NormalForm, value: ir.Value) -> list[Quantization]:
    """The quantizers of a value that others may share."""
    found = []
    for user in value.consumers():
        if not is_quantize(user) or has_to_stay(user):
            continue
        codes = user.outputs[0]
        clips = [reader for reader in codes.consumers() if is_op(reader, "Clip")]
        read = form.quantization(clips[0].outputs[0] if len(clips) == 1 else codes)
        if isinstance(read, Quantization) and (not clips or form.used_once(codes)):
            found.append(read)
    return found


def _is_sum(value: ir.Value) -> bool:
    """Whether a quantizer right behind a value would become one with the sum that makes it."""
    node = value.producer()
    while is_op(node, "Relu", "Clip", *CODE_MOVERS) and not is_op(node, *_SUMS):
        assert node is not None
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return is_op(node, *_SUMS)


# Cutting --------------------------------------------------------------------------------------------------


def _cut_convolution(graph: ir.Graph, form: NormalForm, node: ir.Node) -> bool:
    """Makes the parts of a Split by a convolution each, where they go to different grids.

    The convolution multiplies as often as before, and what it makes is neither written as real numbers nor
    cut. (Parts that go to one grid are cut as codes.)
    """
    source = node.inputs[0]
    if not is_op(node, "Split") or source is None or not form.used_once(source) or has_to_stay(node):
        return False
    sizes = _part_sizes(node)
    chain = _elementwise_behind_conv(form, source)
    if sizes is None or chain is None:
        return False
    grids = [_quantizers(form, part) for part in node.outputs]
    if not any(_differ(grids[0], other) for other in grids[1:]):
        return False
    quantizers = [read.nodes[0] for reads in grids for read in reads]
    if any(DIVIDES in each.meta for each in quantizers):
        for each in quantizers:
            each.meta[DIVIDES] = True
    conv, behind = chain
    parts = _weight_parts(graph, conv, sizes)
    if parts is None:
        return False
    for i, (output, given) in enumerate(zip(node.outputs, parts, strict=True)):
        if not output.uses():
            continue
        copies: dict[ir.Value, ir.Value] = {}
        for each in (conv, *behind):
            inputs = given if each is conv else [copies.get(v, v) if v else None for v in each.inputs]
            copy = ir.Node(each.domain, each.op_type, inputs, each.attributes, name=each.name)
            copy.meta.update(each.meta)
            made, old = copy.outputs[0], each.outputs[0]
            made.name, made.type = f"{old.name}.part{i}", old.type
            made.shape, made.meta["lowbit.made"] = output.shape, True
            copies[old] = made
            graph.insert_before(node, copy)
        part = copies[source]
        output.replace_all_uses_with(part)
        part.name, output.name = output.name, f"{output.name}.cut"
        if "lowbit.made" not in output.meta:
            del part.meta["lowbit.made"]
    for each in (node, *reversed(behind), conv):
        graph.remove(each, safe=True)
    return True


def _differ(some: list[Quantization], others: list[Quantization]) -> bool:
    """Whether one of two lists of quantizers has a grid that the other has not."""
    return any(not any(_same(a, b) for b in y) for x, y in ((some, others), (others, some)) for a in x)


def _part_sizes(node: ir.Node) -> list[int] | None:
    """The channels of every part of a Split of channels; None if it cuts another axis."""
    source = node.inputs[0]
    rank = None if source is None else rank_of(source)
    if rank is None or from_front(get_int(node, "axis", 0), rank) != 1:
        return None
    given = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    sizes: Sequence[int | None] = given or [
        None if part.shape is None else dims_of(part)[1] for part in node.outputs
    ]
    known = [size for size in sizes if size]
    return known if len(known) == len(node.outputs) else None


def _elementwise_behind_conv(form: NormalForm, value: ir.Value) -> tuple[ir.Node, list[ir.Node]] | None:
    """The convolution that a value is an elementwise function of, and the nodes between in order."""
    nodes: set[ir.Node] = set()
    conv: ir.Node | None = None
    waiting = [value]
    while waiting and len(nodes) <= _LONGEST_CHAIN:
        at = waiting.pop()
        node = at.producer()
        if node is None or node.graph is not form.graph or has_to_stay(node) or len(node.outputs) != 1:
            return None
        if is_op(node, "Conv"):
            if conv not in (None, node):
                return None
            conv = node
        elif node not in nodes:
            given = [operand for operand in node.inputs if operand is not None]
            constants = [array for array in map(constant, given) if array is not None]
            if not is_op(node, *ELEMENTWISE) or any(array.size != 1 for array in constants):
                return None
            nodes.add(node)
            waiting.extend(operand for operand in given if constant(operand) is None)
    if conv is None or waiting:
        return None
    inner = [each.outputs[0] for each in (conv, *nodes) if each.outputs[0] is not value]
    if any(out.is_graph_output() or any(user not in nodes for user in out.consumers()) for out in inner):
        return None
    return conv, [node for node in form.graph if node in nodes]


def _weight_parts(graph: ir.Graph, conv: ir.Node, sizes: list[int]) -> list[list[ir.Value | None]] | None:
    """The inputs of convolutions that make some of the channels each; None if these cannot be told apart."""
    x, w, *bias = conv.inputs
    if get_int(conv, "group", 1) != 1 or x is None or not is_dequantize(x.producer()):
        return None
    cut = [_channel_parts(graph, value, sizes) for value in (w, *bias)]
    if any(parts is None for parts in cut):
        return None
    return [[x, *(parts[i] for parts in cut if parts is not None)] for i in range(len(sizes))]


def _channel_parts(graph: ir.Graph, value: ir.Value | None, sizes: list[int]) -> list[ir.Value | None] | None:
    """Pieces of a constant along its first axis, as real numbers or as codes on a grid."""
    if value is None:
        return [None] * len(sizes)
    ends = np.cumsum(sizes)[:-1]
    array = constant(value)
    if array is not None:
        if not array.ndim or array.shape[0] != sum(sizes) or value.dtype != ir.DataType.FLOAT:
            return None
        return [add_initializer(graph, f"{value.name}.part", piece) for piece in np.split(array, ends)]
    node = value.producer()
    if node is None or not is_dequantize(node) or get_int(node, "block_size", 0):
        return None
    codes = node.inputs[0]
    arrays = [given for given in map(constant, node.inputs) if given is not None]
    types = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)
    if codes is None or codes.dtype not in types or len(arrays) != len(node.inputs):
        return None
    whole, *grid = arrays
    if not whole.ndim or whole.shape[0] != sum(sizes):
        return None
    per_tensor = all(array.size == 1 for array in grid)
    if not per_tensor and get_int(node, "axis", 0 if whole.ndim == 1 else 1) not in (0, -whole.ndim):
        return None
    if any(array.shape not in ((), (1,), whole.shape[:1]) for array in grid):
        return None
    cut = [
        np.split(array, ends) if array.shape == whole.shape[:1] else [array] * len(sizes) for array in grid
    ]
    cut.insert(0, np.split(whole, ends))
    parts: list[ir.Value | None] = []
    for i, size in enumerate(sizes):
        inputs = [add_initializer(graph, f"{value.name}.part", pieces[i]) for pieces in cut]
        shape = None if value.shape is None else ir.Shape([size, *list(value.shape)[1:]])
        output = ir.val(f"{value.name}.part{i}", value.dtype, shape)
        output.meta["lowbit.made"] = True
        copy = ir.Node(node.domain, node.op_type, inputs, node.attributes, outputs=[output], name=node.name)
        graph.insert_after(node, copy)
        parts.append(output)
    return parts
