"""Networks on the GPU equal the CPU session in every element."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.dialects.graphs import CASES
from tests.dialects.graphs import qonnx as qonnx_graphs
from tests.dialects.graphs.builder import Graph, Quant
from tests.dialects.graphs.random_network import random_network
from tests.dialects.test_export import single_node
from tests.ep.graphs import Network, bottleneck, images
from tests.gpu.support import assert_equal, compare, gpu_session, in_new_process, whole_on_gpu
from tests.numerics import random_nodes
from tests.support import lowbit_session, require_native
from tests.tools.conftest import qdq_conv

require_native()
import lowbit  # noqa: E402
from lowbit.models import build as build_network  # noqa: E402
from lowbit.models.half import in_half  # noqa: E402
from lowbit.ops import DEFINITIONS  # noqa: E402

SHARED = [
    "qdq/mobilenetv2_1.0_224_w8a8_qat",
    "qdq/resnet20_cifar10_w4a8_ortptq",
    "qdq/resnet20_cifar10_w8a8u_ortptq",
    "qdq/resnet8_mlperftiny_w8a8_ortptq",
    "qdq/yunet_n_320_w8a8_ortptq",
    "qonnx/cnv_w1a1_cifar10",
    "qonnx/espcn_subpixel_w4a4",
    "qonnx/tfc_1w1a",
    "qonnx/tfc_1w2a",
]


def noise(model: onnx.ModelProto, seed: int, **dims: int) -> dict[str, np.ndarray]:
    """Inputs over the range that images have after normalization; symbolic dims from `dims`, else 1."""
    rng = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        tensor = value.type.tensor_type
        shape = [
            d.dim_value if d.HasField("dim_value") else dims.get(d.dim_param, 1) for d in tensor.shape.dim
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if np.issubdtype(dtype, np.floating):
            feeds[value.name] = rng.normal(0, 1, shape).astype(dtype)
        else:
            feeds[value.name] = rng.integers(0, 100, shape).astype(dtype)
    return feeds


@pytest.mark.parametrize("name", SHARED)
def test_real_networks(name: str, shared_models: Path) -> None:
    model = lowbit.convert(shared_models / f"{name}.onnx").model
    # Its first convolution is a float one whose weights are dequantized: both stay with ONNX Runtime.
    whole = gpu_session if "espcn" in name else whole_on_gpu
    on_gpu, on_cpu = whole(model), lowbit_session(model, threads=4)
    for seed in range(3):
        feeds = noise(model, seed)
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{name}, seed {seed}")


@pytest.mark.parametrize(
    ("network", "bits"),
    [("resnet18", (8, 8)), ("resnet18", (4, 8)), ("resnet50", (8, 8)), ("mobilenetv2", (8, 8)),
     ("densenet121", (8, 8)), ("resnet18", (4, 4)), ("resnet18", (2, 2)), ("resnet18", (1, 1))],
)  # fmt: skip
def test_built_networks(network: str, bits: tuple[int, int]) -> None:
    from lowbit.models import build

    model = lowbit.convert(build(network, *bits, image=64, batch="N")).model
    on_gpu, on_cpu = whole_on_gpu(model), lowbit_session(model, threads=4)
    for batch in (1, 3):
        feeds = noise(model, batch, N=batch)
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{network}, batch {batch}")


@pytest.mark.parametrize("seed", range(4))
def test_channels_that_are_no_multiples(seed: int) -> None:
    model = bottleneck(seed)
    on_gpu, on_cpu = whole_on_gpu(model), lowbit_session(model)
    for shape in ((2, 3, 15, 11), (1, 3, 33, 20)):
        feeds = {"x": np.random.default_rng(seed).normal(0, 1.2, shape).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"seed {seed}, {shape}")


@pytest.mark.parametrize("name", sorted(CASES))
def test_constructs(name: str) -> None:
    """Every construct of every exporter; what the provider leaves runs on the CPU, with the same results."""
    built = CASES[name].build(0)
    compare(lowbit.convert(built.model).model, built.feed(0, **built.sizes[0]), name)


@pytest.mark.parametrize("name", sorted(qonnx_graphs.CASES))
def test_qonnx_constructs(name: str) -> None:
    built = qonnx_graphs.CASES[name].build(0)
    compare(lowbit.convert(built.model).model, built.feed(0, **built.sizes[0]), name)


@pytest.mark.parametrize("part", range(4))
def test_random_networks(part: int, seeds) -> None:
    for seed in (part + 4 * s for s in seeds(12)):
        built = random_network(seed)
        model = lowbit.convert(built.model).model
        on_gpu, on_cpu = gpu_session(model), lowbit_session(model)
        for k, sizes in enumerate(built.sizes):
            feeds = built.feed(k, **sizes)
            assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"seed {seed}, sizes {sizes}")


def has_gpu_kernel(node: onnx.NodeProto) -> bool:
    """What ep/cuda/cuda_backend.cc says of ops and modes that have none yet."""
    if node.op_type == "LowBitResize":
        return all(a.s == b"nearest" for a in node.attribute if a.name == "mode")
    if any(len(a.ints) == 3 for a in node.attribute if a.name == "kernel_shape"):
        return False
    return node.op_type != "LowBitNormalization"


@pytest.mark.parametrize("op_type", list(DEFINITIONS))
def test_random_nodes(op_type: str, seeds) -> None:
    """On the GPU alone, or on the CPU where there is no kernel: then a session without a fallback says so."""
    for seed in seeds(8):
        model, feeds, expected = single_node(random_nodes.make(op_type, np.random.default_rng([seed, 6])))
        if has_gpu_kernel(model.graph.node[0]):
            session = whole_on_gpu(model)
        else:
            with pytest.raises(Exception, match="fallback"):
                whole_on_gpu(model)
            session = gpu_session(model)
        assert_equal(session.run(None, feeds), [expected], f"{op_type}, seed {seed}")


@pytest.mark.parametrize("options", [{"cuda_graph": "0"}, {"reference": "1"}, {"deterministic": "1"}])
def test_options_change_no_number(options: dict[str, str]) -> None:
    for seed in range(4):
        built = random_network(seed)
        compare(
            lowbit.convert(built.model).model,
            built.feed(0, **built.sizes[0]),
            f"seed {seed}, {options}",
            options,
        )


def test_first_convolution_whose_weights_leave_int8() -> None:
    """Quantize and the first convolution are one kernel, but two where code - zero point leaves int8."""
    rng = np.random.default_rng(0)
    constants = {
        "x_scale": np.float32(0.02), "x_zero": np.uint8(120),
        "y_scale": np.float32(0.5), "y_zero": np.uint8(7),
        "w_scale": np.float32(0.01), "w_zero": np.uint8(3),
        "w": rng.integers(0, 256, (8, 3, 3, 3)).astype(np.uint8),
    }  # fmt: skip
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        onnx.helper.make_node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_dq"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_dq"]),
        onnx.helper.make_node("Conv", ["x_dq", "w_dq"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        onnx.helper.make_node("QuantizeLinear", ["c", "y_scale", "y_zero"], ["c_q"]),
        onnx.helper.make_node("DequantizeLinear", ["c_q", "y_scale", "y_zero"], ["y"]),
    ]
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
        for name, dims in (("x", ["N", 3, 18, 22]), ("y", ["N", 8, 9, 11]))
    ]
    initializers = [
        onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()
    ]
    graph = onnx.helper.make_graph(nodes, "first", infos[:1], infos[1:], initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
    converted = lowbit.convert(model).model
    assert [node.op_type for node in converted.graph.node][:2] == ["LowBitQuantize", "LowBitConv"]
    session = whole_on_gpu(converted)
    for batch in (1, 3):
        feeds = {"x": rng.normal(0, 1.5, (batch, 3, 18, 22)).astype(np.float32)}
        assert_equal(session.run(None, feeds), lowbit_session(converted).run(None, feeds), f"batch {batch}")


def _pair(nodes: list[onnx.NodeProto], name: str, scale: str, zero: str) -> str:
    nodes.append(onnx.helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}_q"]))
    nodes.append(onnx.helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_dq"]))
    return f"{name}_dq"


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, Sequence[str | int]],
    output: str,
    constants: Mapping[str, Any],
) -> onnx.ModelProto:
    """Of float inputs of these shapes, one float output and initializers."""
    graph = onnx.helper.make_graph(
        nodes,
        name,
        [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, dims) for x, dims in inputs.items()],
        [onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize(
    ("op", "between"),
    [("Add", "rounding"), ("Add", "table"), ("Add", "nothing"), ("Mul", "rounding"), ("Mul", "table")],
)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dims", [["N", 32, 6, 5], [1, 32, 6, 5], [1, 32, 1, 1], ["M", 32, 6, 5]])
def test_convolution_with_float_bias_and_addition(
    dims: list[int | str], first: bool, op: str, between: str
) -> None:
    """One kernel that rounds as often as the file says; two where the other tensor has other dims.

    Args:
        dims: Of the tensor that is added, or multiplied with.
        first: Whether what the convolution makes is the first operand.
        op: What is done.
        between: What stands between the two: a quantizer, a function between two of them, nothing.
    """
    rounds = between != "nothing"
    rng = np.random.default_rng(1)
    constants = {
        "s": np.float32(0.021), "z": np.int8(3), "t": np.float32(0.013),
        "y_s": np.float32(0.034), "zero": np.int8(0), "w_s": np.float32(0.002),
        "w": rng.integers(-127, 128, (32, 16, 3, 3)).astype(np.int8),
        "bias": rng.normal(0, 0.3, 32).astype(np.float32),
    }  # fmt: skip
    nodes: list[onnx.NodeProto] = []
    x, other = _pair(nodes, "x", "s", "z"), _pair(nodes, "r", "t", "zero")
    nodes.append(onnx.helper.make_node("DequantizeLinear", ["w", "w_s", "zero"], ["w_dq"]))
    nodes.append(onnx.helper.make_node("Conv", [x, "w_dq", "bias"], ["c"], pads=[1, 1, 1, 1]))
    made = _pair(nodes, "c", "t", "z") if rounds else "c"
    if between == "table":
        nodes.append(onnx.helper.make_node("Sigmoid", [made], ["gate"]))
        made = _pair(nodes, "gate", "t", "z")
    nodes.append(onnx.helper.make_node(op, [made, other] if first else [other, made], ["a"]))
    nodes.append(onnx.helper.make_node("Relu", ["a"], ["relu"]))
    _pair(nodes, "relu", "y_s", "zero")
    shapes = {"x": ["N", 16, 6, 5], "r": dims}
    model = _model("added", nodes, shapes, "relu_dq", constants)
    converted = lowbit.convert(model, all_regions=True).model
    if rounds:
        assert f"LowBit{op}" in [node.op_type for node in converted.graph.node]
    on_gpu, on_cpu = gpu_session(converted), lowbit_session(converted)
    for sizes in ({"N": 3, "M": 3}, {"N": 1, "M": 2}, {"N": 2, "M": 1}):
        feeds = noise(converted, 2, **sizes)
        if not rounds and dims[0] == "M" and sizes["N"] != sizes["M"]:
            with pytest.raises(Exception, match="the residual has shape"):
                on_gpu.run(None, feeds)
            continue
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{dims}, {sizes}")


@pytest.mark.parametrize(
    ("channels", "squeezed", "gate", "zero"),
    [
        (96, 32, "HardSigmoid", 0),
        (32, 6, "Sigmoid", 7),
        (48, 144, "HardSigmoid", -5),
        (80, 272, "", 3),
        (144, 4, "Sigmoid", 1),
    ],
)
def test_squeeze_and_excitation(
    channels: int,
    squeezed: int,
    gate: str,
    zero: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gates' product, their table and the multiplication of the image are one kernel.

    Args:
        channels: Of the image.
        squeezed: What the product of the gates sums.
        gate: The function of it, if any.
        zero: The zero point of the image's codes.
    """
    rng = np.random.default_rng(channels)
    constants = {
        "s": np.float32(0.021), "z": np.int8(zero), "g": np.float32(1 / 127), "y_s": np.float32(0.009),
        "zero": np.int8(0), "w_s": np.float32(0.004),
        "w": rng.integers(-127, 128, (channels, 1, 3, 3)).astype(np.int8),
        "w1": rng.integers(-127, 128, (squeezed, channels, 1, 1)).astype(np.int8),
        "w2": rng.integers(-127, 128, (channels, squeezed, 1, 1)).astype(np.int8),
        "bias": rng.normal(0, 0.3, channels).astype(np.float32),
    }  # fmt: skip
    nodes: list[onnx.NodeProto] = []
    nodes += [
        onnx.helper.make_node("DequantizeLinear", [name, "w_s", "zero"], [f"{name}_dq"])
        for name in ("w", "w1", "w2")
    ]
    x = _pair(nodes, "x", "s", "z")
    nodes.append(onnx.helper.make_node("Conv", [x, "w_dq"], ["c"], pads=[1, 1, 1, 1], group=channels))
    image = _pair(nodes, "c", "s", "z")
    nodes.append(onnx.helper.make_node("GlobalAveragePool", [image], ["mean"]))
    nodes.append(onnx.helper.make_node("Conv", [_pair(nodes, "mean", "g", "zero"), "w1_dq"], ["fc1"]))
    nodes.append(onnx.helper.make_node("Relu", ["fc1"], ["r1"]))
    nodes.append(onnx.helper.make_node("Conv", [_pair(nodes, "r1", "s", "zero"), "w2_dq", "bias"], ["fc2"]))
    made = _pair(nodes, "fc2", "s", "z")
    if gate:
        nodes.append(onnx.helper.make_node(gate, [made], ["gate"]))
        made = _pair(nodes, "gate", "g", "zero")
    nodes.append(onnx.helper.make_node("Mul", [image, made], ["m"]))
    _pair(nodes, "m", "y_s", "z")
    model = _model("squeeze_and_excitation", nodes, {"x": ["N", channels, "H", "W"]}, "m_dq", constants)
    converted = lowbit.convert(model, all_regions=True).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for shape in ((1, channels, 7, 5), (3, channels, 1, 1), (2, channels, 23, 19)):
        feeds = {"x": rng.normal(0, 1.5, shape).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        assert [step["kernel"] for step in _plan(capfd)["steps"]].count("gated") == (shape[2] > 1)


def test_bottlenecks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, the layer behind them with its residuals, and the next one's first layer are one launch."""
    converted = lowbit.convert(build_network("resnet50", 8, 8, image=64, batch="N", classes=10)).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted, tuning="off"), lowbit_session(converted)
    rng = np.random.default_rng(8)
    for batch in (2, 1):
        feeds = {"input": rng.normal(0, 1, (batch, 3, 64, 64)).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"batch of {batch}")
        kernels = [step["kernel"] for step in _plan(capfd)["steps"]]
        first = [i for i, kernel in enumerate(kernels) if kernel.endswith(" with the next two")]
        assert first, "of the first stage"
        for i in first:
            assert all(kernel.endswith(" with the last") for kernel in kernels[i + 1 : i + 3])


