"""`build`: a benchmark network with seeded weights, in float32 or quantized at any pair of bit widths."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx

from .calibration import Statistics, images, measure
from .networks import DETECTORS, FLOAT_NETWORKS, NETWORKS
from .quantization import activation_quantizers, layers_of, quantize_weights, write_qdq

_CALIBRATION_IMAGES = 2


# One entry: VGG-16 in float32 is half a gigabyte, and callers build the bit pairs of a network one after
# another.
@functools.lru_cache(maxsize=1)
def _calibrated(name: str, image: int, classes: int) -> tuple[onnx.ModelProto, dict[str, Statistics]]:
    model = NETWORKS[name](image, 1, classes)
    samples = images(_CALIBRATION_IMAGES, image)
    return model, measure(model, [samples[i : i + 1] for i in range(_CALIBRATION_IMAGES)])


def _with_batch(model: onnx.ModelProto, batch: int | str) -> onnx.ModelProto:
    for value in [*model.graph.input, *model.graph.output]:
        dim = value.type.tensor_type.shape.dim[0]
        if isinstance(batch, str):
            dim.dim_param = batch
        else:
            dim.dim_value = batch
    return model


def build(
    name: str,
    w_bits: int | None = None,
    a_bits: int | None = None,
    *,
    image: int | None = None,
    batch: int | str = 1,
    classes: int | None = None,
    layers_only: bool = False,
    ends: int | None = None,
) -> onnx.ModelProto:
    """Builds a network; equal arguments give equal bytes.

    Every convolution and fully connected layer, the first and the last included unless `ends` says
    otherwise, has the stated widths; so has every tensor between them. Only the logits stay at 8 bits.

    Args:
        name: A key of `NETWORKS`: resnet18, resnet50, mobilenetv2, densenet121, vgg16; or, in float32 alone,
            of `FLOAT_NETWORKS`: mobilenetv3large, efficientnetb0, yolov8n, yolo11n, yolo11s, yolo11m.
        w_bits: Weight width 1..8; None with `a_bits` None: the float32 network.
        a_bits: Activation width 1..8.
        image: Height and width of the input, a multiple of 32; None: 224, of a detector 640.
        batch: Batch size, or the name of a symbolic dimension.
        classes: Number of logits; None: 1000, of a detector 80.
        layers_only: Quantize only what convolutions and fully connected layers read; pools, Concat, Add and
            the logits stay float. For runtimes that do better, or only run, this way.
        ends: Bits of the weights of the first layer and the last one, and of what they read, 1..8; None: as
            all others.

    Returns:
        The model. Input `input` float32 [batch, 3, image, image], output `logits` float32 [batch, classes];
        of a detector `output0` float32 [batch, 4 + classes, cells], boxes first.

    Raises:
        ValueError: An unknown name, a width outside 1..8, only one width given, a width for a network that is
            built in float32 alone, or an image size that does not fit.
    """
    builders = {**NETWORKS, **FLOAT_NETWORKS}
    if name not in builders:
        raise ValueError(f"unknown network {name!r}; known: {', '.join(builders)}")
    image = image or (640 if name in DETECTORS else 224)
    classes = classes or (80 if name in DETECTORS else 1000)
    if image < 32 or image % 32:
        raise ValueError(f"image must be a multiple of 32, got {image}")
    if w_bits is None and a_bits is None:
        return builders[name](image, batch, classes)
    if name in FLOAT_NETWORKS:
        raise ValueError(
            f"{name} is built in float32 alone; quantize it with a tool, such as lowbit quantize"
        )
    if w_bits is None or a_bits is None or not 1 <= w_bits <= 8 or not 1 <= a_bits <= 8:
        raise ValueError(f"widths must be 1..8, or both None for float32; got {w_bits} and {a_bits}")
    if ends is not None and not 1 <= ends <= 8:
        raise ValueError(f"ends must be 1..8 or None, got {ends}")
    model, statistics = _calibrated(name, image, classes)
    quantizers = activation_quantizers(model, statistics, a_bits, ends=ends)
    if layers_only:
        read = {layer.input[0] for layer in layers_of(model)}
        quantizers = {tensor: quantizer for tensor, quantizer in quantizers.items() if tensor in read}
    return _with_batch(write_qdq(model, quantize_weights(model, w_bits, ends), quantizers), batch)


def save(model: onnx.ModelProto, path: str | Path) -> Path:
    """Writes a model with deterministic bytes; returns the path."""
    path = Path(path)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
