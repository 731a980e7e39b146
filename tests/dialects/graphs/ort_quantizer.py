"""What onnxruntime.quantization writes: QDQ with integer weights and int32 biases, in its many options.

Source: onnxruntime/python/tools/quantization/qdq_quantizer.py. Relu and Clip in front of a quantizer are
normally removed by it (they live in the zero point and the scale) and kept where the activation is symmetric.
"""

from __future__ import annotations

import numpy as np

from tests.dialects.graphs.blocks import conv_layer, conv_node, gemm_weight, quantized_input
from tests.dialects.graphs.builder import TYPES, Graph, Quant, as_tensor, case


@case(stock_equal=True)
def u8_activations_s8_weights(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 3, 12, 12))
    y, yq = conv_layer(g, x, xq, (16, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2], y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 16, 1, 1), y_zero="low")
    g.output(z, (1, 8, 6, 6))


@case(stock_equal=True)
def s8_activations_s8_weights(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 9, 9), "s8", zero=0)
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1], y_kind="s8", y_zero=0)
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), y_kind="s8")
    g.output(z, (1, 8, 7, 7))


@case()
def signed_in_unsigned_out(g: Graph) -> None:
    """Mixed types: stock ONNX Runtime leaves s8 -> u8 in float on x86."""
    x, xq = quantized_input(g, (1, 4, 9, 9), "s8")
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), y_kind="u8", y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), y_kind="s8")
    g.output(z, (1, 8, 5, 5))


@case(stock_equal=True)
def u8_asymmetric_weights(g: Graph) -> None:
    """Per-tensor unsigned weights with a zero point; the padding must contribute real zero."""
    x, xq = quantized_input(g, (1, 4, 10, 10))
    y, yq = conv_layer(
        g,
        x,
        xq,
        (8, 4, 3, 3),
        w_kind="u8",
        per_channel=False,
        symmetric=False,
        pads=[1, 1, 1, 1],
        y_zero="low",
    )
    z, _ = conv_layer(
        g, y, yq, (8, 8, 3, 3), w_kind="u8", per_channel=False, symmetric=False, pads=[2, 0, 1, 1]
    )
    g.output(z, (1, 8, 11, 9))


@case(stock_equal=True)
def per_channel_asymmetric_weights(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _ = conv_layer(g, x, xq, (8, 4, 3, 3), w_kind="s8", symmetric=False, pads=[1, 1, 1, 1])
    g.output(y, (1, 8, 8, 8))


@case(stock_equal=True)
def one_quantize_for_several_consumers(g: Graph) -> None:
    """One Q whose codes feed a DQ for each consumer, the default since 1.11."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms)
    codes = g.q(y, yq)
    a, _aq = conv_layer(g, g.dq(codes, yq), yq, (8, 8, 1, 1))
    b, _bq = conv_layer(g, g.dq(codes, yq), yq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    g.output(a, (1, 8, 8, 8))
    g.output(b, (1, 8, 8, 8))


@case()
def dedicated_pairs(g: Graph) -> None:
    """DedicatedQDQPair: a Q and a DQ for every consumer of a float tensor."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1])
    yq = g.after(xq, wq, terms)
    a, _ = conv_layer(g, g.qdq(y, yq), yq, (8, 8, 1, 1))
    b, _ = conv_layer(g, g.qdq(y, yq), yq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    g.output(a, (1, 8, 8, 8))
    g.output(b, (1, 8, 8, 8))


@case(stock_equal=True)
def add_qdq_pair_to_weight(g: Graph) -> None:
    """AddQDQPairToWeight: the weights stay float32 behind Q and DQ."""
    x, xq = quantized_input(g, (1, 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), weights="float")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), weights="float", per_channel=False)
    g.output(z, (1, 8, 4, 4))


@case()
def float_bias(g: Graph) -> None:
    """QuantizeBias=False: added in float32, so the integer-bias formula does not apply."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), bias="float", y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), bias="float")
    g.output(z, (1, 8, 4, 4))


@case()
def bias_with_another_scale(g: Graph) -> None:
    """An int32 bias whose scale is not sx*sw: its real values count, not its codes."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    wq = g.weight_quant(8)
    bq = Quant(np.asarray(wq.scale * xq.scale * np.float32(1.37), np.float32), np.zeros(8), "s32", 0)
    bias = g.dq(g.const(g.rng.integers(-2000, 2000, 8).astype(np.int32), "bias"), bq)
    y = g.node("Conv", [x, g.weight(g.codes((8, 4, 3, 3)), wq), bias])
    g.output(g.qdq(y, g.after(xq, wq, 36)), (1, 8, 6, 6))


@case(stock_equal=True)
def no_bias(g: Graph) -> None:
    x, xq = quantized_input(g, (2, 4, 8, 8))
    y, _ = conv_layer(g, x, xq, (8, 4, 3, 3), bias=None)
    g.output(y, (2, 8, 6, 6))


