"""The signatures of lowbit's ops, read from the native module, which holds their only definition.

An attribute that an op does not have is ignored, as every session ignores it; a newer lowbit whose node means
something else without it says so in the attribute ``needs_version``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.errors import ModelError

if TYPE_CHECKING:
    import onnx

DOMAIN = "ai.lowbit"
VERSION = 1

_NEEDS_VERSION = "needs_version"


@dataclass(frozen=True)
class Signature:
    """What a node builder needs to know about an op.

    Attributes:
        inputs: names in order; a variadic input is the last.
        attributes: names of all attributes.
        defaults: attribute name -> default value.
    """

    inputs: tuple[str, ...]
    attributes: frozenset[str]
    defaults: dict[str, Any]


@functools.cache
def signatures() -> dict[str, Signature]:
    """All ops of the domain by name."""
    from lowbit import _native

    return {
        schema["name"]: Signature(
            tuple(entry["name"] for entry in schema["inputs"]),
            frozenset(entry["name"] for entry in schema["attributes"]),
            {entry["name"]: entry["default"] for entry in schema["attributes"] if not entry["required"]},
        )
        for schema in _native.schemas()
    }


def has_attribute(node: onnx.NodeProto, name: str) -> bool:
    """Whether the op of a lowbit node has an attribute; of an op that this release does not know, any."""
    signature = signatures().get(node.op_type)
    return signature is None or name in signature.attributes


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a lowbit node that its op has, as Python values; those left out are left out.

    Raises:
        ModelError: if the node needs a newer lowbit.
    """
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == _NEEDS_VERSION and attribute.i > VERSION:
            raise ModelError(
                f"{node.op_type} '{node.name}' needs version {attribute.i} of {DOMAIN}, this lowbit knows "
                f"version {VERSION}; update lowbit"
            )
    known = (attribute for attribute in node.attribute if has_attribute(node, attribute.name))
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in known}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
