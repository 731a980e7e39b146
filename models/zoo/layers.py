"""Layers that several networks of the zoo share, in the forms in which exporters write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph import GraphBuilder

# Factor on He's deviation that keeps the variance, by the activation behind a convolution; without one there
# is nothing that halves it.
_GAINS = {"": 0.7, "silu": 1.2, "hswish": 1.2, "gelu": 1.2, "erf_gelu": 1.2, "mish": 1.1, "sigmoid": 1.4}


def integers(*values: int) -> npt.NDArray[np.int64]:
    """An int64 tensor of one dim."""
    return np.array(values, np.int64)


def number(g: GraphBuilder, value: float) -> str:
    """Adds a float scalar as a Constant node."""
    return g.constant_node(np.array(value, np.float32))


def activation(g: GraphBuilder, x: str, kind: str) -> str:
    """Adds an activation; the empty kind is none.

    hswish and hsigmoid are written as PyTorch's exporter does, `paddle_hswish` as Paddle's, `clip_hswish` as
    exporters before opset 14.
    """
    if kind == "":
        return x
    if kind in ("relu", "sigmoid", "tanh", "elu", "softplus"):
        return g.node(kind.capitalize(), [x])
    if kind == "relu6":
        return g.relu6(x)
    if kind == "leaky":
        return g.node("LeakyRelu", [x], alpha=0.1)
    if kind == "prelu":
        shape = g.shape(x)
        slope = np.abs(g.normal((shape[1], *[1] * (len(shape) - 2)), 0.2))
        return g.node("PRelu", [x, g.constant(slope, "slope")])
    if kind == "silu":
        return g.node("Mul", [x, g.node("Sigmoid", [x])])
    if kind == "hsigmoid":
        return g.node("HardSigmoid", [x], alpha=1 / 6)
    if kind == "hswish":
        return g.node("HardSwish", [x])
    if kind == "paddle_hswish":
        return g.node("Mul", [x, g.node("HardSigmoid", [x], alpha=1 / 6, beta=0.5)])
    if kind == "clip_hswish":
        clipped = g.relu6(g.node("Add", [x, number(g, 3)]))
        return g.node("Div", [g.node("Mul", [x, clipped]), number(g, 6)])
    if kind == "mish":
        return g.node("Mul", [x, g.node("Tanh", [g.node("Softplus", [x])])])
    if kind == "gelu":
        return g.node("Gelu", [x])
    if kind == "erf_gelu":
        erf = g.node("Erf", [g.node("Div", [x, number(g, 2**0.5)])])
        product = g.node("Mul", [x, g.node("Add", [erf, number(g, 1)])])
        return g.node("Mul", [product, number(g, 0.5)])
    raise ValueError(f"unknown activation {kind!r}")


def conv(
    g: GraphBuilder,
    x: str,
    out: int,
    kernel: int | Sequence[int] = 3,
    *,
    stride: int | Sequence[int] = 1,
    pad: int | Sequence[int] | None = None,
    group: int = 1,
    dilation: int = 1,
    act: str = "",
    gain: float = 1.0,
    bias: bool = True,
    norm: bool = False,
) -> str:
    """Adds a convolution of any rank and its activation.

    Args:
        g: The builder.
        x: The input.
        out: Output channels.
        kernel: Of all dims, or one per dim.
        stride: Of all dims, or one per dim.
        pad: None: as much as keeps the size at stride 1.
        group: Number of groups.
        dilation: Of all dims.
        act: A kind of `activation`.
        gain: Further factor on the weights.
        bias: Whether there is one; not with `norm`.
        norm: A BatchNormalization behind it that the exporter did not fold.
    """
    shape = g.shape(x)
    rank = len(shape) - 2
    kernels = [kernel] * rank if isinstance(kernel, int) else list(kernel)
    pads = [(k - 1) // 2 * dilation for k in kernels] if pad is None else pad
    fan_in = shape[1] // group * int(np.prod(kernels))
    deviation = gain * _GAINS.get(act, 1.0) * float(np.sqrt(2 / fan_in))
    weight = g.normal((out, shape[1] // group, *kernels), deviation)
    values = g.normal((out,), 0.05) if bias and not norm else None
    y = g.conv_with(x, weight, values, stride=stride, pad=pads, group=group, dilation=dilation)
    return activation(g, g.batch_norm(y, out) if norm else y, act)


def depthwise(
    g: GraphBuilder,
    x: str,
    kernel: int | Sequence[int] = 3,
    *,
    stride: int | Sequence[int] = 1,
    dilation: int = 1,
    act: str = "",
    norm: bool = False,
) -> str:
    """Adds a depthwise convolution."""
    channels = g.shape(x)[1]
    return conv(g, x, channels, kernel, stride=stride, group=channels, dilation=dilation, act=act, norm=norm)


def deconv(
    g: GraphBuilder,
    x: str,
    out: int,
    kernel: int | Sequence[int] = 4,
    *,
    stride: int | Sequence[int] = 2,
    pad: int | Sequence[int] = 1,
    act: str = "",
    output_padding: int = 0,
) -> str:
    """Adds a ConvTranspose of any rank and its activation."""
    shape = g.shape(x)
    rank = len(shape) - 2
    kernels = [kernel] * rank if isinstance(kernel, int) else list(kernel)
    strides = [stride] * rank if isinstance(stride, int) else list(stride)
    # A stride of s leaves 1 / s of the kernel for each output in every dim.
    fan_in = shape[1] * float(np.prod(kernels)) / float(np.prod(strides))
    weight = g.normal((shape[1], out, *kernels), _GAINS.get(act, 1.0) * float(np.sqrt(2 / fan_in)))
    more: dict[str, Any] = {"output_padding": [output_padding] * rank} if output_padding else {}
    bias = g.normal((out,), 0.05)
    y = g.conv_with(x, weight, bias, stride=strides, pad=pad, op_type="ConvTranspose", **more)
    return activation(g, y, act)


def linear(g: GraphBuilder, x: str, out: int, *, act: str = "", bias: bool = True, gain: float = 1.0) -> str:
    """Adds a fully connected layer over the last dim: Gemm for two dims, else MatMul and Add."""
    shape = g.shape(x)
    deviation = gain * _GAINS.get(act, 1.0) * float(np.sqrt(2 / shape[-1]))
    offset = g.normal((out,), 0.05)
    if len(shape) == 2 and bias:
        y = g.gemm_with(x, g.normal((out, shape[-1]), deviation), offset)
    else:
        y = g.node("MatMul", [x, g.constant(g.normal((shape[-1], out), deviation), "weight")])
        if bias:
            y = g.node("Add", [g.constant(offset, "bias"), y])
    return activation(g, y, act)


def max_pool(
    g: GraphBuilder, x: str, kernel: int = 2, stride: int = 2, pad: int = 0, ceil: bool = False
) -> str:
    """Adds a MaxPool of any rank."""
    rank = len(g.shape(x)) - 2
    attributes = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    return g.node("MaxPool", [x], **attributes, ceil_mode=int(ceil))


def average_pool(
    g: GraphBuilder, x: str, kernel: int = 2, stride: int = 2, pad: int = 0, include_pad: bool = True
) -> str:
    """Adds an AveragePool of any rank, with PyTorch's default of counting the pads."""
    rank = len(g.shape(x)) - 2
    attributes = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    return g.node("AveragePool", [x], **attributes, count_include_pad=int(include_pad))


