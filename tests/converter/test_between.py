"""Ops between quantized tensors: Add, Mul, Concat, pools, Resize, requantization."""

from __future__ import annotations

import numpy as np
import pytest

from tests.converter.graphs import conv, converted, converts, image, output, refuses
from tests.dialects.graphs.builder import Graph, Quant, as_tensor


def two_images(g: Graph, kind: str = "u8"):
    (a, aq), (b, bq) = image(g, kind=kind), image(g)
    return (a, aq), (b, bq)


@pytest.mark.parametrize(
    ("op", "into"), [("Add", ("LowBitAdd",)), ("Mul", ("LowBitMul",)), ("Sub", ("LowBitLookup", "LowBitAdd"))]
)
@pytest.mark.parametrize("relu", [False, True])
def test_two_tensors(op: str, into: tuple[str, ...], relu: bool) -> None:
    def build(g: Graph) -> None:
        (a, _), (b, _) = two_images(g, "s8")
        y = g.node(op, [a, b])
        output(g, g.qdq(g.node("Relu", [y]) if relu else y, g.act(0.05)), 2, 4, 6, 6)

    attributes = converts(build, *into).attributes(into[-1])
    assert ("y_min" in attributes) == relu


@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_subtracted_codes_of_either_type_and_constants(kind: str) -> None:
    def build(g: Graph) -> None:
        x, _ = image(g, kind=kind)
        y, _ = image(g)
        constant = g.dq(g.const(as_tensor(g.codes((2, 4, 6, 6)), "s8", "")), g.act(0.3, "s8"))
        d = g.qdq(g.node("Sub", [y, x]), g.act(0.05, kind))
        e = g.qdq(g.node("Sub", [constant, d]), g.act(0.06, "s8"))
        output(g, g.qdq(g.node("Sub", [e, x]), g.act(0.07)), 2, 4, 6, 6)

    # x is mirrored for each of its readers.
    converts(build, *["LowBitLookup", "LowBitAdd"] * 3)


def test_a_subtracted_constant_is_mirrored_once_and_for_all() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq)
        other, _ = image(g, 5, 4)
        y = g.qdq(g.node("Sub", [g.qdq(y, yq), other]), yq)
        constant = g.dq(g.const(as_tensor(g.codes((5, 4, 4)), "s8", "")), g.act(0.3, "s8"))
        output(g, g.qdq(g.node("Sub", [y, constant]), yq), 2, 5, "h", "w")

    converts(build, "LowBitConv", "Transpose", "LowBitLookup", "LowBitAdd", "LowBitAdd")


@pytest.mark.parametrize(
    ("order", "whole"), [((0, 1, 2), True), ((0, 1), True), ((1, 0), False), ((0, 2), False)]
)
def test_parts_that_are_joined_again_in_order_are_not_cut(order: tuple[int, ...], whole: bool) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, yq = conv(g, x, xq, 6)
        parts = g.node("Split", [g.qdq(y, yq), g.ints([2, 4])], axis=1, outputs=2)
        parts = [g.qdq(part, yq) for part in parts]
        z, zq = conv(g, parts[1], yq, kernel=1)
        parts.append(g.qdq(z, zq))
        output(g, g.qdq(g.node("Concat", [parts[i] for i in order], axis=1), g.act(0.05)), 2, "c", "h", "w")
        output(g, parts[2], 2, "d", "h", "w")

    result = converts(build, *["LowBitConv"] * 2, "Split", "LowBitConcat")
    joined = result.node("LowBitConcat").input[4:]
    assert len(joined) == len(order) - whole


