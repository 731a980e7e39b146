"""Models of dialects that ONNX Runtime does not load, written in standard ops that mean the same.

A QONNX network has no other way to run in stock ONNX Runtime than with every Quant written as float
operations; so this is what its users run today, and what :func:`lowbit.verify` and ``lowbit bench`` compare
with. The codes of every quantizer appear as a tensor in it.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from lowbit.frontends import qonnx, qoperator, quark
from lowbit.frontends.load import drop_overridable_initializers, load_model
from lowbit.graph.quantizers import add_definitions


def needs_standard_form(model: onnx.ModelProto) -> bool:
    """Whether a model speaks a dialect that ONNX Runtime does not load."""
    foreign = (*qonnx.DOMAINS, *quark.DOMAINS)
    return qonnx.speaks(model) or any(node.domain in foreign for node in model.graph.node)


def standard_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model as stock ONNX Runtime can run it; the given one where that is so already.

    Raises:
        ModelError: if the model contradicts itself.
    """
    if not needs_standard_form(model):
        return model
    read = load_model(model).model
    if read.functions:
        InlinePass()(read)
    drop_overridable_initializers(read.graph)
    to_standard(read)
    RemoveUnusedNodesPass()(read)
    RemoveUnusedOpsetsPass()(read)
    proto: onnx.ModelProto = ir.to_proto(read)
    return proto


def written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with ONNX Runtime's own operators (QLinearSigmoid ...) as float ones between quantizers.

    Raises:
        ModelError: if the model contradicts itself.
    """
    read = load_model(model).model
    qoperator.normalize(read)
    proto: onnx.ModelProto = ir.to_proto(read)
    return proto


def to_standard(model: ir.Model) -> None:
    """Writes the quantizers of foreign dialects in standard ops, in place."""
    quark.normalize(model)
    qonnx.normalize(model)
    add_definitions(model)
    InlinePass()(model)
