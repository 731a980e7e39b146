"""Conversion of one small graph, and the questions a rule's test asks about the result."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lowbit
import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.dialects import oracle
from tests.dialects.graphs.builder import Built, Graph, Quant
from tests.support import lowbit_session

SEEDS = (0, 1, 2)
"""The three flavours of scales: exact ties, ordinary ones, near ties."""

_EDGES = ("LowBitQuantize", "LowBitDequantize")


@dataclass(frozen=True)
class Converted:
    """A graph, its conversion, and what stands in it."""

    built: Built
    result: Any

    @property
    def ops(self) -> Counter[str]:
        """How often each op occurs in the converted graph, lowbit's without their domain."""
        return Counter(node.op_type for node in self.result.model.graph.node)

    def node(self, op_type: str) -> onnx.NodeProto:
        """The only node of a type."""
        (found,) = (node for node in self.result.model.graph.node if node.op_type == op_type)
        return found

    def attributes(self, op_type: str) -> dict[str, Any]:
        """The attributes of the only node of a type; text as str."""
        given = {a.name: helper.get_attribute_value(a) for a in self.node(op_type).attribute}
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()}

    def constant(self, op_type: str, index: int) -> np.ndarray:
        """A constant input of the only node of a type."""
        name = self.node(op_type).input[index]
        (tensor,) = (t for t in self.result.model.graph.initializer if t.name == name)
        return numpy_helper.to_array(tensor)

    def reason(self, op_type: str) -> str:
        """Why the node of a type was kept."""
        (entry,) = (n for n in self.result.report.kept if n.op_type == op_type)
        assert entry.reason is not None
        return entry.reason

    def assert_equal(self) -> None:
        """ONNX Runtime with lowbit gives what the graph means, in every element, at every size."""
        session = lowbit_session(self.result.model)
        for seed, sizes in enumerate(self.built.sizes):
            feeds = self.built.feed(seed, **sizes)
            for ours, meant in zip(
                session.run(None, feeds), oracle.run(self.built.model, feeds), strict=True
            ):
                assert ours.dtype == meant.dtype
                assert ours.shape == meant.shape
                assert not np.count_nonzero(ours != meant), f"{np.count_nonzero(ours != meant)} differ"


def converted(build: Callable[[Graph], None], seed: int = 1, **options: Any) -> Converted:
    """Builds a graph and converts it."""
    g = Graph(build.__name__, seed)
    build(g)
    built = Built(g.proto(), g.feeds, seed)
    return Converted(built, lowbit.convert(built.model, **options))


def converts(build: Callable[[Graph], None], *ops: str, seeds: Sequence[int] = SEEDS) -> Converted:
    """Asserts that a graph becomes exactly these ops, edges aside, and stays equal; returns the last one."""
    for seed in seeds:
        result = converted(build, seed)
        inner = Counter({op: n for op, n in result.ops.items() if op not in _EDGES})
        assert inner == Counter(ops), (inner, result.result.report.kept)
        result.assert_equal()
    return result


def refuses(build: Callable[[Graph], None], op_type: str, pattern: str) -> Converted:
    """Asserts that a node stays, says why, and that the result is a valid model nevertheless."""
    result = converted(build)
    assert op_type in result.ops
    assert re.search(pattern, result.reason(op_type)), result.reason(op_type)
    return result


def image(g: Graph, channels: int = 4, size: int = 6, kind: str = "u8", **options: Any) -> tuple[str, Quant]:
    """A quantized image [2, channels, size, size]."""
    quant = g.act(0.03, kind, **options)
    return g.qdq(g.input((2, channels, size, size), step=float(quant.scale)), quant), quant


def conv(
    g: Graph,
    x: str,
    xq: Quant,
    out: int = 5,
    channels: int = 4,
    kernel: int = 3,
    *,
    bias: bool = True,
    **options: Any,
) -> tuple[str, Quant]:
    """A convolution of codes; returns its float output and a quantizer that fits it."""
    group = options.get("group", 1)
    wq = g.weight_quant(out)
    weight = g.weight(g.codes((out, channels // group, kernel, kernel), low=-127), wq)
    inputs = [x, weight, *([g.bias(out, xq, wq)] if bias else [])]
    return g.node("Conv", inputs, **options), g.after(xq, wq, kernel * kernel * channels // group)


def output(g: Graph, value: str, *shape: int | str) -> None:
    """Makes a float value the graph's output."""
    g.output(value, shape)
