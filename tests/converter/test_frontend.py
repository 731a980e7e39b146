"""The habits of exporters that the frontend undoes before any rule looks."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.converter.graphs import conv, converted, converts, image, output
from tests.dialects.graphs.builder import Graph, Quant, as_tensor


def test_weights_as_float_quantized_and_reshaped_in_the_file() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(5)
        real = (g.codes((3, 3, 4, 5)) * wq.scale).astype(np.float32)
        real = g.node("Transpose", [g.const(real)], perm=[3, 2, 0, 1])
        params = g._quant_inputs(wq, True)
        codes = g.node("QuantizeLinear", [real, *params], axis=0)
        codes = g.node("Reshape", [codes, g.ints([5, 4, 3, 3])])
        y = g.node("Conv", [x, g.node("DequantizeLinear", [codes, *params], axis=0)])
        output(g, g.qdq(y, g.after(xq, wq, 36)), 2, 5, 4, 4)

    converts(build, "LowBitConv")


def test_transpose_behind_the_weights_takes_their_axis_along() -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.qdq(g.input((3, 20)), xq)
        wq = g.weight_quant(7, axis=0)
        weight = g.node("Transpose", [g.weight(g.codes((7, 20)), wq)])
        output(g, g.qdq(g.node("MatMul", [x, weight]), g.after(xq, wq, 20)), 3, 7)

    converts(build, "LowBitGemm")


@pytest.mark.parametrize("constants", ["node", "input", "initializer"])
@pytest.mark.parametrize("scale_shape", ["scalar", "one"])
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_how_constants_are_stored(constants: str, scale_shape: str, domain: str) -> None:
    def build(g: Graph) -> None:
        g.constants, g.scale_shape, g.domain = constants, scale_shape, domain
        y, yq = conv(g, *image(g))
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    result = converts(build, "LowBitConv", seeds=(1,))
    assert bool(result.result.report.warnings) == (constants == "input")
    assert [value.name for value in result.result.model.graph.input] == ["input0"]


def test_one_pair_for_every_reader_is_one_quantizer() -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.input((2, 4, 6, 6), step=float(xq.scale))
        a, aq = conv(g, g.qdq(x, xq), xq)
        b, _ = conv(g, g.qdq(x, xq), xq)
        output(g, g.qdq(g.node("Add", [g.qdq(a, aq), g.qdq(b, aq)]), aq), 2, 5, 4, 4)

    converts(build, "LowBitConv", "LowBitConv")
    assert converted(build).ops["LowBitQuantize"] == 1


def test_missing_zero_point_is_zero_of_uint8() -> None:
    def build(g: Graph) -> None:
        xq = Quant(g.scale(0.03), np.asarray(0), "u8")
        x = g.input((2, 4, 6, 6))
        x = g.dq(g.q(x, xq, zero_point=False), xq, zero_point=False)
        y, yq = conv(g, x, xq)
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    converts(build, "LowBitConv")


def test_codes_cast_to_a_wider_type_are_the_same_codes() -> None:
    def build(g: Graph) -> None:
        xq = Quant(g.scale(0.03), np.asarray(0), "s8")
        codes = g.node("Cast", [g.q(g.input((2, 4, 6, 6)), xq)], to=TensorProto.INT32)
        x = g.dq(codes, Quant(xq.scale, xq.zero, "s32"))
        y, yq = conv(g, x, xq)
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    converts(build, "LowBitConv")


def test_two_readers_of_codes_from_outside_share_their_transpose() -> None:
    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.dq(g.input((2, 4, 6, 6), "u8"), xq)
        a, aq = conv(g, x, xq)
        b, _ = conv(g, x, xq)
        output(g, g.qdq(g.node("Add", [g.qdq(a, aq), g.qdq(b, aq)]), aq), 2, 5, 4, 4)

    converts(build, "Transpose", "LowBitConv", "LowBitConv")


def test_scale_shaped_like_a_channel_of_weights() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(5)
        scale = g.const(wq.scale.reshape(5, 1, 1, 1))
        codes = g.const(as_tensor(g.codes((5, 4, 3, 3)), "s8", ""))
        zero = g.const(np.zeros((5, 1, 1, 1), np.int8))
        y = g.node("Conv", [x, g.node("DequantizeLinear", [codes, scale, zero])])
        output(g, g.qdq(y, g.after(xq, wq, 36)), 2, 5, 4, 4)

    assert converted(build).ops["LowBitConv"] == 1
