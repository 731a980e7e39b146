"""Other exporters: pytorch-quantization, ModelOpt, Brevitas, FakeQuantize, NNCF, tf2onnx, PPQ, Quark."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.dialects.graphs.blocks import batch_norm, conv_layer, conv_node, gemm_weight, quantized_input
from tests.dialects.graphs.builder import Graph, Quant, as_tensor, case

# -- pytorch-quantization and NVIDIA ModelOpt


@case()
def pytorch_quantization_no_output_quantizer(g: Graph) -> None:
    """fp32 weights behind Q/DQ, float bias, Relu, and the next layer's own input quantizer behind it."""
    x, xq = quantized_input(g, (1, 3, 10, 10), "s8", zero=0)
    y, yq = conv_layer(
        g, x, xq, (8, 3, 3, 3), weights="float", bias="float", y_kind="s8", y_zero=0,
        then=[lambda v: g.node("Relu", [v])],
    )  # fmt: skip
    z, _, _ = conv_node(g, y, yq, (8, 8, 3, 3), weights="float", bias="float")
    g.output(g.node("Relu", [z]), (1, 8, 6, 6))


@case()
def modelopt_one_residual_branch(g: Graph) -> None:
    """Q/DQ on the shortcut only: the convolution enters the Add in float32, rounded once behind the Relu."""
    x = g.input((1, 8, 8, 8))
    xq = g.act(0.03, "s8", zero=0)
    xd = g.qdq(x, xq)
    y, yq = conv_layer(
        g, xd, xq, (8, 8, 3, 3), weights="float", bias="float", y_kind="s8", y_zero=0, pads=[1, 1, 1, 1],
        then=[lambda v: g.node("Relu", [v])],
    )  # fmt: skip
    z, wq, terms = conv_node(g, y, yq, (8, 8, 3, 3), weights="float", bias="float", pads=[1, 1, 1, 1])
    shortcut = g.qdq(x, g.act(0.03, "s8", zero=0))
    total = g.node("Relu", [g.node("Add", [z, shortcut])])
    total_quant = g.after(yq, wq, terms, "s8", zero=0)
    last, _, _ = conv_node(
        g, g.qdq(total, total_quant), total_quant, (4, 8, 1, 1), weights="float", bias="float"
    )
    g.output(last, (1, 4, 8, 8))


@case()
def modelopt_integer_bias_and_residual(g: Graph) -> None:
    """The same with the shortcut from a layer and no bias: Conv -> Add(DQ) -> Q."""
    x, xq = quantized_input(g, (1, 8, 8, 8), "s8", zero=0)
    y, wq, terms = conv_node(g, x, xq, (8, 8, 3, 3), pads=[1, 1, 1, 1], bias=None)
    yq = g.after(xq, wq, terms, "s8")
    g.output(g.qdq(g.node("Add", [x, y]), yq), (1, 8, 8, 8))


@case()
def modelopt_dq_only(g: Graph) -> None:
    """--dq_only: int8 weights behind a DQ, everything else as before."""
    x, xq = quantized_input(g, (1, 3, 10, 10), "s8", zero=0)
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), bias="float", y_kind="s8", y_zero=0)
    z, _, _ = conv_node(g, y, yq, (8, 8, 3, 3), bias="float")
    g.output(z, (1, 8, 6, 6))


def _half_scale(g: Graph, quant: Quant) -> str:
    """A float16 scale behind a Cast to float32."""
    half = g.const(np.asarray(quant.scale, np.float16), "scale_fp16")
    return g.node("Cast", [half], to=TensorProto.FLOAT)


def _half(quant: Quant) -> Quant:
    return Quant(quant.scale.astype(np.float16).astype(np.float32), quant.zero, quant.kind, quant.axis)


@case()
def fp16_scales_behind_casts(g: Graph) -> None:
    """Scales stored as float16 and cast: every value is a float32 that float16 can hold."""
    xq = _half(g.act(0.03, "s8", zero=0))
    wq = _half(g.weight_quant(8))
    yq = _half(g.after(xq, wq, 36, "s8", zero=0))
    x = g.input((1, 4, 8, 8), step=float(xq.scale))
    scale, zero = _half_scale(g, xq), g.const(as_tensor(xq.zero, "s8", ""), "zero_point")
    x = g.node("DequantizeLinear", [g.node("QuantizeLinear", [x, scale, zero]), scale, zero])
    codes = g.const(as_tensor(g.codes((8, 4, 3, 3)), "s8", ""), "weight")
    weight = g.node(
        "DequantizeLinear",
        [codes, _half_scale(g, wq), g.const(as_tensor(wq.zero, "s8", ""), "zero_point")],
        axis=0,
    )
    y = g.node("Conv", [x, weight])
    scale, zero = _half_scale(g, yq), g.const(as_tensor(yq.zero, "s8", ""), "zero_point")
    y = g.node("DequantizeLinear", [g.node("QuantizeLinear", [y, scale, zero]), scale, zero])
    g.output(y, (1, 8, 6, 6))


