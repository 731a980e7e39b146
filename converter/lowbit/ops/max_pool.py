"""LowBitMaxPool: maximum of the codes of a window, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.ops.codes import Array, code_range
from lowbit.ops.windows import Windows


def low_bit_max_pool(
    x: Array,
    *,
    kernel_shape: Sequence[int],
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    dilations: Sequence[int] = (),
    ceil_mode: int = 0,
    x_encoding: str = "unsigned",
) -> Array:
    """The largest code in the window [N, D1.., C]; taps outside the image do not take part."""
    windows = Windows.of(x, kernel_shape, strides, dilations, pads, ceil_mode)
    smallest, _ = code_range(8, x_encoding)
    largest: Array = np.maximum.reduce([seen for _, seen in windows.taps(windows.padded(x, smallest))])
    return largest
