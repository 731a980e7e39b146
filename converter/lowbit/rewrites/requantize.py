"""DequantizeLinear [-> Relu, Clip] -> QuantizeLinear onto another grid becomes LowBitRequantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.normal_form import Quantization, clip_bounds, is_op
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.chain import quantization_at
from lowbit.rewrites.epilogue import Bounds
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.rule import Context, Region


@dataclass
class RequantizeRegion(Region):
    """Codes moved from one grid to another."""

    x: Activation
    bounds: Bounds
    quantization: Quantization
    core: ir.Node
    nodes: Sequence[ir.Node]

    @property
    def codes(self) -> list[ir.Value]:
        """The operand."""
        return [self.x.codes]

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node; grids per channel need the channels last, else any order of axes will do."""
        axes = {grid.axis for grid in (self.x.grid, self.quantization.grid) if grid.axis is not None}
        x = lowering.channels_last(self.x.codes) if axes else lowering.plain(self.x.codes)
        output, attributes = lowering.quantized_output(
            self.quantization, *self.bounds.codes(self.quantization)
        )
        value = lowering.node(
            "LowBitRequantize",
            {
                "x": x.value,
                "x_scale": self.x.grid.scale,
                "x_zero_point": lowering.zero_point(x, self.x.grid),
                **output.inputs,
            },
            {"x_encoding": x.encoding, **attributes},
            self.quantization.codes,
            output.dtype,
            x.order,
            origins=self.nodes,
        )
        lowering.define_codes(self.quantization.codes, output.stored(value, x.order))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    form = context.form
    quantization = quantization_at(form, sink)
    if not isinstance(quantization, Quantization):
        return None
    nodes = list(quantization.nodes)
    value, clips = quantization.source, []
    while is_op(value.producer(), "Relu", "Clip") and form.used_once(value):
        node = value.producer()
        assert node is not None
        clip = clip_bounds(node)
        if clip is None or node.inputs[0] is None:
            return None
        clips.append(clip)
        nodes.insert(0, node)
        value = node.inputs[0]
    if form.dequantization(value) is None:
        return None
    x = read_activation(form, value, "input", per_tensor=False)
    if isinstance(x, Refusal):
        return x
    bounds = Bounds()
    for clip in reversed(clips):
        bounds = bounds.then(*clip)
    axes = {grid.axis for grid in (x.grid, quantization.grid) if grid.axis is not None}
    if axes and axes != {1}:
        return Refusal(f"its scales are per entry of axis {sorted(axes)}; expected the channels (1)")
    if axes and clips:
        return Refusal("a Clip stands between two grids of one scale per channel")
    return RequantizeRegion(x, bounds, quantization, nodes[0], nodes)
