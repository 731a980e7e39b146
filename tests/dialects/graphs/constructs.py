"""Constructs between and around quantized layers, whatever exporter wrote them."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.dialects.graphs.blocks import batch_norm, conv_layer, conv_node, gemm_weight, quantized_input
from tests.dialects.graphs.builder import Graph, Quant, case

# -- shapes of convolutions

_CONVOLUTIONS = {
    # name: (input shape, weight shape, attributes, output shape)
    "grouped": ((1, 8, 7, 7), (12, 2, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}, (1, 12, 7, 7)),
    "depthwise": ((1, 8, 9, 9), (8, 1, 3, 3), {"group": 8, "pads": [1, 1, 1, 1]}, (1, 8, 9, 9)),
    "depthwise_stride_2": ((2, 5, 9, 9), (5, 1, 3, 3), {"group": 5, "strides": [2, 2]}, (2, 5, 4, 4)),
    "depthwise_multiplier": ((1, 4, 7, 7), (8, 1, 3, 3), {"group": 4}, (1, 8, 5, 5)),
    "dilated": ((1, 4, 11, 11), (6, 4, 3, 3), {"dilations": [2, 3], "pads": [2, 1, 2, 3]}, (1, 6, 11, 9)),
    "asymmetric_pads": ((1, 4, 8, 8), (6, 4, 3, 3), {"pads": [0, 2, 1, 0]}, (1, 6, 7, 8)),
    "same_upper": ((1, 4, 8, 7), (6, 4, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (1, 6, 4, 4)),
    "same_lower": ((1, 4, 8, 7), (6, 4, 2, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}, (1, 6, 4, 7)),
    "valid": ((1, 4, 8, 8), (6, 4, 3, 3), {"auto_pad": "VALID"}, (1, 6, 6, 6)),
    "one_dimensional": ((2, 6, 20), (8, 6, 5), {"pads": [2, 1], "strides": [2], "dilations": [2]}, (2, 8, 8)),
    "volume": ((1, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"pads": [1, 1, 0, 1, 0, 1]}, (1, 6, 5, 5, 6)),
    "volume_strided": ((2, 3, 5, 6, 7), (6, 3, 3, 2, 3), {"strides": [2, 1, 2]}, (2, 6, 2, 5, 3)),
    "volume_dilated": ((1, 3, 5, 6, 7), (6, 3, 3, 2, 3), {"dilations": [1, 2, 3]}, (1, 6, 3, 4, 1)),
    "volume_depthwise": ((1, 16, 4, 5, 6), (16, 1, 3, 3, 3), {"group": 16}, (1, 16, 2, 3, 4)),
    "planes": ((2, 4, 3, 7, 7), (6, 4, 1, 3, 3), {"pads": [0, 1, 1, 0, 1, 1]}, (2, 6, 3, 7, 7)),
    "columns": ((2, 4, 6, 3, 4), (6, 4, 3, 1, 1), {"strides": [2, 1, 1]}, (2, 6, 2, 3, 4)),
    "stem_7x7": ((1, 3, 18, 18), (8, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}, (1, 8, 9, 9)),
    "one_channel": ((1, 1, 9, 9), (5, 1, 3, 3), {"pads": [1, 1, 1, 1]}, (1, 5, 9, 9)),
    "pointwise_stride_2": ((1, 16, 9, 9), (8, 16, 1, 1), {"strides": [2, 2]}, (1, 8, 5, 5)),
    "one_by_seven": ((1, 4, 9, 9), (4, 4, 1, 7), {"pads": [0, 3, 0, 3]}, (1, 4, 9, 9)),
    "all_padding": ((1, 4, 1, 1), (6, 4, 3, 3), {"pads": [3, 3, 3, 3]}, (1, 6, 5, 5)),
}


def _register_convolutions() -> None:
    for name, (x_shape, w_shape, attributes, y_shape) in _CONVOLUTIONS.items():

        def build(g: Graph, x_shape=x_shape, w_shape=w_shape, attributes=attributes, y_shape=y_shape) -> None:
            x, xq = quantized_input(g, x_shape)
            y, _ = conv_layer(g, x, xq, w_shape, **attributes)
            g.output(y, y_shape)

        build.__name__ = f"conv_{name}"
        case(stock_equal=True)(build)


_register_convolutions()


@case()
def conv_transpose_grouped_and_dilated(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 5, 5))
    y, _yq = conv_layer(
        g, x, xq, (4, 3, 3, 3), transposed=True, group=2, strides=[2, 1], dilations=[1, 2], pads=[0, 1, 1, 2],
        per_channel=False,
    )  # fmt: skip
    g.output(y, (1, 6, 10, 6))


@case()
def conv_transpose_1d_same(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 6))
    y, _ = conv_layer(g, x, xq, (4, 5, 3), transposed=True, strides=[2], auto_pad="SAME_UPPER")
    g.output(y, (1, 5, 12))


@case()
def conv_without_a_quantizer_behind(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _, _ = conv_node(g, x, xq, (6, 4, 3, 3))
    g.output(y, (1, 6, 6, 6))


@case()
def depthwise_per_channel_activations(g: Graph) -> None:
    """Depthwise: the scale per input channel folds into the scale of its output channel."""
    xq = Quant(g.scale(0.03, 6), np.full(6, 121), "u8", 1)
    x = g.qdq(g.input((1, 6, 8, 8)), xq)
    wq = g.weight_quant(6)
    y = g.node("Conv", [x, g.weight(g.codes((6, 1, 3, 3)), wq)], group=6, pads=[1, 1, 1, 1])
    g.output(g.qdq(y, g.after(Quant(xq.scale.mean(), xq.zero, "u8"), wq, 9)), (1, 6, 8, 8))


@case(left={"Conv": "zero point"})
def depthwise_zero_point_per_channel(g: Graph) -> None:
    """Only the scales fold; the padding would need a zero point of its own for every channel."""
    xq = Quant(g.scale(0.03, 6), np.arange(90, 96), "u8", 1)
    x = g.qdq(g.input((1, 6, 8, 8)), xq)
    weight = g.weight(g.codes((6, 1, 3, 3)), g.weight_quant(6))
    g.output(g.node("Conv", [x, weight], group=6, pads=[1, 1, 1, 1]), (1, 6, 8, 8))


# -- matrix products


@case(stock_equal=True)
def gemm_alpha(g: Graph) -> None:
    x, xq = quantized_input(g, (3, 20))
    w, wq = gemm_weight(g, 20, 10, transposed=True)
    y = g.node("Gemm", [x, w], transB=1, alpha=0.3)
    g.output(g.qdq(y, g.after(xq, wq, 20)), (3, 10))


@case()
def gemm_alpha_beta_float_bias(g: Graph) -> None:
    x, xq = quantized_input(g, (3, 20))
    w, wq = gemm_weight(g, 20, 10, per_channel=False)
    bias = g.floats(g.rng.normal(size=(1, 10)), "bias")
    y = g.node("Gemm", [x, w, bias], alpha=0.7, beta=1.5)
    g.output(g.qdq(y, g.after(xq, wq, 20)), (3, 10))


@case(left={"Gemm": "transA"})
def gemm_transposed_input(g: Graph) -> None:
    """transA: the activation itself is transposed."""
    x, xq = quantized_input(g, (20, 3))
    w, wq = gemm_weight(g, 20, 10)
    y = g.node("Gemm", [x, w], transA=1)
    g.output(g.qdq(y, g.after(xq, wq, 20)), (3, 10))


@case(stock_equal=True)
def gemm_asymmetric_weights(g: Graph) -> None:
    x, xq = quantized_input(g, (3, 20))
    w, wq = gemm_weight(g, 20, 10, kind="u8", per_channel=False, symmetric=False)
    y = g.node("Gemm", [x, w, g.bias(10, xq, wq)])
    g.output(g.qdq(y, g.after(xq, wq, 20)), (3, 10))


@case()
def matmul_transposed_weight_behind_dq(g: Graph) -> None:
    """torch's Linear: DQ(W) -> Transpose -> MatMul -> Add(float bias) -> Q."""
    x, xq = quantized_input(g, (2, 5, 16))
    wq = g.weight_quant(12)
    w = g.node("Transpose", [g.weight(g.codes((12, 16)), wq)], perm=[1, 0])
    y = g.node("Add", [g.node("MatMul", [x, w]), g.floats(g.rng.normal(size=12), "bias")])
    g.output(g.qdq(y, g.after(xq, wq, 16)), (2, 5, 12))


