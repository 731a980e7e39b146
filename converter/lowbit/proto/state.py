"""What a long run has done so far, in files from which an interrupted one goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.proto.atomic import write_atomically

Array = npt.NDArray[Any]


def save_arrays(path: Path, facts: Any, arrays: Mapping[str, Array]) -> None:
    """Keeps arrays by name, and facts that JSON can say; replaces what was kept there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of tensors need not be names of files, so the archive numbers them.
    named: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arrays.values())}
    named["facts"] = np.array(json.dumps([facts, list(arrays)]))

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, **named)

    write_atomically(path, write, overwrite=True)


def load_arrays(path: Path) -> tuple[Any, dict[str, Array]] | None:
    """What :func:`save_arrays` kept; None where nothing was, or it is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts, names = json.loads(str(stored["facts"]))
            return facts, {key: stored[f"a{i}"] for i, key in enumerate(names)}
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


class State:
    """A folder of named sets of arrays; without one nothing is kept."""

    def __init__(self, folder: str | Path | None, key: str) -> None:
        """``key`` stands for everything that the arrays depend on."""
        self.root = None if folder is None else Path(folder)
        self.folder = None if self.root is None else self.root / key[:24]

    def path(self, name: str) -> Path | None:
        """The file of a set, if any."""
        return None if self.folder is None else self.folder / f"{name}.npz"

    def save(self, name: str, facts: Any, arrays: Mapping[str, Array]) -> None:
        """Keeps a set; see :func:`save_arrays`."""
        path = self.path(name)
        if path is not None:
            save_arrays(path, facts, arrays)

    def load(self, name: str) -> tuple[Any, dict[str, Array]] | None:
        """What was kept; see :func:`load_arrays`."""
        path = self.path(name)
        return None if path is None else load_arrays(path)

    def forget(self) -> None:
        """Removes all of it."""
        if self.folder is None or self.root is None:
            return
        for path in self.folder.glob("*.npz"):
            path.unlink(missing_ok=True)
        for empty in (self.folder, self.root):
            with contextlib.suppress(OSError):  # somebody else's files lie there
                empty.rmdir()
