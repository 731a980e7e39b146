"""Verification of a converted model before anybody sees it.

Every lowbit node runs on random codes, in the kernel that this machine would choose, and must equal the numpy
definition of its op in every element; the whole model must pass ONNX's checker and load in ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lowbit.errors import ModelError
from lowbit.graph.constants import Array
from lowbit.graph.load import run_checker
from lowbit.graph.schemas import DOMAIN, signatures

_WORK = 20_000_000
"""Products that the numpy definition of one convolution may take: a fraction of a second."""
_WEIGHTS = 200_000
"""Weights that it may unpack."""
_ROWS = 16
"""Output channels that are compared where all of them would take longer."""
_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", DOMAIN)
_FED = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.FLOAT)
_PER_CHANNEL = (
    *("scale", "shift", "table", "thresholds"),
    *("x_scale", "x_zero_point", "y_scale", "y_zero_point"),
)
_BINARY = ("LowBitAdd", "LowBitMul")
_PRODUCTS = ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm")


def check_converted(proto: onnx.ModelProto) -> None:
    """Checks a converted model.

    Raises:
        ModelError: names the node that differs or what the checker or ONNX Runtime says.
    """
    run_checker(proto, "the converted model")
    check_nodes(proto)
    _check_loads(proto)


def check_nodes(proto: onnx.ModelProto) -> None:
    """Runs every lowbit node on random codes against the definition of its op.

    Raises:
        ModelError: names the first node that differs.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    dims = {
        info.name: [d.dim_value if d.dim_value > 0 else None for d in info.type.tensor_type.shape.dim]
        for info in (*graph.input, *graph.value_info, *graph.output)
    }
    types = {
        info.name: onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        for info in (*graph.input, *graph.value_info, *graph.output)
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
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return cls(
            node.name,
            node.op_type,
            {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()},
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
        raise ModelError(f"{node.op_type} '{node.name}': {error}") from error
    compared = actual if rows is None else actual[..., :rows]
    if compared.shape != expected.shape or compared.dtype != expected.dtype:
        raise ModelError(
            f"{node.op_type} '{node.name}': the kernel gives {compared.dtype} {list(compared.shape)}, "
            f"the definition {expected.dtype} {list(expected.shape)}"
        )
    different = int(np.count_nonzero(compared != expected))
    if different:
        raise ModelError(
            f"{node.op_type} '{node.name}': {different} of {compared.size} elements differ from the "
            "definition of the op on random codes; please report this"
        )


def _feed(node: _Node, random: np.random.Generator) -> list[Array | None]:
    """Random values for the inputs that are not constant, on a small image."""
    inputs = list(node.constants)
    shape_of_y: list[int] | None = None
    for i, name in enumerate(node.names):
        dims = node.dims[i]
        if inputs[i] is not None or dims is None:
            continue
        shape = _small_shape(node, name, dims)
        if name == "residual":
            assert shape_of_y is not None
            shape = shape_of_y
        dtype = node.types[i] or np.dtype(np.uint8)
        if dtype.kind == "f":
            inputs[i] = random.normal(scale=_spread(node), size=shape).astype(np.float32)
        else:
            low, high = _codes(node, name, dtype)
            inputs[i] = random.integers(low, high + 1, size=shape).astype(dtype)
        if name == "x" and node.op_type in _PRODUCTS:
            shape_of_y = _output_shape(node, shape)
    return inputs


def _small_shape(node: _Node, name: str, dims: Sequence[int | None]) -> list[int]:
    """The shape of an operand, its batch and image cut down to a few windows."""
    if node.op_type in ("LowBitGemm", "APGemm") and name == "x":
        axis = node.get("axis") % len(dims)
        return [2] * axis + [int(dim or 1) for dim in dims[axis:]]
    kernel, dilations = node.get("kernel_shape") or [], node.get("dilations") or []
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations or [1] * len(kernel), strict=True)]
    channels = 1 if node.get("to_channels_last", 0) else len(dims) - 1
    fixed = _channels(node)
    shape = []
    for axis, dim in enumerate(dims):
        room = extents[axis - 1] + 5 if 0 < axis <= len(extents) else 9
        shape.append(fixed if axis == channels and fixed else min(dim or room, room))
    if "blocksize" in node.attributes:
        shape[channels] = int(dims[channels] or node.get("blocksize") ** 2)
    for array in node.constants if node.op_type in _BINARY else ():
        # A constant operand fixes the dims along which it varies.
        if array is not None and array.ndim:
            for axis in range(1, min(array.ndim, len(shape)) + 1):
                shape[-axis] = array.shape[-axis] if array.shape[-axis] > 1 else shape[-axis]
    return shape


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


def _check_loads(proto: onnx.ModelProto) -> None:
    """Opens a session and runs it once, unless the model needs a library of its user's as well."""
    import onnxruntime

    if any(node.domain not in _KNOWN_DOMAINS for node in proto.graph.node):
        return

    from lowbit.devices import get_library_path

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # What ONNX Runtime makes of nodes that stay is not ours to judge: it fuses some that it then cannot run.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(str(get_library_path()))
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        feeds = _whole_feed(proto)
        if feeds is not None:
            session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise ModelError(f"ONNX Runtime refuses the converted model: {str(error).splitlines()[0]}") from error


def _whole_feed(proto: onnx.ModelProto) -> dict[str, Array] | None:
    """Zeros for all inputs with the batch at 1; None where a size or a type is in the way."""
    feeds = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for info in proto.graph.input:
        if info.name in constants:
            continue
        tensor = info.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        if tensor.elem_type not in _FED or not dims or None in dims[1:]:
            return None
        shape = [1 if dim is None else dim for dim in dims]
        if math.prod(shape) > _WORK:
            return None
        feeds[info.name] = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds
