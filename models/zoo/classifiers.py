"""Classifiers for servers: residual, grouped, branching and re-parameterized convolutions."""

from __future__ import annotations

import numpy as np

from ..graph import GraphBuilder
from .layers import (
    average_pool,
    classify,
    conv,
    depthwise,
    linear,
    max_pool,
    reshape,
    resize,
    split,
    squeeze_excite,
    transpose,
    view,
)

# The last convolution of a branch is smaller, so that sums of many branches keep their variance.
_BRANCH = 0.5


def _stem(g: GraphBuilder, width: int, image: int = 96) -> str:
    x = conv(g, g.input([1, 3, image, image]), width, 7, stride=2, act="relu")
    return max_pool(g, x, 3, 2, 1)


def _shortcut(g: GraphBuilder, x: str, out: int, stride: int) -> str:
    return conv(g, x, out, 1, stride=stride) if stride > 1 or g.shape(x)[1] != out else x


def lenet(g: GraphBuilder) -> list[str]:
    """LeNet-5 (LeCun et al. 1998) with tanh, average pools and `view` by a free batch."""
    x = g.input([1, 1, 28, 28], free={0: "batch"})
    x = average_pool(g, conv(g, x, 6, 5, act="tanh"))
    x = average_pool(g, conv(g, x, 16, 5, pad=0, act="tanh"))
    x = linear(g, view(g, x, "0", -1), 120, act="tanh")
    return [linear(g, linear(g, x, 84, act="tanh"), 10)]


def alexnet(g: GraphBuilder) -> list[str]:
    """AlexNet (Krizhevsky et al. 2012), width 0.5, with its local response normalization."""
    x = conv(g, g.input([1, 3, 112, 112]), 32, 11, stride=4, pad=2, act="relu")
    x = max_pool(g, g.node("LRN", [x], size=5), 3, 2)
    x = conv(g, x, 96, 5, group=2, act="relu")
    x = max_pool(g, g.node("LRN", [x], size=5), 3, 2)
    x = conv(g, conv(g, x, 192, act="relu"), 128, group=2, act="relu")
    x = g.flatten(max_pool(g, x, 3, 2, 1))
    return [linear(g, linear(g, x, 512, act="relu"), 100)]


