"""QDQ and QCDQ models: ONNX Runtime, ModelOpt, Brevitas, PyTorch, NNCF, PPQ, tf2onnx.

They all speak the words of the normal form already, with different accents, which go here: Constant nodes,
Identity, weights as float -> Q -> DQ with reshapes between, equal pairs repeated for every reader, casts of
codes, pairs on the other side of an op that moves values.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
)

from lowbit.graph.attributes import get_int
from lowbit.graph.constants import constant
from lowbit.graph.fold import fold_constants
from lowbit.graph.moves import move_onto_codes
from lowbit.graph.normal_form import NormalForm, Quantization, is_dequantize, is_op, is_quantize
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.shapes import infer_shapes


def normalize(model: ir.Model) -> None:
    """Brings a model into normal form, in place. Its meaning and its interface stay."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    infer_shapes(model)
    IdentityEliminationPass()(model)
    fold_constants(model.graph)
    _drop_code_casts(model.graph)
    _merge_quantizers(model.graph)
    move_onto_codes(model.graph)
    fold_constants(model.graph)


def _drop_code_casts(graph: ir.Graph) -> None:
    """Reads codes before a Cast to a wider integer type in front of DequantizeLinear: the same numbers."""
    for node in list(graph):
        if not is_op(node, "Cast") or node.inputs[0] is None or node.outputs[0].is_graph_output():
            continue
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
        quantization = form.quantization(node.outputs[0]) if is_quantize(node) else None
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
