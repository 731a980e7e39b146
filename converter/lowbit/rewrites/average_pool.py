"""AveragePool of a quantized tensor [-> Relu, Clip] [-> QuantizeLinear] becomes LowBitAveragePool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_flag, get_int, get_ints
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import Window, read_window
from lowbit.rewrites.clipped import MOST_RESULTS, OTHER_ROUNDING, Clipped, clipped_at
from lowbit.rewrites.operands import Activation, read_activation
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
    clipped = clipped_at(context.form, sink, ("AveragePool",), laws=True)
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
    region = AveragePoolRegion(
        x,
        clipped,
        clipped.nodes,
        window,
        int(get_flag(node, "ceil_mode", default=False)),
        int(get_int(node, "count_include_pad", 0) != 0),
    )
    return _refuse_rounding(clipped, x, region) or region


def _refuse_rounding(clipped: Clipped, x: Activation, region: AveragePoolRegion) -> Refusal | None:
    """A refusal where the quantizer and the node may round an average in two ways.

    A sum of codes N over n taps averages to scale * N / n, but for the roundings of float32. With u = 2^-24:
    u of each of at most t products, u of each of at most 2 t partial sums, none of which is beyond t products
    of the largest code, and u of the quotient.
    """
    quantization = clipped.quantization
    if quantization is None or quantization.linear:
        return None
    taps = math.prod(region.window.kernel)
    whole = not any(region.window.pads) and not region.ceil_mode
    low, high = (int(end - x.grid.zero_point) for end in (x.range.low, x.range.high))
    counts = [taps] if whole else range(1, taps + 1)
    if len(counts) * taps * (high - low) > MOST_RESULTS:
        return Refusal(OTHER_ROUNDING)
    scale, u = float(x.grid.scale), 2.0**-24
    least, most = [], []
    for count in counts:
        added = taps if region.count_include_pad else count
        sums = np.arange(added * min(low, 0), added * max(high, 0) + 1)
        average = scale * sums / count
        largest = added * max(-low, high) * scale / count
        error = 1.01 * u * ((2 * added + 1) * largest + np.abs(average))
        least.append(np.nextafter((average - error).astype(np.float32), np.float32(-np.inf)))
        most.append(np.nextafter((average + error).astype(np.float32), np.float32(np.inf)))
    return clipped.refuse_rounding(np.concatenate(least), np.concatenate(most))
