"""ONNX Runtime's operator form: codes, scales and zero points are inputs of every operator.

Sources: onnxruntime/python/tools/quantization/operators/*.py writes these graphs with
`quant_format=QuantFormat.QOperator`; docs/ContribOperators.md defines the com.microsoft ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from tests.dialects.graphs.builder import TYPES, Graph, Quant, as_tensor, case


def _codes_input(
    g: Graph, shape: Sequence[int | str], kind: str = "u8", *, zero: int | str = "random", about: float = 0.03
) -> tuple[str, Quant]:
    """A float graph input behind a QuantizeLinear: (codes, their quantizer)."""
    quant = g.act(about, kind, zero=zero)
    return g.q(g.input(shape, step=float(quant.scale), about=about), quant), quant


def _params(g: Graph, quant: Quant) -> list[str]:
    return g._quant_inputs(quant, True)


def _weight(g: Graph, codes: np.ndarray, quant: Quant) -> list[str]:
    return [g.const(as_tensor(codes, quant.kind, ""), "weight"), *_params(g, quant)]


def _bias(g: Graph, channels: int, x: Quant, w: Quant, terms: int) -> str:
    spread = int(g.deviation(x, w, terms))
    return g.const(g.rng.integers(-spread, spread + 1, channels).astype(np.int32), "bias")


def _conv(
    g: Graph,
    x: str,
    xq: Quant,
    shape: Sequence[int],
    *,
    w_kind: str = "s8",
    per_channel: bool = True,
    symmetric: bool = True,
    bias: bool = True,
    y_zero: int | str = "random",
    domain: str = "",
    **attributes,
) -> tuple[str, Quant]:
    """One QLinearConv: (codes, their quantizer)."""
    wq = g.weight_quant(shape[0] if per_channel else None, w_kind, symmetric=symmetric)
    terms = int(np.prod(shape[1:]))
    yq = g.after(xq, wq, terms, xq.kind, zero=y_zero)
    inputs = [x, *_params(g, xq), *_weight(g, g.codes(shape, w_kind), wq), *_params(g, yq)]
    if bias:
        inputs.append(_bias(g, shape[0], xq, wq, terms))
    return g.node("QLinearConv", inputs, domain=domain, **attributes), yq


def _contrib(g: Graph, op: str, *operands: tuple[str, Quant], y: Quant, **attributes) -> str:
    """A com.microsoft operator: its operands with their parameters, then those of its output."""
    inputs = [name for codes, quant in operands for name in (codes, *_params(g, quant))]
    return g.node(op, [*inputs, *_params(g, y)], domain="com.microsoft", **attributes)


def _finish(g: Graph, codes: str, quant: Quant, shape: Sequence[int | str]) -> None:
    g.output(g.dq(codes, quant), shape)


# -- convolutions


@case(stock_equal=True)
def conv_per_channel(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 3, 12, 12))
    y, yq = _conv(g, x, xq, (8, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2], y_zero="low")
    z, zq = _conv(g, y, yq, (8, 8, 1, 1), y_zero="low")
    _finish(g, z, zq, (1, 8, 6, 6))


@case(stock_equal=True)
def conv_per_tensor_unsigned_weights(g: Graph) -> None:
    """Unsigned weights with a zero point, padding on some sides only."""
    x, xq = _codes_input(g, ("N", 4, 9, 9))
    options = {"w_kind": "u8", "per_channel": False, "symmetric": False}
    y, yq = _conv(g, x, xq, (8, 4, 3, 3), pads=[1, 0, 2, 1], **options)
    z, zq = _conv(g, y, yq, (4, 8, 3, 3), dilations=[2, 1], **options)
    _finish(g, z, zq, ("N", 4, None, None))


@case()  # ONNX Runtime's optimizer leaves types to it that it has no kernel for
def conv_signed_activations(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 4, 8, 8), "s8")
    y, yq = _conv(g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1])
    z, zq = _conv(g, y, yq, (8, 8, 3, 3), bias=False)
    _finish(g, z, zq, (1, 8, 6, 6))


@case(stock_equal=True)
def conv_groups_and_auto_pad(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 8, 9, 9))
    y, yq = _conv(g, x, xq, (8, 1, 3, 3), group=8, auto_pad="SAME_UPPER", strides=[2, 2])
    z, zq = _conv(g, y, yq, (6, 4, 3, 3), group=2, auto_pad="SAME_LOWER")
    _finish(g, z, zq, (1, 6, 5, 5))


@case(stock_equal=True)
def conv_one_dimension(g: Graph) -> None:
    x, xq = _codes_input(g, (2, 4, 20))
    y, yq = _conv(g, x, xq, (8, 4, 5), pads=[2, 2], strides=[2])
    _finish(g, y, yq, (2, 8, 10))


@case(stock_equal=True)
def conv_codes_in_and_out(g: Graph) -> None:
    """No quantizer at either end: the model's own inputs and outputs are codes."""
    xq = g.act(0.03)
    y, _ = _conv(g, g.input((1, 4, 6, 6), "u8"), xq, (8, 4, 3, 3))
    g.output(y, (1, 8, 4, 4), TensorProto.UINT8)


