"""Images in, images out: super-resolution, denoising, style, depth, generators."""

from __future__ import annotations

import numpy as np

from ..graph import GraphBuilder
from .layers import (
    activation,
    conv,
    deconv,
    depthwise,
    instance_norm,
    linear,
    number,
    reshape,
    resize,
    resize_like,
    transpose,
)


def espcn(g: GraphBuilder) -> list[str]:
    """ESPCN (Shi et al. 2016): tanh, DepthToSpace; luminance of 64x64."""
    x = conv(g, g.input([1, 1, 64, 64]), 64, 5, act="tanh")
    x = conv(g, conv(g, x, 32, act="tanh"), 9)
    return [g.node("DepthToSpace", [x], blocksize=3, mode="CRD")]


def subpixel_reshape(g: GraphBuilder) -> list[str]:
    """A sub-pixel network whose pixel shuffle is Reshape, Transpose, Reshape, as older exporters write it."""
    x = g.input([1, 1, 48, 48])
    for out in (32, 32):
        x = conv(g, x, out, act="relu")
    n, _, h, w = g.shape(x)
    y = transpose(g, reshape(g, conv(g, x, 4), n, 1, 2, 2, h, w), 0, 1, 4, 2, 5, 3)
    return [reshape(g, y, n, 1, 2 * h, 2 * w)]


def fsrcnn(g: GraphBuilder) -> list[str]:
    """FSRCNN (Dong et al. 2016), d 56, s 12, m 4: PRelu, a ConvTranspose of 9x9."""
    x = conv(g, g.input([1, 1, 48, 48]), 56, 5, act="prelu")
    x = conv(g, x, 12, 1, act="prelu")
    for _ in range(4):
        x = conv(g, x, 12, act="prelu")
    return [deconv(g, conv(g, x, 56, 1, act="prelu"), 1, 9, stride=2, pad=4, output_padding=1)]


def edsr(g: GraphBuilder) -> list[str]:
    """EDSR (Lim et al. 2017), width 32 of 64, 4 of 16 blocks: scaled residuals, DepthToSpace."""
    x = head = conv(g, g.input([1, 3, 48, 48]), 32)
    for _ in range(4):
        y = conv(g, conv(g, x, 32, act="relu"), 32)
        x = g.add(x, g.node("Mul", [y, number(g, 0.1)]))
    x = conv(g, g.add(conv(g, x, 32), head), 128)
    return [conv(g, g.node("DepthToSpace", [x], blocksize=2, mode="CRD"), 3)]


def srvgg(g: GraphBuilder) -> list[str]:
    """SRVGGNet (the compact network of Real-ESRGAN, 2021), width 32: PRelu, DepthToSpace, nearest Resize."""
    image = g.input([1, 3, 48, 48], free={0: "batch", 2: "height", 3: "width"})
    x = conv(g, image, 32, act="prelu")
    for _ in range(4):
        x = conv(g, x, 32, act="prelu")
    x = g.node("DepthToSpace", [conv(g, x, 48)], blocksize=4, mode="CRD")
    return [g.add(x, resize(g, image, 4))]


def dncnn(g: GraphBuilder) -> list[str]:
    """DnCNN (Zhang et al. 2016), width 32, 6 layers: subtracts the noise."""
    x = image = g.input([1, 1, 64, 64])
    x = conv(g, x, 32, act="relu")
    for _ in range(4):
        x = conv(g, x, 32, act="relu", norm=True)
    return [g.node("Sub", [image, conv(g, x, 1)])]


def style_transfer(g: GraphBuilder) -> list[str]:
    """Fast style transfer (Johnson et al. 2016), width 0.5: reflecting Pads, InstanceNormalization, tanh."""

    def padded(x: str, out: int, kernel: int, stride: int = 1) -> str:
        edge = kernel // 2
        pads = g.constant_node(np.array([0, 0, edge, edge] * 2))
        return conv(g, g.node("Pad", [x, pads], mode="reflect"), out, kernel, stride=stride, pad=0)

    x = g.relu(instance_norm(g, padded(g.input([1, 3, 96, 96]), 16, 9)))
    for out in (32, 64):
        x = g.relu(instance_norm(g, padded(x, out, 3, 2)))
    for _ in range(2):
        y = g.relu(instance_norm(g, padded(x, 64, 3)))
        x = g.add(instance_norm(g, padded(y, 64, 3)), x)
    for out in (32, 16):
        x = g.relu(instance_norm(g, padded(resize(g, x), out, 3)))
    return [g.node("Tanh", [padded(x, 3, 9)])]


def dcgan(g: GraphBuilder) -> list[str]:
    """The generator of DCGAN (Radford et al. 2015), width 0.25: ConvTranspose from noise."""
    x = linear(g, g.input([1, 64], free={0: "batch"}), 128 * 16)
    x = g.known(reshape(g, x, -1, 128, 4, 4), [1, 128, 4, 4])
    x = g.relu(g.batch_norm(x, 128))
    for out in (64, 32, 16):
        x = deconv(g, x, out, act="relu")
    return [deconv(g, x, 3, act="tanh")]


def autoencoder(g: GraphBuilder) -> list[str]:
    """A convolutional autoencoder with elu and a fully connected waist, Softplus for the deviation."""
    x = g.input([1, 3, 32, 32])
    for out in (16, 32, 64):
        x = conv(g, x, out, stride=2, act="elu")
    x = g.flatten(x)
    mean, deviation = linear(g, x, 32), linear(g, x, 32, act="softplus")
    x = linear(g, g.add(mean, deviation), 1024, act="relu")
    x = reshape(g, x, 1, 64, 4, 4)
    for out in (32, 16):
        x = deconv(g, x, out, act="elu")
    return [deconv(g, x, 3, act="sigmoid"), mean]


