from __future__ import annotations

import numpy as np
import pytest

from tests.converter.graphs import conv, converted, converts, image, output, refuses
from tests.dialects.graphs.builder import Graph, Quant, as_tensor
from tests.support import lowbit_session, stock_run


def test_integer_bias_and_quantizer_become_requantize() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    result = converts(build, "LowBitConv")
    attributes = result.attributes("LowBitConv")
    assert (attributes["in_channels"], attributes["out_channels"]) == (4, 5)
    assert "tail" not in attributes
    assert len(result.node("LowBitConv").input) == 9  # up to y_zero_point


def test_relu_bounds_the_codes_even_off_the_lowest_zero_point() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        yq = Quant(yq.scale, np.asarray(100), yq.kind)
        output(g, g.qdq(g.node("Relu", [y]), yq), 2, 5, 4, 4)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["y_min"] == [100]


def test_clip_bounds_the_codes_on_both_sides() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        yq = Quant(yq.scale, np.asarray(30), yq.kind)
        y = g.node("Clip", [y, g.floats(-10 * yq.scale), g.floats(50 * yq.scale)])
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    attributes = converts(build, "LowBitConv").attributes("LowBitConv")
    assert (attributes["y_min"], attributes["y_max"]) == ([20], [80])


def test_qcdq_clip_gives_the_bit_width() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq)
        yq = Quant(yq.scale * 16, np.asarray(8), yq.kind)
        codes = g.node("Clip", [g.q(y, yq), g.const(np.uint8(0)), g.const(np.uint8(15))])
        z, zq = conv(g, g.dq(codes, yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    result = converted(build)
    result.assert_equal()
    first, second = (n for n in result.result.model.graph.node if n.op_type == "LowBitConv")
    assert {a.name: a.i for a in first.attribute}["y_bits"] == 4
    assert {a.name: a.i for a in second.attribute}["x_bits"] == 4


def test_float_bias_becomes_a_tail() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(5)
        yq = g.after(xq, wq, 36)
        weight = g.weight(g.codes((5, 4, 3, 3)), wq)
        y = g.node("Conv", [x, weight, g.floats(g.rng.normal(size=5) * 20 * yq.scale)])
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    attributes = converts(build, "LowBitConv").attributes("LowBitConv")
    assert (attributes["epilogue"], attributes["tail"]) == ("tail", "bias")
    rounded = converted(build, round_bias=True)
    assert "epilogue" not in rounded.attributes("LowBitConv")
    assert any("rounded" in warning for warning in rounded.result.report.warnings)


def test_bias_on_another_grid_is_not_added_as_integers() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(None)
        bq = Quant(np.nextafter(xq.scale * wq.scale, np.float32(1)), np.asarray(0), "s32")
        bias = g.dq(g.const(as_tensor(g.rng.integers(-900, 900, 5), "s32", "")), bq)
        y = g.node("Conv", [x, g.weight(g.codes((5, 4, 3, 3)), wq), bias])
        output(g, g.qdq(y, g.after(xq, wq, 36)), 2, 5, 4, 4)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["tail"] == "bias"


def test_batch_normalization_becomes_an_affine_step() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        parameters = [g.floats(g.rng.uniform(0.5, 1.5, 5)) for _ in range(4)]
        y = g.node("Relu", [g.node("BatchNormalization", [y, *parameters])])
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["tail"] == "affine"


def test_no_quantizer_behind_gives_real_numbers() -> None:
    def build(g: Graph) -> None:
        y, _ = conv(g, *image(g), bias=False)
        output(g, y, 2, 5, 4, 4)

    result = converted(build)
    result.assert_equal()
    assert result.attributes("LowBitConv")["epilogue"] == "float"
    assert result.ops["Transpose"] == 1  # the graph output is channels first
    assert result.result.report.warnings


@pytest.mark.parametrize("side", [0, 1])
def test_addition_behind_the_quantizer_keeps_both_roundings(side: int) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq, out=4, pads=[1, 1, 1, 1])
        y = g.qdq(g.node("Relu", [y]), Quant(yq.scale, np.asarray(7), yq.kind))
        operands = [x, y] if side else [y, x]
        z = g.qdq(g.node("Relu", [g.node("Add", operands)]), g.act(0.06))
        output(g, z, 2, 4, 6, 6)

    result = converts(build, "LowBitConv")
    assert result.attributes("LowBitConv")["inner_min"] == [7]


def test_codes_read_elsewhere_are_not_fused_into_the_addition() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq, out=4, pads=[1, 1, 1, 1])
        y = g.qdq(y, yq)
        z = g.qdq(g.node("Add", [y, x]), g.act(0.06))
        output(g, z, 2, 4, 6, 6)
        output(g, y, 2, 4, 6, 6)

    converted(build).assert_equal()
    assert converted(build).ops["LowBitAdd"] == 1


def test_addition_before_the_only_rounding_is_a_step_of_the_tail() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq, out=4, pads=[1, 1, 1, 1])
        output(g, g.qdq(g.node("Relu", [g.node("Add", [x, y])]), yq), 2, 4, 6, 6)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["tail"] == "residual"


@pytest.mark.parametrize("quantized", [False, True])
def test_addition_that_enlarges_the_result_is_not_fused(quantized: bool) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq, out=4, kernel=6)
        y = g.qdq(y, yq) if quantized else y
        output(g, g.qdq(g.node("Add", [y, x]), yq), 2, 4, 6, 6)

    result = converted(build)
    result.assert_equal()
    assert len(result.node("LowBitConv").input) <= 9


def test_pad_with_zeros_is_absorbed() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, g.node("Pad", [x, g.ints([0, 0, 1, 2, 0, 0, 0, 1])]), xq)
        output(g, g.qdq(y, yq), 2, 5, 5, 7)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["pads"] == [1, 2, 0, 1]


