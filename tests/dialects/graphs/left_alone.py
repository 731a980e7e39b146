"""What stays as it is, with a reason that names it; where possible beside a layer that converts."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.dialects.graphs.blocks import conv_layer, conv_node, quantized_input
from tests.dialects.graphs.builder import Graph, Quant, as_tensor, case


@case(left={"Conv": "16"})
def sixteen_bit_activations(g: Graph) -> None:
    g.opset, g.ir_version = 21, 10
    xq = g.act(0.0005, "u16")
    x = g.qdq(g.input((1, 4, 8, 8)), xq)
    y, _ = conv_layer(g, x, xq, (6, 4, 3, 3), y_kind="u16")
    g.output(y, (1, 6, 6, 6))


@case(left={"Conv": "16"})
def sixteen_bit_contrib(g: Graph) -> None:
    """int16 through the com.microsoft domain at opset 13; the second layer is 8-bit and converts."""
    g.domain = "com.microsoft"
    xq = g.act(0.0005, "s16", zero=0)
    x = g.qdq(g.input((1, 4, 8, 8)), xq)
    y, _wq, _ = conv_node(g, x, xq, (6, 4, 3, 3))
    yq = g.act(0.1)
    z, _ = conv_layer(g, g.qdq(y, yq), yq, (4, 6, 1, 1))
    g.output(z, (1, 4, 6, 6))


@case(left={"Conv": "(?i)block"})
def blocked_weights(g: Graph) -> None:
    """block_size on axis 1 of the weights (opset 21)."""
    g.opset, g.ir_version = 21, 10
    x, _xq = quantized_input(g, (1, 8, 6, 6))
    codes = g.const(as_tensor(g.codes((4, 8, 1, 1), "s4"), "s4", ""), "weight")
    w = g.node(
        "DequantizeLinear", [codes, g.floats(g.scale(0.02, 8).reshape(4, 2, 1, 1))], axis=1, block_size=4
    )
    g.output(g.node("Conv", [x, w]), (1, 4, 6, 6))


@case(left={"Conv": "(?i)float ?8|fp8|e4m3"})
def float8(g: Graph) -> None:
    g.opset, g.ir_version = 19, 9
    zero = helper.make_tensor("", TensorProto.FLOAT8E4M3FN, [], [0.0])
    scale, zero = g.floats(0.03), g.const(zero)
    x = g.node("DequantizeLinear", [g.node("QuantizeLinear", [g.input((1, 4, 6, 6)), scale, zero]), scale])
    w = g.floats(g.rng.normal(size=(4, 4, 1, 1)))
    g.output(g.node("Conv", [x, w]), (1, 4, 6, 6))


@case(left={"Conv": "(?i)float|not quantized|DequantizeLinear"})
def float_weights(g: Graph) -> None:
    x, _xq = quantized_input(g, (1, 4, 6, 6))
    y = g.node("Conv", [x, g.floats(g.rng.normal(size=(4, 4, 1, 1)), "weight")])
    yq = g.act(0.05)
    z, _ = conv_layer(g, g.qdq(y, yq), yq, (4, 4, 1, 1))
    g.output(z, (1, 4, 6, 6))


@case(left={"Conv": "(?i)float|not quantized|DequantizeLinear"})
def float_activations(g: Graph) -> None:
    """Weight-only quantization: the input has no quantizer."""
    wq = g.weight_quant(4)
    g.output(g.node("Conv", [g.input((1, 4, 6, 6)), g.weight(g.codes((4, 4, 3, 3)), wq)]), (1, 4, 4, 4))


@case(left={"Conv": "(?i)constant|initializer"})
def weights_from_the_outside(g: Graph) -> None:
    """The quantized weights are a graph input."""
    x, _xq = quantized_input(g, (1, 4, 6, 6))
    w = g.dq(g.input((4, 4, 3, 3), "s8"), g.weight_quant(4))
    g.output(g.node("Conv", [x, w]), (1, 4, 4, 4))


@case(left={"Conv": "(?i)constant|initializer"})
def scale_from_the_outside(g: Graph) -> None:
    """The activation's scale is computed at run time."""
    x = g.input((1, 4, 6, 6))
    scale = g.node("Div", [g.node("ReduceMax", [g.node("Abs", [x])], keepdims=0), g.floats(127.0)])
    zero = g.const(np.asarray(0, np.int8))
    x = g.node("DequantizeLinear", [g.node("QuantizeLinear", [x, scale, zero]), scale, zero])
    g.output(g.node("Conv", [x, g.weight(g.codes((4, 4, 3, 3)), g.weight_quant(4))]), (1, 4, 4, 4))


@case(left={"ConvTranspose": "3 spatial dims"})
def transposed_volume(g: Graph) -> None:
    x, xq = quantized_input(g, (1, 2, 3, 3, 3))
    y, _ = conv_layer(g, x, xq, (2, 3, 2, 2, 2), transposed=True)
    g.output(y, (1, 3, 4, 4, 4))


@case(left={"Conv": "(?i)axis|channel"})
def weight_scale_per_input_channel(g: Graph) -> None:
    """The scale lies along the summed axis (DequantizeLinear's default axis 1)."""
    x, _xq = quantized_input(g, (1, 4, 6, 6))
    wq = Quant(g.scale(0.02, 4), np.zeros(4), "s8", 1)
    g.output(g.node("Conv", [x, g.weight(g.codes((6, 4, 3, 3)), wq)]), (1, 6, 4, 4))


@case(left={"Conv": "(?i)subgraph|If|branch"})
def inside_if(g: Graph) -> None:
    """A layer in each branch of an If, one in front of it that converts."""
    x, xq = quantized_input(g, (1, 3, 8, 8))
    y, _yq = conv_layer(g, x, xq, (4, 3, 3, 3))
    condition = g.node("Greater", [g.node("ReduceMax", [x], keepdims=0), g.floats(2.0)])
    branches = []
    for name in ("then", "else"):
        inner = Graph(f"{name}_branch", 0)
        inner.rng, inner._count = g.rng, g._count + 1000 * (1 + len(branches))
        w = inner.weight(inner.codes((4, 4, 1, 1)), inner.weight_quant(4))
        inner.output(inner.node("Conv", [y, w]), (1, 4, 6, 6))
        branches.append(helper.make_graph(inner.nodes, name, [], inner.outputs, inner.initializers))
    g.output(g.node("If", [condition], then_branch=branches[0], else_branch=branches[1]), (1, 4, 6, 6))


@case(left={"Conv": "(?i)int32|overflow|accumulat"})
def sum_leaves_int32(g: Graph) -> None:
    """K = 67,600 extreme products: the exact sum leaves int32."""
    x, _xq = quantized_input(g, (1, 100, 26, 26), zero=0)
    wq = g.weight_quant(None)
    g.output(g.node("Conv", [x, g.weight(np.full((1, 100, 26, 26), -128), wq)]), (1, 1, 1, 1))


@case(stays=("Relu",))
def no_quantization_at_all(g: Graph) -> None:
    """A float model without a matrix product: nothing to do, nothing broken."""
    g.output(g.node("Relu", [g.input((1, 3, 4, 4))]), (1, 3, 4, 4))