@case(stock_equal=True)
def com_microsoft_domain(g: Graph) -> None:
    """UseQDQContribOps: Q and DQ of the com.microsoft domain, as int16 and int4 once needed."""
    g.domain = "com.microsoft"
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3))
    g.output(z, (1, 8, 4, 4))


@case(stock_equal=True)
def reduce_range(g: Graph) -> None:
    """7-bit weights: codes -64..63 in int8."""
    x, xq = quantized_input(g, (1, 8, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 8, 3, 3), w_range=(-64, 63), y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), w_range=(-64, 63))
    g.output(z, (1, 8, 4, 4))


@case(stock_equal=True)
def missing_zero_points(g: Graph) -> None:
    """Q without a zero point means uint8 with 0, DQ takes its input's type with 0."""
    scale = g.scale(0.02)
    xq = Quant(scale, np.asarray(0), "u8")
    wq = g.weight_quant(8)
    x = g.input((1, 4, 8, 8), step=float(scale))
    x = g.dq(g.q(x, xq, zero_point=False), xq, zero_point=False)
    w = g.dq(g.const(as_tensor(g.codes((8, 4, 3, 3)), "s8", ""), "weight"), wq, zero_point=False)
    y = g.node("Conv", [x, w])
    yq = g.after(xq, wq, 36, zero=0)
    g.output(g.dq(g.q(y, yq, zero_point=False), yq, zero_point=False), (1, 8, 6, 6))


@case(stock_equal=True)
def constants_as_nodes(g: Graph) -> None:
    g.constants = "node"
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), y_zero="low")
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3))
    g.output(z, (1, 8, 4, 4))


@case(stock_equal=True)
def scales_of_shape_one(g: Graph) -> None:
    g.scale_shape = "one"
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), per_channel=False, bias=None)
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), per_channel=False, bias=None)
    g.output(z, (1, 8, 4, 4))


@case()
def conv_transpose(g: Graph) -> None:
    """Per channel on axis 1: ConvTranspose stores [in, out / group, ...]."""
    x, xq = quantized_input(g, (1, 6, 5, 5))
    y, yq = conv_layer(
        g, x, xq, (6, 4, 3, 3), transposed=True, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]
    )
    z, _ = conv_layer(g, y, yq, (4, 4, 2, 2), transposed=True, strides=[2, 2], per_channel=False, w_kind="u8")
    g.output(z, (1, 4, 20, 20))


@case()
def kept_relu(g: Graph) -> None:
    """Relu in front of a quantizer whose zero point is not the smallest code."""
    x, xq = quantized_input(g, (1, 4, 8, 8), "s8")
    relu = [lambda v: g.node("Relu", [v])]
    y, yq = conv_layer(g, x, xq, (8, 4, 3, 3), then=relu, y_kind="s8", y_zero=0)
    z, _ = conv_layer(g, y, yq, (8, 8, 3, 3), then=relu, y_kind="s8", y_zero=-20)
    g.output(z, (1, 8, 4, 4))


@case()
def kept_clip(g: Graph) -> None:
    """Clip (Relu6) that cuts inside the code range: its bounds are rounded onto the grid."""
    x, xq = quantized_input(g, (1, 4, 8, 8), about=0.1)
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3))
    yq = g.after(xq, wq, terms)
    bound = float(yq.scale) * 60.5
    y = g.qdq(g.node("Clip", [y, g.floats(0.0), g.floats(bound)]), yq)
    z, wq, terms = conv_node(g, y, yq, (8, 8, 3, 3))
    zq = g.after(yq, wq, terms, zero=110)
    z = g.node("Clip", [z, g.floats(-30.25 * zq.scale), g.floats(77.5 * zq.scale)])
    g.output(g.qdq(z, zq), (1, 8, 4, 4))


@case()
def clip_with_one_bound(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (8, 4, 3, 3))
    yq = g.after(xq, wq, terms)
    y = g.qdq(g.node("Clip", [y, "", g.floats(float(yq.scale) * 20)]), yq)
    z, _ = conv_layer(g, y, yq, (4, 8, 1, 1), then=[lambda v: g.node("Clip", [v, g.floats(0.0)])])
    g.output(z, (1, 4, 6, 6))


@case()
def clip_as_attributes(g: Graph) -> None:
    """Clip before opset 11 carries its bounds as attributes; Q and DQ exist since 10."""
    g.opset = 10
    g.ir_version = 5
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _wq, _terms = conv_node(g, x, xq, (8, 4, 3, 3), per_channel=False)
    y = g.qdq(g.node("Clip", [y], min=0.0, max=6.0), g.act(0.03, zero=20))
    g.output(y, (1, 8, 6, 6))


