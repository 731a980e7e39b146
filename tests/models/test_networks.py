"""The builders of the standard networks: valid models of the promised widths, the same bytes every time."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.models import DETECTORS, FLOAT_NETWORKS, NETWORKS, build
from lowbit.models.calibration import images
from lowbit.models.quantization import ActivationQuantizer, QuantizedWeight
from onnx import TensorProto, numpy_helper

SMALL = {"image": 32, "classes": 10}
# VGG-16 has no layer that the others lack, and many times their weights.
LIGHT = [name for name in NETWORKS if name != "vgg16"]

# Parameters of the torchvision networks at 1000 classes, less what folding a BatchNormalization removes (it
# leaves the convolution one bias a channel) and plus the four parameters of each one that stays.
PARAMETERS = {
    "resnet18": 11_684_712,
    "resnet50": 25_530_472,
    "mobilenetv2": 3_487_816,
    "densenet121": 8_040_040,
    "vgg16": 138_357_544,
    # 5,483,032 and 5,288,548 in torchvision.
    "mobilenetv3large": 5_470_832,
    "efficientnetb0": 5_267_540,
    # As published for the fused networks (3.2, 2.6, 9.4 and 20.1 M), the fixed weights of the distances among
    # them.
    "yolov8n": 3_151_904,
    "yolo11n": 2_616_248,
    "yolo11s": 9_443_760,
    "yolo11m": 20_091_712,
}


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def run(model: onnx.ModelProto, samples: np.ndarray, *, optimize: bool = True) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": samples})[0]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "vgg16"])
def test_parameter_count_is_the_standard_networks(name):
    model = build(name, image=32)
    # The places and strides of a detector's cells are constants of the image's size.
    parameters = [t for t in model.graph.initializer if t.dims and not t.name.startswith(("grid", "strides"))]
    assert sum(math.prod(tensor.dims) for tensor in parameters) == PARAMETERS[name]


@pytest.mark.parametrize("batch", ["N", 2])
@pytest.mark.parametrize("name", FLOAT_NETWORKS)
def test_float_networks_run_at_any_batch(name, batch):
    model = build(name, image=64, batch=batch)
    onnx.checker.check_model(model, full_check=True)
    samples = images(2, 64)
    output = run(model, samples)
    # 8 x 8, 4 x 4 and 2 x 2 cells.
    assert output.shape == ((2, 84, 84) if name in DETECTORS else (2, 1000))
    assert [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim[1:]] == [
        *output.shape[1:]
    ]
    assert np.isfinite(output).all()
    assert (output[0] != output[1]).any()
    assert output.std(axis=-1).max() > 0.05
    if batch == "N":
        np.testing.assert_allclose(run(model, samples[1:]), output[1:], rtol=1e-3, atol=1e-3)
    assert model == build(name, image=64, batch=batch)


@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (4, 4), (2, 8), (2, 2), (3, 5), (1, 1), (7, 6)])
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_every_layer_has_the_stated_widths(name, bits):
    w_bits, a_bits = bits
    model = build(name, w_bits, a_bits, **SMALL)
    onnx.checker.check_model(model, full_check=True)
    values = initializers(model)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    producers = {node.output[0]: node for node in model.graph.node}
    weight_type = {4: TensorProto.INT4, 2: TensorProto.INT2}.get(w_bits, TensorProto.INT8)
    code_type = {4: TensorProto.UINT4, 2: TensorProto.UINT2}.get(a_bits, TensorProto.UINT8)
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert layers
    for layer in layers:
        weight = producers[layer.input[1]]
        codes = values[weight.input[0]].astype(int)
        assert weight.op_type == "DequantizeLinear"
        assert types[weight.input[0]] == weight_type
        assert np.abs(codes).max() <= max(2 ** (w_bits - 1) - 1, 1)
        x = producers[layer.input[0]]
        assert x.op_type == "DequantizeLinear"
        assert types[x.input[2]] == code_type
        if a_bits not in (8, 4, 2):
            clip = producers[x.input[0]]
            assert clip.op_type == "Clip"
            assert [int(values[name]) for name in clip.input[1:]] == [0, 2**a_bits - 1]
        bias = producers[layer.input[2]]
        assert types[bias.input[0]] == TensorProto.INT32
        np.testing.assert_array_equal(values[bias.input[1]], values[x.input[1]] * values[weight.input[1]])


@pytest.mark.parametrize("name", LIGHT)
def test_first_and_last_layers_may_have_other_widths(name):
    model = build(name, 1, 2, ends=8, image=32, classes=10)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    values = initializers(model)
    producers = {node.output[0]: node for node in model.graph.node}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    for layer in layers:
        weight, x = producers[layer.input[1]], producers[layer.input[0]]
        is_end = layer in (layers[0], layers[-1])
        assert (np.abs(values[weight.input[0]].astype(int)).max() > 1) == is_end
        assert types[x.input[2]] == (TensorProto.UINT8 if is_end else TensorProto.UINT2)
    with pytest.raises(ValueError, match="ends must be"):
        build(name, 1, 2, ends=9)


@pytest.mark.parametrize("name", LIGHT)
def test_w8a8_computes_what_the_float_network_computes(name):
    samples = images(1, 32, seed=11)
    expected = run(build(name, **SMALL), samples).ravel()
    quantized = build(name, 8, 8, **SMALL)
    onnx.checker.check_model(quantized, full_check=True)
    got = run(quantized, samples).ravel()
    assert np.corrcoef(got, expected)[0, 1] > 0.98
    assert np.isfinite(got).all()


def test_stock_onnxruntime_fuses_every_layer_of_w8a8(tmp_path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = build("resnet18", 8, 8, **SMALL)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert ops.count("QLinearConv") == 20
    assert ops.count("QLinearAdd") == 8
    assert ops.count("QGemm") == 1
    assert not {"Conv", "Add", "Gemm", "Relu"} & set(ops)


def test_signal_survives_two_bits():
    samples = images(2, 32, seed=12)
    model = build("resnet18", 2, 2, **SMALL, batch="N")
    logits = run(model, samples, optimize=False)
    assert logits.shape == (2, 10)
    assert logits.std() > 0.05
    assert (logits[0] != logits[1]).any()


def test_equal_arguments_give_equal_bytes():
    first, second = (
        build("mobilenetv2", 4, 4, **SMALL).SerializeToString(deterministic=True) for _ in range(2)
    )
    assert first == second
    assert first != build("mobilenetv2", 4, 8, **SMALL).SerializeToString(deterministic=True)


def test_batch_may_be_symbolic_or_any_size():
    for batch in ("N", 3):
        model = build("resnet18", 8, 8, **SMALL, batch=batch)
        assert run(model, images(3, 32)).shape == (3, 10)
    # The calibrated network is kept between calls and must not have taken on the batch.
    assert build("resnet18", 8, 8, **SMALL).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet", 8, 8), "unknown network"),
        (("resnet18", 0, 8), "widths must be"),
        (("resnet18", 8, 9), "widths must be"),
        (("resnet18", 8, None), "widths must be"),
        (("yolov8n", 8, 8), "in float32 alone"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments, **SMALL)


def test_bad_image_size_is_refused():
    with pytest.raises(ValueError, match="multiple of 32"):
        build("resnet18", 8, 8, image=100)


def test_quantizers_of_degenerate_tensors():
    assert ActivationQuantizer.of_range(0.0, 0.0, 8) == ActivationQuantizer(np.float32(1), 0, 8)
    assert ActivationQuantizer.of_range(-1.0, 0.0, 4).zero_point == 15
    # A range that leaves out 0 is widened to contain it.
    assert ActivationQuantizer.of_range(1.0, 3.0, 2) == ActivationQuantizer(np.float32(1), 0, 2)
    for bits in range(1, 9):
        weight = QuantizedWeight.of(np.zeros((2, 3), np.float32), bits)
        assert (weight.scale == 1).all()