@case(stock_equal=True)
def conv_parameters_as_nodes(g: Graph) -> None:
    g.constants = "node"
    g.scale_shape = "one"
    x, xq = _codes_input(g, (1, 4, 8, 8))
    y, yq = _conv(g, x, xq, (8, 4, 3, 3))
    z, zq = _conv(g, y, yq, (4, 8, 3, 3), per_channel=False)
    _finish(g, z, zq, (1, 4, 4, 4))


@case(stock_equal=True)
def conv_of_opset_10(g: Graph) -> None:
    """Scales per channel in an opset whose DequantizeLinear has no axis."""
    g.opset, g.ir_version = 10, 5
    x, xq = _codes_input(g, (1, 4, 8, 8))
    y, yq = _conv(g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1])
    _finish(g, y, yq, (1, 8, 8, 8))


@case(stock_equal=True)
def conv_channels_last(g: Graph) -> None:
    """com.microsoft's QLinearConv on NHWC codes, which ONNX Runtime's layout optimizer writes."""
    x, xq = _codes_input(g, (1, 8, 8, 4))
    y, yq = _conv(
        g, x, xq, (8, 4, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2], domain="com.microsoft", channels_last=1
    )
    z, zq = _conv(g, y, yq, (4, 8, 1, 1), domain="com.microsoft", channels_last=1)
    _finish(g, z, zq, (1, 4, 4, 4))


# -- matrix products


def _gemm(
    g: Graph,
    *,
    alpha: float = 1.0,
    transposed: bool = False,
    c: Sequence[int] | None = (10,),
    w_kind: str = "s8",
    per_channel: bool = True,
    to_codes: bool = True,
) -> None:
    x, xq = _codes_input(g, (3, 24))
    wq = g.weight_quant(10 if per_channel else None, w_kind, axis=0 if transposed else 1)
    codes = g.codes((10, 24) if transposed else (24, 10), wq.kind)
    inputs = [x, *_params(g, xq), *_weight(g, codes, wq)]
    spread = int(g.deviation(xq, wq, 24))
    inputs.append("" if c is None else g.const(g.rng.integers(-spread, spread, c).astype(np.int32), "bias"))
    yq = g.after(xq, wq, 24, xq.kind)
    if to_codes:
        inputs += _params(g, yq)
    while inputs[-1] == "":
        inputs.pop()
    attributes = {"alpha": alpha} if alpha != 1.0 else {}
    y = g.node("QGemm", inputs, domain="com.microsoft", transB=int(transposed), **attributes)
    g.output(g.dq(y, yq) if to_codes else y, (3, 10))


@case(stock_equal=True)
def gemm(g: Graph) -> None:
    _gemm(g)


@case(stock_equal=True)
def gemm_transposed_with_alpha(g: Graph) -> None:
    _gemm(g, alpha=0.37, transposed=True, c=(1, 10))


@case(stock_equal=True)
def gemm_one_bias_for_all(g: Graph) -> None:
    """C is a single integer: it joins the exact sum all the same."""
    _gemm(g, c=(), per_channel=False)


@case(stock_equal=True)
def gemm_to_float(g: Graph) -> None:
    _gemm(g, alpha=1.5, to_codes=False)


@case(stock_equal=True)
def gemm_without_bias_to_float(g: Graph) -> None:
    _gemm(g, c=None, to_codes=False, w_kind="u8", per_channel=False)


@case(stays=("QGemm",))
def gemm_bias_per_row(g: Graph) -> None:
    """A C that varies from row to row is no bias per output."""
    _gemm(g, c=(3, 10))


