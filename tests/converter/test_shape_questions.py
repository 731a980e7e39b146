"""Shapes that a model asks for when it runs: codes answer, and no float tensor is computed for them alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.converter.graphs import Converted, conv, converted, output
from tests.dialects.graphs.builder import Graph, Quant
from tests.support import FLOAT_MATMULS, lowbit_session, stock_run

FLOAT = {*FLOAT_MATMULS, "Relu", "MaxPool", "QuantizeLinear", "DequantizeLinear"}


def alone(build: Callable[[Graph], None], *, floats: tuple[str, ...] = ()) -> Converted:
    """Converts a graph, compares it with stock ONNX Runtime, and finds no float work left."""
    result = converted(build)
    session = lowbit_session(result.result.model)
    for seed, sizes in enumerate(result.built.sizes):
        feeds = result.built.feed(seed, **sizes)
        stock = stock_run(result.built.model, feeds, optimize=False)
        for mine, theirs in zip(session.run(None, feeds), stock, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    left = [op for op in result.ops.elements() if op in FLOAT]
    assert sorted(left) == sorted(floats)
    names = [node.name for node in result.result.model.graph.node]
    assert len(names) == len(set(names))
    return result


def convolution(g: Graph, *dims: int | str) -> tuple[str, Quant]:
    """A convolution of an image [n, 4, h, w]; its float result and a quantizer for it."""
    quant = g.act(0.03)
    x = g.input(dims or ("n", 4, "h", "w"), step=float(quant.scale))
    return conv(g, g.qdq(x, quant), quant, pads=[1, 1, 1, 1])


def dim(g: Graph, shape: str, axis: int) -> str:
    return g.node("Unsqueeze", [g.node("Gather", [shape, g.ints(axis)], axis=0), g.ints([0])])


@pytest.mark.parametrize("asks", ["product", "relu", "pair", "function"])
def test_view_as_rows(asks: str) -> None:
    """``x.view(x.size(0), -1)`` before a matrix product: a Reshape with a 0, which the product absorbs."""

    def build(g: Graph) -> None:
        y, yq = convolution(g, "n", 4, 6, 6)
        relu = g.node("Relu", [y])
        real = g.qdq(relu, yq)
        asked = {"product": y, "relu": relu, "pair": real}.get(asks) or g.node("Sigmoid", [relu])
        size = g.node("Concat", [dim(g, g.node("Shape", [asked]), 0), g.ints([-1])], axis=0)
        weights = g.weight(g.codes((5 * 36, 3), low=-127), g.weight_quant(3, axis=1))
        z = g.node("MatMul", [g.node("Reshape", [real, size]), weights])
        output(g, g.qdq(z, g.act(1.0)), "n", 3)

    result = alone(build)
    assert result.ops == {"LowBitQuantize": 1, "LowBitConv": 1, "LowBitGemm": 1, "LowBitDequantize": 1}


def test_shuffle_of_channels_of_an_image_of_any_size() -> None:
    def build(g: Graph) -> None:
        y, yq = convolution(g)
        real = g.qdq(g.node("Relu", [y]), yq)
        joined = g.node("Concat", [real, real], axis=1)
        shape = g.node("Shape", [joined])
        joined = g.qdq(joined, yq)
        n, h, w = (dim(g, shape, axis) for axis in (0, 2, 3))
        groups = g.node("Concat", [n, g.ints([2]), g.ints([5]), h, w], axis=0)
        moved = g.node("Transpose", [g.node("Reshape", [joined, groups])], perm=[0, 2, 1, 3, 4])
        whole = g.node("Reshape", [moved, g.node("Concat", [n, g.ints([10]), h, w], axis=0)])
        z, zq = conv(g, g.qdq(whole, yq), yq, channels=10)
        output(g, g.qdq(z, zq), "n", 5, "h2", "w2")

    result = alone(build)
    assert result.ops["LowBitConv"] == 2
    assert result.ops["LowBitConcat"] == 1


@pytest.mark.parametrize("open_dim", ["channels", "group"])
def test_shuffle_of_channels_that_leaves_a_dim_open(open_dim: str) -> None:
    """[n, 2, -1, h, w] and [n, -1, h, w]: the channels follow from the others, and stay last."""

    def build(g: Graph) -> None:
        y, yq = convolution(g, "n", 4, 6, 6)
        real = g.qdq(g.node("Relu", [y]), yq)
        joined = g.qdq(g.node("Concat", [real, real], axis=1), yq)
        n, h, w = (dim(g, g.node("Shape", [joined]), axis) for axis in (0, 2, 3))
        each = -1 if open_dim == "group" else 5
        groups = g.node("Concat", [n, g.ints([2]), g.ints([each]), h, w], axis=0)
        split = g.qdq(g.node("Reshape", [joined, groups]), yq)
        moved = g.qdq(g.node("Transpose", [split], perm=[0, 2, 1, 3, 4]), yq)
        n, h, w = (dim(g, g.node("Shape", [moved]), axis) for axis in (0, 3, 4))
        whole = g.node("Reshape", [moved, g.node("Concat", [n, g.ints([-1]), h, w], axis=0)])
        z, zq = conv(g, g.qdq(whole, yq), yq, channels=10)
        output(g, g.qdq(z, zq), "n", 5, 4, 4)

    result = alone(build)
    assert result.ops["Transpose"] == 1, result.result.report.warnings


@pytest.mark.parametrize(("start", "end"), [(None, None), (1, None), (None, -1), (-2, 9), (3, 1)])
def test_part_of_a_shape_of_codes_stored_channels_last(start: int | None, end: int | None) -> None:
    def build(g: Graph) -> None:
        g.opset = 15
        y, yq = convolution(g)
        part = {name: value for name, value in (("start", start), ("end", end)) if value is not None}
        shape = g.node("Shape", [g.node("Relu", [y])], **part)
        output(g, g.qdq(y, yq), "n", 5, "h", "w")
        g.outputs.append(helper.make_tensor_value_info(g.node("Neg", [shape]), TensorProto.INT64, None))
        g.outputs.append(helper.make_tensor_value_info(shape, TensorProto.INT64, None))

    result = alone(build)
    assert result.ops["LowBitConv"] == 1
    assert "Transpose" not in result.ops


def test_size_of_codes() -> None:
    def build(g: Graph) -> None:
        y, yq = convolution(g)
        output(g, g.qdq(y, yq), "n", 5, "h", "w")
        g.outputs.append(helper.make_tensor_value_info(g.node("Size", [y]), TensorProto.INT64, []))

    alone(build)


def test_resize_to_the_size_of_another_tensor() -> None:
    """A pyramid: the answer must not be asked of what depends on it, the sum behind the Resize."""

    def build(g: Graph) -> None:
        y, yq = convolution(g)
        lateral = g.qdq(y, yq)
        small, _ = conv(g, lateral, yq, channels=5, strides=[2, 2], pads=[1, 1, 1, 1])
        small = g.qdq(small, yq)
        size = g.node(
            "Concat",
            [*(dim(g, g.node("Shape", [small]), axis) for axis in (0, 1)),
             *(dim(g, g.node("Shape", [y]), axis) for axis in (2, 3))],
            axis=0,
        )  # fmt: skip
        large = g.node("Resize", [small, "", "", size], mode="nearest", nearest_mode="floor",
                       coordinate_transformation_mode="asymmetric")  # fmt: skip
        total = g.node("Add", [g.qdq(large, yq), lateral])
        z, zq = conv(g, g.qdq(total, yq), yq, channels=5)
        output(g, g.qdq(z, zq), "n", 5, "h2", "w2")

    result = alone(build, floats=("DequantizeLinear", "QuantizeLinear"))  # of the Resize
    assert result.ops["LowBitConv"] == 3


def test_a_branch_that_asks() -> None:
    def build(g: Graph) -> None:
        y, yq = convolution(g)
        relu = g.node("Relu", [y])
        real = g.qdq(relu, yq)
        info = [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in ("then_y", "else_y")]
        branches = {
            "then_branch": helper.make_graph(
                [helper.make_node("Shape", [relu], ["then_y"])], "then", [], info[:1]
            ),
            "else_branch": helper.make_graph(
                [helper.make_node("Size", [y], ["size"]), helper.make_node("Neg", ["size"], ["else_y"])],
                "else", [], info[1:],
            ),
        }  # fmt: skip
        condition = g.node("Greater", [g.input((1,), name="condition"), g.floats([0.0])])
        z, zq = conv(g, real, yq, channels=5)
        output(g, g.qdq(z, zq), "n", 5, "h2", "w2")
        shape = g.node("If", [condition], **branches)
        g.outputs.append(helper.make_tensor_value_info(shape, TensorProto.INT64, None))

    assert alone(build).ops["LowBitConv"] == 2


@pytest.mark.parametrize("op_type", ["Slice", "Reshape", "Split", "Expand", "Tile"])
def test_parameters_that_are_computed_from_the_codes_that_they_move(op_type: str) -> None:
    """What computes them is part of the graph like anything else: it reads the new tensors."""

    def build(g: Graph) -> None:
        y, yq = convolution(g)
        real = g.qdq(y, yq)
        shape = g.node("Shape", [real])
        two, half = g.ints([2]), g.node("Div", [dim(g, shape, 3), g.ints([2])])
        rest = g.node("Sub", [dim(g, shape, 3), half])
        zero, one = g.ints([0]), g.ints([1])
        operands = {
            "Slice": [real, zero, half, g.ints([3])],
            "Reshape": [real, g.node("Concat", [dim(g, shape, 3), two, g.ints([-1])], axis=0)],
            "Split": [real, g.node("Concat", [half, rest], axis=0)],
            "Expand": [g.node("Unsqueeze", [real, zero]), g.node("Concat", [half, *[one] * 4], axis=0)],
            "Tile": [real, g.node("Concat", [one, one, one, half], axis=0)],
        }[op_type]  # fmt: skip
        if op_type == "Split":
            y = g.node("Split", operands, outputs=2, axis=3)[1]
        else:
            y = g.node(op_type, operands)
        g.outputs.append(helper.make_tensor_value_info(g.qdq(y, yq), TensorProto.FLOAT, None))

    if op_type == "Reshape":
        result = converted(build)
        feeds = result.built.feed(0, n=2, h=4, w=6)
        ours = lowbit_session(result.result.model).run(None, feeds)
        np.testing.assert_array_equal(ours[0], stock_run(result.built.model, feeds, optimize=False)[0])
    else:
        result = alone(build)
    assert result.ops["LowBitConv"] == 1


def test_static_shapes_are_numbers() -> None:
    def build(g: Graph) -> None:
        y, yq = convolution(g, 2, 4, 6, 6)
        real = g.qdq(y, yq)
        shape = g.node("Shape", [y])
        half = g.node("Div", [dim(g, shape, 1), g.ints([5])])
        real = g.node("Reshape", [real, g.node("Concat", [dim(g, shape, 0), half, g.ints([-1])], axis=0)])
        z = g.node("MatMul", [real, g.weight(g.codes((180, 7), low=-127), g.weight_quant(7, axis=1))])
        output(g, g.qdq(z, g.act(1.0)), 2, 1, 7)

    result = alone(build)
    assert not {"Shape", "Gather", "Concat", "Div"} & result.ops.keys()


def test_a_model_that_stays_keeps_its_questions() -> None:
    """Nothing converts here; the answer is the same all the same."""

    def build(g: Graph) -> None:
        x = g.input(("n", 4))
        y = g.node("Sin", [g.qdq(g.node("Relu", [x]), g.act(0.03))])
        output(g, y, "n", 4)
        shape = g.node("Shape", [y])
        g.outputs.append(onnx.helper.make_tensor_value_info(shape, TensorProto.INT64, [2]))

    alone(build, floats=("Relu", "QuantizeLinear", "DequantizeLinear"))


def test_the_batch_of_a_slice_is_not_the_batch_of_the_whole() -> None:
    """ONNX's inference names the first dim of ``x[0:1]`` as that of ``x``."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input(("n", 4, 6), step=float(quant.scale)), quant)
        first = g.node("Slice", [x, g.ints([0]), g.ints([1]), g.ints([0])])
        size = g.node("Concat", [dim(g, g.node("Shape", [first]), 0), g.ints([-1])], axis=0)
        output(g, g.node("Reshape", [x, size]), "a", "b")

    alone(build, floats=("DequantizeLinear", "QuantizeLinear"))


