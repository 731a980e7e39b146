"""LowBitConcat: concatenation of quantized tensors, each brought to the output's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, dequantize, output_range, quantize
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps


def low_bit_concat(
    x_scales: Array,
    x_zero_points: Array,
    y_scale: Array,
    y_zero_point: Array,
    *x: Array,
    axis: int,
    x_encodings: str = "",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """Every input requantized as LowBitRequantize does, then side by side along ``axis``.

    ``clip(rint((f32(x_i - x_zero_points[i]) * x_scales[i]) / y_scale) + y_zero_point, y_min, y_max)``; an
    input whose scale, zero point and encoding are the output's is copied unless y_min or y_max is given.
    """
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    encodings = x_encodings.split(",") if x_encodings else ["unsigned"] * len(x)
    clipped = bool(len(y_min) or len(y_max))
    parts = []
    for codes, scale, zero_point, encoding in zip(x, x_scales, x_zero_points, encodings, strict=True):
        same_grid = scale == y_scale and zero_point == y_zero_point and encoding == y_encoding
        if same_grid and not clipped:
            parts.append(codes)
        else:
            parts.append(
                quantize(dequantize(codes, scale, zero_point), y_scale, y_zero_point, low, high, y_encoding)
            )
    return np.concatenate(parts, axis=axis)


def concat_chain(
    attrs: Attributes, x_scales: Array, x_zero_points: Array, y_scale: Array, y_zero_point: Array, *x: Array
) -> Chain:
    """The real numbers side by side."""
    parts = [real_values(*part) for part in zip(x, x_scales, x_zero_points, strict=True)]
    value = np.concatenate(parts, axis=attrs["axis"])
    return Chain(value, ulps(4, value, y_scale=y_scale, y_zero_point=y_zero_point), step_of(y_scale))
