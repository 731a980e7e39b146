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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.checking.verify import verify
    from lowbit.conversion.convert import convert
    from lowbit.deploy.compile import compile
    from lowbit.deploy.mobile import export_mobile
    from lowbit.errors import LowBitError, ModelError, OutputError, UnsupportedError
    from lowbit.evaluation.evaluate import evaluate
    from lowbit.exporters.export import export
    from lowbit.finetuner.finetune import finetune
    from lowbit.inspection.inspect import inspect
    from lowbit.library import get_ep_name, get_ep_names, get_library_path
    from lowbit.measure.bench import bench
    from lowbit.measure.tune import tune
    from lowbit.quantizer.quantize import quantize
    from lowbit.searcher.search import search
    from lowbit.sessions.devices import devices
    from lowbit.sessions.session import session

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
    "evaluate",
    "export",
    "export_mobile",
    "finetune",
    "get_ep_name",
    "get_ep_names",
    "get_library_path",
    "inspect",
    "quantize",
    "search",
    "session",
    "tune",
    "verify",
]

_HOME = {
    "LowBitError": "errors",
    "ModelError": "errors",
    "OutputError": "errors",
    "UnsupportedError": "errors",
    "bench": "measure.bench",
    "compile": "deploy.compile",
    "convert": "conversion.convert",
    "devices": "sessions.devices",
    "evaluate": "evaluation.evaluate",
    "export": "exporters.export",
    "export_mobile": "deploy.mobile",
    "finetune": "finetuner.finetune",
    "get_ep_name": "library",
    "get_ep_names": "library",
    "get_library_path": "library",
    "inspect": "inspection.inspect",
    "quantize": "quantizer.quantize",
    "search": "searcher.search",
    "session": "sessions.session",
    "tune": "measure.tune",
    "verify": "checking.verify",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
