"""lowbit: quantized ONNX models at 1..8 bits inside an unmodified ONNX Runtime session.

The commands of ``lowbit --help`` mirror the functions below; everything is imported on first use, so that
``import lowbit`` costs nothing.

    >>> import lowbit
    >>> result = lowbit.convert("model_qdq.onnx", "model_lowbit.onnx")
    >>> session = lowbit.session("model_lowbit.onnx")        # a plain onnxruntime.InferenceSession
    >>> session = lowbit.session("model_qdq.onnx", device="cuda")  # converted in memory, on an NVIDIA GPU
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.bench import bench
    from lowbit.compiled import compile
    from lowbit.convert import convert
    from lowbit.devices import devices, get_ep_name, get_ep_names, get_library_path
    from lowbit.errors import LowBitError, ModelError, OutputError, UnsupportedError
    from lowbit.export import export
    from lowbit.inspect import inspect
    from lowbit.mobile import export_mobile
    from lowbit.session import session
    from lowbit.tune import tune
    from lowbit.verify import verify

__all__ = [
    "LowBitError",
    "ModelError",
    "OutputError",
    "UnsupportedError",
    "__version__",
    "bench",
    "compile",
    "convert",
    "devices",
    "export",
    "export_mobile",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "inspect",
    "session",
    "tune",
    "verify",
]

_HOME = {
    "LowBitError": "errors",
    "ModelError": "errors",
    "OutputError": "errors",
    "UnsupportedError": "errors",
    "bench": "bench",
    "compile": "compiled",
    "convert": "convert",
    "devices": "devices",
    "export": "export",
    "export_mobile": "mobile",
    "get_ep_name": "devices",
    "get_ep_names": "devices",
    "get_library_path": "devices",
    "inspect": "inspect",
    "session": "session",
    "tune": "tune",
    "verify": "verify",
}


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lowbit")
    except metadata.PackageNotFoundError:  # the source tree on PYTHONPATH, not installed
        from lowbit import _native

        return str(_native.version)


def __getattr__(name: str) -> Any:
    """Imports the public names on first use (PEP 562)."""
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(f"lowbit.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    setattr(sys.modules[__name__], name, value)
    return value


class _Package(ModuleType):
    """Keeps ``lowbit.session`` the function.

    The import system binds a submodule to its package as soon as it is loaded, so ``from lowbit.session
    import ...`` anywhere would turn ``lowbit.session`` into the module of the same name. Modules stay
    reachable by ``from lowbit.session import ...``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
