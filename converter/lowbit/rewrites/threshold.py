"""Monotone operations on a float tensor -> a quantizer to few codes becomes LowBitThreshold.

This is the entrance of a network whose input is quantized in a way that QuantizeLinear cannot say, and what
becomes of a quantizer behind an op that stays in float. The operations before it, such as ``2 * x - 1``, are
absorbed where they have constants only: thresholds of the whole chain are searched over all float32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.normal_form import NormalForm, Quantization, dims_of, rank_of
from lowbit.graph.quantizers import is_law
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import channels_last, identity
from lowbit.rewrites.chain import Link, chain_paths, quantization_at
from lowbit.rewrites.quantize import NO_READER, EntranceRegion, wants_channels_last
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.thresholds import Step, Thresholds, quantize_step, read_step, search_reals


@dataclass
class ThresholdRegion(EntranceRegion):
    """Counting thresholds, which contain the operations between the source and the quantizer.

    Attributes:
        thresholds: one row, or one per channel (axis 1).
    """

    thresholds: Thresholds

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node, which moves the channels last on the way where its readers want that."""
        x = lowering.real(self.source)
        rank = len(x.order)
        per_channel = self.thresholds.values.shape[0] > 1
        if per_channel and x.order not in (identity(rank), channels_last(rank)):
            x = type(x)(lowering.original_real(self.source), identity(rank))
        move = x.order == identity(rank) != channels_last(rank) and (self.spatial or per_channel)
        order = channels_last(rank) if move else x.order
        low, high = self.thresholds.low, self.thresholds.low + self.thresholds.count
        output, attributes = lowering.quantized_output(self.quantization, low, high)
        value = lowering.node(
            "LowBitThreshold",
            {"x": x.value, **self.thresholds.inputs(output.offset)},
            {
                "to_channels_last": int(move),
                **{name: attributes[name] for name in ("y_bits", "y_encoding")},
            },
            self.quantization.codes,
            output.dtype,
            order,
            origins=self.nodes,
        )
        lowering.define_codes(self.quantization.codes, output.stored(value, order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    if not is_law(sink):
        return None
    form = context.form
    quantization = quantization_at(form, sink, laws=True)
    if not isinstance(quantization, Quantization):
        return quantization
    if quantization.codes not in context.wanted:
        return Refusal(NO_READER)
    rank = rank_of(quantization.source)
    if rank is None or rank == 0:
        return Refusal("the rank of its input is unknown" if rank is None else "its input is a scalar")
    axis = 0 if rank == 1 else 1
    channels = dims_of(quantization.source)[axis] if rank > 1 else 1
    uniform = quantization.law is None or quantization.law.uniform
    if channels is None and not uniform:
        return Refusal("the number of its channels is unknown")
    if rank == 1 and not uniform:
        return Refusal("it quantizes every entry of a vector in another way; expected channels (axis 1)")
    source, nodes, steps = _absorb(form, quantization.source, channels or 1, rank, axis)
    if quantization.linear and not steps:
        return None  # LowBitQuantize says it without a table
    if channels is None or (uniform and not steps):
        channels = 1
    quantize = quantize_step(quantization, channels, rank, axis)
    if isinstance(quantize, Refusal):
        return quantize
    least_code = 0 if quantization.range.bipolar else quantization.range.low
    found = search_reals(channels, steps, quantize, least_code)
    if isinstance(found, Refusal):
        return None if quantization.linear else found
    spatial = wants_channels_last(quantization.codes)
    covered = [*nodes, *quantization.nodes]
    return ThresholdRegion(quantization, source, spatial, quantization.nodes[0], covered, found)


def _absorb(
    form: NormalForm, value: ir.Value, channels: int, rank: int, axis: int
) -> tuple[ir.Value, list[ir.Node], list[Step]]:
    """The float tensor in front of the operations that thresholds can contain, and those operations."""
    nodes: list[ir.Node] = []
    steps: list[Step] = []
    while form.used_once(value):
        node = value.producer()
        if node is None or node.graph is not form.graph:
            break
        paths = chain_paths(node, wide=True)
        below = node.inputs[paths[0]] if len(paths) == 1 else None
        if below is None or rank_of(below) != rank or form.dequantization(below) is not None:
            break
        if dims_of(below)[axis] != dims_of(value)[axis]:
            break  # constants of more channels than the tensor, which it then has
        step = read_step(form, Link(node, paths[0]), channels, rank, axis)
        if isinstance(step, Refusal):
            break
        nodes.insert(0, node)
        steps.insert(0, step)
        value = below
    return value, nodes, steps
