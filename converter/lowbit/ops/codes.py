"""Quantization codes: their ranges, their integer values, their rounding and their packing.

Everything the definitions of the ops share. All real arithmetic is float32 and every operation rounds once:
numpy does exactly that as long as both operands are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.errors import LowBitError

Codes = npt.NDArray[Any]
"""uint8 codes, or int8 ones where the operand's encoding is ``signed``."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

ENCODINGS = ("unsigned", "signed", "bipolar")


def storage(encoding: str) -> np.dtype[np.generic]:
    """The element type of a tensor of codes: int8 for ``signed``, uint8 otherwise."""
    if encoding not in ENCODINGS:
        raise LowBitError(f"encoding must be one of {', '.join(ENCODINGS)}, got '{encoding}'")
    return np.dtype(np.int8 if encoding == "signed" else np.uint8)


def code_range(bits: int, encoding: str) -> tuple[int, int]:
    """The smallest and the largest code: [0, 2^bits - 1], or [-2^(bits-1), 2^(bits-1) - 1] for ``signed``."""
    if not 1 <= bits <= 8:
        raise LowBitError(f"a bit width must be 1..8, got {bits}")
    if encoding == "signed":
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def output_range(bits: int, encoding: str, low: Sequence[int], high: Sequence[int]) -> tuple[int, int]:
    """The clip bounds of output codes: those of the bit width, unless ``y_min``, ``y_max`` give a number."""
    smallest, largest = code_range(bits, encoding)
    return (low[0] if len(low) else smallest), (high[0] if len(high) else largest)


def low_bits(codes: Array, bits: int, encoding: str) -> Codes:
    """The codes that an operand of ``bits`` bits reads: the low bits of every stored byte.

    In two's complement for ``signed``. Codes inside the range of the operand stay as they are.
    """
    mask, flip = (1 << bits) - 1, 1 << (bits - 1) if encoding == "signed" else 0
    return (((codes.astype(np.int64) + flip) & mask) - flip).astype(codes.dtype)


def values(codes: Array, zero_point: Array | int, encoding: str = "unsigned") -> Ints:
    """The integer values that codes stand for: ``q - zero_point``, or ``2q - 1`` for bipolar codes.

    Zero points of shape [C] belong to the last dim.
    """
    q = codes.astype(np.int64)
    return 2 * q - 1 if encoding == "bipolar" else q - np.asarray(zero_point, np.int64)


def dequantize(codes: Array, scale: Array, zero_point: Array) -> Floats:
    """The real numbers that codes stand for: ``f32(q - zero_point) * scale``."""
    return values(codes, zero_point).astype(np.float32) * scale.astype(np.float32)


def saturate(rounded: Floats, zero_point: Array | int, low: int, high: int, encoding: str) -> Codes:
    """``clip(rounded + zero_point, low, high)`` as codes.

    The clip happens in float32, before the conversion to an integer, so that huge values are defined; a NaN
    becomes ``low`` (fmax returns its other operand then).
    """
    shifted = rounded + np.asarray(zero_point).astype(np.float32)
    clipped: Floats = np.fmin(np.fmax(shifted, np.float32(low)), np.float32(high))
    return clipped.astype(storage(encoding))


def quantize(
    real: Floats, scale: Array, zero_point: Array | int, low: int, high: int, encoding: str
) -> Codes:
    """``clip(rint(real / scale) + zero_point, low, high)``: a real float32 division, ties to even."""
    return saturate(np.rint(real / scale.astype(np.float32)), zero_point, low, high, encoding)


def quantize_or_float(
    real: Floats,
    y_scale: Array | None,
    y_zero_point: Array | None,
    y_bits: int,
    y_encoding: str,
    y_min: Sequence[int],
    y_max: Sequence[int],
) -> Array:
    """The end of the elementwise ops: codes, or ``real`` itself where the node has no ``y_scale``."""
    if y_scale is None:
        return real
    low, high = output_range(y_bits, y_encoding, y_min, y_max)
    return quantize(real, y_scale, 0 if y_zero_point is None else y_zero_point, low, high, y_encoding)


def row_bytes(k: int, bits: int) -> int:
    """Bytes of one packed weight row of ``k`` codes: every row starts on a byte."""
    return (k * bits + 7) // 8


def pack(codes: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Packs weight codes [rows, k] at ``bits`` bits each, least significant bit first, every row on a byte.

    Signed codes are stored in two's complement. Returns uint8 [rows * ceil(k * bits / 8)].
    """
    rows, k = codes.shape
    as_bits = np.unpackbits(codes.astype(np.uint8)[..., None], axis=2, bitorder="little")[..., :bits]
    return np.packbits(as_bits.reshape(rows, k * bits), axis=1, bitorder="little").reshape(-1)


def unpack(packed: Array, rows: int, k: int, bits: int, encoding: str) -> Ints:
    """The weight codes [rows, k] of a packed initializer: the inverse of :func:`pack`."""
    low, _ = code_range(bits, encoding)
    expected = rows * row_bytes(k, bits)
    if packed.size != expected:
        raise LowBitError(
            f"{rows} packed rows of {k} weights at {bits} bits are {expected} bytes, got {packed.size}"
        )
    by_row = packed.astype(np.uint8).reshape(rows, -1)
    as_bits = np.unpackbits(by_row, axis=1, bitorder="little")[:, : k * bits]
    codes: Ints = as_bits.reshape(rows, k, bits).astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))
    # Two's complement: in a signed code the top bit counts negative, so codes from 2^(bits-1) on wrap around.
    return np.where(codes >= (1 << (bits - 1)), codes - (1 << bits), codes) if low < 0 else codes
