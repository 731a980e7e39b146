"""MobileNetV3-Large (Howard et al. 2019) and EfficientNet-B0 (Tan and Le 2019), width 1.0."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..graph import GraphBuilder
from ..zoo.mobile import efficientnet_b0_on, mobilenet_v3_large_on

# What PyTorch's exporter writes by default.
_OPSET = 17


def _classifier(
    name: str,
    seed: int,
    add: Callable[[GraphBuilder, str, int], str],
    image: int,
    batch: int | str,
    classes: int,
) -> onnx.ModelProto:
    g = GraphBuilder(name, seed, _OPSET)
    logits = add(g, g.known("input", [1, 3, image, image]), classes)
    return g.finish(logits, (batch, 3, image, image), classes)


def mobilenetv3large(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """MobileNetV3-Large: 5.5 M parameters, 0.22 GMAC at 224x224."""
    return _classifier("mobilenetv3large", 3, mobilenet_v3_large_on, image, batch, classes)


def efficientnetb0(image: int = 224, batch: int | str = 1, classes: int = 1000) -> onnx.ModelProto:
    """EfficientNet-B0: 5.3 M parameters, 0.39 GMAC at 224x224."""
    return _classifier("efficientnetb0", 10, efficientnet_b0_on, image, batch, classes)
