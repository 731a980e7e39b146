"""Where the native library lies, and the name of the execution provider in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from lowbit.errors import LowBitError

_LIBRARY_NAMES = {"win32": "lowbit.dll", "darwin": "liblowbit.dylib"}
_EP_NAME = "LowBitExecutionProvider"


def get_library_path() -> str:
    """The absolute path of the library, for those who register it themselves (Python, C++, C#).

    It holds the custom ops and the execution provider. It lies beside the native module, which in an editable
    install is not beside the Python sources.

    Raises:
        LowBitError: if the library was not built.
    """
    native = importlib.util.find_spec("lowbit._native")
    name = _LIBRARY_NAMES.get(sys.platform, "liblowbit.so")
    if native is None or native.origin is None:
        raise LowBitError("lowbit._native is not built; install the package with pip (`pip install .`)")
    path = Path(native.origin).resolve().parent / name
    if not path.is_file():
        raise LowBitError(f"expected the library at {path}, found nothing; reinstall lowbit")
    return str(path)


def get_ep_name() -> str:
    """The name of the execution provider, to find its devices in ``onnxruntime.get_ep_devices()``."""
    return _EP_NAME


def get_ep_names() -> list[str]:
    """The names of all execution providers in the library: one."""
    return [_EP_NAME]
