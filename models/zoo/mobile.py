"""Classifiers for phones: depthwise convolutions, channel shuffles, squeeze-and-excite blocks."""

from __future__ import annotations

from ..graph import GraphBuilder
from .layers import (
    average_pool,
    channel_shuffle,
    classify,
    conv,
    depthwise,
    inverted_residual,
    max_pool,
    slices,
    split,
    squeeze_excite,
)


def mobilenet_v1(g: GraphBuilder) -> list[str]:
    """MobileNet (Howard et al. 2017), width 0.5."""
    x = conv(g, g.input([1, 3, 96, 96]), 16, stride=2, act="relu6")
    widths = [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), *[(256, 1)] * 5, (512, 2), (512, 1)]
    for width, stride in widths:
        x = conv(g, depthwise(g, x, stride=stride, act="relu6"), width, 1, act="relu6")
    return [classify(g, x)]


def _mobilenet_v3(
    g: GraphBuilder,
    x: str,
    rows: list[tuple[int, int, int, int, str, int]],
    last: int,
    hidden: int,
    classes: int = 100,
) -> str:
    """Rows of kernel, expansion, output, squeeze, activation, stride; the tables of the paper."""
    x = conv(g, x, 16, stride=2, act="hswish")
    for kernel, expansion, out, squeeze, act, stride in rows:
        x = inverted_residual(g, x, expansion, out, kernel, stride=stride, act=act, squeeze=squeeze)
    x = g.node("GlobalAveragePool", [conv(g, x, last, 1, act="hswish")])
    x = g.node("HardSwish", [g.gemm(g.flatten(x), last, hidden, gain=1.4)])
    return g.gemm(x, hidden, classes)


def mobilenet_v3_small(g: GraphBuilder) -> list[str]:
    """MobileNetV3-Small (Howard et al. 2019), width 1.0, free batch."""
    rows = [
        (3, 16, 16, 8, "relu", 2),
        (3, 72, 24, 0, "relu", 2),
        (3, 88, 24, 0, "relu", 1),
        (5, 96, 40, 24, "hswish", 2),
        *[(5, 240, 40, 64, "hswish", 1)] * 2,
        (5, 120, 48, 32, "hswish", 1),
        (5, 144, 48, 40, "hswish", 1),
        (5, 288, 96, 72, "hswish", 2),
        *[(5, 576, 96, 144, "hswish", 1)] * 2,
    ]
    return [_mobilenet_v3(g, g.input([1, 3, 96, 96], free={0: "batch"}), rows, 576, 1024)]


def mobilenet_v3_large_on(g: GraphBuilder, x: str, classes: int) -> str:
    """Adds MobileNetV3-Large behind an image `x`."""
    rows = [
        (3, 16, 16, 0, "relu", 1),
        (3, 64, 24, 0, "relu", 2),
        (3, 72, 24, 0, "relu", 1),
        (5, 72, 40, 24, "relu", 2),
        *[(5, 120, 40, 32, "relu", 1)] * 2,
        (3, 240, 80, 0, "hswish", 2),
        (3, 200, 80, 0, "hswish", 1),
        *[(3, 184, 80, 0, "hswish", 1)] * 2,
        (3, 480, 112, 120, "hswish", 1),
        (3, 672, 112, 168, "hswish", 1),
        (5, 672, 160, 168, "hswish", 2),
        *[(5, 960, 160, 240, "hswish", 1)] * 2,
    ]
    return _mobilenet_v3(g, x, rows, 960, 1280, classes)


def mobilenet_v3_large(g: GraphBuilder) -> list[str]:
    """MobileNetV3-Large (Howard et al. 2019), width 1.0."""
    return [mobilenet_v3_large_on(g, g.input([1, 3, 96, 96]), 100)]


