"""Constant values of a graph as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]

_SUB_BYTE = {
    ir.DataType.UINT4: np.uint8,
    ir.DataType.INT4: np.int8,
    ir.DataType.UINT2: np.uint8,
    ir.DataType.INT2: np.int8,
}


def constant(value: ir.Value | None) -> Array | None:
    """The array a value always has, or None if it has none or may change.

    Element types below a byte come as int8 or uint8 arrays. An initializer that is also a graph input is a
    default that the caller of the model may override, hence not constant.
    """
    if value is None or value.const_value is None or not is_known(value):
        return None
    array = value.const_value.numpy()
    narrow = _SUB_BYTE.get(value.const_value.dtype)
    return array if narrow is None else array.astype(narrow)


def is_known(value: ir.Value | None) -> bool:
    """Whether :func:`constant` has an answer for a value, told without reading it."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def scalar(value: ir.Value | None) -> float | None:
    """The number in a constant of one element, whatever its rank; None for anything else."""
    array = constant(value)
    return array.item() if array is not None and array.size == 1 else None


def integers(value: ir.Value | None) -> list[int] | None:
    """A constant list of integers, such as axes or a shape; None if it is not constant."""
    array = constant(value)
    return None if array is None else [int(x) for x in array.reshape(-1)]


def add_initializer(graph: ir.Graph, name: str, array: Array, dtype: ir.DataType | None = None) -> ir.Value:
    """Registers a new initializer; ``name`` is made unique.

    Args:
        graph: where it will live.
        name: wanted name.
        array: its value.
        dtype: its element type, where numpy cannot say it.
    """
    unique, count = name, 1
    while unique in graph.initializers:
        count += 1
        unique = f"{name}.{count}"
    # Not ir.tensor: it first looks for all methods of other kinds of tensors, 5 % of a small conversion.
    tensor = ir.Tensor(np.array(array, order="C"), dtype=dtype, name=unique)
    value = ir.val(unique, tensor.dtype, array.shape, const_value=tensor)
    graph.register_initializer(value)
    return value
