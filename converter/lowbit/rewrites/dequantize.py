"""DequantizeLinear whose real numbers somebody needs becomes LowBitDequantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.constants import constant
from lowbit.graph.normal_form import Dequantization, is_dequantize, is_quantizer, rank_of
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import resizes_in_any_layout
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import StoredReal, channels_last, identity
from lowbit.rewrites.move import stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class DequantizeRegion(Region):
    """The exit from codes to real numbers."""

    dequantization: Dequantization
    core: ir.Node
    nodes: Sequence[ir.Node]

    @property
    def passive(self) -> bool:
        """Real numbers are no reason to make codes."""
        return True

    @property
    def codes(self) -> list[ir.Value]:
        """The operand."""
        return [self.dequantization.codes]

    def emit(self, lowering: Lowering) -> ir.Value | None:
        """Writes the node, which moves the channels back, but for a Resize that works on them as they are.

        Codes as the model has them keep its node; so does a reader that ONNX Runtime fuses with it.
        """
        codes, grid = self.dequantization.codes, self.dequantization.grid
        fused = not lowering.units.isdisjoint(self.core.outputs[0].consumers())
        if fused or lowering.is_original(codes):
            lowering.keep(self.core)
            return None
        rank = lowering.rank(codes)
        x = lowering.plain(codes)
        low, high = CODE_TYPES[stored_type(x)]
        zero = lowering.zero_point(x, grid)
        if zero.min() < low or high < zero.max():  # codes of a Clip, of which only some occur
            lowering.keep(self.core)
            return None
        move = x.order == channels_last(rank) and x.order != identity(rank)
        order = identity(rank)
        if move and grid.axis is None and _is_only_resized(self.core.outputs[0]):
            order, move = x.order, False
        elif not move and x.order != identity(rank):
            x = lowering.codes_in(codes, identity(rank))
        if grid.axis is not None and not move and grid.axis != rank - 1:
            x, move = lowering.channels_last(codes), True
        real = self.core.outputs[0]
        value = lowering.node(
            "LowBitDequantize",
            {"x": x.value, "x_scale": grid.scale, "x_zero_point": lowering.zero_point(x, grid)},
            {"x_encoding": x.encoding, "to_channels_first": int(move)},
            real,
            ir.DataType.FLOAT,
            order,
            origins=self.nodes,
        )
        lowering.define_real(real, StoredReal(value, order))
        return value


def _is_only_resized(real: ir.Value) -> bool:
    """Whether all that reads a tensor are Resize nodes between codes that work channels last as well."""
    readers = real.consumers()
    return (
        bool(readers)
        and not real.is_graph_output()
        and all(
            resizes_in_any_layout(reader)
            and not reader.outputs[0].is_graph_output()
            and all(is_quantizer(after) for after in reader.outputs[0].consumers())
            for reader in readers
        )
    )


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    if not is_dequantize(sink) or constant(sink.inputs[0]) is not None:
        return None
    dequantization = context.form.dequantization(sink.outputs[0])
    if isinstance(dequantization, Refusal):
        return dequantization
    assert dequantization is not None
    if context.form.code_range(dequantization.codes) is None:
        return Refusal(f"codes of type {dequantization.codes.dtype} are not supported")
    if rank_of(dequantization.codes) is None:
        return Refusal("the rank of its codes is unknown")
    if dequantization.grid.axis not in (None, 1):
        return Refusal(
            f"it has one scale per entry of axis {dequantization.grid.axis}; expected the channels (1)"
        )
    return DequantizeRegion(dequantization, sink, [sink])
