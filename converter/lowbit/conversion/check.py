"""Verification of a converted model before anybody sees it.

Every lowbit node runs on random codes, in the kernel that this machine would choose, and must equal the numpy
definition of its op in every element; the whole model must pass ONNX's checker and load in ONNX Runtime.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lowbit.errors import CheckError, ModelError, OptimizerError, raise_if_out_of_memory
from lowbit.frontends.load import run_checker
from lowbit.graph.constants import Array
from lowbit.library import register, require_onnxruntime
from lowbit.schemas import DOMAIN, attributes_of, signatures

_WORK = 20_000_000
"""Products that the numpy definition of one convolution may take: a fraction of a second."""
_WEIGHTS = 200_000
"""Weights that it may unpack."""
_ROOM = 9
"""Entries of a dim where nothing asks for more."""
_ROWS = 16
"""Output channels that are compared where all of them would take longer."""
_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", DOMAIN)
_BATCHES = (1, 2, 3, 4)
"""Sizes that are tried of a batch left open; a Reshape to constants may bind it."""
_UNEQUAL = "attempting to re-use buffer"
"""What ONNX Runtime says where two dims of one name differ: such sizes are none that the model can have."""
_FED = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.FLOAT)
_PER_CHANNEL = (
    *("scale", "shift", "table", "thresholds"),
    *("x_scale", "x_zero_point", "y_scale", "y_zero_point"),
)
_BINARY = ("LowBitAdd", "LowBitMul")
_PRODUCTS = ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm")


def check_converted(
    proto: onnx.ModelProto,
    outputs: Sequence[onnx.ValueInfoProto] = (),
    source: onnx.ModelProto | None = None,
) -> None:
    """Checks a converted model.

    Args:
        proto: the model.
        outputs: what inference knows of its outputs, of which the model may say less.
        source: the model that it was made of, which tells what is no fault of the conversion.

    Raises:
        CheckError: names the nodes that differ, or that the checker or ONNX Runtime complains about.
        ModelError: if ONNX Runtime refuses the source, too.
    """
    try:
        run_checker(proto, "the converted model")
    except ModelError as error:
        raise CheckError(str(error), _named_in(str(error), proto)) from error
    check_nodes(proto, outputs)
    _check_loads(proto, source)


def check_nodes(proto: onnx.ModelProto, outputs: Sequence[onnx.ValueInfoProto] = ()) -> None:
    """Runs every lowbit node on random codes against the definition of its op.

    Args:
        proto: the model.
        outputs: what inference knows of its outputs, of which the model may say less.

    Raises:
        CheckError: names the first node that differs.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    known = (*graph.input, *graph.value_info, *graph.output, *outputs)
    dims = {
        info.name: [d.dim_value if d.dim_value > 0 else None for d in info.type.tensor_type.shape.dim]
        for info in known
        if info.type.tensor_type.HasField("shape")
    }
    types = {
        info.name: onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        for info in known
        if info.type.tensor_type.elem_type in _FED
    }
    random = np.random.default_rng(0)
    for node in graph.node:
        if node.domain == DOMAIN:
            _check_node(_Node.read(node, constants, dims, types), random)


@dataclass
class _Node:
    """A lowbit node with what the model says about its operands."""

    name: str
    op_type: str
    attributes: dict[str, Any]
    constants: list[Array | None]
    dims: list[list[int | None] | None]
    types: list[np.dtype[Any] | None]
    names: list[str]

    @classmethod
    def read(
        cls,
        node: onnx.NodeProto,
        constants: Mapping[str, onnx.TensorProto],
        dims: Mapping[str, list[int | None]],
        types: Mapping[str, np.dtype[Any]],
    ) -> _Node:
        return cls(
            node.name,
            node.op_type,
            attributes_of(node),
            [numpy_helper.to_array(constants[i]) if i in constants else None for i in node.input],
            [dims.get(i) for i in node.input],
            [types.get(i) for i in node.input],
            [_input_name(node.op_type, i) for i in range(len(node.input))],
        )

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, at the schema's default where it is left out."""
        return self.attributes.get(name, signatures()[self.op_type].defaults.get(name, default))


