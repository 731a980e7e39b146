"""Videos and volumes: 3-D convolutions, (2+1)-D ones, shifts along time."""

from __future__ import annotations

from ..graph import GraphBuilder
from .layers import (
    average_pool,
    classify,
    contracting_path,
    conv,
    deconv,
    linear,
    max_pool,
    mean,
    reshape,
    resize,
    slices,
    squeeze_excite,
    transpose,
)


def r3d(g: GraphBuilder) -> list[str]:
    """R3D-18 (Tran et al. 2017), width 0.25, one block a stage, 8 frames of 48x48."""
    x = conv(g, g.input([1, 3, 8, 48, 48]), 16, (3, 7, 7), stride=(1, 2, 2), act="relu")
    for out in (16, 32, 64):
        stride = 1 if out == 16 else 2
        y = conv(g, conv(g, x, out, stride=stride, act="relu"), out, gain=0.5)
        x = g.relu(g.add(y, x if stride == 1 else conv(g, x, out, 1, stride=stride)))
    return [classify(g, x)]


def r2plus1d(g: GraphBuilder) -> list[str]:
    """R(2+1)D-18 (Tran et al. 2017), width 0.25: convolutions over space, then over time."""
    x = conv(g, g.input([1, 3, 8, 48, 48]), 12, (1, 7, 7), stride=(1, 2, 2), act="relu")
    x = conv(g, x, 16, (3, 1, 1), act="relu")
    for out in (16, 32):
        stride, y = 1 if out == 16 else 2, x
        for index in range(2):
            step = stride if index == 0 else 1
            y = conv(g, y, 2 * out, (1, 3, 3), stride=(1, step, step), act="relu")
            y = conv(g, y, out, (3, 1, 1), stride=(step, 1, 1), act="" if index else "relu")
        x = g.relu(g.add(y, x if stride == 1 else conv(g, x, out, 1, stride=stride)))
    return [classify(g, x)]


def c3d(g: GraphBuilder) -> list[str]:
    """C3D (Tran et al. 2014), width 0.25, 8 frames of 32x32: plain 3-D convolutions and pools."""
    x = conv(g, g.input([1, 3, 8, 32, 32]), 16, act="relu")
    x = g.node("MaxPool", [x], kernel_shape=[1, 2, 2], strides=[1, 2, 2])
    for out in (32, 64, 64):
        x = max_pool(g, conv(g, x, out, act="relu"))
    return [linear(g, linear(g, g.flatten(x), 128, act="relu"), 50)]


def x3d(g: GraphBuilder) -> list[str]:
    """X3D-like (Feichtenhofer 2020), width 0.5: depthwise 3-D convolutions, squeeze-and-excite, SiLU."""
    x = conv(g, g.input([1, 3, 4, 48, 48]), 12, (1, 3, 3), stride=(1, 2, 2))
    x = conv(g, x, 12, (3, 1, 1), group=12, act="relu")
    for out in (12, 24):
        hidden = out * 9 // 4
        y = conv(g, x, hidden, 1, act="relu")
        y = conv(g, y, hidden, stride=(1, 2, 2), group=hidden)
        z = g.node("GlobalAveragePool", [y])
        y = g.node("Mul", [y, conv(g, conv(g, z, 8, 1, act="relu"), hidden, 1, act="sigmoid")])
        y = conv(g, g.node("Mul", [y, g.node("Sigmoid", [y])]), out, 1)
        x = g.relu(g.add(y, conv(g, x, out, 1, stride=(1, 2, 2))))
    return [classify(g, x)]


def unet_3d(g: GraphBuilder) -> list[str]:
    """3-D U-Net (Cicek et al. 2016), width 0.25, 16x32x32 voxels: ConvTranspose of three dims."""
    x, skipped = contracting_path(g, g.input([1, 1, 16, 32, 32]), (8, 16, 32))
    for y in reversed(skipped):
        out = g.shape(y)[1]
        x = conv(g, g.concat([deconv(g, x, 2 * out, 2, pad=0), y]), out, act="relu")
    return [conv(g, x, 3, 1)]


