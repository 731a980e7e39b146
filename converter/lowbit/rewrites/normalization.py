"""Layer, group and instance normalization of codes [-> Relu, Clip -> Q] become LowBitNormalization.

Layer normalization is also read as exporters before opset 17 wrote it: ReduceMean, Sub, Pow, ReduceMean, Add,
Sqrt, Div, and a Mul and an Add behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import from_front, get_flag, get_float, get_int, get_ints
from lowbit.graph.constants import Array, integers, scalar
from lowbit.graph.normal_form import Dequantization, dims_of, is_op, rank_of
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, channels_last, identity
from lowbit.rewrites.clipped import Clipped, clipped_at
from lowbit.rewrites.operands import Activation, read_activation, real_constant
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.unary import UnaryRegion

_OPS = ("LayerNormalization", "GroupNormalization", "InstanceNormalization")


@dataclass(frozen=True)
class _Geometry:
    """What is normalized: the axes of the stored tensor, and its factors.

    Attributes:
        order: the order of x's axes in which the normalized ones stand last.
        axis: the first of them, counted from the end.
        groups: parts of the last one.
        gamma: float32 [1], one per channel (last axis), or one per normalized element.
        beta: as gamma.
        epsilon: added to the variance.
    """

    order: Order
    axis: int
    groups: int
    gamma: Array
    beta: Array
    epsilon: float


@dataclass
class NormalizationRegion(UnaryRegion):
    """A normalization of a quantized tensor."""

    normal: _Geometry

    op_type = "LowBitNormalization"

    def read_x(self, lowering: Lowering) -> Stored:
        """The operand with the normalized axes last."""
        return lowering.codes_in(self.x.codes, self.normal.order)

    def output_order(self, lowering: Lowering, x: Stored) -> Order:
        """Like x."""
        return x.order

    def extra_inputs(self) -> dict[str, Any]:
        """The factors and summands."""
        return {"gamma": self.normal.gamma, "beta": self.normal.beta}

    def geometry(self) -> dict[str, Any]:
        """What is normalized together."""
        return {"axis": self.normal.axis, "groups": self.normal.groups, "epsilon": self.normal.epsilon}


def match(context: Context, sink: ir.Node) -> Region | Refusal | None:
    """See the module."""
    clipped = clipped_at(context.form, sink, _OPS)
    if clipped is not None:
        return _region(context, clipped, clipped.core.inputs[0], clipped.nodes, _read_op)
    clipped = clipped_at(context.form, sink, ("Add", "Mul", "Div"))
    if clipped is None or clipped.quantization is None:
        return None
    written = _Written.at(context, clipped.core)
    if written is None:
        return None
    nodes = [*clipped.nodes, *(node for node in written.nodes if node not in clipped.nodes)]
    return _region(context, clipped, written.x, nodes, lambda *_: written.geometry(context))


def _region(
    context: Context, clipped: Clipped, value: ir.Value | None, nodes: Sequence[ir.Node], read: Any
) -> Region | Refusal:
    x = read_activation(context.form, value, "input")
    if isinstance(x, Refusal):
        return x
    if (refusal := clipped.refuse_output()) is not None:
        return refusal
    geometry: _Geometry | Refusal = read(context, clipped.core, x)
    if isinstance(geometry, Refusal):
        return geometry
    return _check(x, geometry) or NormalizationRegion(x, clipped, nodes, geometry)


def _check(x: Activation, geometry: _Geometry) -> Refusal | None:
    """What the native op refuses."""
    epsilon = np.float32(geometry.epsilon)
    if not (np.isfinite(epsilon) and epsilon > 0):
        return Refusal(f"its epsilon is {geometry.epsilon}; lowbit needs a positive one")
    with np.errstate(over="ignore"):
        most = np.float32(np.float64(x.grid.scale) / np.sqrt(np.float64(epsilon)))
        largest = 4096.0 * np.abs(geometry.gamma).max() + np.abs(geometry.beta).max()
    if not (np.isfinite(most) and largest < 1e38):
        return Refusal("its scale, its epsilon or its factors take values out of float32's range")
    sizes = [dims_of(x.codes)[axis] for axis in geometry.order[geometry.axis :]]
    count = int(np.prod([size or 1 for size in sizes])) // geometry.groups
    if count > 1 << 23:
        return Refusal(f"it normalizes {count} elements together; lowbit sums up to 2^23 exactly")
    return None


def _read_op(context: Context, node: ir.Node, x: Activation) -> _Geometry | Refusal:
    """The geometry of one of ONNX's own ops."""
    form, rank = context.form, rank_of(x.codes)
    assert rank is not None
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return Refusal("its mean or its deviation is used")
    if get_int(node, "stash_type", 1) != 1:
        return Refusal("its stash_type is not float32")
    factors = [real_constant(form, value) for value in node.inputs[1:3]]
    if factors[0] is None or (len(node.inputs) > 2 and node.inputs[2] is not None and factors[1] is None):
        return Refusal("its scale or its bias is not a float32 constant")
    gamma = factors[0]
    beta = factors[1] if len(factors) > 1 and factors[1] is not None else np.zeros((), np.float32)
    epsilon = get_float(node, "epsilon", 1e-5)
    if is_op(node, "LayerNormalization"):
        axis = from_front(get_int(node, "axis", -1), rank)
        if axis is None:
            return Refusal(f"its input, of rank {rank}, has no axis {get_int(node, 'axis', -1)}")
        return _along(x, identity(rank), axis - rank, gamma, beta, epsilon)
    if rank < 3:
        return Refusal(f"its input has rank {rank}; expected [N, C, D1..]")
    channels = dims_of(x.codes)[1]
    if channels is None:
        return Refusal("the number of its channels is unknown")
    groups = channels if is_op(node, "InstanceNormalization") else get_int(node, "num_groups", 0)
    if groups < 1 or channels % groups:
        return Refusal(f"it has {groups} groups of {channels} channels")
    per_channel = []
    for array in (gamma, beta):
        if array.size not in (1, channels):
            return Refusal(f"it has {array.size} factors for {channels} channels")
        per_channel.append(np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (channels,))))
    gamma, beta = per_channel
    return _Geometry(channels_last(rank), 1 - rank, groups, gamma, beta, epsilon)