@case()
def matmul_default_transpose(g: Graph) -> None:
    """A Transpose without perm reverses the axes: behind the DQ of the weights, and between layers."""
    x, xq = quantized_input(g, (5, 16))
    wq = g.weight_quant(12)
    w = g.node("Transpose", [g.weight(g.codes((12, 16)), wq)])
    yq = g.after(xq, wq, 16)
    y = g.qdq(g.node("Transpose", [g.qdq(g.node("MatMul", [x, w]), yq)]), yq)
    v, vq = gemm_weight(g, 5, 7)
    g.output(g.qdq(g.node("MatMul", [y, v]), g.after(yq, vq, 5)), (12, 7))


@case()
def matmul_integer_bias(g: Graph) -> None:
    """MatMul -> Add(int32 bias on the product's own grid) -> Q: a Gemm in two nodes."""
    x, xq = quantized_input(g, (2, 5, 16))
    w, wq = gemm_weight(g, 16, 12)
    y = g.node("Add", [g.bias(12, xq, wq, 40000), g.node("MatMul", [x, w])])
    g.output(g.qdq(y, g.after(xq, wq, 16)), (2, 5, 12))


@case(stock_equal=True)
def matmul_of_two_activations(g: Graph) -> None:
    """Attention scores: neither operand is constant."""
    a, aq = quantized_input(g, (2, 4, 8))
    b, bq = quantized_input(g, (2, 8, 5))
    y = g.node("MatMul", [a, b])
    g.output(g.qdq(y, g.after(aq, bq, 8)), (2, 4, 5))


@case()
def attention_heads(g: Graph) -> None:
    """One projection, its heads turned, q x k^T and its product with v; the last one stays float."""
    x, xq = quantized_input(g, ("N", 6, 8))
    w, wq = gemm_weight(g, 8, 8)
    yq = g.after(xq, wq, 8)
    y = g.qdq(g.node("MatMul", [x, w]), yq)
    heads = g.qdq(g.node("Reshape", [y, g.ints([0, 6, 2, 4])]), yq)
    q = g.node("Transpose", [heads], perm=[0, 2, 1, 3])
    k = g.node("Transpose", [heads], perm=[0, 2, 3, 1])
    sq = g.after(yq, yq, 4)
    scores = g.qdq(g.node("MatMul", [q, k]), sq)
    g.output(g.node("MatMul", [scores, q]), ("N", 2, 6, 4))


@case(stock_equal=True)
def conv_flatten_gemm(g: Graph) -> None:
    """Flatten over channels, H and W: the weights' order must follow the layout."""
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 3, 3, 3), strides=[2, 2])
    y = g.node("Flatten", [y])
    w, wq = gemm_weight(g, 54, 10, transposed=True)
    y = g.node("Gemm", [y, w, g.bias(10, yq, wq)], transB=1)
    g.output(g.qdq(y, g.after(yq, wq, 54)), ("N", 10))


@case()
def conv_quantized_flatten_gemm(g: Graph) -> None:
    """The same with a quantizer pair on both sides of a Reshape, as ONNX Runtime's quantizer writes it."""
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 3, 3, 3), strides=[2, 2])
    y = g.qdq(g.node("Reshape", [y, g.ints([0, -1])]), yq)
    w, wq = gemm_weight(g, 54, 10)
    y = g.node("Gemm", [y, w, g.bias(10, yq, wq)])
    g.output(y, ("N", 10))