def mean(g: GraphBuilder, x: str, axes: Sequence[int], *, keep: bool = True) -> str:
    """Adds a ReduceMean, its axes an input from opset 18 on."""
    if g.opset >= 18:
        return g.node("ReduceMean", [x, g.constant_node(integers(*axes))], keepdims=int(keep))
    return g.node("ReduceMean", [x], axes=list(axes), keepdims=int(keep))


def classify(g: GraphBuilder, x: str, classes: int = 100, *, form: str = "flatten") -> str:
    """Adds a global mean, flattening and a fully connected layer.

    Args:
        g: The builder.
        x: Feature maps.
        classes: Number of logits.
        form: flatten; view (`x.view(x.size(0), -1)`); mean (`x.mean([2, 3])`); reshape (constant shape).
    """
    channels = g.shape(x)[1]
    if form == "mean":
        y = mean(g, x, [*range(2, len(g.shape(x)))], keep=False)
    else:
        y = g.node("GlobalAveragePool", [x])
        if form == "view":
            y = view(g, y, "0", -1)
        elif form == "reshape":
            y = reshape(g, y, -1, channels)
        else:
            y = g.flatten(y)
    return linear(g, y, classes)


def reshape(g: GraphBuilder, x: str, *dims: int) -> str:
    """Adds a Reshape to constant dims."""
    return g.node("Reshape", [x, g.constant_node(integers(*dims))])


