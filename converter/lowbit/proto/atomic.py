"""Writes files that are either whole or not there."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from lowbit.errors import OutputError

_ENDING = ".lowbit-tmp"
EARLIER = "earlier"
"""In a temporary folder the name of what was moved out of the way: no later run removes it."""
_FOLDERS: set[Path] = set()
"""Temporary folders in use."""


def check_writable(output: Path, *, overwrite: bool, inputs: tuple[Path, ...] = ()) -> None:
    """Refuses an output that could not or must not be written, before any work is done.

    Args:
        output: where the file shall appear.
        overwrite: whether a file that is already there may be replaced.
        inputs: files that are never replaced, whatever ``overwrite`` says.

    Raises:
        OutputError: names the path, the problem and the way out.
    """
    if any(output.exists() and path.exists() and output.samefile(path) for path in inputs):
        raise OutputError(
            f"{output}: this is the input, which is never overwritten; give another output name"
        )
    if output.is_dir():
        raise OutputError(f"{output}: is a folder; give a file name in it")
    _refuse_special(output)
    if output.exists() and not overwrite:
        raise OutputError(f"{output}: exists already; remove it or allow overwriting (--overwrite)")
    folder = _target(output).parent
    if not folder.is_dir():
        raise OutputError(f"{output}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{output}: no permission to write into {folder}")


def write_atomically(output: Path, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Lets ``write`` make a temporary file near ``output`` and moves it into place when it returned.

    Whatever ends ``write`` early (an error, a full disk, Ctrl-C) removes the temporary file again and leaves
    ``output`` as it was. A link is followed: the file that it leads to is written.

    Args:
        output: where the file shall appear.
        write: called with the path of the temporary file, which does not exist yet; may take its time, for
            example to verify the file.
        overwrite: whether a file that appeared at ``output`` meanwhile may be replaced.

    Raises:
        OutputError: if the file system refuses, or ``output`` is a device, a pipe or a socket; errors of
            ``write`` other than OSError pass through.
    """
    try:
        with temporary_folder(_target(output)) as folder:
            temporary = folder / "file"
            write(temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            _refuse_special(output)
            _move(temporary, _target(output), overwrite=overwrite)
    except FileExistsError as error:
        raise OutputError(
            f"{output}: exists already; remove it or allow overwriting (--overwrite)"
        ) from error
    except OSError as error:
        raise OutputError(f"{output}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """A new folder beside an output, which is removed when the body ends.

    It lies on the file system of the output, so that the last step can be one rename, and what is written in
    it gets the modes that the process gives to new files. One that a killed process left behind is removed by
    the next run that writes into the same folder: it is known by its lock, which ends with its process.

    Args:
        beside: the output.
    """
    parent = beside.absolute().parent
    _remove_leftovers(parent)
    while True:
        folder = parent / f".{beside.name[:60]}.{secrets.token_hex(4)}{_ENDING}"
        folder.mkdir(mode=0o700)
        try:
            held = _lock(folder)
        except OSError:  # such as too many open files
            folder.rmdir()
            raise
        if held is not None and folder.is_dir():
            break
        _unlock(held)  # another run took the folder for a leftover just now
    _FOLDERS.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _FOLDERS.discard(folder)
        _unlock(held)


# Once for all folders: Python keeps a place for each function that was ever registered.
@atexit.register
def _remove_folders() -> None:
    """For an exit that does not unwind the frame that uses one."""
    for folder in list(_FOLDERS):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    try:
        with os.scandir(parent) as entries:
            found = [parent / entry.name for entry in entries
                     if entry.name.endswith(_ENDING) and entry.is_dir(follow_symlinks=False)]  # fmt: skip
    except OSError:  # whoever writes there meets the same
        return
    for folder in found:
        try:
            held = _lock(folder)
        except OSError:  # nobody is told of what cannot be cleared
            continue
        if held is not None and held >= 0 and not (folder / EARLIER).exists():
            shutil.rmtree(folder, ignore_errors=True)
        _unlock(held)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds a folder's lock; -1 where there are no locks, None if somebody else has it.

    Raises:
        OSError: if the folder cannot be opened.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return -1
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # somebody else removed it
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return -1
    return descriptor


def _unlock(held: int | None) -> None:
    if held is not None and held >= 0:
        os.close(held)


def _target(output: Path) -> Path:
    """The file behind links. To replace the link itself would break /dev/stdout, among others."""
    return output.resolve() if output.is_symlink() else output.absolute()


def _refuse_special(output: Path) -> None:
    """Refuses to replace what is no file: a device node would be gone, a pipe's reader would wait forever."""
    kinds = {stat.S_ISBLK: "device", stat.S_ISCHR: "device", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    try:
        mode = output.stat().st_mode
    except OSError:  # nothing there; what else is wrong shows when it is written
        return
    kind = next((name for is_kind, name in kinds.items() if is_kind(mode)), None)
    if kind is not None:
        raise OutputError(f"{output}: is a {kind}, which is never replaced; give the name of a file")


def _move(temporary: Path, output: Path, *, overwrite: bool) -> None:
    if overwrite:
        temporary.replace(output)
        return
    try:
        os.link(temporary, output)  # unlike a rename, a link fails where a file exists
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if output.exists():
            raise FileExistsError(output) from None
        temporary.replace(output)
