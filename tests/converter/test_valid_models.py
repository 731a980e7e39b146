"""Valid models that an assumption of the converter once refused: each converts, and computes what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.converter.graphs import Converted, conv, converted, image, output
from tests.dialects.graphs.builder import Graph, Quant
from tests.hostile.random_sources import random_source
from tests.support import lowbit_session, stock_run


def agrees(build, **sizes: int) -> Converted:
    """Converts a graph and compares it with stock ONNX Runtime, unoptimized, which follows the graph."""
    result = converted(build)
    feeds = result.built.feed(**sizes)
    ours = lowbit_session(result.result.model).run(None, feeds)
    for mine, stock in zip(ours, stock_run(result.built.model, feeds, optimize=False), strict=True):
        assert mine.dtype == stock.dtype
        np.testing.assert_array_equal(mine, stock)
    return result


def subgraph(name: str, nodes: list[onnx.NodeProto], result: str) -> onnx.GraphProto:
    info = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [info])


def test_branches_of_an_if_return_tensors_of_the_graph_around_them() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(g.node("Identity", [y]), yq)
        condition = g.node("Greater", [g.input((1,), name="condition"), g.floats([0.0])])
        branches = {
            "then_branch": subgraph("then", [helper.make_node("Identity", [y], ["then_y"])], "then_y"),
            "else_branch": subgraph("else", [helper.make_node("Relu", [y], ["else_y"])], "else_y"),
        }
        z, zq = conv(g, g.qdq(g.node("If", [condition], **branches), yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    assert agrees(build).ops["LowBitConv"] == 2


def test_clips_on_codes_in_a_branch_stay_there() -> None:
    """A subgraph reads the codes of a pair that moving would drop, or rounds what a move makes."""

    def build(g: Graph) -> None:
        x, quant = image(g)
        x = g.node("MaxPool", [x], kernel_shape=[2, 2])
        codes = g.q(x, quant)
        low, high = g.const(np.uint8(100)), g.const(np.uint8(120))
        clip = helper.make_node("Clip", [codes, low, high], ["clipped"])
        branch = helper.make_graph(
            [clip, helper.make_node("Cast", ["clipped"], ["then_y"], to=1)], "then", [],
            [helper.make_tensor_value_info("then_y", TensorProto.FLOAT, None)],
        )  # fmt: skip
        other = subgraph("else", [helper.make_node("Relu", [g.dq(codes, quant)], ["else_y"])], "else_y")
        condition = g.node("Greater", [g.input((1,), name="condition"), g.floats([0.0])])
        output(g, g.node("If", [condition], then_branch=branch, else_branch=other), 2, 4, 5, 5)

    agrees(build)


def test_loops_and_their_captured_codes() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        codes = g.q(y, yq)
        y = g.dq(codes, yq)
        values = [
            helper.make_tensor_value_info(name, element, [])
            for name, element in (("i", 7), ("go", 9), ("go_on", 9))
        ]
        carried = [helper.make_tensor_value_info(name, 1, [2, 5, 4, 4]) for name in ("a", "b")]
        nodes = [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Cast", [codes], ["as_float"], to=1),
            helper.make_node("Add", ["a", "as_float"], ["b"]),
        ]
        body = helper.make_graph(nodes, "body", [*values[:2], carried[0]], [values[2], carried[1]])
        output(g, g.node("Loop", [g.ints(3), "", y], body=body), 2, 5, 4, 4)

    assert agrees(build).ops["LowBitConv"] == 1


def test_a_loop_without_end_keeps_its_empty_inputs() -> None:
    """It has neither a number of rounds nor a condition, which is said by empty names."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        values = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("go", "go_on")]
        round_ = helper.make_tensor_value_info("i", TensorProto.INT64, [])
        nodes = [
            helper.make_node("Constant", [], ["last"], value=helper.make_tensor("last", 7, [], [2])),
            helper.make_node("Less", ["i", "last"], ["go_on"]),
            helper.make_node("Relu", [y], ["row"]),
        ]
        row = helper.make_tensor_value_info("row", TensorProto.FLOAT, None)
        body = helper.make_graph(nodes, "body", [round_, values[0]], [values[1], row])
        output(g, g.node("Loop", ["", ""], body=body), 3, 2, 5, 4, 4)

    assert agrees(build).ops["LowBitConv"] == 1