def size(g: GraphBuilder, x: str, axis: int) -> str:
    """Adds `x.size(axis)` as a scalar: Shape and Gather."""
    shape = g.node("Shape", [x])
    return g.node("Gather", [shape, g.constant_node(np.array(axis, np.int64))], axis=0)


def view(g: GraphBuilder, x: str, *dims: int | str) -> str:
    """Adds `x.view(...)` as PyTorch's exporter writes it when sizes are read from tensors.

    Args:
        g: The builder.
        x: The input.
        *dims: A number; -1 for the rest; the digits of an axis, such as "0", for `x.size(0)`.
    """
    pieces, known, shape = [], [], g.shape(x)
    for dim in dims:
        if isinstance(dim, str):
            axes = g.constant_node(integers(0))
            pieces.append(g.node("Unsqueeze", [size(g, x, int(dim)), axes]))
            known.append(shape[int(dim)])
        else:
            pieces.append(g.constant_node(integers(dim)))
            known.append(dim)
    rest = int(np.prod(shape)) // -int(np.prod(known)) if -1 in known else 0
    y = g.node("Reshape", [x, g.node("Concat", pieces, axis=0)])
    return g.known(y, [rest if dim == -1 else dim for dim in known])


def transpose(g: GraphBuilder, x: str, *perm: int) -> str:
    """Adds a Transpose."""
    return g.node("Transpose", [x], perm=list(perm))


