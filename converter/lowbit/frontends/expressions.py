"""Expressions of constants: scales and shapes that an exporter left as nodes instead of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from lowbit.graph.attributes import get_flag, get_int
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.evaluate import constants_of, run_unoptimized
from lowbit.graph.normal_form import ELEMENTWISE
from lowbit.graph.reasons import Refusal, has_to_stay
from lowbit.graph.shapes import Dim, dims_told, may_cut

_FOLDED = ELEMENTWISE | {
    "Cast", "Concat", "Flatten", "Gather", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Reshape",
    "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where", "Equal", "Greater", "Less",
}  # fmt: skip
"""Ops whose output is not much larger than their inputs together, broadcasting aside."""

_MAX_ELEMENTS = 1 << 24


def fold_expressions(graph: ir.Graph, *, most: int = _MAX_ELEMENTS) -> None:
    """Replaces nodes on constants by what ONNX Runtime computes from them. Graph outputs are left alone.

    The shape of a tensor counts as a constant where it is static; a Reshape whose new shape repeats dims of
    its input and is constant besides gets a constant shape too.

    Args:
        graph: the graph; its shapes have been inferred.
        most: elements up to which constants are folded.
    """
    _fold_shapes(graph)
    folded: dict[ir.Value, None] = {}
    nodes: list[ir.Node] = []
    for node in graph:
        if _foldable(node, folded, most):
            nodes.append(node)
            folded.update(dict.fromkeys(node.outputs))
    inside = set(nodes)
    wanted = [v for v in folded if any(user not in inside for user in v.consumers())]
    arrays = _evaluate(graph, nodes, wanted)
    for value, array in zip(wanted, arrays, strict=False):
        value.replace_all_uses_with(add_initializer(graph, f"{value.name}.folded", array))
    for node in reversed(nodes):
        if not any(output.uses() for output in node.outputs):
            graph.remove(node, safe=True)
    _copy_dims(graph)


def _fold_shapes(graph: ir.Graph) -> None:
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Shape" and node.domain == "" and node.inputs else None
        if source is None or source.shape is None or node.outputs[0].is_graph_output():
            continue
        rank = len(source.shape)
        dims = list(source.shape)[slice(get_int(node, "start", 0), get_int(node, "end", rank))]
        if all(isinstance(dim, int) for dim in dims):
            value = add_initializer(graph, f"{node.outputs[0].name}.folded", np.array(dims, np.int64))
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)


def _foldable(node: ir.Node, folded: dict[ir.Value, None], most: int) -> bool:
    if has_to_stay(node) or node.domain != "" or node.op_type not in _FOLDED or not node.inputs:
        return False
    if any(output.is_graph_output() for output in node.outputs):
        return False
    given = [value for value in node.inputs if value is not None]
    if any(value not in folded and constant(value) is None for value in given):
        return False
    sizes = [value.shape.numpy() for value in given if value.shape is not None and value.shape.is_static()]
    try:
        size = int(np.prod(np.broadcast_shapes(*sizes), dtype=np.float64))
    except ValueError:  # no broadcasting op, or one that ONNX Runtime will refuse
        size = int(sum(np.prod(shape, dtype=np.float64) for shape in sizes))
    return size <= most


def _evaluate(graph: ir.Graph, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> Sequence[Array]:
    """Values of nodes that read nothing but constants; none if ONNX Runtime does not run them."""
    if not wanted:
        return []
    outputs = [onnx.ValueInfoProto(name=str(value.name)) for value in wanted]
    body = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes], "expressions", [], outputs, constants_of(nodes)
    )
    opset = onnx.helper.make_opsetid("", graph.opset_imports.get("", 13))
    results = run_unoptimized(onnx.helper.make_model(body, opset_imports=[opset], ir_version=10), {})
    return [] if isinstance(results, Refusal) else results


def _copy_dims(graph: ir.Graph) -> None:
    """Writes ``x.reshape(x.shape[0], -1)`` with a 0, ONNX's word for "as in the input", for the first dim."""
    for node in graph:
        if node.op_type != "Reshape" or node.domain != "" or len(node.inputs) < 2 or has_to_stay(node):
            continue
        source, shape = node.inputs
        if get_flag(node, "allowzero", default=False) or constant(shape) is not None:
            continue
        if shape is None or source is None:
            continue
        told = dims_told(shape)
        dims = [] if told is None else [_as_in(source, dim, place) for place, dim in enumerate(told)]
        # A 0 tells ONNX Runtime the dim's name; a Slice of it would then have the name, but not the size.
        if (
            dims
            and None not in dims
            and not any(dim == 0 and may_cut(graph, place) for place, dim in enumerate(dims))
        ):
            node.replace_input_with(
                1, add_initializer(graph, f"{shape.name}.folded", np.array(dims, np.int64))
            )


def _as_in(source: ir.Value, dim: int | Dim, place: int) -> int | None:
    """What says a dim of a new shape: its number, or 0 where it is the source's own dim at that place."""
    if isinstance(dim, int):
        return dim
    return 0 if dim.axis == place and _same_dim(dim.tensor, source, place) else None


def _same_dim(a: ir.Value | None, b: ir.Value, index: int) -> bool:
    if a is b:
        return True
    if a is None or a.shape is None or b.shape is None or index >= min(len(a.shape), len(b.shape)):
        return False
    first, second = a.shape[index], b.shape[index]
    named = isinstance(first, int) or first.value is not None
    return named and first == second
