"""Reading model files: the only place that opens one, and the only one that follows a model to other files.

A tensor may say that its data lie in another file. That file is looked for in the model's folder alone, never
in the current one, and never outside of it: a model may come from anywhere, and what it names would end up in
the converted model.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

from lowbit.errors import ModelError, raise_if_out_of_memory
from lowbit.schemas import DOMAIN, VERSION

ORT_VERSION = 1000
"""The newest version that ONNX Runtime knows of any domain of custom ops.

It keeps the domains in a table of the process: once lowbit's ops were registered, every model that it saves
imports this version, with lowbit nodes or without. A node that this release cannot read says so itself
(``needs_version``).
"""


def read_file(path: Path) -> bytes:
    """The bytes of a model file.

    Raises:
        ModelError: if there is none, it is no regular file, or it is empty.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if path.is_dir():
        raise ModelError(f"{path}: is a folder, expected an .onnx file")
    if not path.is_file():  # a pipe would wait for a writer
        raise ModelError(f"{path}: is no regular file, expected an .onnx file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data:
        raise ModelError(f"{path}: is empty, expected an .onnx file")
    return data


def parse_model(data: bytes, label: str) -> onnx.ModelProto:
    """The model that bytes hold, in the form of :func:`with_open_dims`; external data are not loaded.

    Raises:
        ModelError: if the bytes are no ONNX model.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:  # the second: protobuf in pure Python
        raise_if_out_of_memory(error)
        raise ModelError(f"{label}: not an ONNX file, or a truncated one ({len(data)} bytes)") from error
    check_whole(model, label)
    return with_open_dims(model)


def with_open_dims(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that leaves dims open where it says that they are negative.

    Exporters of PaddlePaddle write -1, and ONNX Runtime reads it so; inference would compute with the number.

    Returns:
        The model itself, or a copy where such dims are stated.
    """
    if not any(dim.dim_value < 0 for dim in _stated_dims(model)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for dim in _stated_dims(copy):
        if dim.dim_value < 0:
            dim.ClearField("dim_value")
    return copy


def _stated_dims(model: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        yield from info.type.tensor_type.shape.dim


def check_whole(model: onnx.ModelProto, label: str) -> None:
    """Checks that a model has what every model has.

    Raises:
        ModelError: if it lacks a graph or an opset.
    """
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(
            f"{label}: not an ONNX model: it has no graph or no opset; is it a whole .onnx file?"
        )


def in_known_version(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    """A model that imports ai.lowbit in the version of this release, if it imports it at all.

    Returns:
        The model itself, or a copy where it imports what ONNX Runtime writes (:data:`ORT_VERSION`).

    Raises:
        ModelError: if it imports a newer version.
    """
    versions = {entry.version for entry in model.opset_import if entry.domain == DOMAIN}
    newer = versions - {*range(VERSION + 1), ORT_VERSION}
    if newer:
        raise ModelError(
            f"{label}: uses version {max(newer)} of {DOMAIN}, this lowbit knows version {VERSION}; "
            "update lowbit"
        )
    if ORT_VERSION not in versions:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in copy.opset_import:
        if entry.domain == DOMAIN:
            entry.version = VERSION
    return copy


def load_proto(path: str | os.PathLike[str], *, external_data: bool = True) -> onnx.ModelProto:
    """Reads a model, with its external data or without.

    Raises:
        ModelError: if there is no file, it is no ONNX model, or a tensor's data cannot be loaded.
    """
    path = Path(path)
    model = parse_model(read_file(path), str(path))
    if external_data:
        load_external_data(model, path.parent, str(path))
    return model


def load_nodes(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The nodes of a model's graph and nothing else; weights beside them are not read from the disk.

    Raises:
        OSError, ValueError, DecodeError: if it is no file, or not in protobuf's wire format.
    """
    model = onnx.ModelProto()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for graph, begin, end in _messages(data, 0, len(data)):
            if graph != onnx.ModelProto.GRAPH_FIELD_NUMBER:
                continue
            for number, at, behind in _messages(data, begin, end):
                if number == onnx.GraphProto.NODE_FIELD_NUMBER:
                    model.graph.node.add().ParseFromString(data[at:behind])
    return model


def _messages(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field of a message that has a length: bytes, texts, messages."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise ValueError("a number is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < end:
        number, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}.get(kind)
        if size is None or size > end - at:
            raise ValueError("a field of unknown kind, or one that is cut off")
        if kind == 2:
            yield number, at, at + size
        at += size


def load_external_data(model: onnx.ModelProto, folder: Path, label: str) -> None:
    """Loads the data of all external tensors into a model.

    Args:
        model: the model; changed in place.
        folder: where its file lies.
        label: how to call it in an error.

    Raises:
        ModelError: names the tensor and what is wrong with its file.
    """
    for where, tensor in tensors_of(model):
        if not is_external(tensor):
            continue
        try:
            _check_location(folder, ExternalDataInfo(tensor).location)
            load_external_data_for_tensor(tensor, str(folder))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{label}: the external data of {where} cannot be read: {reason}") from error


def require_own_data(model: onnx.ModelProto, label: str) -> None:
    """Refuses a model in memory whose data lie in files: it does not say in which folder.

    Raises:
        ModelError: names the first such tensor, and says what to do.
    """
    for where, tensor in tensors_of(model):
        if is_external(tensor):
            raise ModelError(
                f"{label}: the data of {where} lie in a file, and a model in memory has no folder to look "
                "in; give the path of the model's file, or load the data first "
                "(onnx.load_external_data_for_model)"
            )


def is_external(tensor: TensorProto) -> bool:
    """Whether the data of a tensor lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def external_files(model: onnx.ModelProto, folder: Path) -> set[Path]:
    """The files in a model's folder that hold its external data."""
    names = {ExternalDataInfo(tensor).location for _, tensor in tensors_of(model) if is_external(tensor)}
    found = set()
    for name in names:
        try:
            _check_location(folder, name)
        except ValueError:  # whoever loads the model says so
            continue
        found.add(folder / name)
    return found


def stored_bytes(path: str | os.PathLike[str], model: onnx.ModelProto | None = None) -> int:
    """The size of a model's file and of the files that hold its external data.

    Args:
        path: the file.
        model: what it holds, its external data not loaded, if somebody has read it.

    Raises:
        ModelError: if there is no file, or it is no ONNX model.
    """
    path = Path(path)
    external = external_files(model or load_proto(path, external_data=False), path.parent)
    return path.stat().st_size + sum(file.stat().st_size for file in external)


def tensors_of(model: onnx.ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Every tensor of a model wherever it sits, with words that say where that is."""
    yield from _of_graph(model.graph)
    for training in model.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)
    for function in model.functions:
        yield from _of_attributes(f"function {function.name}", function.attribute_proto)
        yield from _of_nodes(function.node)


def nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a model, those of subgraphs and functions included."""
    left = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while left:
        node = left.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                left.extend(graph.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    for tensor in graph.initializer:
        yield f"initializer '{tensor.name}'", tensor
    for sparse in graph.sparse_initializer:
        yield from _of_sparse(f"sparse initializer '{sparse.values.name}'", sparse)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, TensorProto]]:
    for node in nodes:
        if node.attribute:
            name = node.name or (node.output[0] if node.output else "")
            yield from _of_attributes(f"{node.op_type} '{name}'", node.attribute)


def _of_attributes(
    owner: str, attributes: Iterable[onnx.AttributeProto]
) -> Iterator[tuple[str, TensorProto]]:
    for attribute in attributes:
        where = f"attribute '{attribute.name}' of {owner}"
        if attribute.HasField("t"):
            yield where, attribute.t
        for tensor in attribute.tensors:
            yield where, tensor
        if attribute.HasField("sparse_tensor"):
            yield from _of_sparse(where, attribute.sparse_tensor)
        for sparse in attribute.sparse_tensors:
            yield from _of_sparse(where, sparse)
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _of_graph(graph)


def _of_sparse(where: str, sparse: onnx.SparseTensorProto) -> Iterator[tuple[str, TensorProto]]:
    yield f"the values of {where}", sparse.values
    yield f"the indices of {where}", sparse.indices


def _check_location(folder: Path, location: str) -> None:
    """ONNX's own rules, which its older releases check in part. Raises ValueError."""
    path = Path(location)
    if not location or path.is_absolute() or path.drive or ".." in path.parts:
        raise ValueError(f"'{location}' is no path inside the model's folder {folder}")
    file = folder / path
    if not file.exists():
        raise ValueError(f"there is no file '{location}' in the model's folder {folder}")
    if file.resolve() != folder.resolve() / os.path.normpath(path):
        raise ValueError(
            f"'{location}' is a link or reached through one, and none is followed for the data of a model; "
            f"copy the file itself into the model's folder {folder}"
        )
    if not file.is_file():
        raise ValueError(f"'{file}' is no regular file")


def save_model(model: onnx.ModelProto, path: Path, what: str) -> None:
    """Writes a model with all of its data; the same model gives the same bytes.

    Raises:
        ModelError: if it is too large for one file; ``what`` is how to call it there.
    """
    try:
        data = model.SerializeToString(deterministic=True)
    except ValueError as error:
        raise ModelError(f"the {what} model is too large for one file: {error}") from error
    path.write_bytes(data)
