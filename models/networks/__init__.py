"""Float32 graphs of standard networks: seeded weights, BatchNormalization folded where it can be."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from .densenet import densenet121
from .mobilenet import mobilenetv2
from .mobilenet_v3 import efficientnetb0, mobilenetv3large
from .resnet import resnet18, resnet50
from .vgg import vgg16
from .yolo import yolo11m, yolo11n, yolo11s, yolov8n

Network = Callable[[int, int | str, int], onnx.ModelProto]

NETWORKS: dict[str, Network] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "densenet121": densenet121,
    "vgg16": vgg16,
}
"""Name -> builder(image, batch, classes) of the float32 network."""

FLOAT_NETWORKS: dict[str, Network] = {
    "mobilenetv3large": mobilenetv3large,
    "efficientnetb0": efficientnetb0,
    "yolov8n": yolov8n,
    "yolo11n": yolo11n,
    "yolo11s": yolo11s,
    "yolo11m": yolo11m,
}
"""The same of networks that are written in float32 alone: their nodes need a quantizer that knows them."""

DETECTORS = ("yolov8n", "yolo11n", "yolo11s", "yolo11m")
"""Names of those that find objects."""

__all__ = ["DETECTORS", "FLOAT_NETWORKS", "NETWORKS", "Network"]
