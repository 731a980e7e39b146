"""Chains: what stands between a matrix product and the end of its region.

A chain is read backwards from its sink, through nodes that an epilogue can express, to the convolution or
matrix product. Every value on the way is read by the next node alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int
from lowbit.graph.normal_form import NormalForm, Quantization, clip_bounds, is_op
from lowbit.graph.quantizers import is_law
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.operands import is_constant

LONGEST_CHAIN = 40
"""Links beyond which a chain is not followed: a row of n nodes must not take n^2 steps to read."""


@dataclass(frozen=True)
class Link:
    """One node of a chain.

    Attributes:
        node: the node.
        path: index of the input that continues the chain towards its core.
        gate: the function of that input which a Mul of both reads (:func:`gated`); None for other nodes.
    """

    node: ir.Node
    path: int
    gate: ir.Node | None = None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All of it, in the order of the graph."""
        return (self.node,) if self.gate is None else (self.gate, self.node)

    @property
    def other(self) -> ir.Value | None:
        """The second operand of a binary node; None for a node of one operand."""
        return self.node.inputs[1 - self.path] if len(self.node.inputs) > 1 else None


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
        return [self.core, *(node for link in self.links for node in link.nodes), *quantizer]

    @property
    def result(self) -> ir.Value:
        """What the chain computes: codes, or real numbers where it has no quantizer."""
        return self.quantization.codes if self.quantization else self.nodes[-1].outputs[0]


def quantization_at(
    form: NormalForm, sink: ir.Node, *, laws: bool = False, half: bool = False
) -> Quantization | Refusal | None:
    """The quantizer that ends in a node: a QuantizeLinear, or the Clip on its codes.

    A QuantizeLinear whose codes only a Clip reads is no end.

    Args:
        form: the graph.
        sink: the node.
        laws: whether the caller can follow any law of a quantizer, not only that of QuantizeLinear.
        half: whether it can read one of float16.
    """
    quantization = form.quantization(sink.outputs[0], half=half)
    if not isinstance(quantization, Quantization):
        return quantization
    if not (laws or quantization.linear):
        return None
    if len(quantization.nodes) == 2 and not form.used_once(quantization.nodes[0].outputs[0]):
        return Refusal("its codes are used with and without a Clip")
    return quantization


def chain_at(
    form: NormalForm, sink: ir.Node, cores: Sequence[str], *, laws: bool = False, bare: bool = True
) -> Chain | None:
    """The chain that ends in a node, if it starts at a core.

    Args:
        form: the graph.
        sink: a quantizer, a core, or a node that a chain may contain.
        cores: op types of cores.
        laws: whether the caller can follow any law of a quantizer, and any monotone operation before it.
        bare: whether the caller takes links without a quantizer behind them; else such a chain is not read.
    """
    quantization = quantization_at(form, sink, laws=laws)
    if isinstance(quantization, Refusal):
        return None
    if quantization is not None:
        if not form.used_once(quantization.source):
            return None
        found = _walk(form, quantization.source, cores, laws)
    elif is_law(sink) or not (bare or is_op(sink, *cores)):
        return None
    else:
        found = _walk(form, sink.outputs[0], cores, False)
    if found is None:
        return None
    core, links = found
    return Chain(core, tuple(links), quantization)


def _walk(
    form: NormalForm, value: ir.Value, cores: Sequence[str], wide: bool
) -> tuple[ir.Node, list[Link]] | None:
    waiting: list[tuple[ir.Value, _Behind | None]] = [(value, None)]
    while waiting:
        value, behind = waiting.pop()
        node = value.producer()
        if node is None or node.graph is not form.graph:
            continue
        if is_op(node, *cores):
            return node, [] if behind is None else behind.links()
        length = 0 if behind is None else behind.length
        if length == LONGEST_CHAIN:
            continue
        both = gated(form, node)
        if both is not None:
            path, gate = both
            source = node.inputs[path]
            assert source is not None
            waiting.append((source, _Behind(Link(node, path, gate), behind, length + 1)))
            continue
        for path in reversed(chain_paths(node, wide=wide)):
            source = node.inputs[path]
            if source is not None and form.used_once(source):
                waiting.append((source, _Behind(Link(node, path), behind, length + 1)))
    return None


class _Behind(NamedTuple):
    """The links behind a value, the nearest first."""

    link: Link
    rest: _Behind | None
    length: int

    def links(self) -> list[Link]:
        """In the order of the graph."""
        found, at = [self.link], self.rest
        while at is not None:
            found.append(at.link)
            at = at.rest
        return found


def gated(form: NormalForm, node: ir.Node) -> tuple[int, ir.Node] | None:
    """Of ``x * Sigmoid(x)`` or HardSwish written so: where the Mul reads x, and the node of the gate.

    Nothing else reads x or the gate.
    """
    if not is_op(node, "Mul"):
        return None
    for path in (0, 1):
        x, other = node.inputs[path], node.inputs[1 - path]
        gate = None if other is None else other.producer()
        if (
            x is not None
            and other is not None
            and gate is not None
            and _is_gate(gate)
            and gate.inputs[0] is x
            and form.used_once(other)
            and set(x.consumers()) == {node, gate}
            and not x.is_graph_output()
        ):
            return path, gate
    return None


def _is_gate(node: ir.Node) -> bool:
    alpha, beta = np.float32(get_float(node, "alpha", 0.2)), get_float(node, "beta", 0.5)
    hard = is_op(node, "HardSigmoid") and alpha == np.float32(1 / 6) and beta == 0.5
    return hard or is_op(node, "Sigmoid")


def chain_paths(node: ir.Node, *, wide: bool) -> list[int]:
    """The inputs through which a chain may continue; empty if an epilogue cannot express the node.

    Args:
        node: the node.
        wide: count the operations that thresholds can swallow but no other epilogue.
    """
    if is_op(node, "Relu", "Clip"):
        return [0] if clip_bounds(node) is not None else []
    if is_op(node, "HardSwish", "HardSigmoid"):
        return [0]
    if is_op(node, "BatchNormalization"):
        return [0] if get_int(node, "training_mode", 0) == 0 and len(node.outputs) == 1 else []
    if is_op(node, "Add"):
        return [i for i in (0, 1) if not is_constant(node.inputs[i])]
    if is_op(node, "Sub") and is_constant(node.inputs[1]):
        return [0]
    if is_op(node, "Mul"):
        return [i for i in (0, 1) if is_constant(node.inputs[1 - i])]
    if wide and is_op(node, "Sub", "Min", "Max"):
        return [i for i in (0, 1) if len(node.inputs) == 2 and is_constant(node.inputs[1 - i])]
    if wide and is_op(node, "Div", "PRelu"):
        return [0] if is_constant(node.inputs[1]) else []
    if wide and is_op(node, "LeakyRelu", "Neg", "Round", "Floor", "Ceil"):
        return [0]
    if wide and is_op(node, "Cast"):
        source = node.inputs[0]  # a chain is float32 all along
        return [0] if source is not None and source.dtype == ir.DataType.FLOAT else []
    return []
