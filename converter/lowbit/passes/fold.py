"""Folding of constants: what exporters leave between a weight and its reader.

Weights arrive as float initializer -> QuantizeLinear, with Transpose, Reshape, Cast or Clip before or after.
All of these are computed here once, exactly as ONNX defines them. DequantizeLinear is not: behind it stand
real numbers, but lowbit wants the codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_flag, get_int, get_ints
from lowbit.graph.constants import Array, constant, integers
from lowbit.graph.normal_form import Quantization, clip_bounds, is_op, is_quantize, read_quantize
from lowbit.graph.reasons import for_each


def fold_constants(graph: ir.Graph) -> None:
    """Replaces nodes on constants by initializers, front to back. Graph outputs are left alone."""
    for_each(graph, functools.partial(_replace_by_constant, graph))


def _replace_by_constant(graph: ir.Graph, node: ir.Node) -> None:
    if any(output.is_graph_output() for output in node.outputs) or len(node.outputs) != 1:
        return
    try:
        folded = _fold(node)
    except (IndexError, ValueError):  # axes or shapes that do not fit: the node stays, for others to refuse
        return
    if folded is None:
        return
    array, dtype = folded
    output = node.outputs[0]
    tensor = ir.tensor(np.array(array, order="C"), dtype=dtype, name=output.name)
    value = ir.val(output.name, dtype, array.shape, const_value=tensor)
    output.replace_all_uses_with(value)
    graph.remove(node, safe=True)
    graph.register_initializer(value)


def _fold(node: ir.Node) -> tuple[Array, ir.DataType] | None:
    source = node.inputs[0] if node.inputs else None
    array = constant(source)
    if array is None or source is None or source.const_value is None:
        return None
    if is_quantize(node):
        return _quantize(node, array)
    function = _FUNCTIONS.get(node.op_type) if is_op(node, *_FUNCTIONS) else None
    result = None if function is None else function(node, array)
    if result is None:
        return None
    if is_op(node, "Cast"):
        return result, ir.DataType(get_int(node, "to", 0))
    return result, source.const_value.dtype


def _quantize(node: ir.Node, array: Array) -> tuple[Array, ir.DataType] | None:
    """``saturate(rint(x / scale) + zero_point)``, the division in float32."""
    read = read_quantize(node)
    if not isinstance(read, Quantization) or array.dtype != np.float32:
        return None
    scale, zero_point = read.grid.scale, read.grid.zero_point
    if read.grid.axis is not None:
        shape = [1] * array.ndim
        shape[read.grid.axis] = -1
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    shifted = np.rint(array / scale) + zero_point.astype(np.float32)
    codes = np.fmin(np.fmax(shifted, read.range.low), read.range.high)
    return codes.astype(np.int8 if read.range.low < 0 else np.uint8), read.range.dtype


def _cast(node: ir.Node, array: Array) -> Array | None:
    target = ir.DataType(get_int(node, "to", 0))
    if target not in _EXACT_CASTS:
        return None
    result = array.astype(_EXACT_CASTS[target])
    return result if np.array_equal(result.astype(array.dtype), array) else None


def _transpose(node: ir.Node, array: Array) -> Array | None:
    return array.transpose(get_ints(node, "perm") or range(array.ndim)[::-1])


def _reshape(node: ir.Node, array: Array) -> Array | None:
    target = integers(node.inputs[1]) if len(node.inputs) > 1 else get_ints(node, "shape")
    if target is None:
        return None
    if not get_flag(node, "allowzero", default=False):
        target = [array.shape[i] if dim == 0 else dim for i, dim in enumerate(target)]
    return array.reshape(target)


def _flatten(node: ir.Node, array: Array) -> Array | None:
    axis = get_int(node, "axis", 1)
    return array.reshape(int(np.prod(array.shape[:axis], dtype=np.int64)), -1)


def _squeeze(node: ir.Node, array: Array) -> Array | None:
    axes = _axes(node)
    return array.squeeze(None if axes is None else tuple(axes))


def _unsqueeze(node: ir.Node, array: Array) -> Array | None:
    axes = _axes(node)
    return None if axes is None else np.expand_dims(array, tuple(axes))


def _axes(node: ir.Node) -> list[int] | None:
    return integers(node.inputs[1]) if len(node.inputs) > 1 else get_ints(node, "axes")


def _clip(node: ir.Node, array: Array) -> Array | None:
    bounds = clip_bounds(node)
    if bounds is None or array.dtype.kind not in "iu":
        return None
    info = np.iinfo(array.dtype)
    low, high = (int(min(max(bound, info.min), info.max)) for bound in bounds)
    return np.clip(array, low, high)


def _identity(_: ir.Node, array: Array) -> Array | None:
    return array


_EXACT_CASTS = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.INT8: np.int8,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.INT32: np.int32,
    ir.DataType.INT64: np.int64,
}

_FUNCTIONS: dict[str, Callable[[ir.Node, Array], Array | None]] = {
    "Cast": _cast,
    "Clip": _clip,
    "Flatten": _flatten,
    "Identity": _identity,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
