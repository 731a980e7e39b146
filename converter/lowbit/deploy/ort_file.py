"""Writes a lowbit model in ONNX Runtime's own format, which is all that minimal builds read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from lowbit.checking.inner_values import exact_options
from lowbit.errors import ModelError, UnsupportedError
from lowbit.library import register
from lowbit.proto.provenance import KEY
from lowbit.schemas import DOMAIN
from lowbit.sessions.session import open_session

if TYPE_CHECKING:
    import onnxruntime

    from lowbit.frontends.load import Source

STYLES = {"fixed": ".ort", "runtime": ".with_runtime_opt.ort"}
"""The two styles of optimization, and the endings that ONNX Runtime's own tool gives their files."""

_NARROWEST = 8
"""Bits of the narrowest element that an .ort file knows."""


def prepared(source: Source) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The model that the .ort files are written from, and its lowbit ops with their numbers.

    It lacks the record of where every value comes from, which serves `lowbit verify` alone and which nobody
    can read out of an .ort file.

    Raises:
        ModelError: if it holds no lowbit node.
        UnsupportedError: if it holds what an .ort file cannot, every place named.
    """
    label = str(source.path) if source.path else "the given model"
    operators = Counter(node.op_type for node in source.model.graph.all_nodes() if node.domain == DOMAIN)
    if not operators:
        raise ModelError(
            f"{label}: is no lowbit model, it has no node of {DOMAIN}; make one with `lowbit convert` first"
        )
    narrow = list(_narrow_tensors(source.model))
    if narrow:
        raise UnsupportedError(
            f"{label}: an .ort file has no elements of less than {_NARROWEST} bits, the model holds "
            f"{'; '.join(narrow)}; `lowbit convert` packs the weights of nodes that it converts into uint8, "
            "and `lowbit inspect` says why it leaves a node"
        )
    proto: onnx.ModelProto = ir.to_proto(source.model)
    kept = [entry for entry in proto.metadata_props if entry.key != KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    return proto, dict(sorted(operators.items()))


def _narrow_tensors(model: ir.Model) -> Iterator[str]:
    """Says which tensors have elements of less than 8 bits, and which node has to do with them."""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        if _is_narrow(value.dtype):
            users = [f"{node.op_type} '{node.name}'" for node in value.consumers()]
            yield f"{value.dtype} '{value.name}', read by {', '.join(users) or 'nothing'}"
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            tensor = attribute.value if attribute.type == ir.AttributeType.TENSOR else None
            if tensor is not None and _is_narrow(tensor.dtype):
                yield f"{tensor.dtype} attribute '{attribute.name}' of {node.op_type} '{node.name}'"
            if attribute.type == ir.AttributeType.GRAPH:
                for value in attribute.value.initializers.values():
                    if _is_narrow(value.dtype):
                        yield f"{value.dtype} '{value.name}' in a subgraph of {node.op_type} '{node.name}'"
        for value in node.outputs:
            if _is_narrow(value.dtype):
                yield f"{value.dtype} output '{value.name}' of {node.op_type} '{node.name}'"


def _is_narrow(dtype: ir.DataType | None) -> bool:
    if dtype is None or dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        return False
    return dtype.bitwidth < _NARROWEST


def options_of(style: str, *, replay: bool = False) -> onnxruntime.SessionOptions:
    """Options with the custom ops under which an .ort file is written, or opened.

    Args:
        style: a key of :data:`STYLES`.
        replay: apply the optimizations that a file of style ``runtime`` brings along, as an app that trusts
            its own file may.
    """
    options = exact_options()
    register(options)
    # ARM's int8 kernels take what x86's do not; an .ort file says so once and for all.
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    if replay and style == "runtime":
        options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    return options


def write_ort(proto: onnx.ModelProto, path: Path, style: str) -> None:
    """Lets ONNX Runtime optimize a model and write it as an .ort file.

    The blocked layout of float convolutions is left out: its block is that of the machine that writes.

    Args:
        proto: a model that holds nothing that the file cannot.
        path: the file to write.
        style: a key of :data:`STYLES`.

    Raises:
        ModelError: if ONNX Runtime refuses the model, with its reason, which names the node.
    """
    options = options_of(style)
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    if style == "runtime":
        options.add_session_config_entry("optimization.minimal_build_optimizations", "save")
    open_session(proto, options, without=["NchwcTransformer"])
    if not path.is_file():
        raise ModelError(f"{path.name}: ONNX Runtime wrote nothing; this is a defect of lowbit")
