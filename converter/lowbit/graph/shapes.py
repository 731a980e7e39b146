"""Shape inference."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from lowbit.errors import ModelError
from lowbit.graph.attributes import get_flag, get_int, get_ints, get_string
from lowbit.graph.constants import constant, integers
from lowbit.graph.normal_form import is_dequantize, is_op, is_quantize
from lowbit.graph.quantizers import is_law
from lowbit.graph.subgraphs import graphs_of
from lowbit.ops.windows import Windows

_NO_END = 2**31 - 1
"""From here on, the end of a Slice is the end of the axis."""
_INTEGERS = (int(ir.DataType.INT32), int(ir.DataType.INT64))


def infer_shapes(
    model: ir.Model, *, keeps_shape: Callable[[ir.Node], bool] = lambda _: False, anew: bool = False
) -> None:
    """Fills in the shapes and types that follow from the inputs; dynamic dims stay dynamic.

    Where inference fails the model is left without the shapes, and rules say what they miss.

    Args:
        model: the model.
        keeps_shape: tells the nodes of foreign domains whose output is like their first input.
        anew: believe what the model declares of its intermediate tensors only where nothing else is known, as
            ONNX Runtime does: whoever edits a model may leave old shapes behind.

    Raises:
        ModelError: if a node computes another type than the model declares for its output.
    """
    declared, types = _forget(model.graph) if anew else ({}, {})
    branches = _forget_branches(model.graph) if anew else {}
    declared |= branches
    pools = _rounding_pools(model.graph)
    # One shape may depend on another: every round tells of one Reshape or pool more, until none is left.
    rounds = 3 + len(pools) + sum(node.op_type == "Reshape" for node in model.graph)
    for _ in range(rounds):
        _infer_once(model, keeps_shape)
        _compare_types(types)
        if _tell_convolved(model.graph, keeps_shape):
            continue
        if _correct_pools(model.graph, pools) or _tell_reshapes(model.graph):
            continue  # what a model declares is believed last
        if not _remember(declared):
            break
        declared = {}
    _remember(declared)
    _doubt_slices(model.graph)
    for _ in range(rounds):
        # Names that a Slice may have made wrong must not tell a number.
        if not _tell_open_dims(model.graph):
            break
        _infer_once(model, keeps_shape)
        while _correct_pools(model.graph, pools):
            _infer_once(model, keeps_shape)
        _tell_reshapes(model.graph)
        _doubt_slices(model.graph)
    for value, shape in branches.items():
        value.shape = shape


def _rounding_pools(graph: ir.Graph) -> list[ir.Node]:
    """The pools of a graph that say something about rounding their size up."""
    pools = (node for node in graph if is_op(node, "MaxPool", "AveragePool", "LpPool"))
    return [node for node in pools if get_int(node, "ceil_mode", 0)]


def _correct_pools(graph: ir.Graph, pools: list[ir.Node]) -> bool:
    """Gives pools that round their size up the one that they have, and forgets what followed from another.

    Before opset 22 ONNX's inference counts a last window that starts behind the image, which is never
    computed, and since then takes any ``ceil_mode`` but 0 for 1. Pools of a known size leave the list.

    Returns:
        Whether there was a wrong size.
    """
    wrong = False
    for node in tuple(pools):
        output, sizes = node.outputs[0], _pooled_sizes(node)
        if output.shape is None or sizes is None:
            continue
        pools.remove(node)
        if list(output.shape[2:]) != sizes:
            output.shape, wrong = ir.Shape([*output.shape[:2], *sizes]), True
            _forget_behind(graph, output)
    return wrong


def _pooled_sizes(node: ir.Node) -> list[int] | None:
    """The spatial dims of a pool's output; None where those of its input are not known."""
    source, kernel = node.inputs[0], get_ints(node, "kernel_shape") or []
    if source is None or source.shape is None or len(source.shape) != 2 + len(kernel):
        return None
    dims, image = len(kernel), [dim for dim in source.shape[2:] if isinstance(dim, int)]
    strides = get_ints(node, "strides") or [1] * dims
    dilations = get_ints(node, "dilations") or [1] * dims
    pads = get_ints(node, "pads") or [0] * (2 * dims)
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    if len(image) != dims or len(pads) != 2 * dims or min(len(strides), len(dilations)) != dims:
        return None
    if min((*strides, *kernel), default=1) < 1:
        return None
    if auto_pad.startswith("SAME"):
        return [-(-size // stride) for size, stride in zip(image, strides, strict=True)]
    if auto_pad == "VALID":
        pads = [0] * (2 * dims)
    windows = Windows(image, kernel, strides, dilations, pads, get_flag(node, "ceil_mode", default=False))
    return [max(windows.output_size(d), 0) for d in range(dims)]


def _forget_behind(graph: ir.Graph, value: ir.Value) -> None:
    """Takes the shapes off all that is computed from a value."""
    outer = {inner: node for node in graph.all_nodes() for inner in graphs_of(node)}
    waiting = [value]
    while waiting:
        behind = waiting.pop()
        readers = list(behind.consumers())
        if behind.is_graph_output() and behind.graph in outer:
            readers.append(outer[behind.graph])
        known = [output for node in readers for output in node.outputs if output.shape is not None]
        for output in known:
            output.shape = None
        waiting.extend(known)


def _doubt_slices(graph: ir.Graph) -> None:
    """Forgets the names of dynamic dims that a Slice may have shortened.

    ONNX's inference gives the result of ``x[0:1]`` the same name for its first dim as ``x`` has, and from
    there it spreads; equal names must mean equal sizes.
    """
    doubted = set()
    for node in graph:
        source = node.inputs[0] if node.op_type == "Slice" and node.domain == "" else None
        if source is None:
            continue
        before, after = source.shape, node.outputs[0].shape
        if before is None or after is None or len(before) != len(after):
            continue
        for axis, (was, dim) in enumerate(zip(before, after, strict=True)):
            if not isinstance(dim, int) and was == dim and not _keeps_axis(node, axis, len(before)):
                doubted.add(dim.value)
    doubted.discard(None)
    for output in (output for node in graph for output in node.outputs if doubted):
        dims = list(output.shape or ())
        kept = [dim if isinstance(dim, int) or dim.value not in doubted else None for dim in dims]
        if kept != dims:
            output.shape = ir.Shape(kept)


def may_cut(graph: ir.Graph, axis: int) -> bool:
    """Whether a Slice of a tensor of several dims may shorten an axis: ONNX's inference keeps its name."""
    for node in graph:
        source = node.inputs[0] if node.op_type == "Slice" and node.domain == "" else None
        rank = None if source is None or source.shape is None else len(source.shape)
        if rank is not None and rank > max(1, axis) and not _keeps_axis(node, axis, rank):
            return True
    return False


def _keeps_axis(node: ir.Node, axis: int, rank: int) -> bool:
    """Whether a Slice certainly leaves an axis whole; one before opset 10, which has attributes, never."""
    if len(node.inputs) < 3:
        return False
    starts, ends = integers(node.inputs[1]), integers(node.inputs[2])
    axes = integers(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    steps = integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
    if starts is None or ends is None:
        return False
    axes = list(range(len(starts))) if axes is None else [a % rank for a in axes]
    steps = [1] * len(starts) if steps is None else steps
    return all(
        start == 0 and end >= _NO_END and step == 1
        for start, end, each, step in zip(starts, ends, axes, steps, strict=False)
        if each == axis
    )


def _forget(graph: ir.Graph) -> tuple[dict[ir.Value, ir.Shape], dict[ir.Value, ir.TypeProtocol]]:
    """Takes the declared shapes and types off the results of ONNX's own ops."""
    shapes, types = {}, {}
    for node in graph:
        for output in node.outputs if node.domain in ("", "ai.onnx") else ():
            if output.shape is not None:
                shapes[output], output.shape = output.shape, None
            if output.type is not None:
                types[output], output.type = output.type, None
    return shapes, types


def _forget_branches(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Takes their shapes off the outputs of subgraphs, which ONNX Runtime believes no more than others."""
    stated = {}
    for node in graph.all_nodes():
        for output in (output for inner in graphs_of(node) for output in inner.outputs):
            if output.shape is not None:
                stated[output], output.shape = output.shape, None
    return stated


def _compare_types(declared: dict[ir.Value, ir.TypeProtocol]) -> None:
    """Believes declared types where inference knows none, and empties the list of them.

    Raises:
        ModelError: if a node computes another type than the model declares for its output.
    """
    for value, declaration in declared.items():
        if value.type is None:
            value.type = declaration
        else:
            _compare_type(value, declaration.dtype)
    declared.clear()


def _compare_type(value: ir.Value, declared: ir.DataType) -> None:
    if value.dtype != declared:
        raise ModelError(f"'{value.name}' is declared as {declared}, but its node computes {value.dtype}")


def _remember(declared: Mapping[ir.Value, ir.Shape]) -> bool:
    """Puts declared shapes back where inference knows less; tells whether there are any."""
    news = False
    for value, shape in declared.items():
        if value.shape is None:
            value.shape, news = shape, True
        elif len(value.shape) == len(shape):
            dims = [dim if _is_known(dim) else said for dim, said in zip(value.shape, shape, strict=True)]
            if any(map(_is_known, dims)) and dims != list(value.shape):
                value.shape, news = ir.Shape(dims), True
    return news


def _infer_once(model: ir.Model, keeps_shape: Callable[[ir.Node], bool]) -> None:
    outputs = [value for node in model.graph for value in node.outputs]
    declared = {value: value.dtype for value in outputs if value.dtype is not None}
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level, inputs = logger.level, len(model.graph.inputs)
    logger.setLevel(logging.ERROR)
    try:
        with _posing(model, keeps_shape):
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        logger.setLevel(level)
        del model.graph.inputs[inputs:]  # a failed pass leaves initializers behind that it lent to the inputs
    for value, dtype in declared.items():
        _compare_type(value, dtype)


_QLINEAR: dict[str, tuple[str, Sequence[int]]] = {
    "QLinearSoftmax": ("Identity", (0,)),
    "QLinearSigmoid": ("Identity", (0,)),
    "QLinearLeakyRelu": ("Identity", (0,)),
    "QLinearAdd": ("Add", (0, 3)),
    "QLinearMul": ("Mul", (0, 3)),
    "QLinearWhere": ("Where", (0, 1, 4)),
    "QLinearConcat": ("Concat", range(2, 1 << 16, 3)),
}
"""Operators of ONNX Runtime that may stay as they are: the op of which each is the quantized form, and where
the tensors of codes stand among its inputs. Codes in and codes out have one type."""


@contextmanager
def _posing(model: ir.Model, keeps_shape: Callable[[ir.Node], bool]) -> Iterator[None]:
    """Lets nodes unknown to ONNX pose as standard ones with the same effect on shapes and types."""
    posing: list[tuple[ir.Node, str, Sequence[int]]] = []
    for node in model.graph.all_nodes():
        if node.domain == "com.microsoft" and (is_quantize(node) or is_dequantize(node)):
            posing.append((node, node.op_type, range(3)))
        elif node.domain == "com.microsoft" and node.op_type in _QLINEAR:
            op_type, places = _QLINEAR[node.op_type]
            posing.append((node, op_type, places))
        elif is_law(node):
            posing.append((node, "Cast", (0,)))
        elif keeps_shape(node) or is_op(node, "GroupNormalization"):  # a function that ONNX does not infer
            posing.append((node, "Identity", (0,)))
    own = [(node, node.domain, node.op_type, tuple(node.inputs)) for node, _, _ in posing]
    for node, op_type, places in posing:
        node.domain, node.op_type = "", op_type
        taken = [node.inputs[place] for place in places if place < len(node.inputs)]
        node.resize_inputs(len(taken))
        for index, value in enumerate(taken):
            node.replace_input_with(index, value)
    try:
        yield
    finally:
        for node, domain, op_type, given in own:
            node.domain, node.op_type = domain, op_type
            node.resize_inputs(len(given))
            for index, value in enumerate(given):
                node.replace_input_with(index, value)


_KEEPS_SHAPE = ("BatchNormalization", "Cast", "Clip", "HardSwish", "Identity", "LeakyRelu", "Relu", "Sigmoid")


def _tell_convolved(graph: ir.Graph, keeps_shape: Callable[[ir.Node], bool]) -> bool:
    """Says of what convolutions read how many dims and channels it has, which their weights know.

    A custom op, such as one in front of a network that decodes pictures, says nothing of what it makes.

    Returns:
        Whether that is news.
    """
    news = False
    for node in reversed(graph):
        source = node.inputs[0] if node.inputs else None
        if source is None or source.shape is not None:
            continue
        dims: list[int | ir.SymbolicDim | None] | None = None
        typed = None  # what has the element type, too
        if is_op(node, "Conv", "ConvInteger", "ConvTranspose", "QLinearConv"):
            weights = node.inputs[3 if node.op_type == "QLinearConv" else 1]
            if weights is not None and weights.shape is not None and len(weights.shape) > 2:
                transposed = node.op_type == "ConvTranspose"
                channels = weights.shape[0 if transposed else 1]
                if isinstance(channels, int) and not transposed:
                    channels *= get_int(node, "group", 1)
                dims = [None, channels, *[None] * (len(weights.shape) - 2)]
                typed = weights if is_op(node, "Conv", "ConvTranspose") else None
        elif is_quantize(node) or is_dequantize(node) or is_op(node, *_KEEPS_SHAPE) or keeps_shape(node):
            result = node.outputs[0]
            dims = None if result.shape is None else list(result.shape)
            if is_quantize(node):
                typed = node.inputs[1]
            elif not is_dequantize(node) and not is_op(node, "Cast"):
                typed = result
        if dims is None:
            continue
        source.shape, news = ir.Shape(dims), True
        if source.type is None and typed is not None:
            source.type = typed.type
    return news


def _tell_reshapes(graph: ir.Graph) -> bool:
    """Gives results of Reshape what is known of their new shape, of which ONNX's inference sees little.

    Returns:
        Whether that is news.
    """
    news = False
    for node in graph:
        shape = node.inputs[1] if node.op_type == "Reshape" and len(node.inputs) > 1 else None
        if shape is None or node.domain != "" or constant(shape) is not None:
            continue
        output, source = node.outputs[0], node.inputs[0]
        dims = _new_dims(node, source, shape)
        before = None if output.shape is None else list(output.shape)
        if dims is None or (before is not None and len(before) != len(dims)):
            continue
        known = [_is_known(dim) for dim in dims]
        if before is None or any(now and not _is_known(dim) for now, dim in zip(known, before, strict=True)):
            output.shape = ir.Shape(
                [
                    dim if now or before is None else before[axis]
                    for axis, (dim, now) in enumerate(zip(dims, known, strict=True))
                ]
            )
            if output.type is None and source is not None:
                output.type = source.type
            news = True
    return news


def _tell_open_dims(graph: ir.Graph) -> bool:
    """Gives the one dim that a Reshape leaves open the size that the others leave over.

    A dynamic dim that stands on both sides cancels: [n, 2, c, h, w] reshaped to [n, -1, h, w] has 2 * c
    channels, whatever n is.

    Returns:
        Whether that is news.
    """
    news = False
    for node in graph:
        source, shape = node.inputs[:2] if is_op(node, "Reshape") and len(node.inputs) > 1 else (None, None)
        told = dims_told(shape)
        output = node.outputs[0]
        if source is None or source.shape is None or shape is None or told is None or told.count(-1) != 1:
            continue
        place = told.index(-1)
        if output.shape is not None and (
            len(output.shape) != len(told) or isinstance(output.shape[place], int)
        ):
            continue
        if 0 in told and get_flag(node, "allowzero", default=False):
            continue
        dims = _new_dims(node, source, shape)
        assert dims is not None
        before = [_named(source, axis) for axis in range(len(source.shape))]
        others = [_named_dim(source, axis, dim) for axis, dim in enumerate(told) if axis != place]
        open_dim = _left_over(before, others)
        if open_dim is None:
            continue
        dims[place] = open_dim
        output.shape = ir.Shape(dims)
        if output.type is None:
            output.type = source.type
        news = True
    return news


def _named(tensor: ir.Value, axis: int) -> int | str | None:
    """A dim as a number or a name; None for an axis that the tensor does not have."""
    if tensor.shape is None or axis >= len(tensor.shape):
        return None
    dim = tensor.shape[axis]
    return dim if isinstance(dim, int) else dim.value or f"{tensor.name} {axis}"


def _named_dim(source: ir.Value, place: int, dim: int | Dim) -> int | str | None:
    """The same of a dim of a new shape, at its place."""
    if isinstance(dim, Dim):
        return _named(dim.tensor, dim.axis)
    return dim if dim != 0 else _named(source, place)


def _left_over(before: Sequence[int | str | None], others: Sequence[int | str | None]) -> int | None:
    """The number that ``before`` has beyond ``others`` as products; None if there is no such number."""
    if None in before or None in others or 0 in before or 0 in others:
        return None
    names = [Counter(dim for dim in dims if isinstance(dim, str)) for dims in (before, others)]
    sizes = [math.prod(dim for dim in dims if isinstance(dim, int)) for dims in (before, others)]
    return sizes[0] // sizes[1] if names[0] == names[1] and sizes[0] % sizes[1] == 0 else None


def _new_dims(
    node: ir.Node, source: ir.Value | None, shape: ir.Value
) -> list[int | ir.SymbolicDim | None] | None:
    """What is known of the dims that a Reshape gives; None if not even their number."""
    told = dims_told(shape)
    if told is None:
        count = shape.shape[0] if shape.shape is not None and len(shape.shape) == 1 else None
        return [None] * count if isinstance(count, int) else None
    dims: list[int | ir.SymbolicDim | None] = []
    for place, dim in enumerate(told):
        if isinstance(dim, Dim):
            assert dim.tensor.shape is not None
            dims.append(dim.tensor.shape[dim.axis])
        elif dim == 0 and not get_flag(node, "allowzero", default=False):
            inside = source is not None and source.shape is not None and place < len(source.shape)
            dims.append(source.shape[place] if inside and source is not None and source.shape else None)
        else:
            dims.append(dim if dim >= 0 else None)
    return dims


def _is_known(dim: int | ir.SymbolicDim | None) -> bool:
    return isinstance(dim, int) or (dim is not None and dim.value is not None)


@dataclass(frozen=True)
class Dim:
    """A dim of a tensor that is known when the model runs."""

    tensor: ir.Value
    axis: int


_DEEPEST = 12
"""Nodes in a row through which the dims of a shape are followed."""


def dims_told(value: ir.Value | None, depth: int = 0) -> list[int | Dim] | None:
    """A vector (or number) of integers as numbers and dims of tensors; None if made of anything else."""
    array = constant(value)
    if array is not None:
        few = array.ndim < 2 and array.dtype.kind in "iu"
        return [int(number) for number in array.reshape(-1)] if few else None
    node = None if value is None else value.producer()
    if node is None or node.domain != "" or depth == _DEEPEST or not node.inputs:
        return None
    if node.op_type == "Shape":
        tensor = node.inputs[0]
        if tensor is None or tensor.shape is None:
            return None
        all_dims = [d if isinstance(d, int) else Dim(tensor, i) for i, d in enumerate(tensor.shape)]
        return all_dims[slice(get_int(node, "start", 0), get_int(node, "end", len(all_dims)))]
    if node.op_type == "Concat":
        parts = [dims_told(part, depth + 1) for part in node.inputs]
        return None if None in parts else [dim for part in parts for dim in part or ()]
    given = dims_told(node.inputs[0], depth + 1)
    if given is None:
        return None
    if node.op_type in ("Cast", "Identity", "Squeeze", "Unsqueeze"):
        to_integer = node.op_type != "Cast" or get_int(node, "to", 0) in _INTEGERS
        return given if to_integer else None
    if node.op_type == "Gather" and get_int(node, "axis", 0) == 0:
        places = integers(node.inputs[1])
        inside = places is not None and all(-len(given) <= place < len(given) for place in places)
        return [given[place] for place in places or ()] if inside else None
    if node.op_type == "Slice" and len(node.inputs) > 2:
        start, end = integers(node.inputs[1]), integers(node.inputs[2])
        steps = integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
        if start is None or end is None or len(start) != 1 or len(end) != 1:
            return None
        return given[start[0] : end[0]] if steps == [1] else None
    return None
