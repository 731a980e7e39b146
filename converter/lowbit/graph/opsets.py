"""What depends on a model's opset: which ops run on codes, how an old file gets a normal form."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from lowbit.errors import ModelError, raise_if_out_of_memory

NORMAL_FORM_OPSET = 13
"""The first opset whose DequantizeLinear has an axis."""

_NORMAL_FORM_IR = 7
_DEPTH_TO_SPACE_OPSET = 11
"""Before it ONNX Runtime has a DepthToSpace of float32 alone, whatever the standard says."""


def complete_imports(proto: onnx.ModelProto, domains: frozenset[str]) -> onnx.ModelProto:
    """Imports the domains that nodes use but the file forgot; early exports of Brevitas do so.

    Args:
        proto: a model; it stays as it is.
        domains: those that may be added, at version 1.

    Returns:
        The model itself if nothing is missing, else a copy.
    """
    present = {entry.domain for entry in proto.opset_import}
    missing = sorted({node.domain for node in proto.graph.node} & domains - present)
    if not missing:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in missing)
    return copy


def quantizer_domain(graph: ir.Graph, *, per_channel: bool) -> str:
    """The domain of a new QuantizeLinear or DequantizeLinear.

    ONNX's own ops have no axis in old opsets; ONNX Runtime's do.

    Args:
        graph: imports ONNX Runtime's domain if need be.
        per_channel: whether the node has an axis.
    """
    if not per_channel or graph.opset_imports.get("", 1) >= NORMAL_FORM_OPSET:
        return ""
    graph.opset_imports.setdefault("com.microsoft", 1)
    return "com.microsoft"


def has_code_kernel(graph: ir.Graph, node: ir.Node, dtype: ir.DataType) -> bool:
    """Whether ONNX Runtime can run one of ONNX's ops on codes, in the version that a graph imports.

    Args:
        graph: the graph.
        node: the op, whose first input holds the codes.
        dtype: their type. Of those below a byte it can transpose tensors only.
    """
    if dtype.bitwidth < 8:
        return node.op_type == "Transpose"
    opset = graph.opset_imports.get("", NORMAL_FORM_OPSET)
    if node.op_type == "DepthToSpace":
        return opset >= _DEPTH_TO_SPACE_OPSET
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return False
    constraints = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
    formal = schema.inputs[0].type_str
    return f"tensor({dtype.name.lower()})" in constraints.get(formal, [formal])


def raise_opset(
    model: ir.Model, label: str, to: int = NORMAL_FORM_OPSET, ir_version: int = _NORMAL_FORM_IR
) -> ir.Model:
    """Rewrites a model to an opset if it is older.

    Args:
        model: a whole model, its nodes in order; nodes of other domains stay as they are.
        label: how to call it in an error.
        to: the opset.
        ir_version: the IR version that goes with it.

    Raises:
        ModelError: if a node has no counterpart in the newer opset.
    """
    opset = model.graph.opset_imports.get("", NORMAL_FORM_OPSET)
    if opset >= to:
        model.ir_version = max(model.ir_version or 0, ir_version)
        return model
    try:
        raised = onnx.version_converter.convert_version(ir.to_proto(model), to)
        raised.ir_version = max(raised.ir_version, ir_version)
        result = ir.from_proto(raised)
    except Exception as error:  # the version converter's exceptions are of many kinds
        raise_if_out_of_memory(error)
        raise ModelError(
            f"{label}: uses opset {opset} and cannot be brought to opset {to}: "
            f"{str(error).strip().splitlines()[0]}; export it with opset {to} or newer"
        ) from error
    result.metadata_props.update(model.metadata_props)
    return result