@pytest.mark.parametrize("training", [None, False, True])
def test_a_dropout_that_drops_nothing_is_no_obstacle(training: bool | None) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        operands = [] if training is None else [g.floats(0.0), g.const(np.asarray(training))]
        y, _ = g.node("Dropout", [g.qdq(y, yq), *operands], outputs=2)
        z, zq = conv(g, y, yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    assert agrees(build).ops["LowBitConv"] == (1 if training else 2)


def test_what_is_written_about_an_output_stays() -> None:
    """Behind an Identity, too, which is dropped."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.node("Identity", [g.qdq(y, yq)]), 2, 5, 4, 4)
        g.outputs[0].doc_string = "what it is"

    (info,) = agrees(build).result.model.graph.output
    assert info.doc_string == "what it is"


@pytest.mark.parametrize("said", ["no shape", "no type"])
def test_outputs_that_say_little(said: str) -> None:
    """The codes that a Gemm, an Add and a Concat read are outputs of the model at the same time."""

    def build(g: Graph) -> None:
        quant = g.act(0.03, "s8")
        a, b = (g.q(g.input((3, 8)), quant) for _ in range(2))
        a, b = (g.dq(codes, quant) for codes in (a, b))
        total = g.act(0.05, "s8")
        codes = [
            g.q(g.node("Add", [a, b]), total),
            g.q(g.node("Concat", [a, b], axis=1), total),
        ]
        weights = [g.weight(g.codes((n, 4), low=-127), g.weight_quant(4, axis=1)) for n in (8, 16)]
        products = [g.node("MatMul", [g.dq(c, total), w]) for c, w in zip(codes, weights, strict=True)]
        ends = [g.q(product, g.act(2.0)) for product in products]
        for value, element in (*((c, 3) for c in codes), *((e, 2) for e in ends)):
            if said == "no type":
                g.outputs.append(onnx.ValueInfoProto(name=value))
            else:
                g.outputs.append(helper.make_tensor_value_info(value, element, None))

    result = agrees(build)
    assert result.ops["LowBitGemm"] == 2
    for info, given in zip(result.result.model.graph.output, result.built.model.graph.output, strict=True):
        assert info == given


def _odd_bias(g: Graph, y: str) -> str:
    next(n for n in g.nodes if n.op_type == "Conv").input[2] = g.floats([np.inf, 0, np.nan, 1, 2])
    return y


def _odd_addend(g: Graph, y: str) -> str:
    return g.node("Add", [y, g.floats([[[np.inf]], [[0]], [[np.nan]], [[1]], [[2]]])])


def _odd_batch_normalization(g: Graph, y: str) -> str:
    parameters = [[1, 2, 3, 4, 5], [0, 0, np.inf, 0, 0], [0] * 5, [0, 1, -1, 1, 1]]
    return g.node("BatchNormalization", [y, *map(g.floats, parameters)], epsilon=0.0)


@pytest.mark.parametrize("make", [_odd_bias, _odd_addend, _odd_batch_normalization])
def test_constants_that_are_not_finite(make: Callable[[Graph, str], str]) -> None:
    """They stay with a reason; the check of the result has nothing to take back."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(make(g, y), yq), 2, 5, 4, 4)

    result = converted(build)
    assert any("not finite" in str(node.reason) for node in result.result.report.kept)
    # Optimized, ONNX Runtime rounds an infinite bias to an integer.
    (ours,) = lowbit_session(result.result.model, optimize=False).run(None, result.built.feed())
    (stock,) = stock_run(result.built.model, result.built.feed(), optimize=False)
    np.testing.assert_array_equal(ours, stock)


def test_a_bias_that_counts_for_nothing() -> None:
    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((3, 8), step=float(quant.scale)), quant)
        w = g.weight(g.codes((8, 4), low=-127), g.weight_quant(4, axis=1))
        y = g.node("Gemm", [x, w, g.floats([np.inf, 1, 2, 3])], beta=0.0)
        output(g, g.qdq(y, g.act(0.5)), 3, 4)

    assert agrees(build).ops["LowBitGemm"] == 1