def _input_name(op_type: str, index: int) -> str:
    names = signatures()[op_type].inputs
    return names[min(index, len(names) - 1)]


def _check_node(node: _Node, random: np.random.Generator) -> None:
    from lowbit import _native, ops

    try:
        inputs = _feed(node, random)
        actual = _native.run(node.op_type, node.attributes, inputs)
        attributes, defining, rows = _first_rows(node, inputs, actual)
        expected = ops.evaluate(node.op_type, attributes, defining)
    except ValueError as error:  # LowBitError, or the native module's own error type
        raise CheckError(f"{node.op_type} '{node.name}': {error}", [node.name]) from error
    compared = actual if rows is None else actual[..., :rows]
    if compared.shape != expected.shape or compared.dtype != expected.dtype:
        raise CheckError(
            f"{node.op_type} '{node.name}': the kernel gives {compared.dtype} {list(compared.shape)}, "
            f"the definition {expected.dtype} {list(expected.shape)}",
            [node.name],
        )
    different = int(np.count_nonzero(compared != expected))
    if different:
        raise CheckError(
            f"{node.op_type} '{node.name}': {different} of {compared.size} elements differ from the "
            "definition of the op on random codes; please report this",
            [node.name],
        )


def _feed(node: _Node, random: np.random.Generator) -> list[Array | None]:
    """Random values for the inputs that are not constant, on a small image."""
    inputs = list(node.constants)
    shapes = _small_shapes(node)
    for i, shape in shapes.items():
        name, dtype = node.names[i], node.types[i] or np.dtype(np.uint8)
        if name == "residual":
            shape = _output_shape(node, shapes[0])
        if dtype.kind == "f":
            inputs[i] = random.normal(scale=_spread(node), size=shape).astype(np.float32)
        else:
            low, high = _codes(node, name, dtype)
            inputs[i] = random.integers(low, high + 1, size=shape).astype(dtype)
    return inputs


def _small_shapes(node: _Node) -> dict[int, list[int]]:
    """Shapes of the operands, by position, that fit together; batch and image are cut to a few windows."""
    given = {i: dims for i, dims in enumerate(node.dims) if dims is not None and node.constants[i] is None}
    if node.op_type in _BINARY:
        return _broadcast_shapes(given, _fixed_shapes(node))
    if node.op_type == "LowBitConcat":
        return _joined_shapes(node, given)
    if node.op_type == "LowBitMatMul":
        return _multiplied_shapes(node, given)
    return {i: _small_shape(node, node.names[i], dims) for i, dims in given.items()}


def _fixed_shapes(node: _Node) -> dict[int, tuple[int, ...]]:
    """The shapes of constant operands of a binary op, by position."""
    operands = enumerate(zip(node.names, node.constants, strict=True))
    return {i: array.shape for i, (name, array) in operands if array is not None and name in ("a", "b")}


def _broadcast_shapes(
    given: Mapping[int, Sequence[int | None]], fixed: Mapping[int, Sequence[int | None]]
) -> dict[int, list[int]]:
    """Operands that numpy broadcasts, constants among them; unknown dims are what the other operand's are."""

    def size(axis: int) -> int:
        """What a dim, counted from the end, is where it is not 1."""
        constant = [shape[-axis] or 1 for shape in fixed.values() if len(shape) >= axis]
        stated = [min(dims[-axis] or 1, _ROOM) for dims in given.values() if len(dims) >= axis]
        return next((dim for dim in (*constant, *stated) if dim != 1), _ROOM)

    return {
        i: [1 if dim == 1 else size(len(dims) - axis) for axis, dim in enumerate(dims)]
        for i, dims in given.items()
    }