def test_same_padding_is_resolved() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), auto_pad="SAME_LOWER", strides=[2, 2])
        output(g, g.qdq(y, yq), 2, 5, 3, 3)

    assert converts(build, "LowBitConv").attributes("LowBitConv")["pads"] == [1, 1, 0, 0]


def test_one_scale_per_channel_folds_into_a_depthwise_convolution() -> None:
    def build(g: Graph) -> None:
        xq = Quant(g.scale(0.03, 4), np.full(4, 9), "s8", 1)
        x = g.qdq(g.input((2, 4, 6, 6)), xq)
        wq = g.weight_quant(4)
        y = g.node("Conv", [x, g.weight(g.codes((4, 1, 3, 3)), wq)], group=4, pads=[1, 1, 1, 1])
        output(g, g.qdq(y, g.after(xq, wq, 9)), 2, 4, 6, 6)

    assert converts(build, "LowBitConv").constant("LowBitConv", 2) == 1


def test_refusals_name_what_they_found() -> None:
    def float_weights(g: Graph) -> None:
        x, xq = image(g)
        output(g, g.qdq(g.node("Conv", [x, g.floats(g.rng.normal(size=(5, 4, 3, 3)))]), xq), 2, 5, 4, 4)

    def float_input(g: Graph) -> None:
        weight = g.weight(g.codes((5, 4, 3, 3)), g.weight_quant(5))
        output(g, g.qdq(g.node("Conv", [g.input((2, 4, 6, 6)), weight]), g.act(0.1)), 2, 5, 4, 4)

    def channel_scales(g: Graph) -> None:
        x = g.qdq(g.input((2, 4, 6, 6)), Quant(g.scale(0.03, 4), np.zeros(4), "u8", 1))
        weight = g.weight(g.codes((5, 4, 3, 3)), g.weight_quant(5))
        output(g, g.qdq(g.node("Conv", [x, weight]), g.act(0.1)), 2, 5, 4, 4)

    def large_sums(g: Graph) -> None:
        x, _ = image(g, 67000, 1, zero=0)
        weight = g.weight(np.full((1, 67000, 1, 1), 127), g.weight_quant(None))
        output(g, g.qdq(g.node("Conv", [x, weight]), g.act(0.1)), 2, 1, 1, 1)

    refuses(float_weights, "Conv", "weights are not quantized")
    refuses(float_input, "Conv", "input is not quantized")
    refuses(channel_scales, "Conv", "one scale per channel")
    refuses(large_sums, "Conv", r"2169795000.*67000 products.*int32")


def _conv_with_bias(codes: object, zero_point: object, op_type: str = "Conv"):
    """A product whose int32 bias has a zero point of its own."""

    def build(g: Graph) -> None:
        wq = g.weight_quant(None)
        if op_type == "Gemm":
            xq = g.act(0.03)
            x = g.qdq(g.input((2, 36), step=float(xq.scale)), xq)
            weight = g.weight(g.codes((36, 5)), wq)
        else:
            x, xq = image(g)
            weight = g.weight(g.codes((4, 5, 3, 3) if op_type == "ConvTranspose" else (5, 4, 3, 3)), wq)
        bq = Quant(np.float32(xq.scale * wq.scale), np.asarray(zero_point, np.int32), "s32")
        bias = g.dq(g.const(as_tensor(np.full(5, codes), "s32", "")), bq)
        y = g.node(op_type, [x, weight, bias])
        output(g, g.qdq(y, g.after(xq, wq, 36)), *([2, 5] if op_type == "Gemm" else [2, 5, "h", "w"]))

    return build


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "Gemm"])
@pytest.mark.parametrize(("codes", "zero_point"), [(-(2**31), 1), (2**31 - 1, -1), (2**31 - 1, -(2**31))])
def test_bias_that_leaves_int32_less_its_zero_point_stays(op_type: str, codes: int, zero_point: int) -> None:
    """ONNX Runtime wraps around there; no kernel of lowbit could follow."""
    refuses(_conv_with_bias(codes, zero_point, op_type), op_type, "less its zero point leaves int32")


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose", "Gemm"])
def test_bias_with_a_zero_point_inside_int32(op_type: str) -> None:
    result = converted(_conv_with_bias(900, -77, op_type))
    assert op_type not in result.ops
    result.assert_equal()


def test_added_constant_that_leaves_int32_less_its_zero_point_stays() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), bias=False)
        bq = Quant(np.float32(2.0**-20), np.asarray(7, np.int32), "s32")
        shift = g.dq(g.const(as_tensor(np.full((5, 1, 1), -(2**31) + 3), "s32", "")), bq)
        output(g, g.qdq(g.node("Add", [y, shift]), yq), 2, 5, 4, 4)

    result = converted(build)
    assert "Add" in result.ops, "stock ONNX Runtime decides what this means"


def test_a_bias_whose_scales_name_no_axis() -> None:
    """The default is axis 1, which a vector does not have; ONNX Runtime runs it fused into a QLinearConv."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(y, yq), 2, 5, 4, 4)
        bias = next(n for n in g.nodes if n.op_type == "Conv").input[2]
        (reader,) = (n for n in g.nodes if n.output[0] == bias)
        assert [a.name for a in reader.attribute] == ["axis"]
        reader.ClearField("attribute")

    result = converted(build)
    assert result.ops["LowBitConv"] == 1
    assert "tail" not in result.attributes("LowBitConv")
    feeds = result.built.feed()
    (ours,) = lowbit_session(result.result.model).run(None, feeds)
    np.testing.assert_array_equal(ours, stock_run(result.built.model, feeds)[0])