@pytest.mark.parametrize("as_file", [False, True])
def test_negative_dims_are_open(as_file: bool, tmp_path: Path) -> None:
    """Exporters of PaddlePaddle write -1."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    built = converted(build).built
    model = onnx.ModelProto()
    model.CopyFrom(built.model)
    for info in (*model.graph.input, *model.graph.output):
        for axis in (0, 2, 3):
            info.type.tensor_type.shape.dim[axis].dim_value = -1
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    source = path if as_file else model
    result = lowbit.convert(source)
    assert not result.report.kept
    assert lowbit.verify(result, source, data=built.feed()).ok


def test_a_constant_as_output_without_an_element_type() -> None:
    def build(g: Graph) -> None:
        x, quant = image(g)
        y, yq = conv(g, x, quant)
        output(g, g.qdq(y, yq), 2, 5, 4, 4)
        g.constants = "node"
        g.outputs.append(onnx.ValueInfoProto(name=g.floats([1.0, 2.0])))
        g.outputs[-1].type.tensor_type.SetInParent()

    assert agrees(build).ops["LowBitConv"] == 1


def test_a_quantizer_per_channel_behind_a_pair_per_tensor() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        channels = Quant(g.scale(0.05, 5), np.array([3, 100, 128, 0, 255]), "u8", 1)
        output(g, g.qdq(y, channels), 2, 5, 4, 4)
        output(g, g.qdq(g.node("Relu", [y]), channels), 2, 5, 4, 4)

    result = agrees(build)
    assert result.ops["LowBitRequantize"] == 1


@pytest.mark.parametrize(
    "place", ["before a convolution", "before a pair", "behind a convolution", "on codes"]
)
def test_a_clip_between_no_numbers(place: str) -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        real = y if place == "behind a convolution" else g.qdq(y, yq)
        if place == "on codes":
            real = g.dq(g.node("Clip", [g.q(y, yq), g.const(np.uint8(9)), ""]), yq)
        real = g.node("Clip", [real, g.floats(np.nan), g.floats(0.5)])
        z, zq = conv(g, real if place == "before a convolution" else g.qdq(real, yq), yq, channels=5)
        output(g, g.qdq(z, zq), 2, 5, 2, 2)

    agrees(build)


@pytest.mark.parametrize("opset", [10, 11, 12])
@pytest.mark.parametrize("op_type", ["MaxPool", "DepthToSpace", "Flatten", "Squeeze", "Slice", "Resize"])
@pytest.mark.parametrize("where", ["behind a pair", "before a pair", "between pairs"])
def test_moves_of_codes_that_old_opsets_do_not_have(op_type: str, opset: int, where: str) -> None:
    def build(g: Graph) -> None:
        g.opset, g.ir_version = opset, {10: 5, 11: 6, 12: 7}[opset]
        x, quant = g.input((1, 4, 6, 6)), g.act(0.03, "s8")
        x = x if where == "before a pair" else g.qdq(x, quant)
        parameters = {
            "MaxPool": {"kernel_shape": [2, 2]},
            "DepthToSpace": {"blocksize": 2},
            "Squeeze": {"axes": [0]},
            "Resize": {"mode": "nearest"},
        }
        operands = {"Slice": [g.ints([1]), g.ints([3])], "Resize": [g.floats([1, 1, 2, 2])]}
        if opset > 10:
            operands["Resize"] = [g.floats(np.zeros(0)), *operands["Resize"]]
        y = g.node(op_type, [x, *operands.get(op_type, ())], **parameters.get(op_type, {}))
        y = y if where == "behind a pair" else g.qdq(y, quant)
        g.outputs.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, None))

    agrees(build)


@pytest.mark.parametrize(
    "op_type", ["Flatten", "Reshape", "Transpose", "Squeeze", "MaxPool", "Concat", "Pad"]
)
@pytest.mark.parametrize("of", ["an input", "a convolution"])
def test_moves_of_codes_below_a_byte(op_type: str, of: str) -> None:
    """ONNX Runtime has no kernel for most of them."""

    def build(g: Graph) -> None:
        g.opset, g.ir_version = 21, 10
        quant = g.act(0.3, "u4", zero="low")
        x = g.input((1, 5, 4, 4)) if of == "an input" else conv(g, *image(g))[0]
        x = g.qdq(x, quant)
        parameters = {"MaxPool": {"kernel_shape": [2, 2]}, "Concat": {"axis": 1}}
        rows = 1 if of == "an input" else 2
        operands = {
            "Reshape": [g.ints([rows, -1])],
            "Squeeze": [g.ints([0])] if of == "an input" else [],
            "Concat": [x],
            "Pad": [g.ints([0, 0, 1, 1, 0, 0, 1, 1])],
        }
        y = g.node(op_type, [x, *operands.get(op_type, ())], **parameters.get(op_type, {}))
        g.outputs.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, None))

    agrees(build)


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_pads_that_repeat_codes_and_state_a_value_all_the_same(mode: str) -> None:
    def build(g: Graph) -> None:
        x, quant = image(g)
        pads = [0, 0, 1, 1, 0, 0, 1, 1]
        output(g, g.node("Pad", [x, g.ints(pads), g.floats(1.0)], mode=mode), 2, 4, 8, 8)
        raised = g.node("Pad", [g.input((2, 4, 6, 6)), g.ints(pads), g.floats(1.0)], mode=mode)
        output(g, g.qdq(raised, quant), 2, 4, 8, 8)

    agrees(build)


def of_unknown_size(g: Graph, x: str, *size: int) -> str:
    """A tensor of which inference knows the rank alone: it is cut at an end that is fed."""
    ends = g.input((len(size),), "s32", name="ends")
    g.feeds["ends"] = lambda rng, dims: np.array(size, np.int32)
    axes = [g.const(np.array(values, np.int32)) for values in ([0] * len(size), range(len(size)))]
    return g.node("Slice", [x, axes[0], ends, axes[1]])


def test_products_whose_features_have_no_stated_size() -> None:
    """What ``x.view(x.size(0), -1)`` comes to where inference knows neither the batch nor the features."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = of_unknown_size(g, g.qdq(g.input((4, 90)), quant), 3, 80)
        y = g.node(
            "MatMul", [g.qdq(x, quant), g.weight(g.codes((80, 7), low=-127), g.weight_quant(7, axis=1))]
        )
        output(g, g.qdq(y, g.act(1.0)), 3, 7)

    assert agrees(build).ops["LowBitGemm"] == 1


