"""Data for a model: a folder or zip of images, an .npz or an .npy, read sample by sample.

Memory does not grow with the data: images are decoded one at a time, and the arrays of an .npz, compressed or
not, are read as they are used.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from lowbit.errors import LowBitError
from lowbit.proto.preprocess import Preprocess, Sample, dims_of, element_type, make_preprocess, pillow

Array = npt.NDArray[Any]
Inputs = Mapping[str, onnx.ValueInfoProto]

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

LABEL_NAMES = ("y", "label", "labels")
"""What the vector of labels beside samples is called where nobody says."""

_PLAIN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes of 8 bits a channel; what is wider would be clipped, not scaled, on its way to RGB."""


class Batch(dict[str, Array]):
    """What one run of a model is fed.

    Attributes:
        count: how many of the samples are the data's own. A model of a fixed batch gets its last one filled
            up with samples of the same batch again, which are no data.
        names: what to call those samples: the files they came from, or their numbers.
    """

    def __init__(self, feeds: Mapping[str, Array], names: Sequence[str]) -> None:
        super().__init__(feeds)
        self.names = list(names)
        self.count = len(self.names)


class _Source(Protocol):
    """Where raw samples come from."""

    @property
    def names(self) -> Sequence[str]:
        """What to call each sample in messages."""

    def read(self, wanted: Sequence[int]) -> Iterator[Any]:
        """The raw samples of these numbers, which ascend."""


def load_feeds(
    path: str | os.PathLike[str],
    model_inputs: Inputs,
    preprocess: str | None = None,
    *,
    batch: int | None = None,
    limit: int | None = None,
    fill: bool = True,
) -> Iterator[Batch]:
    """Feeds for a model, one batch at a time, from images or arrays.

    Args:
        path: a folder of images, those of its subfolders included, in the order of their paths; a .zip of
            such; an .npy; an .npz. Of an .npz with several arrays, PATH:NAME says which one is meant. Samples
            lie along the first dim of an array.
        model_inputs: the model's inputs by name, as :func:`lowbit.proto.feeds.model_inputs` gives them.
        preprocess: how an image becomes an input (:mod:`lowbit.proto.preprocess`): a spec, or
            ``module:function``. None feeds arrays as they are, and images to inputs of bytes alone.
        batch: samples a batch, for a model with a symbolic first dim; 1 when absent. The last one may be
            smaller. A model with a fixed first dim decides itself.
        limit: use this many samples, evenly spread over the data.
        fill: whether a fixed batch that is not full is filled up with its own samples; it stays short
            otherwise.

    Returns:
        An iterator of :class:`Batch`. Everything but the samples themselves was checked when it is returned.

    Raises:
        LowBitError: if the path, the spec or a sample is not usable: names file, what was expected, what was
            found and what to do.
    """
    return Samples(path, model_inputs, preprocess, limit=limit).batches(batch, fill=fill)