@pytest.mark.parametrize("stride", [1, 2])
def test_binary_network(
    stride: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bipolar codes are read as they are, as bits, though padding is a zero that none of them stands for."""
    graph = qonnx_graphs.QonnxGraph("binary", 3)
    sign = qonnx_graphs.Quant(np.float32(1), bits=0)
    value = graph.quant(graph.input(["N", 128, "H", "W"], name="x"), sign)
    for kernel in (3, 5):
        weights = graph.weights((128, 128, kernel, kernel), sign)
        sums = graph.node("Conv", [value, weights], pads=[kernel // 2] * 4, strides=[stride] * 2)
        value = graph.quant(sums, sign)
    graph.output(value, ["N", 128, None, None])
    converted = lowbit.convert(graph.proto()).model
    assert [node.op_type for node in converted.graph.node].count("APConv") == 2
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for shape in ((1, 128, 7, 9), (2, 128, 3, 5)):
        feeds = {"x": graph.rng.normal(0, 1, shape).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        kernels = [step["kernel"] for step in _plan(capfd)["steps"] if "node_Conv" in step["nodes"][0]]
        assert len(kernels) == 2
        assert not [kernel for kernel in kernels if kernel.startswith(("plain", "mma"))], kernels


@pytest.mark.parametrize("bits", [0, 2])
def test_binary_network_in_planes(bits: int, tmp_path: Path) -> None:
    """Codes of one bit (bipolar) or two are planes of bits between convolutions and through a pooling.

    Without kernels of bytes no estimate is against them.
    """
    graph = qonnx_graphs.QonnxGraph("planes", 4)
    sign = qonnx_graphs.Quant(np.float32(1), bits=0)

    def quantized(value: str, terms: int) -> str:
        if bits == 0:
            return graph.quant(value, sign)
        quant = qonnx_graphs.Quant(np.float32(terms**0.5), bits, signed=0)
        return graph.quant(graph.node("Relu", [value]), quant)

    def layer(value: str, inputs: int, outputs: int, kernel: int = 3) -> str:
        weights = graph.weights((outputs, inputs, kernel, kernel), sign)
        return graph.node("Conv", [value, weights], pads=[kernel // 2] * 4)

    value = quantized(graph.input(["N", 128, "H", "W"], name="x"), 1)
    value = quantized(layer(value, 128, 192), 128 * 9)
    value = quantized(layer(value, 192, 64), 192 * 9)
    value = graph.node("MaxPool", [value], kernel_shape=[2, 2], strides=[2, 2])
    value = quantized(layer(value, 64, 128), 64 * 9)
    graph.output(quantized(layer(value, 128, 64, 1), 128), ["N", 64, None, None])
    variables = {"LOWBIT_CUDA_WITHOUT": "halo,windows,wgmma,mma,team,vector"}
    plans = _plans_of(graph.proto(), ((1, 128, 8, 10), (3, 128, 9, 7)), 1, tmp_path, variables)
    assert len(plans) == 2
    for steps in plans:
        assert len([step for step in steps if "plane" in step["to"]]) == 4, steps


class _OneBitWeights(qonnx_graphs.QonnxGraph):
    """Layers whose weights have one bit, and quantizers of so many bits, behind a Relu where not signed."""

    def __init__(self, name: str, seed: int, bits: int):
        super().__init__(name, seed)
        self.bits, self.sign = bits, qonnx_graphs.Quant(np.float32(1), bits=0)

    def quantized(self, value: str, scale: float, *, signed: int = 0) -> str:
        quant = qonnx_graphs.Quant(np.float32(scale), self.bits, signed=signed)
        return self.quant(value if signed else self.node("Relu", [value]), quant)

    def layer(self, value: str, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> str:
        weights = self.weights((outputs, inputs, kernel, kernel), self.sign)
        return self.node("Conv", [value, weights], pads=[kernel // 2] * 4, strides=[stride] * 2)


@pytest.mark.parametrize(("bits", "wide"), [(1, 192), (2, 192), (1, 256), (2, 128)])
def test_residuals_in_planes(bits: int, wide: int, tmp_path: Path) -> None:
    """Blocks of three convolutions of codes of few bits, whose shortcuts are planes, too.

    Those of whole words are one launch but for the last block, which makes bytes.
    """
    graph = _OneBitWeights("shortcuts in planes", 7, bits)
    quantized, layer = graph.quantized, graph.layer
    value = quantized(layer(quantized(graph.input(["N", 64, "H", "W"], name="x"), 1), 64, wide), 8)
    for _ in range(3):
        inner = quantized(layer(value, wide, 64), wide**0.5)
        inner = quantized(layer(inner, 64, 64, 3), 576**0.5)
        made = quantized(layer(inner, 64, wide), 8, signed=bits - 1)
        value = quantized(graph.node("Add", [made, value]), 4)
    graph.output(value, ["N", wide, None, None])
    without = "chain,flat_bits,halo,windows,wgmma,mma,team,vector"
    variables = {"LOWBIT_TUNE": "off", "LOWBIT_CUDA_WITHOUT": without}
    plans = _plans_of(graph.proto(), ((1, 64, 8, 10), (3, 64, 9, 7)), 1, tmp_path, variables)
    assert len(plans) == 2
    for steps in plans:
        together = [step for step in steps if "bit_blocks" in step["kernel"]]
        assert len(together) == (0 if wide == 192 else 6), steps
        adding = [step for step in steps if "adds planes" in step["kernel"]]
        assert len(adding) == (3 if wide == 192 else 1), steps
        assert len([step for step in steps if "plane" in step["to"]]) == 9, steps


@pytest.mark.parametrize("bits", [1, 2])
def test_first_blocks_in_planes(bits: int, tmp_path: Path) -> None:
    """A block whose shortcut has a convolution, maybe with a stride, reads and makes planes."""
    graph = _OneBitWeights("first blocks in planes", 11, bits)
    quantized, layer = graph.quantized, graph.layer
    value = quantized(layer(quantized(graph.input(["N", 64, "H", "W"], name="x"), 1), 64, 64), 8)
    inputs = 64
    for outputs, stride in ((128, 1), (192, 2), (320, 2)):
        inner = quantized(layer(value, inputs, 64), inputs**0.5)
        inner = quantized(layer(inner, 64, 64, 3, stride), 576**0.5)
        made = quantized(layer(inner, 64, outputs), 8, signed=bits - 1)
        shortcut = quantized(layer(value, inputs, outputs, 1, stride), inputs**0.5, signed=bits - 1)
        value, inputs = quantized(graph.node("Add", [made, shortcut]), 4), outputs
    graph.output(value, ["N", inputs, None, None])
    without = "chain,flat_bits,halo,windows,wgmma,mma,team,vector,pair"
    variables = {"LOWBIT_TUNE": "off", "LOWBIT_CUDA_WITHOUT": without}
    plans = _plans_of(graph.proto(), ((1, 64, 9, 10), (3, 64, 8, 7)), 1, tmp_path, variables)
    assert len(plans) == 2
    for steps in plans:
        blocks = [step["kernel"] for step in steps if "adds planes" in step["kernel"]]
        assert len(blocks) == 3, steps
        assert len([step for step in steps if "plane" in step["to"]]) == 9, steps
        assert bits == 2 or any("bit_pair" in kernel for kernel in blocks), steps


def test_products_in_planes(tmp_path: Path) -> None:
    """Weights and codes of two bits: products of few rows and many channels read and store planes.

    By estimates, without other kernels of bytes: what is measured may be against planes.
    """
    graph = qonnx_graphs.QonnxGraph("rows in planes", 6)
    codes = qonnx_graphs.Quant(np.float32(1), 2, signed=0)
    weights = qonnx_graphs.Quant(np.float32(1), 2)
    value = graph.quant(graph.node("Relu", [graph.input(["N", 128, "H", "W"], name="x")]), codes)
    channels = (128, 512, 512, 64)
    for inputs, outputs in itertools.pairwise(channels):
        value = graph.node("Conv", [value, graph.weights((outputs, inputs, 1, 1), weights)])
        scale = qonnx_graphs.Quant(np.float32(inputs**0.5), 2, signed=0)
        value = graph.quant(graph.node("Relu", [value]), scale)
    graph.output(value, ["N", channels[-1], None, None])
    variables = {"LOWBIT_TUNE": "off", "LOWBIT_CUDA_WITHOUT": "chain,halo,windows,wgmma,mma,team,vector,bits"}
    plans = _plans_of(graph.proto(), ((1, 128, 8, 8), (3, 128, 5, 7)), 2, tmp_path, variables)
    assert len(plans) == 2
    for steps in plans:
        kernels = [step["kernel"] for step in steps if step["kernel"].startswith("flat_bits")]
        assert len(kernels) == len(channels) - 1, steps
        assert len([step for step in steps if "plane" in step["to"]]) == len(channels) - 2, steps


def _plans_of(
    model: onnx.ModelProto,
    shapes: tuple[tuple[int, ...], ...],
    spread: float,
    folder: Path,
    variables: dict[str, str],
) -> list[list[dict[str, Any]]]:
    """Steps of the region for each shape of input, in a process of its own; outputs are the CPU's."""
    path = folder / "converted.lowbit.onnx"
    lowbit.convert(model, path)
    code = f"""
import numpy as np, onnx
from tests.gpu.support import assert_equal, whole_on_gpu
from tests.support import lowbit_session
model = onnx.load({str(path)!r})
on_gpu, on_cpu = whole_on_gpu(model), lowbit_session(model)
for shape in {shapes!r}:
    feeds = {{"x": np.random.default_rng(0).normal(0, {spread}, shape).astype(np.float32)}}
    assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{{shape}}")
"""
    lines = in_new_process(code, variables | {"LOWBIT_PRINT_PLAN": "json"})["stderr"].splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("{")]
    return [each["steps"] for each in printed if each["lowbit"] == "region"]