@pytest.mark.parametrize("op_type", ["Concat", "Add", "Mul"])
def test_operands_of_which_inference_knows_different_dims(op_type: str) -> None:
    """A recognizer's branches: [?, ?, ?, ?] beside [?, 1, ?, ?] are one shape when the model runs."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        a, b = (g.qdq(g.input((2, 1, "h", "w")), quant) for _ in range(2))
        a = of_unknown_size(g, a, 2, 1, 4, 6)
        y = g.node(op_type, [g.qdq(a, quant), b], **({"axis": 3} if op_type == "Concat" else {}))
        output(g, g.qdq(y, g.act(0.05)), 2, 1, "h", "w2")

    assert agrees(build, h=4, w=6).ops[f"LowBit{op_type}"] == 1


def test_a_constant_operand_states_the_dims_of_a_concat() -> None:
    """Frames shifted in time: zeros are joined, of more elements than the check would choose."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input((2, 3, 4, 12, 14)), quant)
        zero = g.dq(g.const(np.full((2, 1, 4, 12, 14), quant.zero, np.uint8)), quant)
        y, z = g.node("Concat", [x, zero], axis=1), g.node("Concat", [zero, x], axis=-4)
        total = g.node("Add", [g.qdq(y, quant), g.qdq(z, quant)])
        output(g, g.qdq(total, g.act(0.05)), 2, 4, 4, 12, 14)

    assert agrees(build).ops["LowBitConcat"] == 2


