"""Sound: 1-D convolutions over waves and features, keyword spotting, separation, recurrent layers."""

from __future__ import annotations

import numpy as np

from ..graph import GraphBuilder
from .layers import (
    classify,
    conv,
    deconv,
    depthwise,
    group_norm,
    layer_norm,
    linear,
    max_pool,
    mean,
    number,
    reshape,
    slices,
    split,
    transformer_block,
    transpose,
    view,
)


def m5(g: GraphBuilder) -> list[str]:
    """M5 (Dai et al. 2016) on 4000 samples of a wave."""
    x = conv(g, g.input([1, 1, 4000], free={0: "batch"}), 32, 80, stride=16, pad=0, act="relu", norm=True)
    x = max_pool(g, x, 4, 4)
    for out in (32, 64):
        x = max_pool(g, conv(g, x, out, pad=0, act="relu", norm=True), 4, 4)
    x = transpose(g, g.node("AveragePool", [x], kernel_shape=[g.shape(x)[2]]), 0, 2, 1)
    return [g.node("LogSoftmax", [linear(g, x, 35)], axis=2)]


def wav2letter(g: GraphBuilder) -> list[str]:
    """Wav2Letter-like (Collobert et al. 2016), width 0.25: wide 1-D convolutions with Clip to 20."""
    x = g.input([1, 39, 148])
    for out, kernel, stride in [(64, 48, 2), (64, 7, 1), (64, 7, 1), (128, 32, 1), (128, 1, 1)]:
        pads = (kernel - 1) // 2
        x = conv(g, x, out, kernel, stride=stride, pad=(pads, kernel - 1 - pads))
        x = g.node("Clip", [x, number(g, 0), number(g, 20)])
    return [g.node("Softmax", [conv(g, x, 29, 1)], axis=1)]


def quartznet(g: GraphBuilder) -> list[str]:
    """QuartzNet-like (Kriman et al. 2019), width 0.25: separable 1-D convolutions, kernels of 33 and more."""
    x = g.input([1, 64, 128], free={0: "batch", 2: "frames"})
    x = conv(g, depthwise(g, x, 33, stride=2), 64, 1, act="relu")
    for kernel in (33, 39):
        y = x
        for index in range(2):
            y = conv(g, depthwise(g, y, kernel), 64, 1, act="" if index else "relu")
        x = g.relu(g.add(y, conv(g, x, 64, 1)))
    x = conv(g, depthwise(g, x, 87, dilation=1), 128, 1, act="relu")
    return [g.node("LogSoftmax", [transpose(g, conv(g, x, 29, 1), 0, 2, 1)], axis=-1)]


def tc_resnet(g: GraphBuilder) -> list[str]:
    """TC-ResNet8 (Choi et al. 2019): temporal convolutions of [1, 9] over MFCCs as channels."""
    x = transpose(g, g.input([1, 1, 98, 40]), 0, 3, 1, 2)
    x = conv(g, x, 16, (1, 3), bias=False)
    for out in (24, 32, 48):
        y = conv(g, x, out, (1, 9), stride=(1, 2), act="relu")
        y = conv(g, y, out, (1, 9), gain=0.5)
        x = g.relu(g.add(y, conv(g, x, out, 1, stride=(1, 2), act="relu")))
    return [g.node("Softmax", [classify(g, x, 12)], axis=1)]


def ds_cnn(g: GraphBuilder) -> list[str]:
    """DS-CNN-S (Zhang et al. 2017): depthwise separable keyword spotting on 49x10 features."""
    x = conv(g, g.input([1, 1, 49, 10]), 64, (10, 4), stride=2, pad=(4, 1, 5, 2), act="relu", norm=True)
    for _ in range(4):
        x = conv(g, depthwise(g, x, act="relu", norm=True), 64, 1, act="relu", norm=True)
    x = g.node("AveragePool", [x], kernel_shape=g.shape(x)[2:])
    return [g.node("Softmax", [linear(g, view(g, x, "0", -1), 12)], axis=-1)]


