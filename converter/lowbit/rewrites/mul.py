"""Mul of two quantized tensors [-> Relu, Clip] -> QuantizeLinear becomes LowBitMul."""

from __future__ import annotations

import onnx_ir as ir

from lowbit.graph.reasons import Refusal
from lowbit.rewrites.binary import match_binary
from lowbit.rewrites.rule import Context, Region


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    return match_binary(context, sink, "Mul", "LowBitMul")
