"""What the right answers are: labels of samples, from the forms in which people keep them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy.typing as npt

from lowbit.errors import LowBitError
from lowbit.proto.images import Samples, load_vector

Labels = str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any] | npt.NDArray[Any]

FOLDERS = "folders"
"""Stands for a file: an image's class is the place of its subfolder among all, ordered by name."""


def labels_of(labels: Labels, samples: Samples) -> list[Any]:
    """The label of every sample.

    Args:
        labels: a file, or what it would hold. A .json maps names of files to labels, or lists labels in the
            order of the data; a .csv or .txt has a label a line, or a name and a label; an .npy or .npz is a
            vector (of an .npz with several, PATH:NAME says which). "folders" takes an image's subfolder.
        samples: the data.

    Raises:
        LowBitError: if the file is not usable, or a sample has no label.
    """
    origin = os.fspath(labels) if isinstance(labels, (str, os.PathLike)) else "the labels"
    if origin == FOLDERS:
        return _from_folders(samples)
    known = _read(origin) if isinstance(labels, (str, os.PathLike)) else labels
    if isinstance(known, Mapping):
        return [_named(known, name, origin) for name in samples.names]
    if len(known) != samples.total:
        raise LowBitError(
            f"{origin}: expected a label for each of the {samples.total} samples, found {len(known)}"
        )
    return [known[i] for i in samples.indices]


def class_labels(labels: Sequence[Any], names: Sequence[str], offset: int) -> list[int]:
    """Labels as numbers of classes, ``offset`` added.

    Raises:
        LowBitError: for a label that is no whole number.
    """
    numbers = []
    for label, name in zip(labels, names, strict=True):
        try:
            number = int(label)
            exact = number == float(label)
        except (TypeError, ValueError):
            exact = False
        if not exact:
            raise LowBitError(f"{name}: expected the number of a class as its label, found {label!r}")
        numbers.append(number + offset)
    return numbers


def _read(path: str) -> Any:
    lower = path.lower()
    if not lower.endswith((".json", ".csv", ".txt")):
        return load_vector(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _json(file.read(), path) if lower.endswith(".json") else _lines(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise LowBitError(f"{path}: cannot be read as labels: {error}") from error


def _json(text: str, path: str) -> Any:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise LowBitError(f"{path}: expected JSON: {error}") from error
    if not isinstance(read, (dict, list)):
        raise LowBitError(f"{path}: expected an object or a list of labels, found a {type(read).__name__}")
    return read


def _lines(text: str, path: str) -> Any:
    lines = [line for line in text.splitlines() if line.strip()]
    rows = list(csv.reader(lines)) if any("," in line for line in lines) else [line.split() for line in lines]
    widths = {len(row) for row in rows}
    if widths == {1}:
        return [row[0] for row in rows]
    if widths != {2}:
        raise LowBitError(
            f"{path}: expected a label a line, or a name and a label, found lines of "
            f"{', '.join(map(str, sorted(widths))) or 'no'} words"
        )
    return {row[0].strip(): row[1].strip() for row in rows}


def _named(known: Mapping[str, Any], name: str, origin: str) -> Any:
    """The label of a file, by as much of its path as the labels know."""
    parts = PurePosixPath(name).parts
    for start in range(len(parts)):
        key = str(PurePosixPath(*parts[start:]))
        if key in known:
            return known[key]
    raise LowBitError(
        f"{origin}: has no label for {name}; expected its name or the end of its path among the "
        f"{len(known)} there, such as '{next(iter(known), '')}'"
    )


def _from_folders(samples: Samples) -> list[int]:
    folders = [str(PurePosixPath(name).parent) for name in samples.all_names]
    classes = {folder: place for place, folder in enumerate(sorted(set(folders)))}
    if len(classes) < 2:
        raise LowBitError(
            "--labels folders: expected the images of each class in a subfolder of its own, found one "
            f"folder: {folders[0]}"
        )
    return [classes[folders[i]] for i in samples.indices]
