"""Conv [-> BatchNormalization, Relu, Clip, Add ...] [-> QuantizeLinear] becomes LowBitConv."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_string
from lowbit.graph.constants import Array, constant, scalar
from lowbit.graph.normal_form import NormalForm, dims_of, is_op, rank_of
from lowbit.graph.quantization import Grid
from lowbit.graph.reasons import Refusal
from lowbit.graph.windows import Window, read_window
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, channels_last
from lowbit.rewrites.epilogue import same_shape
from lowbit.rewrites.matmul import Candidate, Product, ProductRegion, finish, first_region
from lowbit.rewrites.operands import Activation, read_activation
from lowbit.rewrites.pad import read_pads
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.weights import Weights, read_weights


@dataclass
class ConvRegion(ProductRegion):
    """A convolution with its epilogue."""

    window: Window
    group: int
    in_channels: int

    op_types = ("LowBitConv", "APConv")

    @property
    def output_order(self) -> Order:
        """Channels last."""
        return channels_last(2 + len(self.window.kernel))

    def read_x(self, lowering: Lowering) -> tuple[Stored, Weights, dict[str, Any]]:
        """The activation channels last; the weights' rows are in that order already."""
        x = lowering.channels_last(self.product.x.codes, bipolar=True)
        geometry = {
            **self.window.attributes(),
            "group": self.group,
            "in_channels": self.in_channels,
            "out_channels": self.product.weights.rows,
        }
        return x, self.product.weights, geometry


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    return first_region(context, sink, ("Conv",), _match)


def _match(context: Context, candidate: Candidate) -> Region | Refusal:
    node = candidate.chain.core
    codes_grid = read_weights(context.form, node.inputs[1])
    if isinstance(codes_grid, Refusal):
        return codes_grid
    codes, grid = codes_grid
    if codes.ndim not in (3, 4, 5):
        return Refusal(f"it has {codes.ndim - 2} spatial dims; lowbit has 1 to 3")
    group = get_int(node, "group", 1)
    out_channels, in_channels = codes.shape[0], codes.shape[1] * group
    if group < 1 or out_channels % group:
        return Refusal(f"its {group} groups do not divide its {out_channels} output channels")
    if grid.axis not in (None, 0):
        return Refusal(
            f"its weights have one scale per entry of axis {grid.axis}; expected per output channel (0)"
        )
    x = read_activation(context.form, node.inputs[0], "input", per_tensor=False)
    if isinstance(x, Refusal):
        return x
    nodes = candidate.nodes
    shuffled = _absorb_shuffle(context.form, x, codes, group)
    if shuffled is not None:
        nodes = [*nodes, *filter(None, [x.codes.producer()])]
        x, codes = shuffled
    # Rows run over (kernel..., input channel), the order in which channels-last codes come.
    rows = np.moveaxis(codes, 1, -1).reshape(out_channels, -1)
    weights = Weights(rows, grid.scale, grid.zero_point)
    if not x.grid.per_tensor:
        folded = _fold_channel_scales(x, weights, group, in_channels)
        if isinstance(folded, Refusal):
            return folded
        x, weights = folded
    if len(x.codes.shape or ()) != codes.ndim:
        return Refusal(f"its input has rank {len(x.codes.shape or ())}, its weights {codes.ndim}")
    dims = dims_of(x.codes)
    if dims[1] not in (None, in_channels):
        return Refusal(f"its input has {dims[1]} channels, its weights expect {in_channels}")
    window = read_window(node, codes.shape[2:], dims[2:])
    if isinstance(window, Refusal):
        return window
    padded = _absorb_pad(context.form, x, window)
    if padded is not None:
        pad = x.codes.producer()
        x, window = padded
        nodes = [*nodes, pad] if pad is not None else nodes

    product = Product(x, x.grid.scale, weights, node.inputs[2] if len(node.inputs) > 2 else None)
    if candidate.residual is not None and not same_shape(node.outputs[0], candidate.residual):
        return Refusal("the other operand of the Add behind it has another shape")
    epilogue = finish(context, candidate, product, rank=codes.ndim, channel_axis=1)
    if isinstance(epilogue, Refusal):
        return epilogue
    return ConvRegion(product, epilogue, candidate.chain, candidate.result, nodes, window, group, in_channels)


