"""Registers ``ai.lowbit`` with the onnx package, for its checker and its shape inference."""

from __future__ import annotations

import functools
from typing import Any

import onnx
from onnx import defs, shape_inference

from lowbit.schemas import DOMAIN, VERSION

_TYPES = {
    "codes": ["tensor(uint8)", "tensor(int8)"],
    "codes_or_float": ["tensor(uint8)", "tensor(int8)", "tensor(float)"],
    "uint8": ["tensor(uint8)"],
    "int32": ["tensor(int32)"],
    "float": ["tensor(float)"],
}
_ELEMENTS = {
    "uint8": onnx.TensorProto.UINT8,
    "int8": onnx.TensorProto.INT8,
    "int32": onnx.TensorProto.INT32,
    "float32": onnx.TensorProto.FLOAT,
}


@functools.cache
def register_schemas() -> None:
    """Adds the op schemas of the native module to ``onnx.defs``; the first call does, later ones do nothing.

    Afterwards ``onnx.checker.check_model(model, full_check=True)`` and ``onnx.shape_inference.infer_shapes``
    accept converted models. ONNX Runtime needs none of this.

    Raises:
        ImportError: if the native module is not built; it holds the schemas.
    """
    from lowbit import _native

    for schema in _native.schemas():
        if not defs.has(schema["name"], DOMAIN):
            defs.register_schema(_op_schema(schema))


def _op_schema(schema: dict[str, Any]) -> defs.OpSchema:
    constraints: list[tuple[str, list[str], str]] = []

    def parameter(name: str, rule: str, doc: str, option: Any) -> defs.OpSchema.FormalParameter:
        # A constraint of its own for every parameter: x, the weights and y are typed independently.
        constraints.append((f"T_{name}", _TYPES[rule], ""))
        return defs.OpSchema.FormalParameter(
            name, f"T_{name}", doc, param_option=option, is_homogeneous=False
        )

    option = defs.OpSchema.FormalParameterOption
    inputs = [
        parameter(
            i["name"],
            i["type"],
            i["doc"],
            option.Variadic if i["variadic"] else option.Optional if i["optional"] else option.Single,
        )
        for i in schema["inputs"]
    ]
    outputs = [parameter("y", schema["output_type"], schema["output_doc"], option.Single)]
    op = defs.OpSchema(
        schema["name"],
        DOMAIN,
        VERSION,
        schema["definition"],
        inputs=inputs,
        outputs=outputs,
        type_constraints=constraints,
        attributes=[_attribute(a) for a in schema["attributes"]],
    )
    op.set_type_and_shape_inference_function(functools.partial(_infer, schema))
    return op


def _attribute(attribute: dict[str, Any]) -> defs.OpSchema.Attribute:
    name, doc = attribute["name"], attribute["doc"]
    if attribute["required"]:
        kind = getattr(defs.OpSchema.AttrType, attribute["kind"].upper())
        return defs.OpSchema.Attribute(name, kind, doc, required=True)
    if isinstance(
        attribute["default"], list
    ):  # an empty list carries no type that helper.make_attribute could see
        kind = getattr(defs.OpSchema.AttrType, attribute["kind"].upper())
        return defs.OpSchema.Attribute(name, kind, doc, required=False)
    return defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, attribute["default"]), doc)


def _infer(schema: dict[str, Any], context: shape_inference.InferenceContext) -> None:
    """Shape inference of one node, answered by the native module."""
    from lowbit import _native

    attributes = {}
    for attribute in schema["attributes"]:
        proto = context.get_attribute(attribute["name"])
        if proto is not None and proto.type:
            value = onnx.helper.get_attribute_value(proto)
            attributes[attribute["name"]] = value.decode() if isinstance(value, bytes) else value
    count = context.get_num_inputs()
    types = [context.get_input_type(i) for i in range(count)]
    present = [t is not None and t.HasField("tensor_type") for t in types]
    shapes = [_shape(t) if there else None for t, there in zip(types, present, strict=True)]
    shape, dtype = _native.infer_output(schema["name"], attributes, shapes, present)
    context.set_output_type(0, onnx.helper.make_tensor_type_proto(_ELEMENTS[str(dtype)], shape))


def _shape(proto: onnx.TypeProto) -> list[int | str | None] | None:
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim]
