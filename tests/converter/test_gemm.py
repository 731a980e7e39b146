from __future__ import annotations

import numpy as np
import pytest

from tests.converter.graphs import conv, converted, converts, image, output, refuses
from tests.dialects.graphs.builder import Graph


def rows(g: Graph, *shape: int):
    xq = g.act(0.03)
    return g.qdq(g.input(shape, step=float(xq.scale)), xq), xq


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_with_integer_bias(transposed: int) -> None:
    def build(g: Graph) -> None:
        x, xq = rows(g, 3, 20)
        wq = g.weight_quant(7, axis=0 if transposed else 1)
        weight = g.weight(g.codes((7, 20) if transposed else (20, 7)), wq)
        y = g.node("Gemm", [x, weight, g.bias(7, xq, wq)], transB=transposed)
        output(g, g.qdq(y, g.after(xq, wq, 20)), 3, 7)

    assert "tail" not in converts(build, "LowBitGemm").attributes("LowBitGemm")


def test_alpha_goes_into_the_scale_and_beta_into_the_bias() -> None:
    def build(g: Graph) -> None:
        x, xq = rows(g, 3, 20)
        wq = g.weight_quant(7)
        weight, bias = g.weight(g.codes((7, 20)), wq), g.floats(g.rng.normal(size=7))
        y = g.node("Gemm", [x, weight, bias], transB=1, alpha=0.3, beta=0.7)
        output(g, g.qdq(y, g.after(xq, wq, 20)), 3, 7)

    result = converts(build, "LowBitGemm")
    assert result.attributes("LowBitGemm")["tail"] == "bias"


def test_matmul_of_any_rank_and_the_bias_behind_it() -> None:
    def build(g: Graph) -> None:
        x, xq = rows(g, 2, 3, 20)
        wq = g.weight_quant(7, axis=1)
        y = g.node("Add", [g.bias(7, xq, wq), g.node("MatMul", [x, g.weight(g.codes((20, 7)), wq)])])
        output(g, g.qdq(y, g.after(xq, wq, 20)), 2, 3, 7)

    assert "tail" not in converts(build, "LowBitGemm").attributes("LowBitGemm")


def test_batch_normalization_of_another_axis_than_the_products_channels_stays() -> None:
    """A BatchNormalization has its channels along axis 1, a MatMul of rank 3 along axis 2."""

    def build(g: Graph) -> None:
        xq = g.act(0.03)
        x = g.qdq(g.input((2, 5, 8)), xq)
        wq = g.weight_quant(5, axis=1)
        y = g.node("MatMul", [x, g.weight(g.codes((8, 5)), wq)])
        parameters = [g.floats(g.rng.uniform(0.5, 1.5, 5)) for _ in range(4)]
        y = g.node("BatchNormalization", [y, *parameters])
        output(g, g.qdq(y, g.after(xq, wq, 8)), 2, 5, 5)

    result = converted(build)
    assert result.ops["BatchNormalization"] == 1
    result.assert_equal()


def test_constant_that_adds_a_dimension_is_not_a_bias() -> None:
    def build(g: Graph) -> None:
        x, xq = rows(g, 3, 20)
        wq = g.weight_quant(7, axis=1)
        y = g.node("MatMul", [x, g.weight(g.codes((20, 7)), wq)])
        y = g.node("Add", [y, g.floats(g.rng.normal(size=(1, 1, 7)))])
        output(g, g.qdq(y, g.after(xq, wq, 20)), 1, 3, 7)

    result = converted(build)
    assert result.attributes("LowBitGemm")["epilogue"] == "float"
    assert result.ops["Add"] == 1


@pytest.mark.parametrize("flatten", ["Flatten", "Reshape"])
def test_flatten_is_absorbed_into_the_order_of_the_columns(flatten: str) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        y = g.node("Flatten", [y]) if flatten == "Flatten" else g.node("Reshape", [y, g.ints([-1, 80])])
        wq = g.weight_quant(7)
        z = g.node("Gemm", [y, g.weight(g.codes((7, 80)), wq)], transB=1)
        output(g, g.qdq(z, g.after(yq, wq, 80)), 2, 7)

    assert converts(build, "LowBitConv", "LowBitGemm").attributes("LowBitGemm")["axis"] == 1


def test_flatten_that_others_read_too_is_done_for_them() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("Flatten", [g.qdq(y, yq)])
        wq = g.weight_quant(7)
        z = g.node("Gemm", [y, g.weight(g.codes((7, 80)), wq)], transB=1)
        output(g, g.qdq(z, g.after(yq, wq, 80)), 2, 7)
        output(g, y, 2, 80)

    result = converted(build)
    result.assert_equal()
    assert result.ops["Transpose"] == 1


def test_refusals_name_what_they_found() -> None:
    def transposed(g: Graph) -> None:
        x, xq = rows(g, 20, 3)
        wq = g.weight_quant(7, axis=1)
        y = g.node("Gemm", [x, g.weight(g.codes((20, 7)), wq)], transA=1)
        output(g, g.qdq(y, g.after(xq, wq, 20)), 3, 7)

    def two_activations(g: Graph) -> None:
        a, aq = rows(g, 3, 20)
        b, _ = rows(g, 20, 7)
        output(g, g.qdq(g.node("Gemm", [a, b]), aq), 3, 7)

    def scale_per_row(g: Graph) -> None:
        x, xq = rows(g, 3, 20)
        wq = g.weight_quant(20, axis=0)
        y = g.node("MatMul", [x, g.weight(g.codes((20, 7)), wq)])
        output(g, g.qdq(y, xq), 3, 7)

    refuses(transposed, "Gemm", "transA=1")
    refuses(two_activations, "Gemm", "weights are not constant")
    refuses(scale_per_row, "MatMul", r"axis 0; expected per output \(1\)")


def test_residual_of_a_gemm() -> None:
    def build(g: Graph) -> None:
        x, xq = rows(g, 3, 7)
        wq = g.weight_quant(7)
        yq = g.after(xq, wq, 7)
        y = g.qdq(g.node("Gemm", [x, g.weight(g.codes((7, 7)), wq)], transB=1), yq)
        output(g, g.qdq(g.node("Add", [y, x]), g.act(0.06)), 3, 7)

    result = converts(build, "LowBitGemm")
    assert np.isclose(result.constant("LowBitGemm", 16), 0.03, rtol=0.6)
