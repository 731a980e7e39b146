"""LowBitAveragePool: average of a window of quantized values, channels last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, Floats, dequantize, quantize_or_float
from lowbit.ops.ties import Attributes, Chain, real_values, step_of, ulps
from lowbit.ops.windows import Windows


def low_bit_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    x_encoding: str = "unsigned",
    y_bits: int = 8,
    y_encoding: str = "unsigned",
    y_min: Sequence[int] = (),
    y_max: Sequence[int] = (),
) -> Array:
    """``v = (sum over w of (sum over h of f32(x - x_zero_point) * x_scale)) / f32(n)``, then quantized.

    The order of the float32 sums is part of the meaning: each column from the top, of volumes plane by plane
    from the front, then the columns from the left. n counts the taps inside the image, with
    ``count_include_pad`` those in the padding too (never those that ``ceil_mode`` reaches beyond the
    padding). 1-D images are one row.
    """
    windows = Windows.of(x, kernel_shape, strides, (), pads, ceil_mode)
    real = windows.padded(dequantize(x, x_scale, x_zero_point), 0)  # what lies outside adds a real zero

    columns: dict[int, Floats] = defaultdict(lambda: np.zeros((), np.float32))
    for tap, seen in windows.taps(real):
        columns[tap[-1]] = columns[tap[-1]] + seen
    total = np.zeros((), np.float32)
    for column in columns.values():  # in the order of the first row: from the left
        total = total + column

    with np.errstate(all="ignore"):
        average = total / windows.tap_counts(bool(count_include_pad))
        return quantize_or_float(average, y_scale, y_zero_point, y_bits, y_encoding, y_min, y_max)


def average_pool_chain(
    attrs: Attributes,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
) -> Chain:
    """The exact average of each window."""
    windows = Windows.of(
        x,
        attrs["kernel_shape"],
        attrs.get("strides", ()),
        (),
        attrs.get("pads", ()),
        attrs.get("ceil_mode", 0),
    )
    real = windows.padded(real_values(x, x_scale, x_zero_point), 0)
    taps = windows.tap_counts(bool(attrs.get("count_include_pad", 0))).astype(np.float64)
    value = np.add.reduce([seen for _, seen in windows.taps(real)]) / taps
    size = np.add.reduce([seen for _, seen in windows.taps(np.abs(real))]) / taps
    count = int(np.prod(attrs["kernel_shape"])) + 4
    error = ulps(count, size, y_scale=y_scale, y_zero_point=y_zero_point)
    return Chain(value, error, step_of(y_scale), size=size)