@case(left={"Conv": "(?i)float16"})
def fp16_scales_power_of_two(g: Graph) -> None:
    """Opset 19: Q and DQ compute in float16, whose roundings lowbit does not follow; left alone."""
    g.opset, g.ir_version = 19, 9
    power = lambda v: np.exp2(np.rint(np.log2(v)))  # noqa: E731
    xq = Quant(power(g.act(0.03).scale), np.asarray(0), "s8")
    wq = Quant(power(g.weight_quant(8).scale), np.zeros(8), "s8", 0)
    x = g.node("Cast", [g.input((1, 4, 8, 8))], to=TensorProto.FLOAT16)
    x = g.dq(g.q(x, xq, dtype=np.float16), xq, dtype=np.float16)
    x = g.node("Cast", [x], to=TensorProto.FLOAT)
    w = g.dq(g.const(as_tensor(g.codes((8, 4, 3, 3)), "s8", ""), "weight"), wq, dtype=np.float16)
    w = g.node("Cast", [w], to=TensorProto.FLOAT)
    y = g.node("Conv", [x, w])
    g.output(g.qdq(y, g.after(xq, wq, 36, "s8")), (1, 8, 6, 6))


@case(left={"MatMul": "block"})
def int4_block_weights(g: Graph) -> None:
    """int4 weights with a scale per block of 16 (opset 21): left alone."""
    g.opset, g.ir_version = 21, 10
    x, _xq = quantized_input(g, (2, 32), "s8", zero=0)
    codes = g.const(as_tensor(g.codes((32, 8), "s4"), "s4", ""), "weight")
    scales = g.floats(g.scale(0.02, 16).reshape(2, 8), "scale")
    w = g.node("DequantizeLinear", [codes, scales], axis=0, block_size=16)
    g.output(g.node("MatMul", [x, w]), (2, 8))


# -- Brevitas QCDQ


def _clip_bounds(bits: int, signed: bool, narrow: bool) -> tuple[int, int]:
    if not signed:
        return 0, 2**bits - 1 - narrow
    return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1


def _qcdq(g: Graph, x: str, quant: Quant, bits: int, *, narrow: bool = False) -> str:
    """Q -> Clip -> DQ, the activation quantizer of Brevitas' QCDQ export."""
    low, high = _clip_bounds(bits, quant.kind == "s8", narrow)
    params = g._quant_inputs(quant, True)
    codes = g.node("QuantizeLinear", [x, *params])
    if bits < 8 or narrow:
        bounds = [g.const(as_tensor(np.asarray(v), quant.kind, ""), "bound") for v in (low, high)]
        codes = g.node("Clip", [codes, *bounds])
    return g.node("DequantizeLinear", [codes, *params])


def _brevitas_weight(g: Graph, shape: tuple[int, ...], bits: int, *, narrow: bool = True, axis: int = 0):
    """Integer weights -> Clip -> DQ."""
    low, high = _clip_bounds(bits, True, narrow)
    quant = g.weight_quant(shape[axis], "s8", axis=axis)
    codes = g.const(as_tensor(g.codes(shape, low=low, high=high), "s8", ""), "weight")
    bounds = [g.const(as_tensor(np.asarray(v), "s8", ""), "bound") for v in (low, high)]
    return g.dq(g.node("Clip", [codes, *bounds]), quant), quant


