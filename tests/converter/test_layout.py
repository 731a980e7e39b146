"""Where channels stand: views, moved axes, edges of the graph."""

from __future__ import annotations

import json

import lowbit
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.converter.graphs import conv, converted, converts, image, output, refuses
from tests.dialects.graphs.builder import TYPES, Graph, Quant, as_tensor
from tests.support import lowbit_session, stock_run


def between_convolutions(move, channels: int = 5):
    """conv -> Q -> DQ -> move -> conv -> Q -> DQ, with no pair behind the op that moves."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = move(g, g.qdq(y, yq))
        z, zq = conv(g, y, yq, channels=channels, kernel=1)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    return build


def test_tokens_stay_in_rows_between_matrix_products() -> None:
    """The map of a convolution becomes tokens as it is stored, and nothing is transposed behind it."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), out=8)
        y = g.node("Reshape", [g.qdq(y, yq), g.ints([2, 8, 16])])
        y = g.node("Transpose", [y], perm=[0, 2, 1])
        wq = g.weight_quant(8, axis=1)
        for _ in range(3):
            z = g.qdq(g.node("MatMul", [y, g.weight(g.codes((8, 8)), wq)]), yq)
            bias = g.dq(g.const(as_tensor(g.codes((8,), "u8"), "u8", "")), yq)
            z = g.qdq(g.node("Add", [bias, g.qdq(g.node("Sigmoid", [z]), yq)]), yq)
            y = g.qdq(g.node("Add", [y, z]), yq)
        output(g, y, 2, 16, 8)

    products = ["LowBitGemm", "LowBitLookup", "LowBitAdd", "LowBitAdd"] * 3
    converts(build, "LowBitConv", "Reshape", *products)


def test_slice() -> None:
    def move(g: Graph, y: str) -> str:
        return g.node("Slice", [y, g.ints([1, 0]), g.ints([4, 9]), g.ints([1, -1]), g.ints([1, 2])])

    result = converts(between_convolutions(move, channels=3), "LowBitConv", "Slice", "LowBitConv")
    assert result.constant("Slice", 3).tolist() == [3, 2]


def test_channels_shifted_along_time_stay_last() -> None:
    """A temporal shift: what is joined is stored in one order, and the constant among it follows."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((4, 4, 6, 6), step=float(quant.scale)), quant)
        y, yq = conv(g, x, quant, out=8)
        y = g.qdq(g.node("Reshape", [g.qdq(y, yq), g.ints([1, 4, 8, 4, 4])]), yq)

        def cut(value: str, axis: int, start: int, end: int) -> str:
            given = [value, g.ints([start]), g.ints([end]), g.ints([axis])]
            return g.qdq(g.node("Slice", given), yq)

        zeros = np.full((1, 1, 2, 4, 4), yq.zero, np.uint8)
        empty = g.dq(g.const(zeros), yq)
        later, earlier, rest = cut(cut(y, 1, 1, 4), 2, 0, 2), cut(cut(y, 1, 0, 3), 2, 2, 4), cut(y, 2, 4, 8)
        parts = [g.node("Concat", [later, empty], axis=1), g.node("Concat", [empty, earlier], axis=1)]
        y = g.node("Concat", [*(g.qdq(part, yq) for part in parts), rest], axis=2)
        y = g.qdq(g.node("Reshape", [g.qdq(y, yq), g.ints([4, 8, 4, 4])]), yq)
        z, zq = conv(g, y, yq, channels=8, kernel=1)
        output(g, g.qdq(z, zq), 4, 5, 4, 4)

    moves = ["Reshape", *["Slice"] * 5, *["LowBitConcat"] * 3, "Reshape"]
    converts(build, "LowBitConv", *moves, "LowBitConv")


def test_split() -> None:
    def move(g: Graph, y: str) -> str:
        return g.node("Split", [y, g.ints([2, 3])], outputs=2, axis=1)[1]

    result = converts(between_convolutions(move, channels=3), "LowBitConv", "Split", "LowBitConv")
    assert result.attributes("Split")["axis"] == 3


MOVES = {
    "Gather": (lambda g, y: g.node("Gather", [y, g.ints([3, 0, 1])], axis=2), 5),
    "Tile": (lambda g, y: g.node("Tile", [y, g.ints([1, 2, 1, 3])]), 10),
    "Expand": (lambda g, y: g.node("Expand", [y, g.ints([2, 5, 4, 4])]), 5),
    "ReduceMax": (lambda g, y: g.node("ReduceMax", [y], axes=[-3]), 1),
    "ReduceMin": (lambda g, y: g.node("ReduceMin", [y], axes=[2, 3]), 5),
}


@pytest.mark.parametrize("op", MOVES)
def test_ops_that_move_codes_or_choose_among_them(op: str) -> None:
    move, channels = MOVES[op]
    converts(between_convolutions(move, channels), "LowBitConv", op, "LowBitConv")


@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_space_to_depth_is_rows_side_by_side(kind: str) -> None:
    """No node that ONNX Runtime lacks on codes, and no Transpose, which copies short runs one by one."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g, size=8, kind=kind))
        y = g.qdq(g.node("SpaceToDepth", [g.qdq(y, yq)], blocksize=3), yq)
        z, zq = conv(g, y, yq, channels=45, kernel=1)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    converts(build, "LowBitConv", "Reshape", *["Slice"] * 3, "LowBitConcat", "Reshape", "LowBitConv")


