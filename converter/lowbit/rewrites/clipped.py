"""Ops between quantized tensors: one core, bounds from Relu and Clip, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.lowering import CodesOutput, Lowering, Order, StoredReal
from lowbit.graph.normal_form import NormalForm, Quantization, clip_bounds
from lowbit.rewrites.chain import chain_at
from lowbit.rewrites.epilogue import Bounds


@dataclass(frozen=True)
class Clipped:
    """A core node whose only followers are Relu, Clip and a quantizer, or nothing.

    Attributes:
        core: the node.
        nodes: all nodes, the core first.
        bounds: what Relu and Clip did.
        quantization: the quantizer; None for a float result, which has no bounds either.
        result: the output of the last node.
    """

    core: ir.Node
    nodes: Sequence[ir.Node]
    bounds: Bounds
    quantization: Quantization | None
    result: ir.Value

    def output(self, lowering: Lowering) -> tuple[CodesOutput | None, dict[str, object]]:
        """The storage of the output (None for float32) and the attributes that bound it."""
        if self.quantization is None:
            return None, {}
        return lowering.quantized_output(self.quantization, *self.bounds.codes(self.quantization))

    def define(self, lowering: Lowering, value: ir.Value, output: CodesOutput | None, order: Order) -> None:
        """Says how the result is stored."""
        if output is None:
            lowering.define_real(self.result, StoredReal(value, order))
        else:
            lowering.define_codes(self.result, output.stored(value, order))


def clipped_at(form: NormalForm, sink: ir.Node, cores: Sequence[str]) -> Clipped | None:
    """The core that ends in a node.

    Args:
        form: the graph.
        sink: a quantizer, or the core itself where its result stays float.
        cores: op types.
    """
    chain = chain_at(form, sink, cores)
    if chain is None or (chain.quantization is None and chain.links):
        return None
    bounds = Bounds()
    for link in chain.links:
        clip = clip_bounds(link.node) if link.node.op_type in ("Relu", "Clip") else None
        if clip is None:
            return None
        bounds = bounds.then(*clip)
    return Clipped(chain.core, chain.nodes, bounds, chain.quantization, chain.result)
