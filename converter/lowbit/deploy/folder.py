"""An export's folder: whole or not there, and never made out of somebody's other files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from lowbit.errors import OutputError
from lowbit.proto.atomic import EARLIER

MANIFEST = "manifest.json"


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuses a folder that could not or must not become an export, before any work is done.

    An empty folder may. One that holds an earlier export, and nothing else, may with ``overwrite``.

    Raises:
        OutputError: names the path, the problem and the way out.
    """
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"{folder}: the folder {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{folder}: no permission to write into {parent}")
    if folder.is_symlink():
        raise OutputError(f"{folder}: is a link; give the folder itself")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; --to mobile writes a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    others = _others(folder)
    if others:
        raise OutputError(
            f"{folder}: holds what is no export ({', '.join(others[:3])}); give a new or an empty folder"
        )
    if not overwrite:
        raise OutputError(f"{folder}: holds an export already; remove it or allow overwriting (--overwrite)")


def _others(folder: Path) -> list[str]:
    """The names in a folder that no manifest in it lists."""
    present = {path.name for path in folder.iterdir()}
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        known = {MANIFEST, *(str(file["name"]) for file in listed)}
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    return sorted(present - known)


def appear(staged: Path, folder: Path, *, overwrite: bool) -> None:
    """Moves a finished folder to where it shall be.

    An earlier export is moved aside first and comes back if the new one cannot take its place.

    Args:
        staged: the finished folder, in a temporary one beside ``folder``.
        folder: where it shall be.
        overwrite: whether an export that appeared there meanwhile may be replaced.
    """
    for path in staged.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())
    check_folder(folder, overwrite=overwrite)
    if not folder.exists():
        staged.rename(folder)
        return
    earlier = staged.parent / EARLIER  # removed with the temporary folder
    folder.rename(earlier)
    try:
        staged.rename(folder)
    except BaseException:
        earlier.rename(folder)
        raise