def fast_depth(g: GraphBuilder) -> list[str]:
    """FastDepth (Wofk et al. 2019), width 0.5: MobileNet, 5x5 depthwise, nearest Resize, skips added."""
    x, skipped = conv(g, g.input([1, 3, 96, 96]), 16, stride=2, act="relu6"), []
    for out in (32, 64, 128, 256):
        skipped.append(x)
        x = conv(g, depthwise(g, x, stride=2, act="relu6"), out, 1, act="relu6")
    for y in reversed(skipped):
        out = g.shape(y)[1]
        x = resize(g, conv(g, depthwise(g, x, 5, act="relu"), out, 1, act="relu"))
        x = g.add(x, y)
    return [resize(g, conv(g, x, 1, 1, act="relu"))]


def monodepth(g: GraphBuilder) -> list[str]:
    """Monodepth2-like (Godard et al. 2018), width 0.25: edge Pads, elu, bilinear Resize."""

    def padded(x: str, out: int, act: str) -> str:
        pads = g.constant_node(np.array([0, 0, 1, 1] * 2))
        return conv(g, g.node("Pad", [x, pads], mode="edge"), out, pad=0, act=act)

    image = g.input([1, 3, 96, 128])
    x, skipped = conv(g, image, 16, 7, stride=2, act="relu"), []
    for out in (16, 32, 64):
        skipped.append(x)
        y = conv(g, conv(g, x, out, stride=2, act="relu"), out, gain=0.5)
        x = g.relu(g.add(y, conv(g, x, out, 1, stride=2)))
    for y in reversed(skipped):
        x = resize(g, padded(x, 16, "elu"), mode="linear", coordinates="half_pixel")
        x = padded(g.concat([x, y]), 16, "elu")
    x = resize_like(g, padded(x, 1, "sigmoid"), image)
    x = g.node("Add", [g.node("Mul", [x, number(g, 9.99)]), number(g, 0.01)])
    return [g.node("Reciprocal", [x])]


def low_light(g: GraphBuilder) -> list[str]:
    """Zero-DCE (Guo et al. 2020), width 16: a curve that is applied to the image eight times."""
    image = g.node("Clip", [g.input([1, 3, 64, 64]), number(g, 0), number(g, 1)])
    features = [conv(g, image, 16, act="relu")]
    for _ in range(3):
        features.append(conv(g, features[-1], 16, act="relu"))
    x = conv(g, g.concat([features[2], features[3]]), 16, act="relu")
    curves = conv(g, g.concat([features[0], x]), 24, act="tanh")
    parts = g.nodes("Split", [curves, g.constant_node(np.array([3] * 8))], 8, axis=1)
    x = image
    for curve in parts:
        square = g.node("Pow", [x, number(g, 2)])
        x = g.add(x, g.node("Mul", [curve, g.node("Sub", [square, x])]))
    return [x]


def nafnet(g: GraphBuilder) -> list[str]:
    """NAFNet (Chen et al. 2022), width 16: products of halves, LayerNorm as its formula."""

    def normalized(y: str) -> str:
        axes = g.constant_node(np.array([1]))
        centred = g.node("Sub", [y, g.node("ReduceMean", [y, axes], keepdims=1)])
        variance = g.node("ReduceMean", [g.node("Mul", [centred, centred]), axes], keepdims=1)
        root = g.node("Sqrt", [g.node("Add", [variance, number(g, 1e-6)])])
        scale = g.constant(1 + g.normal((1, 16, 1, 1), 0.1), "gamma")
        return g.node("Mul", [g.node("Div", [centred, root]), scale])

    image = g.input([1, 3, 48, 48])
    x = conv(g, image, 16)
    for _ in range(3):
        y = depthwise(g, conv(g, normalized(x), 32, 1))
        y = g.node("Mul", g.nodes("Split", [y], 2, axis=1, num_outputs=2))
        y = g.node("Mul", [y, conv(g, g.node("GlobalAveragePool", [y]), 16, 1)])
        x = g.add(x, conv(g, y, 16, 1))
        y = conv(g, normalized(x), 32, 1)
        y = g.node("Mul", g.nodes("Split", [y], 2, axis=1, num_outputs=2))
        x = g.add(x, conv(g, y, 16, 1))
    return [g.add(conv(g, x, 3), image)]


def implicit_field(g: GraphBuilder) -> list[str]:
    """A small implicit field: sines of coordinates, fully connected layers, a skipped Concat."""
    points = g.input([256, 3], free={0: "points"})
    x = g.node("MatMul", [points, g.constant(g.normal((3, 16), 2), "frequencies")])
    x = encoded = g.node("Concat", [g.node("Sin", [x]), g.node("Cos", [x])], axis=-1)
    for index in range(4):
        x = linear(g, x, 64, act="relu")
        x = g.node("Concat", [x, encoded], axis=-1) if index == 1 else x
    return [activation(g, linear(g, x, 3), "sigmoid"), linear(g, x, 1, act="softplus")]


NETWORKS = [
    espcn, subpixel_reshape, fsrcnn, edsr, srvgg, dncnn, style_transfer, dcgan, autoencoder, fast_depth,
    monodepth, low_light, nafnet, implicit_field,
]  # fmt: skip
