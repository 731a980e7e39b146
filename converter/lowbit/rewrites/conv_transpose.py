"""ConvTranspose [-> BatchNormalization, Relu, Add ...] [-> QuantizeLinear] becomes LowBitConvTranspose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_ints
from lowbit.graph.normal_form import dims_of
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import read_transposed_window
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.rewrites.conv import ConvRegion
from lowbit.rewrites.epilogue import same_shape
from lowbit.rewrites.matmul import Candidate, Product, finish, first_region
from lowbit.rewrites.operands import read_activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.weights import Weights, read_weights


@dataclass
class ConvTransposeRegion(ConvRegion):
    """A transposed convolution with its epilogue."""

    output_padding: list[int]

    # The op has no second name: bipolar weights are written as 2-bit ones.
    op_types = ("LowBitConvTranspose", "LowBitConvTranspose")

    def read_x(self, lowering: Lowering) -> tuple[Stored, Weights, dict[str, Any]]:
        """What a convolution reads, and the rows and columns added to its output."""
        x, weights, geometry = super().read_x(lowering)
        if any(self.output_padding):
            geometry["output_padding"] = self.output_padding
        return x, weights, geometry


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    return first_region(context, sink, ("ConvTranspose",), _match)


def _match(context: Context, candidate: Candidate) -> Region | Refusal:
    node = candidate.chain.core
    codes_grid = read_weights(context.form, node.inputs[1])
    if isinstance(codes_grid, Refusal):
        return codes_grid
    codes, grid = codes_grid
    if codes.ndim not in (3, 4):
        return Refusal(f"it has {codes.ndim - 2} spatial dims; lowbit has 1 and 2")
    group = get_int(node, "group", 1)
    in_channels, out_channels = codes.shape[0], codes.shape[1] * group
    if group < 1 or in_channels % group:
        return Refusal(f"its {group} groups do not divide its {in_channels} input channels")
    if grid.axis not in (None, 1):
        return Refusal(
            f"its weights have one scale per entry of axis {grid.axis}; expected per output channel (1)"
        )
    # [group, in / group, out / group, kernel...] -> rows [group, out / group] of (kernel..., in / group).
    split = codes.reshape(group, in_channels // group, *codes.shape[1:])
    rows = np.moveaxis(split, 1, -1).reshape(out_channels, -1)
    # Axis 1 counts the output channels of one group; all groups share its scales.
    scale = grid.scale if grid.per_tensor else np.tile(grid.scale, group)
    zero_point = grid.zero_point if grid.per_tensor else np.tile(grid.zero_point, group)
    weights = Weights(np.ascontiguousarray(rows), scale, zero_point)

    x = read_activation(context.form, node.inputs[0], "input")
    if isinstance(x, Refusal):
        return x
    dims = dims_of(x.codes)
    if len(dims) != codes.ndim:
        return Refusal(f"its input has rank {len(dims)}, its weights {codes.ndim}")
    if dims[1] not in (None, in_channels):
        return Refusal(f"its input has {dims[1]} channels, its weights expect {in_channels}")
    window = read_transposed_window(node, codes.shape[2:], dims[2:])
    if isinstance(window, Refusal):
        return window

    product = Product(x, x.grid.scale, weights, node.inputs[2] if len(node.inputs) > 2 else None)
    if candidate.residual is not None and not same_shape(node.outputs[0], candidate.residual):
        return Refusal("the other operand of the Add behind it has another shape")
    epilogue = finish(context, candidate, product, rank=codes.ndim, channel_axis=1)
    if isinstance(epilogue, Refusal):
        return epilogue
    output_padding = get_ints(node, "output_padding") or [0] * len(window.kernel)
    return ConvTransposeRegion(
        product,
        epilogue,
        candidate.chain,
        candidate.result,
        candidate.nodes,
        window,
        group,
        in_channels,
        output_padding,
    )