def conv_tasnet(g: GraphBuilder) -> list[str]:
    """Conv-TasNet-like (Luo and Mesgarani 2018), width 0.25: masks over an encoded wave, PRelu."""
    wave = g.input([1, 1, 1600])
    encoded = conv(g, wave, 64, 16, stride=8, pad=4, act="relu", bias=False)
    x = conv(g, group_norm(g, encoded, 1), 32, 1)
    skipped = ""
    for dilation in (1, 2, 4, 8):
        y = group_norm(g, conv(g, x, 64, 1, act="prelu"), 1)
        y = group_norm(g, depthwise(g, y, dilation=dilation, act="prelu"), 1)
        x = g.add(x, conv(g, y, 32, 1, gain=0.5))
        z = conv(g, y, 32, 1, gain=0.5)
        skipped = g.add(skipped, z) if skipped else z
    masks = conv(g, skipped, 128, 1, act="sigmoid")
    outputs = []
    for mask in split(g, masks, [64, 64]):
        outputs.append(deconv(g, g.node("Mul", [encoded, mask]), 1, 16, stride=8, pad=4))
    return [g.concat(outputs)]


def unet_1d(g: GraphBuilder) -> list[str]:
    """A 1-D U-Net in Demucs' manner (Defossez et al. 2019), width 0.25: gates by halves, ConvTranspose."""

    def gated(y: str, out: int) -> str:
        first, second = split(g, conv(g, y, 2 * out, 1), [out, out])
        return g.node("Mul", [first, g.node("Sigmoid", [second])])

    x, skipped = g.input([1, 2, 1024]), []
    for out in (16, 32, 64):
        x = gated(conv(g, x, out, 8, stride=4, pad=2, act="relu"), out)
        skipped.append(x)
    for y, out in zip(reversed(skipped), (32, 16, 4), strict=True):
        x = gated(g.add(x, y), g.shape(y)[1])
        x = deconv(g, x, out, 8, stride=4, pad=2, act="relu" if out > 4 else "")
    return [x]


def wavenet(g: GraphBuilder) -> list[str]:
    """WaveNet-like (van den Oord et al. 2016), width 16: causal Pads, tanh times Sigmoid, skipped sums."""
    x = conv(g, g.input([1, 1, 512]), 16, 1)
    skipped = ""
    for dilation in (1, 2, 4, 8):
        pads = g.constant_node(np.array([0, 0, dilation, 0, 0, 0]))
        y = g.node("Pad", [x, pads])
        first = conv(g, y, 16, 2, pad=0, dilation=dilation, act="tanh")
        gate = conv(g, y, 16, 2, pad=0, dilation=dilation, act="sigmoid")
        y = g.node("Mul", [first, gate])
        x = g.add(x, conv(g, y, 16, 1))
        z = conv(g, y, 32, 1)
        skipped = g.add(skipped, z) if skipped else z
    return [conv(g, conv(g, g.relu(skipped), 32, 1, act="relu"), 64, 1)]


def squeeze_excite_tdnn(g: GraphBuilder) -> list[str]:
    """ECAPA-TDNN-like (Desplanques et al. 2020), width 64: Res2 blocks, statistics weighted by attention."""
    x = conv(g, g.input([1, 40, 100]), 64, 5, act="relu")
    features = []
    for dilation in (2, 3):
        parts = split(g, conv(g, x, 64, 1, act="relu"), [16] * 4)
        outputs = [parts[0]]
        for part in parts[1:]:
            source = part if len(outputs) == 1 else g.add(part, outputs[-1])
            outputs.append(conv(g, source, 16, dilation=dilation, act="relu"))
        y = conv(g, g.concat(outputs), 64, 1, act="relu")
        gate = conv(g, conv(g, mean(g, y, [2]), 16, 1, act="relu"), 64, 1, act="sigmoid")
        x = g.add(g.node("Mul", [y, gate]), x)
        features.append(x)
    x = conv(g, g.concat(features), 96, 1, act="relu")
    weights = g.node("Softmax", [conv(g, conv(g, x, 32, 1, act="tanh"), 96, 1)], axis=2)
    axes = g.constant_node(np.array([2]))
    centre = g.node("ReduceSum", [g.node("Mul", [weights, x]), axes], keepdims=0)
    squares = g.node("ReduceSum", [g.node("Mul", [weights, g.node("Mul", [x, x])]), axes], keepdims=0)
    variance = g.node("Sub", [squares, g.node("Mul", [centre, centre])])
    deviation = g.node("Sqrt", [g.node("Clip", [variance, number(g, 1e-6), ""])])
    return [linear(g, g.concat([centre, deviation]), 64)]


