"""LowBitResize: resize of codes, channels last: nearest neighbour, linear or cubic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.errors import LowBitError
from lowbit.ops.codes import Array, Floats, output_range, saturate, values
from lowbit.ops.ties import ROUNDING, Attributes, Chain, real_values, step_of, ulps

_MODES = ("nearest", "linear", "cubic")


def low_bit_resize(
    x: Array,
    x_scale: Array | None = None,
    x_zero_point: Array | None = None,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    scales: Sequence[float] = (),
    sizes: Sequence[int] = (),
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    mode: str = "nearest",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """ONNX Resize of the spatial dims of [N, D1.., C].

    In mode nearest codes are copied, and x is the only input. The others replace every spatial dim, the first
    one first, by ``sum over taps of weight * number``, the first tap first, in float32, each product and each
    sum rounded once; the first numbers are ``f32(x - x_zero_point)``. The result is ``clip(rint(v *
    f32(x_scale / y_scale)) + y_zero_point, y_min, y_max)``.

    Args:
        scales: one per spatial dim; the output size is floor(size * scale).
        sizes: the output sizes; used when ``scales`` is empty.
    """
    if mode not in _MODES:
        raise LowBitError(f"mode must be one of {', '.join(_MODES)}, got '{mode}'")
    attributes = {
        "scales": scales,
        "sizes": sizes,
        "coordinate_transformation_mode": coordinate_transformation_mode,
        "mode": mode,
        "cubic_coeff_a": cubic_coeff_a,
        "exclude_outside": exclude_outside,
    }
    number = x if mode == "nearest" else values(x, _or_zero(x_zero_point)).astype(np.float32)
    for d, size in enumerate(x.shape[1:-1]):
        if mode == "nearest":
            index = np.clip(nearest(positions(attributes, d, size), nearest_mode), 0, size - 1)
            number = np.take(number, index, axis=1 + d)
        else:
            number = blend(number, 1 + d, *axis_taps(attributes, d, size))
    if mode == "nearest":
        return number
    if x_scale is None or y_scale is None:
        raise LowBitError(f"mode {mode} needs x_scale and y_scale")
    with np.errstate(all="ignore"):
        rounded = np.rint(number * (x_scale.astype(np.float32) / y_scale.astype(np.float32)))
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    return saturate(rounded, _or_zero(y_zero_point), low, high, y_encoding)


def _or_zero(zero_point: Array | None) -> Array:
    return np.zeros((), np.int32) if zero_point is None else zero_point


def positions(attributes: Mapping[str, Any], dim: int, size: int) -> Floats:
    """Where the output indices along a spatial dim lie in the image."""
    scales = attributes.get("scales", ())
    scale = np.float32(scales[dim]) if len(scales) else None
    out = attributes["sizes"][dim] if scale is None else int(np.floor(np.float32(size) * scale))
    mode = attributes.get("coordinate_transformation_mode", "half_pixel")
    return source_position(np.arange(out, dtype=np.float32), size, out, scale, mode)


def axis_taps(attributes: Mapping[str, Any], dim: int, size: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The pixels that mode linear or cubic adds up along a spatial dim, and their weights.

    Args:
        attributes: of a LowBitResize.
        dim: the spatial dim, counted from 0.
        size: its size.

    Returns:
        Two arrays [taps, out]: indices inside the dim, float32 weights.
    """
    position = positions(attributes, dim, size)
    if attributes.get("mode") == "linear":
        return linear_taps(position, size)
    exclude = bool(attributes.get("exclude_outside", 0))
    return cubic_taps(position, size, attributes.get("cubic_coeff_a", -0.75), exclude)


def blend(x: Array, axis: int, indices: Array, weights: Array) -> Array:
    """An axis replaced by weighted sums of its entries.

    Args:
        x: numbers of any shape.
        axis: the axis.
        indices: [taps, out], inside the axis.
        weights: [taps, out], of the type of x.
    """
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    with np.errstate(all="ignore"):
        products = [
            weight.reshape(shape) * np.take(x, index, axis=axis)
            for index, weight in zip(indices, weights, strict=True)
        ]
        total: Array = products[0]
        for product in products[1:]:
            total = total + product
    return total


