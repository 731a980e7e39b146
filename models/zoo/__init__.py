"""A zoo of networks: architectures of the field with seeded weights, small, as exporters write them.

Widths and depths are reduced so that all of them can be quantized, converted and compared in a test run; each
function says by how much. Their outputs mean nothing; their graphs do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import onnx

from ..graph import GraphBuilder
from . import (
    audio,
    classifiers,
    detectors,
    images,
    mobile,
    ocr,
    pose,
    segmentation,
    transformers,
    volumes,
)

Network = Callable[[GraphBuilder], list[str]]

_FAMILIES = (mobile, classifiers, transformers, detectors, segmentation, ocr, images, pose, audio, volumes)

NETWORKS: dict[str, Network] = {
    function.__name__: function for module in _FAMILIES for function in module.NETWORKS
}
"""Name -> function that adds the network to a builder and returns its outputs."""

FAMILIES: dict[str, str] = {
    function.__name__: module.__name__.rpartition(".")[2]
    for module in _FAMILIES
    for function in module.NETWORKS
}
"""Name -> family, the file that it stands in."""

# What most exporters write today; the others need an operator of a later version, or stand for older files.
_OPSET = 17
_OPSETS = {
    **dict.fromkeys(("mlp_mixer", "efficientformer", "convnext_v2", "cvt"), 20),  # Gelu
    **dict.fromkeys(("nafnet", "shufflenet_v2", "yolov8", "poolformer"), 21),
    **dict.fromkeys(("deit_decomposed", "lenet", "googlenet", "centernet", "espcn", "m5", "blazeface"), 13),
    **dict.fromkeys(("cbam_resnet", "unet_3d", "crnn"), 18),
}

__all__ = ["FAMILIES", "NETWORKS", "build"]


def build(name: str) -> tuple[onnx.ModelProto, dict[str, list[int]]]:
    """Builds a network of the zoo in float32; equal names give equal bytes.

    Returns:
        The model, and the shape of every input: the sizes to feed where the model leaves dims open.

    Raises:
        ValueError: An unknown name.
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; known: {', '.join(NETWORKS)}")
    builder = GraphBuilder(name, zlib.crc32(name.encode()), _OPSETS.get(name, _OPSET))
    model = builder.model(NETWORKS[name](builder))
    return model, {value.name: builder.shape(value.name) for value in model.graph.input}