def keyword_gru(g: GraphBuilder) -> list[str]:
    """A keyword spotter with a GRU behind convolutions, its last state classified."""
    x = conv(g, g.input([1, 1, 40, 64]), 16, (20, 5), stride=(4, 2), pad=(8, 2), act="relu")
    n, c, h, w = g.shape(x)
    x = transpose(g, reshape(g, x, n, c * h, w), 2, 0, 1)
    weights = [
        g.constant(g.normal((1, 96, c * h), 0.08), "weight"),
        g.constant(g.normal((1, 96, 32), 0.17), "recurrence"),
        g.constant(g.normal((1, 192), 0.05), "bias"),
    ]
    last = g.nodes("GRU", [x, *weights], 2, hidden_size=32, linear_before_reset=1)[1]
    return [linear(g, g.node("Squeeze", [last, g.constant_node(np.array([0]))]), 12)]


def voice_activity(g: GraphBuilder) -> list[str]:
    """A voice activity detector with a state that is an input and an output, free batch."""
    wave = g.input([1, 512], free={0: "batch"})
    state = g.input([2, 1, 32], "state", free={1: "batch"})
    pads = g.constant_node(np.array([0, 32, 0, 32]))
    x = g.node("Unsqueeze", [g.node("Pad", [wave, pads], mode="reflect"), g.constant_node(np.array([1]))])
    x = conv(g, x, 66, 64, stride=32, pad=0, bias=False)
    real, imaginary = (slices(g, x, 1, start, start + 33) for start in (0, 33))
    squares = [g.node("Pow", [part, number(g, 2)]) for part in (real, imaginary)]
    x = g.node("Sqrt", [g.add(*squares)])
    x = conv(g, conv(g, x, 32, stride=2, act="relu"), 32, stride=2, act="relu")
    x = transpose(g, x, 2, 0, 1)
    weights = [
        g.constant(g.normal((1, 128, 32), 0.17), "weight"),
        g.constant(g.normal((1, 128, 32), 0.17), "recurrence"),
        g.constant(g.normal((1, 256), 0.05), "bias"),
    ]
    states = split(g, state, [1, 1], axis=0)
    sequence, hidden, cell = g.nodes("LSTM", [x, *weights, "", *states], 3, hidden_size=32)
    x = transpose(g, g.node("Squeeze", [sequence, g.constant_node(np.array([1]))]), 1, 2, 0)
    x = conv(g, g.relu(x), 1, 1, act="sigmoid")
    return [mean(g, x, [2], keep=False), g.node("Concat", [hidden, cell], axis=0)]


def conformer(g: GraphBuilder) -> list[str]:
    """A Conformer block (Gulati et al. 2020), width 64: convolutions over time inside attention."""
    x = transpose(g, conv(g, g.input([1, 40, 80]), 64, stride=2, act="silu"), 0, 2, 1)
    x = g.add(x, g.node("Mul", [linear(g, linear(g, layer_norm(g, x), 128, act="silu"), 64), number(g, 0.5)]))
    x = transformer_block(g, x, 4, ratio=2, act="silu")
    y = conv(g, transpose(g, layer_norm(g, x), 0, 2, 1), 128, 1)
    first, second = split(g, y, [64, 64])
    y = g.node("Mul", [first, g.node("Sigmoid", [second])])
    y = conv(g, depthwise(g, y, 15, act="silu"), 64, 1)
    x = layer_norm(g, g.add(x, transpose(g, y, 0, 2, 1)))
    return [linear(g, x, 32)]


NETWORKS = [
    m5, wav2letter, quartznet, tc_resnet, ds_cnn, conv_tasnet, unet_1d, wavenet, squeeze_excite_tdnn,
    keyword_gru, voice_activity, conformer,
]  # fmt: skip