def linear_taps(position: Floats, size: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The two pixels around every position, the image's edge beyond it, and their weights: [2, out]."""
    inside = np.clip(position, np.float32(0), np.float32(size - 1))
    below = np.floor(inside)
    fraction = inside - below
    index = below.astype(np.int64)
    indices = np.stack([index, np.minimum(index + 1, size - 1)])
    return indices, np.stack([np.float32(1) - fraction, fraction])


def cubic_taps(
    position: Floats, size: int, coefficient: float, exclude_outside: bool
) -> tuple[npt.NDArray[np.int64], Floats]:
    """The four pixels around every position and their weights: [4, out]."""
    a, one, two, three, four, five, eight = map(np.float32, (coefficient, 1, 2, 3, 4, 5, 8))
    below = np.floor(position)
    f = position - below
    g = one - f

    def outer(d: Floats) -> Floats:
        return ((a * d - five * a) * d + eight * a) * d - four * a

    def inner(d: Floats) -> Floats:
        return ((a + two) * d - (a + three)) * d * d + one

    indices = below.astype(np.int64) + np.arange(-1, 3)[:, None]
    weights = np.stack([outer(f + one), inner(f), inner(g), outer(g + one)])
    if exclude_outside:
        weights = np.where((indices < 0) | (indices >= size), np.float32(0), weights)
        with np.errstate(all="ignore"):
            weights = weights / (((weights[0] + weights[1]) + weights[2]) + weights[3])
    return np.clip(indices, 0, size - 1), weights


def source_position(o: Floats, size: int, out: int, scale: np.float32 | None, mode: str) -> Floats:
    """Where output index ``o`` lies in the image, in float32, each operation rounded once.

    ``half_pixel_symmetric`` adds up in float64 and rounds once, as ONNX Runtime does.
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
    if mode == "half_pixel_symmetric":
        length = np.float32(size)
        begin = length / np.float32(2) * (np.float32(1) - np.float32(out) / (scale * length))
        wide = np.float64(begin) + (o.astype(np.float64) + 0.5) / np.float64(scale) - 0.5
        return wide.astype(np.float32)
    raise LowBitError(
        "coordinate_transformation_mode must be half_pixel, pytorch_half_pixel, align_corners, asymmetric or "
        f"half_pixel_symmetric, got '{mode}'"
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


def resize_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array | None = None,
    x_zero_point: Array | None = None,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain | None:
    """The exact blend of pixels; None for ``nearest``, which only moves codes."""
    if attrs.get("mode", "nearest") == "nearest" or x_scale is None:
        return None
    zero_point = np.zeros((), np.int32) if x_zero_point is None else x_zero_point
    y_zero = np.zeros((), np.int32) if y_zero_point is None else y_zero_point
    value = real_values(x, x_scale, zero_point)
    # The terms of a formula that takes the zero point off at the end.
    size = np.abs(value) + np.abs(zero_point * x_scale.astype(np.float64))
    drift, count = np.zeros(x.shape), 4
    cubic = attrs["mode"] == "cubic"
    steep = 1 + abs(attrs.get("cubic_coeff_a", -0.75)) if cubic else 1.0
    for axis, length in enumerate(x.shape[1:-1], start=1):
        indices, weights = axis_taps(attrs, axis - 1, length)
        # A position is a few roundings off, and a weight by that times its slope and its own roundings.
        unsure = ROUNDING * steep * (12 * (np.abs(positions(attrs, axis - 1, length)) + 1) + 100 * cubic)
        drift = blend(drift, axis, indices, np.abs(weights))
        drift = drift + blend(size, axis, indices, np.broadcast_to(unsure, weights.shape))
        value, size = blend(value, axis, indices, weights), blend(size, axis, indices, np.abs(weights))
        count += 2 * len(indices)
    error = ulps(count, size, y_scale=y_scale, y_zero_point=y_zero) + drift
    return Chain(value, error, step_of(y_scale), size=size)