def _brevitas_network(g: Graph, x_bits: int, w_bits: int) -> None:
    g.constants = "node"
    xq = g.act(2.0**-x_bits * 8, "s8", zero=0)
    x = _qcdq(g, g.input((1, 3, 8, 8), step=float(xq.scale)), xq, x_bits, narrow=True)
    w, wq = _brevitas_weight(g, (8, 3, 3, 3), w_bits)
    y = g.node("Relu", [g.node("Conv", [x, w])])
    deviation = np.sqrt(27) * 2**x_bits / 3.5 * 2**w_bits / 3.5 * float(xq.scale) * np.mean(wq.scale)
    yq = Quant(g.scale(deviation * 2.5 / 2**x_bits), np.asarray(0), "u8")
    y = _qcdq(g, y, yq, x_bits)
    w, wq = _brevitas_weight(g, (8, 8, 3, 3), w_bits, narrow=False)
    bias_quant = Quant(np.asarray(yq.scale * wq.scale, np.float32), np.zeros(8), "s32", 0)
    bias = g.dq(g.const(g.rng.integers(-20, 20, 8).astype(np.int32), "bias"), bias_quant)
    z = g.node("Conv", [y, w, bias])
    deviation = np.sqrt(72) * 2**x_bits / 3.5 * 2**w_bits / 3.5 * float(yq.scale) * np.mean(wq.scale)
    zq = Quant(g.scale(deviation * 5 / 2**x_bits), np.asarray(0), "s8")
    g.output(_qcdq(g, z, zq, x_bits), (1, 8, 4, 4))


def _register_brevitas() -> None:
    for x_bits, w_bits in [(8, 8), (7, 5), (6, 6), (5, 7), (4, 4), (3, 3), (2, 2), (8, 2), (2, 8), (4, 8)]:

        def build(g: Graph, x_bits: int = x_bits, w_bits: int = w_bits) -> None:
            _brevitas_network(g, x_bits, w_bits)

        build.__name__ = f"brevitas_w{w_bits}a{x_bits}"
        case()(build)


_register_brevitas()


@case()
def brevitas_int8_bias(g: Graph) -> None:
    """The bias is an int8 container behind a DQ with a scale of its own."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    w, wq = _brevitas_weight(g, (8, 4, 3, 3), 4)
    bq = Quant(g.scale(float(xq.scale) * float(np.mean(wq.scale)) * 20), np.asarray(0), "s8")
    bias = g.weight(g.codes((8,)), bq)
    y = g.node("Conv", [x, w, bias])
    g.output(g.qdq(y, g.after(xq, wq, 36, w_range=16)), (1, 8, 6, 6))


@case(left={"Conv": "per.?channel|per.?axis|channel"})
def brevitas_per_channel_activations(g: Graph) -> None:
    """A dense convolution cannot take a scale per input channel out of its sum."""
    xq = Quant(g.scale(0.03, 4) * np.array([1, 2, 1, 3], np.float32), np.zeros(4), "s8", 1)
    x = g.qdq(g.input((1, 4, 8, 8)), xq)
    w, _wq = _brevitas_weight(g, (8, 4, 3, 3), 8)
    g.output(g.node("Conv", [x, w]), (1, 8, 6, 6))


@case()
def brevitas_linear(g: Graph) -> None:
    x, xq = quantized_input(g, (3, 24), "s8", zero=0)
    w, wq = _brevitas_weight(g, (10, 24), 4)
    y = g.node("Gemm", [x, w], transB=1)
    yq = g.after(xq, wq, 24, "s8", w_range=16)
    g.output(_qcdq(g, y, yq, 4), (3, 10))


@case()
def brevitas_clip_of_float_weights(g: Graph) -> None:
    """fp32 weights -> Q -> Clip -> DQ: the export of a model whose weights were not frozen."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    wq = g.weight_quant(8)
    codes = g.codes((8, 4, 3, 3), low=-9, high=9)  # the Clip cuts some of them
    value = (codes * np.reshape(wq.scale, (-1, 1, 1, 1))).astype(np.float32)
    params = g._quant_inputs(wq, True)
    w = g.node("QuantizeLinear", [g.const(value, "weight"), *params], axis=0)
    bounds = [g.const(np.asarray(v, np.int8), "bound") for v in (-7, 7)]
    w = g.node("DequantizeLinear", [g.node("Clip", [w, *bounds]), *params], axis=0)
    y = g.node("Conv", [x, w])
    g.output(g.qdq(y, g.after(xq, wq, 36, w_range=15)), (1, 8, 6, 6))


@case()
def brevitas_initializers_are_inputs(g: Graph) -> None:
    """As Brevitas exports (and all files before IR version 4): every initializer is a graph input as well."""
    g.constants = "input"
    x, _ = quantized_input(g, (1, 3, 8, 8), "s8", zero=0)
    wq = g.weight_quant(None)
    value = g.const((g.codes((6, 3, 3, 3), low=-7, high=7) * wq.scale).astype(np.float32), "weight")
    params = g._quant_inputs(wq, True)
    bounds = [g.const(np.asarray(v, np.int8), "bound") for v in (-7, 7)]
    w = g.node("Clip", [g.node("QuantizeLinear", [value, *params]), *bounds])
    y = g.node("Conv", [x, g.node("DequantizeLinear", [w, *params])])
    y = g.node("Relu", [batch_norm(g, y, 6)])
    g.output(_qcdq(g, y, Quant(g.scale(0.2), np.asarray(0), "u8"), 4), (1, 6, 6, 6))


