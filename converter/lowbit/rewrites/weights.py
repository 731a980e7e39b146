"""Constant weights: their rows, their narrowest encoding, and the bound on what they sum up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.constants import constant
from lowbit.graph.normal_form import NormalForm
from lowbit.graph.quantization import CodeRange, Grid, bits_of
from lowbit.graph.reasons import Refusal

Ints = npt.NDArray[np.integer[Any]]

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Weights:
    """Weight codes, one row per output channel.

    Attributes:
        codes: [out_channels, K]; K runs over (kernel..., input channel of the group).
        scale: float32, () or [out_channels].
        zero_point: int32 of the same shape.
    """

    codes: Ints
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int32]

    @property
    def rows(self) -> int:
        """Number of output channels."""
        return int(self.codes.shape[0])

    @property
    def values(self) -> npt.NDArray[np.int16]:
        """The integers that the codes stand for, [out_channels, K]."""
        zero_point = self.zero_point.reshape(-1, 1) if self.zero_point.ndim else self.zero_point
        return self.codes.astype(np.int16) - zero_point.astype(np.int16)

    def permuted(self, columns: npt.NDArray[np.intp]) -> Weights:
        """The same weights for an input whose elements come in another order."""
        return Weights(self.codes[:, columns], self.scale, self.zero_point)


@dataclass(frozen=True)
class EncodedWeights:
    """Weights as a lowbit node stores them.

    Attributes:
        packed: uint8 [rows * ceil(K * bits / 8)].
        bits: 1..8.
        encoding: "signed" or "bipolar".
        scale: float32, () or [rows].
        zero_point: int32, () or [rows], inside the range of the codes.
    """

    packed: npt.NDArray[np.uint8]
    bits: int
    encoding: str
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int32]


def read_weights(
    form: NormalForm, value: ir.Value | None, rank: int | None = None
) -> tuple[Ints, Grid] | Refusal:
    """The constant codes behind a weight operand.

    Args:
        form: the graph.
        value: the operand.
        rank: the rank it must have, if any.
    """
    if constant(value) is not None:
        return Refusal("its weights are not quantized")
    dequantization = form.dequantization(value)
    if dequantization is None:
        if value is not None and value.dtype == ir.DataType.FLOAT16:
            return Refusal("its weights are float16; lowbit computes in float32")
        return Refusal("its weights are not constant codes behind a DequantizeLinear")
    if isinstance(dequantization, Refusal):
        return Refusal(f"the DequantizeLinear of its weights: {dequantization.reason}")
    codes = constant(dequantization.codes)
    if codes is None:
        return Refusal("its weights are not constant")
    if codes.dtype.itemsize != 1:
        return Refusal(f"its weights have codes of type {codes.dtype}; lowbit has 1 to 8 bit integers")
    if codes.size == 0:
        return Refusal(f"its weights of shape {list(codes.shape)} are empty")
    if rank is not None and codes.ndim != rank:
        return Refusal(f"its weights have rank {codes.ndim}, expected {rank}")
    axis = dequantization.grid.axis
    if axis is not None and (axis >= codes.ndim or codes.shape[axis] != dequantization.grid.scale.size):
        return Refusal(
            f"its weights of shape {list(codes.shape)} have {dequantization.grid.scale.size} scales on axis "
            f"{axis}"
        )
    return codes, dequantization.grid


def encode(weights: Weights) -> EncodedWeights:
    """Packs weights at the smallest bit width that holds them.

    Only the differences code - zero_point have a meaning, so codes and zero point may be shifted together.
    The kernels multiply signed weights, and those without a zero point cost least; hence, of the two
    encodings

    - the differences themselves, zero point 0,
    - the codes, shifted so that their range starts at -2^(bits-1), and the zero point with them,

    the first is taken unless the second needs fewer bits. The real code range decides, not the element type:
    int8 codes within -8..7 take 4 bits. Weights whose values are all +1 or -1 become 1-bit codes of value
    2q - 1.

    Args:
        weights: the weights.
    """
    values = weights.values
    if np.all(np.abs(values) == 1):
        packed = _pack((values > 0).astype(np.int8), 1)
        return EncodedWeights(packed, 1, "bipolar", weights.scale, np.zeros((), np.int32))

    value_bits = bits_of(int(values.min()), int(values.max()), signed=True)
    zero_point = weights.zero_point
    low = min(int(weights.codes.min()), int(zero_point.min()))
    high = max(int(weights.codes.max()), int(zero_point.max()))
    code_bits = max(1, (high - low).bit_length())
    if value_bits <= code_bits:
        packed = _pack(values.astype(np.int8), value_bits)
        return EncodedWeights(packed, value_bits, "signed", weights.scale, np.zeros((), np.int32))
    shift = -(1 << (code_bits - 1)) - low
    packed = _pack((weights.codes.astype(np.int16) + shift).astype(np.int8), code_bits)
    return EncodedWeights(packed, code_bits, "signed", weights.scale, (zero_point + shift).astype(np.int32))


def _pack(codes: npt.NDArray[np.int8], bits: int) -> npt.NDArray[np.uint8]:
    """Rows of codes at ``bits`` bits each, every row on a byte; a row of 8-bit codes is its bytes."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint8).reshape(-1)
    from lowbit import _native

    packed: npt.NDArray[np.uint8] = _native.pack_weights(codes, bits)
    return packed


def accumulator_bounds(
    weights: Weights, codes: CodeRange, grid: Grid, bias: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The least and the largest value that an accumulator or a partial sum of it can have, [out_channels].

    With P and N the sums of a row's positive and negative values, and x - z in [a, b] with a <= 0 <= b
    (padding contributes 0), the row's sum lies in [P * a + N * b, P * b + N * a], every partial sum too.

    Args:
        weights: the weights.
        codes: the codes of the activation.
        grid: the activation's grid.
        bias: [out_channels], or None.
    """
    values = weights.values
    positive = np.maximum(values, 0).sum(axis=1, dtype=np.int64)
    negative = np.minimum(values, 0).sum(axis=1, dtype=np.int64)
    a = min(0, codes.low - int(grid.zero_point.max()))
    b = max(0, codes.high - int(grid.zero_point.min()))
    offset = np.zeros_like(positive) if bias is None else bias
    highest = positive * b + negative * a + np.maximum(offset, 0)
    lowest = positive * a + negative * b + np.minimum(offset, 0)
    return lowest, highest


def check_accumulator(
    weights: Weights, codes: CodeRange, grid: Grid, bias: npt.NDArray[np.int64] | None
) -> Refusal | None:
    """Proves that no accumulator leaves int32, by the bound of the native code, which refuses the others.

    It knows the bits of the codes, not which of them occur, and adds magnitudes: no sum is larger than
    max |x - z| * sum |w| + |bias|. Arguments as in :func:`accumulator_bounds`.
    """
    low, high = codes.low, codes.high
    if not codes.bipolar:
        zeros = grid.zero_point.reshape(-1).tolist()
        signed = low < 0
        bits = bits_of(min(low, *zeros), max(high, *zeros), signed=signed)
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    largest = max(int(grid.zero_point.max()) - low, high - int(grid.zero_point.min()))
    sums = np.abs(weights.values).sum(axis=1, dtype=np.int64) * largest
    highest = (sums if bias is None else sums + np.abs(bias)).max(initial=0)
    if highest > INT32_MAX:
        return Refusal(
            f"its accumulator can reach {highest} over {weights.codes.shape[1]} products, which does not fit "
            "int32"
        )
    return None