# -- operators between layers


def _sandwich(g: Graph, between, *, channels: int = 6, size: int = 8, out_channels: int = 4) -> None:
    """conv -> between -> conv; `between(y, quant)` returns (dequantized tensor, quantizer, channels, h, w).

    The input scale puts the first convolution's results at a few units, where Sigmoid and the like still
    bend.
    """
    x, xq = quantized_input(g, (1, 3, size, size), about=0.0005)
    y, yq = conv_layer(g, x, xq, (channels, 3, 3, 3), pads=[1, 1, 1, 1])
    y, yq, channels, height, width = between(y, yq)
    z, _ = conv_layer(g, y, yq, (out_channels, channels, 1, 1))
    g.output(z, (1, out_channels, height, width))


def _unary(op: str, **attributes):
    bounded = op in ("Sigmoid", "HardSigmoid", "Tanh")

    def build(g: Graph) -> None:
        def between(y, yq):
            out = g.act(0.01 if bounded else float(yq.scale))
            return g.qdq(g.node(op, [y], **attributes), out), out, 6, 8, 8

        _sandwich(g, between)

    return build


def _register_unary() -> None:
    for op, attributes, opset in [
        ("LeakyRelu", {"alpha": 0.1}, 13), ("HardSwish", {}, 14), ("HardSigmoid", {"alpha": 0.2}, 13),
        ("Sigmoid", {}, 13), ("Tanh", {}, 13), ("Elu", {}, 13), ("Relu", {}, 13), ("Abs", {}, 13), ("Neg", {},
        13), ("Swish", {"alpha": 1.2}, 24),
    ]:  # fmt: skip

        def build(g: Graph, op=op, attributes=attributes, opset=opset) -> None:
            g.opset = opset
            g.ir_version = 11 if opset > 22 else g.ir_version
            _unary(op, **attributes)(g)

        build.__name__ = f"between_{op.lower()}"
        case()(build)


_register_unary()


@case()
def between_silu(g: Graph) -> None:
    """x * Sigmoid(x), both branches from one DQ, no quantizer inside."""

    def between(y, yq):
        out = g.act(float(yq.scale))
        return g.qdq(g.node("Mul", [y, g.node("Sigmoid", [y])]), out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_silu_quantized_inside(g: Graph) -> None:
    """x * DQ(Q(Sigmoid(x))), as ONNX Runtime's quantizer writes it."""

    def between(y, yq):
        gate = g.qdq(g.node("Sigmoid", [y]), g.act(1 / 256, zero=0))
        out = g.act(float(yq.scale))
        return g.qdq(g.node("Mul", [y, gate]), out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_hard_swish_in_pieces(g: Graph) -> None:
    """x * Clip(x + 3, 0, 6) / 6, as torch exported it before opset 14."""

    def between(y, yq):
        gate = g.node("Clip", [g.node("Add", [y, g.floats(3.0)]), g.floats(0.0), g.floats(6.0)])
        value = g.node("Div", [g.node("Mul", [y, gate]), g.floats(6.0)])
        out = g.act(float(yq.scale))
        return g.qdq(value, out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_prelu(g: Graph) -> None:
    def between(y, yq):
        slope = g.floats(g.rng.uniform(0.01, 0.4, (6, 1, 1)), "slope")
        out = g.act(float(yq.scale))
        return g.qdq(g.node("PRelu", [y, slope]), out), out, 6, 8, 8

    _sandwich(g, between)


@case(stays=("LeakyRelu",))
def unary_directly_behind_conv(g: Graph) -> None:
    """Conv -> LeakyRelu -> Q without a quantizer in between: one rounding, of the float chain."""
    x, xq = quantized_input(g, (1, 3, 8, 8))
    y, _ = conv_layer(g, x, xq, (6, 3, 3, 3), then=[lambda v: g.node("LeakyRelu", [v], alpha=0.125)])
    g.output(y, (1, 6, 6, 6))


@case()
def between_max_pool(g: Graph) -> None:
    def between(y, yq):
        y = g.qdq(g.node("MaxPool", [y], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]), yq)
        return y, yq, 6, 4, 4

    _sandwich(g, between)


@case()
def between_max_pool_ceil_other_scale(g: Graph) -> None:
    def between(y, yq):
        out = g.act(float(yq.scale))
        y = g.qdq(g.node("MaxPool", [y], kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1), out)
        return y, out, 6, 4, 3

    _sandwich(g, between)


@case()
def between_average_pool(g: Graph) -> None:
    def between(y, yq):
        out = g.act(float(yq.scale) / 2)
        y = g.node("AveragePool", [y], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
        return g.qdq(y, out), out, 6, 4, 4

    _sandwich(g, between)


@case()
def between_average_pool_include_pad(g: Graph) -> None:
    def between(y, yq):
        out = g.act(float(yq.scale) / 2)
        y = g.node("AveragePool", [y], kernel_shape=[2, 3], pads=[1, 1, 0, 1], count_include_pad=1)
        return g.qdq(y, out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_global_average_pool(g: Graph) -> None:
    """Squeeze and excite: a global mean, two layers, a Sigmoid gate multiplied back."""
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), pads=[1, 1, 1, 1])
    mq = g.act(float(yq.scale) / 4)
    gate = g.qdq(g.node("GlobalAveragePool", [y]), mq)
    gate, gq = conv_layer(g, gate, mq, (4, 8, 1, 1), then=[lambda v: g.node("Relu", [v])], y_zero="low")
    gate, gq = conv_layer(g, gate, gq, (8, 4, 1, 1))
    sq = g.act(1 / 256, zero=0)
    gate = g.qdq(g.node("Sigmoid", [gate]), sq)
    oq = g.act(float(yq.scale) / 2)
    y = g.qdq(g.node("Mul", [y, gate]), oq)
    z, _ = conv_layer(g, y, oq, (4, 8, 1, 1))
    g.output(z, ("N", 4, 8, 8))


@case()
def global_average_pool_to_gemm(g: Graph) -> None:
    x, xq = quantized_input(g, ("N", 3, "H", "W"))
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), pads=[1, 1, 1, 1], y_zero="low")
    mq = g.act(float(yq.scale))
    y = g.node("Flatten", [g.qdq(g.node("GlobalAveragePool", [y]), mq)])
    w, wq = gemm_weight(g, 8, 5, transposed=True)
    g.output(g.node("Gemm", [y, w, g.bias(5, mq, wq)], transB=1), ("N", 5))