def test_space_to_depth_of_an_image_reads_it_channels_last() -> None:
    """The focus of a detector: the quantizer of the image moves its channels."""

    def build(g: Graph) -> None:
        x, quant = image(g, channels=3, size=8)
        y = g.qdq(g.node("SpaceToDepth", [x], blocksize=2), quant)
        z, zq = conv(g, y, quant, channels=12)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    converts(build, "Reshape", "Slice", "Slice", "LowBitConcat", "Reshape", "LowBitConv")


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("pairs", [1, 2])
def test_space_to_depth_alone_moves_codes_of_many_channels(channels: int, pairs: int) -> None:
    """A node of few channels stays in float, which is faster, and says so."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.input((2, channels, 6, 6), step=float(quant.scale))
        y = g.node("SpaceToDepth", [g.qdq(x, quant) if pairs == 2 else x], blocksize=2)
        output(g, g.qdq(y, quant), 2, 4 * channels, 3, 3)

    result = converted(build)
    result.assert_equal()
    assert ("SpaceToDepth" in result.ops) == (channels == 3)
    if channels == 3:
        assert "stands alone" in result.reason("SpaceToDepth")


@pytest.mark.parametrize("axis", [1, -3])
def test_channels_in_another_order_are_an_order_of_the_weights(axis: int) -> None:
    """The optimizer leaves such a Gather of a detector's first Slices. A Pad is part of the window."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), out=4)
        y = g.node("Pad", [g.qdq(y, yq), g.ints([0, 0, 1, 1, 0, 0, 1, 1])])
        y = g.node("Gather", [y, g.ints([2, -4, 3, 1])], axis=axis)
        z, zq = conv(g, y, yq)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    converts(build, "LowBitConv", "LowBitConv")


