"""AveragePool of a quantized tensor [-> Relu, Clip] [-> QuantizeLinear] becomes LowBitAveragePool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from lowbit.graph.attributes import get_flag, get_int, get_ints
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import Window, read_window
from lowbit.rewrites.clipped import clipped_at
from lowbit.rewrites.operands import read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion


@dataclass
class AveragePoolRegion(UnaryRegion):
    """An average over windows."""

    window: Window
    ceil_mode: int
    count_include_pad: int

    op_type = "LowBitAveragePool"

    def geometry(self) -> dict[str, Any]:
        """The window."""
        return {
            **self.window.attributes(dilations=False),
            "ceil_mode": self.ceil_mode,
            "count_include_pad": self.count_include_pad,
        }


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("AveragePool",))
    if clipped is None:
        return None
    node = clipped.core
    x = read_activation(context.form, node.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    kernel = get_ints(node, "kernel_shape", ())
    assert kernel is not None
    window = read_window(node, kernel, dims_of(x.codes)[2:])
    if isinstance(window, Refusal):
        return window
    if any(dilation != 1 for dilation in window.dilations):
        return Refusal(f"dilations {list(window.dilations)} are not supported")
    if (refusal := clipped.refuse_output()) is not None:
        return refusal
    return AveragePoolRegion(
        x,
        clipped,
        clipped.nodes,
        window,
        int(get_flag(node, "ceil_mode", default=False)),
        int(get_int(node, "count_include_pad", 0) != 0),
    )