@case()
def mean_over_pixels(g: Graph) -> None:
    def between(y, yq):
        out = g.act(float(yq.scale) / 4)
        return g.qdq(g.node("ReduceMean", [y], axes=[2, 3], keepdims=1), out), out, 6, 1, 1

    _sandwich(g, between)


@case()
def between_concat(g: Graph) -> None:
    """Three branches with scales of their own; one is already on the output's grid."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    a, aq = conv_layer(g, x, xq, (6, 4, 1, 1))
    b, _bq = conv_layer(g, x, xq, (3, 4, 3, 3), pads=[1, 1, 1, 1])
    out = Quant(aq.scale, aq.zero, "u8")
    y = g.qdq(g.node("Concat", [a, b, x], axis=1), out)
    z, _ = conv_layer(g, y, out, (4, 13, 1, 1))
    g.output(z, (1, 4, 8, 8))


@case()
def dense_block(g: Graph) -> None:
    """DenseNet: Concat -> BatchNormalization -> Relu -> Q, which no convolution in front can absorb."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 4, 3, 3), pads=[1, 1, 1, 1])
    joined = g.act(float(yq.scale))
    y = g.qdq(g.node("Concat", [x, y], axis=1), joined)
    y = g.node("Relu", [batch_norm(g, y, 10)])
    out = g.act(0.02, zero="low")
    z, _ = conv_layer(g, g.qdq(y, out), out, (4, 10, 1, 1))
    g.output(z, (1, 4, 8, 8))


@case()
def between_mul(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 8, 8))
    a, aq = conv_layer(g, x, xq, (6, 4, 1, 1))
    b, bq = conv_layer(g, x, xq, (6, 4, 3, 3), pads=[1, 1, 1, 1])
    out = g.act(float(aq.scale) * float(bq.scale) * 80)
    y = g.qdq(g.node("Mul", [a, b]), out)
    z, _ = conv_layer(g, y, out, (4, 6, 1, 1))
    g.output(z, (1, 4, 8, 8))