class Samples:
    """The data at a path, for one model; can be read several times."""

    def __init__(
        self,
        data: str | os.PathLike[str] | Mapping[str, Array],
        model_inputs: Inputs,
        preprocess: str | None = None,
        *,
        limit: int | None = None,
    ) -> None:
        """Opens data as :func:`load_feeds` describes; arrays in memory, by input, are as an .npz of them.

        Attributes:
            total: how many samples the data hold.
            all_names: what to call each of them: files, or numbers.
            indices: which of them are used.
            names: what to call those.
        """
        if limit is not None and limit < 1:
            raise LowBitError(f"the number of samples must be at least 1, got {limit}")
        self.inputs = dict(model_inputs)
        self._dtypes = {name: element_type(value) for name, value in self.inputs.items()}
        self._dims = {name: dims_of(value) for name, value in self.inputs.items()}
        if isinstance(data, Mapping):
            self._source, self._prepare = _open_arrays("data", _held(data), "", self.inputs, preprocess)
        else:
            self._source, self._prepare = _open(os.fspath(data), self.inputs, preprocess)
        self.all_names = self._source.names
        self.total = len(self.all_names)
        used = self.total if limit is None else min(limit, self.total)
        self.indices = [i * self.total // used for i in range(used)]
        self.names = [self.all_names[i] for i in self.indices]

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, stop: int) -> Samples:
        """The same data, of whose samples only those from ``start`` to ``stop`` are used."""
        chosen = copy.copy(self)
        chosen.indices, chosen.names = self.indices[start:stop], self.names[start:stop]
        return chosen

    def __iter__(self) -> Iterator[Sample]:
        """The samples, each without the batch dim, in the shape and type of the model's inputs."""
        raw = self._source.read(self.indices)
        for name, value in zip(self.names, raw, strict=True):
            sample = value if self._prepare is None else self._prepare(value, name)
            yield {key: self._fitting(key, array, name) for key, array in sample.items()}

    def batches(self, batch: int | None = None, *, fill: bool = True) -> Iterator[Batch]:
        """The samples in batches, see :func:`load_feeds`."""
        if batch is not None and batch < 1:
            raise LowBitError(f"the batch must be at least 1, got {batch}")
        fixed = self.fixed_batch()
        return self._batches(fixed or batch or 1, fill=fill and fixed is not None)

    def fixed_batch(self) -> int | None:
        """The first dim that the model's inputs fix; None where it is symbolic."""
        sizes = {dims[0] for dims in self._dims.values() if dims} - {None}
        if len(sizes) > 1:
            raise LowBitError(
                f"the model's inputs have first dims of {', '.join(map(str, sorted(sizes, key=str)))}, which "
                "are no batch; only a model whose inputs share their first dim can be fed sample by sample"
            )
        return next(iter(sizes), None)

    def _batches(self, size: int, *, fill: bool) -> Iterator[Batch]:
        held: list[Sample] = []
        for done, sample in enumerate(self, 1):
            held.append(sample)
            if len(held) == size or done == len(self):
                yield self._stacked(held, self.names[done - len(held) : done], size if fill else len(held))
                held = []

    def _stacked(self, samples: list[Sample], names: list[str], size: int) -> Batch:
        filled = [samples[i % len(samples)] for i in range(size)]
        feeds = {}
        for key in self.inputs:
            arrays = [sample[key] for sample in filled]
            if len({array.shape for array in arrays}) > 1:
                odd = next(i for i, array in enumerate(arrays) if array.shape != arrays[0].shape)
                raise LowBitError(
                    f"{names[odd]}: expected {list(arrays[0].shape)} like {names[0]} in the same batch, "
                    f"found {list(arrays[odd].shape)}; resize or crop to one size (--preprocess), or use "
                    "batches of 1"
                )
            feeds[key] = np.stack(arrays)
        return Batch(feeds, names)

    def _fitting(self, key: str, array: Array, name: str) -> Array:
        """The array in the input's type, if its shape and type fit."""
        dims, dtype = self._dims[key], self._dtypes[key]
        if dims is not None:
            wanted = dims[1:]
            fits = len(wanted) == array.ndim and all(
                want in (None, found) for want, found in zip(wanted, array.shape, strict=True)
            )
            if not fits:
                shape = ", ".join("any" if dim is None else str(dim) for dim in wanted)
                raise LowBitError(
                    f"{name}: expected a sample [{shape}] for input '{key}', found {list(array.shape)}; "
                    "--preprocess resize=,crop=,layout= makes it fit"
                )
        if array.dtype == dtype:
            return array
        if np.issubdtype(array.dtype, np.floating) and np.issubdtype(dtype, np.floating):
            return array.astype(dtype)
        raise LowBitError(f"{name}: expected {dtype} for input '{key}', found {array.dtype}; {_HOW_TO_SAY}")


_HOW_TO_SAY = (
    "say with --preprocess how values become the model's input: 'raw' feeds pixels 0..255, 'scale=1/255' "
    "0..1, 'imagenet' crops and normalizes as torchvision does"
)


_EXPECTED = "a folder or .zip of images, an .npz or an .npy"


def load_vector(path: str | os.PathLike[str]) -> Array:
    """The vector of labels in an .npy or .npz. Of an .npz with several, PATH:NAME says which.

    Raises:
        LowBitError: if there is none, or it is not clear which is meant.
    """
    file, member = _split(os.fspath(path))
    if not os.path.isfile(file):
        raise LowBitError(f"{file}: no such file")
    arrays = _arrays(file, "a vector of labels in an .npy or .npz, or labels in a .json, .csv or .txt")
    vectors = [a for name, a in arrays.items() if len(a.shape) == 1 and name == (member or name)]
    named = [vector for vector in vectors if vector.member in LABEL_NAMES]
    if len(vectors) > 1 and len(named) == 1:
        vectors = named
    if len(vectors) != 1:
        raise _unclear(file, arrays, f"a vector '{member}'" if member else "one vector")
    return np.array(list(vectors[0].rows(range(vectors[0].shape[0]))))


def _open(path: str, inputs: Inputs, preprocess: str | None) -> tuple[_Source, Preprocess | None]:
    file, member = _split(path)
    if os.path.isdir(file) or file.lower().endswith(".zip"):
        if member:
            raise LowBitError(f"{path}: a name after ':' chooses an array of an .npz; {file} holds images")
        files = _ImageFiles(file)
        return files, _as_they_are(file, inputs) if preprocess is None else make_preprocess(
            preprocess, inputs
        )
    if not os.path.isfile(file):
        raise LowBitError(f"{file}: no such file or folder")
    return _open_arrays(file, _arrays(file, _EXPECTED), member, inputs, preprocess)


