"""VGG-16 (Simonyan and Zisserman 2014), configuration D."""

from __future__ import annotations

import onnx

from ..graph import GraphBuilder

_STAGES = [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]


def vgg16(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """VGG-16: 138 M parameters, 15.5 GMAC at 224x224.

    The first fully connected layer reads the last pool directly, so its width follows the image size.
    """
    builder = GraphBuilder("vgg16", seed=16)
    x, channels = "input", 3
    for width, layers in _STAGES:
        for _ in range(layers):
            x, channels = builder.relu(builder.conv(x, channels, width, 3, pad=1)), width
        x = builder.max_pool(x, 2, 2)
    features = channels * (image // 32) ** 2
    x = builder.relu(builder.gemm(builder.flatten(x), features, 4096, gain=1.4))
    x = builder.relu(builder.gemm(x, 4096, 4096, gain=1.4))
    return builder.finish(builder.gemm(x, 4096, classes), (batch, 3, image, image), classes)
