"""Input tensors for a model: random ones that exercise its whole range, or samples from a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from lowbit.errors import LowBitError
from lowbit.ops.codes import code_range, output_range
from lowbit.proto.model_file import (
    in_known_version,
    is_external,
    load_proto,
    require_own_data,
    with_open_dims,
)

if TYPE_CHECKING:
    from lowbit.proto.report import Result

Array = npt.NDArray[Any]
Model: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | Result"
Feeds = dict[str, Array]


def model_inputs(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The inputs a caller must feed: graph inputs that are not initializers."""
    constants = {init.name for init in model.graph.initializer}
    return {value.name: value for value in model.graph.input if value.name not in constants}


def parse_shapes(texts: tuple[str, ...]) -> dict[str, list[int]]:
    """``("input=1,3,224,224",)`` as a dict. Raises LowBitError for anything else."""
    shapes = {}
    for text in texts:
        name, _, dims = text.rpartition("=")
        try:
            shapes[name] = [int(dim) for dim in dims.split(",")]
        except ValueError:
            shapes[name] = []
        if not name or not shapes[name] or min(shapes[name]) < 1:
            raise LowBitError(f"--shape expects NAME=D0,D1,.. with positive numbers, got '{text}'")
    return shapes


def random_feeds(
    model: onnx.ModelProto, seed: int = 0, shapes: Mapping[str, list[int]] | None = None
) -> Feeds:
    """Random values for every input of a model.

    An input that goes straight into a QuantizeLinear is drawn uniformly from the range that its codes cover,
    so that every code occurs; other float inputs are standard normal; integer ones cover their type.

    Args:
        model: the model.
        seed: equal seeds give equal values.
        shapes: sizes for inputs with symbolic dims. Otherwise a symbolic first dim (the batch) counts as 1.

    Raises:
        LowBitError: if a dim other than the first is symbolic and ``shapes`` does not name the input, or an
            input is not a tensor of numbers.
    """
    rng = np.random.default_rng(seed)
    return {
        name: _random(rng, value, _concrete_shape(value, shapes or {}), _quantizer_range(model, name))
        for name, value in model_inputs(model).items()
    }


def shapes_of_batches(
    model: onnx.ModelProto, batches: Sequence[int], shapes: Mapping[str, list[int]] | None = None
) -> list[dict[str, list[int]]]:
    """The sizes of all inputs with a symbolic first dim, for each batch size.

    Args:
        model: the model.
        batches: the batch sizes; none: ``shapes`` alone.
        shapes: sizes of inputs with other symbolic dims; their first is replaced.

    Raises:
        LowBitError: if no input has a symbolic first dim, a batch is below 1, or sizes are missing.
    """
    if not batches:
        return [dict(shapes or {})]
    if min(batches) < 1:
        raise LowBitError(f"a batch must be at least 1, got {min(batches)}")
    open_inputs = {
        name: value
        for name, value in model_inputs(model).items()
        if value.type.tensor_type.shape.dim and not value.type.tensor_type.shape.dim[0].HasField("dim_value")
    }
    if not open_inputs:
        raise LowBitError("the model's batch is fixed: none of its inputs has a symbolic first dim")
    sizes = {name: _concrete_shape(value, shapes or {}) for name, value in open_inputs.items()}
    return [{**(shapes or {}), **{name: [batch, *size[1:]] for name, size in sizes.items()}}
            for batch in batches]  # fmt: skip


