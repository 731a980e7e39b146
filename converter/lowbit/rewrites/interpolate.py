"""Linear or cubic Resize of a quantized tensor [-> Relu, Clip] -> QuantizeLinear becomes LowBitResize."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_string
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_resize
from lowbit.ops.resize import axis_taps
from lowbit.rewrites.clipped import MOST_RESULTS, OTHER_ROUNDING, Clipped, clipped_at
from lowbit.rewrites.move import holds_codes
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion


@dataclass
class InterpolateRegion(UnaryRegion):
    """A Resize that computes new numbers from those around."""

    attributes: dict[str, Any]

    op_type = "LowBitResize"

    def geometry(self) -> dict[str, Any]:
        """Its mode, its coordinates and its sizes."""
        return self.attributes


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("Resize",), laws=True)
    if clipped is None or get_string(clipped.core, "mode", "nearest") == "nearest":
        return None
    if holds_codes(context.form, clipped.core.inputs[0]):
        return None
    x = read_activation(context.form, clipped.core.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    geometry = read_resize(clipped.core)
    if isinstance(geometry, Refusal):
        return geometry
    if (refusal := clipped.refuse_output(codes_alone=True)) is not None:
        return refusal
    refusal = _refuse_rounding(clipped, x, geometry, dims_of(x.codes)[2:])
    return refusal or InterpolateRegion(x, clipped, clipped.nodes, geometry)


_MOST_BITS = 22
"""Bits behind the point of a weight's products, at most: then float32 holds them all."""


def _refuse_rounding(
    clipped: Clipped, x: Activation, geometry: Mapping[str, Any], sizes: Sequence[int | None]
) -> Refusal | None:
    """A refusal where the quantizer and the node may round a blend of codes in two ways.

    Where all weights are few bits, such as the quarters of an image twice as large, every blend is a multiple
    of one power of two, without any rounding, and all of them are tried.
    """
    quantization = clipped.quantization
    if quantization is None or quantization.linear:
        return None
    bits, reach = 0, max(abs(int(end - x.grid.zero_point)) for end in (x.range.low, x.range.high))
    farthest = float(reach)
    for axis, size in enumerate(sizes):
        if size is None:
            return Refusal(OTHER_ROUNDING)
        weights = axis_taps(geometry, axis, size)[1].astype(np.float64)
        steps = next((k for k in range(_MOST_BITS) if not np.any(weights * 2.0**k % 1)), _MOST_BITS)
        bits += steps
        farthest *= float(np.abs(weights).sum(axis=0).max())
    most = math.ceil(farthest * 2.0**bits)
    if bits >= _MOST_BITS or 2 * most >= MOST_RESULTS:
        return Refusal(OTHER_ROUNDING)
    blends = np.arange(-most, most + 1).astype(np.float32) / np.float32(2**bits)
    return clipped.refuse_rounding(blends * (x.grid.scale / quantization.grid.scale), divided=True)
