"""Attributes of nodes, with ONNX's defaults at the place of use."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def get_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def get_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.as_float())


def get_string(node: ir.Node, name: str, default: str) -> str:
    """A string attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else str(attribute.as_string())


def get_ints(node: ir.Node, name: str, default: Sequence[int] | None = None) -> list[int] | None:
    """A list of integers."""
    attribute = node.attributes.get(name)
    if attribute is None:
        return None if default is None else list(default)
    return [int(x) for x in attribute.as_ints()]