def load_samples(path: str | os.PathLike[str], model: onnx.ModelProto) -> Feeds:
    """Reads an .npz whose arrays are named like the model's inputs, samples along the first dim.

    A model with one input also takes an .npy, or an .npz with one array of any name.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {k: loaded[k] for k in loaded.files}
    except (OSError, ValueError, EOFError) as error:
        raise LowBitError(f"{os.fspath(path)}: expected an .npz or .npy file: {error}") from error
    names = list(model_inputs(model))
    if len(names) == 1 and len(arrays) == 1:
        return {names[0]: next(iter(arrays.values()))}
    missing = [name for name in names if name not in arrays]
    if missing:
        raise LowBitError(
            f"{os.fspath(path)}: expected arrays named {', '.join(names)}, "
            f"found {', '.join(arrays) or 'none'}"
        )
    return {name: arrays[name] for name in names}


def batches(samples: Feeds, model: onnx.ModelProto, limit: int | None = None) -> Iterator[Feeds]:
    """Cuts samples into feeds of the model's batch size (1 where it is symbolic)."""
    inputs = model_inputs(model)
    sizes = {name: _batch_size(value) for name, value in inputs.items()}
    for name, array in samples.items():
        rank = len(inputs[name].type.tensor_type.shape.dim)
        if array.ndim != rank:
            raise LowBitError(
                f"input '{name}' has rank {rank}, the data have the shape {list(array.shape)}; stack the "
                "samples along the first dim"
            )
    count = min(len(array) // sizes[name] for name, array in samples.items())
    if count == 0:
        raise LowBitError("the data hold less than one batch of samples")
    for i in range(count if limit is None else min(count, limit)):
        yield {name: array[i * sizes[name] : (i + 1) * sizes[name]] for name, array in samples.items()}


def _batch_size(value: onnx.ValueInfoProto) -> int:
    dims = value.type.tensor_type.shape.dim
    return dims[0].dim_value if dims and dims[0].dim_value else 1


def _concrete_shape(value: onnx.ValueInfoProto, shapes: Mapping[str, list[int]]) -> list[int]:
    if value.name in shapes:
        return shapes[value.name]
    if not value.type.tensor_type.HasField("shape"):
        raise LowBitError(f"input '{value.name}' has no shape; give one with --shape {value.name}=D0,D1,..")
    dims = value.type.tensor_type.shape.dim
    shape = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
    if None in shape[1:]:
        names = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
        raise LowBitError(
            f"input '{value.name}' has the shape [{', '.join(names)}]; give numbers with "
            f"--shape {value.name}=D0,D1,.."
        )
    return [size if size is not None else 1 for size in shape]


def _random(
    rng: np.random.Generator, value: onnx.ValueInfoProto, shape: list[int], span: tuple[float, float] | None
) -> Array:
    element = value.type.tensor_type.elem_type
    if element == TensorProto.STRING or element not in onnx.helper.get_all_tensor_dtypes():
        raise LowBitError(f"input '{value.name}' holds no numbers; random values cannot be made for it")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(max(info.min, -128), min(info.max, 255), shape, endpoint=True).astype(dtype)
    if span is not None:
        return rng.uniform(*span, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _quantizer_range(model: onnx.ModelProto, name: str) -> tuple[float, float] | None:
    """The real numbers that the codes of the quantizer behind an input cover, if there is one."""
    quantizer = next((node for node in model.graph.node if node.input and node.input[0] == name), None)
    if quantizer is None or quantizer.op_type not in ("QuantizeLinear", "LowBitQuantize"):
        return None
    constants = constant_values(model, set(quantizer.input[1:3]))
    if quantizer.input[1] not in constants:
        return None
    scale = constants[quantizer.input[1]].astype(np.float64)
    given = len(quantizer.input) > 2 and quantizer.input[2] in constants
    zero = constants[quantizer.input[2]] if given else np.zeros((), np.uint8)
    is_lowbit = quantizer.op_type == "LowBitQuantize"
    low, high = _lowbit_range(quantizer) if is_lowbit else _code_range(model, quantizer.output[0], zero.dtype)
    centre = zero.astype(np.float64)
    ends = np.concatenate([np.ravel((end - centre) * scale) for end in (low, high)])
    lowest, highest = float(ends.min()), float(ends.max())
    largest = float(np.finfo(np.float32).max)
    # A scale that means nothing (NaN, infinite) says nothing about the input either.
    return (lowest, highest) if -largest <= lowest and highest <= largest else None


def _lowbit_range(node: onnx.NodeProto) -> tuple[int, int]:
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    encoding = attrs.get("y_encoding", b"unsigned").decode()
    return output_range(attrs.get("y_bits", 8), encoding, attrs.get("y_min", ()), attrs.get("y_max", ()))


def _code_range(model: onnx.ModelProto, codes: str, dtype: np.dtype[Any]) -> tuple[int, int]:
    """The range of a type such as uint4, narrowed by a Clip of constant bounds behind it (QCDQ)."""
    bits = int("".join(filter(str.isdigit, dtype.name)))
    low, high = code_range(min(bits, 8), "unsigned" if dtype.name.startswith("u") else "signed")
    for node in model.graph.node:
        if node.op_type == "Clip" and node.input[0] == codes:
            bounds = constant_values(model, set(node.input[1:3]))
            low = max([low, *(int(bounds[n]) for n in node.input[1:2] if n in bounds)])
            high = min([high, *(int(bounds[n]) for n in node.input[2:3] if n in bounds)])
    return low, high


def constant_values(model: onnx.ModelProto, names: set[str] | None = None) -> dict[str, Array]:
    """The values of initializers and Constant nodes of the main graph: all, or those of ``names``.

    Data that lie in a file and were not loaded are left out.
    """
    values = {}
    for init in model.graph.initializer:
        if not is_external(init) and (names is None or init.name in names):
            values[init.name] = numpy_helper.to_array(init)
    for node in model.graph.node:
        if node.op_type == "Constant" and (names is None or node.output[0] in names):
            found = (_constant(attribute) for attribute in node.attribute)
            values.update((node.output[0], value) for value in found if value is not None)
    return values


def _constant(attribute: onnx.AttributeProto) -> Array | None:
    """The value that a Constant node's attribute holds; None for strings, sparse tensors, unloaded data."""
    if attribute.name == "value":
        return None if is_external(attribute.t) else numpy_helper.to_array(attribute.t)
    for prefix, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        if attribute.name.startswith(prefix):
            return np.asarray(onnx.helper.get_attribute_value(attribute), dtype)
    return None


def as_proto(model: Model) -> onnx.ModelProto:
    """The ModelProto of a path, of itself, or of a conversion's result; all its data are in memory.

    Raises:
        ModelError: if the file is no model, its external data cannot be loaded or, of a ModelProto, lie in a
            file; if the model is of a newer lowbit.
    """
    if isinstance(model, (str, os.PathLike)):
        return in_known_version(load_proto(model), os.fspath(model))
    proto = with_open_dims(model if isinstance(model, onnx.ModelProto) else model.model)
    label = proto.graph.name or "the model"
    require_own_data(proto, label)
    return in_known_version(proto, label)


@contextlib.contextmanager
def as_file(model: Model) -> Iterator[str]:
    """The path of a model; one that is in memory is written to a temporary file as long as the body runs."""
    if isinstance(model, (str, os.PathLike)):
        yield os.fspath(model)
        return
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(as_proto(model), path)
        yield str(path)
