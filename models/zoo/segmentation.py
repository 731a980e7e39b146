"""Segmentation: encoders and decoders, dilated convolutions, pyramids of pools, bilinear Resize."""

from __future__ import annotations

import numpy as np

from ..graph import GraphBuilder
from .layers import attention as attend
from .layers import (
    average_pool,
    contracting_path,
    conv,
    deconv,
    depthwise,
    inverted_residual,
    layer_norm,
    linear,
    maps_of,
    max_pool,
    mean,
    number,
    resize,
    resize_like,
    tokens_of,
    transpose,
    two_convs,
)


def _features(g: GraphBuilder, x: str, width: int, *, dilated: bool = False) -> list[str]:
    """A small residual encoder: maps at 1/4, 1/8, 1/16 and, unless dilated, 1/32."""
    x = max_pool(g, conv(g, x, width, 7, stride=2, act="relu"), 3, 2, 1)
    features = []
    for index in range(4):
        out, last = width << index, dilated and index == 3
        stride = 1 if index == 0 or last else 2
        y = conv(g, x, out, stride=stride, dilation=2 if last else 1, act="relu")
        y = conv(g, y, out, dilation=2 if last else 1, gain=0.5)
        x = g.relu(g.add(y, x if index == 0 else conv(g, x, out, 1, stride=stride)))
        features.append(x)
    return features


def unet(g: GraphBuilder) -> list[str]:
    """U-Net (Ronneberger et al. 2015), width 0.25: ConvTranspose and Concat with the skipped maps."""
    x, skipped = contracting_path(g, g.input([1, 1, 96, 96]), (16, 32, 64, 128))
    for y in reversed(skipped):
        out = g.shape(y)[1]
        x = g.concat([y, deconv(g, x, out, 2, pad=0)])
        x = two_convs(g, x, out)
    return [conv(g, x, 1, 1, act="sigmoid")]


def unet_bilinear(g: GraphBuilder) -> list[str]:
    """U-Net, width 0.25, with bilinear Resize to the skipped map's size, a free image size."""
    x = g.input([1, 3, 64, 64], free={0: "batch", 2: "height", 3: "width"})
    x, skipped = contracting_path(g, x, (16, 32, 64))
    for y in reversed(skipped):
        out = g.shape(y)[1]
        x = g.concat([resize_like(g, x, y, coordinates="align_corners"), y])
        x = two_convs(g, x, out)
    return [conv(g, x, 4, 1)]


