"""Reading a model: whatever is wrong with a file is one clear ModelError."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from lowbit.errors import ModelError, raise_if_out_of_memory
from lowbit.frontends import half, qonnx
from lowbit.graph.opsets import complete_imports, raise_opset
from lowbit.proto.model_file import (
    check_whole,
    in_known_version,
    load_external_data,
    parse_model,
    read_file,
    require_own_data,
    tensors_of,
    with_open_dims,
)
from lowbit.schemas import DOMAIN, has_attribute

SUPPORTED_IR = 13
SUPPORTED_OPSETS = range(7, onnx.defs.onnx_opset_version() + 1)
_AS_IT_IS = 10
"""The first opset that has QuantizeLinear; such a file is read as it is unless it is QONNX."""

_TOLERATED = (
    "Field 'shape' of 'type' is required but missing",
    "Field 'type' of 'value_info' is required but missing",
    "Field 'elem_type' of 'type' is required but missing",
    "Nodes in a graph must be topologically sorted",
    "is deprecated in domain_version of",  # GroupNormalization at opset 18, which ONNX Runtime runs
    "No Op registered for",  # ONNX Runtime knows LayerNormalization, say, at every opset
)


@dataclass(frozen=True)
class Source:
    """A model as it was given.

    Attributes:
        model: the graph; independent of what was given, so that it can be rewritten.
        sha256: of the file, or of the serialized proto.
        path: the file; None for a proto.
        proto: what the graph was read from, with all its data.
        widened: whether float16 tensors became float32 ones.
    """

    model: ir.Model
    sha256: str
    path: Path | None
    proto: onnx.ModelProto
    widened: bool = False

    def again(self) -> Source:
        """The model as it was given, once more: the graph of this one may have been rewritten by now."""
        return replace(self, model=_read_graph(self.proto, str(self.path or "the given model")))


def load_model(model: str | Path | onnx.ModelProto, *, widen_float16: bool = False) -> Source:
    """Reads a model and checks that it is whole.

    Args:
        model: a file, external data beside it, or a proto.
        widen_float16: read float16 tensors as float32, if some of them are rounded to codes.

    Returns:
        The model with all its data in memory.

    Raises:
        ModelError: if there is no file, it is no ONNX model, or it contradicts itself.
    """
    if isinstance(model, onnx.ModelProto):
        proto, path, label = with_open_dims(model), None, "the given model"
        check_whole(proto, label)
        require_own_data(proto, label)
        digest = hashlib.sha256(proto.SerializeToString()).hexdigest()
    else:
        path = Path(model)
        label = str(path)
        data = read_file(path)
        digest = hashlib.sha256(data).hexdigest()
        proto = parse_model(data, label)
        load_external_data(proto, path.parent, label)
    if any(node.op_type == "EPContext" for node in proto.graph.node):
        raise ModelError(
            f"{label}: it is compiled for one kind of device (EPContext); use the model that it was made from"
        )
    proto = complete_imports(qonnx.qualified(in_known_version(proto, label)), qonnx.DOMAINS)
    _check(proto, label)
    widens = widen_float16 and half.is_around_codes(proto)
    if widens:
        proto = half.widened(proto)
    return Source(_read_graph(proto, label), digest, path, proto, widens)


def _read_graph(proto: onnx.ModelProto, label: str) -> ir.Model:
    try:
        graph = ir.from_proto(proto)
    except Exception as error:  # the reader meets contradictions with exceptions of many kinds
        raise_if_out_of_memory(error)
        raise ModelError(f"{label}: contradicts itself: {str(error).splitlines()[0]}") from error
    for output in graph.graph.outputs:
        if output.dtype == ir.DataType.UNDEFINED:
            output.type = None
    _sort(graph, label)
    _check_inputs(graph, label)
    if graph.graph.opset_imports.get("", _AS_IT_IS) < _AS_IT_IS or qonnx.speaks(graph):
        graph = raise_opset(graph, label)
    return graph


def drop_overridable_initializers(graph: ir.Graph) -> int:
    """Takes initializers off the list of inputs; returns how many there were.

    Files before IR version 4 had to list them, and some exporters still do, though nobody feeds a scale.
    """
    overridable = [value for value in graph.inputs if value.is_initializer()]
    for value in overridable:
        graph.inputs.remove(value)
    return len(overridable)


def _sort(model: ir.Model, label: str) -> None:
    """Brings nodes into an order in which every one follows what it reads; ONNX Runtime does so too."""
    for node in model.graph.all_nodes():
        for value in node.inputs:
            if value is None or value.producer() is not None:
                continue
            if not value.is_graph_input() and not value.is_initializer():
                raise ModelError(f"{label}: node '{node.name}' reads '{value.name}', which nothing computes")
    try:
        TopologicalSortPass()(model)
    except ValueError as error:
        raise ModelError(f"{label}: its nodes form a cycle") from error


def _check_inputs(model: ir.Model, label: str) -> None:
    """Checks that nodes have the inputs that their ops require.

    ONNX's checker does so, too, but only until its first complaint, which may be one that is tolerated, and
    not for ONNX Runtime's own QuantizeLinear and DequantizeLinear.
    """
    opset = model.graph.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        contrib = node.domain == "com.microsoft" and node.op_type in ("QuantizeLinear", "DequantizeLinear")
        if node.domain not in ("", "ai.onnx") and not contrib:
            continue
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            continue
        single = onnx.defs.OpSchema.FormalParameterOption.Single
        for position, formal in enumerate(schema.inputs):
            given = node.inputs[position] if position < len(node.inputs) else None
            if given is None and formal.option == single:
                name = node.name or (node.outputs[0].name if node.outputs else "")
                raise ModelError(f"{label}: {node.op_type} '{name}' lacks its input '{formal.name}'")


def _check(proto: onnx.ModelProto, label: str) -> None:
    opsets = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    opset = opsets.get("ai.onnx")
    if opset is None:
        raise ModelError(f"{label}: imports no opset of ai.onnx")
    if opset not in SUPPORTED_OPSETS:
        raise ModelError(
            f"{label}: uses opset {opset}; lowbit reads {SUPPORTED_OPSETS.start} to "
            f"{SUPPORTED_OPSETS.stop - 1}. Export it again with one of those, or use onnx.version_converter"
        )
    for value in proto.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise ModelError(f"{label}: input '{value.name}' has no element type")
    for where, tensor in tensors_of(proto):
        _check_tensor(where, tensor, label)
    run_checker(proto, label)


def run_checker(proto: onnx.ModelProto, label: str) -> None:
    """Runs ONNX's checker.

    It asks for the types and shapes of outputs and for nodes in order, which ONNX Runtime does not need, and
    it does not take 2 GB and more.

    Raises:
        ModelError: with the checker's first complaint.
    """
    try:
        onnx.checker.check_model(_without_unknown_attributes(proto))
    except onnx.checker.ValidationError as error:
        message = str(error).strip()
        if not any(text in message for text in _TOLERATED):
            raise ModelError(f"{label}: {message.splitlines()[0]}") from error
    except ValueError as error:
        if proto.ByteSize() < 2**31 - 1:
            raise ModelError(f"{label}: {error}") from error


def _without_unknown_attributes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose lowbit nodes have no attributes that are ignored, for a checker that refuses them.

    It does so once lowbit's ops are registered with it. The model itself where there are none.
    """
    if not any(node.domain == DOMAIN and _unknown_attributes(node) for node in proto.graph.node):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        for attribute in _unknown_attributes(node) if node.domain == DOMAIN else ():
            node.attribute.remove(attribute)
    return copy


def _unknown_attributes(node: onnx.NodeProto) -> list[onnx.AttributeProto]:
    return [attribute for attribute in node.attribute if not has_attribute(node, attribute.name)]


def _check_tensor(where: str, tensor: onnx.TensorProto, label: str) -> None:
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{label}: {where} has the shape {list(tensor.dims)}")
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError as error:
        raise ModelError(f"{label}: {where} has the unknown type {tensor.data_type}") from error
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"{label}: {where} has no element type")
    if not tensor.HasField("raw_data") or dtype == ir.DataType.STRING:
        return
    expected = math.ceil(math.prod(tensor.dims) * dtype.bitwidth / 8)
    if len(tensor.raw_data) != expected:
        raise ModelError(
            f"{label}: {where} of shape {list(tensor.dims)} needs {expected} bytes, "
            f"the file has {len(tensor.raw_data)}"
        )