def _plan(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one plan printed since the last call."""
    printed = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (plan,) = [each for each in printed if each["lowbit"] == "region"]
    return plan


def test_attention_in_float() -> None:
    """Both products of two tensors and the Softmax between them stay in the region."""
    graph = Graph("attention", 1)
    heads, width, tokens = 2, 8, 11
    x = graph.qdq(graph.input(["N", tokens, 24], name="x"), graph.act(0.02, "s8"))

    def split_heads(perm: list[int]) -> str:
        weights = graph.weight(graph.codes((24, heads * width)), graph.weight_quant(heads * width, axis=1))
        made = graph.qdq(graph.node("MatMul", [x, weights]), graph.act(0.1, "s8"))
        parts = graph.node("Reshape", [made, graph.ints([0, 0, heads, width])])
        return graph.node("Transpose", [parts], perm=perm)

    queries = graph.node("Mul", [split_heads([0, 2, 1, 3]), graph.floats(width**-0.5)])
    sums = graph.node("MatMul", [queries, split_heads([0, 2, 3, 1])])
    mixed = graph.node("MatMul", [graph.node("Softmax", [sums], axis=-1), split_heads([0, 2, 1, 3])])
    graph.output(graph.node("Transpose", [mixed], perm=[0, 2, 1, 3]), ["N", tokens, heads, width])
    converted = lowbit.convert(graph.proto()).model
    assert [node.op_type for node in converted.graph.node].count("MatMul") == 2
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for batch in (1, 3):
        feeds = noise(converted, batch, N=batch)
        (got,), (want,) = on_gpu.run(None, feeds), on_cpu.run(None, feeds)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)  # numbers up to 13


@pytest.mark.parametrize("dtype", [np.float16, np.uint8, np.int8, np.int32])
def test_casts_at_the_ends(
    dtype: type, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a network is fed becomes float32 in its region, and float32 leaves it as float16."""
    graph = Graph("ends", 3)
    x = graph.node("Cast", [graph.input(["N", 3, 9, "W"], name="x")], to=onnx.TensorProto.FLOAT)
    graph.inputs[0].type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = graph.qdq(graph.node("Mul", [x, graph.floats(0.7)]), graph.act(0.02, "s8"))
    made = graph.node("Conv", [x, graph.weight(graph.codes((16, 3, 3, 3)), graph.weight_quant(16))])
    half = onnx.TensorProto.FLOAT16
    graph.output(graph.node("Cast", [made], to=half), ["N", 16, 7, "V"], half)
    converted = lowbit.convert(graph.proto()).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    rng = np.random.default_rng(1)
    for count in (1, 3):
        size = 2 if dtype == np.float16 else 30
        feeds = {"x": rng.normal(size, size, (count, 3, 9, 8 + count)).clip(0).astype(dtype)}
        (got,), (want,) = on_gpu.run(None, feeds), on_cpu.run(None, feeds)
        assert got.dtype == want.dtype == np.float16
        np.testing.assert_array_equal(got, want)
        kernels = [step["kernel"] for step in _plan(capfd)["steps"]]
        assert kernels.count("cast") == 2


def _rounded_to_half(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """A copy in which the outputs of the nodes of these names are rounded to float16."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.append(node)
        if node.name not in names:
            continue
        whole, made, half = model.graph.node[-1], node.output[0], f"{node.output[0]}.half"
        whole.output[0] = f"{made}.exact"
        casts = (whole.output[0], half, onnx.TensorProto.FLOAT16), (half, made, onnx.TensorProto.FLOAT)
        model.graph.node.extend(onnx.helper.make_node("Cast", [x], [y], to=to) for x, y, to in casts)
    return model


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(("channels", "activation"), [(16, "Relu"), (24, "Clip"), (20, None)])
def test_shortcut_in_float(
    channels: int,
    activation: str | None,
    precision: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks whose shortcut no quantizer rounds, and layers that round one sum to grids of their own.

    With `float_precision=float16` shortcuts lie as float16, once rounded.
    """
    graph = Graph("shortcut", channels)
    grids = [Quant(np.float32(scale), np.asarray(zero), "s8") for scale, zero in ((0.05, 0), (0.031, 0))]

    def layer(x: str, quant: Quant, kernel: int) -> str:
        weights = graph.weight(
            graph.codes((channels, channels, kernel, kernel)), graph.weight_quant(channels)
        )
        bias = graph.floats(graph.rng.normal(0, 0.3, channels))
        return graph.node("Conv", [graph.qdq(x, quant), weights, bias], pads=[kernel // 2] * 4)

    def summed(made: str, shortcut: str) -> str:
        both = graph.node("Add", [made, shortcut])
        if activation is None:
            return both
        limits = [graph.floats(-0.4), graph.floats(1.7)] if activation == "Clip" else []
        return graph.node(activation, [both, *limits])

    dims = ["N", channels, "H", "W"]
    x, other = graph.input(dims, name="x"), graph.input(["M", channels, "H", "W"], name="other")
    first = graph.node("Relu", [layer(x, grids[0], 1)])
    second = summed(layer(graph.node("Relu", [layer(first, grids[0], 3)]), grids[1], 1), first)
    third = summed(layer(second, grids[0], 1), layer(second, grids[1], 3))
    beside = graph.node("Relu", [layer(other, grids[0], 1)])
    graph.output(summed(layer(third, grids[1], 1), beside), dims)
    converted = lowbit.convert(graph.proto()).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu = whole_on_gpu(converted, float_precision=precision)
    for count in (3, 1):  # the last sum broadcasts
        rng = np.random.default_rng(count)
        feeds = {name: rng.normal(0, 1, (batch, channels, 5, 7)).astype(np.float32)
                 for name, batch in (("x", 3), ("other", count))}  # fmt: skip
        made = on_gpu.run(None, feeds)
        steps = _plan(capfd)["steps"]
        halves = [step["nodes"][-1] for step in steps if step["to"].endswith("(nhwc float16)")]
        assert len(halves) == (0 if precision == "float32" else 3 if count == 3 else 2)
        on_cpu = lowbit_session(_rounded_to_half(converted, halves))
        assert_equal(made, on_cpu.run(None, feeds), f"{count} of them are added")
        joined = [step for step in steps if any(node.endswith(".Add") for node in step["nodes"])]
        assert [len(step["nodes"]) for step in joined] == [2 if activation is None else 3] * 3
        assert [len(step.get("stores", [])) for step in joined] == [2, 1, 0]
        assert [step["kernel"].startswith("quantize") for step in steps].count(True) == 2, "of the inputs"


def test_relu_between_two_grids(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a table behind the convolution."""
    net = Network(3)
    y = net.grid(net.node("Relu", [net.layer(net.grid("x"), 3, 32, 3)]))
    last = net.grid(net.node("Relu", [net.layer(y, 32, 48)]))
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", channels, "H", "W"])
        for name, channels in (("x", 3), (last, 48))
    ]
    graph = onnx.helper.make_graph(net.nodes, "grids", values[:1], values[1:], net.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    converted = lowbit.convert(model).model
    assert [node.op_type for node in converted.graph.node].count("LowBitRequantize") == 2
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    feeds = {"x": images(2, 3, 9, 7)}
    assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), "two grids")
    assert [len(step["nodes"]) for step in _plan(capfd)["steps"]] == [3, 2, 1]


@pytest.mark.parametrize("ends", [True, False])
def test_float16_around_codes(
    ends: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block in float16 between its layers runs as the one in float32, but for Casts at the ends."""
    graph = Graph("half", 5)
    grids = itertools.cycle(Quant(np.float32(scale), np.asarray(0), "s8") for scale in (0.05, 0.031, 0.02))

    def layer(x: str, channels: int, made: int, kernel: int) -> str:
        weights = graph.weight(graph.codes((made, channels, kernel, kernel)), graph.weight_quant(made))
        bias = graph.floats(graph.rng.normal(0, 0.3, made))
        return graph.node("Conv", [graph.qdq(x, next(grids)), weights, bias], pads=[kernel // 2] * 4)

    def silu(x: str) -> str:
        return graph.node("Mul", [x, graph.node("Sigmoid", [x])])

    first = silu(layer(graph.input(["N", 16, "H", "W"], name="x"), 16, 32, 3))
    summed = graph.node("Add", [silu(layer(first, 32, 32, 3)), first])
    means = graph.node("GlobalAveragePool", [summed])
    gates = graph.node("HardSigmoid", [layer(graph.node("Relu", [layer(means, 32, 16, 1)]), 16, 32, 1)])
    gated = graph.node("Mul", [summed, gates])
    pooled = graph.node("MaxPool", [graph.qdq(gated, next(grids))], kernel_shape=[2, 2], strides=[2, 2])
    scales = graph.const(np.asarray([1, 1, 2, 2], np.float32))
    nearest = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    larger = graph.node("Resize", [pooled, "", scales], mode="nearest", **nearest)
    joined = graph.node("Concat", [larger, gated], axis=1)
    shares = graph.node("Softmax", [layer(joined, 64, 24, 1)], axis=1)
    graph.output(shares, ["N", 24, "H", "W"])
    model = graph.proto()
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    x = np.random.default_rng(2).normal(0, 1, (2, 16, 8, 6)).astype(np.float32)
    kernels = []
    ends_in = np.float16 if ends else np.float32
    for source, dtype in ((in_half(model, ends=ends), ends_in), (model, np.float32)):
        converted = lowbit.convert(source).model
        (got,) = whole_on_gpu(converted).run(None, {"x": x.astype(dtype)})
        (want,) = lowbit_session(converted).run(None, {"x": x.astype(dtype)})
        assert got.dtype == want.dtype == dtype
        # A Softmax in float32 stands last.
        np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == np.float16 else 1e-5, atol=1e-6)
        kernels.append([step["kernel"] for step in _plan(capfd)["steps"]])
    in_half_file, in_float = kernels
    assert in_half_file.count("cast") == (2 if ends else 0)
    assert [kernel for kernel in in_half_file if kernel != "cast"] == in_float


@pytest.mark.parametrize("between", [None, "Sigmoid", "Relu"])
@pytest.mark.parametrize(
    ("wide", "squeezed", "gate_first"), [(16, 8, True), (80, 20, False), (304, 40, True)]
)
def test_squeeze_and_excite(between: str | None, gate_first: bool, wide: int, squeezed: int) -> None:
    net = Network(3)
    net.rng = np.random.default_rng(wide)
    y = net.layer(net.grid("x"), 3, wide, 3)
    gate = net.grid(net.node("GlobalAveragePool", [y]))
    gate = net.layer(gate, wide, squeezed)
    if between is not None:
        gate = net.grid(net.node(between, [gate]))
    gate = net.grid(net.node("HardSigmoid", [net.layer(gate, squeezed, wide)]))
    last = net.grid(net.node("Mul", [gate, y] if gate_first else [y, gate]))
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", channels, "H", "W"])
        for name, channels in (("x", 3), (last, wide))
    ]
    graph = onnx.helper.make_graph(net.nodes, "excite", values[:1], values[1:], net.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    converted = lowbit.convert(model).model
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for shape in ((1, 3, 7, 7), (3, 3, 1, 2), (2, 3, 15, 20)):
        feeds = {"x": images(*shape, seed=wide)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_dense_block(
    nested: bool, relu: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Concat, whoever reads it, the normalization behind it and its 1x1 layer may be one launch."""
    net = Network(3)
    net.rng = np.random.default_rng(7)
    channels, y = 32, net.layer(net.grid("x"), 3, 32, 3)
    parts = [y]
    for growth in (16, 32, 48):
        numbers = [
            net.const(values.astype(np.float32), "numbers")
            for values in (
                net.rng.uniform(-1, 1.5, channels),
                net.rng.normal(0, 0.3, channels),
                net.rng.normal(0, 0.3, channels),
                net.rng.uniform(0.5, 2, channels),
            )
        ]
        normal = net.node("BatchNormalization", [y, *numbers])
        normal = net.grid(net.node("Relu", [normal]) if relu else normal)
        made = net.layer(net.layer(normal, channels, 64), 64, growth, 3)
        parts = [y, made] if nested else [*parts, made]
        y, channels = net.grid(net.node("Concat", parts, axis=1)), channels + growth
    last = net.layer(y, channels, 16)
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", count, "H", "W"])
        for name, count in (("x", 3), (last, 16))
    ]
    graph = onnx.helper.make_graph(net.nodes, "dense", values[:1], values[1:], net.constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    converted = lowbit.convert(model).model
    assert [node.op_type for node in converted.graph.node].count("LowBitAffine") == 3
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu = whole_on_gpu(converted)
    on_cpu = lowbit_session(converted)
    for shape in ((1, 3, 7, 7), (3, 3, 15, 20)):
        feeds = {"x": images(*shape)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        steps = _plan(capfd)["steps"]
        affined = [step for step in steps if any("batchnormalization" in node for node in step["nodes"])]
        assert [len(step["nodes"]) for step in affined] == [2] * 3
        assert sum("with the next" in step["kernel"] for step in steps) >= 2, "Concats that stand before them"


def test_pictures_of_any_size() -> None:
    """More sizes than a region keeps plans of, and those again."""
    source = qdq_conv(dynamic=True)
    model = lowbit.convert(source, preprocess="resize=12,crop=9x10,scale=1/32").model
    on_gpu, on_cpu = whole_on_gpu(model), lowbit_session(model)
    rng = np.random.default_rng(0)
    for height, width in [(9 + 7 * i, 60 - 2 * i) for i in range(20)] * 2:
        feeds = {"x": rng.integers(0, 256, (2, height, width, 3), dtype=np.uint8)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{height}x{width}")


@pytest.mark.parametrize("mapped", [0, 1])
def test_table_in_front_of_an_addition(
    mapped: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two inputs, of which one becomes a function of its codes first."""
    nodes: list[onnx.NodeProto] = []
    constants = {"zero": np.uint8(0), "z": np.uint8(120), "x_s": np.float32(0.03), "g_s": np.float32(1 / 255)}
    operands = [_pair(nodes, "a", "x_s", "z"), _pair(nodes, "b", "x_s", "z")]
    nodes.append(onnx.helper.make_node("Sigmoid", [operands[mapped]], ["gate"]))
    operands[mapped] = _pair(nodes, "gate", "g_s", "zero")
    nodes.append(onnx.helper.make_node("Add", operands, ["sum"]))
    _pair(nodes, "sum", "x_s", "z")
    model = _model("mapped_sum", nodes, {key: ["N", 5, "H", 7] for key in ("a", "b")}, "sum_dq", constants)
    converted = lowbit.convert(model, all_regions=True).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    rng = np.random.default_rng(3)
    for shape in ((1, 5, 9, 7), (3, 5, 1, 7)):
        feeds = {name: rng.normal(0, 2, shape).astype(np.float32) for name in ("a", "b")}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        kernels = [step["kernel"] for step in _plan(capfd)["steps"]]
        assert "add_table" in kernels
        assert not [kernel for kernel in kernels if "lookup" in kernel]


def test_zero_points_of_weights(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of uint8 with a zero point each, as older files have them, run on the fast kernels."""
    rng = np.random.default_rng(4)
    nodes: list[onnx.NodeProto] = []
    constants = {
        "x_z": np.uint8(117),
        "x_s": np.float32(0.03),
        "w_s": np.float32(0.002),
        "w_z": np.uint8(109),
    }
    x = "x"
    for name, channels, out, kernel, group in (
        ("one", 32, 48, 1, 1), ("deep", 48, 48, 3, 48), ("wide", 48, 48, 5, 48), ("all", 48, 64, 3, 1),
        ("odd", 64, 10, 1, 1),
    ):  # fmt: skip
        constants[f"{name}_w"] = rng.integers(0, 256, (out, channels // group, kernel, kernel)).astype(
            np.uint8
        )
        nodes.append(onnx.helper.make_node("DequantizeLinear", [f"{name}_w", "w_s", "w_z"], [f"{name}_d"]))
        operands = [_pair(nodes, x, "x_s", "x_z"), f"{name}_d"]
        pads = [kernel // 2] * 4
        nodes.append(onnx.helper.make_node("Conv", operands, [name], pads=pads, group=group))
        x = name
    y = _pair(nodes, x, "x_s", "x_z")
    model = _model("unsigned_weights", nodes, {"x": ["N", 32, "H", "W"]}, y, constants)
    converted = lowbit.convert(model).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for shape in ((1, 32, 9, 7), (3, 32, 12, 5)):
        feeds = {"x": rng.normal(0, 1.5, shape).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        kernels = [step["kernel"] for step in _plan(capfd)["steps"]]
        assert kernels.count("depthwise") == 2
        assert "plain" not in kernels


def test_block_of_a_detector(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What convolutions make lies where Split and Concat would bring it; they add behind functions, too."""
    rng = np.random.default_rng(5)
    constants: dict[str, np.ndarray] = {
        "zero": np.asarray(np.uint8(0)), "w_s": np.asarray(np.float32(0.004)),
        "w_zero": np.asarray(np.int8(0)), "sizes": np.array([16, 32]),
        "double": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    nearest = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    nodes: list[onnx.NodeProto] = []

    def quantized(name: str, scale: float, zero: int) -> str:
        constants[f"{name}_s"] = np.asarray(np.float32(scale))
        constants[f"{name}_z"] = np.asarray(np.uint8(zero))
        return _pair(nodes, name, f"{name}_s", f"{name}_z")

    def layer(x: str, name: str, channels: int, out: int, kernel: int, gate_scale: float) -> str:
        constants[f"{name}_w"] = rng.integers(-127, 128, (out, channels, kernel, kernel)).astype(np.int8)
        nodes.append(onnx.helper.make_node("DequantizeLinear", [f"{name}_w", "w_s", "w_zero"], [f"{name}_d"]))
        pads = [kernel // 2] * 4
        nodes.append(onnx.helper.make_node("Conv", [x, f"{name}_d"], [name], pads=pads))
        made = quantized(name, 0.09, 131)
        nodes.append(onnx.helper.make_node("HardSwish", [made], [f"{name}_g"]))
        return quantized(f"{name}_g", gate_scale, 7)

    whole = layer(quantized("x", 0.03, 120), "a", 16, 48, 1, 0.04)
    nodes.append(onnx.helper.make_node("Split", [whole, "sizes"], ["first", "second"], axis=1))
    first, second = quantized("first", 0.04, 7), quantized("second", 0.04, 7)
    branch = layer(layer(second, "b", 32, 64, 3, 0.05), "c", 64, 32, 3, 0.06)
    nodes.append(onnx.helper.make_node("Add", [second, branch], ["sum"]))
    total = quantized("sum", 0.08, 30)
    last = layer(total, "d", 32, 32, 3, 0.05)
    nodes.append(onnx.helper.make_node("Concat", [first, second, total, last], ["joined"], axis=1))
    pooled = [layer(quantized("joined", 0.08, 30), "e", 112, 16, 1, 0.05)]
    for name in ("pool", "again"):
        nodes.append(
            onnx.helper.make_node("MaxPool", [pooled[-1]], [name], kernel_shape=[5, 5], pads=[2, 2, 2, 2])
        )
        pooled.append(quantized(name, 0.05, 7))
    nodes.append(onnx.helper.make_node("Concat", pooled, ["pyramid"], axis=1))
    small = layer(quantized("pyramid", 0.05, 7), "f", 48, 32, 1, 0.04)
    larger = []
    for name, x, scale in (("one", small, 0.04), ("two", pooled[1], 0.05)):
        nodes.append(onnx.helper.make_node("Resize", [x, "", "double"], [name], mode="nearest", **nearest))
        larger.append(quantized(name, scale, 7))
    nodes.append(onnx.helper.make_node("Concat", larger, ["scales"], axis=1))
    out = layer(quantized("scales", 0.06, 5), "g", 48, 16, 1, 0.05)
    model = _model("block", nodes, {"x": ["N", 16, "H", "W"]}, out, constants)
    converted = lowbit.convert(model).model
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    on_gpu, on_cpu = whole_on_gpu(converted), lowbit_session(converted)
    for shape in ((1, 16, 9, 7), (3, 16, 5, 6)):
        feeds = {"x": rng.normal(0, 1.5, shape).astype(np.float32)}
        assert_equal(on_gpu.run(None, feeds), on_cpu.run(None, feeds), f"{shape}")
        plan = _plan(capfd)
        ops = [name for step in plan["steps"] for name in step["nodes"]]
        assert sum("stores" in step for step in plan["steps"]) == 8
        assert not [name for name in ops if "Concat" in name or "Split" in name]
