"""The errors a user of lowbit meets.

Each carries one clear message: where (file, node), what was expected, what was found, what to do. All of them
are ``ValueError``, so that callers without an interest in lowbit's own types catch what they expect.
"""

from __future__ import annotations


class LowBitError(ValueError):
    """Base of every error that lowbit raises on purpose."""


class ModelError(LowBitError):
    """The input is not a model that can be read: missing, truncated, not ONNX, inconsistent."""


class UnsupportedError(LowBitError):
    """``strict`` conversion found a node that it cannot convert exactly."""


class OutputError(LowBitError):
    """The output cannot be written where the caller wants it."""
