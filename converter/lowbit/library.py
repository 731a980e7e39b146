"""Where the native library lies, the name of the provider in it, and the ONNX Runtime that loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxruntime_ep_lowbit import get_ep_name, get_ep_names

from lowbit.errors import LowBitError

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["get_ep_name", "get_ep_names", "get_library_path", "register", "require_onnxruntime"]


def get_library_path() -> str:
    """The absolute path of the library, for those who register it themselves (Python, C++, C#).

    It holds the custom ops and the execution provider, and lies in the package ``onnxruntime_ep_lowbit``,
    whose function of this name needs nothing else installed.

    Raises:
        LowBitError: if it is not there.
    """
    import onnxruntime_ep_lowbit

    try:
        return onnxruntime_ep_lowbit.get_library_path()
    except FileNotFoundError as error:
        raise LowBitError(str(error)) from error


def register(sess_options: onnxruntime.SessionOptions) -> None:
    """Registers the custom ops in ``sess_options``; harmless if they already are. LOWBIT_EP is not asked."""
    sess_options.add_session_config_entry("lowbit.ep", "none")
    sess_options.register_custom_ops_library(get_library_path())


def require_onnxruntime() -> Any:
    """The module ``onnxruntime``, whichever distribution it comes from; lowbit depends on none of them.

    Raises:
        LowBitError: if none is installed, or the one that is cannot be imported.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise LowBitError(
            f"ONNX Runtime cannot be imported ({error}); install one distribution of it: "
            "pip install 'lowbit[onnxruntime]', or onnxruntime-gpu, -qnn or -openvino where that one is used"
        ) from error
    return onnxruntime
