"""Chains: what stands between a matrix product and the end of its region.

A chain is read backwards from its sink, through nodes that an epilogue can express, to the convolution or
matrix product. Every value on the way is read by the next node alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.attributes import get_int
from lowbit.graph.normal_form import NormalForm, Quantization, clip_bounds, is_op
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.operands import is_constant


@dataclass(frozen=True)
class Link:
    """One node of a chain.

    Attributes:
        node: the node.
        path: index of the input that continues the chain towards its core.
    """

    node: ir.Node
    path: int

    @property
    def other(self) -> ir.Value | None:
        """The second operand of a binary node."""
        return self.node.inputs[1 - self.path]


@dataclass(frozen=True)
class Chain:
    """A core, the links behind it in the order of the graph, and the quantizer at the end.

    Attributes:
        core: the convolution or matrix product.
        links: the nodes between.
        quantization: the quantizer at the end; None where the result is float.
    """

    core: ir.Node
    links: tuple[Link, ...]
    quantization: Quantization | None

    @property
    def nodes(self) -> list[ir.Node]:
        """All nodes, the core first."""
        quantizer = self.quantization.nodes if self.quantization else ()
        return [self.core, *(link.node for link in self.links), *quantizer]

    @property
    def result(self) -> ir.Value:
        """What the chain computes: codes, or real numbers where it has no quantizer."""
        return self.quantization.codes if self.quantization else self.nodes[-1].outputs[0]


def quantization_at(form: NormalForm, sink: ir.Node) -> Quantization | Refusal | None:
    """The quantizer that ends in a node: a QuantizeLinear, or the Clip on its codes.

    A QuantizeLinear whose codes only a Clip reads is no end.
    """
    quantization = form.quantization(sink.outputs[0])
    if not isinstance(quantization, Quantization):
        return quantization
    if len(quantization.nodes) == 2 and not form.used_once(quantization.nodes[0].outputs[0]):
        return Refusal("its codes are used with and without a Clip")
    return quantization


def chain_at(form: NormalForm, sink: ir.Node, cores: Sequence[str]) -> Chain | None:
    """The chain that ends in a node, if it starts at a core.

    Args:
        form: the graph.
        sink: a quantizer, a core, or a node that a chain may contain.
        cores: op types of cores.
    """
    quantization = quantization_at(form, sink)
    if isinstance(quantization, Refusal):
        return None
    if quantization is not None:
        if not form.used_once(quantization.source):
            return None
        found = _walk(form, quantization.source, cores)
    else:
        found = _walk(form, sink.outputs[0], cores)
    if found is None:
        return None
    core, links = found
    return Chain(core, tuple(links), quantization)


def _walk(form: NormalForm, value: ir.Value, cores: Sequence[str]) -> tuple[ir.Node, list[Link]] | None:
    node = value.producer()
    if node is None or node.graph is not form.graph:
        return None
    if is_op(node, *cores):
        return node, []
    for path in _paths(node):
        source = node.inputs[path]
        if source is None or not form.used_once(source):
            continue
        found = _walk(form, source, cores)
        if found is not None:
            return found[0], [*found[1], Link(node, path)]
    return None


def _paths(node: ir.Node) -> list[int]:
    """The inputs through which a chain may continue; empty if an epilogue cannot express the node."""
    if is_op(node, "Relu", "Clip"):
        return [0] if clip_bounds(node) is not None else []
    if is_op(node, "BatchNormalization"):
        return [0] if get_int(node, "training_mode", 0) == 0 and len(node.outputs) == 1 else []
    if is_op(node, "Add"):
        return [i for i in (0, 1) if not is_constant(node.inputs[i])]
    if is_op(node, "Sub"):
        return [0] if is_constant(node.inputs[1]) else []
    if is_op(node, "Mul"):
        return [i for i in (0, 1) if is_constant(node.inputs[1 - i])]
    return []