def _along(
    x: Activation, order: Order, axis: int, gamma: Array, beta: Array, epsilon: float
) -> _Geometry | Refusal:
    """One group over the last axes of x in an order; the factors broadcast with x as the model has it."""
    rank = len(order)
    if not -rank <= axis < 0:
        return Refusal(f"its axis is {axis}, its input has rank {rank}")
    sizes = [dims_of(x.codes)[axis] for axis in order]
    wide = []
    for array in (gamma, beta):
        if array.ndim > rank:
            return Refusal(f"a factor of shape {list(array.shape)} widens its input")
        array = array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(order)
        if any(size != 1 for size in array.shape[:axis]):
            return Refusal(f"a factor of shape {list(array.shape)} varies along axes that are not normalized")
        array = array.reshape(array.shape[axis:])
        if array.shape[-1] not in (1, sizes[-1]):
            return Refusal("the number of its channels is unknown or not that of its factors")
        wide.append(array)
    if any(size != 1 for array in wide for size in array.shape[:-1]):  # one factor per element
        if None in sizes[axis:]:
            return Refusal("the sizes of its normalized axes are unknown")
        try:
            wide = [np.broadcast_to(array, tuple(sizes[axis:])) for array in wide]  # type: ignore[arg-type]
        except ValueError:
            return Refusal("its factors do not fit its input")
    else:
        channels = max(array.shape[-1] for array in wide)
        wide = [np.broadcast_to(array.reshape(-1), (channels,)) for array in wide]
    gamma, beta = (np.ascontiguousarray(array, np.float32).reshape(-1) for array in wide)
    return _Geometry(order, axis, 1, gamma, beta, epsilon)


