"""The execution provider and custom ops of lowbit, for any ONNX Runtime: the library's path, and its name.

>>> import onnxruntime, onnxruntime_ep_lowbit
>>> onnxruntime.register_execution_provider_library("lowbit", onnxruntime_ep_lowbit.get_library_path())

Nothing here imports onnxruntime. The library refuses a release that is too old with a status that says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"  # of all that is built from this repository: CMake and the wheels read it here
__all__ = ["__version__", "get_ep_name", "get_ep_names", "get_library_path"]

_LIBRARY = {"win32": "lowbit.dll", "darwin": "liblowbit.dylib"}.get(sys.platform, "liblowbit.so")
_EP_NAME = "LowBitExecutionProvider"


def get_library_path() -> str:
    """The absolute path of the library, which holds the execution provider and the custom ops.

    Raises:
        FileNotFoundError: if it is not there.
    """
    path = Path(__file__).resolve().parent / _LIBRARY
    if not path.is_file():
        raise FileNotFoundError(
            f"expected the library at {path}, found nothing; reinstall onnxruntime-ep-lowbit"
        )
    return str(path)


def get_ep_name() -> str:
    """The name of the execution provider, to find its devices in ``onnxruntime.get_ep_devices()``."""
    return _EP_NAME


def get_ep_names() -> list[str]:
    """The names of all execution providers in the library: one."""
    return [_EP_NAME]
