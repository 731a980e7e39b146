"""MobileNetV2 (Sandler et al. 2018), width 1.0."""

from __future__ import annotations

import onnx

from ..graph import GraphBuilder

# Expansion, output channels, blocks, stride of the first block: table 2 of the paper.
_STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]

# The linear projection ends a block without an activation, which would halve the variance that He's rule
# doubles.
_PROJECTION_GAIN = 0.7


def mobilenetv2(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """MobileNetV2: 3.5 M parameters, 0.30 GMAC at 224x224."""
    builder = GraphBuilder("mobilenetv2", seed=2)
    x, channels = builder.relu6(builder.conv("input", 3, 32, 3, stride=2, pad=1)), 32
    for expansion, width, blocks, first_stride in _STAGES:
        for block in range(blocks):
            stride, hidden, y = first_stride if block == 0 else 1, channels * expansion, x
            if expansion != 1:
                y = builder.relu6(builder.conv(y, channels, hidden, 1))
            y = builder.relu6(builder.conv(y, hidden, hidden, 3, stride=stride, pad=1, group=hidden))
            y = builder.conv(y, hidden, width, 1, gain=_PROJECTION_GAIN)
            x = builder.add(x, y) if stride == 1 and channels == width else y
            channels = width
    x = builder.relu6(builder.conv(x, channels, 1280, 1))
    return builder.finish(builder.classifier(x, 1280, classes), (batch, 3, image, image), classes)
