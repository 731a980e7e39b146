"""Attributes of nodes, with ONNX's defaults at the place of use.

ONNX's checker knows the types of the attributes of its own operators only, so any other may have a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx_ir as ir

from lowbit.errors import ModelError

_T = TypeVar("_T")


def get_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    return int(_read(node, name, default, ir.Attr.as_int, "an integer"))


def get_flag(node: ir.Node, name: str, *, default: bool) -> bool:
    """An integer attribute that is a switch: 1 is on, any other number off, as ONNX Runtime has it.

    Its ``count_include_pad``, ``transA``, ``transB``, ``exclude_outside``, ``antialias`` and
    ``training_mode`` are no such switches: of those only 0 is off.
    """
    return get_int(node, name, int(default)) == 1


def from_front(axis: int, rank: int) -> int | None:
    """An axis counted from the front; None where a tensor of that rank has no such axis."""
    return axis % rank if -rank <= axis < rank else None


def get_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    return float(_read(node, name, default, ir.Attr.as_float, "a float"))


def get_string(node: ir.Node, name: str, default: str) -> str:
    """A string attribute."""
    return str(_read(node, name, default, ir.Attr.as_string, "a text"))


def get_ints(node: ir.Node, name: str, default: Sequence[int] | None = None) -> list[int] | None:
    """A list of integers."""
    read = _read(node, name, default, ir.Attr.as_ints, "a list of integers")
    return None if read is None else [int(x) for x in read]


def _read(node: ir.Node, name: str, default: _T, read: Callable[[ir.Attr], _T], expected: str) -> _T:
    attribute = node.attributes.get(name)
    if attribute is None:
        return default
    try:
        return read(attribute)
    except TypeError as error:
        raise ModelError(
            f"{node.op_type} '{node.name}' has the attribute {name} = {attribute.value!r}, not {expected}"
        ) from error
