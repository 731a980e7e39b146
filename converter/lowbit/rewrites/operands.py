"""The operands of a region: activations on a grid, and constants per channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from lowbit.graph.constants import Array, constant, is_known
from lowbit.graph.normal_form import CODE_MOVERS, NormalForm, is_dequantize, is_op, rank_of
from lowbit.graph.quantization import CODE_TYPES, CodeRange, Grid, dequantize_array
from lowbit.graph.reasons import REASON, Refusal


@dataclass(frozen=True)
class Activation:
    """A float operand that is known to be codes on a grid.

    Attributes:
        codes: the codes.
        grid: their grid.
        range: the codes that can occur.
    """

    codes: ir.Value
    grid: Grid
    range: CodeRange


def read_activation(
    form: NormalForm, value: ir.Value | None, what: str, *, per_tensor: bool = True
) -> Activation | Refusal:
    """The codes behind a float operand.

    Args:
        form: the graph.
        value: the operand.
        what: its name in a refusal, such as "input 0".
        per_tensor: refuse one grid per channel.
    """
    dequantization = form.dequantization(value)
    if value is None or dequantization is None:
        return Refusal(f"its {what} is not quantized{_why(value)}")
    if isinstance(dequantization, Refusal):
        return Refusal(f"the DequantizeLinear of its {what}: {dequantization.reason}")
    codes = dequantization.codes
    code_range = form.code_range(codes)
    quantization = form.quantization(codes, half=True)
    if isinstance(quantization, Refusal):
        return Refusal(f"the QuantizeLinear of its {what}: {quantization.reason}")
    if code_range is None or code_range.dtype not in CODE_TYPES:
        return Refusal(f"its {what} has codes of type {codes.dtype}")
    if rank_of(codes) is None:
        return Refusal(f"the rank of its {what} is unknown")
    if per_tensor and not dequantization.grid.per_tensor:
        return Refusal(f"its {what} has one scale per channel; lowbit needs one scale per activation tensor")
    return Activation(codes, dequantization.grid, code_range)


def _why(value: ir.Value | None) -> str:
    """What is known about why a tensor is not quantized; it may have been moved in between."""
    while value is not None:
        node = value.producer()
        if node is None:
            stated = ": the model reads it as it is, unless --input-quant states its quantizer"
            return stated if value.is_graph_input() else ""
        if REASON in node.meta:
            return f": {node.meta[REASON]}"
        if not is_op(node, *CODE_MOVERS):
            return ""
        value = node.inputs[0]
    return ""


def real_constant(form: NormalForm, value: ir.Value | None) -> Array | None:
    """The float32 array of a constant operand, given as such or as constant codes on a grid."""
    array = constant(value)
    if array is not None:
        return array if array.dtype == np.float32 else None
    dequantization = form.dequantization(value)
    if dequantization is None or isinstance(dequantization, Refusal):
        return None
    codes = constant(dequantization.codes)
    if codes is None:
        return None
    return dequantize_array(codes, dequantization.grid)


def is_constant(value: ir.Value | None) -> bool:
    """Whether an operand is constant, as real numbers or as codes on a grid."""
    if is_known(value):
        return True
    node = None if value is None else value.producer()
    return node is not None and is_dequantize(node) and is_known(node.inputs[0])


def per_channel(array: Array, rank: int, axis: int, channels: int) -> Array | None:
    """A constant operand as one number per channel, float32 [channels].

    Args:
        array: the operand; numpy broadcasting aligns it from the right.
        rank: rank of the tensor it meets.
        axis: that tensor's channel axis, counted from the front.
        channels: size of that axis.

    Returns:
        None if it varies along another axis or would give the tensor another shape.
    """
    if array.ndim > rank:
        return None
    shape = [1] * (rank - array.ndim) + list(array.shape)
    if any(size != 1 for i, size in enumerate(shape) if i != axis) or shape[axis] not in (1, channels):
        return None
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (channels,)))