def _absorb_shuffle(
    form: NormalForm, x: Activation, codes: Array, group: int
) -> tuple[Activation, Array] | None:
    """A Gather in front of a convolution that puts the channels in another order, as an order of its weights.

    With channels ``p`` the sum over ``w[:, i] * x[:, p[i]]`` is the one over ``w'[:, c] * x[:, c]`` where
    ``w'[:, p[i]] = w[:, i]``. ONNX Runtime's optimizer leaves such a Gather behind the SpaceToDepth that it
    makes of a detector's first Slices and Concat. On codes that lie channels last it would copy bytes one by
    one, a third of the time of a small network.

    Args:
        form: the graph.
        x: the convolution's activation.
        codes: its weights' codes, output channels x input channels x kernel.
        group: groups; only one is read.

    Returns:
        The activation in front of the Gather and the weights in its order; None if there is no such Gather.
    """
    node = x.codes.producer()
    if group != 1 or node is None or not is_op(node, "Gather") or not x.grid.per_tensor:
        return None
    source, order = node.inputs[0], constant(node.inputs[1])
    code_range = None if source is None else form.code_range(source)
    if source is None or code_range is None or order is None or order.ndim != 1:
        return None
    channels, axis = dims_of(source)[1:2], get_int(node, "axis", 0)
    if axis not in (1, 1 - codes.ndim) or rank_of(source) != codes.ndim or channels != [order.size]:
        return None
    places = np.where(order < 0, order + order.size, order)
    if codes.shape[1] != order.size or not np.array_equal(np.sort(places), np.arange(order.size)):
        return None
    return replace(x, codes=source, range=code_range), codes[:, np.argsort(places)]


def _absorb_pad(form: NormalForm, x: Activation, window: Window) -> tuple[Activation, Window] | None:
    """A Pad of the image with real zeros in front of a convolution, as part of its window.

    Args:
        form: the graph.
        x: the convolution's activation.
        window: its window.

    Returns:
        The activation in front of the Pad and the wider window; None if there is no such Pad.
    """
    node = x.codes.producer()
    if node is None or not is_op(node, "Pad") or get_string(node, "mode", "constant") != "constant":
        return None
    source = node.inputs[0]
    code_range = None if source is None else form.code_range(source)
    pads = read_pads(node, 2 + len(window.kernel))
    if source is None or code_range is None or isinstance(pads, Refusal):
        return None
    if any(pads[0]) or any(pads[1]) or any(amount < 0 for pair in pads for amount in pair):
        return None
    if not x.grid.per_tensor or scalar(node.inputs[2] if len(node.inputs) > 2 else None) != x.grid.zero_point:
        return None
    added = [begin for begin, _ in pads[2:]] + [end for _, end in pads[2:]]
    wider = tuple(a + b for a, b in zip(window.pads, added, strict=True))
    return replace(x, codes=source, range=code_range), replace(window, pads=wider)


def _fold_channel_scales(
    x: Activation, weights: Weights, group: int, in_channels: int
) -> tuple[Activation, Weights] | Refusal:
    """One input scale per channel, moved into the weights' scales.

    Every output channel sums over the input channels of its group. Where these share one scale (in a
    depthwise convolution each is alone), that of its accumulator is ``f32(x_scale[group] * w_scale[c])``.
    With x_scale 1 and that product as w_scale the node computes the very same number.
    """
    if x.grid.axis != 1:
        return Refusal(f"its input has one scale per entry of axis {x.grid.axis}")
    if np.unique(x.grid.zero_point).size != 1:
        return Refusal("its input has different zero points per channel")
    if x.grid.scale.size != in_channels:
        return Refusal(f"its input has {x.grid.scale.size} scales for {in_channels} channels")
    per_group = x.grid.scale.reshape(group, -1)
    if np.any(per_group != per_group[:, :1]):
        return Refusal(
            "its input has one scale per channel, and it sums over channels of different scales; "
            "lowbit needs one scale per activation tensor"
        )
    scale = np.repeat(per_group[:, 0], weights.rows // group) * weights.scale
    one = Grid(np.ones((), np.float32), x.grid.zero_point[:1].reshape(()))
    return replace(x, grid=one), replace(weights, scale=scale)
