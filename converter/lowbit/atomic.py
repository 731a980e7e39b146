"""Writes files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lowbit.errors import OutputError


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
    if output.exists() and not overwrite:
        raise OutputError(f"{output}: exists already; remove it or allow overwriting (--overwrite)")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{output}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"{output}: no permission to write into {folder}")


def write_atomically(output: Path, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Lets ``write`` fill a temporary file beside ``output`` and moves it into place when it returned.

    The temporary file lies in the same folder, so that the last step is one rename of the file system.
    Whatever ends ``write`` early (an error, a full disk, Ctrl-C) removes it again and leaves ``output`` as it
    was.

    Args:
        output: where the file shall appear.
        write: called with the path of the temporary file; may take its time, for example to verify the file.
        overwrite: whether a file that appeared at ``output`` meanwhile may be replaced.

    Raises:
        OutputError: if the file system refuses; errors of ``write`` other than OSError pass through.
    """
    output = output.absolute()
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
        os.close(descriptor)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes private files
        _move(temporary, output, overwrite=overwrite)
        temporary = None
    except FileExistsError as error:
        raise OutputError(
            f"{output}: exists already; remove it or allow overwriting (--overwrite)"
        ) from error
    except OSError as error:
        raise OutputError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


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
    else:
        temporary.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
