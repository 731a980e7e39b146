"""Object detectors, heads included: YOLO's generations, SSD, RetinaNet, CenterNet, DETR, faces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph import GraphBuilder
from .layers import (
    attention,
    channel_shuffle,
    conv,
    deconv,
    depthwise,
    inverted_residual,
    layer_norm,
    linear,
    max_pool,
    number,
    reshape,
    resize,
    slices,
    split,
    tokens_of,
    transpose,
    view,
)


def _grid(g: GraphBuilder, sizes: Sequence[int]) -> str:
    """Centres of all cells of square maps, [1, 2, cells]."""
    cells = [np.stack(np.meshgrid(np.arange(n), np.arange(n))).reshape(2, -1) + 0.5 for n in sizes]
    return g.constant(np.concatenate(cells, axis=1)[None].astype(np.float32), "grid")


def _strides(g: GraphBuilder, sizes: Sequence[int], image: int) -> str:
    values = np.concatenate([np.full(n * n, image / n, np.float32) for n in sizes])
    return g.constant(values[None], "strides")


def yolov3_tiny(g: GraphBuilder) -> list[str]:
    """YOLOv3-tiny (Redmon and Farhadi 2018), width 0.5: leaky Relu, raw heads of two scales."""
    x, route = g.input([1, 3, 128, 128]), ""
    for index, out in enumerate([8, 16, 32, 64, 128]):
        x = conv(g, x, out, act="leaky")
        route = x if index == 4 else route
        x = max_pool(g, x)
    x = conv(g, x, 256, act="leaky")
    # The pool of stride 1 is padded at the end only, as Darknet does.
    padded = g.node("Pad", [x, g.constant_node(np.array([0, 0, 0, 0, 0, 0, 1, 1])), number(g, -1e30)])
    x = conv(g, conv(g, max_pool(g, padded, 2, 1), 512, act="leaky"), 128, 1, act="leaky")
    coarse = conv(g, conv(g, x, 256, act="leaky"), 45, 1)
    y = g.concat([resize(g, conv(g, x, 64, 1, act="leaky")), route])
    return [coarse, conv(g, conv(g, y, 128, act="leaky"), 45, 1)]


def _c3(
    g: GraphBuilder, x: str, out: int, blocks: int, shortcut: bool = True, pair: tuple[int, int] = (1, 3)
) -> str:
    y, route = conv(g, x, out // 2, 1, act="silu"), conv(g, x, out // 2, 1, act="silu")
    for _ in range(blocks):
        z = conv(g, conv(g, y, out // 2, pair[0], act="silu"), out // 2, pair[1], act="silu")
        y = g.add(y, z) if shortcut else z
    return conv(g, g.concat([y, route]), out, 1, act="silu")


def sppf(g: GraphBuilder, x: str) -> str:
    """Adds YOLO's pyramid of pools: three of 5x5 in a row, all of them joined."""
    channels = g.shape(x)[1]
    pools = [conv(g, x, channels // 2, 1, act="silu")]
    for _ in range(3):
        pools.append(max_pool(g, pools[-1], 5, 1, 2))
    return conv(g, g.concat(pools), channels, 1, act="silu")


def yolov5(g: GraphBuilder) -> list[str]:
    """YOLOv5-n (2020), width 0.25, one block a stage: SPPF, PAN, anchors decoded (Pow, Split)."""
    image = 128
    x = conv(g, g.input([1, 3, image, image], "images"), 16, 6, stride=2, pad=2, act="silu")
    routes = []
    for out in (32, 64, 128, 256):
        x = _c3(g, conv(g, x, out, stride=2, act="silu"), out, 1)
        routes.append(x)
    x = sppf(g, x)
    laterals = []
    for route, out in ((routes[2], 128), (routes[1], 64)):
        x = conv(g, x, out, 1, act="silu")
        laterals.append(x)
        x = g.concat([resize(g, x), route])
        x = _c3(g, x, out, 1, False) if out == 128 else x
    x = _c3(g, x, 64, 1, False)
    levels = [x]
    for lateral, out in ((laterals[1], 128), (laterals[0], 256)):
        x = _c3(g, g.concat([conv(g, x, out // 2, stride=2, act="silu"), lateral]), out, 1, False)
        levels.append(x)
    boxes = []
    for level in levels:
        h, w = g.shape(level)[2:]
        y = reshape(g, conv(g, level, 3 * 25, 1), 1, 3, 25, h, w)
        y = g.node("Sigmoid", [transpose(g, y, 0, 1, 3, 4, 2)])
        xy, wh, scores = split(g, y, [2, 2, 21], axis=4)
        cells = np.stack(np.meshgrid(np.arange(w), np.arange(h)), -1)[None, None] - 0.5
        grid = g.constant(cells.astype(np.float32), "grid")
        anchors = g.constant(g.normal((1, 3, 1, 1, 2), 20), "anchors")
        xy = g.node("Mul", [g.add(g.node("Mul", [xy, number(g, 2)]), grid), number(g, image / h)])
        wh = g.node("Mul", [g.node("Pow", [g.node("Mul", [wh, number(g, 2)]), number(g, 2)]), anchors])
        boxes.append(reshape(g, g.node("Concat", [xy, wh, scores], axis=4), 1, 3 * h * w, 25))
    return [g.node("Concat", boxes, axis=1)]


def c2f(g: GraphBuilder, x: str, out: int, blocks: int, shortcut: bool = True) -> str:
    """Adds YOLOv8's block: half of the channels go through `blocks` pairs of convolutions, all are joined."""
    parts = split(g, conv(g, x, out, 1, act="silu"), [out // 2, out // 2])
    for _ in range(blocks):
        y = conv(g, conv(g, parts[-1], out // 2, act="silu"), out // 2, act="silu")
        parts.append(g.add(parts[-1], y) if shortcut else y)
    return conv(g, g.concat(parts), out, 1, act="silu")


def distribution_head(
    g: GraphBuilder,
    levels: Sequence[str],
    image: int,
    classes: int,
    light: bool,
    *,
    box_width: int = 32,
    score_width: int = 32,
    batch: int = 1,
) -> str:
    """Adds YOLOv8's head: boxes as distributions over 16 distances, decoded by Softmax and a 1x1 convolution.

    Args:
        g: The builder.
        levels: Feature maps, the finest first.
        image: Height and width of the model's input.
        classes: Number of classes.
        light: YOLO11's depthwise convolutions in front of the classes.
        box_width: Channels of the convolutions in front of the boxes.
        score_width: Of those in front of the classes.
        batch: What a Reshape states; -1 for a free one.
    """
    flat, sizes = [], []
    for level in levels:
        size = g.shape(level)[2]
        box = conv(g, conv(g, conv(g, level, box_width, act="silu"), box_width, act="silu"), 64, 1)
        score = level
        for _ in range(2):
            score = depthwise(g, score, act="silu") if light else score
            score = conv(g, score, score_width, 1 if light else 3, act="silu")
        y = g.concat([box, conv(g, score, classes, 1)])
        flat.append(reshape(g, y, batch, 64 + classes, size * size))
        sizes.append(size)
    box, score = split(g, g.node("Concat", flat, axis=2), [64, classes])
    cells = sum(size * size for size in sizes)
    y = transpose(g, reshape(g, box, batch, 4, 16, cells), 0, 2, 1, 3)
    weight = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    y = reshape(g, g.conv_with(g.node("Softmax", [y], axis=1), weight, None), batch, 4, cells)
    grid = _grid(g, sizes)
    low = g.node("Sub", [grid, slices(g, y, 1, 0, 2)])
    high = g.add(grid, slices(g, y, 1, 2, 4))
    centre = g.node("Div", [g.add(low, high), number(g, 2)])
    box = g.concat([centre, g.node("Sub", [high, low])])
    return g.concat([g.node("Mul", [box, _strides(g, sizes, image)]), g.node("Sigmoid", [score])])


def yolov8(g: GraphBuilder) -> list[str]:
    """YOLOv8-n (2023), width 0.25, one block a stage: C2f, SPPF, a head without anchors (DFL)."""
    image = 128
    x = conv(g, g.input([1, 3, image, image], "images"), 16, stride=2, act="silu")
    routes = []
    for out in (32, 64, 128, 256):
        x = c2f(g, conv(g, x, out, stride=2, act="silu"), out, 1)
        routes.append(x)
    x = deep = sppf(g, x)
    middle = c2f(g, g.concat([resize(g, x), routes[2]]), 128, 1, False)
    levels = [c2f(g, g.concat([resize(g, middle), routes[1]]), 64, 1, False)]
    for lateral, out in ((middle, 128), (deep, 256)):
        down = conv(g, levels[-1], out // 2, stride=2, act="silu")
        levels.append(c2f(g, g.concat([down, lateral]), out, 1, False))
    return [distribution_head(g, levels, image, 20, False)]


def c3k2(g: GraphBuilder, x: str, out: int, ratio: float = 0.5, deep: bool = False) -> str:
    """Adds YOLO11's block: a `c2f` with a pair of narrow convolutions, or with a C3 of two pairs (`deep`)."""
    half = int(out * ratio)
    parts = split(g, conv(g, x, 2 * half, 1, act="silu"), [half, half])
    if deep:
        y = _c3(g, parts[1], half, 2, pair=(3, 3))
    else:
        y = conv(g, conv(g, parts[1], half // 2, act="silu"), half, act="silu")
        y = g.add(parts[1], y)
    return conv(g, g.concat([*parts, y]), out, 1, act="silu")


def c2psa(g: GraphBuilder, x: str, batch: int = 1) -> str:
    """Adds YOLO11's attention over positions: convolutions for queries, keys, values and positions.

    Args:
        g: The builder.
        x: Feature maps, their channels a multiple of 128.
        batch: What a Reshape states; -1 for a free one.
    """
    _, c, h, w = g.shape(x)
    half, heads = c // 2, c // 128
    kept, y = split(g, conv(g, x, c, 1, act="silu"), [half, half])
    qkv = reshape(g, conv(g, y, 2 * half, 1), batch, heads, 2 * half // heads, h * w)
    width = half // heads
    query, key, values = split(g, qkv, [width // 2, width // 2, width], axis=2)
    scores = g.node("MatMul", [transpose(g, query, 0, 1, 3, 2), key])
    scores = g.node("Softmax", [g.node("Mul", [scores, number(g, (width // 2) ** -0.5)])], axis=-1)
    mixed = reshape(g, g.node("MatMul", [values, transpose(g, scores, 0, 1, 3, 2)]), batch, half, h, w)
    positions = conv(g, reshape(g, values, batch, half, h, w), half, group=half)
    y = g.add(y, conv(g, g.add(mixed, positions), half, 1))
    y = g.add(y, conv(g, conv(g, y, 2 * half, 1, act="silu"), half, 1))
    return conv(g, g.concat([kept, y]), c, 1, act="silu")


def yolov11(g: GraphBuilder) -> list[str]:
    """YOLO11-n (2024), width 0.25: C3k2, C2PSA, depthwise classification heads, DFL."""
    image = 128
    x = conv(g, g.input([1, 3, image, image], "images"), 16, stride=2, act="silu")
    routes = []
    for out in (32, 64, 128, 256):
        x = c3k2(g, conv(g, x, out, stride=2, act="silu"), out)
        routes.append(x)
    x = deep = c2psa(g, sppf(g, x))
    middle = c3k2(g, g.concat([resize(g, x), routes[2]]), 128)
    levels = [c3k2(g, g.concat([resize(g, middle), routes[1]]), 64)]
    for lateral, out in ((middle, 128), (deep, 256)):
        down = conv(g, levels[-1], out // 2, stride=2, act="silu")
        levels.append(c3k2(g, g.concat([down, lateral]), out))
    return [distribution_head(g, levels, image, 20, True)]


def yolox(g: GraphBuilder) -> list[str]:
    """YOLOX-nano (Ge et al. 2021), width 0.25: Focus by Slices, depthwise blocks, decoupled heads, Exp."""
    image = 128
    x = g.input([1, 3, image, image], "images", free={0: "batch"})
    parts = []
    for column in (0, 1):
        for row in (0, 1):
            y = slices(g, slices(g, x, 2, row, image, 2), 3, column, image, 2)
            parts.append(y)
    x = conv(g, g.concat(parts), 16, act="silu")
    levels = []
    for out in (32, 64, 128, 256):
        x = conv(g, depthwise(g, x, stride=2, act="silu"), out, 1, act="silu")
        route, y = conv(g, x, out // 2, 1, act="silu"), conv(g, x, out // 2, 1, act="silu")
        y = g.add(y, conv(g, depthwise(g, y, 5, act="silu"), out // 2, 1, act="silu"))
        x = conv(g, g.concat([y, route]), out, 1, act="silu")
        levels.append(x)
    flat, sizes = [], []
    for level in levels[1:]:
        stem, size = conv(g, level, 64, 1, act="silu"), g.shape(level)[2]
        score = conv(g, depthwise(g, stem, act="silu"), 64, 1, act="silu")
        box = conv(g, depthwise(g, stem, act="silu"), 64, 1, act="silu")
        heads = [
            conv(g, box, 4, 1, gain=0.2),
            conv(g, box, 1, 1, act="sigmoid"),
            conv(g, score, 20, 1, act="sigmoid"),
        ]
        flat.append(view(g, g.concat(heads), "0", 25, -1))
        sizes.append(size)
    y = transpose(g, g.node("Concat", flat, axis=2), 0, 2, 1)
    grid = transpose(g, _grid(g, sizes), 0, 2, 1)
    strides = transpose(
        g, g.node("Unsqueeze", [_strides(g, sizes, image), g.constant_node(np.array([0]))]), 0, 2, 1
    )
    xy = g.node("Mul", [g.add(slices(g, y, 2, 0, 2), grid), strides])
    wh = g.node("Mul", [g.node("Exp", [slices(g, y, 2, 2, 4)]), strides])
    return [g.node("Concat", [xy, wh, slices(g, y, 2, 4, 2**31)], axis=-1)]


def ssd_mobilenet(g: GraphBuilder) -> list[str]:
    """SSDLite on MobileNetV2 (Sandler et al. 2018), width 0.5: four scales, channels last, decoded boxes."""
    x = conv(g, g.input([1, 3, 160, 160], free={0: "batch"}), 16, stride=2, act="relu6")
    features = []
    for ratio, out, stride in [(1, 8, 1), (6, 12, 2), (6, 16, 2), (6, 32, 2), (6, 48, 1), (6, 80, 2)]:
        x = inverted_residual(g, x, ratio * g.shape(x)[1], out, stride=stride)
        if out == 48:
            features.append(x)
    features.append(conv(g, x, 320, 1, act="relu6"))
    for hidden, out in ((128, 128), (64, 64)):
        y = conv(
            g, conv(g, features[-1], hidden, 1, act="relu6"), hidden, stride=2, group=hidden, act="relu6"
        )
        features.append(conv(g, y, out, 1, act="relu6"))
    boxes: list[str] = []
    scores: list[str] = []
    for feature in features:
        for width, outputs in ((4, boxes), (21, scores)):
            y = conv(g, depthwise(g, feature, act="relu6"), 6 * width, 1)
            outputs.append(view(g, transpose(g, y, 0, 2, 3, 1), "0", -1, width))
    box, score = g.node("Concat", boxes, axis=1), g.node("Concat", scores, axis=1)
    count = g.shape(box)[1]
    priors = g.constant(np.abs(g.normal((1, count, 4), 0.2)) + np.float32(0.05), "priors")
    centres, sizes = slices(g, priors, 2, 0, 2), slices(g, priors, 2, 2, 4)
    xy = g.node("Mul", [g.node("Mul", [slices(g, box, 2, 0, 2), number(g, 0.1)]), sizes])
    wh = g.node("Exp", [g.node("Mul", [slices(g, box, 2, 2, 4), number(g, 0.2)])])
    decoded = g.node("Concat", [g.add(xy, centres), g.node("Mul", [wh, sizes])], axis=2)
    return [decoded, g.node("Softmax", [score], axis=-1)]


def retinanet(g: GraphBuilder) -> list[str]:
    """RetinaNet (Lin et al. 2017) on a ResNet-18 of width 0.25: a pyramid, heads with shared weights."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 128]), 16, 7, stride=2, act="relu"), 3, 2, 1)
    features = []
    for out in (16, 32, 64, 128):
        stride = 1 if out == 16 else 2
        y = conv(g, conv(g, x, out, stride=stride, act="relu"), out, gain=0.5)
        x = g.relu(g.add(y, x if stride == 1 else conv(g, x, out, 1, stride=stride)))
        features.append(x)
    top = conv(g, features[3], 64, 1)
    pyramid = [conv(g, top, 64)]
    for feature in (features[2], features[1]):
        top = g.add(conv(g, feature, 64, 1), resize(g, top, by_sizes=True))
        pyramid.insert(0, conv(g, top, 64))
    pyramid.append(conv(g, features[3], 64, stride=2))
    outputs = []
    for width in (20, 4):
        layers = [g.normal((64, 64, 3, 3), 0.06) for _ in range(2)] + [g.normal((9 * width, 64, 3, 3), 0.06)]
        flat = []
        for level in pyramid:
            y = level
            for index, weight in enumerate(layers):
                y = g.conv_with(y, weight, g.normal((weight.shape[0],), 0.05), pad=1)
                y = g.relu(y) if index < 2 else y
            h, w = g.shape(y)[2:]
            y = transpose(g, reshape(g, y, 1, 9, width, h, w), 0, 3, 4, 1, 2)
            flat.append(reshape(g, y, 1, 9 * h * w, width))
        outputs.append(g.node("Concat", flat, axis=1))
    return [g.node("Sigmoid", [outputs[0]]), outputs[1]]


def centernet(g: GraphBuilder) -> list[str]:
    """CenterNet (Zhou et al. 2019), ResNet of width 0.25: deconvolutions, peaks by MaxPool and Equal."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 128]), 16, 7, stride=2, act="relu"), 3, 2, 1)
    for out in (32, 64, 128):
        x = conv(g, conv(g, x, out, stride=2, act="relu"), out, act="relu")
    for out in (64, 32, 32):
        x = deconv(g, x, out, act="relu")
    heads = [conv(g, conv(g, x, 32, act="relu"), width, 1) for width in (10, 2, 2)]
    heat = g.node("Sigmoid", [heads[0]])
    peaks = g.node("Equal", [max_pool(g, heat, 3, 1, 1), heat])
    heat = g.node("Mul", [heat, g.node("Cast", [peaks], to=1)])
    scores, places = g.nodes("TopK", [reshape(g, heat, 1, -1), g.constant_node(np.array([20]))], 2, axis=1)
    return [scores, places, heads[1], heads[2]]


def detr(g: GraphBuilder) -> list[str]:
    """DETR (Carion et al. 2020), width 0.5, one encoder and one decoder layer on a small ResNet."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 128]), 32, 7, stride=2, act="relu"), 3, 2, 1)
    for out in (32, 64, 128):
        x = conv(g, conv(g, x, out, stride=2, act="relu"), out, act="relu")
    memory = tokens_of(g, conv(g, x, 128, 1))
    positions = g.constant(g.normal((1, g.shape(memory)[1], 128), 0.5), "positions")
    y = attention(g, g.add(memory, positions), 4, packed=False)
    memory = layer_norm(g, g.add(memory, y))
    y = linear(g, linear(g, memory, 256, act="relu"), 128, gain=0.7)
    memory = layer_norm(g, g.add(memory, y))
    target = g.constant(g.normal((1, 20, 128), 1), "queries")
    for key in (None, g.add(memory, positions)):
        target = layer_norm(g, g.add(target, attention(g, target, 4, packed=False, key=key)))
    y = linear(g, linear(g, target, 256, act="relu"), 128, gain=0.7)
    target = layer_norm(g, g.add(target, y))
    box = linear(g, linear(g, linear(g, target, 128, act="relu"), 128, act="relu"), 4, act="sigmoid")
    return [linear(g, target, 21), box]


def nanodet(g: GraphBuilder) -> list[str]:
    """NanoDet (2020): ShuffleNetV2 of width 0.5, bilinear Resize, depthwise heads, leaky Relu."""
    x = max_pool(g, conv(g, g.input([1, 3, 128, 128]), 24, stride=2, act="leaky"), 3, 2, 1)
    features = []
    for out in (48, 96, 192):
        half = out // 2
        kept = conv(g, depthwise(g, x, stride=2), half, 1, act="leaky")
        y = depthwise(g, conv(g, x, half, 1, act="leaky"), stride=2)
        x = channel_shuffle(g, g.concat([kept, conv(g, y, half, 1, act="leaky")]), 2)
        kept, y = split(g, x, [half, half])
        y = conv(g, depthwise(g, conv(g, y, half, 1, act="leaky")), half, 1, act="leaky")
        x = channel_shuffle(g, g.concat([kept, y]), 2)
        features.append(conv(g, x, 48, 1))
    for index in (1, 0):
        up = resize(g, features[index + 1], mode="linear", coordinates="half_pixel")
        features[index] = g.add(features[index], up)
    for index in (0, 1):
        down = resize(g, features[index], 0.5, mode="linear", coordinates="half_pixel")
        features[index + 1] = g.add(features[index + 1], down)
    flat = []
    for feature in features:
        y = feature
        for _ in range(2):
            y = conv(g, depthwise(g, y, act="leaky"), 48, 1, act="leaky")
        score, box = split(g, conv(g, y, 20 + 32, 1), [20, 32])
        y = g.concat([g.node("Sigmoid", [score]), box])
        flat.append(transpose(g, reshape(g, y, 1, 52, -1), 0, 2, 1))
    return [g.node("Concat", flat, axis=1)]


def blazeface(g: GraphBuilder) -> list[str]:
    """BlazeFace (Bazarevsky et al. 2019): 5x5 depthwise blocks, shortcuts padded along the channels."""
    x = conv(g, g.input([1, 3, 128, 128]), 24, 5, stride=2, act="relu")
    features = []
    for out, stride in [
        (24, 1),
        (28, 1),
        (32, 2),
        (36, 1),
        (42, 1),
        (48, 2),
        (56, 1),
        (88, 1),
        (96, 2),
        (96, 1),
    ]:
        channels = g.shape(x)[1]
        y = conv(g, depthwise(g, x, 5 if stride == 1 else 3, stride=stride), out, 1)
        short = max_pool(g, x) if stride == 2 else x
        if out != channels:
            pads = g.constant_node(np.array([0, 0, 0, 0, 0, out - channels, 0, 0]))
            short = g.node("Pad", [short, pads], mode="constant")
        x = g.relu(g.add(y, short))
        if out in (88, 96):
            features.append(x)
    outputs = []
    for width in (1, 16):
        flat = []
        for feature, anchors in ((features[0], 2), (features[-1], 6)):
            y = transpose(g, conv(g, feature, anchors * width, 1), 0, 2, 3, 1)
            flat.append(reshape(g, y, 1, -1, width))
        outputs.append(g.node("Concat", flat, axis=1))
    return [outputs[1], g.node("Sigmoid", [outputs[0]])]


NETWORKS = [
    yolov3_tiny, yolov5, yolov8, yolov11, yolox, ssd_mobilenet, retinanet, centernet, detr, nanodet,
    blazeface,
]  # fmt: skip
