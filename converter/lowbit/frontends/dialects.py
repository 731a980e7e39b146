"""Which dialect of quantized ONNX a part of a model speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from lowbit.frontends import qonnx, quark
from lowbit.ops import DOMAIN

DIALECTS = ("lowbit", "Quark", "QONNX", "QOperator", "QCDQ", "QDQ")
"""The names :func:`dialect_of` gives. Where several fit, the first one says most."""

_OPERATORS = ("QLinear", "ConvInteger", "MatMulInteger", "DynamicQuantize", "QGemm", "QAttention")
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_STANDARD = ("", "ai.onnx", "com.microsoft")

MOVES = (
    "Identity", "Cast", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice",
    "Split", "Gather", "Concat", "Pad", "MaxPool", "Resize", "DepthToSpace", "SpaceToDepth",
)  # fmt: skip
"""Ops that exporters put between a quantizer and the op it is meant for. They hand codes on as they are."""

_MOST_MOVES = 16  # more of them than models have in a row, and an end where a damaged model has none


class Neighbours:
    """Who computes and who reads the values of a graph."""

    def __init__(self, graph: onnx.GraphProto):
        self.makers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            self.makers.update((output, node) for output in node.output if output)
            for value in node.input:
                self.readers.setdefault(value, []).append(node)

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The node that computes a value; moves of data in front of it are skipped."""
        node = self.makers.get(value)
        for _ in range(_MOST_MOVES):
            if node is None or node.op_type not in MOVES or not node.input:
                break
            node = self.makers.get(node.input[0])
        return node


def dialect_of(nodes: Iterable[onnx.NodeProto], graph: Neighbours) -> str | None:
    """The dialect that a region of a model is written in.

    A node that belongs to one dialect alone (QLinearConv, Quant, ..) decides. A region that has none speaks
    through the quantizers at its inputs; one of nothing but QuantizeLinear, DequantizeLinear and moves, as at
    the edges of a QOperator model, through what stands on either side of it. QCDQ is told from QDQ by the
    Clip between a pair.

    Args:
        nodes: the nodes that are computed together; one node, if it stays alone.
        graph: the whole graph.

    Returns:
        One of :data:`DIALECTS`; None for what is not quantized.
    """
    region = list(nodes)
    own = {word for node in region for word in _words(node, graph)}
    if own - {"QDQ", "QCDQ"}:
        return _strongest(own)
    around = {word for node in region for maker in _makers(node, graph) for word in _words(maker, graph)}
    if all(_is_pair(node) or node.op_type in MOVES for node in region):
        readers = (
            reader for node in region for output in node.output for reader in graph.readers.get(output, ())
        )
        around |= {word for reader in readers for word in _words(reader, graph)}
    return _strongest(own | around)


def is_quantized_op(domain: str, op_type: str) -> bool:
    """Whether an operator belongs to a dialect of quantized ONNX, lowbit's own among them."""
    if domain in (DOMAIN, *quark.DOMAINS, *qonnx.DOMAINS):
        return True
    return domain in _STANDARD and (op_type in _PAIR or op_type.startswith(_OPERATORS))


def dialects_of(model: onnx.ModelProto) -> set[str]:
    """The dialects that a model's nodes speak, its functions' nodes included; none: nothing is quantized."""
    graph = Neighbours(model.graph)
    words = {word for node in model.graph.node for word in _words(node, graph)}
    for function in model.functions:
        alone = Neighbours(onnx.GraphProto(node=function.node))
        words |= {word for node in function.node for word in _words(node, alone)}
    return words


def _words(node: onnx.NodeProto, graph: Neighbours) -> Iterator[str]:
    """What one node says about the dialect."""
    maker = graph.maker(node.input[0]) if node.input else None
    if node.domain == DOMAIN:
        yield "lowbit"
    elif node.domain in quark.DOMAINS:
        yield "Quark"
    elif node.domain in qonnx.DOMAINS or qonnx.is_quantizer(node):
        yield "QONNX"
    elif node.domain not in _STANDARD:
        return
    elif _is_pair(node):
        clipped = node.op_type == "DequantizeLinear" and maker is not None and maker.op_type == "Clip"
        yield "QCDQ" if clipped else "QDQ"
    elif node.op_type.startswith(_OPERATORS):
        yield "QOperator"
    elif node.op_type == "Clip" and maker is not None and maker.op_type == "QuantizeLinear":
        yield "QCDQ"


def _is_pair(node: onnx.NodeProto) -> bool:
    return node.op_type in _PAIR and node.domain in _STANDARD


def _makers(node: onnx.NodeProto, graph: Neighbours) -> Iterator[onnx.NodeProto]:
    for value in node.input:
        maker = graph.maker(value)
        if maker is not None:
            yield maker


def _strongest(words: set[str]) -> str | None:
    return next((name for name in DIALECTS if name in words), None)