def efficientnet_b0_on(g: GraphBuilder, x: str, classes: int) -> str:
    """Adds EfficientNet-B0 behind an image `x`."""
    x = conv(g, x, 32, stride=2, act="silu")
    stages = [
        (3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (5, 6, 40, 2, 2), (3, 6, 80, 3, 2),
        (5, 6, 112, 3, 1), (5, 6, 192, 4, 2), (3, 6, 320, 1, 1),
    ]  # fmt: skip
    for kernel, ratio, out, blocks, first in stages:
        for block in range(blocks):
            channels = g.shape(x)[1]
            x = inverted_residual(
                g, x, ratio * channels, out, kernel, stride=1 if block else first, act="silu",
                squeeze=max(1, channels // 4), gate="sigmoid", squeeze_act="silu",
            )  # fmt: skip
    return classify(g, conv(g, x, 1280, 1, act="silu"), classes)


def efficientnet_b0(g: GraphBuilder) -> list[str]:
    """EfficientNet-B0 (Tan and Le 2019), width 1.0."""
    return [efficientnet_b0_on(g, g.input([1, 3, 96, 96]), 100)]


def efficientnet_lite0(g: GraphBuilder) -> list[str]:
    """EfficientNet-Lite0 (2020): no squeeze-and-excite, Clip for SiLU; width 0.5, one block less a stage."""
    x = conv(g, g.input([1, 3, 96, 96]), 16, stride=2, act="relu6")
    stages = [(3, 1, 8, 1, 1), (3, 6, 12, 1, 2), (5, 6, 20, 1, 2), (3, 6, 40, 2, 2), (5, 6, 56, 2, 1)]
    for kernel, ratio, out, blocks, first in stages:
        for block in range(blocks):
            hidden = ratio * g.shape(x)[1]
            x = inverted_residual(g, x, hidden, out, kernel, stride=1 if block else first)
    return [classify(g, conv(g, x, 320, 1, act="relu6"), form="mean")]


def efficientnet_v2(g: GraphBuilder) -> list[str]:
    """EfficientNetV2-S (Tan and Le 2021), width 0.5, two blocks a stage: fused blocks first."""
    x = conv(g, g.input([1, 3, 96, 96]), 12, stride=2, act="silu")
    for out, ratio, first in [(12, 1, 1), (24, 4, 2), (32, 4, 2)]:
        for block in range(2):
            channels, stride = g.shape(x)[1], 1 if block else first
            y = conv(g, x, ratio * channels, stride=stride, act="silu")
            y = conv(g, y, out, 1) if ratio > 1 else y
            x = g.add(x, y) if stride == 1 and out == channels else y
    for out, ratio, first in [(64, 4, 2), (80, 6, 1), (128, 6, 2)]:
        for block in range(2):
            channels = g.shape(x)[1]
            x = inverted_residual(
                g, x, ratio * channels, out, stride=1 if block else first, act="silu",
                squeeze=channels // 4, gate="sigmoid", squeeze_act="silu",
            )  # fmt: skip
    return [classify(g, conv(g, x, 640, 1, act="silu"))]


def mnasnet(g: GraphBuilder) -> list[str]:
    """MNASNet-B1 (Tan et al. 2018), width 0.75, two blocks a stage."""
    x = conv(g, g.input([1, 3, 96, 96]), 24, stride=2, act="relu")
    x = conv(g, depthwise(g, x, act="relu"), 12, 1)
    for kernel, ratio, out, first in [
        (3, 3, 18, 2),
        (5, 3, 30, 2),
        (5, 6, 60, 2),
        (3, 6, 72, 1),
        (5, 6, 144, 2),
    ]:
        for block in range(2):
            hidden = ratio * g.shape(x)[1]
            x = inverted_residual(g, x, hidden, out, kernel, stride=1 if block else first, act="relu")
    return [classify(g, conv(g, x, 640, 1, act="relu"), form="mean")]


def _ghost(g: GraphBuilder, x: str, out: int, act: str) -> str:
    first = conv(g, x, out // 2, 1, act=act)
    y = g.concat([first, depthwise(g, first, act=act)])
    # Written for odd widths, where the concatenation has a channel too many.
    return slices(g, y, 1, 0, out)


def ghostnet(g: GraphBuilder) -> list[str]:
    """GhostNet (Han et al. 2019), width 0.5."""
    x = conv(g, g.input([1, 3, 96, 96]), 8, stride=2, act="relu")
    rows = [
        (3, 8, 8, 0, 1), (3, 24, 12, 0, 2), (3, 36, 12, 0, 1), (5, 36, 20, 12, 2), (5, 60, 20, 16, 1),
        (3, 120, 40, 0, 2), (3, 100, 40, 0, 1), (3, 240, 56, 60, 1), (5, 336, 80, 84, 2),
        (5, 480, 80, 120, 1),
    ]  # fmt: skip
    for kernel, hidden, out, squeeze, stride in rows:
        channels = g.shape(x)[1]
        y = _ghost(g, x, hidden, "relu")
        if stride == 2:
            y = depthwise(g, y, kernel, stride=2)
        if squeeze:
            y = squeeze_excite(g, y, squeeze)
        y = _ghost(g, y, out, "")
        if stride == 2 or channels != out:
            x = conv(g, depthwise(g, x, kernel, stride=stride), out, 1)
        x = g.add(y, x)
    x = g.node("GlobalAveragePool", [conv(g, x, 480, 1, act="relu")])
    return [g.gemm(g.flatten(conv(g, x, 640, 1, act="relu")), 640, 100)]


def shufflenet_v1(g: GraphBuilder) -> list[str]:
    """ShuffleNet (Zhang et al. 2017), 3 groups, width 0.5, fixed batch."""
    x = max_pool(g, conv(g, g.input([1, 3, 96, 96]), 24, stride=2, act="relu"), 3, 2, 1)
    for stage, (out, blocks) in enumerate([(120, 3), (240, 4), (480, 2)]):
        for block in range(blocks):
            channels, stride = g.shape(x)[1], 1 if block else 2
            width = out if block else out - channels
            hidden = out // 4 // 3 * 3
            y = conv(g, x, hidden, 1, group=1 if stage == 0 and block == 0 else 3, act="relu")
            y = depthwise(g, channel_shuffle(g, y, 3), stride=stride)
            y = conv(g, y, width, 1, group=3)
            x = g.relu(g.add(x, y)) if block else g.relu(g.concat([average_pool(g, x, 3, 2, 1), y]))
    return [classify(g, x)]


def _shufflenet_v2(g: GraphBuilder, x: str, by_shape: bool) -> str:
    x = max_pool(g, conv(g, x, 24, stride=2, act="relu"), 3, 2, 1)
    for out, blocks in [(48, 4), (96, 8), (192, 4)]:
        half = out // 2
        for block in range(blocks):
            if block:
                kept, y = split(g, x, [half, half])
                y = depthwise(g, conv(g, y, half, 1, act="relu"))
            else:
                kept = conv(g, depthwise(g, x, stride=2), half, 1, act="relu")
                y = depthwise(g, conv(g, x, half, 1, act="relu"), stride=2)
            x = channel_shuffle(g, g.concat([kept, conv(g, y, half, 1, act="relu")]), 2, by_shape=by_shape)
    return conv(g, x, 512, 1, act="relu")


def shufflenet_v2(g: GraphBuilder) -> list[str]:
    """ShuffleNetV2 (Ma et al. 2018), width 0.5."""
    return [classify(g, _shufflenet_v2(g, g.input([1, 3, 96, 96]), False), form="mean")]


def shufflenet_v2_dynamic(g: GraphBuilder) -> list[str]:
    """ShuffleNetV2, width 0.5, with free batch: every shuffle reads its sizes from the tensor."""
    x = g.input([1, 3, 96, 96], free={0: "batch"})
    return [classify(g, _shufflenet_v2(g, x, True), form="view")]


def squeezenet(g: GraphBuilder) -> list[str]:
    """SqueezeNet 1.1 (Iandola et al. 2016), width 1.0: pools round up, the classifier is a convolution."""
    x = conv(g, g.input([1, 3, 96, 96]), 64, stride=2, pad=0, act="relu")
    for hidden, pooled in [(16, 1), (16, 0), (32, 1), (32, 0), (48, 1), (48, 0), (64, 0), (64, 0)]:
        x = max_pool(g, x, 3, 2, ceil=True) if pooled else x
        y = conv(g, x, hidden, 1, act="relu")
        x = g.concat([conv(g, y, 4 * hidden, 1, act="relu"), conv(g, y, 4 * hidden, 3, act="relu")])
    return [g.flatten(g.node("GlobalAveragePool", [conv(g, x, 100, 1, act="relu")]))]


def pp_lcnet(g: GraphBuilder) -> list[str]:
    """PP-LCNet (Cui et al. 2021), width 0.5, as Paddle exports it: BatchNormalization stays."""
    x = g.input([1, 3, 96, 96], name="x", free={0: "batch"})
    x = conv(g, x, 8, stride=2, act="paddle_hswish", norm=True)
    rows = [(3, 16, 1, 0), (3, 32, 2, 0), (3, 32, 1, 0), (3, 64, 2, 0), (3, 64, 1, 0), (3, 128, 2, 0),
            *[(5, 128, 1, 0)] * 3, (5, 256, 2, 1), (5, 256, 1, 1)]  # fmt: skip
    for kernel, out, stride, squeeze in rows:
        x = depthwise(g, x, kernel, stride=stride, act="paddle_hswish", norm=True)
        if squeeze:
            x = squeeze_excite(g, x, g.shape(x)[1] // 4)
        x = conv(g, x, out, 1, act="paddle_hswish", norm=True)
    x = conv(g, g.node("GlobalAveragePool", [x]), 640, 1, act="paddle_hswish", bias=False)
    x = g.node("MatMul", [g.flatten(x), g.constant(g.normal((640, 100), 0.04), "weight")])
    x = g.add(x, g.constant(g.normal((100,), 0.1), "bias"))
    return [g.node("Softmax", [x], axis=-1)]


NETWORKS = [
    mobilenet_v1, mobilenet_v3_small, mobilenet_v3_large, efficientnet_b0, efficientnet_lite0,
    efficientnet_v2,
    mnasnet, ghostnet, shufflenet_v1, shufflenet_v2, shufflenet_v2_dynamic, squeezenet, pp_lcnet,
]  # fmt: skip