def vnet(g: GraphBuilder) -> list[str]:
    """V-Net-like (Milletari et al. 2016), width 8: 3-D residuals, elu, trilinear Resize."""
    x = conv(g, g.input([1, 1, 16, 24, 24]), 8, act="elu")
    low = conv(g, x, 16, 2, stride=2, pad=0, act="elu")
    low = g.add(low, conv(g, low, 16, act="elu"))
    up = resize(g, low, mode="linear", coordinates="half_pixel")
    x = g.add(x, conv(g, g.concat([x, up]), 8, act="elu"))
    return [g.node("Softmax", [conv(g, x, 2, 1)], axis=1)]


def temporal_shift(g: GraphBuilder) -> list[str]:
    """TSM (Lin et al. 2018), width 0.25: channels shifted along time by Slice, Pad and Concat; 4 frames."""
    x = max_pool(g, conv(g, g.input([4, 3, 64, 64]), 16, 7, stride=2, act="relu"), 3, 2, 1)
    for out in (16, 32):
        t, c, h, w = g.shape(x)
        y = reshape(g, x, 1, t, c, h, w)
        fold = c // 8
        later = slices(g, slices(g, y, 1, 1, t), 2, 0, fold)
        earlier = slices(g, slices(g, y, 1, 0, t - 1), 2, fold, 2 * fold)
        zero = g.constant(g.normal((1, 1, fold, h, w), 0), "zero")
        parts = [
            g.node("Concat", [later, zero], axis=1),
            g.node("Concat", [zero, earlier], axis=1),
            slices(g, y, 2, 2 * fold, c),
        ]
        y = reshape(g, g.node("Concat", parts, axis=2), t, c, h, w)
        stride = 1 if out == 16 else 2
        y = conv(g, conv(g, y, out, stride=stride, act="relu"), out, gain=0.5)
        x = g.relu(g.add(y, x if stride == 1 else conv(g, x, out, 1, stride=stride)))
    x = linear(g, g.flatten(g.node("GlobalAveragePool", [x])), 50)
    return [mean(g, reshape(g, x, 1, 4, 50), [1], keep=False)]


def point_net(g: GraphBuilder) -> list[str]:
    """PointNet (Qi et al. 2016), width 0.25: shared 1x1 convolutions over points, a maximum."""
    points = g.input([1, 3, 128], free={0: "batch"})
    x = points
    for out in (16, 32):
        x = conv(g, x, out, 1, act="relu")
    x = g.node("ReduceMax", [x], axes=[2], keepdims=0)
    matrix = g.known(reshape(g, linear(g, linear(g, x, 16, act="relu"), 9), -1, 3, 3), [1, 3, 3])
    x = g.node("MatMul", [transpose(g, points, 0, 2, 1), matrix])
    x = transpose(g, x, 0, 2, 1)
    for out in (16, 32, 256):
        x = conv(g, x, out, 1, act="relu")
    x = g.node("ReduceMax", [x], axes=[2], keepdims=0)
    return [linear(g, linear(g, x, 64, act="relu"), 40)]


def pillars(g: GraphBuilder) -> list[str]:
    """PointPillars-like (Lang et al. 2018), width 0.25: a pseudo image, three scales by ConvTranspose."""
    x, levels = g.input([1, 64, 64, 64]), []
    for out, scale in ((16, 1), (32, 2), (64, 4)):
        x = conv(g, conv(g, x, out, stride=2, act="relu"), out, act="relu")
        levels.append(deconv(g, x, 32, scale, stride=scale, pad=0, act="relu"))
    x = g.concat(levels)
    heads = [transpose(g, conv(g, x, width, 1), 0, 2, 3, 1) for width in (2, 14)]
    return [average_pool(g, squeeze_excite(g, x, 8), 4, 4), *heads]


NETWORKS = [r3d, r2plus1d, c3d, x3d, unet_3d, vnet, temporal_shift, point_net, pillars]
