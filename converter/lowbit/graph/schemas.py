"""The signatures of lowbit's ops, read from the native module, which holds their only definition."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

DOMAIN = "ai.lowbit"
VERSION = 1


@dataclass(frozen=True)
class Signature:
    """What a node builder needs to know about an op.

    Attributes:
        inputs: names in order; a variadic input is the last.
        defaults: attribute name -> default value.
    """

    inputs: tuple[str, ...]
    defaults: dict[str, Any]


@functools.cache
def signatures() -> dict[str, Signature]:
    """All ops of the domain by name."""
    from lowbit import _native

    return {
        schema["name"]: Signature(
            tuple(entry["name"] for entry in schema["inputs"]),
            {entry["name"]: entry["default"] for entry in schema["attributes"] if not entry["required"]},
        )
        for schema in _native.schemas()
    }
