"""Sessions: a plain ``onnxruntime.InferenceSession`` that knows the ``ai.lowbit`` ops."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowBitError, ModelError

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx
    import onnxruntime

    from lowbit.report import Result

_LIBRARY_NAMES = {"win32": "lowbit.dll", "darwin": "liblowbit.dylib"}


def get_library_path() -> str:
    """The absolute path of the custom-op library, for those who register it themselves (Python, C++, C#).

    It lies beside the native module, which in an editable install is not beside the Python sources.

    Raises:
        LowBitError: if the library was not built.
    """
    native = importlib.util.find_spec("lowbit._native")
    name = _LIBRARY_NAMES.get(sys.platform, "liblowbit.so")
    if native is None or native.origin is None:
        raise LowBitError("lowbit._native is not built; install the package with pip (`pip install .`)")
    path = Path(native.origin).resolve().parent / name
    if not path.is_file():
        raise LowBitError(f"expected the custom-op library at {path}, found nothing; reinstall lowbit")
    return str(path)


def register(sess_options: onnxruntime.SessionOptions) -> None:
    """Registers the library in ``sess_options``; harmless if it already is."""
    sess_options.register_custom_ops_library(get_library_path())


def session(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Result,
    *,
    device: str = "cpu",
    threads: int | None = None,
    sess_options: onnxruntime.SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a model, converted or not, in ONNX Runtime with the ``ai.lowbit`` ops registered.

    Args:
        model: a path, the bytes of a model, a ModelProto, or the result of :func:`lowbit.convert`. Only a
            path lets ONNX Runtime find external data.
        device: "cpu".
        threads: intra-op threads of this session; None leaves what ``sess_options`` says.
        sess_options: your own options. They keep every setting; the one lasting change is that the custom-op
            library is registered in them, once, however many sessions they serve.

    Returns:
        A plain ``onnxruntime.InferenceSession`` on the CPU provider.

    Raises:
        ModelError: if the file is missing or ONNX Runtime refuses the model.
        LowBitError: for another device or a thread count below 1.
    """
    import onnxruntime

    if device != "cpu":
        raise LowBitError(f"device must be 'cpu', got '{device}': other devices are not supported yet")
    if threads is not None and threads < 1:
        raise LowBitError(f"threads must be at least 1, got {threads}")

    options = onnxruntime.SessionOptions() if sess_options is None else sess_options
    if sess_options is None and threads is not None:
        # Kernels are measured for a number of threads, which ONNX Runtime does not tell its nodes.
        options.add_session_config_entry("lowbit.threads", str(threads))
    register(options)
    before = options.intra_op_num_threads
    try:
        if threads is not None:
            options.intra_op_num_threads = threads
        return open_session(model, options)
    finally:
        options.intra_op_num_threads = before


def open_session(model: Any, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """``onnxruntime.InferenceSession`` on the CPU whose errors are one ModelError."""
    import onnxruntime

    source, name = _source(model)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if not _from_onnxruntime(error):
            raise
        raise ModelError(f"{name}: ONNX Runtime refuses it: {_one_line(error)}") from error


def run_session(
    opened: onnxruntime.InferenceSession, feed: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """All outputs by name, and ONNX Runtime's errors (a wrong dtype, rank or size) as one ModelError."""
    names = [str(value.name) for value in opened.get_outputs()]
    try:
        return dict(zip(names, opened.run(names, dict(feed)), strict=True))
    except Exception as error:
        if not _from_onnxruntime(error):
            raise
        raise ModelError(f"ONNX Runtime does not run it: {_one_line(error)}") from error


def _from_onnxruntime(error: Exception) -> bool:
    """Whether ONNX Runtime raised it: its classes share no base below Exception, and some are builtins."""
    return type(error).__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, ValueError))


def _source(model: Any) -> tuple[str | bytes, str]:
    """What InferenceSession takes, and how to call it in messages."""
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        if not os.path.isfile(path):
            raise ModelError(f"{path}: no such file")
        return path, path
    if isinstance(model, (bytes, bytearray)):
        return bytes(model), "the model"
    proto = getattr(model, "model", model)  # a Result holds its ModelProto in .model
    if not hasattr(proto, "SerializeToString"):
        raise LowBitError(
            f"model must be a path, bytes, a ModelProto or a Result, got {type(model).__name__}"
        )
    return proto.SerializeToString(), proto.graph.name or "the model"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