@dataclass(frozen=True)
class _Written:
    """A layer normalization written out in nodes of its own."""

    x: ir.Value
    axes: tuple[int, ...]
    epsilon: float
    gamma: Array
    beta: Array
    nodes: tuple[ir.Node, ...]

    @staticmethod
    def at(context: Context, last: ir.Node) -> _Written | None:
        """The one whose last operation is this node."""
        nodes = [last]
        beta, gamma = np.zeros((), np.float32), np.ones((), np.float32)
        if is_op(last, "Add"):
            found = _with_constant(context, last)
            if found is None:
                return None
            last, beta = found
            nodes.append(last)
        if is_op(last, "Mul"):
            found = _with_constant(context, last)
            if found is None:
                return None
            last, gamma = found
            nodes.append(last)
        if not is_op(last, "Div"):
            return None
        centred, root = _maker(last, 0), _maker(last, 1)
        if not (is_op(centred, "Sub") and is_op(root, "Sqrt")):
            return None
        assert centred is not None
        assert root is not None
        shifted = _maker(root, 0)
        if not is_op(shifted, "Add"):
            return None
        assert shifted is not None
        found = _with_constant(context, shifted)
        if found is None or found[1].size != 1 or not is_op(found[0], "ReduceMean"):
            return None
        variance, epsilon = found
        square, mean = _maker(variance, 0), _maker(centred, 1)
        if not (is_op(mean, "ReduceMean") and is_op(square, "Pow", "Mul")):
            return None
        assert mean is not None
        assert square is not None
        same = _maker(square, 0)
        if is_op(square, "Pow"):
            exponent = scalar(square.inputs[1])
            if exponent is None or float(exponent) != 2.0:
                return None
        elif _maker(square, 1) is not same:
            return None
        # Some exporters write the difference twice, for the square and for the quotient.
        if same is None or not is_op(same, "Sub") or _maker(same, 1) is not mean:
            return None
        x = centred.inputs[0]
        if x is None or (rank := rank_of(x)) is None:
            return None
        if not all(_same_codes(context, x, node.inputs[0]) for node in (mean, same)):
            return None
        axes = {_axes(node, rank) for node in (mean, variance)}
        if len(axes) != 1 or None in axes:
            return None
        nodes += [centred, root, shifted, variance, square, mean]
        if same is not centred:
            nodes.append(same)
        return _Written(x, axes.pop() or (), float(epsilon), gamma, beta, tuple(nodes))

    def geometry(self, context: Context) -> _Geometry | Refusal:
        """Its geometry, if nothing else reads what is between its ends."""
        inner = set(self.nodes)
        for node in self.nodes[1:]:
            for output in node.outputs:
                if output.is_graph_output() or any(user not in inner for user in output.consumers()):
                    return Refusal("a step of its normalization is read elsewhere")
        x = read_activation(context.form, self.x, "input")
        assert isinstance(x, Activation)
        rank = rank_of(x.codes)
        assert rank is not None
        if self.axes == tuple(range(rank - len(self.axes), rank)):
            return _along(x, identity(rank), -len(self.axes), self.gamma, self.beta, self.epsilon)
        if self.axes == (1,):
            return _along(x, channels_last(rank), -1, self.gamma, self.beta, self.epsilon)
        return Refusal(f"it normalizes over axes {list(self.axes)}; expected the last ones, or the channels")


def _maker(node: ir.Node, index: int) -> ir.Node | None:
    value = node.inputs[index]
    return None if value is None else value.producer()


def _same_codes(context: Context, a: ir.Value, b: ir.Value | None) -> bool:
    """Whether two float tensors are one, or the same codes read on the same grid."""
    if a is b:
        return True
    left, right = context.form.dequantization(a), context.form.dequantization(b)
    return (
        isinstance(left, Dequantization)
        and isinstance(right, Dequantization)
        and left.codes is right.codes
        and left.grid.equals(right.grid)
    )


def _with_constant(context: Context, node: ir.Node) -> tuple[ir.Node, Array] | None:
    """What makes the varying operand of an Add or a Mul, and its constant operand."""
    for i in (0, 1):
        array, maker = real_constant(context.form, node.inputs[1 - i]), _maker(node, i)
        if array is not None and maker is not None:
            return maker, array
    return None


def _axes(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """The axes of a ReduceMean that keeps its dims, ascending."""
    if not get_flag(node, "keepdims", default=True):
        return None
    given = integers(node.inputs[1]) if len(node.inputs) > 1 else get_ints(node, "axes")
    counted = {from_front(axis, rank) for axis in given or ()}
    return None if None in counted or not counted else tuple(sorted(a for a in counted if a is not None))
