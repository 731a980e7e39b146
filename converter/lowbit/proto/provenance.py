"""Which value of a converted model is which value of its original.

The converter records it in the model's metadata under ``lowbit.provenance``, as JSON:

    {"version": 1, "source": {"file": .., "sha256": ..},
     "values": {"<lowbit value>": {"source": "<original value>", "perm": [0, 2, 3, 1], "offset": 128}, ..},
                (with "dims": [8, 3, 3] the original value is one whose last dims, these, were flattened;
                "bipolar": true where the codes -1 and +1 are stored as 0 and 1; with "rounded": [scale,
                zero point, lowest, highest code] the original value is real numbers, and these its codes)
     "nodes": {"<lowbit node>": ["<original node>", ..], ..}}
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from lowbit.errors import ModelError
from lowbit.ops import DOMAIN, register_schemas

Array = npt.NDArray[Any]

KEY = "lowbit.provenance"


@dataclass(frozen=True)
class Place:
    """``lowbit value == transpose(source value, perm) + offset``, stored as ``dtype``.

    With ``dims`` the source value's last dim is these, flattened.

    A bipolar one is ``(transpose(source value, perm) + 1) / 2``. One that is ``rounded`` holds codes of the
    source's real numbers: scale, zero point, lowest and highest code.
    """

    source: str
    perm: tuple[int, ...] | None = None
    offset: int = 0
    dtype: np.dtype[Any] | None = None
    bipolar: bool = False
    rounded: tuple[float, int, int, int] | None = None
    dims: tuple[int, ...] | None = None

    def carry(self, value: Array) -> Array:
        """The original's value in the form that it has in the converted model."""
        if self.dims is not None:
            value = value.reshape(*value.shape[:-1], *self.dims)
        if self.perm is not None:
            value = value.transpose(self.perm)
        if self.rounded is not None:
            scale, zero_point, low, high = self.rounded
            with np.errstate(over="ignore"):
                codes = np.rint(value / np.float32(scale)) + np.float32(zero_point)
            value = np.fmin(np.fmax(codes, np.float32(low)), np.float32(high)).astype(np.int16)
        if self.bipolar:  # -1 and +1 as 0 and 1
            value = value > 0
        if self.offset:  # signed codes as unsigned ones: the same real numbers on the u8 side
            value = value.astype(np.int16) + self.offset
        return np.asarray(value, self.dtype, order="C")  # which leaves a scalar one


def _has_record(model: onnx.ModelProto) -> bool:
    return any(entry.key == KEY for entry in model.metadata_props)


def read_places(converted: onnx.ModelProto, original: onnx.ModelProto) -> dict[str, Place]:
    """The values of a converted model that have a counterpart in its original.

    Those that the record lists, and what lowbit nodes read of the inputs and of nodes that the converter left
    alone, which keep their names. None of a model of which nothing was converted.

    Raises:
        ModelError: if the model carries no record, or one that does not fit ``original``.
    """
    if not any(node.domain == DOMAIN for node in converted.graph.node) and not _has_record(converted):
        return {}
    try:
        values = _record(converted)["values"]
        places = {
            name: Place(entry["source"], tuple(entry["perm"]) if entry.get("perm") else None,
                        int(entry.get("offset", 0)), bipolar=bool(entry.get("bipolar")),
                        rounded=_rounded(entry.get("rounded")),
                        dims=tuple(entry["dims"]) if entry.get("dims") else None)
            for name, entry in values.items()
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the converted model's '{KEY}' record is damaged: {error}") from error

    there = {name for node in original.graph.node for name in node.output}
    there |= {value.name for value in original.graph.input}
    known = {name: place for name, place in places.items() if place.source in there}
    if places and not known:
        raise ModelError(
            "the converted model was not made from this original, which has none of its values, such as "
            f"'{next(iter(places.values())).source}'"
        )
    made = {name for node in converted.graph.node if node.domain != DOMAIN for name in node.output}
    made |= {value.name for value in converted.graph.input}
    read = {name for node in converted.graph.node if node.domain == DOMAIN for name in node.input}
    known = {**{name: Place(name) for name in made & read & there - set(places)}, **known}
    types = _element_types(converted)
    return {name: replace(place, dtype=types.get(name)) for name, place in known.items()}


def _rounded(entry: Any) -> tuple[float, int, int, int] | None:
    if entry is None:
        return None
    scale, zero_point, low, high = entry
    return float(scale), int(zero_point), int(low), int(high)


def other_source(converted: onnx.ModelProto, path: str | os.PathLike[str]) -> bool:
    """Whether the file at ``path`` is another one than the model was converted from."""
    expected = _record(converted).get("source", {}).get("sha256")
    return bool(expected) and hashlib.sha256(Path(path).read_bytes()).hexdigest() != expected


def widens_float16(converted: onnx.ModelProto) -> bool:
    """Whether it was made of its original with float32 in the place of float16."""
    stored = {entry.key: entry.value for entry in converted.metadata_props}
    try:
        return bool(json.loads(stored.get("lowbit.options", "{}")).get("widen_float16"))
    except (ValueError, AttributeError):  # damaged
        return False


def source_file(converted: onnx.ModelProto) -> str | None:
    """The name of the file that a model was converted from; None for any other model."""
    try:
        name = _record(converted).get("source", {}).get("file")
    except (ModelError, ValueError, AttributeError):  # a damaged record says nothing
        return None
    return name if isinstance(name, str) and name == os.path.basename(name) else None


def _record(converted: onnx.ModelProto) -> dict[str, Any]:
    stored = {entry.key: entry.value for entry in converted.metadata_props}
    if KEY not in stored:
        raise ModelError(
            f"the converted model has no '{KEY}' record, so its values cannot be matched with the "
            "original's; convert it again with this release"
        )
    record = json.loads(stored[KEY])
    if not isinstance(record, dict):
        raise ModelError(f"the converted model's '{KEY}' record is damaged: it is no JSON object")
    return record


def _element_types(model: onnx.ModelProto) -> dict[str, np.dtype[Any]]:
    register_schemas()
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.elem_type:
            types[value.name] = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return types
