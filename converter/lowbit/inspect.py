"""What a model consists of: operands, sizes and kernels; of an unconverted one, what would become of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from lowbit.errors import LowBitError
from lowbit.feeds import Model, as_proto, constant_values, model_inputs
from lowbit.ops import DOMAIN, register_schemas

Shape = list[int | str | None]
Array = npt.NDArray[Any]

_ELEMENT_NAMES = {"uint8": "u8", "int8": "s8", "float32": "f32"}


@dataclass
class NodeInfo:
    """One node. Operand texts: ``u8`` unsigned 8 bit, ``s4`` signed 4 bit, ``b1`` bipolar, ``f32`` float."""

    name: str
    op_type: str
    x: str | None = None
    w: str | None = None
    y: str | None = None
    epilogue: str | None = None
    input_shape: Shape | None = None
    output_shape: Shape | None = None
    macs: int | None = None
    weight_bytes: int | None = None
    kernel: str | None = None
    action: str | None = None  # of an unconverted model's node: converted, absorbed or kept
    into: str | None = None  # the lowbit node that it becomes
    reason: str | None = None  # why it stays with ONNX Runtime, or why no kernel could be chosen


@dataclass
class InspectReport:
    """All nodes of a model, and what they add up to."""

    kind: str  # "lowbit": a converted model; "source": an unconverted one, seen through a dry conversion
    bytes: int
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    nodes: list[NodeInfo] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, Any]:
        """Node counts per op, multiply-adds, weight bytes."""
        return {
            "nodes": len(self.nodes),
            "ops": dict(Counter(node.op_type for node in self.nodes).most_common()),
            "actions": dict(Counter(node.action for node in self.nodes if node.action)),
            "macs": sum(node.macs or 0 for node in self.nodes if node.action != "absorbed"),
            "weight_bytes": sum(node.weight_bytes or 0 for node in self.nodes if node.action != "absorbed"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {**asdict(self), "totals": self.totals}


def inspect(
    model: Model, *, shapes: Mapping[str, list[int]] | None = None, isa: str | None = None
) -> InspectReport:
    """Describes a model node by node.

    A converted model shows operands, shapes, multiply-adds, weight bytes and the kernel that this machine
    would run. Any other model is converted in memory, and every node tells what becomes of it, or why it
    would be left alone.

    Args:
        model: a path, a ModelProto, or what :func:`lowbit.convert` returned.
        shapes: sizes for inputs with symbolic dims; a symbolic batch counts as 1 otherwise.
        isa: choose kernels as for this level instead of this machine's best.

    Raises:
        ModelError: if the model cannot be read.
    """
    proto = as_proto(model)
    size = os.path.getsize(model) if isinstance(model, (str, os.PathLike)) else proto.ByteSize()
    interface = {
        "inputs": [_describe(value) for value in model_inputs(proto).values()],
        "outputs": [_describe(value) for value in proto.graph.output],
    }
    if any(node.domain == DOMAIN for node in proto.graph.node):
        return InspectReport("lowbit", size, **interface, nodes=_lowbit_nodes(proto, shapes or {}, isa))

    from lowbit.convert import convert

    result = convert(proto)
    becomes = {info.name: info for info in _lowbit_nodes(result.model, shapes or {}, isa)}
    nodes = []
    for entry in result.report.nodes:
        info = NodeInfo(entry.name, entry.op_type)
        target = becomes.get(entry.into or "")
        if target is not None:
            info = NodeInfo(**{**asdict(target), "name": entry.name, "op_type": entry.op_type})
        info.action, info.into, info.reason = entry.action, entry.into, entry.reason or info.reason
        nodes.append(info)
    return InspectReport("source", size, **interface, nodes=nodes, warnings=list(result.report.warnings))


def _describe(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError):
        dtype = "?"
    dims = _dims(value.type) if tensor.HasField("shape") else None
    return f"{value.name} {dtype}{shape_text(dims)}"


def shape_text(shape: Shape | None) -> str:
    """``[1, N, 8]``; ``?`` for what is not known."""
    return "?" if shape is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def _dims(proto: onnx.TypeProto) -> Shape:
    dims = proto.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in dims]


def _lowbit_nodes(model: onnx.ModelProto, shapes: Mapping[str, list[int]], isa: str | None) -> list[NodeInfo]:
    types = _infer_types(model, shapes)
    constants = constant_values(model)
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Constant":
            continue
        name = node.name or (node.output[0] if node.output else "")
        domain = f"{node.domain}." if node.domain not in ("", "ai.onnx", DOMAIN) else ""
        info = NodeInfo(name, domain + node.op_type)
        first = next((i for i in node.input if i and i not in constants), "")
        info.input_shape = _dims(types[first]) if first in types else None
        info.output_shape = _dims(types[node.output[0]]) if node.output and node.output[0] in types else None
        if node.domain == DOMAIN:
            _describe_lowbit(info, node, types, constants, isa)
        nodes.append(info)
    return nodes


def _infer_types(model: onnx.ModelProto, shapes: Mapping[str, list[int]]) -> dict[str, onnx.TypeProto]:
    """Types and shapes of all values, the symbolic batch as 1 and other dims as ``shapes`` says."""
    register_schemas()
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    for value in sized.graph.input:
        dims = value.type.tensor_type.shape.dim
        for i, dim in enumerate(dims):
            if value.name in shapes and i < len(shapes[value.name]):
                dim.dim_value = shapes[value.name][i]
            elif i == 0 and not dim.HasField("dim_value"):
                dim.dim_value = 1
    for value in sized.graph.output:  # their symbols would contradict the sizes given above
        value.type.tensor_type.ClearField("shape")
    del sized.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(sized)
    graph = inferred.graph
    return {value.name: value.type for value in (*graph.value_info, *graph.input, *graph.output)}


def _describe_lowbit(
    info: NodeInfo,
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    constants: Mapping[str, Array],
    isa: str | None,
) -> None:
    from lowbit import _native

    schema = next(schema for schema in _native.schemas() if schema["name"] == node.op_type)
    attrs = {attribute["name"]: attribute["default"] for attribute in schema["attributes"]}
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    given = {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}
    attrs |= given

    for operand in ("x", "w", "y"):
        if f"{operand}_encoding" in attrs:
            setattr(info, operand, f"{attrs[f'{operand}_encoding'][0]}{attrs.get(f'{operand}_bits', 8)}")
    if "a_encoding" in attrs:
        info.x = "+".join(f"{attrs[f'{side}_encoding'][0]}8" for side in "ab")
    output = types.get(node.output[0])
    if output is not None and output.tensor_type.elem_type == onnx.TensorProto.FLOAT:
        info.y = "f32"
    names = [i["name"] for i in schema["inputs"]]
    present = {name for name, value in zip(names, node.input, strict=False) if value}
    if "epilogue" in attrs:
        steps = attrs["tail"] if attrs["epilogue"] == "tail" else ""
        info.epilogue = f"tail: {steps}" if steps else attrs["epilogue"]
        if "residual" in present and attrs["epilogue"] == "requantize":
            info.epilogue += " + residual"
        info.weight_bytes = int(constants[node.input[1]].size) if node.input[1] in constants else None
        info.macs = _macs(info, attrs)
    info.kernel, reason = _kernel(node, given, types, constants, isa)
    info.reason = info.reason or reason


def _macs(info: NodeInfo, attrs: Mapping[str, Any]) -> int | None:
    """Multiply-adds of one run; None where a size is not known."""

    def known(shape: Shape | None) -> int | None:
        numbers = [dim for dim in shape or [] if isinstance(dim, int)]
        return math.prod(numbers) if shape and len(numbers) == len(shape) else None

    if "in_features" in attrs:
        size = known(info.output_shape)
        return None if size is None else size * int(attrs["in_features"])
    taps = int(np.prod(attrs["kernel_shape"]))
    if info.op_type == "LowBitConvTranspose":
        size = known(info.input_shape)
        return None if size is None else size * taps * attrs["out_channels"] // attrs["group"]
    size = known(info.output_shape)
    return None if size is None else size * taps * attrs["in_channels"] // attrs["group"]


def _kernel(
    node: onnx.NodeProto,
    attrs: Mapping[str, Any],
    types: Mapping[str, onnx.TypeProto],
    constants: Mapping[str, Array],
    isa: str | None,
) -> tuple[str | None, str | None]:
    """The kernel that would run the node, or the reason why that cannot be told."""
    from lowbit import _native

    inputs: list[Array | None] = []
    for name in node.input:
        if not name:
            inputs.append(None)
        elif name in constants:
            inputs.append(constants[name])
        else:
            dims = _dims(types[name]) if name in types else None
            if dims is None or not all(isinstance(dim, int) for dim in dims):
                return None, f"the shape {shape_text(dims)} is not known; give sizes with --shape"
            dtype = helper.tensor_dtype_to_np_dtype(types[name].tensor_type.elem_type)
            inputs.append(np.zeros([int(dim or 0) for dim in dims], dtype))
    try:
        return _native.plan(node.op_type, dict(attrs), inputs, isa=isa)["kernel"], None
    except (_native.LowBitError, LowBitError) as error:
        return None, str(error)
