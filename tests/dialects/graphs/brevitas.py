"""Brevitas QCDQ beyond the plain case: scales per channel on activations, every width, float16 casts.

Source: brevitas/export/onnx/qcdq, brevitas/export/common/handler/qcdq.py. An activation is QuantizeLinear ->
Clip -> DequantizeLinear, with `axis` and vectors where its scale is per channel; the Clip is left out where
the bounds are those of the type. Weights are integers -> Clip -> DequantizeLinear. What is not float32 is
cast to it in front of the quantizer, and back behind it.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.dialects.graphs.blocks import conv_node, quantized_input
from tests.dialects.graphs.builder import Graph, Quant, as_tensor, case


def bounds_of(bits: int, *, signed: bool, narrow: bool = False) -> tuple[int, int]:
    """Smallest and largest code of a width."""
    if signed:
        return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1
    return 0, 2**bits - 1 - narrow


def qcdq(g: Graph, x: str, quant: Quant, bits: int, *, narrow: bool = False) -> str:
    """Q -> Clip -> DQ."""
    params, axis = g._quant_inputs(quant, True), g._axis(quant)
    codes = g.node("QuantizeLinear", [x, *params], **axis)
    if bits < 8 or narrow:
        ends = bounds_of(bits, signed=quant.kind == "s8", narrow=narrow)
        codes = g.node("Clip", [codes, *(g.const(as_tensor(np.asarray(v), quant.kind, "")) for v in ends)])
    return g.node("DequantizeLinear", [codes, *params], **axis)


def weight(g: Graph, shape: tuple[int, ...], bits: int, *, narrow: bool = False) -> tuple[str, Quant]:
    """Integer weights -> Clip -> DQ, one scale per output channel."""
    low, high = bounds_of(bits, signed=True, narrow=narrow)
    quant = g.weight_quant(shape[0], "s8")
    codes = g.const(as_tensor(g.codes(shape, low=low, high=high), "s8", ""), "weight")
    if bits < 8 or narrow:
        ends = [g.const(np.asarray(v, np.int8), "bound") for v in (low, high)]
        codes = g.node("Clip", [codes, *ends])
    return g.dq(codes, quant), quant


def per_channel(g: Graph, about: float, channels: int, kind: str = "u8") -> Quant:
    """An activation's quantizer with one scale per channel and zero point 0."""
    return Quant(g.scale(about, channels), np.zeros(channels), kind, 1)


def _first_layer(g: Graph, channels: int, *, bits: int = 8, relu: bool = True) -> tuple[str, Quant]:
    """A convolution whose output has one scale per channel."""
    x, xq = quantized_input(g, (1, 4, 9, 9))
    w, wq = weight(g, (channels, 4, 3, 3), 4)
    bias_quant = Quant(np.asarray(xq.scale * wq.scale, np.float32), np.zeros(channels), "s32", 0)
    bias = g.dq(g.const(g.rng.integers(-500, 500, channels).astype(np.int32), "bias"), bias_quant)
    y = g.node("Conv", [x, w, bias])
    y = g.node("Relu", [y]) if relu else y
    spread = g.deviation(xq, wq, 36, 16) * float(xq.scale) * float(np.mean(wq.scale))
    yq = per_channel(g, spread * 3 / 2**bits, channels, "u8" if relu else "s8")
    return qcdq(g, y, yq, bits), yq


@case()
def per_channel_between_convolutions(g: Graph) -> None:
    """A dense convolution rounds to one scale per channel; the depthwise one behind it can take that."""
    y, yq = _first_layer(g, 8)
    w, wq = weight(g, (8, 1, 3, 3), 4)
    z = g.node("Conv", [y, w], group=8, pads=[1, 1, 1, 1])
    zq = g.after(Quant(yq.scale.mean(), np.asarray(0), "u8"), wq, 9, w_range=16)
    g.output(g.qdq(z, zq), (1, 8, 7, 7))


@case()
def per_channel_through_a_pool(g: Graph) -> None:
    """Signed, no Relu, with a MaxPool in between, at 4 bits; two outputs per channel behind it."""
    y, yq = _first_layer(g, 6, bits=4, relu=False)
    y = g.node("MaxPool", [y], kernel_shape=[2, 2], strides=[1, 1])
    w, wq = weight(g, (12, 1, 3, 3), 3)
    z = g.node("Conv", [y, w], group=6)
    zq = g.after(Quant(yq.scale.mean(), np.asarray(0), "s8"), wq, 9, "s8", w_range=8)
    g.output(qcdq(g, z, zq, 8), (1, 12, 4, 4))


@case()
def per_channel_at_the_end(g: Graph) -> None:
    y, _ = _first_layer(g, 5)
    g.output(y, (1, 5, 7, 7))


@case()
def per_channel_after_a_transposed_convolution(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 5, 5))
    y, wq, terms = conv_node(g, x, xq, (4, 6, 2, 2), transposed=True, strides=[2, 2], bias=None)
    spread = g.deviation(xq, wq, terms) * float(xq.scale) * float(np.mean(wq.scale))
    g.output(qcdq(g, y, per_channel(g, spread * 5 / 256, 6, "s8"), 8), (1, 6, 10, 10))


