"""ResNet-18 and ResNet-50 v1.5 (He et al. 2015; v1.5: a bottleneck's stride is on its 3x3)."""

from __future__ import annotations

import onnx

from ..graph import GraphBuilder

# The last convolution of a block and the projection get smaller weights, so that the sum of many residual
# branches keeps its variance: what the trained BatchNormalization does.
_BRANCH_GAIN = 0.35
_PROJECTION_GAIN = 0.7


def _stem(builder: GraphBuilder) -> str:
    return builder.max_pool(builder.relu(builder.conv("input", 3, 64, 7, stride=2, pad=3)), 3, 2, 1)


def resnet18(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """ResNet-18: 11.7 M parameters, 1.8 GMAC at 224x224."""
    builder = GraphBuilder("resnet18", seed=18)
    x, channels = _stem(builder), 64
    for stage, width in enumerate([64, 128, 256, 512]):
        for block in range(2):
            stride = 2 if block == 0 and stage > 0 else 1
            y = builder.relu(builder.conv(x, channels, width, 3, stride=stride, pad=1))
            y = builder.conv(y, width, width, 3, pad=1, gain=_BRANCH_GAIN)
            if stride != 1 or channels != width:
                x = builder.conv(x, channels, width, 1, stride=stride, gain=_PROJECTION_GAIN)
            x, channels = builder.relu(builder.add(y, x)), width
    return builder.finish(builder.classifier(x, channels, classes), (batch, 3, image, image), classes)


def resnet50(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """ResNet-50 v1.5: 25.5 M parameters, 4.1 GMAC at 224x224."""
    builder = GraphBuilder("resnet50", seed=50)
    x, channels = _stem(builder), 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            y = builder.relu(builder.conv(x, channels, width, 1))
            y = builder.relu(builder.conv(y, width, width, 3, stride=stride, pad=1))
            y = builder.conv(y, width, 4 * width, 1, gain=_BRANCH_GAIN)
            if block == 0:
                x = builder.conv(x, channels, 4 * width, 1, stride=stride, gain=_PROJECTION_GAIN)
            x, channels = builder.relu(builder.add(y, x)), 4 * width
    return builder.finish(builder.classifier(x, channels, classes), (batch, 3, image, image), classes)
