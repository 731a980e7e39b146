"""DenseNet-121 (Huang et al. 2016)."""

from __future__ import annotations

import onnx

from ..graph import GraphBuilder

_GROWTH = 32


def densenet121(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """DenseNet-121: 8.0 M parameters, 2.8 GMAC at 224x224.

    A dense layer is BatchNormalization - Relu - 1x1 - BatchNormalization - Relu - 3x3. Its first
    normalization reads a Concat that other layers read too, so it cannot be folded into a convolution; its
    second one is folded.
    """
    builder = GraphBuilder("densenet121", seed=121)
    x = builder.max_pool(builder.relu(builder.conv("input", 3, 64, 7, stride=2, pad=3)), 3, 2, 1)
    channels = 64
    for block, layers in enumerate([6, 12, 24, 16]):
        for _ in range(layers):
            y = builder.relu(builder.batch_norm(x, channels))
            y = builder.relu(builder.conv(y, channels, 4 * _GROWTH, 1))
            y = builder.conv(y, 4 * _GROWTH, _GROWTH, 3, pad=1, bias=False)
            x, channels = builder.concat([x, y]), channels + _GROWTH
        if block < 3:
            y = builder.relu(builder.batch_norm(x, channels))
            channels //= 2
            x = builder.average_pool(builder.conv(y, 2 * channels, channels, 1, bias=False), 2, 2)
    x = builder.relu(builder.batch_norm(x, channels))
    return builder.finish(builder.classifier(x, channels, classes), (batch, 3, image, image), classes)