@case()
def between_mul_broadcast_float_constant(g: Graph) -> None:
    """A multiplication by a float constant per channel and one by a scalar."""

    def between(y, yq):
        y = g.node("Mul", [y, g.floats(g.rng.uniform(0.5, 1.5, (1, 6, 1, 1)))])
        y = g.node("Add", [g.node("Mul", [y, g.floats(0.75)]), g.floats(g.rng.normal(size=(6, 1, 1)))])
        out = g.act(float(yq.scale))
        return g.qdq(y, out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_resize_nearest(g: Graph) -> None:
    """Upsampling and a skip connection, as detection heads have it."""
    x, xq = quantized_input(g, (1, 3, 8, 8))
    a, aq = conv_layer(g, x, xq, (6, 3, 3, 3), pads=[1, 1, 1, 1])
    b, bq = conv_layer(g, a, aq, (6, 6, 2, 2), strides=[2, 2])
    mode = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    b = g.node("Resize", [b, "", g.floats([1, 1, 2, 2])], **mode)
    b = g.qdq(b, bq)
    out = g.act(float(aq.scale) + float(bq.scale))
    y = g.qdq(g.node("Add", [a, b]), out)
    z, _ = conv_layer(g, y, out, (4, 6, 1, 1))
    g.output(z, (1, 4, 8, 8))


@case()
def between_resize_sizes(g: Graph) -> None:
    def between(y, yq):
        y = g.node("Resize", [y, "", "", g.ints([1, 6, 11, 5])], mode="nearest")
        return g.qdq(y, yq), yq, 6, 11, 5

    _sandwich(g, between)


@case()
def between_pad(g: Graph) -> None:
    """Pad with real zero is the zero point; with another value it is that value's code."""

    def between(y, yq):
        y = g.qdq(g.node("Pad", [y, g.ints([0, 0, 1, 2, 0, 0, 0, 1])]), yq)
        y = g.node("Pad", [y, g.ints([0, 1, 0, 0, 0, 1, 0, 0]), g.floats(3.3 * yq.scale)])
        return g.qdq(y, yq), yq, 8, 9, 11

    _sandwich(g, between)


@case()
def between_slice_and_transpose(g: Graph) -> None:
    def between(y, yq):
        y = g.node("Slice", [y, g.ints([0, 1]), g.ints([8, 7]), g.ints([2, 3]), g.ints([2, 1])])
        y = g.qdq(y, yq)
        y = g.qdq(g.node("Transpose", [y], perm=[0, 1, 3, 2]), yq)
        return y, yq, 6, 6, 4

    _sandwich(g, between)


@case()
def between_channel_slice(g: Graph) -> None:
    """Slice and Split of channels, whose axis moves with the layout."""

    def between(y, yq):
        y = g.qdq(g.node("Slice", [y, g.ints([1]), g.ints([-1]), g.ints([1])]), yq)
        a, b = g.node("Split", [y], outputs=2, axis=1)
        return g.qdq(g.node("Concat", [b, a], axis=1), yq), yq, 4, 8, 8

    _sandwich(g, between)


@case()
def between_channel_shuffle(g: Graph) -> None:
    """ShuffleNet: Reshape -> Transpose -> Reshape."""

    def between(y, yq):
        y = g.node("Reshape", [y, g.ints([1, 2, 3, 8, 8])])
        y = g.node("Reshape", [g.node("Transpose", [y], perm=[0, 2, 1, 3, 4]), g.ints([1, 6, 8, 8])])
        return g.qdq(y, yq), yq, 6, 8, 8

    _sandwich(g, between)


@case()
def between_depth_to_space(g: Graph) -> None:
    def between(y, yq):
        return g.qdq(g.node("DepthToSpace", [y], blocksize=2), yq), yq, 2, 16, 16

    _sandwich(g, between, channels=8)


@case()
def between_space_to_depth(g: Graph) -> None:
    """SpaceToDepth of 8-bit codes, for which ONNX Runtime has no kernel in its older versions."""

    def between(y, yq):
        return g.qdq(g.node("SpaceToDepth", [y], blocksize=2), yq), yq, 24, 4, 4

    _sandwich(g, between)


@case()
def space_to_depth_of_an_image_of_any_size(g: Graph) -> None:
    """YOLO's focus: the batch and one side are dynamic. One image on top of itself has an even height."""
    x, xq = quantized_input(g, ("N", 3, "height", 6))
    y = g.node("SpaceToDepth", [g.node("Concat", [x, x], axis=2)], blocksize=2)
    y, _ = conv_layer(g, g.qdq(y, xq), xq, (4, 12, 1, 1))
    g.output(y, ("N", 4, "height", 3))


@case()
def between_gather(g: Graph) -> None:
    """Channels in another order, rows by a matrix of indices, and one column of them."""

    def between(y, yq):
        y = g.qdq(g.node("Gather", [y, g.ints([5, 0, 0, -1, 3])], axis=1), yq)
        y = g.qdq(g.node("Gather", [y, g.ints([[0, 1], [7, -2], [3, 3]])], axis=2), yq)
        return g.qdq(g.node("Gather", [y, g.ints(1)], axis=3), yq), yq, 5, 3, 8

    _sandwich(g, between)


@case()
def gather_by_indices_that_are_fed(g: Graph) -> None:
    """An embedding: constant codes, one scale per column, and indices that nobody knows before."""
    index = g.input((2, 4), "s32", name="index")
    g.feeds[index] = lambda rng, dims: rng.integers(0, 20, dims).astype(np.int32)
    wq = g.weight_quant(16, axis=1)
    words = g.node("Gather", [g.weight(g.codes((20, 16)), wq), index], axis=0)
    out = g.act(0.05)
    w, second = gemm_weight(g, 16, 10, per_channel=False)
    y = g.node("MatMul", [g.qdq(words, out), w])
    g.output(g.qdq(y, g.after(out, second, 16)), (2, 4, 10))


@case()
def between_tile_and_expand(g: Graph) -> None:
    """Along the axes that the layout moves, and an Expand that adds a dim."""

    def between(y, yq):
        y = g.qdq(g.node("Tile", [y, g.ints([1, 2, 1, 3])]), yq)
        y = g.node("Slice", [y, g.ints([3]), g.ints([4]), g.ints([2])])
        y = g.qdq(g.node("Expand", [y, g.ints([5, 24])]), yq)
        y = g.node("Expand", [g.qdq(y, yq), g.ints([1, 1, 1, 1, 1])])
        return g.qdq(g.node("Squeeze", [y, g.ints([0])]), yq), yq, 12, 5, 24

    _sandwich(g, between)


@case()
def repeats_and_shapes_that_are_fed(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 3, 4, 4))
    y, yq = conv_layer(g, x, xq, (6, 3, 1, 1))
    repeats = g.node("Cast", [g.input((4,), "s32", name="repeats")], to=TensorProto.INT64)
    shape = g.node("Cast", [g.input((4,), "s32", name="shape")], to=TensorProto.INT64)
    g.feeds["repeats"] = lambda rng, _: np.array([1, 1, 2, 1], np.int32)
    g.feeds["shape"] = lambda rng, _: np.array([3, 6, 8, 4], np.int32)
    y = g.qdq(g.node("Expand", [g.qdq(g.node("Tile", [y, repeats]), yq), shape]), yq)
    z, _ = conv_layer(g, y, yq, (4, 6, 1, 1))
    g.output(z, ("many", 4, "tall", "wide"))


@case()
def between_reductions_to_extremes(g: Graph) -> None:
    """ReduceMax over the channels; the least of every column; the greatest of all pixels, the dims gone."""

    def between(y, yq):
        most = g.qdq(g.node("ReduceMax", [y], axes=[1]), yq)
        least = g.qdq(g.node("ReduceMin", [y], axes=[-2], keepdims=0), yq)
        out = g.act(float(yq.scale) * 2)
        y = g.qdq(g.node("Add", [most, g.node("Unsqueeze", [least, g.ints([2])])]), out)
        peak = g.qdq(g.node("ReduceMax", [y], axes=[2, 3], keepdims=0), out)
        return g.node("Unsqueeze", [peak, g.ints([2, 3])]), out, 6, 1, 1

    _sandwich(g, between)


@case()
def reduce_max_with_its_axes_as_input(g: Graph) -> None:
    g.opset = 18

    def between(y, yq):
        y = g.node("ReduceMax", [g.node("Relu", [y]), g.ints([1])])
        y = g.qdq(y, yq)
        return g.qdq(g.node("ReduceMax", [y, ""], noop_with_empty_axes=1), yq), yq, 1, 8, 8

    _sandwich(g, between)


