"""Calibration data: whatever the caller has, read once, checked, and kept on disk for the passes that follow.

Every stage of the quantizer reads the images again, and some sources can be read only once. So the feeds are
written to a folder as they come; memory holds one of them at a time.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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

FEW = 10
"""Below so many samples every third one does, or the second of two."""

MIRRORED = 256
"""Samples from which on their mirror images are left out: they tell little new, and take as long.

100 CIFAR images gain from them nearly what they gain from 300 further ones (ResNet-8 w2a8, divergence of the
outputs on 2000 others: .249 without, .212 with them, .200 from 400 images). A handful gains nothing clear:
where two of YuNet's three images round and the third judges, its twelve outputs have 14.00 instead of 13.73
dB in the mean (w4a4), its class scores 2 dB less.
"""

_CHANNELS = (1, 3, 4)
"""What an axis of 4-D samples has that holds colors."""


@dataclass(frozen=True)
class _Feed:
    """One feed: samples of a file, as they are or mirrored.

    Attributes:
        file: its number.
        first: number of the feed's first sample among all.
        samples: how many it has.
        start: which one of the file's is its first.
        step: which ones follow.
        mirrored: whether they are turned around.
    """

    file: int
    first: int
    samples: int
    start: int = 0
    step: int = 1
    mirrored: bool = False


class Spool:
    """Calibration feeds in a folder.

    Attributes:
        samples: samples in all feeds, repeated and mirrored ones left out.
        digest: SHA-256 of names, shapes, types and values.
        repeated: samples that fill up the last batch of a model whose batch is fixed.
    """

    def __init__(self, model: onnx.ModelProto, data: Data, folder: Path, *, mirror: bool = False) -> None:
        """Reads and checks all data.

        Args:
            model: what reads them.
            data: see :func:`lowbit.quantize`.
            folder: where they are kept.
            mirror: whether images, if there are FEW to MIRRORED of them, are followed by their mirror images.

        Raises:
            LowBitError: if there are none, or they do not fit the model's inputs, or hold NaN or infinity.
            OutputError: if the folder's disk is full.
        """
        self.folder, self.samples, self.repeated = folder, 0, 0
        self._feeds: list[_Feed] = []
        self._inputs = model_inputs(model)
        self._width: dict[str, int] = {}
        digest = hashlib.sha256()
        for number, feed in enumerate(_as_feeds(model, data)):
            checked = self._check(feed, number)
            for part in self._cut(checked):
                for name, array in sorted(part.items()):
                    digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).data)
                self._write(part)
        if not self._feeds:
            raise LowBitError("the calibration data are empty; give at least one image, 40 to 100 are better")
        self.digest = digest.hexdigest()
        if mirror and FEW <= self.samples < MIRRORED and len(self._width) == len(self._inputs):
            self._feeds += [replace(feed, mirrored=True) for feed in self._feeds]

    def __len__(self) -> int:
        return len(self._feeds)

    def feed(self, index: int) -> Feeds:
        """One feed."""
        feed, made = self._feeds[index], {}
        with np.load(self._path(feed.file), allow_pickle=False) as stored:
            for i, name in enumerate(self._inputs):
                array = stored[f"x{i}"]
                array = array[feed.start :: feed.step] if array.ndim else array
                made[name] = (
                    np.ascontiguousarray(np.flip(array, self._width[name])) if feed.mirrored else array
                )
        return made

    def __iter__(self) -> Iterator[Feeds]:
        return (self.feed(index) for index in range(len(self)))

    def given(self) -> Iterator[Feeds]:
        """The feeds without mirrored ones."""
        return (self.feed(index) for index, feed in enumerate(self._feeds) if not feed.mirrored)

    def half(self, which: int) -> Spool:
        """Every second sample, from the first (0) or the second (1) on, each with its mirror image.

        A feed of a model whose batch is fixed stays whole: then it is every second feed.
        """
        made, done = copy.copy(self), dict[int, int]()
        made._feeds, made.samples = [], 0
        fixed = any(_batch(value) for value in self._inputs.values())
        for feed in self._feeds:
            skipped = 0 if fixed else (which - feed.first) % 2
            count = feed.samples if fixed else len(range(skipped, feed.samples, 2))
            if (fixed and feed.file % 2 != which) or not count:
                continue
            if feed.file not in done:
                done[feed.file] = made.samples
                made.samples += count
            step = 1 if fixed else 2
            made._feeds.append(replace(feed, first=done[feed.file], samples=count, start=skipped, step=step))
        return made

    def held_out(self, index: int, size: int) -> npt.NDArray[np.bool_]:
        """Which of a feed's samples judge choices; none of one alone.

        Args:
            index: the feed.
            size: how many samples a tensor that follows from it has along its first dim.
        """
        if self.samples < 2:
            return np.zeros(size, bool)
        each = HELD_OUT if self.samples >= FEW else min(3, self.samples)
        return np.asarray((self._feeds[index].first + np.arange(size)) % each == each - 1)

    def _path(self, index: int) -> Path:
        return self.folder / f"feed{index:06d}.npz"

    def _write(self, part: Feeds) -> None:
        try:
            with self._path(len(self._feeds)).open("wb") as file:
                arrays: Any = {f"x{i}": part[name] for i, name in enumerate(self._inputs)}
                np.savez(file, **arrays)
        except OSError as error:
            raise OutputError(
                f"{self.folder}: the calibration data cannot be written there: {error.strerror or error}; "
                "free some space or choose another folder (--cache)"
            ) from error
        count = next((len(array) for array in part.values() if array.ndim), 1)
        self._feeds.append(_Feed(len(self._feeds), self.samples, count))
        self.samples += count
        self._width = {name: axis for name, array in part.items() if (axis := _width_axis(array)) is not None}

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
        stated = {_batch(value) for value in self._inputs.values()}
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


def _batch(value: onnx.ValueInfoProto) -> int:
    """The batch that an input states; 0 where it is open."""
    dims = value.type.tensor_type.shape.dim
    return dims[0].dim_value if dims and dims[0].HasField("dim_value") else 0


def _width_axis(array: Array) -> int | None:
    """The axis along which images are mirrored; None where nothing tells which one it is."""
    if array.ndim != 4 or min(array.shape[2], max(array.shape[1], array.shape[3])) < 8:
        return None
    first, last = (array.shape[axis] in _CHANNELS for axis in (1, 3))
    return None if first == last else 3 if first else 2


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