# -- PyTorch FakeQuantize, NNCF


@case()
def fake_quantize(g: Graph) -> None:
    """FakeQuantize: u8 0..127 activations (reduce_range), weights with Clip at -127, float bias."""
    g.constants = "node"
    xq = g.act(0.03, "u8", zero=64)
    x = g.input((1, 4, 8, 8), step=float(xq.scale))
    params = g._quant_inputs(xq, True)
    bounds = [g.const(np.asarray(v, np.uint8), "bound") for v in (0, 127)]
    codes = g.node("Clip", [g.node("QuantizeLinear", [x, *params]), *bounds])
    x = g.node("DequantizeLinear", [codes, *params])
    wq = g.weight_quant(8)
    value = (g.codes((8, 4, 3, 3)) * np.reshape(wq.scale, (-1, 1, 1, 1))).astype(np.float32)
    params = g._quant_inputs(wq, True)
    bounds = [g.const(np.asarray(v, np.int8), "bound") for v in (-127, 127)]
    w = g.node("Clip", [g.node("QuantizeLinear", [g.const(value, "weight"), *params], axis=0), *bounds])
    w = g.node("DequantizeLinear", [w, *params], axis=0)
    bias = g.floats(g.rng.normal(size=8), "bias")
    y = g.node("Relu", [g.node("Conv", [x, w, bias])])
    yq = g.after(xq, wq, 36, zero=0)
    params = g._quant_inputs(yq, True)
    bounds = [g.const(np.asarray(v, np.uint8), "bound") for v in (0, 127)]
    codes = g.node("Clip", [g.node("QuantizeLinear", [y, *params]), *bounds])
    g.output(g.node("DequantizeLinear", [codes, *params]), (1, 8, 6, 6))


@case()
def nncf(g: Graph) -> None:
    """axis is always written, per-tensor quantizers included; fp32 weights, float bias."""
    xq = g.act(0.03, "s8", zero=0)
    x = g.input((1, 4, 8, 8), step=float(xq.scale))
    params = g._quant_inputs(xq, True)
    x = g.node("DequantizeLinear", [g.node("QuantizeLinear", [x, *params], axis=1), *params], axis=1)
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3), weights="float", bias="float")
    yq = g.after(xq, wq, terms, "u8", zero=0)
    params = g._quant_inputs(yq, True)
    y = g.node("QuantizeLinear", [g.node("Relu", [y]), *params], axis=1)
    g.output(g.node("DequantizeLinear", [y, *params], axis=1), (1, 8, 6, 6))


# -- tf2onnx


def _tf_conv(g: Graph, x: str, xq: Quant, hwio: tuple[int, ...], *, depthwise: bool = False, **attributes):
    """An NHWC layer as tf2onnx leaves it: Q of HWIO weights, Transpose (and Reshape) to OIHW, DQ."""
    h, w, i, o = hwio
    quant = g.weight_quant(None)
    codes = g.codes(hwio)
    value = g.const((codes * quant.scale).astype(np.float32), "weight")
    params = g._quant_inputs(quant, True)
    stored = g.node("QuantizeLinear", [value, *params])
    if depthwise:
        # [h, w, c, multiplier] -> [c * multiplier, 1, h, w]
        stored = g.node("Reshape", [stored, g.ints([h, w, 1, i * o])])
        attributes["group"] = i
    weight = g.node("DequantizeLinear", [g.node("Transpose", [stored], perm=[3, 2, 0, 1]), *params])
    channels = i * o if depthwise else o
    bias = g.bias(channels, xq, quant)
    x = g.node("Transpose", [x], perm=[0, 3, 1, 2])
    y = g.node("Transpose", [g.node("Conv", [x, weight, bias], **attributes)], perm=[0, 2, 3, 1])
    yq = g.after(xq, quant, h * w * (1 if depthwise else i), "s8", w_range=256)
    return g.qdq(y, yq), yq


