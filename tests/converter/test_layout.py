"""Where channels stand: views, moved axes, edges of the graph."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from tests.converter.graphs import conv, converted, converts, image, output
from tests.dialects.graphs.builder import Graph, Quant


def between_convolutions(move, channels: int = 5):
    """conv -> Q -> DQ -> move -> conv -> Q -> DQ, with no pair behind the op that moves."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = move(g, g.qdq(y, yq))
        z, zq = conv(g, y, yq, channels=channels, kernel=1)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    return build


def test_slice() -> None:
    def move(g: Graph, y: str) -> str:
        return g.node("Slice", [y, g.ints([1, 0]), g.ints([4, 9]), g.ints([1, -1]), g.ints([1, 2])])

    result = converts(between_convolutions(move, channels=3), "LowBitConv", "Slice", "LowBitConv")
    assert result.constant("Slice", 3).tolist() == [3, 2]


def test_split() -> None:
    def move(g: Graph, y: str) -> str:
        return g.node("Split", [y, g.ints([2, 3])], outputs=2, axis=1)[1]

    result = converts(between_convolutions(move, channels=3), "LowBitConv", "Split", "LowBitConv")
    assert result.attributes("Split")["axis"] == 3


def test_pad_with_another_value_than_zero_is_its_code() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        value = np.float32(yq.scale) * np.float32(100 - int(yq.zero))
        y = g.node("Pad", [g.qdq(y, yq), g.ints([0, 0, 1, 0, 0, 1, 0, 0]), g.floats(value)])
        z, zq = conv(g, y, yq, channels=6)
        output(g, g.qdq(z, zq), 2, 5, 3, 2)

    result = converts(build, "LowBitConv", "Pad", "LowBitConv")
    assert result.constant("Pad", 1).tolist() == [0, 1, 0, 0, 0, 0, 0, 1]
    assert result.constant("Pad", 2) == 100


def test_squeeze_of_a_pooled_image() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("GlobalAveragePool", [g.qdq(y, yq)])
        y = g.node("Squeeze", [g.qdq(y, yq), g.ints([2, 3])])
        wq = g.weight_quant(7, axis=1)
        z = g.node("MatMul", [y, g.weight(g.codes((5, 7)), wq)])
        output(g, g.qdq(z, g.after(yq, wq, 5)), 2, 7)

    converts(build, "LowBitConv", "LowBitGlobalAveragePool", "Squeeze", "LowBitGemm")


def test_nhwc_model_has_no_transpose_left() -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.node("Transpose", [g.input((2, 6, 6, 4), step=float(xq.scale))], perm=[0, 3, 1, 2])
        y, yq = conv(g, g.qdq(x, xq), xq)
        y = g.qdq(y, yq)
        output(g, g.node("Transpose", [y], perm=[0, 2, 3, 1]), 2, 4, 4, 5)

    converts(build, "LowBitConv")


def test_head_of_a_detector_reshapes_without_transposing() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(g.node("Transpose", [g.qdq(y, yq)], perm=[0, 2, 3, 1]), yq)
        y = g.qdq(g.node("Reshape", [y, g.ints([2, -1, 5])]), yq)
        output(g, g.qdq(g.node("Sigmoid", [y]), g.act(1 / 256, zero=0)), 2, 16, 5)

    converts(build, "LowBitConv", "Reshape", "LowBitLookup")


@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_codes_at_the_edges_keep_type_and_layout(kind: str) -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03, kind)
        y, yq = conv(g, g.dq(g.input((2, 4, 6, 6), kind), xq), xq)
        yq = Quant(yq.scale, np.asarray(3), kind)
        element = onnx.TensorProto.UINT8 if kind == "u8" else onnx.TensorProto.INT8
        g.output(g.q(y, yq), (2, 5, 4, 4), element)

    converts(build, "Transpose", "LowBitConv", "Transpose")


def test_signed_codes_inside_are_stored_unsigned() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g, kind="s8")
        y, yq = conv(g, x, xq)
        output(g, g.qdq(y, Quant(yq.scale, np.asarray(-5), "s8")), 2, 5, 4, 4)

    result = converts(build, "LowBitConv")
    assert "x_encoding" not in result.attributes("LowBitConv")
    assert result.constant("LowBitConv", 8) == 123
    properties = {p.key: p.value for p in result.result.model.metadata_props}
    offsets = {v.get("offset") for v in json.loads(properties["lowbit.provenance"])["values"].values()}
    assert 128 in offsets


def test_codes_below_zero_point_of_a_relu_are_not_counted() -> None:
    """int8 with zero point 0 behind a ReLU holds 0..127: 7 bits, stored as they are."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        yq = Quant(yq.scale, np.asarray(0), "s8")
        z, zq = conv(g, g.qdq(g.node("Relu", [y]), yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    result = converted(build)
    result.assert_equal()
    bits = [{a.name: a.i for a in n.attribute}.get("x_bits") for n in result.result.model.graph.node]
    assert 7 in bits


def test_elementwise_float_nodes_follow_the_stored_order() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("Mul", [g.node("HardSwish", [y]), g.floats(g.rng.normal(size=(5, 1, 1)))])
        g.opset = 14
        z, zq = conv(g, g.qdq(y, yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    result = converted(build)
    assert not result.ops["Transpose"]
    assert result.ops["LowBitConv"] == 2


def test_dynamic_batch_and_size() -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.qdq(g.input(("N", 4, "H", "W"), step=float(xq.scale)), xq)
        y, yq = conv(g, x, xq, out=4, pads=[1, 1, 1, 1])
        y = g.qdq(g.node("Add", [g.qdq(y, yq), x]), yq)
        wq = g.weight_quant(7)
        y = g.node("Flatten", [g.qdq(g.node("GlobalAveragePool", [y]), yq)])
        z = g.node("Gemm", [y, g.weight(g.codes((7, 4)), wq)], transB=1)
        output(g, g.qdq(z, g.after(yq, wq, 4)), "N", 7)

    converts(build, "LowBitConv", "LowBitGlobalAveragePool", "LowBitGemm")