def _multiplied_shapes(node: _Node, given: Mapping[int, Sequence[int | None]]) -> dict[int, list[int]]:
    """Operands of a product of matrices: columns of one are rows of the other, the dims before broadcast."""
    fixed = _fixed_shapes(node)
    known: dict[int, Sequence[int | None]] = dict(sorted({**given, **fixed}.items()))
    perms = {i: list(node.get(f"{node.names[i]}_perm") or range(len(dims))) for i, dims in known.items()}
    matrices = {i: [dims[axis] for axis in perms[i]] for i, dims in known.items()}
    a, b = matrices.values()
    inner = a[-1] or b[-2] or _ROOM
    ends = dict(zip(matrices, ([a[-2], inner], [inner, b[-1]]), strict=True))
    stacks = {i: dims[:-2] for i, dims in matrices.items()}
    before = _broadcast_shapes({i: stacks[i] for i in given}, {i: stacks[i] for i in fixed})
    shapes = {}
    for i, stack in before.items():
        dims = [*stack, *(dim or _ROOM for dim in ends[i])]
        cut = dims if fixed else [min(dim, _ROOM) for dim in dims]
        shapes[i] = [cut[perms[i].index(axis)] for axis in range(len(cut))]
    return shapes


def _joined_shapes(node: _Node, given: Mapping[int, Sequence[int | None]]) -> dict[int, list[int]]:
    """Operands of a Concat, which have all dims but one in common: a constant's, where one is joined."""
    rank = max(len(dims) for dims in given.values())
    joined = node.get("axis") % rank
    operands = zip(node.names, node.constants, strict=True)
    constants = [array.shape for name, array in operands if array is not None and name == "x"]

    def size(axis: int) -> int:
        stated = [min(dims[axis] or 1, _ROOM) for dims in given.values() if dims[axis] is not None]
        return next(iter((*(shape[axis] for shape in constants), *stated)), _ROOM)

    return {
        i: [min(dim or _ROOM, _ROOM) if axis == joined else size(axis) for axis, dim in enumerate(dims)]
        for i, dims in given.items()
    }


def _small_shape(node: _Node, name: str, dims: Sequence[int | None]) -> list[int]:
    """The shape of an operand, its batch and image cut down to a few windows."""
    if node.op_type in ("LowBitGemm", "APGemm") and name == "x":
        return _rows_of_features(node, dims)
    if node.op_type == "LowBitNormalization":
        return _normalized_shape(node, dims)
    if node.op_type == "LowBitImage":
        side = max([_ROOM, *node.get("crop")])
        return [2, side, side + 1, int(dims[-1] or 3)]
    kernel, dilations = node.get("kernel_shape") or [], node.get("dilations") or []
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations or [1] * len(kernel), strict=True)]
    channels = 1 if node.get("to_channels_last", 0) else len(dims) - 1
    fixed = _channels(node)
    shape = []
    for axis, dim in enumerate(dims):
        room = extents[axis - 1] + 5 if 0 < axis <= len(extents) else _ROOM
        shape.append(fixed if axis == channels and fixed else min(dim or room, room))
    if "blocksize" in node.attributes:
        shape[channels] = int(dims[channels] or node.get("blocksize") ** 2)
    return shape