@pytest.mark.parametrize(
    "indices", [[2, 0, 3, 3], [0, 1, 2], [[3, 2, 1, 0]]], ids=["twice", "fewer", "of rank 2"]
)
def test_channels_that_are_no_order_are_gathered(indices: list[object]) -> None:
    """Along the last axis ONNX Runtime copies bytes one by one, hence the Transposes."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), out=4)
        y = g.node("Gather", [g.qdq(y, yq), g.ints(indices)], axis=1)
        if isinstance(indices[0], list):
            y = g.node("Squeeze", [y, g.ints([1])])
        z, zq = conv(g, y, yq, channels=len(np.ravel(indices)), kernel=1)
        output(g, g.qdq(z, zq), "n", 5, "h", "w")

    result = converted(build)
    result.assert_equal()
    assert "Gather" in result.ops
    assert result.attributes("Gather")["axis"] == 1


def shuffled(g: Graph, y: str, quant: Quant, groups: int, sizes: list[int], whole: list[int]) -> str:
    """A shuffle of the channels of [N, C, ..], with a pair behind each of its nodes."""
    y = g.qdq(g.node("Reshape", [y, g.ints([sizes[0], groups, *sizes[1:]])]), quant)
    spatial = range(3, len(sizes) + 1)
    y = g.qdq(g.node("Transpose", [y], perm=[0, 2, 1, *spatial]), quant)
    return g.qdq(g.node("Reshape", [y, g.ints(whole)]), quant)


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("batch", [2, "batch"])
def test_shuffle_of_channels_keeps_them_last(groups: int, batch: int | str) -> None:
    """A Transpose of the image to [N, C, H, W] and back takes longer than the convolutions around it."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((batch, 4, 6, 6), step=float(quant.scale)), quant)
        y, yq = conv(g, x, quant, out=24)
        first = -1 if batch == "batch" else 2
        y = shuffled(g, g.qdq(y, yq), yq, groups, [first, 24 // groups, 4, 4], [first, 24, 4, 4])
        z, zq = conv(g, y, yq, channels=24, kernel=1)
        output(g, g.qdq(z, zq), batch, 5, 4, 4)

    result = converts(build, "LowBitConv", "Reshape", "Transpose", "Reshape", "LowBitConv")
    assert result.attributes("Transpose")["perm"] == [0, 1, 2, 4, 3]


def test_shuffle_of_the_channels_of_sequences_of_any_length() -> None:
    def product(g: Graph, x: str, xq: Quant, channels: int) -> tuple[str, Quant]:
        wq = g.weight_quant(6)
        y = g.node("Conv", [x, g.weight(g.codes((6, channels, 1), low=-127), wq)])
        return y, g.after(xq, wq, channels)

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        y, yq = product(g, g.qdq(g.input(("n", 4, "l"), step=float(quant.scale)), quant), quant, 4)
        z, zq = product(g, shuffled(g, g.qdq(y, yq), yq, 2, [0, 3, -1], [0, 6, -1]), yq, 6)
        output(g, g.qdq(z, zq), "n", 6, "l")

    result = converts(build, "LowBitConv", "Reshape", "Transpose", "Reshape", "LowBitConv")
    assert result.attributes("Transpose")["perm"] == [0, 1, 3, 2]


def test_sub_pixels_become_an_image_channels_last() -> None:
    """A DepthToSpace as older exporters write it: one Transpose, of six axes."""

    def move(g: Graph, y: str) -> str:
        y = g.node("Reshape", [y, g.ints([2, 3, 2, 2, 4, 4])])
        y = g.node("Transpose", [y], perm=[0, 1, 4, 2, 5, 3])
        return g.node("Reshape", [y, g.ints([2, 3, 8, 8])])

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g), out=12)
        z, zq = conv(g, move(g, g.qdq(y, yq)), yq, channels=3, kernel=1)
        output(g, g.qdq(z, zq), 2, 5, 8, 8)

    converts(build, "LowBitConv", "Reshape", "Transpose", "Reshape", "LowBitConv")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([2, 6, 4, 4], [2, 6, 16]),
        ([2, 6, 4, 4], [2, 24, 4]),
        ([2, 6, 4, 4], [12, 4, 4]),
        ([2, 6, 4, 4], [2, 3, 32]),
        ([2, 6, 4, 4], [1, 2, 1, 6, 2, 2, 4, 1]),
        ([2, 6, 4, 4], [4, 3, 8, 2]),
        ([2, 6, 4, 4], [192]),
        (["n", 6, 4, 4], [0, 6, -1]),
        (["n", 6, 4, 4], [-1, 2, 4, 4]),
        (["n", 6, "h", 4], [0, 2, 3, -1, 4]),
        (["n", 6, "h", "w"], [0, 0, -1]),
        (["n", 6, 1, 1], [-1, 6, 1]),
    ],
)
def test_reshapes_of_an_image_stored_channels_last(before: list[int | str], after: list[int]) -> None:
    """Axes that are split or joined alone, across each other, with sizes that only the run knows."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((before[0], 4, *before[2:]), step=float(quant.scale)), quant)
        y, yq = conv(g, x, quant, out=6, kernel=1)
        y = g.qdq(g.node("Reshape", [g.qdq(y, yq), g.ints(after)]), yq)
        output(
            g, g.qdq(g.node("Sigmoid", [y]), g.act(1 / 256, zero=0)), *(f"d{i}" for i in range(len(after)))
        )

    result = converted(build)
    assert result.ops["LowBitLookup"] == 1
    result.assert_equal()


def test_codes_that_onnxruntime_cannot_move_stay_real_numbers() -> None:
    """Codes of 4 bits in a type of their own, and a SpaceToDepth that Reshape cannot say."""

    def narrow(g: Graph) -> None:
        g.opset = 21
        quant = g.act(0.3, "u4")
        x = g.qdq(g.input((2, 4, 6, 6)), quant)
        output(g, g.node("Tile", [x, g.ints([1, 1, 2, 1])]), 2, 4, 12, 6)

    def wild(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((1, 3, "height", "width")), quant)
        output(g, g.qdq(g.node("SpaceToDepth", [x], blocksize=1), quant), 1, 3, "height", "width")

    for build in (narrow, wild):
        result = converted(build)
        (moved,) = (n for n in result.result.model.graph.node if n.op_type in ("Tile", "SpaceToDepth"))
        (maker,) = (n for n in result.result.model.graph.node if moved.input[0] in n.output)
        assert maker.op_type in ("DequantizeLinear", "LowBitDequantize")
        result.assert_equal()


def test_arg_max_reads_codes_in_their_own_layout() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.node("ArgMax", [g.qdq(y, Quant(yq.scale * 32, yq.zero, yq.kind))], axis=1, keepdims=0)
        g.output(y, (2, 4, 4), onnx.TensorProto.INT64)

    assert converts(build, "LowBitConv", "Cast", "ArgMax").attributes("ArgMax")["axis"] == 3


def test_arg_max_of_channels_with_scales_of_their_own_stays() -> None:
    def build(g: Graph) -> None:
        quant = Quant(g.scale(0.03, 4), np.full(4, 121), "u8", 1)
        x = g.qdq(g.input((2, 4, 6, 6)), quant)
        g.output(g.node("ArgMax", [x], axis=1), (2, 1, 6, 6), onnx.TensorProto.INT64)

    refuses(build, "ArgMax", "one scale per channel").assert_equal()


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


def test_codes_and_their_transpose_are_two_tensors() -> None:
    """Both stand for one stored tensor, in two orders of axes; each output gets its own."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        codes = g.q(y, yq)
        output(g, g.node("Transpose", [g.dq(codes, yq)], perm=[0, 1, 3, 2]), 2, 5, 4, 4)
        g.output(codes, (2, 5, 4, 4), TYPES[yq.kind][0])

    converted(build).assert_equal()


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


def _cubic_resize_of_codes(opset: int, numbers: str, bounds: tuple[int, int] | None) -> onnx.ModelProto:
    """QLinearConv -> [Clip ->] cubic Resize of its codes -> QLinearConv."""
    rng = np.random.default_rng(0)
    constants: dict[str, np.ndarray | np.generic] = {
        "scale": np.float32(0.1),
        "zero": np.uint8(100),
        "w_scale": np.float32(0.02),
        "w_zero": np.int8(0),
        "empty": np.zeros(0, np.float32),
        "scales": np.array([1, 1, 2, 3], np.float32),
        "sizes": np.array([1, 8, 12, 18], np.int64),
        "image": np.array([18, 12], np.int64),
        **{f"w{i}": rng.integers(-20, 20, (8, 8, 1, 1)).astype(np.int8) for i in range(2)},
        **{f"bound{i}": np.uint8(bound) for i, bound in enumerate(bounds or ())},
    }

    def conv(x: str, y: str, i: int) -> onnx.NodeProto:
        inputs = [x, "scale", "zero", f"w{i}", "w_scale", "w_zero", "scale", "zero"]
        return helper.make_node("QLinearConv", inputs, [y], y)

    given = {"scales": ["scales"], "sizes": ["empty", "sizes"], "image": ["", "image"]}[numbers]
    axes = {"axes": [3, 2]} if numbers == "image" else {}
    bounded = "c" if bounds else "a"
    nodes = [
        conv("x", "a", 0),
        *([helper.make_node("Clip", ["a", "bound0", "bound1"], ["c"], "c")] if bounds else []),
        helper.make_node("Resize", [bounded, "empty", *given], ["b"], "b", mode="cubic", **axes),
        conv("b", "y", 1),
    ]
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "cubic_resize_of_codes",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["n", 8, 6, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, ["n", 8, 12, 18])],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items() if name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


@pytest.mark.parametrize(
    ("opset", "numbers", "bounds"),
    [(11, "scales", None), (17, "sizes", None), (17, "scales", (97, 104)), (18, "image", None)],
)
def test_a_cubic_resize_of_codes_needs_no_optimizer(opset, numbers, bounds) -> None:
    """ONNX Runtime's CPU provider runs it channels last alone, and does not move what a GPU's takes."""
    model = _cubic_resize_of_codes(opset, numbers, bounds)
    result = lowbit.convert(model)
    assert not result.report.kept
    assert [node.op_type for node in result.model.graph.node if node.op_type != "Transpose"] == [
        "LowBitConv", "Resize", "LowBitConv",
    ]  # fmt: skip
    feeds = {"x": np.random.default_rng(1).integers(0, 256, (1, 8, 6, 6)).astype(np.uint8)}
    found = [
        lowbit_session(result.model, optimize=optimize).run(None, feeds)[0] for optimize in (False, True)
    ]
    # With axes, ONNX Runtime's optimizer breaks the Resize of the source; the same sizes without are equal.
    stock = _cubic_resize_of_codes(17, "sizes", None) if numbers == "image" else model
    (meant,) = stock_run(stock, feeds)
    for ours in found:
        np.testing.assert_array_equal(ours, meant)


def test_real_numbers_are_joined_cut_and_turned_as_they_are_stored() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        reals = [conv(g, x, xq, kernel=1)[0] for _ in range(2)]
        parts = g.node("Split", [g.node("Concat", reals, axis=-3), g.ints([3, 7])], axis=1, outputs=2)
        output(g, g.node("Transpose", [parts[0]], perm=[0, 2, 3, 1]), 2, 6, 6, 3)
        output(g, g.node("Transpose", [parts[1]]), 6, 6, 7, 2)
        output(g, g.node("Reshape", [g.node("Relu", [parts[1]]), g.ints([2, 7, 36])]), 2, 7, 36)

    # The first result is stored as it is wanted.
    converts(build, *["LowBitConv"] * 2, "Concat", "Split", *["Transpose"] * 2, "Relu", "Reshape")
