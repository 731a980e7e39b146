"""QCDQ at every pair of widths, and what scales per channel become."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.conftest import FULL
from tests.dialects import oracle
from tests.dialects.graphs import CASES
from tests.dialects.graphs.brevitas import qcdq, weight
from tests.dialects.graphs.builder import Built, Graph, Quant
from tests.support import FLOAT_MATMULS, lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")

_ALL = list(itertools.product(range(1, 9), repeat=2))
_WIDTHS = _ALL if FULL else [(w, a) for w, a in _ALL if w == a or (w, a) in ((1, 8), (8, 1), (2, 4), (3, 7))]


def _network(w_bits: int, a_bits: int, seed: int, *, signed: bool, narrow: bool) -> Built:
    """Two convolutions and a classifier at one pair of widths."""
    g = Graph(f"qcdq_w{w_bits}a{a_bits}", seed)
    kind = "s8" if signed else "u8"
    xq = Quant(g.scale(8.0 * 2.0**-a_bits), np.asarray(0), kind)
    x = qcdq(g, g.input((2, 4, 7, 7), step=float(xq.scale), about=0.05), xq, a_bits)
    for shape in ((8, 4, 3, 3), (6, 8, 3, 3)):
        w, wq = weight(g, shape, w_bits, narrow=narrow and w_bits > 1)
        x = g.node("Conv", [x, w])
        terms = int(np.prod(shape[1:]))
        spread = np.sqrt(terms) * 2**a_bits * 2**w_bits / 12 * float(xq.scale) * float(np.mean(wq.scale))
        xq = Quant(g.scale(float(spread) * 4 * 2.0**-a_bits), np.asarray(0), kind)
        x = qcdq(g, x if signed else g.node("Relu", [x]), xq, a_bits)
    w, _ = weight(g, (10, 6 * 3 * 3), w_bits)
    g.output(g.node("Gemm", [g.node("Flatten", [x]), w], transB=1), (2, 10))
    return Built(g.proto(), g.feeds, seed)


@pytest.mark.parametrize(("w_bits", "a_bits"), _WIDTHS)
def test_every_width_converts_exactly(w_bits: int, a_bits: int, seeds) -> None:
    require_native()
    for seed in seeds(2):
        built = _network(w_bits, a_bits, seed, signed=bool(seed % 2), narrow=bool(seed % 3))
        result = lowbit.convert(built.model)
        names = ("LowBitConv", "APConv", "LowBitGemm", "APGemm")
        nodes = [node for node in result.model.graph.node if node.op_type in names]
        assert len(nodes) == 3
        assert not any(n.op_type in FLOAT_MATMULS for n in result.model.graph.node)
        for node in nodes:
            widths = {a.name: a.i for a in node.attribute if a.name in ("x_bits", "w_bits", "y_bits")}
            assert widths.get("w_bits", 8) <= w_bits
            assert widths.get("x_bits", 8) <= a_bits
            assert node.op_type.endswith("Gemm") or widths.get("y_bits", 8) <= a_bits
        feeds = built.feed()
        for ours, meant in zip(
            lowbit_session(result.model).run(None, feeds), oracle.run(built.model, feeds), strict=True
        ):
            np.testing.assert_array_equal(ours, meant)


def test_scales_per_channel_become_one_node() -> None:
    """The quantizer between the two convolutions costs no node: its scales are in the first one's weights."""
    require_native()
    result = lowbit.convert(CASES["brevitas.per_channel_between_convolutions"].build(1).model)
    products = [node for node in result.model.graph.node if node.op_type == "LowBitConv"]
    assert len(products) == 2
    assert len(products) + 4 >= len(result.model.graph.node)
    epilogues = [a.s for a in products[0].attribute if a.name == "epilogue"]
    assert epilogues in ([], [b"requantize"])


def test_reason_names_the_scales() -> None:
    """A sum over channels of different scales is refused by name, with what to do."""
    require_native()
    result = lowbit.convert(CASES["exporters.brevitas_per_channel_activations"].build(1).model)
    (conv,) = [node for node in result.report.kept if node.op_type == "Conv"]
    assert "channels of different scales" in conv.reason
    assert "one scale per activation tensor" in conv.reason