def test_a_long_row_of_reshapes_by_computed_sizes() -> None:
    """Each asks for the size of what the one before made, in int32 as Paddle does, which hides the rank."""

    def build(g: Graph) -> None:
        y, yq = convolution(g, "n", 4, 6, 6)
        real = g.qdq(y, yq)
        for sizes in [(5, 36), (5, 6, 6)] * 4:
            asked = g.node("Cast", [g.node("Shape", [real])], to=TensorProto.INT32)
            n = g.node("Slice", [asked, g.ints([0]), g.ints([1]), g.ints([0])])
            known = [g.node("Cast", [g.ints([size])], to=TensorProto.INT32) for size in sizes]
            size = g.node("Cast", [g.node("Concat", [n, *known], axis=0)], to=TensorProto.INT64)
            real = g.qdq(g.node("Sigmoid", [g.qdq(g.node("Reshape", [real, size]), yq)]), yq)
        z, zq = conv(g, real, yq, channels=5)
        output(g, g.qdq(z, zq), "n", 5, 4, 4)

    result = alone(build)
    assert result.ops["LowBitConv"] == 2


def test_the_batch_of_a_slice_does_not_tell_an_open_dim() -> None:
    """[n, 4, 6, 6] reshaped to [1, -1]: ONNX's inference calls the 1 n, and 144 would be left over."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input(("n", 4, 6, 6), step=float(quant.scale)), quant)
        first = g.node("Slice", [x, g.ints([0]), g.ints([1]), g.ints([0])])
        size = g.node("Concat", [dim(g, g.node("Shape", [first]), 0), g.ints([-1])], axis=0)
        rows = g.qdq(g.node("Reshape", [x, size]), quant)
        output(g, g.qdq(g.node("Sigmoid", [rows]), g.act(1 / 256, zero=0)), "a", "b")

    alone(build)


FACTORS = np.linspace(0.5, 2, 5, dtype=np.float32).reshape(5, 1, 1)


@pytest.mark.parametrize("asked", ["factor", "slope", "softmax", "clipped", "widened", "pair", "moved"])
def test_questions_about_functions_of_codes(asked: str) -> None:
    """Codes answer where a function keeps the shape, and nowhere else."""

    def build(g: Graph) -> None:
        y, yq = convolution(g, "n", 4, 6, 6)
        codes = g.q(y, yq)
        if asked == "clipped":
            low, high = (g.const(np.asarray(bound, np.uint8)) for bound in (3, 200))
            codes = g.node("Clip", [codes, low, high])
        real = g.dq(codes, yq)
        about = {
            "factor": lambda: g.node("Mul", [y, g.floats(FACTORS)]),
            "slope": lambda: g.node("PRelu", [y, g.floats(FACTORS)]),
            "softmax": lambda: g.node("Softmax", [real], axis=1),
            "clipped": lambda: y,
            "widened": lambda: g.node("Mul", [y, g.floats(np.ones((2, 1, 5, 1, 1)))]),
            "pair": lambda: g.node("Add", [y, g.node("Relu", [y])]),
            "moved": lambda: g.node("Transpose", [y], perm=[0, 2, 3, 1]),
        }[asked]()
        output(g, real, "n", 5, 4, 4)
        g.outputs.append(helper.make_tensor_value_info(g.node("Shape", [about]), TensorProto.INT64, None))

    result = converted(build)
    for seed, sizes in enumerate(result.built.sizes):
        feeds = result.built.feed(seed, **sizes)
        stock = stock_run(result.built.model, feeds, optimize=False)
        for mine, theirs in zip(lowbit_session(result.result.model).run(None, feeds), stock, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    if asked in ("factor", "slope", "softmax", "clipped"):
        assert not {"Mul", "PRelu", "Softmax", "Conv"} & {*result.ops}, result.ops


@pytest.mark.parametrize("transposed", [False, True])
def test_behind_an_op_that_says_nothing_of_its_output(transposed: bool) -> None:
    """ONNX does not know ONNX Runtime's QuickGelu: weights tell the rank of what they meet."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.node("QuickGelu", [g.input([1, 4, 6, 6], step=0.03)], domain="com.microsoft", alpha=1.0)
        x = g.qdq(g.node("Relu", [x]), quant)
        if transposed:
            weights = g.weight(g.codes((4, 8, 3, 3), low=-127), g.weight_quant(None))
            y = g.node("ConvTranspose", [x, weights], pads=[1, 1, 1, 1])
        else:
            y = conv(g, x, quant, pads=[1, 1, 1, 1])[0]
        output(g, g.qdq(y, g.act(1.0)), 1, 8 if transposed else None, 6, 6)

    result = alone(build, floats=("Relu",))
    assert result.ops["LowBitConvTranspose" if transposed else "LowBitConv"] == 1
