"""AMD Quark's extended quantizers, and the Vitis ones that they replaced, as ONNX's own.

``ExtendedQuantizeLinear`` and ``ExtendedDequantizeLinear`` (domain ``com.amd.quark``), formerly
``VitisQuantizeLinear`` and ``VitisDequantizeLinear`` (``com.vai.quantize``), are QuantizeLinear and
DequantizeLinear for more element types; the type of the zero point says which. For integers they compute
``saturate(rint(x / scale) + zero_point)`` and ``(q - zero_point) * scale`` in float32, which is what ONNX
defines, with the same attribute ``axis``.

ONNX Runtime cannot load these domains without AMD's library, so that no node of them may stay: those of other
element types (bfloat16, float16, block floating point) and the domains' other operators are refused.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from lowbit.errors import UnsupportedError
from lowbit.graph.attributes import get_int

DOMAINS = ("com.amd.quark", "com.vai.quantize")
_QUANTIZE = ("ExtendedQuantizeLinear", "VitisQuantizeLinear")
_DEQUANTIZE = ("ExtendedDequantizeLinear", "VitisDequantizeLinear")

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_WORDS = (ir.DataType.UINT16, ir.DataType.INT16)
"""Types of which lowbit has no form, but ONNX Runtime has: such pairs stay, as com.microsoft's."""


def normalize(model: ir.Model) -> None:
    """Turns extended quantizers into standard ones, in place.

    Raises:
        UnsupportedError: names the first node that has no standard counterpart.
    """
    nodes = [node for node in model.graph.all_nodes() if node.domain in DOMAINS]
    if nodes:
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for node in nodes:
        _make_standard(node, model.graph)


def _make_standard(node: ir.Node, graph: ir.Graph) -> None:
    if node.op_type not in (*_QUANTIZE, *_DEQUANTIZE):
        raise _refusal(node, f"{node.domain}.{node.op_type} has no standard counterpart")
    quantizes = node.op_type in _QUANTIZE
    if len(node.inputs) not in (2, 3) or None in node.inputs[:2] or len(node.outputs) != 1:
        raise _refusal(
            node, f"it has {len(node.inputs)} inputs; expected a tensor, its scale and its zero point"
        )
    dtype = _element_type(node, quantizes=quantizes)
    allowed = (*_BYTES, *_WORDS) if quantizes else (*_BYTES, *_WORDS, ir.DataType.INT32)
    if dtype is None:
        raise _refusal(node, "its zero point is missing, which says the type of its codes")
    if dtype not in allowed:
        raise _refusal(node, f"its codes are {dtype}; ONNX has QuantizeLinear for integers of 8 and 16 bits")

    scale, opset = node.inputs[1], graph.opset_imports.get("", 1)
    assert scale is not None
    per_channel = scale.shape is None or list(scale.shape) not in ([], [1])
    if dtype in _WORDS or (per_channel and opset < 13):  # the standard has no such type, no axis yet
        node.domain = "com.microsoft"
        graph.opset_imports.setdefault("com.microsoft", 1)
    else:
        node.domain = ""
    node.op_type = "QuantizeLinear" if quantizes else "DequantizeLinear"
    axis = get_int(node, "axis", 1)
    node.attributes.clear()
    if per_channel:
        node.attributes["axis"] = ir.AttrInt64("axis", axis)


def _element_type(node: ir.Node, *, quantizes: bool) -> ir.DataType | None:
    """The type of the codes: the zero point's, else what the model declares of codes that are read."""
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None and not quantizes:
        given = node.inputs[0]
    return None if given is None else given.dtype


def _refusal(node: ir.Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.op_type} '{node.name or node.outputs[0].name}' ({node.domain}): {why}. ONNX Runtime runs it "
        "with AMD's library only; quantize to 8-bit integers instead, preferably in the form QuantFormat.QDQ"
    )
