"""Functions of one quantized tensor: look-up tables and per-channel affine steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.converter.graphs import conv, converted, converts, image, output
from tests.dialects.graphs.builder import Graph, Quant, as_tensor

NARROW = {"HardSigmoid": {"alpha": 0.3}, "LeakyRelu": {"alpha": 0.1}, "Sigmoid": {}, "Tanh": {}, "Abs": {}}


@pytest.mark.parametrize("op", NARROW)
@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_unary_op(op: str, kind: str) -> None:
    def build(g: Graph) -> None:
        x, _ = image(g, kind=kind)
        output(g, g.qdq(g.node(op, [x], **NARROW[op]), g.act(0.01, kind)), 2, 4, 6, 6)

    result = converts(build, "LowBitLookup")
    assert result.constant("LowBitLookup", 1).shape == (256,)


def test_function_in_several_nodes_with_pairs_inside() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        gate = g.qdq(g.node("Sigmoid", [g.node("Mul", [y, g.floats(1.7)])]), g.act(1 / 256, zero=0))
        z = g.qdq(g.node("Mul", [y, gate]), yq)
        w, wq = conv(g, z, yq, channels=5)
        output(g, g.qdq(w, wq), 2, 5, 2, 2)

    converts(build, "LowBitConv", "LowBitLookup", "LowBitConv")


def test_functions_in_a_row_are_one() -> None:
    """HardSwish as exporters wrote it before there was one: a quantizer behind each operation."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        shifted = g.qdq(g.node("Add", [y, g.floats(3.0)]), yq)
        clipped = g.qdq(g.node("Clip", [shifted, g.floats(0.0), g.floats(6.0)]), g.act(6 / 255, zero=0))
        product = g.qdq(g.node("Mul", [y, clipped]), g.act(0.1))
        output(g, g.qdq(g.node("Div", [product, g.floats(6.0)]), g.act(0.02)), 2, 5, 4, 4)

    converts(build, "LowBitConv", "LowBitLookup")


def test_functions_in_a_row_whose_codes_between_are_read() -> None:
    def build(g: Graph) -> None:
        y = g.qdq(g.node("Tanh", [image(g)[0]]), yq := g.act(1 / 100))
        output(g, g.qdq(g.node("Sigmoid", [y]), g.act(1 / 256, zero=0)), 2, 4, 6, 6)
        z, zq = conv(g, y, yq)
        output(g, g.qdq(z, zq), 2, 5, 4, 4)

    converts(build, "LowBitLookup", "LowBitLookup", "Transpose", "LowBitConv")


def test_function_that_is_none_of_the_codes_before() -> None:
    """Constants vary over the image in the first, which stays; the second has a table."""

    def build(g: Graph) -> None:
        x, xq = image(g)
        y = g.qdq(g.node("Mul", [x, g.floats(g.rng.normal(size=(6, 6)))]), xq)
        output(g, g.qdq(g.node("Tanh", [y]), g.act(1 / 100)), 2, 4, 6, 6)

    result = converted(build)
    assert result.ops["Mul"] == 1
    assert result.ops["LowBitLookup"] == 1


def test_constants_per_channel_give_a_table_per_channel() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        slope = g.floats(g.rng.uniform(-0.5, 0.5, (5, 1, 1)))
        output(g, g.qdq(g.node("PRelu", [g.qdq(y, yq), slope]), yq), 2, 5, 4, 4)

    result = converts(build, "LowBitConv", "LowBitLookup")
    assert result.constant("LowBitLookup", 1).shape == (5, 256)


def test_constant_that_varies_over_the_image_stays_float() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        output(g, g.qdq(g.node("Mul", [x, g.floats(g.rng.normal(size=(6, 6)))]), xq), 2, 4, 6, 6)

    result = converted(build)
    assert result.ops["Mul"] == 1
    assert "one number per channel" in result.reason("Mul")


def test_intermediate_result_read_elsewhere_prevents_the_table() -> None:
    def build(g: Graph) -> None:
        x, _ = image(g)
        y = g.node("Tanh", [x])
        output(g, g.qdq(y, g.act(0.01)), 2, 4, 6, 6)
        output(g, y, 2, 4, 6, 6)

    assert converted(build).ops["Tanh"] == 1


def test_batch_normalization_of_codes() -> None:
    def build(g: Graph) -> None:
        x, _ = image(g)
        parameters = [g.floats(g.rng.uniform(0.5, 1.5, 4)) for _ in range(4)]
        y = g.node("Relu", [g.node("BatchNormalization", [x, *parameters], epsilon=0.01)])
        output(g, g.qdq(y, Quant(g.scale(0.05), np.asarray(5), "u8")), 2, 4, 6, 6)

    assert converts(build, "LowBitAffine").attributes("LowBitAffine")["y_min"] == [5]


def test_batch_normalization_whose_gamma_is_quantized() -> None:
    """ONNX Runtime's quantizer takes a gamma that was not folded into a convolution for weights."""

    def build(g: Graph) -> None:
        x, _ = image(g)
        gamma = g.dq(g.const(as_tensor(g.codes((4,)), "s8", "")), g.act(0.01, "s8"))
        parameters = [gamma, *(g.floats(g.rng.uniform(0.5, 1.5, 4)) for _ in range(3))]
        y = g.node("BatchNormalization", [x, *parameters])
        output(g, g.qdq(y, g.act(0.05)), 2, 4, 6, 6)

    converts(build, "LowBitAffine")


@pytest.mark.parametrize("op", ["Mul", "Add"])
def test_constant_per_channel(op: str) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        constant = g.floats(g.rng.uniform(0.2, 1.5, (1, 4, 1, 1)))
        output(g, g.qdq(g.node(op, [constant, x]), xq), 2, 4, 6, 6)

    converts(build, "LowBitAffine")


def test_one_constant_for_all_channels_is_a_table() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        output(g, g.qdq(g.node("Mul", [x, g.floats(0.7)]), xq), 2, 4, 6, 6)

    converts(build, "LowBitLookup")
