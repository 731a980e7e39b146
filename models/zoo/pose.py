"""Poses, landmarks and embeddings of people."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..graph import GraphBuilder
from .layers import (
    conv,
    deconv,
    depthwise,
    inverted_residual,
    linear,
    max_pool,
    number,
    reshape,
    resize,
    view,
)


def simple_baseline(g: GraphBuilder) -> list[str]:
    """Simple baseline (Xiao et al. 2018), width 0.25: three ConvTranspose behind a ResNet."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 96]), 16, 7, stride=2, act="relu"), 3, 2, 1)
    for out in (32, 64, 128):
        y = conv(g, conv(g, x, out, stride=2, act="relu"), out, gain=0.5)
        x = g.relu(g.add(y, conv(g, x, out, 1, stride=2)))
    for _ in range(3):
        x = deconv(g, x, 64, act="relu")
    return [conv(g, x, 17, 1)]


def hourglass(g: GraphBuilder) -> list[str]:
    """One stack of an hourglass (Newell et al. 2016), width 32: pools down, nearest Resize up, sums."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 128]), 32, 7, stride=2, act="relu"))

    def residual(y: str) -> str:
        z = conv(g, conv(g, conv(g, y, 16, 1, act="relu"), 16, act="relu"), 32, 1, gain=0.5)
        return g.add(y, z)

    def stack(y: str, depth: int) -> str:
        low = residual(max_pool(g, y))
        low = stack(low, depth - 1) if depth > 1 else residual(low)
        return g.add(residual(y), resize(g, residual(low)))

    return [conv(g, conv(g, stack(residual(x), 3), 32, 1, act="relu"), 16, 1)]


def open_pose(g: GraphBuilder) -> list[str]:
    """Lightweight OpenPose (Osokin 2018), width 0.25: two stages of heat maps and fields, concatenated."""
    x = conv(g, g.input([1, 3, 96, 128]), 8, stride=2, act="relu")
    for out, stride in [(16, 1), (32, 2), (32, 1), (64, 2), (128, 1)]:
        x = conv(g, depthwise(g, x, stride=stride, act="relu"), out, 1, act="relu")
    y = conv(g, x, 32, 1, act="relu")
    for _ in range(3):
        y = conv(g, depthwise(g, y, act="elu"), 32, 1, act="elu")
    features = g.add(conv(g, x, 32, 1, act="relu"), y)
    x, outputs = features, []
    for _ in range(2):
        x = conv(g, conv(g, x, 32, act="relu"), 32, dilation=2, act="relu")
        heads = [conv(g, conv(g, x, 64, 1, act="relu"), width, 1) for width in (19, 38)]
        outputs = heads
        x = g.concat([features, *heads])
    return outputs


def soft_argmax(g: GraphBuilder) -> list[str]:
    """Integral pose regression (Sun et al. 2017), width 0.25: Softmax over maps, expected coordinates."""
    x = conv(g, g.input([1, 3, 96, 96]), 16, 7, stride=2, act="relu")
    for out in (32, 64):
        x = conv(g, x, out, stride=2, act="relu")
    maps = conv(g, deconv(g, x, 64, act="relu"), 17, 1)
    n, joints, h, w = g.shape(maps)
    y = g.node("Softmax", [view(g, maps, "0", joints, -1)], axis=-1)
    y = reshape(g, y, n, joints, h, w)
    columns = g.constant(np.arange(w, dtype=np.float32), "columns")
    rows = g.constant(np.arange(h, dtype=np.float32), "rows")
    along = [g.node("ReduceSum", [y, g.constant_node(np.array([axis]))], keepdims=0) for axis in (2, 3)]
    products = [g.node("Mul", [y, grid]) for y, grid in zip(along, (columns, rows), strict=True)]
    axes = g.constant_node(np.array([2]))
    return [g.node("Concat", [g.node("ReduceSum", [p, axes], keepdims=1) for p in products], axis=2)]


def face_landmarks(g: GraphBuilder) -> list[str]:
    """A PFLD-like landmark network (Guo et al. 2019), width 0.5: three scales flattened and concatenated."""
    x = conv(g, g.input([1, 3, 112, 112], free={0: "batch"}), 32, stride=2, act="relu")
    x = depthwise(g, x, act="relu")
    for ratio, out, stride in [(2, 32, 2), (2, 32, 1), (2, 64, 2), (4, 64, 1), (2, 16, 1)]:
        x = inverted_residual(g, x, ratio * g.shape(x)[1], out, stride=stride, act="relu")
    second = conv(g, x, 32, stride=2, act="relu")
    third = conv(g, second, 64, 7, pad=0, act="relu")
    pooled = g.node("AveragePool", [x], kernel_shape=[14, 14], strides=[1, 1])
    scales = [view(g, y, "0", -1) for y in (pooled, g.node("GlobalAveragePool", [second]), third)]
    return [linear(g, g.concat(scales), 196)]


def face_embedding(g: GraphBuilder) -> list[str]:
    """A MobileFaceNet-like embedding (Chen et al. 2018), width 0.5: PRelu, global depthwise, L2 norm."""
    x = conv(g, g.input([1, 3, 112, 112], free={0: "batch"}), 32, stride=2, act="prelu")
    x = depthwise(g, x, act="prelu")
    for ratio, out, stride in [(2, 32, 2), (2, 32, 1), (4, 64, 2), (2, 64, 1), (4, 64, 2)]:
        x = inverted_residual(g, x, ratio * g.shape(x)[1], out, stride=stride, act="prelu")
    x = conv(g, x, 256, 1, act="prelu")
    x = conv(g, x, 256, 7, pad=0, group=256)
    x = linear(g, g.flatten(x), 128)
    norm = g.node("ReduceL2", [x], axes=[1], keepdims=1)
    norm = g.node("Clip", [norm, number(g, 1e-12), ""])
    norm = g.known(g.node("Expand", [norm, g.node("Shape", [x])]), g.shape(x))
    return [g.node("Div", [x, norm])]


def person_attributes(g: GraphBuilder) -> list[str]:
    """A re-identification network in OSNet's manner (Zhou et al. 2019), width 0.25: four streams."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 64]), 16, 7, stride=2, act="relu"), 3, 2, 1)
    for out in (64, 96):
        hidden = out // 4
        y = conv(g, x, hidden, 1, act="relu")
        gates = [g.normal((hidden // 4, hidden, 1, 1), 0.4), g.normal((hidden, hidden // 4, 1, 1), 0.5)]
        total = ""
        for depth in (1, 2, 3, 4):
            z = y
            for _ in range(depth):
                z = depthwise(g, conv(g, z, hidden, 1, bias=False), act="relu")
            gate = g.relu(g.conv_with(g.node("GlobalAveragePool", [z]), gates[0], None))
            gate = g.node("Sigmoid", [g.conv_with(gate, gates[1], None)])
            z = g.node("Mul", [z, gate])
            total = g.add(total, z) if total else z
        x = g.relu(g.add(conv(g, total, out, 1), conv(g, x, out, 1)))
        x = g.node("AveragePool", [conv(g, x, out, 1, act="relu")], kernel_shape=[2, 2], strides=[2, 2])
    x = linear(g, g.flatten(g.node("GlobalAveragePool", [x])), 128, act="relu")
    best = g.node("ArgMax", [linear(g, x, 8)], axis=1, keepdims=0)
    return [linear(g, x, 26, act="sigmoid"), g.node("Cast", [best], to=TensorProto.INT32)]


NETWORKS = [
    simple_baseline, hourglass, open_pose, soft_argmax, face_landmarks, face_embedding, person_attributes,
]  # fmt: skip