@case(stock_equal=True)
def matmul_per_column(g: Graph) -> None:
    x, xq = _codes_input(g, (2, 5, 16))
    wq = g.weight_quant(12, axis=1)
    yq = g.after(xq, wq, 16)
    y = g.node("QLinearMatMul", [x, *_params(g, xq), *_weight(g, g.codes((16, 12)), wq), *_params(g, yq)])
    _finish(g, y, yq, (2, 5, 12))


@case(stock_equal=True)
def matmul_of_activations(g: Graph) -> None:
    """Both operands are activations, as in attention."""
    a, aq = _codes_input(g, (1, 2, 6, 8))
    b, bq = _codes_input(g, (1, 2, 8, 6))
    yq = g.act(float(aq.scale) * float(bq.scale) * 1500)
    y = g.node("QLinearMatMul", [a, *_params(g, aq), b, *_params(g, bq), *_params(g, yq)])
    _finish(g, y, yq, (1, 2, 6, 6))


# -- networks


@case()
def residual_block(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 8, 8, 8))
    a, aq = _conv(g, x, xq, (8, 8, 3, 3), pads=[1, 1, 1, 1], y_zero="low")
    b, bq = _conv(g, a, aq, (8, 8, 3, 3), pads=[1, 1, 1, 1])
    sq = g.act(float(bq.scale) + float(xq.scale) / 2, zero="low")
    total = _contrib(g, "QLinearAdd", (b, bq), (x, xq), y=sq)
    y, yq = _conv(g, total, sq, (4, 8, 1, 1))
    _finish(g, y, yq, (1, 4, 8, 8))


@case()
def mobile_block_to_classes(g: Graph) -> None:
    """Expand, depthwise, project, add; the mean, Flatten on codes, and a classifier."""
    x, xq = _codes_input(g, ("N", 4, 8, 8))
    a, aq = _conv(g, x, xq, (12, 4, 1, 1), y_zero="low")
    a, aq = _conv(g, a, aq, (12, 1, 3, 3), group=12, pads=[1, 1, 1, 1], y_zero="low")
    a, aq = _conv(g, a, aq, (4, 12, 1, 1))
    sq = g.act(float(aq.scale) + float(xq.scale) / 2)
    total = _contrib(g, "QLinearAdd", (a, aq), (x, xq), y=sq)
    mq = g.act(float(sq.scale) / 4)
    mean = _contrib(g, "QLinearGlobalAveragePool", (total, sq), y=mq, channels_last=0)
    flat = g.node("Flatten", [mean])
    wq = g.weight_quant(10, axis=0)
    yq = g.after(mq, wq, 4)
    inputs = [flat, *_params(g, mq), *_weight(g, g.codes((10, 4)), wq), _bias(g, 10, mq, wq, 4)]
    y = g.node("QGemm", [*inputs, *_params(g, yq)], domain="com.microsoft", transB=1)
    _finish(g, y, yq, ("N", 10))


@case()
def concat_of_branches(g: Graph) -> None:
    """Pools and moves work on codes in this form; the operands of the Concat have their own grids."""
    x, xq = _codes_input(g, (1, 4, 8, 8))
    a, aq = _conv(g, x, xq, (6, 4, 3, 3), pads=[1, 1, 1, 1], y_zero="low")
    b = g.node("MaxPool", [x], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])
    cq = g.act(float(aq.scale) * 1.3)
    inputs = [*_params(g, cq), a, *_params(g, aq), b, *_params(g, xq), a, *_params(g, aq)]
    joined = g.node("QLinearConcat", inputs, domain="com.microsoft", axis=1)
    y, yq = _conv(g, joined, cq, (4, 16, 1, 1))
    y = g.node("Transpose", [y], perm=[0, 2, 3, 1])
    _finish(g, y, yq, (1, 8, 8, 4))


@case()
def activations_and_products(g: Graph) -> None:
    """x * sigmoid(x) and a LeakyRelu, each operator with its own quantizer."""
    x, xq = _codes_input(g, (1, 4, 6, 6))
    y, yq = _conv(g, x, xq, (4, 4, 1, 1))
    lq = g.act(float(yq.scale), zero=60)
    y = _contrib(g, "QLinearLeakyRelu", (y, yq), y=lq, alpha=0.1)
    gq = Quant(np.asarray(1 / 256, np.float32), np.asarray(0), "u8")
    gate = _contrib(g, "QLinearSigmoid", (y, lq), y=gq)
    mq = g.act(float(lq.scale), zero=30)
    y = _contrib(g, "QLinearMul", (y, lq), (gate, gq), y=mq)
    z, zq = _conv(g, y, mq, (4, 4, 1, 1))
    _finish(g, z, zq, (1, 4, 6, 6))


