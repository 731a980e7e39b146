"""Quantization facts as plain data, and the two functions that give them their meaning.

A *grid* says which real number a code stands for; a *code range* says which codes can occur. Both are read
from a model once (:mod:`lowbit.graph.normal_form`) and passed on unchanged: no arithmetic on scales happens
in the converter except where a docstring says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

CODE_TYPES = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT2: (0, 3),
    ir.DataType.INT2: (-2, 1),
}
"""The element types of codes that lowbit reads, with their ranges."""


@dataclass(frozen=True)
class Grid:
    """The real numbers of a quantized tensor: ``scale * (code - zero_point)``.

    Attributes:
        scale: float32, of shape () or [C]; finite and positive.
        zero_point: int32 of the same shape.
        axis: the axis of the C parameters; None for one pair of parameters.
    """

    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int32]
    axis: int | None = None

    @property
    def per_tensor(self) -> bool:
        """Whether one scale and one zero point serve the whole tensor."""
        return self.axis is None

    def equals(self, other: Grid) -> bool:
        """Whether both grids give every code the same meaning."""
        return (
            self.axis == other.axis
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )

    def with_axis(self, axis: int) -> Grid:
        """The grid after its axis has moved; a per-tensor grid has none and stays."""
        return self if self.axis is None else Grid(self.scale, self.zero_point, axis)


@dataclass(frozen=True)
class CodeRange:
    """The codes that can occur in a tensor: ``low..high``, as stored in the model's own element type.

    Attributes:
        dtype: their element type.
        low: the smallest.
        high: the largest.
        bipolar: whether they are -1 and +1 and nothing between, on a grid with zero point 0.
    """

    dtype: ir.DataType
    low: int
    high: int
    bipolar: bool = False

    @classmethod
    def of(cls, dtype: ir.DataType) -> CodeRange:
        """All codes of an element type."""
        low, high = CODE_TYPES[dtype]
        return cls(dtype, low, high)

    def clipped(self, low: int, high: int) -> CodeRange:
        """The range behind a Clip. Bounds outside the range do not widen it; crossed ones leave ``high``."""
        top = min(max(self.low, high), self.high)
        bottom = min(max(self.low, low), top)
        return self if (bottom, top) == (self.low, self.high) else CodeRange(self.dtype, bottom, top)

    def union(self, other: CodeRange) -> CodeRange:
        """The codes of two tensors of one element type."""
        both = self.bipolar and other.bipolar
        return CodeRange(self.dtype, min(self.low, other.low), max(self.high, other.high), both)


def bits_of(low: int, high: int, *, signed: bool) -> int:
    """The smallest bit width whose codes include ``low..high``.

    Args:
        low: smallest code; not negative unless ``signed``.
        high: largest code.
        signed: two's complement, ``[-2^(bits-1), 2^(bits-1))``, instead of ``[0, 2^bits)``.

    Returns:
        1 or more; more than 8 where no code type fits.
    """
    if signed:
        return max(1, 1 + max(high, -low - 1).bit_length())
    return max(1, high.bit_length())


def quantize_scalar(value: float, grid: Grid, low: int, high: int) -> int:
    """``clip(rint(value / scale) + zero_point, low, high)`` in float32, as QuantizeLinear defines it.

    Args:
        value: one real number; infinities are welcome.
        grid: a per-tensor grid.
        low: smallest code.
        high: largest code.
    """
    with np.errstate(over="ignore"):
        shifted = np.rint(np.float32(value) / grid.scale) + grid.zero_point.astype(np.float32)
    return int(min(max(shifted, low), high))


def differences(codes: npt.NDArray[np.integer], grid: Grid) -> npt.NDArray[np.int64]:
    """``code - zero_point``, exact; arguments as in :func:`dequantize_array`."""
    exact: npt.NDArray[np.int64] = codes.astype(np.int64) - _along(grid.axis, grid.zero_point, codes.ndim)
    return exact


def survives_half(grid: Grid, codes: CodeRange) -> bool:
    """Whether every code is itself again after DequantizeLinear and QuantizeLinear in float16.

    DequantizeLinear rounds its product to float16 once. QuantizeLinear divides in float32 in ONNX Runtime and
    in float16 by the letter of ONNX: both must find the code, which they do unless products overflow.
    """
    scale, zero_point = grid.scale.reshape(-1, 1), grid.zero_point.reshape(-1, 1)
    given = np.arange(codes.low, codes.high + 1)
    with np.errstate(over="ignore", invalid="ignore"):
        reals = ((given - zero_point).astype(np.float32) * scale).astype(np.float16)
        quotients = (reals.astype(np.float32) / scale, (reals / scale.astype(np.float16)).astype(np.float32))
        found = [np.rint(quotient) + zero_point for quotient in quotients]
    return all(np.array_equal(each, np.broadcast_to(given, each.shape)) for each in found)


def dequantize_array(codes: npt.NDArray[np.integer], grid: Grid) -> npt.NDArray[np.float32]:
    """``f32(code - zero_point) * scale``, as DequantizeLinear defines it.

    Args:
        codes: integers of any shape; its ``grid.axis`` has as many entries as the grid's parameters.
        grid: the codes' grid.

    Returns:
        float32 of the shape of ``codes``.
    """
    scale = _along(grid.axis, grid.scale, codes.ndim)
    result: npt.NDArray[np.float32] = differences(codes, grid).astype(np.float32) * scale
    return result


def _along(axis: int | None, parameters: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
    """Parameters in a shape that broadcasts along their axis of a tensor."""
    return parameters if axis is None else parameters.reshape([-1 if i == axis else 1 for i in range(rank)])