def test_a_product_of_two_tensors_of_which_inference_knows_different_dims() -> None:
    """Attention of a detector: the columns of one are the rows of the other, whatever inference knows."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        a = g.qdq(g.input((1, 4, 20, 32)), quant)
        b = g.node("Transpose", [g.qdq(g.input((1, 4, 20, 40)), quant)], perm=[0, 1, 3, 2])
        b = of_unknown_size(g, b, 1, 4, 32, 20)
        y = g.node("MatMul", [a, g.qdq(b, quant)])
        output(g, g.qdq(y, g.act(1.0)), 1, 4, 20, 20)

    assert agrees(build).ops["LowBitMatMul"] == 1


def test_old_shapes_of_an_edited_model_are_not_believed() -> None:
    """Whoever took a pool out of a model left the shapes behind it as they were."""

    def build(g: Graph) -> None:
        x, quant = image(g, channels=1)
        y = g.qdq(g.node("Transpose", [x], perm=[0, 2, 3, 1]), quant)
        z, zq = conv(g, g.node("Transpose", [y], perm=[0, 3, 1, 2]), quant, channels=1)
        output(g, g.qdq(z, zq), 2, 5, 4, 4)

    built = converted(build).built
    model = onnx.shape_inference.infer_shapes(built.model)
    for info in model.graph.value_info:
        for dim in info.type.tensor_type.shape.dim:
            dim.dim_value = 3 if dim.dim_value == 6 else dim.dim_value
    feeds = built.feed()
    (ours,) = lowbit_session(lowbit.convert(model).model).run(None, feeds)
    np.testing.assert_array_equal(ours, stock_run(built.model, feeds, optimize=False)[0])


def test_a_dead_branch_reads_nothing() -> None:
    """An If that nothing needs goes, and what its branches captured has one reader less."""

    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        branches = {
            f"{which}_branch": subgraph(which, [helper.make_node("Relu", [y], [which])], which)
            for which in ("then", "else")
        }
        g.node("If", [g.const(np.array(True))], **branches)
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    assert agrees(build).ops == {"LowBitQuantize": 1, "LowBitConv": 1, "LowBitDequantize": 1}


def test_node_names_are_unique_where_a_move_has_several_results() -> None:
    def build(g: Graph) -> None:
        x, _ = image(g)
        for part in g.node("Split", [x, g.ints([2, 2])], outputs=2, axis=1):
            output(g, g.node("Sin", [part]), 2, 2, 6, 6)

    names = [node.name for node in agrees(build).result.model.graph.node]
    assert len(names) == len(set(names))


def test_a_converted_model_has_no_name_twice_whatever_the_source_says() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        output(g, g.qdq(g.node("Sin", [g.node("Cos", [g.qdq(y, yq)])]), yq), 2, 5, 4, 4)
        for node in g.nodes:
            node.name = "same"

    result = converted(build)
    names = [node.name for node in result.result.model.graph.node]
    assert len(names) == len(set(names))
    lowbit_session(result.result.model)


def rounding_pool(g: Graph, op: str, dims: int) -> str:
    """A pool whose last window would start behind its image of 8 pixels, quantized: ONNX infers 5 pixels."""
    quant = g.act(0.03)
    x = g.qdq(g.input((2, 4, *[8] * dims), step=float(quant.scale)), quant)
    pooled = g.node(op, [x], kernel_shape=[1] * dims, strides=[2] * dims, ceil_mode=1)
    return g.qdq(pooled, g.act(0.04))


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pools_have_no_window_behind_their_image(op: str, dims: int) -> None:
    def build(g: Graph) -> None:
        x = rounding_pool(g, op, dims)
        shape = g.node(
            "Concat", [g.node("Gather", [g.node("Shape", [x]), g.ints([0])]), g.ints([-1])], axis=0
        )
        rows = g.qdq(g.node("Reshape", [x, shape]), g.act(0.05))
        columns = g.node("Transpose", [g.node("Flatten", [rows], axis=0)], perm=[1, 0])
        output(g, g.node("Where", [g.const(np.ones((4**dims * 8, 1), bool)), columns, g.floats(0.0)]), "n", 1)

    agrees(build)


@pytest.mark.parametrize("value", [-1, 0, 1, 2])
def test_switches_have_one_number_for_on(value: int) -> None:
    """ONNX Runtime takes 1 alone for on, but of ``count_include_pad`` 0 alone for off."""

    def build(g: Graph) -> None:
        x, quant = image(g, size=5)
        largest = g.node("ReduceMax", [x], axes=[2, 3], keepdims=value)
        mean = g.node("ReduceMean", [x], axes=[2, 3], keepdims=value)
        pools = [
            g.node("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=value),
            g.node("AveragePool", [x], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=value),
            g.node("AveragePool", [x], kernel_shape=[2, 2], pads=[1, 0, 1, 0], count_include_pad=value),
        ]
        for made in (largest, mean, *pools):
            g.outputs.append(helper.make_tensor_value_info(g.qdq(made, quant), TensorProto.FLOAT, None))
        places = g.node("ArgMax", [x], axis=1, keepdims=value)
        g.outputs.append(helper.make_tensor_value_info(places, TensorProto.INT64, None))

    agrees(build)


def _axis_of_scalars(g: Graph, x: str, quant: Quant) -> str:
    scalars = [g.node("ReduceMean", [x], keepdims=0) for _ in range(2)]
    return g.node("Concat", [g.qdq(scalar, quant) for scalar in scalars], axis=0)


def _axis_of_a_scalar(g: Graph, x: str, quant: Quant) -> str:
    return g.node("Squeeze", [g.qdq(g.node("ReduceMean", [x], keepdims=0), quant), g.ints([0])])


def _axis_behind_the_last(op: str, **attributes: object) -> Callable[[Graph, str, Quant], str]:
    def make(g: Graph, x: str, quant: Quant) -> str:
        return g.node(op, [g.qdq(g.node("Relu", [x]), quant)], **attributes)

    return make


@pytest.mark.parametrize(
    "make",
    [
        _axis_of_scalars,
        _axis_of_a_scalar,
        _axis_behind_the_last("ReduceMax", axes=[4]),
        _axis_behind_the_last("ReduceMean", axes=[2, 7]),
        _axis_behind_the_last("Softmax", axis=4),
        _axis_behind_the_last("ArgMax", axis=-5),
        _axis_behind_the_last("Split", axis=4),
        lambda g, x, quant: g.node("MaxPool", [x], kernel_shape=[1]),
    ],
)
def test_axes_that_a_tensor_does_not_have(make: Callable[[Graph, str, Quant], str]) -> None:
    """No rule fails at them; ONNX Runtime refuses the source."""

    def build(g: Graph) -> None:
        x, quant = image(g)
        g.outputs.append(onnx.ValueInfoProto(name=g.qdq(make(g, x, quant), quant)))

    with pytest.raises(lowbit.ModelError, match="refuses the model, before and after conversion"):
        converted(build)


def test_an_axis_that_inference_does_not_count() -> None:
    """Before opset 11 ONNX's inference passes over negative axes, of which ONNX Runtime takes notice."""

    def build(g: Graph) -> None:
        g.opset = 10
        x, quant = image(g)
        rows = g.node("MaxPool", [x], kernel_shape=[1, 6])
        squeezed = g.qdq(g.node("Squeeze", [rows], axes=[-1]), quant)
        g.outputs.append(helper.make_tensor_value_info(squeezed, TensorProto.FLOAT, None))

    agrees(build)


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMean"])
def test_axes_as_an_input_before_their_opset(op_type: str) -> None:
    def build(g: Graph) -> None:
        x, quant = image(g)
        y, yq = conv(g, x, quant)
        axes = g.ints([2] if op_type == "ReduceMax" else [2, 3])
        reduced = g.qdq(g.node(op_type, [g.qdq(y, yq), axes], keepdims=0), yq)
        if op_type == "ReduceMax":
            reduced = g.node("MaxPool", [reduced], kernel_shape=[2])
        g.outputs.append(onnx.ValueInfoProto(name=reduced))

    with pytest.raises(lowbit.ModelError, match="refuses the model, before and after conversion"):
        converted(build)