def test_pooled_tensors_and_constants_broadcast_channels_last() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        gate = g.qdq(g.node("GlobalAveragePool", [y]), yq)
        y = g.qdq(g.node("Mul", [gate, y]), Quant(yq.scale * 40, yq.zero, yq.kind))
        constant = g.dq(g.const(as_tensor(g.codes((5, 1, 1)), "s8", "")), g.act(0.3, "s8"))
        y = g.qdq(g.node("Add", [constant, y]), Quant(yq.scale * 40, yq.zero, yq.kind))
        z, zq = conv(g, y, Quant(yq.scale * 40, yq.zero, yq.kind), channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    converts(build, "LowBitConv", "LowBitGlobalAveragePool", "LowBitMul", "LowBitAffine", "LowBitConv")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_a_function_that_is_not_rounded_is_added_by_its_table(first: bool, kind: str) -> None:
    """As where a residual block's branch ends in x * Sigmoid(x), of which the sigmoid alone is rounded."""

    def build(g: Graph) -> None:
        (a, _), (b, _) = two_images(g, kind)
        gate = g.qdq(g.node("Sigmoid", [b]), g.act(1 / 256, zero=0))
        branch = g.node("Mul", [gate, b])
        y = g.node("Add", [branch, a] if first else [a, branch])
        output(g, g.qdq(g.node("Relu", [y]), g.act(0.05, kind)), 2, 4, 6, 6)

    result = converts(build, "LowBitAdd")
    assert result.constant("LowBitAdd", 8).shape == (256,)


def test_functions_by_channel_and_of_two_tensors_are_not_added_by_table() -> None:
    def build(g: Graph) -> None:
        (a, _), (b, _), (c, _) = image(g), image(g), image(g)
        slopes = g.node("PRelu", [b, g.floats(g.rng.uniform(-0.5, 0.5, (4, 1, 1)))])
        output(g, g.qdq(g.node("Add", [a, slopes]), g.act(0.05)), 2, 4, 6, 6)
        output(g, g.qdq(g.node("Add", [a, g.node("Mul", [b, c])]), g.act(0.05)), 2, 4, 6, 6)

    assert converted(build).ops["LowBitAdd"] == 0


def test_add_without_quantizer_stays_with_its_reason() -> None:
    def build(g: Graph) -> None:
        (a, _), (b, _) = two_images(g)
        output(g, g.node("Add", [a, b]), 2, 4, 6, 6)

    refuses(build, "Add", "no QuantizeLinear follows it")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_brings_every_tensor_to_one_grid(axis: int) -> None:
    def build(g: Graph) -> None:
        (a, _), (b, bq) = two_images(g, "s8")
        y = g.qdq(g.node("Concat", [a, b, a], axis=axis), bq)
        output(g, y, "n", "c", "h", "w")

    converts(build, "LowBitConcat")


@pytest.mark.parametrize("kind", ["u8", "s8"])
@pytest.mark.parametrize("bits", [6, 8])
def test_concat_clips_codes_that_are_on_its_grid_already(kind: str, bits: int) -> None:
    """A Clip narrows codes that would otherwise be copied, also to what a bit width implies."""

    def build(g: Graph) -> None:
        a, aq = image(g, kind=kind)
        codes = g.q(g.node("Concat", [a, a], axis=1), aq)
        low = -(1 << (bits - 2)) if kind == "s8" else 0
        bounds = [low, low + (1 << (bits - 1)) - 1] if bits == 8 else [low * 2, low * 2 + (1 << bits) - 1]
        dtype = np.int8 if kind == "s8" else np.uint8
        codes = g.node("Clip", [codes, *(g.const(np.array(b, dtype)) for b in bounds)])
        output(g, g.dq(codes, aq), 2, 8, 6, 6)

    converts(build, "LowBitConcat")


def test_concat_without_quantizer_joins_codes_of_one_grid() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, _ = conv(g, x, xq, out=4, pads=[1, 1, 1, 1])
        y = g.node("Concat", [g.qdq(y, xq), x], axis=1)
        z, zq = conv(g, y, xq, channels=8)
        output(g, g.qdq(z, zq), 2, 5, 4, 4)

    converts(build, "LowBitConv", "LowBitConcat", "LowBitConv")


def test_max_pool_takes_codes() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(
            g.node("MaxPool", [g.qdq(y, yq)], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0]), yq
        )
        z, zq = conv(g, y, yq, channels=5, kernel=1)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    converts(build, "LowBitConv", "LowBitMaxPool", "LowBitConv")


def test_quantizer_behind_max_pool_and_concat_is_raised_to_the_convolutions() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        a, yq = conv(g, x, xq)
        b, _ = conv(g, x, xq)
        y = g.node("MaxPool", [g.node("Relu", [a])], kernel_shape=[2, 2])
        y = g.qdq(y, yq)
        z, zq = conv(g, y, yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 1, 1)
        output(g, g.qdq(b, yq), 2, 5, 4, 4)

    converts(build, "LowBitConv", "LowBitConv", "LowBitMaxPool", "LowBitConv")


@pytest.mark.parametrize("relu", [False, True])
def test_quantizer_with_clip_behind_max_pool_is_raised_as_a_whole(relu: bool) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        yq = Quant(yq.scale * 16, np.asarray(4), yq.kind)
        y = g.node("MaxPool", [y], kernel_shape=[2, 2])
        y = g.node("Relu", [y]) if relu else y
        y = g.node("Clip", [g.q(y, yq), g.const(np.uint8(0)), g.const(np.uint8(15))])
        z, zq = conv(g, g.dq(y, yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 1, 1)

    converts(build, "LowBitConv", "LowBitMaxPool", "LowBitConv")


def test_indices_of_max_pool_keep_it_in_float() -> None:
    def build(g: Graph) -> None:
        x, _ = image(g)
        y, indices = g.node("MaxPool", [x], outputs=2, kernel_shape=[2, 2])
        output(g, y, 2, 4, 5, 5)
        g.output(indices, (2, 4, 5, 5), 7)

    assert converted(build).ops["MaxPool"] == 1


@pytest.mark.parametrize("options", [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]},
    {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1, "strides": [2, 2], "ceil_mode": 1},
])  # fmt: skip
def test_average_pool(options) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(g.node("AveragePool", [g.qdq(y, yq)], **options), g.act(0.3)), 2, 5, "h", "w")

    converts(build, "LowBitConv", "LowBitAveragePool")


