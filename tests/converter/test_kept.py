"""What stays with ONNX Runtime keeps the form that it fuses, and stays where converting gains nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.sessions.session import for_device
from onnx import TensorProto, helper, numpy_helper

from tests.converter.graphs import conv, converted, image, output
from tests.dialects.graphs.blocks import quantized_input
from tests.dialects.graphs.builder import Graph, Quant
from tests.support import lowbit_session, session_options, stock_run


def optimized(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """How often each op occurs in the graph that ONNX Runtime makes of a model."""
    options = session_options()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.register_custom_ops_library(lowbit.get_library_path())
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    return Counter(node.op_type for node in graph.node)


def outer_conv(g: Graph, x: str, xq: Quant, channels: int = 4) -> tuple[str, Quant]:
    """A convolution that ONNX Runtime fuses and lowbit leaves: its weights are an input of the model."""
    wq = Quant(g.scale(0.02), np.asarray(0), "s8")
    y = g.node("Conv", [x, g.dq(g.input((channels, channels, 1, 1), "s8"), wq)])
    yq = g.after(xq, wq, channels)
    return g.qdq(y, yq), yq


# The form that ONNX Runtime fuses -------------------------------------------------------------------------


def behind_and_before_convolutions(g: Graph) -> None:
    """A fused node between two layers that convert: the codes between change their layout, no more."""
    y, yq = conv(g, *image(g), out=4)
    y, yq = outer_conv(g, g.qdq(y, yq), yq)
    z, zq = conv(g, y, yq)
    output(g, g.qdq(z, zq), 2, 5, 2, 2)


def signed(g: Graph) -> None:
    """Signed codes, which lowbit stores as unsigned ones, go back into the form that the fused node had."""
    x, xq = image(g, kind="s8", zero=0)
    y, yq = conv(g, x, xq, out=4)
    yq = Quant(yq.scale, np.asarray(0), "s8")
    y = g.qdq(y, yq)
    y = g.qdq(g.node("Where", [g.node("Greater", [g.input((1,)), g.floats(0)]), y, y]), yq)
    z, zq = conv(g, y, yq)
    output(g, g.qdq(z, zq), 2, 5, 2, 2)


def without_quantizer(g: Graph) -> None:
    """A product of two activations in front of a float op."""
    a, _ = quantized_input(g, (2, 5, 16))
    b, _ = quantized_input(g, (2, 16, 7))
    output(g, g.node("CumSum", [g.node("MatMul", [a, b]), g.ints(1)]), 2, 5, 7)


def softmax(g: Graph) -> None:
    y, yq = conv(g, *image(g))
    y = g.node("Softmax", [g.qdq(y, yq)], axis=1)
    output(g, g.qdq(y, Quant(np.float32(1 / 256), np.asarray(0), "u8")), 2, 5, 4, 4)


@pytest.mark.parametrize(
    ("build", "op_type", "fused"),
    [
        (behind_and_before_convolutions, "Conv", "QLinearConv"),
        (signed, "Where", "QLinearWhere"),
        (without_quantizer, "MatMul", "MatMulIntegerToFloat"),
        (softmax, "Softmax", "QLinearSoftmax"),
    ],
)
def test_nodes_that_stay_are_fused_as_before(
    build: Callable[[Graph], None], op_type: str, fused: str, tmp_path: Path
) -> None:
    result = converted(build)
    before, after = (optimized(m, tmp_path) for m in (result.built.model, result.result.model))
    moved = sum(node.op_type == op_type for node in result.result.report.converted)
    assert after[fused] >= before[fused] - moved
    assert after[fused] + moved > 0
    result.assert_equal()


def test_scales_per_channel_keep_an_operator_in_float() -> None:
    """ONNX Runtime would fuse them into an operator that refuses them when it runs, at any size."""

    def build(g: Graph) -> None:
        scales = Quant(np.float32([0.02, 0.03, 0.04]), np.zeros(3, np.int8), "s8", axis=1)
        grid = Quant(np.float32(0.03), np.asarray(0), "s8")
        x = g.qdq(g.input(("n", 3, "h", "w")), scales)
        x = g.qdq(g.node("GlobalAveragePool", [x]), grid)
        y, yq = conv(g, x, grid, channels=3, kernel=1)
        output(g, g.qdq(y, yq), "n", 5, 1, 1)

    result = converted(build)
    assert result.ops["GlobalAveragePool"] == 1
    feed = {name: np.ones((2, 3, 4, 5), np.float32) for name in result.built.feeds}
    lowbit_session(result.result.model).run(None, feed)


# The guard ------------------------------------------------------------------------------------------------


def between(op: Callable[[Graph, str, Quant], str]) -> Callable[[Graph], None]:
    """An op between two layers that stay."""

    def build(g: Graph) -> None:
        x, xq = outer_conv(g, *image(g))
        output(g, outer_conv(g, op(g, x, xq), xq)[0], 2, 4, "h", "w")

    return build


def _add(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(g.node("Add", [x, image(g)[0]]), xq)


def _pool(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(g.node("GlobalAveragePool", [g.qdq(g.node("Concat", [x, x], axis=2), xq)]), xq)


def _gate(g: Graph, x: str, xq: Quant) -> str:
    gate = g.qdq(g.node("HardSigmoid", [g.qdq(g.node("GlobalAveragePool", [x]), xq)]), xq)
    return g.qdq(g.node("Mul", [x, gate]), xq)


def _max_pool(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(g.node("MaxPool", [_add(g, x, xq)], kernel_shape=[2, 2]), xq)


def _average_pool(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(g.node("AveragePool", [_add(g, x, xq)], kernel_shape=[2, 2]), xq)


def _sigmoid(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(g.node("Sigmoid", [_add(g, x, xq)]), xq)


def _convolution(g: Graph, x: str, xq: Quant) -> str:
    return g.qdq(conv(g, _add(g, x, xq), xq, out=4, kernel=1)[0], xq)


@pytest.mark.parametrize("op", [_add, _pool, _gate])
def test_regions_that_gain_nothing_stay(op: Callable[[Graph, str, Quant], str]) -> None:
    result = converted(between(op))
    assert not [name for name in result.ops if name.startswith("LowBit")]
    reasons = {node.reason for node in result.result.report.kept if node.op_type in ("Add", "Mul", "Concat")}
    assert all("would only add conversions around float nodes" in str(reason) for reason in reasons)
    assert not result.result.report.islands or {n.op_type for n in result.result.report.islands} == {"Conv"}
    result.assert_equal()

    every = converted(between(op), all_regions=True)
    assert [name for name in every.ops if name.startswith("LowBit")]
    every.assert_equal()


@pytest.mark.parametrize("op", [_sigmoid, _convolution, _max_pool, _average_pool])
def test_what_is_joined_to_a_table_or_a_product_converts(op: Callable[[Graph, str, Quant], str]) -> None:
    result = converted(between(op))
    assert result.ops["LowBitAdd"] == 1
    result.assert_equal()


def test_without_neighbours_that_stay_everything_converts() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        output(g, _add(g, x, xq), 2, 4, 6, 6)

    assert converted(build).ops["LowBitAdd"] == 1


@pytest.mark.parametrize(
    ("op", "shape", "stays"),
    [
        ("GlobalAveragePool", (1, 8, 3, 4, 4), True),
        ("GlobalAveragePool", (1, 8, 6, 6), True),
        ("AveragePool", (1, 3, 6, 6), True),
        ("AveragePool", (1, 4, 6, 6), False),
    ],
)
def test_pools_alone_stay_where_the_layout_costs_more(op: str, shape: tuple[int, ...], stays: bool) -> None:
    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input(shape, step=float(quant.scale)), quant)
        window = {"kernel_shape": [2, 2]} if op == "AveragePool" else {}
        output(g, g.qdq(g.node(op, [x], **window), quant), *"ncdhw"[: len(shape)])

    result = converted(build)
    assert result.ops[op] == stays
    assert result.ops[f"LowBit{op}"] == (not stays)
    on_cpu = for_device(result.built.model, everything=False).model
    assert any(node.domain == "ai.lowbit" for node in on_cpu.graph.node) == (not stays)
    assert converted(build, all_regions=True).ops[f"LowBit{op}"] == 1


def test_operators_that_gain_nothing_come_back_as_they_were() -> None:
    """QLinearAdd between nodes that stay, in the operator form."""

    def build(g: Graph) -> None:
        g.extra_opsets["com.microsoft"] = 1
        scale, zero = g.floats(0.1), g.const(np.uint8(3))
        inputs = [operand for _ in range(2) for operand in (g.input((2, 4), "u8"), scale, zero)]
        y = g.node("QLinearAdd", [*inputs, scale, zero], domain="com.microsoft")
        y = g.node("DequantizeLinear", [y, scale, zero])
        output(g, g.node("CumSum", [y, g.ints(1)]), 2, 4)

    result = converted(build)
    assert result.ops["QLinearAdd"] == 1
    assert converted(build, all_regions=True).ops["LowBitAdd"] == 1


def test_for_a_device_everything_converts() -> None:
    model = for_device(converted(between(_add)).built.model).model
    assert any(node.op_type == "LowBitAdd" for node in model.graph.node)


# Forms that stay whole ------------------------------------------------------------------------------------


class _Network:
    """A float network of what quantizers of other widths treat, and its forms."""

    def __init__(self, folder: Path, opset: int):
        random = np.random.default_rng(0)
        self.folder, self.shape = folder, (1, 3, 16, 16)
        tensors: list[TensorProto] = []
        nodes: list[onnx.NodeProto] = []

        def const(array: np.ndarray) -> str:
            tensors.append(numpy_helper.from_array(array, f"c{len(tensors)}"))
            return tensors[-1].name

        def normal(*shape: int) -> str:
            return const((random.normal(size=shape) / 4).astype(np.float32))

        def node(op: str, *inputs: str, **attributes: object) -> str:
            nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"], f"n{len(nodes)}", **attributes))
            return str(nodes[-1].output[0])

        x = node("Relu", node("Conv", "x", normal(8, 3, 3, 3), normal(8), pads=[1] * 4))
        x = node("Add", x, node("Conv", x, normal(8, 8, 3, 3), normal(8), pads=[1] * 4))
        x = node("MaxPool", node("Mul", x, node("Sigmoid", x)), kernel_shape=[2, 2], strides=[2, 2])
        x = node("Transpose", node("Reshape", x, const(np.array([1, 8, 64]))), perm=[0, 2, 1])
        x = node("LayerNormalization", x, normal(8), normal(8))
        heads = [node("Add", node("MatMul", x, normal(8, 8)), normal(8)) for _ in range(3)]
        weights = node("MatMul", heads[0], node("Transpose", heads[1], perm=[0, 2, 1]))
        x = node("MatMul", node("Softmax", weights, axis=-1), heads[2])
        x = node("Gemm", node("Flatten", x), normal(10, 512), normal(10), transB=1)
        graph = helper.make_graph(
            nodes,
            "network",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 10])],
            tensors,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        self.path, self.quantized = folder / "float.onnx", folder / "quantized.onnx"
        onnx.save(onnx.shape_inference.infer_shapes(model), self.path)

    def static(self, **options: object) -> onnx.ModelProto:
        quantization = pytest.importorskip("onnxruntime.quantization")
        feeds = iter([{"x": self.feed()}])

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
            def get_next(self) -> dict[str, np.ndarray] | None:
                return next(feeds, None)

        logging.getLogger().setLevel(logging.ERROR)
        quantization.quantize_static(self.path, self.quantized, Reader(), **options)
        return onnx.load(self.quantized)

    def dynamic(self, **options: object) -> onnx.ModelProto:
        quantization = pytest.importorskip("onnxruntime.quantization")
        logging.getLogger().setLevel(logging.ERROR)
        quantization.quantize_dynamic(self.path, self.quantized, **options)
        return onnx.load(self.quantized)

    def feed(self) -> np.ndarray:
        return np.random.default_rng(1).normal(size=self.shape).astype(np.float32)

    def assert_stays(self, model: onnx.ModelProto) -> None:
        result = lowbit.convert(model)
        assert not result.report.converted
        assert all(node.reason for node in result.report.kept)
        assert optimized(result.model, self.folder) == optimized(model, self.folder)
        (before,) = stock_run(model, {"x": self.feed()})
        (after,) = lowbit_session(result.model).run(None, {"x": self.feed()})
        assert np.array_equal(before, after)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize(("activations", "weights"), [("QUInt16", "QUInt8"), ("QInt16", "QInt16")])
def test_sixteen_bit_codes_stay(opset: int, activations: str, weights: str, tmp_path: Path) -> None:
    types = pytest.importorskip("onnxruntime.quantization").QuantType
    network = _Network(tmp_path, opset)
    network.assert_stays(network.static(activation_type=types[activations], weight_type=types[weights]))


@pytest.mark.parametrize("options", [{"weight": "QUInt8"}, {"weight": "QInt8", "per_channel": True}])
def test_dynamic_quantization_stays(options: dict[str, object], tmp_path: Path) -> None:
    types = pytest.importorskip("onnxruntime.quantization").QuantType
    network, options = _Network(tmp_path, 17), dict(options)
    model = network.dynamic(weight_type=types[str(options.pop("weight"))], **options)
    assert {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"} <= {n.op_type for n in model.graph.node}
    network.assert_stays(model)
