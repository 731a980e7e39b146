"""QDQ and QCDQ models: ONNX Runtime, ModelOpt, Brevitas, PyTorch, NNCF, PPQ, tf2onnx.

They all speak the words of the normal form already, with different accents, which go here: Constant nodes,
Identity, weights as float -> Q -> DQ with reshapes between, equal pairs repeated for every reader, casts of
codes, pairs on the other side of an op that moves values.
"""

from __future__ import annotations

import functools

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from lowbit.frontends.expressions import fold_expressions
from lowbit.graph.attributes import get_int
from lowbit.graph.constants import constant
from lowbit.graph.normal_form import NormalForm, Quantization, is_dequantize, is_identity, is_op, is_quantize
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.reasons import for_each, has_to_stay
from lowbit.graph.shapes import infer_shapes
from lowbit.graph.subgraphs import remove_unused_nodes
from lowbit.passes.fold import fold_constants
from lowbit.passes.moves import move_onto_codes
from lowbit.passes.questions import ask_codes
from lowbit.passes.raising import raise_quantizers

_SMALL = 256
"""Elements of the constants that are computed here: shapes and scales. ONNX Runtime folds the others."""


def normalize(model: ir.Model) -> None:
    """Brings a model into normal form, in place. Its meaning and its interface stay."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    infer_shapes(model, anew=True)
    for_each(model.graph, functools.partial(_drop_identity, model.graph))
    fold_constants(model.graph)
    fold_expressions(model.graph, most=_SMALL)
    for_each(model.graph, functools.partial(_drop_code_cast, model.graph))
    _merge_quantizers(model.graph)
    ask_codes(model.graph)
    remove_unused_nodes(model)  # what nobody reads is no reader of anything
    move_onto_codes(model.graph)
    raise_quantizers(model.graph)
    ask_codes(model.graph)  # of what has become codes by moving
    fold_constants(model.graph)
    remove_unused_nodes(model)


def _drop_identity(graph: ir.Graph, node: ir.Node) -> None:
    """Removes an Identity or an idle Dropout of the main graph, or a Cast to the type that its input has.

    Those of subgraphs stay: there one may be how a branch returns a tensor of the graph around it. An output
    of the model takes the place of what it is equal to, unless that has a name which the user knows.
    """
    source, output = (node.inputs[0] if node.inputs else None), node.outputs[0]
    casts = is_op(node, "Cast") and source is not None and source.dtype == get_int(node, "to", 0)
    if not (is_identity(node) or casts) or source is None:
        return
    if output.is_graph_output():
        if source.is_graph_input() or source.is_graph_output() or source.is_initializer():
            return
        name, output.name = output.name, f"{output.name}.dropped"
        source.name, source.doc_string = name, output.doc_string
        source.metadata_props.update(output.metadata_props)
    if source.type is None:
        source.type = output.type
    if source.shape is None:
        source.shape = output.shape
    output.replace_all_uses_with(source, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _drop_code_cast(graph: ir.Graph, node: ir.Node) -> None:
    """Reads codes before a Cast to a wider integer type in front of DequantizeLinear: the same numbers."""
    if not is_op(node, "Cast") or node.inputs[0] is None or node.outputs[0].is_graph_output():
        return
    source, target = node.inputs[0], get_int(node, "to", 0)
    wider = (ir.DataType.INT32, ir.DataType.INT8, ir.DataType.UINT8)
    widens = target in wider and _contains(ir.DataType(target), source)
    readers = node.outputs[0].consumers()
    if widens and readers and all(_reads_as_codes(reader) for reader in readers):
        for reader in readers:
            if len(reader.inputs) > 2:
                reader.replace_input_with(2, None)  # a zero of the wider type
        node.outputs[0].replace_all_uses_with(source)
        graph.remove(node, safe=True)


def _contains(target: ir.DataType, source: ir.Value) -> bool:
    code_range = NormalForm(source.graph).code_range(source) if source.graph is not None else None
    if code_range is None:
        return False
    low, high = CODE_TYPES.get(target, (-(2**31), 2**31 - 1))
    return low <= code_range.low and code_range.high <= high


def _reads_as_codes(node: ir.Node) -> bool:
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    array = constant(zero_point)
    return is_dequantize(node) and (zero_point is None or (array is not None and not array.any()))


def _merge_quantizers(graph: ir.Graph) -> None:
    """Lets all readers of one tensor on one grid share one QuantizeLinear."""
    form = NormalForm(graph)
    kept: dict[ir.Value, list[Quantization]] = {}
    for node in list(graph):
        wanted = is_quantize(node) and not has_to_stay(node)
        quantization = form.quantization(node.outputs[0]) if wanted else None
        if not isinstance(quantization, Quantization):
            continue
        others = kept.setdefault(quantization.source, [])
        twin = next(
            (q for q in others if q.grid.equals(quantization.grid) and q.range == quantization.range), None
        )
        if twin is None or quantization.codes.is_graph_output():
            others.append(quantization)
        else:
            quantization.codes.replace_all_uses_with(twin.codes)
            graph.remove(node, safe=True)