@pytest.mark.parametrize("declared", ["rank", "type"])
def test_a_declaration_that_contradicts_the_graph(declared: str) -> None:
    def build(g: Graph) -> None:
        x, quant = image(g)
        joined = g.node("Concat", [g.q(g.node("ReduceMax", [x], axes=[3]), quant)] * 2, axis=0)
        if declared == "type":
            output(g, joined, "n", "m")
            return
        rows = g.node("Reshape", [x, g.node("Shape", [g.floats(np.zeros(6))])])
        codes = g.q(rows, quant)
        g.output(codes, ["a", "b", "c", "d"], TensorProto.UINT8)
        largest = g.node("ReduceMax", [g.dq(codes, quant)], axes=[3])
        output(g, g.qdq(largest, quant), "a", "b", "c", "d")

    with pytest.raises(lowbit.ModelError, match=r"declared as FLOAT|refuses the model, before and after"):
        converted(build)


@pytest.mark.parametrize("seed", [122134, 124709])
def test_a_move_that_is_declared_to_change_the_rank(seed: int) -> None:
    """A pool of a number, a Slice of a row that is an output of rank 4: no rule believes it."""
    with pytest.raises(lowbit.ModelError):
        lowbit.convert(random_source(seed).model)


def test_tensors_without_elements() -> None:
    """No window fits, a scale makes no pixel, a Slice leaves no image: the nodes there stay."""

    def build(g: Graph) -> None:
        x, quant = image(g, size=2)
        pooled = g.qdq(g.node("MaxPool", [x], kernel_shape=[3, 3]), quant)
        y, yq = conv(g, pooled, quant, kernel=1, pads=[1, 1, 1, 1])
        pixel = g.qdq(g.node("GlobalAveragePool", [x]), quant)
        half = g.node("Resize", [pixel, "", g.floats([1, 1, 0.5, 1])], mode="nearest")
        nothing = g.qdq(g.node("Slice", [x, g.ints([2]), g.ints([9]), g.ints([0])]), quant)
        factors = [g.floats(np.ones(4)), g.floats(np.zeros(4))]
        normal = g.node("InstanceNormalization", [nothing, *factors])
        for made, q in ((y, yq), (half, quant), (normal, quant)):
            g.outputs.append(helper.make_tensor_value_info(g.qdq(made, q), TensorProto.FLOAT, None))

    agrees(build)