def slices(g: GraphBuilder, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
    """Adds a Slice of one axis."""
    bounds = [g.constant_node(integers(value)) for value in (start, end, axis, step)]
    return g.node("Slice", [x, *bounds])


def split(g: GraphBuilder, x: str, parts: Sequence[int], axis: int = 1) -> list[str]:
    """Adds a Split into parts of these sizes."""
    return g.nodes("Split", [x, g.constant_node(integers(*parts))], len(parts), axis=axis)


def channel_shuffle(g: GraphBuilder, x: str, groups: int, *, by_shape: bool = False) -> str:
    """Adds Reshape, Transpose, Reshape; `by_shape` reads the sizes from the tensor, as a free batch needs."""
    n, c, h, w = g.shape(x)
    if by_shape:
        y = view(g, x, "0", groups, c // groups, "2", "3")
        return view(g, transpose(g, y, 0, 2, 1, 3, 4), "0", -1, "3", "4")
    y = reshape(g, x, n, groups, c // groups, h, w)
    return reshape(g, transpose(g, y, 0, 2, 1, 3, 4), n, c, h, w)


def squeeze_excite(
    g: GraphBuilder,
    x: str,
    hidden: int,
    *,
    act: str = "relu",
    gate: str = "hsigmoid",
    form: str = "pool",
) -> str:
    """Adds a squeeze-and-excite block.

    Args:
        g: The builder.
        x: Feature maps.
        hidden: Channels between the two layers.
        act: Between the two layers.
        gate: Behind the second one.
        form: pool (GlobalAveragePool and 1x1 convolutions); mean (ReduceMean and 1x1 convolutions); linear
            (`view`, fully connected layers, `view`).
    """
    channels = g.shape(x)[1]
    if form == "linear":
        y = view(g, g.node("GlobalAveragePool", [x]), "0", channels)
        y = linear(g, linear(g, y, hidden, act=act), channels, act=gate)
        y = view(g, y, "0", channels, 1, 1)
    else:
        y = g.node("GlobalAveragePool", [x]) if form == "pool" else mean(g, x, [2, 3])
        y = conv(g, conv(g, y, hidden, 1, act=act), channels, 1, act=gate)
    return g.node("Mul", [x, y])


def resize(
    g: GraphBuilder,
    x: str,
    scale: float = 2,
    *,
    mode: str = "nearest",
    coordinates: str = "asymmetric",
    by_sizes: bool = False,
) -> str:
    """Adds a Resize of the spatial dims, by a constant scale or constant sizes."""
    shape = g.shape(x)
    spatial = [int(dim * scale) for dim in shape[2:]]
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attributes["nearest_mode"] = "floor"
    if by_sizes:
        inputs = [x, "", "", g.constant_node(integers(*shape[:2], *spatial))]
    else:
        scales = np.array([1, 1, *[scale] * len(spatial)], np.float32)
        inputs = [x, "", g.constant_node(scales)]
    return g.known(g.node("Resize", inputs, **attributes), [*shape[:2], *spatial])


def resize_like(
    g: GraphBuilder, x: str, like: str, *, mode: str = "linear", coordinates: str = "pytorch_half_pixel"
) -> str:
    """Adds `F.interpolate(x, like.shape[2:])`: a Resize to sizes that are read from another tensor."""
    first = slices(g, g.node("Shape", [x]), 0, 0, 2)
    rest = slices(g, g.node("Shape", [like]), 0, 2, len(g.shape(like)))
    sizes = g.node("Concat", [first, rest], axis=0)
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    y = g.node("Resize", [x, "", "", sizes], **attributes)
    return g.known(y, [*g.shape(x)[:2], *g.shape(like)[2:]])


def layer_norm(g: GraphBuilder, x: str, *, decomposed: bool = False) -> str:
    """Adds a normalization of the last dim: the operator (opset 17), or its formula."""
    channels = g.shape(x)[-1]
    scale = g.constant(1 + g.normal((channels,), 0.1), "gamma")
    shift = g.constant(g.normal((channels,), 0.1), "beta")
    if not decomposed:
        return g.node("LayerNormalization", [x, scale, shift], axis=-1, epsilon=1e-5)
    centred = g.node("Sub", [x, mean(g, x, [-1])])
    variance = mean(g, g.node("Pow", [centred, number(g, 2)]), [-1])
    root = g.node("Sqrt", [g.node("Add", [variance, number(g, 1e-5)])])
    return g.node("Add", [g.node("Mul", [g.node("Div", [centred, root]), scale]), shift])


def group_norm(g: GraphBuilder, x: str, groups: int, *, decomposed: bool = True) -> str:
    """Adds a group normalization: the operator (opset 21), or InstanceNormalization between Reshapes."""
    shape = g.shape(x)
    channels, spatial = shape[1], [1] * (len(shape) - 2)
    scale, shift = 1 + g.normal((channels,), 0.1), g.normal((channels,), 0.1)
    if not decomposed:
        inputs = [x, g.constant(scale, "gamma"), g.constant(shift, "beta")]
        return g.node("GroupNormalization", inputs, num_groups=groups, epsilon=1e-5)
    ones, zeros = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    y = g.known(reshape(g, x, 0, groups, -1), [shape[0], groups, int(np.prod(shape[1:])) // groups])
    y = g.node("InstanceNormalization", [y, g.constant(ones, "gamma"), g.constant(zeros, "beta")])
    y = g.known(g.node("Reshape", [y, g.node("Shape", [x])]), shape)
    y = g.node("Mul", [y, g.constant(scale.reshape(channels, *spatial), "gamma")])
    return g.node("Add", [y, g.constant(shift.reshape(channels, *spatial), "beta")])


def instance_norm(g: GraphBuilder, x: str) -> str:
    """Adds an InstanceNormalization."""
    channels = g.shape(x)[1]
    scale = g.constant(1 + g.normal((channels,), 0.1), "gamma")
    return g.node("InstanceNormalization", [x, scale, g.constant(g.normal((channels,), 0.1), "beta")])


def attention(g: GraphBuilder, x: str, heads: int, *, packed: bool = True, key: str | None = None) -> str:
    """Adds multi-head attention of [N, tokens, channels].

    Args:
        g: The builder.
        x: Queries.
        heads: Number of heads.
        packed: Queries, keys and values by one layer, Reshape and Gather (timm); else three layers.
        key: Where keys and values come from; None: `x`. Not with `packed`.
    """
    n, tokens, channels = g.shape(x)
    width = channels // heads
    if packed:
        y = reshape(g, linear(g, x, 3 * channels, gain=0.7), n, tokens, 3, heads, width)
        y = transpose(g, y, 2, 0, 3, 1, 4)
        parts = [
            g.node("Gather", [y, g.constant_node(np.array(index, np.int64))], axis=0) for index in range(3)
        ]
        query, keys, values = parts[0], transpose(g, parts[1], 0, 1, 3, 2), parts[2]
    else:
        source = key or x
        length = g.shape(source)[1]
        query = reshape(g, linear(g, x, channels, gain=0.7), n, tokens, heads, width)
        query = transpose(g, query, 0, 2, 1, 3)
        keys = reshape(g, linear(g, source, channels, gain=0.7), n, length, heads, width)
        keys = transpose(g, keys, 0, 2, 3, 1)
        values = reshape(g, linear(g, source, channels, gain=0.7), n, length, heads, width)
        values = transpose(g, values, 0, 2, 1, 3)
    scores = g.node("MatMul", [g.node("Mul", [query, number(g, width**-0.5)]), keys])
    y = g.node("MatMul", [g.node("Softmax", [scores], axis=-1), values])
    y = reshape(g, transpose(g, y, 0, 2, 1, 3), n, tokens, channels)
    return linear(g, y, channels, gain=0.7)


def transformer_block(
    g: GraphBuilder, x: str, heads: int, *, ratio: int = 4, act: str = "erf_gelu", decomposed: bool = False
) -> str:
    """Adds a pre-normalized block of attention and two fully connected layers."""
    x = g.add(x, attention(g, layer_norm(g, x, decomposed=decomposed), heads))
    channels = g.shape(x)[-1]
    y = linear(g, layer_norm(g, x, decomposed=decomposed), ratio * channels, act=act)
    return g.add(x, linear(g, y, channels, gain=0.5))


def tokens_of(g: GraphBuilder, x: str) -> str:
    """Turns maps [N, C, H, W] into tokens [N, H * W, C]."""
    n, c, h, w = g.shape(x)
    return transpose(g, reshape(g, x, n, c, h * w), 0, 2, 1)


def maps_of(g: GraphBuilder, x: str, height: int, width: int) -> str:
    """Turns tokens [N, H * W, C] into maps [N, C, H, W]."""
    n, _, c = g.shape(x)
    return reshape(g, transpose(g, x, 0, 2, 1), n, c, height, width)


def two_convs(g: GraphBuilder, x: str, out: int) -> str:
    """Two convolutions 3x3 with Relu, the block of a U-Net."""
    return conv(g, conv(g, x, out, act="relu"), out, act="relu")


def contracting_path(g: GraphBuilder, x: str, widths: Sequence[int]) -> tuple[str, list[str]]:
    """The first half of a U-Net: blocks with pools between them; the last map and those before the pools."""
    skipped = []
    for out in widths[:-1]:
        skipped.append(two_convs(g, x, out))
        x = max_pool(g, skipped[-1])
    return two_convs(g, x, widths[-1]), skipped


def inverted_residual(
    g: GraphBuilder,
    x: str,
    hidden: int,
    out: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    act: str = "relu6",
    squeeze: int = 0,
    gate: str = "hsigmoid",
    squeeze_act: str = "relu",
) -> str:
    """Adds MobileNetV2's block, with a squeeze-and-excite block where `squeeze` states its channels."""
    channels, y = g.shape(x)[1], x
    if hidden != channels:
        y = conv(g, y, hidden, 1, act=act)
    y = depthwise(g, y, kernel, stride=stride, act=act)
    if squeeze:
        y = squeeze_excite(g, y, squeeze, act=squeeze_act, gate=gate)
    y = conv(g, y, out, 1)
    return g.add(x, y) if stride == 1 and out == channels else y
