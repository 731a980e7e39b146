"""SpaceToDepth of codes, channels last: a Reshape, a Transpose and a Reshape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from lowbit.graph.lowering import Lowering
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_space_to_depth
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
        """Writes the three nodes.

        [N, H, W, C] is [N, H/b, b, W/b, b * C], whose middle dims change places; pixel (i, j) of a block
        gives the channels from (i * b + j) * C on.
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
        turned = lowering.standard(
            "Transpose",
            [blocks],
            {"perm": [0, 1, 3, 2, 4]},
            output,
            dtype,
            shape=[batch, rows, columns, block, depth],
        )
        value = lowering.standard(
            "Reshape",
            [turned, lowering.constant(output, "shape", np.array([0, 0, 0, -1], np.int64))],
            {},
            output,
            dtype,
            order=stored.order,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    unread = moves_codes(context, sink, "SpaceToDepth")
    if unread is None or isinstance(unread, Refusal):
        return unread
    block = read_space_to_depth(sink)
    return block if isinstance(block, Refusal) else SpaceToDepthRegion(sink, unread, block)