@case()
def tf2onnx_nhwc(g: Graph) -> None:
    x, xq = quantized_input(g, ("N", 8, 8, 3), "s8")
    y, yq = _tf_conv(g, x, xq, (3, 3, 3, 8), auto_pad="SAME_UPPER", strides=[2, 2])
    y, yq = _tf_conv(g, y, yq, (3, 3, 8, 1), depthwise=True, auto_pad="SAME_UPPER")
    y, yq = _tf_conv(g, y, yq, (1, 1, 8, 4))
    g.output(y, ("N", 4, 4, 4))


@case()
def tf2onnx_classifier(g: Graph) -> None:
    """NHWC network with a residual, a mean over H and W and a dense layer."""
    x, xq = quantized_input(g, (1, 6, 6, 4), "s8")
    y, yq = _tf_conv(g, x, xq, (3, 3, 4, 4), pads=[1, 1, 1, 1])
    sq = g.act(float(xq.scale) + float(yq.scale), "s8")
    y = g.qdq(g.node("Add", [y, x]), sq)
    mq = g.act(float(sq.scale) / 4, "s8")
    y = g.qdq(g.node("ReduceMean", [y], axes=[1, 2], keepdims=0), mq)
    w, wq = gemm_weight(g, 4, 10, per_channel=False)
    y = g.node("MatMul", [y, w])
    g.output(g.qdq(y, g.after(mq, wq, 4, "s8")), (1, 10))


@case()
def tf2onnx_reshape_between_q_and_dq(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 6, 6))
    wq = g.weight_quant(None)
    value = g.const((g.codes((8, 36)) * wq.scale).astype(np.float32), "weight")
    params = g._quant_inputs(wq, True)
    codes = g.node("Reshape", [g.node("QuantizeLinear", [value, *params]), g.ints([8, 4, 3, 3])])
    y = g.node("Conv", [x, g.node("DequantizeLinear", [codes, *params])])
    g.output(g.qdq(y, g.after(xq, wq, 36)), (1, 8, 4, 4))


@case()
def identity_and_squeeze_between(g: Graph) -> None:
    """Identity between Q and DQ of the activation, Squeeze between those of the weights."""
    xq = g.act(0.03)
    x = g.input((1, 4, 6, 6), step=float(xq.scale))
    x = g.dq(g.node("Identity", [g.q(x, xq)]), xq)
    wq = g.weight_quant(None)
    params = g._quant_inputs(wq, True)
    codes = g.const(as_tensor(g.codes((1, 8, 4, 3, 3)), "s8", ""), "weight")
    codes = g.node("Squeeze", [g.node("Identity", [codes]), g.ints([0])])
    y = g.node("Conv", [x, g.node("DequantizeLinear", [codes, *params])])
    g.output(g.qdq(y, g.after(xq, wq, 36)), (1, 8, 4, 4))


# -- PPQ, Quark


@case()
def ppq_asymmetric(g: Graph) -> None:
    """Asymmetric u8 weights behind fp32 + Q + DQ, per channel, Relu dropped."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(
        g, x, xq, (8, 4, 3, 3), w_kind="u8", symmetric=False, weights="float", pads=[1, 1, 1, 1]
    )
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), w_kind="u8", symmetric=False, weights="float")
    g.output(z, (1, 8, 6, 6))


@case()
def quark_power_of_two(g: Graph) -> None:
    """Power-of-two scales everywhere: nearly every result lies on the grid or halfway."""
    g.flavour = "ties"
    x, xq = quantized_input(g, (1, 4, 8, 8), "s8", zero=0)
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), w_range=(-4, 4), y_kind="s8", y_zero=0, per_channel=False)
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), w_range=(-4, 4), y_kind="s8", y_zero=0, per_channel=False)
    g.output(z, (1, 8, 4, 4))


@case(loads_in_stock=False)
def scales_of_rank_four(g: Graph) -> None:
    """[C, 1, 1, 1] scales: outside the standard, yet written by some; stock ONNX Runtime refuses them."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    wq = g.weight_quant(8)
    scale = g.floats(np.reshape(wq.scale, (8, 1, 1, 1)), "scale")
    zero = g.const(as_tensor(np.zeros((8, 1, 1, 1)), "s8", ""), "zero_point")
    w = g.node(
        "DequantizeLinear",
        [g.const(as_tensor(g.codes((8, 4, 3, 3)), "s8", ""), "weight"), scale, zero],
        axis=0,
    )
    y = g.node("Conv", [x, w])
    g.output(g.qdq(y, g.after(xq, wq, 36)), (1, 8, 6, 6))
