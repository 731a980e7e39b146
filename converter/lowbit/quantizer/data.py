"""Calibration data: whatever the caller has, read once, checked, and kept on disk for the passes that follow.

Every stage of the quantizer reads the images again, and some sources can be read only once. So the feeds are
written to a folder as they come; memory holds one of them at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from lowbit.errors import LowBitError, OutputError
from lowbit.proto.feeds import batches, model_inputs

Array = npt.NDArray[Any]
Feeds: TypeAlias = dict[str, Array]
Data: TypeAlias = "Iterable[Mapping[str, Array] | Array] | Mapping[str, Array] | Array | Any"
"""A CalibrationDataReader, an iterable of dicts or arrays, or all samples in one array or dict."""

_CHUNK_ELEMENTS = 1 << 18
"""Elements of all inputs above which a feed is cut: one photo of 224 x 224, or 85 images of 32 x 32.

The values inside a network take tens of times its input; this bounds them whatever batches the caller makes.
"""

HELD_OUT = 5
"""Every fifth sample is kept from rounding where choices are made, and judges them."""


class Spool:
    """Calibration feeds in a folder.

    Attributes:
        count: feeds.
        samples: samples in all of them, repeated ones left out.
        digest: SHA-256 of names, shapes, types and values.
        repeated: samples that fill up the last batch of a model whose batch is fixed.
    """

    def __init__(self, model: onnx.ModelProto, data: Data, folder: Path) -> None:
        """Reads and checks all data.

        Raises:
            LowBitError: if there are none, or they do not fit the model's inputs, or hold NaN or infinity.
            OutputError: if the folder's disk is full.
        """
        self.folder, self.count, self.samples, self.repeated = folder, 0, 0, 0
        self._first: list[int] = []
        self._inputs = model_inputs(model)
        digest = hashlib.sha256()
        for number, feed in enumerate(_as_feeds(model, data)):
            checked = self._check(feed, number)
            for part in self._cut(checked):
                for name, array in sorted(part.items()):
                    digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).data)
                self._write(part)
        if not self.count:
            raise LowBitError("the calibration data are empty; give at least one image, 40 to 100 are better")
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self.count

    def feed(self, index: int) -> Feeds:
        """One feed."""
        with np.load(self._path(index), allow_pickle=False) as stored:
            return {name: stored[f"x{i}"] for i, name in enumerate(self._inputs)}

    def __iter__(self) -> Iterator[Feeds]:
        return (self.feed(index) for index in range(self.count))

    def held_out(self, index: int, size: int) -> npt.NDArray[np.bool_]:
        """Which of a feed's samples judge choices; none where there are too few for that.

        Args:
            index: the feed.
            size: how many samples a tensor that follows from it has along its first dim.
        """
        if self.samples < 2 * HELD_OUT:
            return np.zeros(size, bool)
        return np.asarray((self._first[index] + np.arange(size)) % HELD_OUT == HELD_OUT - 1)

    def _path(self, index: int) -> Path:
        return self.folder / f"feed{index:06d}.npz"

    def _write(self, part: Feeds) -> None:
        self._first.append(self.samples)
        try:
            with self._path(self.count).open("wb") as file:
                arrays: Any = {f"x{i}": part[name] for i, name in enumerate(self._inputs)}
                np.savez(file, **arrays)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the calibration data cannot be written there: {error.strerror or error}; "
                "free some space or choose another folder (--cache)"
            ) from error
        self.count += 1
        self.samples += next((len(array) for array in part.values() if array.ndim), 1)

    def _check(self, feed: Feeds, number: int) -> Feeds:
        where = f"calibration feed {number}"
        missing = [name for name in self._inputs if name not in feed]
        unknown = [name for name in feed if name not in self._inputs]
        if missing or unknown:
            raise LowBitError(
                f"{where}: expected arrays for {', '.join(self._inputs)}, found {', '.join(feed) or 'none'}"
            )
        checked = {}
        for name, value in self._inputs.items():
            array = np.asarray(feed[name])
            wanted = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            if array.dtype == object or array.dtype.kind not in "biuf":
                raise LowBitError(f"{where}: '{name}' is an array of {array.dtype}, expected {wanted}")
            if array.dtype != wanted:
                if array.dtype.kind == "f" and wanted.kind != "f":
                    raise LowBitError(f"{where}: '{name}' is {array.dtype}, the model reads {wanted}")
                array = array.astype(wanted)
            dims = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and array.ndim == len(dims) - 1:
                array = array[None]  # one sample without its batch
            stated = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
            fits = len(stated) == array.ndim and all(
                size in (None, given) for size, given in zip(stated[1:], array.shape[1:], strict=True)
            )
            if value.type.tensor_type.HasField("shape") and not fits:
                shown = ", ".join("?" if size is None else str(size) for size in stated)
                raise LowBitError(
                    f"{where}: '{name}' has the shape {list(array.shape)}, the model reads [{shown}]"
                )
            if not array.size:
                raise LowBitError(f"{where}: '{name}' of shape {list(array.shape)} is empty")
            if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
                raise LowBitError(f"{where}: '{name}' holds NaN or infinity")
            checked[name] = array
        return checked

    def _cut(self, feed: Feeds) -> Iterator[Feeds]:
        """A feed in parts of the model's batch or, where that is open, of a bounded size."""
        sizes = {array.shape[0] if array.ndim else 0 for array in feed.values()}
        stated = {
            dims[0].dim_value if dims and dims[0].HasField("dim_value") else 0
            for dims in (value.type.tensor_type.shape.dim for value in self._inputs.values())
        }
        if len(sizes) != 1 or len(stated) != 1 or 0 in sizes:
            yield feed
            return
        size, batch = sizes.pop(), stated.pop()
        elements = sum(array.size for array in feed.values()) // size
        step = batch or max(1, _CHUNK_ELEMENTS // max(1, elements))
        for start in range(0, size, step):
            part = {name: array[start : start + step] for name, array in feed.items()}
            short = batch - min(step, size - start) if batch else 0
            if short > 0:
                self.repeated += short
                part = {
                    name: np.concatenate([array, np.repeat(array[-1:], short, 0)])
                    for name, array in part.items()
                }
            yield part


def _as_feeds(model: onnx.ModelProto, data: Data) -> Iterator[Feeds]:
    inputs = list(model_inputs(model))
    if isinstance(data, np.ndarray):
        data = {inputs[0]: data} if len(inputs) == 1 else _refuse_single(inputs)
    if isinstance(data, Mapping):
        yield from _all_samples(model, dict(data))
        return
    source = iter(data.get_next, None) if hasattr(data, "get_next") else data
    if isinstance(source, (str, bytes, Path)) or not isinstance(source, Iterable):
        raise LowBitError(
            f"the calibration data are {type(data).__name__}; expected arrays, dicts of arrays by input, an "
            "iterable of those, or a CalibrationDataReader"
        )
    for item in source:
        if isinstance(item, Mapping):
            yield dict(item)
        elif isinstance(item, (tuple, list)) and len(item) == len(inputs) > 1:
            yield dict(zip(inputs, item, strict=True))
        elif len(inputs) == 1:
            yield {inputs[0]: np.asarray(item)}
        else:
            _refuse_single(inputs)


def _all_samples(model: onnx.ModelProto, samples: Feeds) -> Iterator[Feeds]:
    inputs = model_inputs(model)
    unknown = [name for name in samples if name not in inputs]
    if unknown or len(samples) != len(inputs):
        raise LowBitError(
            f"the calibration data have arrays for {', '.join(samples) or 'nothing'}, the model reads "
            f"{', '.join(inputs)}"
        )
    if any(np.asarray(array).size == 0 for array in samples.values()):
        return
    yield from (
        batches({name: np.asarray(array) for name, array in samples.items()}, model)
        if (len(samples) > 1)
        else iter([samples])
    )


def _refuse_single(inputs: list[str]) -> Feeds:
    raise LowBitError(
        f"the model has {len(inputs)} inputs ({', '.join(inputs)}); give a dict of arrays for each sample"
    )