def _rows_of_features(node: _Node, dims: Sequence[int | None]) -> list[int]:
    """A few rows of a matrix product's features; where their dims are unknown, the last of those has them."""
    axis = node.get("axis") % len(dims)
    features, left = list(dims[axis:]), int(node.get("in_features"))
    for dim in features:
        left = max(left // (dim or 1), 1)
    for i in reversed(range(len(features))):
        if features[i] is None:
            features[i], left = left, 1
    return [2] * axis + [int(dim or 1) for dim in features]


def _normalized_shape(node: _Node, dims: Sequence[int | None]) -> list[int]:
    """All channels; of the dims before them a few, unless every element has factors of its own."""
    factors = max(array.size for array in node.constants[3:5] if array is not None)
    channels = int(dims[-1] or max(factors, int(node.get("groups"))))
    axis = node.get("axis") % len(dims)
    lead = [min(dim or _ROOM, _ROOM) for dim in dims[:-1]]
    if factors > channels:
        lead[axis:] = [int(dim or 1) for dim in dims[axis:-1]]
    return [*lead, channels]


def _channels(node: _Node) -> int | None:
    """The number of channels, where weights or parameters per channel fix it; without them a few will do."""
    if "in_channels" in node.attributes:
        return int(node.attributes["in_channels"])
    for name, array in zip(node.names, node.constants, strict=True):
        if array is None or name not in _PER_CHANNEL:
            continue
        if array.ndim == 1 + (name in ("table", "thresholds")) and array.shape[0] > 1:
            return int(array.shape[0])
    return None


def _codes(node: _Node, name: str, dtype: np.dtype[Any]) -> tuple[int, int]:
    bits = node.get("x_bits", 8) if name == "x" and node.op_type in _PRODUCTS else 8
    if dtype.kind == "i":
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1


def _spread(node: _Node) -> float:
    """A standard deviation that reaches most codes of a LowBitQuantize or LowBitThreshold."""
    scale = node.constants[1]
    if node.op_type == "LowBitThreshold" and scale is not None:
        finite = np.abs(scale[np.isfinite(scale)])
        return float(np.median(finite)) + 1.0 if finite.size else 1.0
    return 1.0 if scale is None else float(np.max(scale)) * 64


def _output_shape(node: _Node, x: Sequence[int]) -> list[int]:
    from lowbit import _native

    present = [name != "" for name in node.names]
    shapes: list[list[int] | None] = [list(c.shape) if c is not None else None for c in node.constants]
    shapes[0] = list(x)
    shape, _ = _native.infer_output(node.op_type, node.attributes, shapes, present)
    return [dim if isinstance(dim, int) else 1 for dim in shape or ()]


def _first_rows(
    node: _Node, inputs: list[Array | None], actual: Array
) -> tuple[dict[str, Any], list[Array | None], int | None]:
    """The node as it is, or only its first output channels where numpy would take long for all of them.

    Output channels do not depend on each other, and the packed weights are one row for each.
    """
    if node.op_type not in _PRODUCTS or node.get("group", 1) != 1:
        return node.attributes, inputs, None
    key = "out_features" if "Gemm" in node.op_type else "out_channels"
    channels = node.attributes[key]
    w = inputs[1]
    assert w is not None
    columns = w.size * 8 // (channels * node.get("w_bits"))
    small = math.prod(actual.shape) * columns <= _WORK and channels * columns <= _WEIGHTS
    if small or channels <= _ROWS:
        return node.attributes, inputs, None
    cut = list(inputs)
    for i, (name, array) in enumerate(zip(node.names, inputs, strict=True)):
        if array is None or i == 0:
            continue
        if name == "w":
            cut[i] = array.reshape(channels, -1)[:_ROWS].reshape(-1)
        elif name == "residual":
            cut[i] = array[..., :_ROWS]
        elif array.ndim and array.shape[0] == channels:
            cut[i] = array[:_ROWS]
    return node.attributes | {key: _ROWS}, cut, _ROWS


def _check_loads(proto: onnx.ModelProto, source: onnx.ModelProto | None) -> None:
    """Opens a session and runs it once, unless the model needs a library of its user's as well.

    The sizes that it runs with are made up where the model leaves them open: if the source does not run
    with them either, they are none that the model can have.
    """
    original = source if source is not None and _speaks_standard(source) else None
    failed = refusal_of(proto, batch=1)
    refused = None if failed is None else refusal_of(proto)
    if refused is not None:
        of_source = None if original is None else refusal_of(original)
        if of_source is not None:
            raise ModelError(f"ONNX Runtime refuses the model, before and after conversion: {of_source}")
        raise CheckError(f"ONNX Runtime refuses the converted model: {refused}", _named_in(refused, proto))
    impossible = None
    for batch in _BATCHES if _has_open_batch(proto) else _BATCHES[:1]:
        failed = failed if batch == 1 else refusal_of(proto, batch=batch)
        if failed is not None and (original is None or refusal_of(original, batch=batch) is None):
            impossible = failed
            if _UNEQUAL not in failed or not _has_open_batch(proto):
                break
            continue
        _check_optimized(proto, original, batch, hidden=failed is not None)
        if failed is None:
            return
    if impossible is not None:
        message = f"ONNX Runtime does not run the converted model: {impossible}"
        raise CheckError(message, _named_in(impossible, proto))


def _has_open_batch(proto: onnx.ModelProto) -> bool:
    dims = [info.type.tensor_type.shape.dim for info in proto.graph.input]
    return any(len(each) > 0 and not each[0].HasField("dim_value") for each in dims)


def _check_optimized(
    proto: onnx.ModelProto, source: onnx.ModelProto | None, batch: int, *, hidden: bool
) -> None:
    """Opens a session as users do: what its optimizer fuses ONNX Runtime cannot always run.

    Behind a DequantizeLinear that stays it may fuse what it left alone in the original; and it may have
    hidden a node of the original that does not run, which it no longer does. Without an original that it
    opens so, there is nothing to hold the model to.

    Args:
        proto: the converted model.
        source: the original.
        batch: the size of the batch to run with.
        hidden: whether the original runs only so.
    """
    if source is None or not (_reads_real_codes(proto) or hidden):
        return
    failed = refusal_of(proto, batch=batch, optimized=True)
    if failed is None or refusal_of(source, batch=batch, optimized=True) is not None:
        return
    message = f"ONNX Runtime's optimizer breaks nodes that stay: {failed}"
    raise OptimizerError(message, _named_in(failed, proto))


def _reads_real_codes(proto: onnx.ModelProto) -> bool:
    """Whether a node of ONNX Runtime's own reads what a DequantizeLinear of its own gives."""
    real = {node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    return any(not real.isdisjoint(node.input) for node in proto.graph.node if node.domain != DOMAIN)


def refusal_of(proto: onnx.ModelProto, *, batch: int | None = None, optimized: bool = False) -> str | None:
    """Why ONNX Runtime does not load a model, with lowbit's ops in reach; None if it does.

    Args:
        proto: the model; one that needs a library of its user's is not tried.
        batch: None, or the size of the batch with which it has to run on zeros, too.
        optimized: whether its optimizer takes part.
    """
    onnxruntime = require_onnxruntime()

    if not _speaks_standard(proto):
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    register(options)
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        feeds = None if batch is None else _whole_feed(proto, batch)
        if feeds is not None and any(_is_empty(output) for output in session.run(None, feeds)):
            return "an output has no elements"  # of such sizes nothing is proven, and a window may not fit
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise_if_out_of_memory(error)
        return str(error).splitlines()[0]
    return None


def _is_empty(output: Any) -> bool:
    return isinstance(output, np.ndarray) and not output.size


def _speaks_standard(proto: onnx.ModelProto) -> bool:
    return all(node.domain in _KNOWN_DOMAINS for node in proto.graph.node)


def _named_in(message: str, proto: onnx.ModelProto) -> list[str]:
    """The nodes that a message of ONNX's or of ONNX Runtime's is about: (name), 'name' or "name"."""
    words = set(re.findall(r"(?<=\()[^()]+(?=\))|(?<=')[^']+(?=')|(?<=\")[^\"]+(?=\")", message))
    return [node.name for node in proto.graph.node if node.name in words]


def _whole_feed(proto: onnx.ModelProto, batch: int) -> dict[str, Array] | None:
    """Zeros for all inputs, with a size for a batch left open; None where a size or a type is in the way.

    Tensors without elements are in the way, too: InstanceNormalization of ONNX Runtime dies of one.
    """
    known = (info.type.tensor_type.shape.dim for info in proto.graph.value_info)
    if any(dim.HasField("dim_value") and not dim.dim_value for dims in known for dim in dims):
        return None
    feeds = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for info in proto.graph.input:
        if info.name in constants:
            continue
        tensor = info.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        if tensor.elem_type not in _FED or not dims or None in dims[1:]:
            return None
        shape = [batch if dim is None else dim for dim in dims]
        if math.prod(shape) > _WORK:
            return None
        feeds[info.name] = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds
