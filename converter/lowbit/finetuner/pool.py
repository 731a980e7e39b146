"""The images of a fine-tuning: all of one shape, in files, with random changes that need no label."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

from lowbit.errors import LowBitError, OutputError
from lowbit.proto.preprocess import dims_of
from lowbit.quantizer.data import Spool

Array = npt.NDArray[Any]

_SHIFT = 8
"""Images are moved by up to this part of their height and width."""

_JUDGES, _MOST_JUDGED = 8, 500
"""Changed copies of each held-out sample, and samples beyond which there are fewer."""

_CHANNELS = (1, 3)
"""Sizes of the axis of channels that tell NHWC images from NCHW ones."""


class Pool:
    """Samples that train, and samples that judge.

    Attributes:
        train: numbers of the former.
        held: numbers of the latter.
    """

    def __init__(self, model: onnx.ModelProto, spool: Spool, names: list[str], folder: Path) -> None:
        """Copies what a network's inputs are fed into one file each.

        Raises:
            LowBitError: if there are fewer than two samples, or their shapes differ.
            OutputError: if the folder's disk is full.
        """
        if spool.samples < 2:
            raise LowBitError(
                "one image cannot both train and judge: give at least 10, 100 to some thousands are better"
            )
        self._arrays: dict[str, Array] = {}
        values = {value.name: value for value in model.graph.input}
        self._last = {name: _channels_last(values[name]) for name in names}
        held: list[int] = []
        at = 0
        for index, feed in enumerate(spool):
            size = min(len(next(iter(feed.values()))), spool.samples - at)
            held += [at + int(i) for i in np.flatnonzero(spool.held_out(index, size))]
            for name in names:
                self._add(name, feed[name][:size], spool.samples, at, folder)
            at += size
        self.held = np.array(held)
        self.train = np.setdiff1d(np.arange(at), self.held)

    def _add(self, name: str, part: Array, total: int, at: int, folder: Path) -> None:
        if name not in self._arrays:
            self._arrays[name] = store(
                folder / f"image{len(self._arrays)}.npy", (total, *part.shape[1:]), part.dtype
            )
        known = self._arrays[name]
        if part.shape[1:] != known.shape[1:]:
            raise LowBitError(
                f"input '{name}': images of the shapes {list(known.shape[1:])} and {list(part.shape[1:])}; "
                "fine-tuning needs one shape: give --preprocess with resize= or crop="
            )
        known[at : at + len(part)] = part

    def images(self, numbers: Array) -> dict[str, Tensor]:
        """Samples as they were given, float32 where they are numbers with a fraction."""
        return {name: torch.from_numpy(array[numbers]) for name, array in self._arrays.items()}

    @property
    def judged(self) -> int:
        """How many of them :meth:`judges` gives."""
        return self._copies * len(self.held)

    @property
    def _copies(self) -> int:
        return max(1, min(_JUDGES, _MOST_JUDGED // len(self.held)))

    def judges(self, batch: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Held-out samples, changed: `lowbit quantize` has seen them as they are, and fits them too well."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self._copies):
            for start in range(0, len(self.held), batch):
                yield self.changed(self.held[start : start + batch], generator, 0.0)

    def changed(self, numbers: Array, generator: torch.Generator, mix: float) -> dict[str, Tensor]:
        """Samples flipped and moved at random and, with a probability each, mixed with another one.

        What the float model says about them is what is learned, so that nobody has to know what they show.
        """
        count = len(numbers)
        flip = torch.rand(count, generator=generator) < 0.5
        moves = torch.rand(count, 2, generator=generator) * 2 - 1
        partner = torch.randperm(count, generator=generator)
        share = torch.rand(count, generator=generator)
        share = torch.where(torch.rand(count, generator=generator) < mix, share, 1.0)
        made = {}
        for name, x in self.images(numbers).items():
            if x.ndim != 4 or not x.is_floating_point():
                made[name] = x
                continue
            x = x.permute(0, 3, 1, 2) if self._last[name] else x
            x = torch.where(flip[:, None, None, None], x.flip(3), x)
            x = _moved(x, moves)
            part = share[:, None, None, None]
            # An image that is fed as codes stays one: mixing is the only step that leaves whole numbers.
            whole = bool((x == x.round()).all())
            x = x * part + x[partner] * (1 - part)
            x = x.round() if whole else x
            made[name] = (x.permute(0, 2, 3, 1) if self._last[name] else x).contiguous()
        return made


def store(path: Path, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An array in a file.

    Raises:
        OutputError: if the disk is full.
    """
    try:
        with path.open("wb") as file:
            file.truncate(0)
        return np.lib.format.open_memmap(path, "w+", dtype, shape)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: intermediate values cannot be written there: {error.strerror or error}; free "
            "some space or choose another folder (--cache)"
        ) from error


def _channels_last(value: onnx.ValueInfoProto) -> bool:
    dims = dims_of(value)
    return dims is not None and len(dims) == 4 and dims[3] in _CHANNELS and dims[1] not in _CHANNELS


def _moved(x: Tensor, moves: Tensor) -> Tensor:
    """Images [N, C, H, W] moved by parts (of at most 1) of the largest shift; edges are repeated."""
    height, width = x.shape[2:]
    places = [
        (torch.arange(n)[None] + (moves[:, i] * (n // _SHIFT)).round().long()[:, None]).clamp(0, n - 1)
        for i, n in enumerate((height, width))
    ]
    rows = places[0][:, None, :, None].expand(-1, x.shape[1], -1, width)
    columns = places[1][:, None, None, :].expand(-1, x.shape[1], height, -1)
    return x.gather(2, rows).gather(3, columns)
