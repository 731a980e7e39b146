"""The errors a user of lowbit meets.

Each carries one clear message: where (file, node), what was expected, what was found, what to do. All of them
are ``ValueError``, so that callers without an interest in lowbit's own types catch what they expect.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.text import printable


class LowBitError(ValueError):
    """Base of every error that lowbit raises on purpose."""

    def __str__(self) -> str:
        """The message, fit for a terminal whatever names of a model stand in it."""
        return printable(super().__str__(), keep="\n")


class ModelError(LowBitError):
    """The input is not a model that can be read: missing, truncated, not ONNX, inconsistent."""


class CheckError(ModelError):
    """A converted model is not what it should be. The caller hears of it only where nothing else helps.

    Attributes:
        nodes: the names of the converted model's nodes that it is about; empty where that is unknown.
    """

    def __init__(self, message: str, nodes: Sequence[str] = ()):
        super().__init__(message)
        self.nodes = tuple(nodes)


class OptimizerError(CheckError):
    """ONNX Runtime's optimizer breaks nodes that stay, which it does not in the original."""


class RefusedError(ModelError):
    """ONNX Runtime does not load a model.

    Attributes:
        reason: what it says.
    """

    def __init__(self, message: str, reason: str):
        """``message`` is the whole sentence, ``reason`` its last part."""
        super().__init__(message)
        self.reason = reason


class UnsupportedError(LowBitError):
    """``strict`` conversion found a node that it cannot convert exactly."""


class OutputError(LowBitError):
    """The output cannot be written where the caller wants it."""


_NO_MEMORY = ("memoryerror", "bad_alloc", "out of memory", "cannot allocate memory", "unable to allocate",
              "failed to allocate memory", "alloc failed", "allocation failed", "the device has none left",
              "failed to serialize proto")  # fmt: skip
"""How Python, C++, ONNX Runtime, numpy, lowbit and protobuf (the last one) say it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that no memory was left: ONNX Runtime and ONNX do in classes of their own."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)


def raise_if_out_of_memory(error: BaseException) -> None:
    """Raises a MemoryError for an error that says so: it is nothing against the model that was read."""
    if is_out_of_memory(error):
        raise MemoryError(" ".join(str(error).split())) from error