@case()
def between_softmax_over_channels(g: Graph) -> None:
    def between(y, yq):
        shares = g.act(1 / 256, zero=0)
        y = g.qdq(y, Quant(g.scale(0.08), yq.zero, yq.kind))
        return g.qdq(g.node("Softmax", [y], axis=1), shares), shares, 6, 8, 8

    _sandwich(g, between)


@case()
def softmax_over_positions(g: Graph) -> None:
    """The bins of a distribution focal loss: rows of 16 that lie in the middle, and signed codes behind."""

    def between(y, yq):
        y = g.qdq(y, Quant(g.scale(0.05), yq.zero, yq.kind))
        y = g.node("Reshape", [y, g.ints([1, 4, 16, 6])])
        out = Quant(g.scale(1 / 128), np.asarray(-128), "s8")
        y = g.qdq(g.node("Clip", [g.node("Softmax", [y], axis=2), g.floats(0), g.floats(0.9)]), out)
        y = g.node("Reshape", [y, g.ints([1, 6, 8, 8])])
        return g.qdq(y, out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def between_resize_linear(g: Graph) -> None:
    """Two grids, a Relu, sizes that are no multiple; then back on the grid, by scales."""

    def between(y, yq):
        y = g.node("Resize", [y, "", "", g.ints([1, 6, 13, 5])], mode="linear")
        out = g.act(float(yq.scale) * 0.7, "s8")
        y = g.qdq(g.node("Relu", [y]), out)
        modes = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
        return g.qdq(g.node("Resize", [y, "", g.floats([1, 1, 0.7, 2])], **modes), out), out, 6, 9, 10

    _sandwich(g, between)


@case()
def between_resize_cubic(g: Graph) -> None:
    def between(y, yq):
        modes = {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}
        y = g.qdq(g.node("Resize", [y, "", g.floats([1, 1, 1.5, 2])], **modes), yq)
        modes = {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}
        return g.qdq(g.node("Resize", [y, "", "", g.ints([1, 6, 5, 11])], **modes), yq), yq, 6, 5, 11

    _sandwich(g, between)


@case()
def resize_linear_of_dynamic_images(g: Graph) -> None:
    """Batch and sizes of every feed; 1-D behind a Squeeze. Weights are thirds: halves make ties."""
    x, xq = quantized_input(g, ("N", 3, "H", 1))
    y, yq = conv_layer(g, x, xq, (4, 3, 1, 1))
    thirds = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    y = g.node("Resize", [y, "", g.floats([1, 1, 1.5, 1])], **thirds)
    y = g.node("Squeeze", [g.qdq(y, yq), g.ints([3])])
    y = g.qdq(g.node("Resize", [y, "", g.floats([1, 1, 1.5])], **thirds), yq)
    g.output(y, ("N", 4, "out"))


@case(stays=("Add",))
def places_of_extremes(g: Graph) -> None:
    """ArgMax over the classes, ArgMin along rows, the last of equal ones; equal codes abound."""
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 3, 3, 3))
    y = g.qdq(y, Quant(yq.scale * 32, yq.zero, yq.kind))
    g.output(g.node("ArgMax", [y], axis=1, keepdims=0), ("N", 6, 6), TensorProto.INT64)
    g.output(g.node("ArgMin", [y], axis=-1, select_last_index=1), ("N", 6, 6, 1), TensorProto.INT64)
    g.output(g.node("Add", [g.node("ArgMax", [y], axis=1), g.ints(1)]), ("N", 1, 6, 6), TensorProto.INT64)


@case()
def requantize_dq_q(g: Graph) -> None:
    """Q -> DQ -> Q -> DQ onto another grid: the file says round twice."""

    def between(y, yq):
        out = g.act(float(yq.scale))
        return g.qdq(y, out), out, 6, 8, 8

    _sandwich(g, between)


@case()
def requantize_to_fewer_codes_and_back(g: Graph) -> None:
    def between(y, yq):
        coarse = g.act(float(yq.scale) * 8, "s8")
        back = g.act(float(yq.scale))
        return g.qdq(g.qdq(y, coarse), back), back, 6, 8, 8

    _sandwich(g, between)


# -- tails


@case()
def batch_normalization_behind_conv(g: Graph) -> None:
    """Unfused, negative and zero gammas among them."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _, _ = conv_node(g, x, xq, (8, 4, 3, 3), bias=None)
    yq = g.act(0.03)
    y = g.qdq(g.node("Relu", [batch_norm(g, y, 8)]), yq)
    z, wq, terms = conv_node(g, y, yq, (6, 8, 1, 1), bias="float")
    g.output(g.qdq(batch_norm(g, z, 6), g.after(yq, wq, terms)), (1, 6, 6, 6))


@case()
def batch_normalization_few_bits(g: Graph) -> None:
    """Into 2 bits, where the epilogue may be a list of thresholds."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _wq, _terms = conv_node(g, x, xq, (8, 4, 3, 3), w_range=(-2, 1))
    yq = Quant(g.scale(1.0), np.asarray(0), "u8")
    params = g._quant_inputs(yq, True)
    codes = g.node("QuantizeLinear", [g.node("Relu", [batch_norm(g, y, 8)]), *params])
    codes = g.node("Clip", [codes, g.const(np.asarray(0, np.uint8)), g.const(np.asarray(3, np.uint8))])
    g.output(g.node("DequantizeLinear", [codes, *params]), (1, 8, 6, 6))


@case(stays=("PRelu",))
def prelu_tail(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 4, 8, 8))
    slope = g.floats(g.rng.uniform(0.01, 0.4, (6, 1, 1)), "slope")
    y, _ = conv_layer(g, x, xq, (6, 4, 3, 3), then=[lambda v: g.node("PRelu", [v, slope])])
    g.output(y, (1, 6, 6, 6))