@case()
def residual_add_relu(g: Graph) -> None:
    """A residual block with its inner quantizer: two roundings, then the next layer."""
    x, xq = quantized_input(g, (1, 8, 8, 8))
    a, aq = conv_layer(g, x, xq, (8, 8, 3, 3), pads=[1, 1, 1, 1], y_zero="low")
    b, bq = conv_layer(g, a, aq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    total = g.node("Relu", [g.node("Add", [b, x])])
    total_quant = g.act(float(bq.scale) + float(xq.scale) / 2, zero="low")
    total = g.qdq(total, total_quant)
    y, _ = conv_layer(g, total, total_quant, (4, 8, 1, 1))
    g.output(y, (1, 4, 8, 8))


@case()
def residual_with_downsample(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 8, 8, 8))
    main, mq = conv_layer(g, x, xq, (16, 8, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2])
    side, sq = conv_layer(g, x, xq, (16, 8, 1, 1), strides=[2, 2])
    total = g.node("Add", [side, main])
    total_quant = g.act(float(mq.scale) + float(sq.scale))
    total = g.qdq(total, total_quant)
    y, _ = conv_layer(g, total, total_quant, (4, 16, 1, 1))
    g.output(y, (1, 4, 4, 4))


@case(stock_equal=True)
def gemm(g: Graph) -> None:
    x, xq = quantized_input(g, (3, 20))
    w, wq = gemm_weight(g, 20, 10, transposed=True)
    y = g.node("Gemm", [x, w, g.bias(10, xq, wq)], transB=1)
    g.output(g.qdq(y, g.after(xq, wq, 20)), (3, 10))


@case(stock_equal=True)
def gemm_with_float_output(g: Graph) -> None:
    """The classifier: no quantizer behind it."""
    x, xq = quantized_input(g, (3, 20))
    w, wq = gemm_weight(g, 20, 10, per_channel=False)
    g.output(g.node("Gemm", [x, w, g.bias(10, xq, wq)]), (3, 10))


@case(stock_equal=True)
def matmul(g: Graph) -> None:
    x, xq = quantized_input(g, (2, 5, 16))
    w, wq = gemm_weight(g, 16, 12, per_channel=False)
    y, yq = g.node("MatMul", [x, w]), g.after(xq, wq, 16)
    y = g.qdq(y, yq)
    v, vq = gemm_weight(g, 12, 7)
    g.output(g.qdq(g.node("MatMul", [y, v]), g.after(yq, vq, 12)), (2, 5, 7))


@case()
def matmul_with_bias(g: Graph) -> None:
    """MatMul -> Q -> DQ -> Add(bias behind DQ) -> Q, as the quantizer treats torch's Linear on 3-D inputs."""
    x, xq = quantized_input(g, (2, 5, 16))
    w, wq = gemm_weight(g, 16, 12)
    yq = g.after(xq, wq, 16)
    y = g.qdq(g.node("MatMul", [x, w]), yq)
    bq = Quant(g.scale(float(yq.scale) / 2), np.asarray(0), "s8")
    bias = g.weight(g.codes((12,)), bq)
    zq = g.act(float(yq.scale))
    g.output(g.qdq(g.node("Add", [y, bias]), zq), (2, 5, 12))


@case(stock_equal=True)
def quantized_graph_input_and_output(g: Graph) -> None:
    """The quantizers at the edges were removed: uint8 goes in and comes out."""
    xq = g.act(0.02)
    x = g.dq(g.input((1, 3, 8, 8), "u8"), xq)
    y, wq, terms = conv_node(g, x, xq, (8, 3, 3, 3))
    g.output(g.q(y, g.after(xq, wq, terms)), (1, 8, 6, 6), TYPES["u8"][0])


@case()
def signed_graph_input_and_output(g: Graph) -> None:
    """int8 goes in and comes out: a normalization of inner codes to uint8 must not show."""
    xq = g.act(0.02, "s8")
    x = g.dq(g.input((1, 3, 8, 8), "s8"), xq)
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), y_kind="s8")
    z, wq, terms = conv_node(g, y, yq, (4, 8, 3, 3))
    g.output(g.q(z, g.after(yq, wq, terms, "s8")), (1, 4, 4, 4), TYPES["s8"][0])


@case(stock_equal=True)
def codes_are_an_output_too(g: Graph) -> None:
    """An inner code tensor is also a graph output: its values and layout are part of the interface."""
    xq = g.act(0.02)
    x = g.dq(g.input((1, 3, 8, 8), "u8"), xq)
    y, wq, terms = conv_node(g, x, xq, (8, 3, 3, 3))
    yq = g.after(xq, wq, terms)
    codes = g.q(y, yq)
    z, _ = conv_layer(g, g.dq(codes, yq), yq, (4, 8, 1, 1))
    g.output(codes, (1, 8, 6, 6), TYPES["u8"][0])
    g.output(z, (1, 4, 6, 6))


@case(stock_equal=True)
def float_between_is_an_output_too(g: Graph) -> None:
    """The dequantized tensor between two layers is also a graph output."""
    x, xq = quantized_input(g, (1, 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3))
    z, _ = conv_layer(g, y, yq, (4, 8, 1, 1))
    g.output(z, (1, 4, 6, 6))
    g.output(y, (1, 8, 6, 6))
