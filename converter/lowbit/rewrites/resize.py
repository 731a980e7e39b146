"""Resize of codes: nearest neighbour becomes LowBitResize, a cubic one works channels last."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_ints, get_string
from lowbit.graph.constants import Array, constant
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_resize
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, SpatialMoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class CubicRegion(MoveRegion):
    """A cubic Resize that computes with uint8 codes as with integers.

    ONNX Runtime's CPU provider has a kernel of it for images channels last alone that do not shrink. A graph
    channels first runs where the optimizer moves a Transpose across the node, and none that another provider
    takes is moved. So the node is written as the optimizer leaves it, and gives the same codes on every
    device.

    Attributes:
        place: where its inputs hold the numbers, scales or sizes.
        numbers: one per axis that the node names, or per axis of the model's tensor.
    """

    place: int
    numbers: Array

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the op on the stored tensor."""
        output = self.core.outputs[0]
        stored = lowering.channels_last(self.source)
        assert stored.offset == 0
        assert not stored.signed
        inputs, attributes = [stored.value, *self.core.inputs[1:]], dict(self.core.attributes)
        axes = get_ints(self.core, "axes")
        if axes is None:
            by_place = self.numbers[list(stored.order)]
            inputs[self.place] = lowering.constant(output, "numbers", by_place)
        else:
            attributes["axes"] = ir.AttrInt64s("axes", [stored.axis(axis % 4) for axis in axes])
        value = lowering.standard(
            "Resize", inputs, attributes, output, stored_type(stored), order=stored.order
        )
        lowering.define_codes(output, replace(stored, value=value, low=0, high=255))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "Resize")
    if unread is None or isinstance(unread, Refusal):
        return unread
    mode = get_string(sink, "mode", "nearest")
    if mode == "nearest":
        geometry = read_resize(sink)
        if isinstance(geometry, Refusal):
            return geometry
        return SpatialMoveRegion(sink, unread, "LowBitResize", geometry)
    if mode == "cubic" and (numbers := _read_numbers(context, sink)) is not None:
        return CubicRegion(sink, unread, *numbers)
    return Refusal("it computes with codes as with integers; put it between quantizers")


def _read_numbers(context: Context, node: ir.Node) -> tuple[int, Array] | None:
    """Where a cubic Resize has its scales or sizes, and these; None where it has no kernel channels last."""
    source = node.inputs[0]
    assert source is not None
    code_range, dims = context.form.code_range(source), dims_of(source)
    outside = get_string(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    if code_range is None or code_range.dtype != ir.DataType.UINT8 or len(dims) != 4:
        return None
    if outside or get_int(node, "antialias", 0):
        return None
    for place, value in list(enumerate(node.inputs))[2:4]:
        numbers = constant(value)
        if numbers is None or not numbers.size:
            continue
        axes = [axis % 4 for axis in get_ints(node, "axes", range(4)) or ()]
        if numbers.shape != (len(axes),):
            return None
        least = [1 if place == 2 else dims[axis] or 1 for axis in axes]
        return None if (numbers < least).any() else (place, numbers)
    return None
