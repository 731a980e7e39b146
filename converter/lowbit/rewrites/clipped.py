"""Ops between quantized tensors: one core, bounds from Relu and Clip, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.constants import constant
from lowbit.graph.normal_form import NormalForm, Quantization, clip_bounds
from lowbit.graph.quantization import dequantize_array
from lowbit.graph.quantizers import is_law
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import CodesOutput, Order, StoredReal
from lowbit.ops.codes import saturate
from lowbit.rewrites.chain import chain_at
from lowbit.rewrites.epilogue import Bounds, refuse_per_channel
from lowbit.rewrites.operands import Activation

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Clipped:
    """A core node whose only followers are Relu, Clip and a quantizer, or nothing.

    Attributes:
        core: the node.
        nodes: all nodes, the core first.
        bounds: what Relu and Clip did.
        quantization: the quantizer; None for a float result, which has no bounds either.
        result: the output of the last node.
    """

    core: ir.Node
    nodes: Sequence[ir.Node]
    bounds: Bounds
    quantization: Quantization | None
    result: ir.Value

    def refuse_rounding(
        self, reals: Floats, most: Floats | None = None, *, divided: bool = False
    ) -> Refusal | None:
        """A refusal where the quantizer gives another code than QuantizeLinear for a number it can meet.

        A quantizer of QONNX adds its zero point before it rounds, QuantizeLinear behind it, which is another
        code at a tie, or where the addition makes one.

        Args:
            reals: every result that the core can have; where ``most`` is given, the least that it can be.
            most: the most that each can be. Codes never fall where numbers rise: where both ends have one
                code, all between have it.
            divided: whether these are divided by the quantizer's scale, as the node computes that.
        """
        quantization = self.quantization
        if quantization is None or quantization.linear:
            return None
        law, grid = quantization.law, quantization.grid
        if law is None or law.op_type != "QuantizeRound" or not law.uniform:
            return Refusal(OTHER_ROUNDING)
        results = np.stack([reals.reshape(-1), *([] if most is None else [most.reshape(-1)])])
        with np.errstate(over="ignore"):
            quotients = results if divided else results / grid.scale
            # Of one row, numpy finds the different numbers much faster than of columns.
            quotients = np.unique(quotients)[None] if most is None else np.unique(quotients, axis=1)
            ends = np.array([self.bounds.low, self.bounds.high], np.float32) / grid.scale
        low, high = self.bounds.codes(quantization)
        encoding = "signed" if quantization.range.low < 0 else "unsigned"
        linear = saturate(np.rint(quotients), grid.zero_point, low, high, encoding)
        own = replace(law, scale=np.ones((), np.float32)).codes(np.clip(quotients, *ends))
        different = int(np.count_nonzero(np.any((linear != linear[0]) | (own != linear[0]), axis=0)))
        if not different:
            return None
        return Refusal(
            f"{OTHER_ROUNDING}: {different} of its {quotients.shape[1]} possible results get other codes"
        )

    def refuse_output(self, *, codes_alone: bool = False) -> Refusal | None:
        """A refusal where the result is none that lowbit writes.

        Args:
            codes_alone: whether lowbit has the op between codes alone, not with a float result.
        """
        if self.quantization is not None:
            return refuse_per_channel(self.quantization)
        if not codes_alone:
            return None
        readers = self.result.consumers()
        return Refusal(OTHER_ROUNDING if any(map(is_law, readers)) else "no QuantizeLinear follows it")

    def output(self, lowering: Lowering) -> tuple[CodesOutput | None, dict[str, object]]:
        """The storage of the output (None for float32) and the attributes that bound it."""
        if self.quantization is None:
            return None, {}
        return lowering.quantized_output(self.quantization, *self.bounds.codes(self.quantization))

    def define(self, lowering: Lowering, value: ir.Value, output: CodesOutput | None, order: Order) -> None:
        """Says how the result is stored."""
        if output is None:
            lowering.define_real(self.result, StoredReal(value, order))
        else:
            lowering.define_codes(self.result, output.stored(value, order))


MOST_RESULTS = 1 << 22
"""Results beyond which it is not tried whether each is rounded as QuantizeLinear rounds it."""
OTHER_ROUNDING = "its quantizer rounds in another way than QuantizeLinear"


def real_numbers(operand: Activation) -> Floats:
    """Every real number that an operand of one grid can have."""
    array = constant(operand.codes)
    codes = np.arange(operand.range.low, operand.range.high + 1) if array is None else np.unique(array)
    return dequantize_array(codes, operand.grid)


def clipped_at(
    form: NormalForm, sink: ir.Node, cores: Sequence[str], *, laws: bool = False
) -> Clipped | None:
    """The core that ends in a node.

    Args:
        form: the graph.
        sink: a quantizer, or the core itself where its result stays float.
        cores: op types.
        laws: whether the caller asks :meth:`Clipped.refuse_rounding`, so that any quantizer may end it.
    """
    chain = chain_at(form, sink, cores, laws=laws, bare=False)
    if chain is None or (chain.quantization is not None and chain.quantization.divides):
        return None
    bounds = Bounds()
    for link in chain.links:
        clip = clip_bounds(link.node) if link.node.op_type in ("Relu", "Clip") else None
        if clip is None:
            return None
        bounds = bounds.then(*clip)
    return Clipped(chain.core, chain.nodes, bounds, chain.quantization, chain.result)