def resnext50(g: GraphBuilder) -> list[str]:
    """ResNeXt-50 32x4d (Xie et al. 2016), width 0.5: 16 groups; 2 blocks a stage."""
    x = _stem(g, 32)
    for stage, out in enumerate([128, 256, 512, 1024]):
        for block in range(2):
            stride = 2 if block == 0 and stage else 1
            y = conv(g, conv(g, x, out // 2, 1, act="relu"), out // 2, stride=stride, group=16, act="relu")
            x = g.relu(g.add(conv(g, y, out, 1, gain=_BRANCH), _shortcut(g, x, out, stride)))
    return [classify(g, x)]


def se_resnet18(g: GraphBuilder) -> list[str]:
    """SE-ResNet-18 (Hu et al. 2017), width 0.5: fully connected squeeze-and-excite by `view`."""
    x = _stem(g, 32)
    for stage, out in enumerate([32, 64, 128, 256]):
        for block in range(2):
            stride = 2 if block == 0 and stage else 1
            y = conv(g, conv(g, x, out, stride=stride, act="relu"), out, gain=_BRANCH)
            y = squeeze_excite(g, y, out // 16 + 2, gate="sigmoid", form="linear")
            x = g.relu(g.add(y, _shortcut(g, x, out, stride)))
    return [classify(g, x, form="view")]


def res2net(g: GraphBuilder) -> list[str]:
    """Res2Net-50 (Gao et al. 2019), 4 scales, width 0.5, one block a stage."""
    x = _stem(g, 32)
    for stage, out in enumerate([128, 256, 512]):
        stride, width = 2 if stage else 1, out // 8
        parts = split(g, conv(g, x, 4 * width, 1, act="relu"), [width] * 4)
        outputs: list[str] = []
        for index, part in enumerate(parts[:3]):
            source = part if index == 0 or stride > 1 else g.add(outputs[-1], part)
            outputs.append(conv(g, source, width, stride=stride, act="relu"))
        outputs.append(average_pool(g, parts[3], 3, 2, 1) if stride > 1 else parts[3])
        y = conv(g, g.concat(outputs), out, 1, gain=_BRANCH)
        x = g.relu(g.add(y, _shortcut(g, x, out, stride)))
    return [classify(g, x)]


def _regnet(g: GraphBuilder, widths: list[tuple[int, int]], group_width: int, squeeze: bool) -> str:
    x = conv(g, g.input([1, 3, 96, 96]), 32, stride=2, act="relu")
    for out, blocks in widths:
        for block in range(blocks):
            stride, channels = 1 if block else 2, g.shape(x)[1]
            y = conv(g, x, out, 1, act="relu")
            y = conv(g, y, out, stride=stride, group=out // group_width, act="relu")
            if squeeze:
                y = squeeze_excite(g, y, channels // 4, gate="sigmoid")
            x = g.relu(g.add(_shortcut(g, x, out, stride), conv(g, y, out, 1, gain=_BRANCH)))
    return classify(g, x)


def regnet_x(g: GraphBuilder) -> list[str]:
    """RegNetX-400MF (Radosavovic et al. 2020), fewer blocks."""
    return [_regnet(g, [(32, 1), (64, 2), (160, 3), (400, 2)], 16, False)]


def regnet_y(g: GraphBuilder) -> list[str]:
    """RegNetY-400MF (Radosavovic et al. 2020), fewer blocks."""
    return [_regnet(g, [(48, 1), (104, 2), (208, 3), (440, 1)], 8, True)]


def googlenet(g: GraphBuilder) -> list[str]:
    """GoogLeNet (Szegedy et al. 2014), width 0.5, five inception blocks, pools that round up."""
    x = conv(g, g.input([1, 3, 112, 112]), 32, 7, stride=2, act="relu")
    x = conv(g, max_pool(g, x, 3, 2, ceil=True), 32, 1, act="relu")
    x = max_pool(g, conv(g, x, 96, act="relu"), 3, 2, ceil=True)
    rows = [
        (32, 48, 64, 8, 16, 16), (64, 64, 96, 16, 48, 32), (),
        (96, 48, 104, 8, 24, 32), (128, 80, 160, 16, 64, 64), (),
        (192, 96, 192, 24, 64, 64),
    ]  # fmt: skip
    for row in rows:
        if not row:
            x = max_pool(g, x, 3, 2, ceil=True)
            continue
        one, three_in, three, five_in, five, pooled = row
        x = g.concat(
            [
                conv(g, x, one, 1, act="relu"),
                conv(g, conv(g, x, three_in, 1, act="relu"), three, act="relu"),
                conv(g, conv(g, x, five_in, 1, act="relu"), five, 5, act="relu"),
                conv(g, max_pool(g, x, 3, 1, 1, ceil=True), pooled, 1, act="relu"),
            ]
        )
    return [classify(g, x)]


def inception_v3(g: GraphBuilder) -> list[str]:
    """Inception v3 (Szegedy et al. 2015), width 0.25: 1x7 and 7x1 convolutions, one block of each kind."""
    x = conv(g, g.input([1, 3, 107, 107]), 16, stride=2, pad=0, act="relu")
    x = max_pool(g, conv(g, conv(g, x, 16, pad=0, act="relu"), 24, act="relu"), 3, 2)
    x = max_pool(g, conv(g, conv(g, x, 24, 1, act="relu"), 48, pad=0, act="relu"), 3, 2)
    pooled = conv(g, average_pool(g, x, 3, 1, 1), 16, 1, act="relu")
    five = conv(g, conv(g, x, 12, 1, act="relu"), 16, 5, act="relu")
    three = conv(g, conv(g, conv(g, x, 16, 1, act="relu"), 24, act="relu"), 24, act="relu")
    x = g.concat([conv(g, x, 16, 1, act="relu"), five, three, pooled])
    y = conv(g, conv(g, conv(g, x, 16, 1, act="relu"), 24, act="relu"), 24, stride=2, pad=0, act="relu")
    x = g.concat([conv(g, x, 96, stride=2, pad=0, act="relu"), y, max_pool(g, x, 3, 2)])
    seven = conv(g, conv(g, conv(g, x, 32, 1, act="relu"), 32, (1, 7), act="relu"), 48, (7, 1), act="relu")
    pooled = conv(g, average_pool(g, x, 3, 1, 1), 48, 1, act="relu")
    x = g.concat([conv(g, x, 48, 1, act="relu"), seven, pooled])
    y = conv(g, x, 96, 1, act="relu")
    wide = g.concat([conv(g, y, 96, (1, 3), act="relu"), conv(g, y, 96, (3, 1), act="relu")])
    return [classify(g, g.concat([conv(g, x, 80, 1, act="relu"), wide]))]


def xception(g: GraphBuilder) -> list[str]:
    """Xception (Chollet 2016), width 0.25, two middle blocks, as Keras exports it: Relu first, channels last.

    Keras models take channels last; the exporter puts one Transpose in front and moves it no further.
    """
    x = transpose(g, g.input([1, 96, 96, 3], free={0: "batch"}), 0, 3, 1, 2)
    x = conv(g, conv(g, x, 8, stride=2, pad=0, act="relu"), 16, pad=0, act="relu")

    def separable(y: str, out: int) -> str:
        return conv(g, depthwise(g, y), out, 1)

    for index, out in enumerate([32, 64, 182]):
        y = separable(x if index == 0 else g.relu(x), out)
        y = max_pool(g, separable(g.relu(y), out), 3, 2, 1)
        x = g.add(y, conv(g, x, out, 1, stride=2))
    for _ in range(2):
        y = x
        for _ in range(3):
            y = separable(g.relu(y), 182)
        x = g.add(y, x)
    x = g.relu(separable(g.relu(x), 256))
    x = linear(
        g, g.node("Squeeze", [g.node("GlobalAveragePool", [x]), g.constant_node(np.array([2, 3]))]), 100
    )
    return [g.node("Softmax", [x], axis=-1)]


def repvgg(g: GraphBuilder) -> list[str]:
    """RepVGG-A0 (Ding et al. 2021), re-parameterized: 3x3 and Relu alone; width 0.5."""
    x = conv(g, g.input([1, 3, 96, 96]), 24, stride=2, act="relu")
    for out, blocks in [(24, 2), (48, 3), (96, 4), (320, 1)]:
        for block in range(blocks):
            x = conv(g, x, out, stride=1 if block else 2, act="relu")
    return [classify(g, x)]


def csp_darknet(g: GraphBuilder) -> list[str]:
    """CSPDarknet-53 (Wang et al. 2019), width 0.25, leaky Relu and Mish."""
    x = conv(g, g.input([1, 3, 96, 96]), 8, act="mish")
    for index, (out, blocks) in enumerate([(16, 1), (32, 1), (64, 2), (128, 1)]):
        act = "mish" if index < 2 else "leaky"
        x = conv(g, x, out, stride=2, act=act)
        route, y = conv(g, x, out // 2, 1, act=act), conv(g, x, out // 2, 1, act=act)
        for _ in range(blocks):
            y = g.add(y, conv(g, conv(g, y, out // 2, 1, act=act), out // 2, act=act, gain=_BRANCH))
        x = conv(g, g.concat([conv(g, y, out // 2, 1, act=act), route]), out, 1, act=act)
    return [classify(g, x, form="mean")]


def hrnet(g: GraphBuilder) -> list[str]:
    """HRNet-W18-Small (Wang et al. 2019), three resolutions, one block each, fused twice."""
    x = conv(g, g.input([1, 3, 128, 128]), 32, stride=2, act="relu")
    x = conv(g, x, 32, stride=2, act="relu")
    widths = [18, 36, 72]
    branches = [conv(g, x, 18, act="relu")]
    for scales in (2, 3):
        branches.append(conv(g, branches[-1], widths[scales - 1], stride=2, act="relu"))
        for index, y in enumerate(branches):
            z = conv(g, conv(g, y, widths[index], act="relu"), widths[index], gain=_BRANCH)
            branches[index] = g.relu(g.add(z, y))
        fused = []
        for target in range(scales):
            total = ""
            for source, y in enumerate(branches):
                if source > target:
                    y = resize(g, conv(g, y, widths[target], 1), 2 ** (source - target))
                for step in range(source, target):
                    last = step + 1 == target
                    y = conv(g, y, widths[target if last else source], stride=2, act="" if last else "relu")
                total = g.add(total, y) if total else y
            fused.append(g.relu(total))
        branches = fused
    y = conv(g, branches[0], 64, 1, act="relu")
    for index, width in ((1, 128), (2, 256)):
        y = g.add(conv(g, y, width, stride=2, act="relu"), conv(g, branches[index], width, 1, act="relu"))
    return [classify(g, y)]


def convmixer(g: GraphBuilder) -> list[str]:
    """ConvMixer (Trockman and Kolter 2022), width 128, depth 6: Gelu in front of BatchNormalization."""
    x = conv(g, g.input([1, 3, 98, 98]), 128, 7, stride=7, pad=0, act="erf_gelu")
    x = g.batch_norm(x, 128)
    for _ in range(6):
        x = g.add(g.batch_norm(depthwise(g, x, 9, act="erf_gelu"), 128), x)
        x = g.batch_norm(conv(g, x, 128, 1, act="erf_gelu"), 128)
    return [classify(g, x)]


def preact_resnet(g: GraphBuilder) -> list[str]:
    """A pre-activation ResNet (He et al. 2016), width 0.5: BatchNormalization stays."""
    x = conv(g, g.input([1, 3, 64, 64]), 32)
    for stage, out in enumerate([32, 64, 128]):
        for block in range(2):
            stride = 2 if block == 0 and stage else 1
            y = g.relu(g.batch_norm(x, g.shape(x)[1]))
            short = _shortcut(g, y if stride > 1 else x, out, stride)
            y = conv(g, conv(g, y, out, stride=stride, act="relu"), out, gain=_BRANCH)
            x = g.add(short, y)
    return [classify(g, g.relu(g.batch_norm(x, 128)))]


def cbam_resnet(g: GraphBuilder) -> list[str]:
    """ResNet-18 with CBAM (Woo et al. 2018), width 0.25: gates of means and maxima, free sizes."""
    x = g.input([1, 3, 64, 64], free={0: "batch", 2: "height", 3: "width"})
    x = max_pool(g, conv(g, x, 16, 7, stride=2, act="relu"), 3, 2, 1)
    for out, stride in [(16, 1), (32, 2), (64, 2)]:
        y = conv(g, conv(g, x, out, stride=stride, act="relu"), out, gain=_BRANCH)
        hidden = [g.normal((out // 8, out, 1, 1), 0.3), g.normal((out, out // 8, 1, 1), 0.5)]
        pooled = []
        for pool in ("GlobalAveragePool", "GlobalMaxPool"):
            z = g.relu(g.conv_with(g.node(pool, [y]), hidden[0], None))
            pooled.append(g.conv_with(z, hidden[1], None))
        y = g.node("Mul", [y, g.node("Sigmoid", [g.add(*pooled)])])
        if g.opset >= 18:
            axes = g.constant_node(np.array([1]))
            maps = [g.node(op, [y, axes], keepdims=1) for op in ("ReduceMean", "ReduceMax")]
        else:
            maps = [g.node(op, [y], axes=[1], keepdims=1) for op in ("ReduceMean", "ReduceMax")]
        y = g.node("Mul", [y, conv(g, g.concat(maps), 1, 7, act="sigmoid", bias=False)])
        x = g.relu(g.add(y, _shortcut(g, x, out, stride)))
    return [classify(g, x, form="view")]


def patch_reshapes(g: GraphBuilder) -> list[str]:
    """A small network of Reshapes between convolutions: space to depth by Reshape and Transpose, twice."""
    x = g.input([1, 8, 32, 32])
    for out in (32, 64):
        n, c, h, w = g.shape(x)
        y = transpose(g, reshape(g, x, n, c, h // 2, 2, w // 2, 2), 0, 3, 5, 1, 2, 4)
        x = conv(g, reshape(g, y, n, 4 * c, h // 2, w // 2), out, act="relu")
    return [classify(g, x, form="reshape")]


NETWORKS = [
    lenet, alexnet, resnext50, se_resnet18, res2net, regnet_x, regnet_y, googlenet, inception_v3, xception,
    repvgg, csp_darknet, hrnet, convmixer, preact_resnet, cbam_resnet, patch_reshapes,
]  # fmt: skip