def attention_unet(g: GraphBuilder) -> list[str]:
    """Attention U-Net (Oktay et al. 2018), width 0.25: skipped maps times a gate of one channel."""
    x, skipped = contracting_path(g, g.input([1, 1, 64, 64]), (16, 32, 64))
    for y in reversed(skipped):
        out = g.shape(y)[1]
        x = conv(g, resize(g, x), out, act="relu")
        gate = g.relu(g.add(conv(g, x, out // 2, 1), conv(g, y, out // 2, 1)))
        gated = g.node("Mul", [y, conv(g, gate, 1, 1, act="sigmoid")])
        x = two_convs(g, g.concat([gated, x]), out)
    return [conv(g, x, 2, 1)]


def deeplabv3plus(g: GraphBuilder) -> list[str]:
    """DeepLabV3+ (Chen et al. 2018), width 0.25: ASPP with rates 6, 12, 18, image pooling, a decoder."""
    image = g.input([1, 3, 128, 128])
    features = _features(g, image, 16, dilated=True)
    x = features[3]
    branches = [conv(g, x, 64, 1, act="relu")]
    for rate in (6, 12, 18):
        branches.append(conv(g, depthwise(g, x, dilation=rate, act="relu"), 64, 1, act="relu"))
    pooled = conv(g, g.node("GlobalAveragePool", [x]), 64, 1, act="relu")
    branches.append(resize_like(g, pooled, x))
    x = conv(g, g.concat(branches), 64, 1, act="relu")
    x = g.concat([resize_like(g, x, features[0]), conv(g, features[0], 12, 1, act="relu")])
    x = conv(g, depthwise(g, x, act="relu"), 64, 1, act="relu")
    return [resize_like(g, conv(g, x, 21, 1), image)]


def fcn(g: GraphBuilder) -> list[str]:
    """FCN-8s (Long et al. 2014), width 0.25: score maps added, a ConvTranspose of stride 8, ArgMax."""
    features = _features(g, g.input([1, 3, 128, 128]), 16)
    x = conv(g, features[3], 21, 1)
    for feature in (features[2], features[1]):
        x = g.add(deconv(g, x, 21), conv(g, feature, 21, 1))
    x = deconv(g, x, 21, 16, stride=8, pad=4)
    return [g.node("ArgMax", [x], axis=1, keepdims=0)]


def bisenet(g: GraphBuilder) -> list[str]:
    """BiSeNet (Yu et al. 2018), width 0.25: a spatial path, attention refinement, feature fusion."""
    image = g.input([1, 3, 128, 128])
    spatial = image
    for out in (16, 16, 16):
        spatial = conv(g, spatial, out, stride=2, act="relu")
    spatial = conv(g, spatial, 32, 1, act="relu")
    features = _features(g, image, 16)

    def refined(x: str) -> str:
        x = conv(g, x, 32, act="relu")
        return g.node("Mul", [x, conv(g, g.node("GlobalAveragePool", [x]), 32, 1, act="sigmoid")])

    deep = conv(g, g.node("GlobalAveragePool", [features[3]]), 32, 1, act="relu")
    x = g.add(
        refined(features[3]), resize_like(g, deep, features[3], mode="nearest", coordinates="asymmetric")
    )
    x = g.add(refined(features[2]), conv(g, resize(g, x), 32, act="relu"))
    x = conv(g, g.concat([spatial, conv(g, resize(g, x), 32, act="relu")]), 64, 1, act="relu")
    gate = conv(g, conv(g, mean(g, x, [2, 3]), 16, 1, act="relu"), 64, 1, act="sigmoid")
    x = conv(g, g.add(x, g.node("Mul", [x, gate])), 19, 1)
    return [resize(g, x, 8, mode="linear", coordinates="align_corners")]


def lraspp(g: GraphBuilder) -> list[str]:
    """LR-ASPP (Howard et al. 2019) on a narrow MobileNetV3: a gate of pooled maps, two scales."""
    image = g.input([1, 3, 128, 128])
    x = conv(g, image, 16, stride=2, act="hswish")
    x = inverted_residual(g, x, 16, 16, stride=2, act="relu", squeeze=8)
    low = inverted_residual(g, x, 72, 24, stride=2, act="relu")
    x = inverted_residual(g, low, 96, 40, 5, stride=2, act="hswish", squeeze=24)
    x = inverted_residual(g, x, 240, 96, 5, act="hswish", squeeze=64)
    gate = conv(g, g.node("GlobalAveragePool", [x]), 64, 1, act="sigmoid", bias=False)
    x = g.node("Mul", [conv(g, x, 64, 1, act="relu"), gate])
    x = resize_like(g, x, low)
    x = g.add(conv(g, low, 21, 1), conv(g, x, 21, 1))
    return [resize_like(g, x, image)]


def segformer(g: GraphBuilder) -> list[str]:
    """SegFormer-B0 (Xie et al. 2021), widths 16 and 32, two stages: attention over reduced maps."""
    x = g.input([1, 3, 64, 64])
    features = []
    for out, kernel, stride, reduction in [(16, 7, 4, 4), (32, 3, 2, 2)]:
        x = conv(g, x, out, kernel, stride=stride)
        h, w = g.shape(x)[2:]
        tokens = layer_norm(g, tokens_of(g, x))
        for _ in range(2):
            normalized = layer_norm(g, tokens)
            reduced = conv(g, maps_of(g, normalized, h, w), out, reduction, stride=reduction, pad=0)
            key = layer_norm(g, tokens_of(g, reduced))
            tokens = g.add(tokens, attend(g, normalized, out // 16, packed=False, key=key))
            y = maps_of(g, linear(g, layer_norm(g, tokens), 4 * out), h, w)
            y = linear(g, tokens_of(g, depthwise(g, y, act="erf_gelu")), out)
            tokens = g.add(tokens, y)
        x = maps_of(g, layer_norm(g, tokens), h, w)
        features.append(x)
    heads = [maps_of(g, linear(g, tokens_of(g, y), 32), *g.shape(y)[2:]) for y in features]
    heads[1] = resize_like(g, heads[1], heads[0])
    return [conv(g, conv(g, g.concat(heads[::-1]), 32, 1, act="relu"), 19, 1)]


def pspnet(g: GraphBuilder) -> list[str]:
    """PSPNet (Zhao et al. 2016), width 0.25: pools to 1, 2, 4 bins, Resize with align_corners."""
    x = _features(g, g.input([1, 3, 128, 128]), 16, dilated=True)[3]
    size, branches = g.shape(x)[2], [x]
    for bins in (1, 2, 4):
        kernel = size // bins
        y = g.node("GlobalAveragePool", [x]) if bins == 1 else average_pool(g, x, kernel, kernel)
        y = conv(g, y, 32, 1, act="relu")
        branches.append(resize(g, y, size / bins, mode="linear", coordinates="align_corners", by_sizes=True))
    x = conv(g, conv(g, g.concat(branches), 32, act="relu"), 21, 1)
    return [resize(g, x, 16, mode="linear", coordinates="align_corners", by_sizes=True)]


def fast_scnn(g: GraphBuilder) -> list[str]:
    """Fast-SCNN (Poudel et al. 2019), width 0.5: learning to downsample, feature fusion."""
    image = g.input([1, 3, 128, 128])
    x = conv(g, image, 16, stride=2, act="relu")
    for out in (24, 32):
        x = conv(g, depthwise(g, x, stride=2, act="relu"), out, 1, act="relu")
    high = x
    for out, stride in [(32, 2), (32, 1), (48, 2), (64, 1)]:
        x = inverted_residual(g, x, 6 * g.shape(x)[1], out, stride=stride, act="relu")
    up = resize(g, x, 4, mode="linear", coordinates="pytorch_half_pixel")
    up = conv(g, depthwise(g, up, dilation=4, act="relu"), 64, 1)
    x = g.relu(g.add(up, conv(g, high, 64, 1)))
    x = conv(g, depthwise(g, x, act="relu"), 64, 1, act="relu")
    return [g.node("Softmax", [resize_like(g, conv(g, x, 19, 1), image)], axis=1)]


def linknet(g: GraphBuilder) -> list[str]:
    """LinkNet (Chaurasia and Culurciello 2017), width 0.25: narrow deconvolutions, skipped maps added."""
    features = _features(g, g.input([1, 3, 96, 96]), 16)
    x = features[3]
    for skipped in (features[2], features[1], features[0]):
        hidden = g.shape(x)[1] // 4
        x = conv(g, x, hidden, 1, act="relu")
        x = deconv(g, x, hidden, 3, act="relu", output_padding=1)
        x = g.add(conv(g, x, g.shape(skipped)[1], 1, act="relu"), skipped)
    return [deconv(g, conv(g, deconv(g, x, 8, 3, act="relu", output_padding=1), 8, act="relu"), 2, 2, pad=0)]


def matting(g: GraphBuilder) -> list[str]:
    """A portrait matting network in MODNet's manner (Ke et al. 2020): cubic Resize, Clip of a sum."""
    image = g.input([1, 3, 96, 96])
    features = _features(g, image, 16)
    x = features[2]
    gate = linear(g, linear(g, mean(g, x, [2, 3], keep=False), 16, act="relu"), 64, act="sigmoid")
    gate = g.node("Unsqueeze", [gate, g.constant_node(np.array([2, 3]))])
    x = conv(g, g.node("Mul", [x, gate]), 32, act="relu")
    x = resize(g, x, 4, mode="cubic", coordinates="half_pixel")
    x = conv(g, g.concat([x, features[0]]), 16, act="relu")
    x = conv(g, resize(g, x, 4, mode="linear", coordinates="half_pixel"), 1)
    x = g.node("Div", [g.node("Add", [x, number(g, 1)]), number(g, 2)])
    return [g.node("Clip", [x, number(g, 0), number(g, 1)])]


def road_lanes(g: GraphBuilder) -> list[str]:
    """ERFNet-like (Romera et al. 2017): 3x1 and 1x3 convolutions with dilations, downsampling by Concat."""
    x = g.input([1, 64, 96, 3])
    x = transpose(g, x, 0, 3, 1, 2)
    for out in (16, 32):
        channels = g.shape(x)[1]
        x = g.relu(g.concat([conv(g, x, out - channels, stride=2), max_pool(g, x)]))
        for dilation in (1, 2):
            y = conv(g, conv(g, x, out, (3, 1), act="relu"), out, (1, 3), act="relu")
            y = conv(g, y, out, (3, 1), pad=(dilation, 0), dilation=dilation, act="relu")
            y = conv(g, y, out, (1, 3), pad=(0, dilation), dilation=dilation)
            x = g.relu(g.add(y, x))
    x = deconv(g, deconv(g, x, 16, act="relu"), 5)
    return [transpose(g, x, 0, 2, 3, 1)]


NETWORKS = [
    unet, unet_bilinear, attention_unet, deeplabv3plus, fcn, bisenet, lraspp, segformer, pspnet, fast_scnn,
    linknet, matting, road_lanes,
]  # fmt: skip
