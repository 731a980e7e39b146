"""Models that compute in float16 around their quantizers, read as if they computed in float32.

NVIDIA ModelOpt writes them (``high_precision_dtype="fp16"``) for TensorRT, which multiplies the codes as
integers whatever the file says between them. By the letter every operation rounds to float16, which no sum of
integers does; in float32 the same network has sums that are integers times a scale, and every rule applies.
Each value is nearer to what the weights and the scales mean than the float16 one is, by a bound that
``verify`` holds codes against (docs/numerics.md, "Float16 around int8").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowbit.frontends import qonnx
from lowbit.proto.model_file import nodes_of, tensors_of

_HALF, _FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "precision")
"""Attributes that hold an element type, whatever the operator."""
SUFFIX = ".float32"
"""Of inputs and outputs that are float16, as the model computes with them."""


def has_half(model: onnx.ModelProto) -> bool:
    """Whether a model has float16 tensors besides inputs that it casts at once, and outputs."""
    if any(tensor.data_type == _HALF for _, tensor in tensors_of(model)):
        return True
    inputs = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == _HALF}
    outputs = {value.name for value in model.graph.output}
    for node in nodes_of(model):
        if node.op_type != "Cast" and inputs.intersection(node.input):
            return True
        makes = any(each.name in _TYPE_ATTRIBUTES and each.i == _HALF for each in node.attribute)
        if makes and not outputs.issuperset(node.output):
            return True
    return False


def is_around_codes(model: onnx.ModelProto) -> bool:
    """Whether a model computes in float16 and rounds what it computes to codes.

    One that quantizes its weights alone does not: in float32 nothing of it would be a sum of integers, and
    its other weights would take twice the bytes.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in nodes_of(model) if node.op_type == "Constant" for name in node.output}
    return has_half(model) and any(
        (node.op_type == "QuantizeLinear" or qonnx.is_quantizer(node)) and set(node.input[:1]) - constants
        for node in nodes_of(model)
    )


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which every float16 tensor is float32.

    Its inputs and outputs keep their types: Casts stand behind and in front of them.

    Args:
        model: with all its data. bfloat16 stays.
    """
    out = onnx.ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    inputs = [value.name for value in graph.input if value.type.tensor_type.elem_type == _HALF]
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [name for name in inputs if name not in constants]  # defaults of old files, which are constants
    outputs = [value.name for value in graph.output if value.type.tensor_type.elem_type == _HALF]
    passed = set(inputs) & set(outputs)
    names = {name: name + SUFFIX for name in (*inputs, *outputs) if name not in passed}

    for _, tensor in tensors_of(out):
        _widen_tensor(tensor)
    for node in nodes_of(out):
        _widen_attributes(node)
    for part in _graphs(graph):
        for tensor in part.initializer:
            tensor.name = names.get(tensor.name, tensor.name)
        kept = {*inputs, *outputs} if part is graph else set()
        for value in (*part.input, *part.output, *part.value_info):
            if value.name not in kept:
                _widen_type(value.type)
        if part is not graph:  # a subgraph may hand on what the main graph has
            for value in part.output:
                value.name = names.get(value.name, value.name)
        for node in part.node:
            _rename(node.input, names)
            _rename(node.output, names)
    casts = [
        helper.make_node("Cast", [name], [names[name]], names[name], to=_FLOAT)
        for name in inputs
        if name in names
    ]
    body = [*casts, *graph.node]
    body += [
        helper.make_node("Cast", [names[name]], [name], name, to=_HALF) for name in outputs if name in names
    ]
    del graph.node[:]
    graph.node.extend(body)
    return out


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those of its nodes' attributes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _rename(names: MutableSequence[str], to: Mapping[str, str]) -> None:
    for i, name in enumerate(names):
        names[i] = to.get(name, name)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == _HALF:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))


def _widen_type(of: onnx.TypeProto) -> None:
    kind = of.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(of, kind)
        if tensor.elem_type == _HALF:
            tensor.elem_type = _FLOAT
    elif kind in ("sequence_type", "optional_type"):
        _widen_type(getattr(of, kind).elem_type)


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i == _HALF:
            attribute.i = _FLOAT
        if attribute.HasField("tp"):
            _widen_type(attribute.tp)