@case()
def silu_tail(g: Graph) -> None:
    """Conv -> x * Sigmoid(x) -> Q."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _ = conv_layer(g, x, xq, (6, 4, 3, 3), then=[lambda v: g.node("Mul", [v, g.node("Sigmoid", [v])])])
    g.output(y, (1, 6, 6, 6))


def _hard_gate(g: Graph, v: str) -> str:
    return g.node("Mul", [g.node("HardSigmoid", [v], alpha=1 / 6, beta=0.5), v])


@case()
def hard_swish_tail(g: Graph) -> None:
    """Conv -> HardSwish -> Q, in one node and as x * HardSigmoid(x)."""
    g.opset = 14
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 4, 3, 3), then=[lambda v: g.node("HardSwish", [v])])
    y, _ = conv_layer(g, y, yq, (4, 6, 3, 3), then=[lambda v: _hard_gate(g, v)])
    g.output(y, (1, 4, 4, 4))


@case(stays=("Mul",))
def hard_sigmoid_tail(g: Graph) -> None:
    """The gates of squeeze-and-excitation blocks: Conv -> HardSigmoid -> Q, and without a quantizer."""
    x, xq = quantized_input(g, (1, 4, 8, 8), about=0.002)
    y, _, _ = conv_node(g, x, xq, (6, 4, 3, 3), bias="float")
    g.output(g.qdq(g.node("HardSigmoid", [y], alpha=1 / 6), g.act(1 / 256, zero=0)), (1, 6, 6, 6))
    z, _, _ = conv_node(g, x, xq, (6, 4, 1, 1))
    gate = g.node("HardSigmoid", [z], alpha=0.3, beta=0.4)
    g.output(g.node("Mul", [gate, g.input((1, 6, 1, 1))]), (1, 6, 8, 8))


@case()
def silu_and_residual_tail(g: Graph) -> None:
    """As NVIDIA's tools leave a bottleneck of YOLO: of an Add's operands one alone is quantized."""
    x, xq = quantized_input(g, (1, 6, 8, 8))

    def silu_add(v: str) -> str:
        return g.node("Add", [x, g.node("Mul", [g.node("Sigmoid", [v]), v])])

    y, _ = conv_layer(g, x, xq, (6, 6, 3, 3), then=[silu_add], pads=[1, 1, 1, 1])
    g.output(y, (1, 6, 8, 8))


@case()
def split_block_between_layers(g: Graph) -> None:
    """As NVIDIA's tools leave a block of YOLO: what layers and one operand of an Add read is quantized."""

    def silu_layer(x: str, xq: Quant, channels: int, out: int, kernel: int) -> str:
        pads = [kernel // 2] * 4
        v, _, _ = conv_node(g, x, xq, (out, channels, kernel, kernel), bias="float", pads=pads)
        return g.node("Mul", [v, g.node("Sigmoid", [v])])

    x, xq = quantized_input(g, ("N", 4, "H", "W"), about=0.01)
    parts = g.node("Split", [silu_layer(x, xq, 4, 8, 1), g.ints([4, 4])], axis=1, outputs=2)
    yq, zq = g.act(0.02), g.act(0.03)
    y = g.qdq(parts[1], yq)
    branch = g.node("Add", [y, silu_layer(y, yq, 4, 4, 3)])
    pool = g.node("MaxPool", [branch], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    scales = g.floats([1, 1, 2, 2])
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    joined = g.node("Concat", [*parts, branch, pool], axis=1)
    larger = g.node("Resize", [joined, "", scales], mode="nearest", **attributes)
    z, _ = conv_layer(g, g.qdq(larger, zq), zq, (5, 16, 1, 1))
    g.output(z, ("N", 5, None, None))


@case(stays=("GlobalAveragePool", "Mul"))
def squeeze_and_excite_between_layers(g: Graph) -> None:
    """The same of a squeeze-and-excitation block: an image of real numbers is pooled, and scaled."""
    x, xq = quantized_input(g, ("N", 4, 8, 8))
    y, _, _ = conv_node(g, x, xq, (6, 4, 3, 3))
    y = g.node("Relu", [y])
    mean, mq = g.node("GlobalAveragePool", [y]), g.act(0.02)
    gate, _, _ = conv_node(g, g.qdq(mean, mq), mq, (6, 6, 1, 1))
    y, yq = g.node("Mul", [y, g.node("HardSigmoid", [gate], alpha=1 / 6)]), g.act(0.05)
    z, _ = conv_layer(g, g.qdq(y, yq), yq, (4, 6, 1, 1))
    g.output(z, ("N", 4, 6, 6))


@case()
def residual_of_a_rounded_gate(g: Graph) -> None:
    """A residual block whose branch ends in x * Sigmoid(x), the product alone not rounded."""
    x, xq = quantized_input(g, (1, 6, 8, 8), about=0.01)
    y, _ = conv_layer(g, x, xq, (6, 6, 3, 3), pads=[1, 1, 1, 1])
    gate = g.qdq(g.node("Sigmoid", [y]), g.act(1 / 256, zero=0))
    y = g.node("Add", [x, g.node("Mul", [y, gate])])
    g.output(g.qdq(y, g.act(0.02)), (1, 6, 8, 8))


@case(stays=("Mul", "Sigmoid"))
def gate_with_another_reader(g: Graph) -> None:
    """What is gated is read elsewhere, too: the convolution ends before it."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    v, _, _ = conv_node(g, x, xq, (6, 4, 3, 3))
    y = g.node("Mul", [v, g.node("Sigmoid", [v])])
    g.output(g.qdq(y, g.act(0.05)), (1, 6, 6, 6))
    g.output(g.qdq(v, g.act(0.05)), (1, 6, 6, 6))


@case(float_tail=True, stays=("Mul", "Softmax"))
def softmax_head(g: Graph) -> None:
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (6, 3, 8, 8))
    y = g.node("Flatten", [y])
    w, wq = gemm_weight(g, 6, 10)
    y = g.qdq(g.node("Gemm", [y, w, g.bias(10, yq, wq)]), g.after(yq, wq, 6))
    g.output(
        g.node("Softmax", [g.node("Mul", [y, g.floats(0.05 / float(yq.scale) / 100)])], axis=1), ("N", 10)
    )


@case(float_tail=True, stays=("Sub", "Div", "Softmax"))
def float_preprocessing_and_softmax(g: Graph) -> None:
    """Normalization in front, in float; Softmax behind: both stay with ONNX Runtime."""
    x = g.input(("N", 3, "H", "W"))
    x = g.node("Div", [g.node("Sub", [x, g.floats(np.reshape([0.1, 0.2, 0.3], (3, 1, 1)))]), g.floats(0.8)])
    xq = g.act(0.03)
    y, _yq = conv_layer(g, g.qdq(x, xq), xq, (8, 3, 3, 3), pads=[1, 1, 1, 1])
    g.output(g.node("Softmax", [y], axis=1), ("N", 8, "H", "W"))


@case()
def nhwc_model_with_nchw_convolutions(g: Graph) -> None:
    """NHWC input, a Transpose at each edge and none inside."""
    x, xq = quantized_input(g, ("N", "H", "W", 3))
    x = g.node("Transpose", [x], perm=[0, 3, 1, 2])
    y, yq = conv_layer(g, x, xq, (6, 3, 3, 3), pads=[1, 1, 1, 1])
    z, _ = conv_layer(g, y, yq, (4, 6, 1, 1))
    g.output(g.node("Transpose", [z], perm=[0, 2, 3, 1]), ("N", "H", "W", 4))


@case()
def reshaped_detection_head(g: Graph) -> None:
    """Conv -> Transpose to NHWC -> Reshape, several outputs, as YuNet has."""
    x, xq = quantized_input(g, (1, 3, 8, 8), about=0.0001)
    y, yq = conv_layer(g, x, xq, (6, 3, 3, 3), pads=[1, 1, 1, 1])
    for channels, name in ((1, "score"), (4, "box")):
        head, hq = conv_layer(g, y, yq, (channels, 6, 1, 1))
        head = g.qdq(g.node("Transpose", [head], perm=[0, 2, 3, 1]), hq)
        head = g.qdq(g.node("Reshape", [head, g.ints([1, -1, channels])]), hq)
        if name == "score":
            head = g.qdq(g.node("Sigmoid", [head]), g.act(1 / 256, zero=0))
        g.output(head, (1, 64, channels))


@case()
def dynamic_batch_and_image(g: Graph) -> None:
    x, xq = quantized_input(g, ("batch", 3, "height", "width"))
    y, yq = conv_layer(g, x, xq, (8, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2], y_zero="low")
    z, zq = conv_layer(g, y, yq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    sq = g.act(float(yq.scale) + float(zq.scale))
    y = g.qdq(g.node("Add", [y, z]), sq)
    y = g.qdq(g.node("MaxPool", [y], kernel_shape=[2, 2], strides=[1, 1]), sq)
    g.output(y, ("batch", 8, None, None))


@case()
def batch_as_a_symbol_only(g: Graph) -> None:
    x, xq = quantized_input(g, ("N", 3, 8, 8))
    y, yq = conv_layer(g, x, xq, (4, 3, 3, 3))
    y = g.qdq(g.node("Flatten", [y]), yq)
    g.output(y, ("N", 144))


@case(stays=("Mul",))
def cast_of_codes(g: Graph) -> None:
    """uint8 graph input cast to float, scaled and quantized, as image models do."""
    x = g.node("Cast", [g.input((1, 3, 8, 8), "u8")], to=TensorProto.FLOAT)
    x = g.node("Mul", [x, g.floats(1 / 255)])
    xq = Quant(np.asarray(1 / 255, np.float32), np.asarray(0), "u8")
    y, _ = conv_layer(g, g.qdq(x, xq), xq, (6, 3, 3, 3))
    g.output(y, (1, 6, 6, 6))


@case()
def shared_weights(g: Graph) -> None:
    """One weight DQ feeds two convolutions, as a detection head shared between scales has."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    wq = g.weight_quant(6)
    w = g.weight(g.codes((6, 4, 3, 3)), wq)
    yq = g.after(xq, wq, 36)
    a = g.qdq(g.node("Conv", [x, w]), yq)
    b = g.qdq(g.node("Conv", [x, w], strides=[2, 2]), yq)
    g.output(a, (1, 6, 6, 6))
    g.output(b, (1, 6, 3, 3))


@case()
def relu_between_dq_and_conv(g: Graph) -> None:
    """DQ -> Relu -> Conv: the Relu acts on codes already rounded."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, _ = conv_layer(g, g.node("Relu", [x]), xq, (6, 4, 3, 3))
    g.output(y, (1, 6, 6, 6))


@case()
def max_pool_before_the_quantizer(g: Graph) -> None:
    """Conv -> Relu -> MaxPool -> Q, as torch exports it: the pool may as well run on codes."""
    x, xq = quantized_input(g, (1, 4, 9, 9))

    def pool(v: str) -> str:
        return g.node("MaxPool", [g.node("Relu", [v])], kernel_shape=[2, 2], strides=[2, 2])

    y, yq = conv_layer(g, x, xq, (6, 4, 3, 3), bias="float", then=[pool], y_zero="low")
    z, _ = conv_layer(g, y, yq, (4, 6, 1, 1))
    g.output(z, (1, 4, 3, 3))


@case()
def conv_result_used_twice_in_float(g: Graph) -> None:
    """The float result of a convolution goes to its quantizer and to a float graph output."""
    x, xq = quantized_input(g, (1, 4, 8, 8))
    y, wq, terms = conv_node(g, x, xq, (6, 4, 3, 3), bias="float")
    g.output(g.qdq(y, g.after(xq, wq, terms)), (1, 6, 6, 6))
    g.output(y, (1, 6, 6, 6))
