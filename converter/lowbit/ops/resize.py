"""LowBitResize: nearest-neighbour resize of codes, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowbit.errors import LowBitError
from lowbit.ops.codes import Array, Floats


def low_bit_resize(
    x: Array,
    *,
    scales: Sequence[float] = (),
    sizes: Sequence[int] = (),
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    x_encoding: str = "unsigned",
) -> Array:
    """ONNX Resize, mode nearest, of the spatial dims of [N, D1.., C]; codes are copied.

    Args:
        scales: one per spatial dim; the output size is floor(size * scale).
        sizes: the output sizes; used when ``scales`` is empty.
    """
    for d, size in enumerate(x.shape[1:-1]):
        scale = np.float32(scales[d]) if len(scales) else None
        out = sizes[d] if scale is None else int(np.floor(np.float32(size) * scale))
        position = source_position(
            np.arange(out, dtype=np.float32), size, out, scale, coordinate_transformation_mode
        )
        index = np.clip(nearest(position, nearest_mode), 0, size - 1)
        x = np.take(x, index, axis=1 + d)
    return x


def source_position(o: Floats, size: int, out: int, scale: np.float32 | None, mode: str) -> Floats:
    """Where output index ``o`` lies in the image, in float32, each operation rounded once.

    ``scale`` is None where the node gives sizes; it is their ratio then. The ``asymmetric`` mode does without
    it, as in ONNX Runtime: a rounded ratio would move positions that lie halfway between two pixels.
    """
    half = np.float32(0.5)
    if mode == "asymmetric":
        return o * np.float32(size) / np.float32(out) if scale is None else o / scale
    if scale is None:
        scale = np.float32(out) / np.float32(size)
    if mode == "align_corners":
        return o * np.float32(size - 1) / np.float32(out - 1) if out > 1 else np.zeros_like(o)
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and out > 1):
        return (o + half) / scale - half
    if mode == "pytorch_half_pixel":
        return np.zeros_like(o)
    raise LowBitError(
        "coordinate_transformation_mode must be half_pixel, pytorch_half_pixel, align_corners or asymmetric, "
        f"got '{mode}'"
    )


def nearest(position: Floats, mode: str) -> npt.NDArray[np.int64]:
    """The pixel a position takes its code from; only ties distinguish the two round modes."""
    below = np.floor(position)
    fraction = position - below
    chosen = {
        "round_prefer_floor": np.where(fraction > 0.5, below + 1, below),
        "round_prefer_ceil": np.where(fraction >= 0.5, below + 1, below),
        "floor": below,
        "ceil": np.ceil(position),
    }
    if mode not in chosen:
        raise LowBitError(f"nearest_mode must be one of {', '.join(chosen)}, got '{mode}'")
    return chosen[mode].astype(np.int64)
