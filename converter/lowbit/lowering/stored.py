"""How the output graph stores the tensors of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import Array
from lowbit.graph.normal_form import dims_of
from lowbit.graph.quantization import bits_of

Order = tuple[int, ...]
"""How a tensor is stored: stored axis k holds axis ``order[k]`` of the model's tensor."""


def identity(rank: int) -> Order:
    """The model's own order of axes."""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Axis 1 moved to the end: [N, C, D1..] is stored as [N, D1.., C]."""
    return identity(rank) if rank < 3 else (0, *range(2, rank), 1)


@dataclass(frozen=True)
class Stored:
    """How a tensor of codes of the model is stored in the output.

    Attributes:
        value: the tensor in the output graph: uint8, or int8 where ``signed``.
        order: its axes, see :data:`Order`.
        offset: stored code = code + offset.
        signed: whether it is an int8 tensor.
        low: smallest code that occurs, as stored.
        high: largest code that occurs, as stored.
        bipolar: whether the codes -1 and +1 are stored as 0 and 1.
        flattened: None, or n: the model's tensor is this one (in the model's order) with the dims from n on
            flattened into one. A Gemm reads it as it is; anybody else gets it reshaped.
    """

    value: ir.Value
    order: Order
    offset: int
    signed: bool
    low: int
    high: int
    flattened: int | None = None
    bipolar: bool = False

    @property
    def encoding(self) -> str:
        """The schema's word for what the stored bytes mean."""
        return "bipolar" if self.bipolar else self.byte_encoding

    @property
    def byte_encoding(self) -> str:
        """The schema's word for the stored bytes, for ops to which only their order matters."""
        return "signed" if self.signed else "unsigned"

    def axis(self, axis: int) -> int:
        """Where an axis of the model's tensor is stored."""
        return self.order.index(axis)

    def flattened_dims(self) -> list[int] | None:
        """The dims that are flattened, in the model's order; None if one is dynamic or stored before them."""
        start = self.flattened
        if start is None or self.value.shape is None or self.order[:start] != identity(start):
            return None
        dims = [dims_of(self.value)[self.axis(axis)] for axis in range(start, len(self.order))]
        known = [dim for dim in dims if dim is not None]
        return known if len(known) == len(dims) else None

    def bits(self, zero_point: int) -> int:
        """The smallest bit width that holds the codes and a zero point, both as stored."""
        low, high = min(self.low, zero_point), max(self.high, zero_point)
        return bits_of(low, high, signed=self.signed)


@dataclass(frozen=True)
class StoredReal:
    """How a float tensor of the model is stored in the output: in another order of axes."""

    value: ir.Value
    order: Order


@dataclass(frozen=True)
class CodesOutput:
    """The storage of codes that a node is about to write, and the grid they lie on as stored."""

    offset: int
    signed: bool
    low: int
    high: int
    scale: Array
    zero_point: Array
    bipolar: bool = False

    def store(self, codes: Array) -> Array:
        """Codes of the model as the bytes that store them, uint8 or int8."""
        stored = (codes + 1) // 2 if self.bipolar else codes + self.offset
        return stored.astype(np.int8 if self.signed else np.uint8)

    @property
    def dtype(self) -> ir.DataType:
        """Element type of the stored tensor."""
        return ir.DataType.INT8 if self.signed else ir.DataType.UINT8

    @property
    def inputs(self) -> dict[str, Array]:
        """The node's inputs that describe it."""
        return {"y_scale": self.scale, "y_zero_point": self.zero_point}

    def stored(self, value: ir.Value, order: Order) -> Stored:
        """The output, once it has a value."""
        return Stored(value, order, self.offset, self.signed, self.low, self.high, bipolar=self.bipolar)