def _open_arrays(
    file: str, arrays: Mapping[str, _Stored], member: str, inputs: Inputs, preprocess: str | None
) -> tuple[_Source, Preprocess | None]:
    if preprocess is None:
        return _FedArrays(file, _chosen(file, arrays, list(inputs), member)), None
    prepare = make_preprocess(preprocess, inputs)
    chosen = _chosen(file, arrays, [next(iter(inputs))], member)
    return _Images(file, next(iter(chosen.values()))), prepare


def _held(data: Mapping[str, Array]) -> dict[str, _Stored]:
    arrays = {name: np.asarray(array) for name, array in data.items()}
    return {
        name: _Held("data", name, array.shape, array.dtype, False, array) for name, array in arrays.items()
    }


def _split(path: str) -> tuple[str, str]:
    """PATH:NAME in its parts; a path that exists, or a drive's letter, is no such pair."""
    file, separator, member = path.rpartition(":")
    if not separator or len(file) < 2 or os.path.exists(path):
        return path, ""
    return file, member


def _as_they_are(file: str, inputs: Inputs) -> Preprocess:
    types = {name: element_type(value) for name, value in inputs.items()}
    if any(dtype != np.uint8 for dtype in types.values()):
        listed = ", ".join(f"{name}: {dtype}" for name, dtype in types.items())
        raise LowBitError(f"{file}: images hold bytes, the model takes {listed}; {_HOW_TO_SAY}")
    return make_preprocess("raw", inputs)


# ---- images


class _ImageFiles:
    """The images of a folder or a zip, in the order of their paths."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pillow = pillow(path)
        names = _files_of_zip(path) if not os.path.isdir(path) else _files_of_folder(path)
        self._members = sorted(name for name in names if _is_image(name))
        if not self._members:
            others = f"{len(names)} other files" if names else "nothing"
            raise LowBitError(
                f"{path}: expected images ({', '.join(IMAGE_SUFFIXES)}), found {others}; name the folder "
                "that holds them"
            )
        self.names = [f"{path}/{member}" for member in self._members]

    def read(self, wanted: Sequence[int]) -> Iterator[Array]:
        """The images of these numbers, uint8 [H, W, 3] in RGB."""
        with contextlib.ExitStack() as stack:
            archive = None if os.path.isdir(self._path) else stack.enter_context(zipfile.ZipFile(self._path))
            for i in wanted:
                try:
                    if archive is None:
                        data = Path(self._path, self._members[i]).read_bytes()
                    else:
                        data = archive.read(self._members[i])
                except (OSError, zipfile.BadZipFile, zlib.error) as error:
                    raise LowBitError(f"{self.names[i]}: cannot be read: {error}") from error
                yield self._decoded(data, self.names[i])

    def _decoded(self, data: bytes, name: str) -> Array:
        from PIL import ImageOps

        try:
            image = self._pillow.open(io.BytesIO(data))
            image.load()
            # As a viewer shows it: cameras store the turn of a picture beside it.
            image = ImageOps.exif_transpose(image)
        except (OSError, SyntaxError, ValueError, self._pillow.DecompressionBombError) as error:
            raise LowBitError(
                f"{name}: expected an image, it cannot be decoded ({len(data)} bytes): {error}; remove or "
                "replace the file"
            ) from error
        if image.mode not in _PLAIN_MODES:
            raise LowBitError(
                f"{name}: expected 8 bits a channel, found Pillow's mode '{image.mode}'; convert the file "
                "first, or give an .npz of arrays"
            )
        return np.asarray(image.convert("RGB"))


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def _files_of_folder(path: str) -> list[str]:
    return [str(PurePosixPath(file.relative_to(path))) for file in Path(path).rglob("*") if file.is_file()]


def _files_of_zip(path: str) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [info.filename for info in archive.infolist() if not info.is_dir()]
    except (OSError, zipfile.BadZipFile) as error:
        raise LowBitError(f"{path}: expected a zip of images: {error}") from error


# ---- arrays


@dataclass(frozen=True)
class _Stored:
    """An array in a file, of which only the header was read."""

    file: str
    member: str  # the name of the .npy inside of an .npz; empty for an .npy
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    def rows(self, wanted: Sequence[int]) -> Iterator[Array]:
        """The rows of these numbers, which ascend; what lies between them is skipped."""
        try:
            if self.fortran:  # its rows are not in one piece
                whole = self._whole()
                yield from (np.ascontiguousarray(whole[i]) for i in wanted)
            elif not self.member:
                mapped = np.load(self.file, mmap_mode="r", allow_pickle=False)
                yield from (np.array(mapped[i]) for i in wanted)
            else:
                yield from self._streamed(wanted)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, LowBitError):
                raise
            raise LowBitError(f"{self.label}: cannot be read: {error}; is the file whole?") from error

    @property
    def label(self) -> str:
        return f"{self.file}:{self.member}" if self.member else self.file

    def _whole(self) -> Array:
        loaded = np.load(self.file, allow_pickle=False)
        return loaded[self.member] if self.member else loaded  # type: ignore[no-any-return]

    def _streamed(self, wanted: Sequence[int]) -> Iterator[Array]:
        length = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        with zipfile.ZipFile(self.file) as archive, archive.open(f"{self.member}.npy") as stream:
            _header(stream)
            position = 0
            for i in wanted:
                while position < i:
                    _exactly(stream, length)
                    position += 1
                data = _exactly(stream, length)
                position += 1
                yield np.frombuffer(data, self.dtype).reshape(self.shape[1:]).copy()


@dataclass(frozen=True)
class _Held(_Stored):
    """An array in memory."""

    array: Array

    def rows(self, wanted: Sequence[int]) -> Iterator[Array]:
        """The rows of these numbers."""
        return (self.array[i] for i in wanted)


def _exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) != length:
        raise EOFError("it ends early")
    return data


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version[0]}.{version[1]} of the .npy format is not known")


def _arrays(file: str, expected: str) -> dict[str, _Stored]:
    """The arrays of an .npz by name, or an .npy's under the empty name."""
    found = {}
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    with archive.open(member) as stream:
                        shape, fortran, dtype = _header(stream)
                    name = member.removesuffix(".npy")
                    found[name] = _Stored(file, name, shape, dtype, fortran)
        else:
            with open(file, "rb") as stream:
                shape, fortran, dtype = _header(stream)
            found[""] = _Stored(file, "", shape, dtype, fortran)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LowBitError(f"{file}: expected {expected}: {error}") from error
    return found