def test_branches_state_what_no_longer_holds() -> None:
    """Somebody removed a convolution to 6 channels in front of them."""

    def build(g: Graph) -> None:
        g.opset, g.ir_version = 18, 8
        x, quant = image(g)
        inner = [helper.make_node(op, [x], [op]) for op in ("Relu", "Identity")]
        branches = {
            f"{side}_branch": helper.make_graph(
                [node], side, [], [helper.make_tensor_value_info(node.op_type, 1, [2, 6, 6, 6])]
            )
            for side, node in zip(("then", "else"), inner, strict=True)
        }
        branched = g.node("If", [g.const(np.asarray(False))], **branches)
        summed = g.node("ReduceSum", [branched, g.ints([3])])
        squeezed = helper.make_node("Squeeze", [summed, g.ints([3])], ["squeezed"])
        sides = [helper.make_graph([squeezed], s, [], [onnx.ValueInfoProto(name="squeezed")]) for s in "ab"]
        y = g.node("If", [g.const(np.asarray(True))], then_branch=sides[0], else_branch=sides[1])
        g.outputs.append(helper.make_tensor_value_info(g.qdq(y, quant), TensorProto.FLOAT, None))

    agrees(build)


def test_a_scalar_is_compared_as_a_scalar() -> None:
    """An Add aligns it with an image of another order of axes by an Unsqueeze and a Transpose."""

    def build(g: Graph) -> None:
        x, quant = image(g)
        mean = g.qdq(g.node("ReduceMean", [x], keepdims=0), quant)
        y, yq = conv(g, x, quant)
        output(g, g.qdq(g.node("Add", [mean, g.qdq(y, yq)]), yq), 2, 5, 4, 4)

    result = agrees(build)
    report = lowbit.verify(result.result.model, result.built.model, data=result.built.feed())
    assert all(node.runs for node in report.nodes), [node.note for node in report.nodes]
    assert report.ok


