"""Questions about the shape of real numbers, answered from codes.

A model that was exported with dynamic sizes asks for the shape of a tensor (``x.view(x.size(0), -1)``, a
shuffle of channels, a Resize to the size of another tensor). Where the tensor lies between two quantizers,
nothing else needs its real numbers, and the question alone would keep alive all that computes them. Codes of
the same shape know the answer as well.
"""

from __future__ import annotations

import functools

import onnx_ir as ir

from lowbit.graph.constants import constant
from lowbit.graph.normal_form import (
    ELEMENTWISE,
    NormalForm,
    dims_of,
    is_dequantize,
    is_op,
    is_quantizer,
    rank_of,
)
from lowbit.graph.reasons import for_each, has_to_stay

QUESTIONS = ("Shape", "Size")
"""The ops that ask about a tensor's shape alone."""

_NORMALIZING = frozenset({
    "BatchNormalization", "Cast", "Clip", "Dropout", "GroupNormalization", "Identity",
    "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "LRN",
    "MeanVarianceNormalization", "PRelu", "RMSNormalization", "Softmax", "Swish",
})  # fmt: skip
"""Ops whose first output has the shape of their first input, whatever their other inputs are."""


def ask_codes(graph: ir.Graph) -> None:
    """Lets every Shape and Size of real numbers read codes of the same shape, where there are any.

    Codes may be computed behind the node that asks, which goes behind them then.
    """
    form = NormalForm(graph)
    asking = [node for node in graph.all_nodes() if is_op(node, *QUESTIONS)]
    before = [node.inputs[0] for node in asking]
    for_each(asking, functools.partial(_ask_codes, form))
    if any(node.inputs[0] is not value for node, value in zip(asking, before, strict=True)):
        graph.sort()


def is_question(node: ir.Node | None) -> bool:
    """Whether a node asks about the shape of its input alone."""
    return is_op(node, *QUESTIONS)


def _ask_codes(form: NormalForm, question: ir.Node) -> None:
    value = question.inputs[0]
    if value is None or value.dtype not in (None, ir.DataType.FLOAT) or value.graph is not form.graph:
        return
    if value.is_graph_input() or value.is_initializer():
        return
    path = [value]  # from the value up, all of one shape
    while (node := path[-1].producer()) is not None and node.outputs[0] is path[-1]:
        above = node.inputs[0] if is_dequantize(node) else _same_shape(node)
        if above is None:
            break
        path.append(above)
    codes = next((found for at in path if (found := _if_codes(form, at)) is not None), None)
    for at in path if codes is None else ():
        codes = codes or _codes_behind(form, at)
    if codes is not None:
        question.replace_input_with(0, codes)


def _codes_behind(form: NormalForm, value: ir.Value) -> ir.Value | None:
    """Codes of the same shape that are computed from a value alone, so that no answer waits for itself."""
    waiting = [value]
    while waiting:
        at = waiting.pop(0)
        for user in at.consumers():
            if user.graph is not form.graph or has_to_stay(user) or user.inputs[0] is not at:
                continue
            if is_quantizer(user):
                codes = user.outputs[0]
                readers = codes.consumers()
                if len(readers) == 1 and is_op(readers[0], "Clip") and not codes.is_graph_output():
                    codes = readers[0].outputs[0]
                found = _if_codes(form, codes)
                if found is not None:
                    return found
            elif _same_shape(user) is at:
                waiting.append(user.outputs[0])
    return None


def _if_codes(form: NormalForm, value: ir.Value | None) -> ir.Value | None:
    """A value if it is a tensor of codes of a known rank, as wide as ONNX Runtime has a Shape for."""
    if value is None or constant(value) is not None or rank_of(value) is None:
        return None
    code_range = form.code_range(value)
    return value if code_range is not None and code_range.dtype.bitwidth == 8 else None


def _same_shape(node: ir.Node) -> ir.Value | None:
    """The input of a node that has the shape of its first output, whatever the other inputs are."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if is_op(node, *_NORMALIZING):
        return source
    if not is_op(node, *ELEMENTWISE) or len(node.outputs) != 1:
        return None
    varying = [value for value in node.inputs if value is not None and constant(value) is None]
    if len(varying) != 1:
        return None
    others = (value for value in node.inputs if value is not None and value is not varying[0])
    return varying[0] if all(_fits_into(value, varying[0]) for value in others) else None


def _fits_into(operand: ir.Value, value: ir.Value) -> bool:
    """Whether a constant operand broadcasts to a tensor without widening it."""
    array, rank = constant(operand), rank_of(value)
    if array is None or (rank is None and array.ndim):
        return False
    if rank is None or not array.ndim:
        return True
    dims = dims_of(value)[max(0, rank - array.ndim) :]
    return array.ndim <= rank and all(size in (1, dim) for size, dim in zip(array.shape, dims, strict=True))
