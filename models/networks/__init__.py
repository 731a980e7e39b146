"""Float32 graphs of standard image classifiers: seeded weights, BatchNormalization folded where it can be."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from .densenet import densenet121
from .mobilenet import mobilenetv2
from .resnet import resnet18, resnet50
from .vgg import vgg16

Network = Callable[[int, int | str, int], onnx.ModelProto]

NETWORKS: dict[str, Network] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "densenet121": densenet121,
    "vgg16": vgg16,
}
"""Name -> builder(image, batch, classes) of the float32 network."""

__all__ = ["NETWORKS", "Network"]