@case(ties_differ=True)
def average_pools(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 4, 12, 12))
    aq = g.act(float(xq.scale))
    a = _contrib(
        g, "QLinearAveragePool", (x, xq), y=aq, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1],
        count_include_pad=1,
    )  # fmt: skip
    bq = g.act(float(xq.scale) / 2)
    b = _contrib(g, "QLinearAveragePool", (a, aq), y=bq, kernel_shape=[2, 2], ceil_mode=1)
    y, yq = _conv(g, b, bq, (4, 4, 1, 1))
    _finish(g, y, yq, (1, 4, 5, 5))


@case(ties_differ=True)
def pools_with_channels_last(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 6, 6, 4), "s8")
    aq = g.act(float(xq.scale), "s8")
    a = _contrib(g, "QLinearAveragePool", (x, xq), y=aq, kernel_shape=[2, 2], channels_last=1)
    mq = g.act(float(xq.scale) / 3, "s8")
    mean = _contrib(g, "QLinearGlobalAveragePool", (a, aq), y=mq, channels_last=1)
    _finish(g, mean, mq, (1, 1, 1, 4))


@case()
def max_pool_with_channels_last(g: Graph) -> None:
    """com.microsoft's NhwcMaxPool between convolutions of that form."""
    x, xq = _codes_input(g, (1, 8, 8, 4))
    y, yq = _conv(g, x, xq, (6, 4, 3, 3), domain="com.microsoft", channels_last=1)
    y = g.node("NhwcMaxPool", [y], domain="com.microsoft", kernel_shape=[2, 2], strides=[2, 2])
    z, zq = _conv(g, y, yq, (4, 6, 1, 1), domain="com.microsoft", channels_last=1)
    _finish(g, z, zq, (1, 3, 3, 4))


@case(loads_in_stock=False)
def mean_over_pixels(g: Graph) -> None:
    """An operator that ONNX Runtime defines but has no kernel for; the axes are an input since opset 18."""
    g.opset = 18
    x, xq = _codes_input(g, (2, 4, 5, 5))
    y, yq = _conv(g, x, xq, (4, 4, 1, 1))
    mq = g.act(float(yq.scale) / 3)
    _finish(g, _contrib(g, "QLinearReduceMean", (y, yq), y=mq, axes=[2, 3], keepdims=0), mq, (2, 4))


@case(ties_differ=True)
def zero_points_left_out(g: Graph) -> None:
    """Optional in com.microsoft's operators; the output's type follows from the input's."""
    x, xq = _codes_input(g, (1, 4, 6, 6), "s8", zero=0)
    scales = [g.floats(g.scale(0.03), "scale") for _ in range(2)]
    zero = _params(g, xq)[1]
    inputs = [x, _params(g, xq)[0], "", scales[0], zero]
    y = g.node("QLinearLeakyRelu", inputs, domain="com.microsoft", alpha=0.2)
    y = g.node("MaxPool", [y], kernel_shape=[2, 2])
    z = g.node("QLinearAdd", [y, scales[0], zero, y, scales[0], zero, scales[1]], domain="com.microsoft")
    g.output(g.node("DequantizeLinear", [z, scales[1]]), (1, 4, 5, 5))


@case(stays=("QLinearSoftmax",))
def softmax_stays(g: Graph) -> None:
    x, xq = _codes_input(g, (2, 12))
    wq = g.weight_quant(8, axis=1)
    yq = g.after(xq, wq, 12)
    y = g.node("QLinearMatMul", [x, *_params(g, xq), *_weight(g, g.codes((12, 8)), wq), *_params(g, yq)])
    sq = Quant(np.asarray(1 / 256, np.float32), np.asarray(0), "u8")
    _finish(g, _contrib(g, "QLinearSoftmax", (y, yq), y=sq, axis=-1, opset=g.opset), sq, (2, 8))