def _chosen(file: str, arrays: Mapping[str, _Stored], names: list[str], member: str) -> dict[str, _Stored]:
    """Which arrays are meant, by the names of what they are for."""
    if member:
        if member not in arrays or len(names) > 1:
            raise _unclear(file, arrays, f"an array '{member}'" if len(names) == 1 else _listed(names))
        chosen = {names[0]: arrays[member]}
    elif all(name in arrays for name in names):
        chosen = {name: arrays[name] for name in names}
    elif len(names) == 1:
        # Labels and numbers of samples, which often lie beside images, are vectors.
        fitting = list(arrays.values())
        if len(fitting) > 1:
            fitting = [array for array in fitting if len(array.shape) > 1]
        if len(fitting) != 1:
            raise _unclear(file, arrays, f"one array of samples, or one named '{names[0]}'")
        chosen = {names[0]: fitting[0]}
    else:
        raise _unclear(file, arrays, _listed(names))
    for stored in chosen.values():
        if not stored.shape or stored.shape[0] == 0:
            raise LowBitError(
                f"{stored.label}: expected samples along the first dim, found the shape {list(stored.shape)}"
            )
        if stored.dtype.kind not in "biuf":
            raise LowBitError(f"{stored.label}: expected numbers, found {stored.dtype}")
    lengths = {name: stored.shape[0] for name, stored in chosen.items()}
    if len(set(lengths.values())) > 1:
        raise LowBitError(
            f"{file}: expected equally many samples in every array, found "
            + ", ".join(f"{count} in {name}" for name, count in lengths.items())
        )
    return chosen


def _listed(names: Sequence[str]) -> str:
    return f"arrays named {', '.join(names)}"


def _unclear(file: str, arrays: Mapping[str, _Stored], expected: str) -> LowBitError:
    found = ", ".join(f"{name or 'one array'} {list(a.shape)}" for name, a in arrays.items()) or "none"
    return LowBitError(f"{file}: expected {expected}, found {found}; choose one with {file}:NAME")


class _Images:
    """The rows of one array, each an image to be prepared."""

    def __init__(self, file: str, stored: _Stored) -> None:
        self._stored = stored
        self.names = _numbered(file, stored.shape[0])

    def read(self, wanted: Sequence[int]) -> Iterator[Array]:
        """The rows of these numbers."""
        return self._stored.rows(wanted)


class _FedArrays:
    """The rows of one array per input, fed as they are."""

    def __init__(self, file: str, stored: Mapping[str, _Stored]) -> None:
        self._stored = dict(stored)
        self.names = _numbered(file, next(iter(stored.values())).shape[0])

    def read(self, wanted: Sequence[int]) -> Iterator[Sample]:
        """The rows of these numbers, by input."""
        rows = [stored.rows(wanted) for stored in self._stored.values()]
        return (dict(zip(self._stored, each, strict=True)) for each in zip(*rows, strict=True))


def _numbered(file: str, count: int) -> list[str]:
    return [f"{file}[{i}]" for i in range(count)]
