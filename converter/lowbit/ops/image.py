"""LowBitImage: pictures of any size, resized as Pillow resizes them and cut to shape, to codes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowbit.errors import LowBitError
from lowbit.ops.codes import Array, storage

WEIGHT_BITS = 22
MOST_PIXELS = 1 << 24
"""Of a side."""

_SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}
_ORDERS = {"rgb": [0, 1, 2], "bgr": [2, 1, 0], "gray": [0]}

Ints = npt.NDArray[np.int64]


def low_bit_image(
    x: Array,
    table: Array,
    *,
    resize: Sequence[int] = (),
    letterbox: Sequence[int] = (),
    centered: int = 1,
    fill: int = 0,
    crop: Sequence[int] = (),
    interpolation: str = "bilinear",
    order: str = "rgb",
    y_encoding: str = "unsigned",
) -> Array:
    """Gray where asked for, resized, cropped or put into a letterbox, channels in order, each byte looked up.

    Args:
        x: uint8 [N, H, W, 3] in RGB or [N, H, W, 1].
        table: uint8 [256], or one row for each channel of y; its bytes are the codes' bytes.
        resize: what the shorter side becomes, or height and width.
        letterbox: height and width into which the picture fits, its sides in proportion.
        centered: whether the picture stands in the middle of the letterbox, else at the top left.
        fill: the value of the pixels around it.
        crop: height and width of the middle that is kept.
        interpolation: "bilinear", "bicubic" or "nearest".
        order: "rgb", "bgr" or "gray".
        y_encoding: "unsigned" or "signed".

    Returns:
        Codes [N, height, width, 3], or of 1 channel in order "gray".

    Raises:
        LowBitError: for anything that does not fit the above, and for a picture smaller than the crop.
    """
    if x.ndim != 4 or x.dtype != np.uint8 or x.shape[3] not in (1, 3):
        raise LowBitError(f"x is {x.dtype} {list(x.shape)}, expected uint8 [N, H, W, 3] or [N, H, W, 1]")
    if not 1 <= min(x.shape[1:3]) <= max(x.shape[1:3]) <= MOST_PIXELS:
        raise LowBitError(f"x has the shape {list(x.shape)}, expected sides of 1..{MOST_PIXELS} pixels")
    if interpolation not in (*_SUPPORT, "nearest") or order not in _ORDERS:
        raise LowBitError(
            f"interpolation is '{interpolation}' and order '{order}', expected one of {', '.join(_SUPPORT)}, "
            f"nearest and one of {', '.join(_ORDERS)}"
        )
    if not 0 <= fill <= 255 or centered not in (0, 1):
        raise LowBitError(f"fill is {fill} and centered {centered}, expected 0..255 and 0 or 1")
    if letterbox and (resize or crop):
        raise LowBitError("letterbox says the whole size, expected no resize and no crop beside it")
    for name, sides in {"resize": resize, "letterbox": letterbox, "crop": crop}.items():
        lengths = (0, 1, 2) if name == "resize" else (0, 2)
        if len(sides) not in lengths or any(not 1 <= side <= MOST_PIXELS for side in sides):
            raise LowBitError(
                f"{name} is {list(sides)}, expected {' or '.join(map(str, lengths[1:]))} numbers from 1 to "
                f"{MOST_PIXELS}"
            )
    channels = _ORDERS[order]
    if table.shape not in ((256,), (1, 256), (len(channels), 256)):
        raise LowBitError(
            f"table has the shape {list(table.shape)}, expected [256] or [{len(channels)}, 256]"
        )

    pixels = x.astype(np.int64)
    if order == "gray" and x.shape[3] == 3:
        red, green, blue = np.split(pixels, 3, axis=3)
        pixels = (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16
    height, width = resized_size(x.shape[1], x.shape[2], resize, letterbox)
    gone = x.shape[1] - height
    rows_first = gone > 0 and gone > 2 * (x.shape[2] - width)
    for axis in (1, 2) if rows_first else (2, 1):
        pixels = _resampled(pixels, axis, (height, width)[axis - 1], interpolation)
    if letterbox:
        pixels = _boxed(pixels, letterbox, bool(centered), fill)
    if crop:
        pixels = _cropped(pixels, crop)
    pixels = pixels[..., channels] if pixels.shape[3] == 3 else np.repeat(pixels, len(channels), axis=3)
    rows = np.broadcast_to(table, (len(channels), 256))
    return rows[np.arange(len(channels)), pixels].view(storage(y_encoding))


def resized_size(
    height: int, width: int, resize: Sequence[int] = (), letterbox: Sequence[int] = ()
) -> tuple[int, int]:
    """What a picture is resized to, height and width, before it is cropped or put into a letterbox.

    The longer side is cut off to whole pixels, as torchvision does; in a letterbox it is rounded.
    """
    if len(resize) == 2:
        return resize[0], resize[1]
    if len(resize) == 1:
        short = resize[0]
        made = (
            short if height <= width else int(short * height / width),
            short if width <= height else int(short * width / height),
        )
        if max(made) > MOST_PIXELS:
            raise LowBitError(f"a picture of {height}x{width} is resized to {made[0]}x{made[1]}, too large")
        return made
    if not letterbox:
        return height, width
    high, wide = letterbox
    if high * width <= wide * height:
        return high, min(max((2 * width * high + height) // (2 * height), 1), wide)
    return min(max((2 * height * wide + width) // (2 * width), 1), high), wide


def _resampled(pixels: Ints, axis: int, out: int, interpolation: str) -> Ints:
    size = pixels.shape[axis]
    if out == size:
        return pixels
    if interpolation == "nearest":
        scale = size / out
        # Added up one by one, as sums are rounded.
        positions = np.add.accumulate(np.array([scale * 0.5] + [scale] * (out - 1)))
        nearest: Ints = np.take(pixels, np.minimum(positions.astype(np.int64), size - 1), axis)
        return nearest
    first, weights = _weights(size, out, interpolation)
    shape = [1] * pixels.ndim
    shape[axis] = out
    total = np.full(1, 1 << (WEIGHT_BITS - 1))
    for k in range(weights.shape[1]):  # the weights behind the last pixel are 0
        taken = np.take(pixels, np.minimum(first + k, size - 1), axis)
        total = total + taken * weights[:, k].reshape(shape)
    resampled: Ints = np.clip(total >> WEIGHT_BITS, 0, 255)
    return resampled


def _weights(size: int, out: int, interpolation: str) -> tuple[Ints, Ints]:
    """The first pixel that each output pixel is made of, and the weights from there on, [out, most]."""
    scale = size / out
    wide = max(scale, 1.0)
    support = _SUPPORT[interpolation] * wide
    center = (np.arange(out) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), size)
    index = first[:, None] + np.arange(min(2 * math.ceil(support) + 1, size))
    distance = np.abs((index - center[:, None] + 0.5) * (1.0 / wide))
    near = 1.0 - distance
    if interpolation == "bicubic":
        near = ((1.5 * distance - 2.5) * distance) * distance + 1.0
        far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
        near = np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))
    weight = np.where((index < last[:, None]) & (distance < _SUPPORT[interpolation]), near, 0.0)
    total = np.add.accumulate(weight, axis=1)[:, -1:]  # front to back
    weight = weight / np.where(total == 0.0, 1.0, total)
    return first, np.trunc(weight * (1 << WEIGHT_BITS) + np.where(weight < 0, -0.5, 0.5)).astype(np.int64)


def _boxed(pixels: Ints, letterbox: Sequence[int], centered: bool, fill: int) -> Ints:
    count, height, width, channels = pixels.shape
    boxed = np.full((count, *letterbox, channels), fill, np.int64)
    top, left = ((letterbox[0] - height) // 2, (letterbox[1] - width) // 2) if centered else (0, 0)
    boxed[:, top : top + height, left : left + width] = pixels
    return boxed


def _cropped(pixels: Ints, crop: Sequence[int]) -> Ints:
    height, width = pixels.shape[1:3]
    if height < crop[0] or width < crop[1]:
        raise LowBitError(f"a picture of {height}x{width} is smaller than the crop of {crop[0]}x{crop[1]}")
    top, left = round((height - crop[0]) / 2), round((width - crop[1]) / 2)
    return pixels[:, top : top + crop[0], left : left + crop[1]]