@case(stays=("Greater", "QLinearWhere"))
def where_stays(g: Graph) -> None:
    """An operator that lowbit has no form of, between two convolutions that it has."""
    x, xq = _codes_input(g, (1, 4, 6, 6))
    a, aq = _conv(g, x, xq, (4, 4, 1, 1))
    b, bq = _conv(g, x, xq, (4, 4, 1, 1))
    condition = g.node("Greater", [g.input((1, 4, 6, 6)), g.floats(0.0)])
    zq = g.act(float(aq.scale))
    operands = [condition, a, *_params(g, aq), b, *_params(g, bq), *_params(g, zq)]
    z = g.node("QLinearWhere", operands, domain="com.microsoft")
    y, yq = _conv(g, z, zq, (4, 4, 1, 1))
    _finish(g, y, yq, (1, 4, 6, 6))


@case()
def conv_three_dimensions(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 2, 5, 5, 5))
    y, yq = _conv(g, x, xq, (3, 2, 3, 3, 3))
    _finish(g, y, yq, (1, 3, 3, 3, 3))


@case(stays=("QLinearSoftmax",), ties_differ=True)
def attention(g: Graph) -> None:
    """Two products of activations around a QLinearSoftmax; the addition and the projection behind convert."""
    x, xq = _codes_input(g, (1, 4, 6, 6))
    yq = g.act(float(xq.scale) ** 2 * 1500)
    y = g.node("QLinearMatMul", [x, *_params(g, xq), x, *_params(g, xq), *_params(g, yq)])
    sq = Quant(np.asarray(1 / 256, np.float32), np.asarray(0), "u8")
    shares = _contrib(g, "QLinearSoftmax", (y, yq), y=sq, axis=-1, opset=g.opset)
    zq = g.act(float(xq.scale))
    z = g.node("QLinearMatMul", [shares, *_params(g, sq), x, *_params(g, xq), *_params(g, zq)])
    turned = g.node("Transpose", [z], perm=[0, 1, 3, 2])
    tq = g.act(float(zq.scale) * 1.5)
    total = _contrib(g, "QLinearAdd", (z, zq), (turned, zq), y=tq)
    out, oq = _conv(g, total, tq, (4, 4, 1, 1))
    _finish(g, out, oq, (1, 4, 6, 6))


@case(stays=("QLinearConv",))
def kept_around_converted(g: Graph) -> None:
    """Two operators in a row that stay, then one that converts, then one that stays again."""
    x, xq = _codes_input(g, (1, 2, 1, 3, 4, 4))  # of four spatial dims
    y, yq = _conv(g, x, xq, (2, 2, 1, 1, 1, 1), per_channel=False)
    y, yq = _conv(g, y, yq, (2, 2, 1, 1, 1, 1), bias=False)
    y = g.node("Reshape", [y, g.ints([1, 6, 4, 4])])
    y, yq = _conv(g, y, yq, (6, 6, 3, 3), pads=[1, 1, 1, 1])
    y = g.node("Reshape", [y, g.ints([1, 2, 1, 3, 4, 4])])
    y, yq = _conv(g, y, yq, (3, 2, 1, 2, 1, 1))
    _finish(g, y, yq, (1, 3, 1, 2, 4, 4))


@case(ties_differ=True)
def constant_operands(g: Graph) -> None:
    """Initializers as operands of QLinearAdd and QLinearMul: per channel, a scalar, a row."""
    x, xq = _codes_input(g, (1, 4, 6, 6))
    for op, shape in (("QLinearAdd", (4, 1, 1)), ("QLinearMul", ()), ("QLinearAdd", (6,))):
        bq = g.act(0.02)
        b = g.const(as_tensor(g.codes(shape, "u8"), "u8", ""), "operand")
        yq = g.act(float(xq.scale) * 1.2)
        x, xq = _contrib(g, op, (x, xq), (b, bq), y=yq), yq
    _finish(g, x, xq, (1, 4, 6, 6))


# -- int32 results


def _integer_scale(g: Graph, total: str, scale: np.ndarray) -> str:
    return g.node("Mul", [g.node("Cast", [total], to=TensorProto.FLOAT), g.floats(scale)])