def test_the_code_of_a_scalar_as_an_output_without_a_type() -> None:
    """ONNX Runtime knows no type of the node that makes it unless the model tells."""

    def build(g: Graph) -> None:
        x, quant = image(g)
        code = g.q(g.node("ReduceMean", [x], keepdims=0), quant)
        g.outputs.append(onnx.ValueInfoProto(name=code))
        output(g, g.qdq(g.node("Sigmoid", [g.dq(code, quant)]), g.act(0.01)))

    result = agrees(build)
    assert lowbit.verify(result.result.model, result.built.model, data=result.built.feed()).ok


def test_a_shape_that_is_stated_of_real_numbers_alone() -> None:
    """Before opset 12 there is no MaxPool of codes, which becomes a lowbit node where ranks are known."""

    def build(g: Graph) -> None:
        g.opset = 11
        x, quant = image(g)
        sizes = g.node("Cast", [g.input(("rank",), "s32", name="sizes")], to=7)
        g.feeds["sizes"] = lambda rng, dims: np.array([2, 4, 6, 6], np.int32)
        y = g.qdq(g.node("Reshape", [x, sizes]), quant)
        output(g, y, 2, 4, 6, 6)
        output(g, g.qdq(g.node("MaxPool", [y], kernel_shape=[2, 2]), quant), 2, 4, 5, 5)

    agrees(build, rank=4)


def test_an_operator_that_the_next_opset_has_anew() -> None:
    """ONNX's checker calls GroupNormalization deprecated at opset 18, where ONNX Runtime runs it."""

    def build(g: Graph) -> None:
        g.opset = 18
        x, quant = image(g)
        factors = [g.floats(np.ones(2)), g.floats(np.zeros(2))]
        normal = g.node("GroupNormalization", [x, *factors], num_groups=2)
        output(g, g.qdq(normal, g.act(0.02)), 2, 4, 6, 6)
        y, yq = conv(g, x, quant)
        output(g, g.qdq(y, yq), 2, 5, 4, 4)

    assert converted(build).ops["LowBitConv"] == 1


def test_no_codes_are_moved_where_onnxruntime_has_no_kernel_for_codes() -> None:
    def build(g: Graph) -> None:
        g.opset = 10
        x, _ = image(g)
        nothing = g.node("Slice", [x, g.ints([-3]), g.ints([-3]), g.ints([3])])
        output(g, g.node("DepthToSpace", [nothing], blocksize=2), 2, 1, 12, 0)

    agrees(build)


def test_an_image_cut_out_of_a_batch_has_a_size_of_its_own() -> None:
    """A Reshape to the sizes of its input is not told so: ONNX Runtime would take 1 image and n for equal."""

    def build(g: Graph) -> None:
        g.opset = 10
        x = g.input(("n", 4, 9))
        same = g.node("Reshape", [x, g.node("Shape", [x])])
        first = g.qdq(g.node("Slice", [same, g.ints([0]), g.ints([1]), g.ints([0])]), g.act(0.03))
        output(g, g.qdq(g.node("Sub", [first, x]), g.act(0.05)), "a", "b", "c")

    agrees(build, n=2)


def test_codes_far_from_the_zero_point_that_reads_them() -> None:
    """A Clip leaves one code, -14, stored in 5 bits; its reader's zero point is none of those."""

    def build(g: Graph) -> None:
        x, _ = image(g, kind="s8")
        row = g.q(g.node("Exp", [x]), Quant(np.float32(0.15), np.int8(0), "s8"))
        bounds = [g.const(np.int8(code)) for code in (-82, -14)]
        output(
            g, g.dq(g.node("Clip", [row, *bounds]), Quant(np.float32(0.25), np.int8(-74), "s8")), 2, 4, 6, 6
        )

    agrees(build)
