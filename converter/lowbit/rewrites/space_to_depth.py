"""SpaceToDepth of codes, channels last: the rows of pixels at one place of their blocks, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_space_to_depth
from lowbit.lowering.lowering import Lowering
from lowbit.rewrites.move import MoveRegion, moves_codes, stored_type
from lowbit.rewrites.rule import Context, Region


@dataclass
class SpaceToDepthRegion(MoveRegion):
    """A SpaceToDepth of one block size."""

    block: int

    def emit(self, lowering: Lowering) -> ir.Value:
        """Moves the codes whoever reads them: ONNX Runtime may have no kernel for the op itself."""
        return self.move(lowering)

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes a Reshape, a Slice for every row of a block, a LowBitConcat and a Reshape.

        [N, H, W, C] is [N, H/b, b, W/b, b * C]; row i of a block gives the channels from i * b * C on. A
        Transpose of the middle dims says the same in one node, but ONNX Runtime's copies runs of b * C bytes
        one by one: for 3 channels it took three times as long (one core of an AMD EPYC), for 32 a tenth more.
        """
        output, block = self.core.outputs[0], self.block
        stored = lowering.channels_last(self.source, bipolar=True)
        dtype = stored_type(stored)
        dims = dims_of(self.source)
        batch = (self.source.shape or [None])[0]
        rows, columns = (None if size is None else size // block for size in dims[2:])
        depth = None if dims[1] is None else dims[1] * block
        split = [0, *(-1 if size is None else size for size in (rows, block, columns, depth))]
        blocks = lowering.standard(
            "Reshape",
            [stored.value, lowering.constant(output, "blocks", np.array(split, np.int64))],
            {},
            output,
            dtype,
            shape=[batch, rows, block, columns, depth],
        )
        parts = [self._row(lowering, blocks, row, [batch, rows, 1, columns, depth]) for row in range(block)]
        channels = None if depth is None else depth * block
        ranges = lowering.range_attributes(stored.low, stored.high, signed=stored.signed)
        joined = lowering.node(
            "LowBitConcat",
            {
                # On one grid codes are copied, whatever they mean.
                "x_scales": np.ones(block, np.float32),
                "x_zero_points": np.zeros(block, np.int32),
                "y_scale": np.float32(1),
                "y_zero_point": np.int32(0),
                "x": parts,
            },
            {
                "axis": 4,
                "x_encodings": ",".join([stored.byte_encoding] * block) if stored.signed else "",
                "y_bits": ranges["y_bits"],
                "y_encoding": ranges["y_encoding"],
            },
            output,
            dtype,
            stored.order,
            shape=[batch, rows, 1, columns, channels],
            origins=self.nodes,
        )
        shape = [0, 0, *(-1 if size is None else size for size in (columns, channels))]
        value = lowering.standard(
            "Reshape",
            [joined, lowering.constant(output, "shape", np.array(shape, np.int64))],
            {},
            output,
            dtype,
            order=stored.order,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value

    def _row(self, lowering: Lowering, blocks: ir.Value, row: int, shape: Sequence[Any]) -> ir.Value:
        """One row of every block: [N, H/b, 1, W/b, b * C]."""
        output = self.core.outputs[0]
        given = {"starts": [row], "ends": [row + 1], "axes": [2]}
        inputs: list[ir.Value | None] = [blocks]
        if lowering.graph.opset_imports.get("", 13) >= 10:
            inputs += [
                lowering.constant(output, name, np.array(places, np.int64)) for name, places in given.items()
            ]
            given = {}
        assert blocks.dtype is not None
        return lowering.standard("Slice", inputs, given, output, blocks.dtype, shape=shape)


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "SpaceToDepth")
    if unread is None or isinstance(unread, Refusal):
        return unread
    block = read_space_to_depth(sink)
    return block if isinstance(block, Refusal) else SpaceToDepthRegion(sink, unread, block)
