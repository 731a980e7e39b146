"""MatMul of two quantized activations [-> Relu, Clip] [-> QuantizeLinear] becomes LowBitMatMul."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lowbit.graph.normal_form import dims_of, rank_of
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored, identity
from lowbit.rewrites.binary import BinaryRegion, read_operands
from lowbit.rewrites.clipped import MOST_RESULTS, OTHER_ROUNDING, Clipped, clipped_at
from lowbit.rewrites.operands import Activation, is_constant
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.weights import INT32_MAX


class FedMatMulRegion(BinaryRegion):
    """A product of two tensors of codes; it reads them in whatever order of axes they are stored."""

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        a, b = lowering.plain(self.a.codes), lowering.plain(self.b.codes)
        order = identity(lowering.rank(self.clipped.result))
        return self.write(lowering, a, b, order, a_perm=_permutation(a), b_perm=_permutation(b))


def _permutation(stored: Stored) -> list[int]:
    """What brings a stored tensor into the model's order of axes."""
    rank = len(stored.order)
    return [] if stored.order == identity(rank) else [stored.axis(axis) for axis in range(rank)]


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, ("MatMul",), laws=True)
    if clipped is None or _has_weights(clipped.core):
        return None
    operands = read_operands(context, clipped.core)
    if isinstance(operands, Refusal):
        return operands
    a, b = operands
    if min(rank_of(a.codes) or 0, rank_of(b.codes) or 0) < 2:
        return Refusal("one of its operands is a vector; LowBitMatMul multiplies matrices")
    if (refusal := clipped.refuse_output()) is not None:
        return refusal
    return _check_sums(clipped, a, b) or FedMatMulRegion("LowBitMatMul", clipped, a, b, clipped.nodes)


def _has_weights(node: ir.Node) -> bool:
    """Whether operand 1 is a constant matrix: then it is a LowBitGemm, or refused as such."""
    value = node.inputs[1]
    return value is not None and is_constant(value) and rank_of(value) in (2, None)


def _check_sums(clipped: Clipped, a: Activation, b: Activation) -> Refusal | None:
    """Refuses scales whose product or ratio leaves float32, and sums that could leave int32.

    A node whose number of products is only known when it runs checks it then.
    """
    with np.errstate(over="ignore", under="ignore"):
        scale = a.grid.scale * b.grid.scale
        if clipped.quantization is not None:
            scale = scale / clipped.quantization.grid.scale
    if not np.isfinite(scale):
        return Refusal("the product of its scales overflows float32")
    products = dims_of(a.codes)[-1] or dims_of(b.codes)[-2] or 0
    # The native node knows the codes' type, not which of them occur.
    largest = [_largest_value(operand) for operand in (a, b)]
    if products * largest[0] * largest[1] > INT32_MAX:
        return Refusal(f"a sum of its {products} products may leave int32")
    if clipped.quantization is None or clipped.quantization.linear:
        return None
    ends = [[int(end - x.grid.zero_point) for end in (x.range.low, x.range.high)] for x in (a, b)]
    corners = [products * left * right for left in ends[0] for right in ends[1]]
    if not 0 < max(corners) - min(corners) <= MOST_RESULTS:
        return Refusal(OTHER_ROUNDING)
    sums = np.arange(min(corners), max(corners) + 1).astype(np.float32)
    return clipped.refuse_rounding(sums * scale, divided=True)


def _largest_value(operand: Activation) -> int:
    low, high = CODE_TYPES[ir.DataType.UINT8 if operand.range.low >= 0 else ir.DataType.INT8]
    zero_point = int(operand.grid.zero_point)
    return max(high - zero_point, zero_point - low)
