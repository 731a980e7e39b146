"""Nodes that ONNX Runtime runs on codes although they are float operators in the file.

It fuses ``DequantizeLinear -> op -> QuantizeLinear`` into one integer operator (QLinearConv), or drops the
pairs around an op that moves values. It looks for nodes of ONNX's own; a lowbit node in the place of one of
them would leave the operator in float. So the quantizers next to such a unit stay as the model has them.

Activations with one scale per channel are fused too, by mistake: no kernel takes them. There a lowbit node in
the place of a quantizer is what lets the operator run.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from lowbit.graph.constants import constant, is_known
from lowbit.graph.normal_form import is_dequantize, is_op, is_quantize

_OPERANDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Add", "Concat", "Conv", "Gemm", "MatMul", "Mul"), None),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax"), (0,)),
    **dict.fromkeys(("ArgMax", "MaxPool", "ReduceMax", "ReduceMin", "Resize"), (0,)),
    **dict.fromkeys(("Expand", "Flatten", "Gather", "GatherElements", "Reshape", "Slice", "Split"), (0,)),
    **dict.fromkeys(("Squeeze", "Tile", "Transpose", "Unsqueeze"), (0,)),
    "Where": (1, 2),
}
"""The ops that ONNX Runtime's CPU provider fuses, and which of their inputs are dequantized; None: all."""

_FLOAT_OUTPUT = ("ArgMax", "Gemm", "MatMul")
"""Those that it fuses without a QuantizeLinear behind them, too."""


def find_units(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Those nodes, of some that stay, that ONNX Runtime fuses with the quantizers around them, and runs so.

    A Relu or Clip in front of a QuantizeLinear belongs to the unit: it is dropped where the codes clip, too.
    """
    units: set[ir.Node] = set()
    for node in nodes:
        if is_op(node, *_OPERANDS) and _reads_codes(node):
            behind = _behind(node)
            if behind is not None:
                units.update((node, *behind))
    return units


def _reads_codes(node: ir.Node) -> bool:
    operands = _OPERANDS[node.op_type]
    chosen = node.inputs if operands is None else [node.inputs[i] for i in operands if i < len(node.inputs)]
    given = [value.producer() for value in chosen if value is not None]
    return bool(given) and all(
        maker is not None and is_dequantize(maker) and (is_known(maker.inputs[0]) or _has_one_scale(maker))
        for maker in given
    )


def _has_one_scale(quantizer: ir.Node) -> bool:
    scale = constant(quantizer.inputs[1])
    return scale is None or scale.size == 1


def _behind(node: ir.Node) -> list[ir.Node] | None:
    """What stands between a node and the quantizers that read it; None if ONNX Runtime does not fuse it."""
    ends = _clips(node)
    outputs = ends[-1].outputs if ends else node.outputs
    readers = [user for output in outputs for user in output.consumers() if is_quantize(user)]
    if not all(_has_one_scale(reader) for reader in readers):
        return None
    fused = is_op(node, *_FLOAT_OUTPUT) or all(_only_quantized(output) for output in outputs)
    return ends if fused else None


def _clips(node: ir.Node) -> list[ir.Node]:
    users = node.outputs[0].consumers()
    alone = len(users) == 1 and not node.outputs[0].is_graph_output()
    return [users[0]] if alone and is_op(users[0], "Relu", "Clip") else []


def _only_quantized(value: ir.Value) -> bool:
    users = value.consumers()
    return bool(users) and not value.is_graph_output() and all(is_quantize(user) for user in users)