@case()
def per_channel_behind_a_float_tail(g: Graph) -> None:
    """4 bits per channel behind a float bias: thresholds say the whole chain."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3), bias="float")
    spread = g.deviation(xq, wq, terms) * float(xq.scale) * float(np.mean(wq.scale))
    g.output(qcdq(g, g.node("Relu", [y]), per_channel(g, spread * 3 / 16, 8), 4), (1, 8, 6, 6))


@case()
def per_channel_behind_a_float_tail_at_8_bits(g: Graph) -> None:
    """255 thresholds a channel would be too many: the convolution gives floats, the quantizer stays."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3), bias="float")
    spread = g.deviation(xq, wq, terms) * float(xq.scale) * float(np.mean(wq.scale))
    g.output(qcdq(g, y, per_channel(g, spread * 5 / 256, 8, "s8"), 8), (1, 8, 6, 6))


@case()
def per_channel_behind_a_clip(g: Graph) -> None:
    """Relu6, 4 bits: its upper bound is another code in every channel."""
    x, xq = quantized_input(g, (1, 4, 9, 9))
    w, wq = weight(g, (8, 4, 3, 3), 4)
    spread = g.deviation(xq, wq, 36, 16) * float(xq.scale) * float(np.mean(wq.scale))
    yq = per_channel(g, spread * 3 / 16, 8)
    y = g.node("Clip", [g.node("Conv", [x, w]), g.floats(0.0), g.floats(float(yq.scale.mean()) * 11.3)])
    g.output(qcdq(g, y, yq, 4), (1, 8, 7, 7))


@case()
def one_scale_per_group(g: Graph) -> None:
    """The channels of each group share a scale, so that no sum mixes two."""
    scale = np.repeat(g.scale(0.03, 2), 3)
    x = qcdq(g, g.input((1, 6, 8, 8), step=float(scale[0])), Quant(scale, np.zeros(6), "s8", 1), 6)
    w, wq = weight(g, (8, 3, 3, 3), 4)
    y = g.node("Conv", [x, w], group=2)
    g.output(g.qdq(y, g.after(Quant(scale.mean(), np.asarray(0), "s8"), wq, 27, w_range=16)), (1, 8, 6, 6))


@case()
def equal_scales_per_channel(g: Graph) -> None:
    """One scale, written once per channel: a dense convolution may sum."""
    scale = np.full(4, g.scale(0.03), np.float32)
    x = qcdq(g, g.input((1, 4, 8, 8), step=float(scale[0])), Quant(scale, np.zeros(4), "s8", 1), 8)
    w, wq = weight(g, (8, 4, 3, 3), 4)
    y = g.node("Conv", [x, w])
    g.output(g.qdq(y, g.after(Quant(scale[0], np.asarray(0), "s8"), wq, 36, w_range=16)), (1, 8, 6, 6))


@case()
def per_channel_activation_function(g: Graph) -> None:
    """A table per channel between two grids per channel."""
    y, yq = _first_layer(g, 4, relu=False)
    y = g.node("Sigmoid", [y])
    g.output(qcdq(g, y, per_channel(g, 1 / 200, 4), 7), (1, 4, 7, 7))
    assert yq.axis == 1


@case(left={"Conv": "float16"})
def float16_network(g: Graph) -> None:
    """Casts around every quantizer; the convolution itself computes in float16."""
    xq = g.act(0.03, "s8", zero=0)
    x = g.node("Cast", [g.input((1, 4, 8, 8))], to=TensorProto.FLOAT16)
    x = qcdq(g, g.node("Cast", [x], to=TensorProto.FLOAT), xq, 4)
    w, wq = weight(g, (8, 4, 3, 3), 4)
    operands = [g.node("Cast", [value], to=TensorProto.FLOAT16) for value in (x, w)]
    y = g.node("Cast", [g.node("Conv", operands)], to=TensorProto.FLOAT)
    g.output(qcdq(g, y, g.after(xq, wq, 36, "s8", w_range=16, zero=0), 8), (1, 8, 6, 6))


@case()
def float16_scales_and_bias(g: Graph) -> None:
    """A float32 network stored in float16: constants behind casts to float32."""
    g.constants = "node"
    half = lambda value: g.node("Cast", [g.const(np.asarray(value, np.float16))], to=TensorProto.FLOAT)  # noqa: E731
    exact = lambda value: np.asarray(value, np.float16).astype(np.float32)  # noqa: E731
    xq = g.act(0.03, "s8", zero=0)
    zero = g.const(np.asarray(0, np.int8))
    x = g.input((1, 4, 8, 8), step=float(xq.scale))
    x = g.node(
        "DequantizeLinear", [g.node("QuantizeLinear", [x, half(xq.scale), zero]), half(xq.scale), zero]
    )
    scales = g.scale(0.02, 8)
    codes = g.const(as_tensor(g.codes((8, 4, 3, 3), low=-7, high=7), "s8", ""), "weight")
    w = g.node("DequantizeLinear", [codes, half(scales), g.const(np.zeros(8, np.int8))], axis=0)
    y = g.node("Relu", [g.node("Conv", [x, w, half(g.rng.normal(size=8))])])
    wq = Quant(exact(scales), np.zeros(8), "s8", 0)
    g.output(qcdq(g, y, g.after(xq, wq, 36, "u8", w_range=15, zero=0), 4), (1, 8, 6, 6))
