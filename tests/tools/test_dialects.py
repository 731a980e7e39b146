"""Which dialect a region of a model is said to be written in."""

from __future__ import annotations

import pytest
from lowbit.frontends.dialects import DIALECTS, Neighbours, dialect_of
from onnx import TensorProto, helper

QONNX = "qonnx.custom_op.general"


def node(op: str, inputs: str, output: str, domain: str = ""):
    return helper.make_node(op, inputs.split(), [output], name=output, domain=domain)


def dialects(*nodes, region: str) -> str | None:
    """The dialect of the nodes named in `region` within a graph."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [value], [])
    chosen = [each for each in nodes if each.name in region.split()]
    assert len(chosen) == len(region.split())
    return dialect_of(chosen, Neighbours(graph))


def pair(x: str, y: str, *, clip: bool = False, domain: str = ""):
    """Q, a Clip where asked for, DQ."""
    yield node("QuantizeLinear", f"{x} s z", f"{y}_q", domain)
    if clip:
        yield node("Clip", f"{y}_q low high", f"{y}_clip")
    yield node("DequantizeLinear", f"{y}_clip s z" if clip else f"{y}_q s z", y, domain)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_qdq(domain):
    graph = [*pair("x", "a", domain=domain), node("Conv", "a w", "c"), *pair("c", "y", domain=domain)]
    assert dialects(*graph, region="c y_q") == "QDQ"
    assert dialects(*graph, region="c") == "QDQ"
    assert dialects(*graph, region="a_q") == "QDQ"


def test_a_clip_between_a_pair_makes_it_qcdq():
    weights = [node("Clip", "w low high", "w_clip"), node("DequantizeLinear", "w_clip s z", "w_dq")]
    graph = [
        *pair("x", "a", clip=True), *weights, node("Conv", "a w_dq", "c"), node("Relu", "c", "r"),
        *pair("r", "y", clip=True),
    ]  # fmt: skip
    for region in ("c r y_q y_clip", "c", "a_q a_clip", "y"):
        assert dialects(*graph, region=region) == "QCDQ", region


def test_a_clip_of_floats_does_not():
    graph = [*pair("x", "a"), node("Conv", "a w", "c"), node("Clip", "c low high", "r"), *pair("r", "y")]
    assert dialects(*graph, region="c r y_q") == "QDQ"


@pytest.mark.parametrize("domain", [QONNX, "onnx.brevitas", "finn.custom_op.general"])
@pytest.mark.parametrize("op", ["Quant", "BipolarQuant", "MultiThreshold"])
def test_qonnx(op, domain):
    graph = [
        node(op, "x s z b", "a", domain), node(op, "w s z b", "w_q", domain), node("Conv", "a w_q", "c"),
        node("BatchNormalization", "c g b m v", "n"), node(op, "n s z b", "y", domain),
    ]  # fmt: skip
    assert dialects(*graph, region="c n y") == "QONNX"
    assert dialects(*graph, region="c") == "QONNX"
    assert dialects(*graph, region="a") == "QONNX"


def test_moves_between_a_quantizer_and_its_reader_do_not_hide_it():
    graph = [
        node("Quant", "x s z b", "a", QONNX), node("MaxPool", "a", "p"), node("Reshape", "p shape", "r"),
        node("MatMul", "r w", "y"),
    ]  # fmt: skip
    assert dialects(*graph, region="y") == "QONNX"


@pytest.mark.parametrize("op", ["QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"])
def test_qoperator_and_the_pairs_at_its_edges(op):
    graph = [
        node("QuantizeLinear", "x s z", "q"), node(op, "q s z w", "c"), node("DequantizeLinear", "c s z", "y")
    ]  # fmt: skip
    for region in ("c", "q", "y"):
        assert dialects(*graph, region=region) == "QOperator", region


def test_microsoft_and_quark_ops():
    assert dialects(node("QLinearAdd", "x y", "a", "com.microsoft"), region="a") == "QOperator"
    assert dialects(node("ExtendedQuantizeLinear", "x s z", "a", "com.amd.quark"), region="a") == "Quark"


def test_lowbit_nodes():
    assert dialects(node("LowBitConv", "x w", "y", "ai.lowbit"), region="y") == "lowbit"


def test_what_is_not_quantized_has_none():
    graph = [node("Conv", "x w", "c"), node("Relu", "c", "r"), node("Custom", "r", "y", "com.example")]
    for region in ("c", "r", "y", "c r y"):
        assert dialects(*graph, region=region) is None


def test_a_move_in_front_of_a_quantizer_is_part_of_it():
    graph = [node("Relu", "x", "r"), node("MaxPool", "r", "p"), *pair("p", "y")]
    assert dialects(*graph, region="p") == "QDQ"
    assert dialects(*graph, region="r") is None


def test_a_cycle_ends():
    graph = [node("Reshape", "b shape", "a"), node("Reshape", "a shape", "b"), node("Conv", "a w", "y")]
    assert dialects(*graph, region="y") is None


def test_names_are_the_documented_ones():
    assert set(DIALECTS) == {"lowbit", "Quark", "QONNX", "QOperator", "QCDQ", "QDQ"}