@pytest.mark.parametrize("keepdims", [0, 1])
def test_mean_over_the_image(keepdims: int) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("ReduceMean", [g.qdq(y, yq)], axes=[3, -2], keepdims=keepdims)
        output(g, g.qdq(y, Quant(yq.scale / 2, yq.zero, yq.kind)), *((2, 5, 1, 1) if keepdims else (2, 5)))

    result = converted(build)
    result.assert_equal()
    assert result.attributes("LowBitGlobalAveragePool").get("keepdims", 1) == keepdims
    assert not result.ops["Transpose"]


def test_mean_over_the_channels_is_refused() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        output(g, g.qdq(g.node("ReduceMean", [x], axes=[0, 1]), xq), 1, 1, 6, 6)

    refuses(build, "ReduceMean", r"reduces axes \[0, 1\]")


@pytest.mark.parametrize("options", [
    {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"coordinate_transformation_mode": "align_corners", "nearest_mode": "ceil"},
    {},
])  # fmt: skip
def test_resize_copies_codes(options) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(
            g.node("Resize", [g.qdq(y, yq), "", g.floats([1, 1, 2, 1.5])], mode="nearest", **options), yq
        )
        z, zq = conv(g, y, yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 6, 4)

    converts(build, "LowBitConv", "LowBitResize", "LowBitConv")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_between_two_grids(mode: str) -> None:
    def build(g: Graph) -> None:
        x, _ = image(g, kind="s8")
        y = g.node("Resize", [x, "", g.floats([1, 1, 2, 0.7])], mode=mode)
        output(g, g.qdq(y, g.act(0.05)), 2, 4, 12, 4)

    attributes = converts(build, "LowBitResize").attributes("LowBitResize")
    assert attributes["mode"] == mode
    assert "nearest_mode" not in attributes


@pytest.mark.parametrize(("options", "reason"), [
    ({"antialias": 1}, "antialias"),
    ({"coordinate_transformation_mode": "tf_crop_and_resize"}, "tf_crop_and_resize is not supported"),
    ({"cubic_coeff_a": -99.0, "mode": "cubic"}, "cubic_coeff_a"),
])  # fmt: skip
def test_resize_that_stays_says_why(options, reason) -> None:
    def build(g: Graph) -> None:
        g.opset = 19
        x, xq = image(g)
        roi = g.floats([0, 0, 0, 0, 1, 1, 1, 1])
        y = g.node("Resize", [x, roi, g.floats([1, 1, 2, 2])], **{"mode": "linear", **options})
        output(g, g.qdq(y, xq), 2, 4, 12, 12)

    refuses(build, "Resize", reason)


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_softmax_between_quantizers(axis: int) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("Softmax", [g.qdq(y, Quant(g.scale(0.1), yq.zero, yq.kind))], axis=axis)
        output(g, g.qdq(y, g.act(1 / 256, zero=0)), 2, 5, 4, 4)

    attributes = converts(build, "LowBitConv", "LowBitSoftmax").attributes("LowBitSoftmax")
    assert attributes.get("axis", -1) == {1: 3, -1: 2, 0: 0}[axis]


def test_softmax_of_all_dims_from_an_axis_on_stays() -> None:
    """What axis means before opset 13."""

    def build(g: Graph) -> None:
        g.opset = 12
        x, _ = image(g)
        output(g, g.qdq(g.node("Softmax", [x]), g.act(1 / 256, zero=0)), 2, 4, 6, 6)

    assert "Softmax" in converted(build).ops


def test_pairs_on_another_grid_round_twice() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(g.qdq(y, yq), Quant(yq.scale * np.float32(1.5), np.asarray(3), yq.kind))
        output(g, y, 2, 5, 4, 4)

    converts(build, "LowBitConv", "LowBitRequantize")


def test_pairs_on_the_same_grid_vanish() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(g.qdq(g.qdq(y, yq), yq), yq), 2, 5, 4, 4)

    converts(build, "LowBitConv")


def test_relu_on_codes_in_front_of_a_convolution() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        z, zq = conv(g, g.node("Relu", [g.qdq(y, yq)]), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    converts(build, "LowBitConv", "LowBitRequantize", "LowBitConv")


@pytest.mark.parametrize("kind", ["u8", "s8"])
@pytest.mark.parametrize("op", ["Relu", "Clip"])
def test_a_pair_before_relu_on_the_same_grid_vanishes(op: str, kind: str) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        yq = Quant(yq.scale, yq.zero if kind == "u8" else g.act(0.05, kind).zero, kind)
        y = g.qdq(y, yq)
        bounds = [g.const(np.float32(-0.26)), g.const(np.float32(0.4))] if op == "Clip" else []
        output(g, g.qdq(g.node(op, [y, *bounds]), yq), 2, 5, 4, 4)

    converts(build, "LowBitConv")
