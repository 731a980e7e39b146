"""Text: recognizers, detectors, the direction of lines."""

from __future__ import annotations

import numpy as np

from ..graph import GraphBuilder
from .layers import (
    conv,
    deconv,
    depthwise,
    inverted_residual,
    layer_norm,
    linear,
    max_pool,
    reshape,
    resize,
    squeeze_excite,
    transformer_block,
    transpose,
    view,
)


def crnn(g: GraphBuilder) -> list[str]:
    """CRNN (Shi et al. 2015), width 0.25, without its recurrent layers: the height goes into the features."""
    x = g.input([1, 1, 32, 100], free={0: "batch"})
    x = max_pool(g, conv(g, x, 16, act="relu"))
    x = max_pool(g, conv(g, x, 32, act="relu"))
    x = conv(g, conv(g, x, 64, act="relu"), 64, act="relu")
    x = g.node("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 1], pads=[0, 1, 0, 1])
    x = conv(g, conv(g, x, 128, act="relu", norm=True), 128, act="relu", norm=True)
    x = g.node("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 1], pads=[0, 1, 0, 1])
    x = conv(g, x, 128, 2, pad=0, act="relu")
    _n, c, h, _w = g.shape(x)
    x = view(g, x, "0", c * h, "3")
    x = transpose(g, x, 2, 0, 1)
    x = linear(g, linear(g, x, 128, act="tanh"), 37)
    return [g.node("LogSoftmax", [x], axis=2)]


def crnn_lstm(g: GraphBuilder) -> list[str]:
    """A recognizer with a bidirectional LSTM behind a few convolutions, width 0.25, fixed sizes."""
    x = g.input([1, 3, 32, 96])
    for out in (16, 32, 64):
        x = max_pool(g, conv(g, x, out, act="relu"))
    n, c, h, w = g.shape(x)
    x = transpose(g, reshape(g, x, n, c * h, w), 2, 0, 1)
    hidden = 48
    weights = [
        g.constant(g.normal((2, 4 * hidden, c * h), 0.08), "weight"),
        g.constant(g.normal((2, 4 * hidden, hidden), 0.14), "recurrence"),
        g.constant(g.normal((2, 8 * hidden), 0.05), "bias"),
    ]
    y = g.nodes("LSTM", [x, *weights], 3, hidden_size=hidden, direction="bidirectional")[0]
    y = reshape(g, transpose(g, g.known(y, [w, 2, n, hidden]), 0, 2, 1, 3), w, n, 2 * hidden)
    return [linear(g, y, 37)]


def recognizer(g: GraphBuilder) -> list[str]:
    """A PP-OCR-like recognizer: a depthwise backbone of free width, mixing blocks of attention, Softmax."""
    x = g.input([1, 3, 32, 96], name="x", free={0: "batch"})
    x = conv(g, x, 16, stride=2, act="paddle_hswish", norm=True)
    rows = [(32, (1, 1)), (64, (2, 1)), (64, (1, 1)), (128, (2, 1)), (128, (1, 1))]
    for out, stride in rows:
        x = depthwise(g, x, 3, stride=stride, act="paddle_hswish", norm=True)
        x = conv(g, x, out, 1, act="paddle_hswish", norm=True)
    x = squeeze_excite(g, x, 32)
    x = g.node("AveragePool", [x], kernel_shape=[4, 2], strides=[4, 2])
    y = conv(g, x, 16, (1, 3), act="silu")
    y = conv(g, y, 32, 1, act="silu")
    tokens = _line(g, y)
    tokens = layer_norm(g, transformer_block(g, tokens, 4, ratio=2, act="silu"))
    return [g.node("Softmax", [linear(g, tokens, 97)], axis=2)]


def _line(g: GraphBuilder, x: str) -> str:
    """Maps of height 1 as tokens: Squeeze and Transpose."""
    return transpose(g, g.node("Squeeze", [x, g.constant_node(np.array([2]))]), 0, 2, 1)


def text_detector(g: GraphBuilder) -> list[str]:
    """A PP-OCR-like detector (DB, Liao et al. 2019): MobileNetV3 blocks, pyramid, ConvTranspose head."""
    x = g.input([1, 3, 128, 128], name="x", free={0: "batch"})
    x = conv(g, x, 8, stride=2, act="paddle_hswish", norm=True)
    features = []
    for hidden, out in ((16, 16), (40, 24), (80, 32), (160, 56)):
        x = inverted_residual(g, x, hidden, out, 5, stride=2, act="paddle_hswish", squeeze=hidden // 4)
        features.append(conv(g, x, 48, 1, bias=False))
    for index in (2, 1, 0):
        up = resize(g, features[index + 1], 2)
        features[index] = g.add(features[index], up)
    levels = [conv(g, feature, 12, bias=False) for feature in features]
    x = g.concat([resize(g, level, 2**index) if index else level for index, level in enumerate(levels)][::-1])
    x = conv(g, x, 12, act="relu", norm=True)
    x = g.relu(g.batch_norm(deconv(g, x, 12, 2, pad=0), 12))
    return [deconv(g, x, 1, 2, pad=0, act="sigmoid")]


def angle_classifier(g: GraphBuilder) -> list[str]:
    """A PP-OCR-like angle classifier: MobileNetV3-Small of width 0.35, free batch, Softmax."""
    x = g.input([1, 3, 48, 192], name="x", free={0: "batch"})
    x = conv(g, x, 8, stride=2, act="clip_hswish", norm=True)
    rows = [
        (3, 8, 8, 4, (2, 2)),
        (3, 24, 8, 0, (2, 1)),
        (5, 32, 16, 8, (2, 1)),
        (5, 88, 16, 24, (1, 1)),
        (5, 104, 32, 26, (2, 2)),
    ]
    for kernel, hidden, out, squeeze, stride in rows:
        channels = g.shape(x)[1]
        y = conv(g, x, hidden, 1, act="relu", norm=True)
        y = depthwise(g, y, kernel, stride=stride, act="relu", norm=True)
        y = squeeze_excite(g, y, squeeze) if squeeze else y
        y = conv(g, y, out, 1, norm=True)
        x = g.add(x, y) if stride == (1, 1) and channels == out else y
    x = max_pool(g, conv(g, x, 200, 1, act="clip_hswish", norm=True))
    x = view(g, g.node("GlobalAveragePool", [x]), "0", -1)
    x = g.node("MatMul", [x, g.constant(g.normal((200, 2), 0.1), "weight")])
    x = g.add(x, g.constant(g.normal((2,), 0.1), "bias"))
    return [g.node("Softmax", [x], axis=1)]


def east(g: GraphBuilder) -> list[str]:
    """EAST (Zhou et al. 2017), width 0.25, channels last as TensorFlow exports it: five geometry channels."""
    x = transpose(g, g.input([1, 96, 128, 3], free={0: "batch"}), 0, 3, 1, 2)
    features = []
    for out in (16, 32, 64, 96):
        x = conv(g, conv(g, x, out, stride=2, act="relu", norm=True), out, act="relu", norm=True)
        features.append(x)
    for index in (2, 1, 0):
        up = resize(g, x, mode="linear", coordinates="asymmetric")
        x = g.concat([up, features[index]])
        x = conv(g, conv(g, x, 32, 1, act="relu"), 32, act="relu")
    score = conv(g, x, 1, 1, act="sigmoid")
    box = g.node("Mul", [conv(g, x, 4, 1, act="sigmoid"), g.constant(np.array(128, np.float32))])
    return [transpose(g, score, 0, 2, 3, 1), transpose(g, box, 0, 2, 3, 1)]


NETWORKS = [crnn, crnn_lstm, recognizer, text_detector, angle_classifier, east]
