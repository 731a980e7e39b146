"""Elementwise, pooling and layout nodes with constants or attributes that cannot work: each is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support import require_native

native = require_native()

X = np.zeros((1, 3, 3, 4), np.uint8)
PICTURE, TABLE = np.zeros((1, 3, 3, 3), np.uint8), np.zeros(256, np.uint8)
ONE, ZERO = np.float32(1), np.int32(0)


def _f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _binary(
    a: Any = X,
    b: Any = X,
    *,
    a_scale: Any = ONE,
    a_zero_point: Any = ZERO,
) -> list[Any]:
    return [a, np.float32(a_scale), np.int32(a_zero_point), b, ONE, ZERO, ONE, ZERO]


def _affine(scale: np.ndarray, shift: np.ndarray) -> list[Any]:
    return [X, ONE, ZERO, scale, shift, ONE, ZERO]


def _threshold(rows: Any = ((0, 1, 2),), base: Any = 0, dir: Any = 1) -> list[Any]:
    return [
        X.astype(np.float32),
        np.array(rows, np.float32),
        np.array(base, np.int32),
        np.array(dir, np.int32),
    ]


BAD_NODES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "window wholly in the padding": ("LowBitMaxPool", {"kernel_shape": [3, 3], "pads": [3, 0, 0, 0]}, [X]),
    "window that overflows": ("LowBitMaxPool", {"kernel_shape": [2**40, 1]}, [X]),
    "window larger than the image": ("LowBitMaxPool", {"kernel_shape": [9, 9]}, [X]),
    "empty window": ("LowBitMaxPool", {"kernel_shape": [0, 1]}, [X]),
    "window of three dims": ("LowBitMaxPool", {"kernel_shape": [1, 1, 1]}, [X]),
    "stride 0": ("LowBitMaxPool", {"kernel_shape": [1, 1], "strides": [0, 1]}, [X]),
    "image without batch": ("LowBitMaxPool", {"kernel_shape": [2, 2]}, [X[0]]),
    "scale 0": ("LowBitAdd", {}, _binary(a_scale=0)),
    "scale NaN": ("LowBitAdd", {}, _binary(a_scale=math.nan)),
    "zero point out of range": ("LowBitAdd", {}, _binary(a_zero_point=300)),
    "shapes that do not broadcast": ("LowBitAdd", {}, _binary(b=X[:, :2])),
    "9 bits": ("LowBitAdd", {"y_bits": 9}, _binary()),
    "bounds in the wrong order": ("LowBitAdd", {"y_min": [5], "y_max": [3]}, _binary()),
    "bipolar operand": ("LowBitAdd", {"a_encoding": "bipolar"}, _binary()),
    "int8 codes declared unsigned": ("LowBitAdd", {}, _binary(a=X.astype(np.int8))),
    "255 real numbers": ("LowBitAdd", {}, [*_binary(), _f32(*[1] * 255)]),
    "a real number that is infinite": ("LowBitAdd", {}, [*_binary(), _f32(math.inf, *[1] * 255)]),
    "table of 255 entries": ("LowBitLookup", {}, [X, np.zeros(255, np.uint8)]),
    "tables for 3 of 4 channels": ("LowBitLookup", {}, [X, np.zeros((3, 256), np.uint8)]),
    "scales for 3 of 4 channels": ("LowBitAffine", {}, _affine(_f32(1, 2, 3), _f32(1))),
    "infinite factor": ("LowBitAffine", {}, _affine(_f32(*[math.inf] * 4), _f32(1))),
    "no factor": ("LowBitAffine", {}, _affine(_f32(), _f32(1))),
    "shifts for 3 of 4 channels": ("LowBitAffine", {}, _affine(_f32(1, 1, 1, 1), _f32(1, 1, 1))),
    "resize beyond all memory, by scale": ("LowBitResize", {"scales": [1e9, 1.0]}, [X]),
    "resize beyond all memory, by size": ("LowBitResize", {"sizes": [2**30, 2**30]}, [X]),
    "resize to nothing": ("LowBitResize", {"sizes": [0, 1]}, [X]),
    "resize by NaN": ("LowBitResize", {"scales": [math.nan, 1.0]}, [X]),
    "resize to less than a pixel": ("LowBitResize", {"scales": [0.1, 1.0]}, [X]),
    "resize to an unsaid size": ("LowBitResize", {}, [X]),
    "unknown rounding of coordinates": ("LowBitResize", {"sizes": [2, 2], "nearest_mode": "x"}, [X]),
    "pictures of four channels": ("LowBitImage", {}, [X, TABLE]),
    "a picture of floats": ("LowBitImage", {}, [PICTURE.astype(np.float32), TABLE]),
    "a picture without batch": ("LowBitImage", {}, [PICTURE[0], TABLE]),
    "a picture without pixels": ("LowBitImage", {}, [PICTURE[:, :0], TABLE]),
    "a picture resized to nothing": ("LowBitImage", {"resize": [0]}, [PICTURE, TABLE]),
    "a picture of three sides": ("LowBitImage", {"resize": [4, 4, 4]}, [PICTURE, TABLE]),
    "a picture beyond all memory": ("LowBitImage", {"resize": [2**24, 2**24]}, [PICTURE, TABLE]),
    "a picture with a longer side beyond bounds": (
        "LowBitImage",
        {"resize": [2**24]},
        [np.zeros((1, 1, 9, 3), np.uint8), TABLE],
    ),
    "a crop larger than the picture": ("LowBitImage", {"crop": [4, 3]}, [PICTURE, TABLE]),
    "a letterbox that is cropped": ("LowBitImage", {"letterbox": [4, 4], "crop": [3, 3]}, [PICTURE, TABLE]),
    "a filling of 9 bits": ("LowBitImage", {"letterbox": [4, 4], "fill": 256}, [PICTURE, TABLE]),
    "an unknown filter": ("LowBitImage", {"interpolation": "lanczos"}, [PICTURE, TABLE]),
    "an unknown order of colors": ("LowBitImage", {"order": "brg"}, [PICTURE, TABLE]),
    "tables for 2 of 3 channels": ("LowBitImage", {}, [PICTURE, np.zeros((2, 256), np.uint8)]),
    "block of nothing": ("LowBitDepthToSpace", {"blocksize": 0}, [X]),
    "block larger than all channels": ("LowBitDepthToSpace", {"blocksize": 3}, [X]),
    "block that overflows": ("LowBitDepthToSpace", {"blocksize": 2**40}, [X]),
    "channels to pixels of a vector": ("LowBitDepthToSpace", {"blocksize": 2}, [X[0, 0, 0]]),
    "unknown order of channels": ("LowBitDepthToSpace", {"blocksize": 2, "mode": "RCD"}, [X]),
    "axis beyond the rank": ("LowBitConcat", {"axis": 9}, [_f32(1), _i32(0), ONE, ZERO, X]),
    "unknown encodings": (
        "LowBitConcat",
        {"axis": 1, "x_encodings": "a,b"},
        [_f32(1), _i32(0), ONE, ZERO, X],
    ),
    "one scale for two inputs": ("LowBitConcat", {"axis": 1}, [_f32(1), _i32(0), ONE, ZERO, X, X]),
    "parts of different widths": (
        "LowBitConcat",
        {"axis": 1},
        [_f32(1, 1), _i32(0, 0), ONE, ZERO, X, X[..., :2]],
    ),
    "global pool of a vector": ("LowBitGlobalAveragePool", {}, [X[0, 0, 0], ONE, ZERO, ONE, ZERO]),
    "channels of a vector": ("LowBitQuantize", {"to_channels_last": 1}, [_f32(1), ONE, ZERO]),
    "quantizer of 3 of 4 channels": ("LowBitQuantize", {}, [X.astype(np.float32), _f32(1, 2, 3), ZERO]),
    "thresholds of a vector": ("LowBitThreshold", {"to_channels_last": 1}, [_f32(1), *_threshold()[1:]]),
    "thresholds for 3 of 4 channels": ("LowBitThreshold", {}, _threshold([[1]] * 3)),
    "thresholds for 3 channels, bases for 4": ("LowBitThreshold", {}, _threshold([[1]] * 3, base=[0] * 4)),
    "directions for 3 of 4 channels": ("LowBitThreshold", {}, _threshold([[1]] * 4, dir=[1] * 3)),
    "no thresholds": ("LowBitThreshold", {}, _threshold(np.zeros((1, 0)))),
    "thresholds for no channels": ("LowBitThreshold", {}, _threshold(np.zeros((0, 3)))),
    "256 thresholds": ("LowBitThreshold", {}, _threshold([np.arange(256)])),
    "thresholds in one dimension": ("LowBitThreshold", {}, _threshold([1, 2])),
    "threshold NaN": ("LowBitThreshold", {}, _threshold([[math.nan]])),
    "falling thresholds": ("LowBitThreshold", {}, _threshold([[1, 0]])),
    "rising thresholds of a falling channel": ("LowBitThreshold", {}, _threshold([[0, 1]], dir=-1)),
    "direction 2": ("LowBitThreshold", {}, _threshold(dir=2)),
    "direction 0": ("LowBitThreshold", {}, _threshold(dir=0)),
    "codes above the range": ("LowBitThreshold", {"y_bits": 2}, _threshold(base=1)),
    "codes below the range": ("LowBitThreshold", {"y_bits": 2}, _threshold(base=-1)),
    "base of another range": ("LowBitThreshold", {"y_bits": 2}, _threshold(base=2**31 - 1)),
    "bipolar thresholds": ("LowBitThreshold", {"y_bits": 1, "y_encoding": "bipolar"}, _threshold([[0]])),
    "too many channels for one row": (
        "LowBitThreshold",
        {},
        _threshold([np.arange(255)], base=np.zeros(70000)),
    ),
    "3 zero points for 4 scales": ("LowBitDequantize", {}, [X, _f32(1, 1, 1, 1), _i32(0, 0, 0)]),
    "grid of 3 of 4 channels": ("LowBitRequantize", {}, [X, _f32(1, 1, 1), ZERO, ONE, ZERO]),
    "unknown ceil_mode": (
        "LowBitAveragePool",
        {"kernel_shape": [2, 2], "ceil_mode": 3},
        [X, ONE, ZERO, ONE, ZERO],
    ),
    "average over an empty image": (
        "LowBitAveragePool",
        {"kernel_shape": [2, 2]},
        [np.zeros((1, 0, 3, 4), np.uint8), ONE, ZERO, ONE, ZERO],
    ),
}

WHAT_IS_WRONG = r"expected|must be|larger|makes|more than|does not|do not|cannot|axis|is needed"


@pytest.mark.parametrize("name", BAD_NODES)
def test_refused(name: str) -> None:
    op, attributes, inputs = BAD_NODES[name]
    with pytest.raises(native.LowBitError, match=WHAT_IS_WRONG):
        native.run(op, attributes, inputs)


@pytest.mark.parametrize("shape", [(0, 3, 3, 4), (1, 3, 3, 0), (2, 0, 3, 4)])
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.uint8)
    nodes = {
        "LowBitAdd": _binary(a=empty, b=empty),
        "LowBitDequantize": [empty, ONE, ZERO],
        "LowBitAffine": [empty, ONE, ZERO, ONE, ONE, ONE, ZERO],
        "LowBitQuantize": [empty.astype(np.float32), ONE, ZERO],
        "LowBitThreshold": [empty.astype(np.float32), *_threshold()[1:]],
    }
    for op, inputs in nodes.items():
        assert native.run(op, {}, inputs).shape == shape
