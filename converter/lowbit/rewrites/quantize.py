"""QuantizeLinear of a float tensor whose codes a lowbit node reads becomes LowBitQuantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.constants import constant
from lowbit.graph.normal_form import (
    Quantization,
    is_dequantize,
    is_op,
    is_quantizer,
    rank_of,
)
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import channels_last, identity
from lowbit.rewrites.chain import quantization_at
from lowbit.rewrites.rule import Context, Region

NO_READER = "no lowbit node reads its codes"
_SPATIAL = (
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "BatchNormalization",
    "Resize",
    "SpaceToDepth",
)
_BINARY = ("Add", "Mul", "Sub", "Div", "PRelu")
_PASSING = (
    "Add",
    "Mul",
    "Concat",
    "Relu",
    "Clip",
    "Sigmoid",
    "HardSwish",
    "LeakyRelu",
    "Slice",
    "Pad",
    "Split",
)


@dataclass
class EntranceRegion(Region):
    """From real numbers to codes.

    Attributes:
        quantization: the quantizer.
        source: the float tensor that the node reads.
        spatial: whether readers want channels last.
    """

    quantization: Quantization
    source: ir.Value
    spatial: bool
    core: ir.Node
    nodes: Sequence[ir.Node]

    @property
    def codes(self) -> list[ir.Value]:
        """None."""
        return []

    @property
    def reals(self) -> list[ir.Value]:
        """The operand."""
        return [self.source]


@dataclass
class QuantizeRegion(EntranceRegion):
    """Rounding to a grid."""

    def emit(self, lowering: Lowering) -> ir.Value | None:
        """Writes the node, which moves the channels last on the way where its readers want that.

        Behind a node that ONNX Runtime fuses with its quantizer, that stays.
        """
        if self.source.producer() in lowering.units:
            for node in self.nodes:
                lowering.keep(node)
            return None
        x = lowering.real(self.source)
        rank = len(x.order)
        grid = self.quantization.grid
        move = (
            x.order == identity(rank) and channels_last(rank) != x.order and (self.spatial or grid.axis == 1)
        )
        order = channels_last(rank) if move else x.order
        low, high = self.quantization.range.low, self.quantization.range.high
        output, attributes = lowering.quantized_output(self.quantization, low, high)
        value = lowering.node(
            "LowBitQuantize",
            {"x": x.value, **output.inputs},
            {"to_channels_last": int(move), **attributes},
            self.quantization.codes,
            output.dtype,
            order,
            origins=self.nodes,
        )
        lowering.define_codes(self.quantization.codes, output.stored(value, order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    quantization = quantization_at(context.form, sink)
    if quantization is None:
        return None
    if isinstance(quantization, Refusal):
        return quantization if is_quantizer(sink) else None
    if quantization.codes not in context.wanted:
        return Refusal(NO_READER)
    rank = rank_of(quantization.source)
    if rank is None:
        return Refusal("the rank of its input is unknown")
    if quantization.grid.axis not in (None, 1):
        return Refusal(
            f"it has one scale per entry of axis {quantization.grid.axis}; expected the channels (1)"
        )
    spatial = wants_channels_last(quantization.codes)
    return QuantizeRegion(
        quantization, quantization.source, spatial, quantization.nodes[0], quantization.nodes
    )


def wants_channels_last(value: ir.Value) -> bool:
    """Whether a spatial op reads a tensor, directly or through ops that leave its axes alone."""
    seen = {value}
    waiting = [value]
    while waiting:
        for node in waiting.pop().consumers():
            if is_op(node, *_SPATIAL) or _has_channel_constant(node):
                return True
            if is_dequantize(node) or is_quantizer(node) or is_op(node, *_PASSING):
                waiting.extend(output for output in node.outputs if output not in seen)
                seen.update(node.outputs)
    return False


def _has_channel_constant(node: ir.Node) -> bool:
    arrays = [real for real in map(constant, node.inputs) if real is not None and is_op(node, *_BINARY)]
    return any(array.size > 1 for array in arrays)