def _conv_integer(g: Graph, *, per_channel: bool) -> None:
    x, xq = _codes_input(g, (1, 4, 8, 8))
    wq = g.weight_quant(8 if per_channel else None, "u8", symmetric=False)
    zeros = [_params(g, xq)[1], _params(g, wq)[1]]
    weight = _weight(g, g.codes((8, 4, 3, 3), "u8"), wq)[0]
    total = g.node("ConvInteger", [x, weight, *zeros], pads=[1, 1, 0, 0], strides=[2, 1])
    factor = np.broadcast_to(xq.scale * wq.scale, 8).reshape(8, 1, 1)
    y = g.node("Add", [_integer_scale(g, total, factor), g.floats(g.rng.normal(size=(8, 1, 1)))])
    g.output(g.qdq(y, g.after(xq, wq, 36)), (1, 8, 4, 7))


@case()
def conv_integer(g: Graph) -> None:
    """ConvInteger -> Cast -> Mul -> Add -> Q with static parameters: rounded after each, as written."""
    _conv_integer(g, per_channel=False)


@case(loads_in_stock=False)
def conv_integer_zero_points_per_channel(g: Graph) -> None:
    """As ONNX allows; ONNX Runtime has no kernel for it."""
    _conv_integer(g, per_channel=True)


@case()
def conv_integer_without_zero_points(g: Graph) -> None:
    x, xq = _codes_input(g, (1, 4, 8, 8), zero=0)
    wq = g.weight_quant(None)
    total = g.node("ConvInteger", [x, _weight(g, g.codes((8, 2, 3, 3)), wq)[0]], group=2)
    g.output(_integer_scale(g, total, xq.scale * wq.scale), (1, 8, 6, 6))


@case()
def matmul_integer(g: Graph) -> None:
    x, xq = _codes_input(g, (3, 16), "s8")
    wq = g.weight_quant(10, "s8", symmetric=False, axis=1)
    operands = [x, _weight(g, g.codes((16, 10)), wq)[0], _params(g, xq)[1], _params(g, wq)[1]]
    y = _integer_scale(g, g.node("MatMulInteger", operands), xq.scale * wq.scale)
    g.output(g.qdq(y, g.after(xq, wq, 16, "s8")), (3, 10))


@case(stays=("ConvInteger",))
def conv_integer_as_such(g: Graph) -> None:
    """Its int32 sum is an output of the model."""
    x, xq = _codes_input(g, (1, 4, 6, 6))
    wq = g.weight_quant(None)
    weight = _weight(g, g.codes((8, 4, 3, 3)), wq)[0]
    g.output(g.node("ConvInteger", [x, weight, _params(g, xq)[1]]), (1, 8, 4, 4), TensorProto.INT32)


@case(stays=("DynamicQuantizeLinear", "MatMulInteger", "Mul"))
def dynamic_quantization(g: Graph) -> None:
    """quantize_dynamic: scale and zero point follow from each input; all of it stays."""
    x, scale, zero = g.node("DynamicQuantizeLinear", [g.input((3, 16))], outputs=3)
    wq = g.weight_quant(None)
    total = g.node("MatMulInteger", [x, _weight(g, g.codes((16, 10)), wq)[0], zero])
    factor = g.node("Mul", [scale, g.floats(wq.scale)])
    g.output(g.node("Mul", [g.node("Cast", [total], to=TensorProto.FLOAT), factor]), (3, 10))


@case(stock_equal=True)
def matmul_integer_to_float(g: Graph) -> None:
    """What ONNX Runtime's optimizer fuses MatMulInteger, Cast, Mul and Add to, with constant scales."""
    x, xq = _codes_input(g, (3, 16))
    wq = g.weight_quant(10, axis=1)
    weight, scale, zero = _weight(g, g.codes((16, 10)), wq)
    x_scale, x_zero = _params(g, xq)
    operands = [x, weight, x_scale, scale, x_zero, zero, g.floats(g.rng.normal(size=10))]
    y = g.node("MatMulIntegerToFloat", operands, domain="com.microsoft")
    g.output(y, (3, 10))


@case(stays=("QLinearConv",))
def sum_leaves_int32(g: Graph) -> None:
    """67,600 extreme products: lowbit refuses the sum, the operator stays."""
    x, xq = _codes_input(g, (1, 100, 26, 26), zero=0)
    wq = g.weight_quant(None)
    weight = _weight(g, np.full((1, 100, 26, 26), TYPES["s8"][1]), wq)
    yq = g.act(500.0)
    _finish(g, g.node("QLinearConv", [x, *_params(g, xq), *weight, *_params(g, yq)]), yq, (1, 1, 1, 1))
