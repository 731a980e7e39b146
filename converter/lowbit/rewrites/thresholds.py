"""Thresholds: any monotone chain from one number into few codes, by searching the chain itself.

A chain of float32 operations with constants, each of which rounds once, is monotone in its input, because
rounding is. So the codes at its end rise or fall with the input in steps, and the places of the steps say
all about it: ``y = base + #{k : dir * v >= dir * T[k]}``. The places are found by bisection of the chain,
never by algebra on its constants, so that they are right where algebra in real numbers would be one step off.
(Umuroglu and Jahre, Streamlined Deployment for Quantized Neural Networks, section 3, derive them
algebraically.)

The input is an integer accumulator (:func:`search_accumulators`) or a float32 (:func:`search_reals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.attributes import get_float, get_int
from lowbit.graph.constants import Array
from lowbit.graph.normal_form import NormalForm, Quantization, clip_bounds, is_op
from lowbit.graph.reasons import Refusal
from lowbit.rewrites.batch_normalization import fold_batch_normalization
from lowbit.rewrites.chain import Link
from lowbit.rewrites.operands import per_channel, real_constant
from lowbit.rewrites.weights import INT32_MAX

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

Step = Callable[[Floats], Floats]
"""One operation of a chain, float32 [C, m] to [C, m]; monotone in every channel."""

MAX_THRESHOLDS = 255


@dataclass(frozen=True)
class Thresholds:
    """Where a chain steps.

    Attributes:
        values: [C, n], int32 or float32; ``direction * values`` ascends in every row.
        direction: int32 [C], +1 where the codes rise with the input, -1 where they fall.
        low: the smallest code; code ``low + n`` is the largest. Bipolar codes count as 0 and 1.
    """

    values: Array
    direction: npt.NDArray[np.int32]
    low: int

    @property
    def count(self) -> int:
        """The number of thresholds per channel."""
        return int(self.values.shape[1])

    def inputs(self, offset: int, *, inputs_prefix: str = "") -> dict[str, Array]:
        """The inputs of a node that counts them.

        Args:
            offset: stored code = code + offset.
            inputs_prefix: what the node's schema puts before ``base`` and ``dir``.
        """
        base = np.full(self.direction.shape, self.low + offset, np.int32)
        return {
            "thresholds": self.values,
            f"{inputs_prefix}base": base,
            f"{inputs_prefix}dir": self.direction,
        }

    def equals(self, other: Thresholds) -> bool:
        """Whether both give every input the same code."""
        return (
            self.low == other.low
            and np.array_equal(self.values, other.values)
            and np.array_equal(self.direction, other.direction)
        )


def add_step(constants: Floats) -> Step:
    """``v + c``, one summand per channel."""
    c = constants.reshape(-1, 1)
    return lambda v: v + c


def read_step(form: NormalForm, link: Link, channels: int, rank: int, axis: int) -> Step | Refusal:
    """A link of a chain as a function of numpy.

    Args:
        form: the graph.
        link: the node, and the input through which the chain runs.
        channels: size of the channel axis.
        rank: rank of the tensor.
        axis: its channel axis.

    Returns:
        The function, or why the node is no monotone operation with constants.
    """
    node = link.node
    if is_op(node, "Relu"):
        return lambda v: np.maximum(v, np.float32(0))
    if is_op(node, "Clip"):
        bounds = clip_bounds(node)
        if bounds is None:
            return Refusal("the bounds of its Clip are computed at run time")
        low, high = np.float32(bounds[0]), np.float32(bounds[1])
        return lambda v: np.minimum(np.maximum(v, low), high)
    if is_op(node, "HardSigmoid"):
        alpha = np.float32(get_float(node, "alpha", 0.2))
        beta = np.float32(get_float(node, "beta", 0.5))
        return lambda v: np.maximum(np.minimum(alpha * v + beta, np.float32(1)), np.float32(0))
    if is_op(node, "LeakyRelu"):
        slope = np.float32(get_float(node, "alpha", 0.01))
        return _leaky(slope)
    if is_op(node, "Neg"):
        return lambda v: -v
    if is_op(node, "Round"):
        return np.rint
    if is_op(node, "Floor"):
        return np.floor
    if is_op(node, "Ceil"):
        return np.ceil
    if is_op(node, "Cast"):
        if get_int(node, "to", 0) != int(ir.DataType.FLOAT):
            return Refusal("a Cast to another type than float32 follows it")
        return lambda v: v
    if is_op(node, "BatchNormalization"):
        folded = fold_batch_normalization(form, node, channels, axis)
        if isinstance(folded, Refusal):
            return folded
        scale, shift = folded[0].reshape(-1, 1), folded[1].reshape(-1, 1)
        return lambda v: v * scale + shift
    return _binary_step(form, link, channels, rank, axis)


def _binary_step(form: NormalForm, link: Link, channels: int, rank: int, axis: int) -> Step | Refusal:
    node = link.node
    array = real_constant(form, link.other)
    if array is None:
        return Refusal(f"the second operand of its {node.op_type} is not constant")
    constants = per_channel(array, rank, axis, channels)
    if constants is None:
        return Refusal(
            f"the constant of its {node.op_type} has the shape {list(array.shape)}, expected one per channel"
        )
    if not np.all(np.isfinite(constants)):
        return Refusal(f"the constant of its {node.op_type} is not finite")
    c = constants.reshape(-1, 1)
    if is_op(node, "Div") and link.path == 0:
        if not np.all(c):
            return Refusal("its Div divides by 0")
        return _ratio(c)
    if is_op(node, "PRelu") and link.path == 0:
        return _leaky(c)
    steps: dict[str, Step] = {
        "Add": lambda v: v + c,
        "Sub": (lambda v: v - c) if link.path == 0 else (lambda v: c - v),
        "Mul": lambda v: v * c,
        "Min": lambda v: np.minimum(v, c),
        "Max": lambda v: np.maximum(v, c),
    }
    step = steps.get(node.op_type)
    return Refusal(f"a {node.op_type} follows it") if step is None else step


def _ratio(divisor: Floats) -> Step:
    def step(v: Floats) -> Floats:
        ratio: Floats = v / divisor
        return ratio

    return step


def _leaky(slope: Floats | np.float32) -> Step | Refusal:
    if np.any(slope < 0):
        return Refusal("a leaky Relu with a negative slope follows it, which does not rise")

    def step(v: Floats) -> Floats:
        bent: Floats = np.where(v < 0, slope * v, v)
        return bent

    return step


def quantize_step(
    quantization: Quantization, channels: int, rank: int, axis: int
) -> Callable[[Floats], Ints] | Refusal:
    """A quantizer as a function of float32 [C, m], its codes counted from the smallest, bipolar ones 0 and 1.

    Args:
        quantization: the quantizer.
        channels: size of the channel axis.
        rank: rank of the tensor.
        axis: its channel axis, 0 only in a vector.
    """
    if quantization.grid.axis not in (None, axis):
        return Refusal(
            f"its output has one scale per entry of axis {quantization.grid.axis}; expected the channels"
        )
    law, code_range = quantization.law, quantization.range
    if law is not None:
        rows = None if law.thresholds is None else law.thresholds.shape[:-1]
        if rows is not None and any(
            size != 1 and i + rank - len(rows) != axis for i, size in enumerate(rows)
        ):
            return Refusal("its thresholds vary along another axis than the channels")
        shape = [-1] + [1] * (rank - 1)
        if rank == 1:
            shape.append(channels)  # a vector, which broadcasts as a row does
        else:
            shape[axis] = channels

        def apply(v: Floats) -> Ints:
            # The law's parameters broadcast against the model's tensor: m along axis 0, C along its own.
            codes = law.codes(np.ascontiguousarray(v.T).reshape(shape)).reshape(-1, channels).T
            wide: Ints = codes.astype(np.int64)
            return (wide + 1) // 2 if code_range.bipolar else wide

        return apply

    scale, zero_point = quantization.grid.scale, quantization.grid.zero_point.astype(np.float32)
    if quantization.grid.axis is not None:
        scale, zero_point = scale.reshape(-1, 1), zero_point.reshape(-1, 1)

    def linear(v: Floats) -> Ints:
        with np.errstate(over="ignore"):
            shifted = np.rint(v / scale) + zero_point
        codes: Ints = np.fmin(np.fmax(shifted, code_range.low), code_range.high).astype(np.int64)
        return codes

    return linear


def search_accumulators(
    scale: Floats,
    steps: Sequence[Step],
    quantize: Callable[[Floats], Ints],
    bounds: tuple[Ints, Ints],
    least_code: int,
) -> Thresholds | Refusal:
    """The thresholds of ``quantize(steps(f32(acc) * scale))``, int32.

    Args:
        scale: what one unit of the accumulator is worth, [C].
        steps: the operations behind it.
        quantize: the quantizer.
        bounds: the least and the largest accumulator of every channel, bias included, [C] each.
        least_code: the smallest code that the quantizer has.
    """

    def chain(acc: Ints) -> Floats:
        with np.errstate(over="ignore"):
            v = acc.astype(np.float32) * scale.reshape(-1, 1)
        return _through(steps, v)

    low, high = bounds
    if np.any(np.isnan(chain(np.stack([low, high], axis=1)))):  # where neither end is NaN, nothing between is
        return Refusal("the operations behind it overflow float32 and make no number of an infinity")
    if np.any(low <= -INT32_MAX - 1) or np.any(high >= INT32_MAX):
        return Refusal("its accumulators fill int32, so that no threshold is out of their reach")
    extremes = (-INT32_MAX - 1, INT32_MAX)
    return _search(
        lambda keys: quantize(chain(keys)),
        low,
        high,
        lambda keys: keys.astype(np.int32),
        extremes,
        least_code,
    )


_LARGEST = (np.finfo(np.float32).max, np.float32(1e30), np.float32(1e20))
"""Ends of the search for chains that make no number of an infinity, each tried where the one before fails."""


def search_reals(
    channels: int, steps: Sequence[Step], quantize: Callable[[Floats], Ints], least_code: int
) -> Thresholds | Refusal:
    """The thresholds of ``quantize(steps(x))`` over all float32 x; one row if all agree.

    Where the steps make no number of an infinity, such as ``0 * x`` with a gamma of 0, or of numbers so large
    that they become one on the way, these count as the largest that remain.

    Args:
        channels: number of channels.
        steps: the operations.
        quantize: the quantizer.
        least_code: the smallest code that it has.
    """
    infinity = _float_key(np.float32(np.inf))
    top = np.full(channels, infinity)
    for largest in _LARGEST:
        broken = np.any(np.isnan(_through(steps, _float_of(np.stack([-top, top], axis=1)))), axis=1)
        top[broken] = _float_key(largest)
    found = _search(
        lambda keys: quantize(_through(steps, _float_of(keys))),
        -top,
        top,
        _float_of,
        (-infinity, infinity),
        least_code,
    )
    if isinstance(found, Refusal):
        return found
    alike = np.all(found.values == found.values[0]) and np.all(found.direction == found.direction[0])
    return Thresholds(found.values[:1], found.direction[:1], found.low) if alike else found


def _through(steps: Sequence[Step], v: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        for step in steps:
            v = step(v)
    assert v.dtype == np.float32, "every step computes in float32"
    return v


def _float_key(value: np.float32) -> int:
    """An integer that rises with a float32: its bits, sign and magnitude made one number."""
    bits = int(np.abs(value).view(np.uint32))
    return -bits if np.signbit(value) else bits


def _float_of(keys: Ints) -> Floats:
    """The float32 of keys; 0 for the key of both zeros."""
    magnitude = np.abs(keys).astype(np.uint32).view(np.float32)
    return np.where(keys < 0, -magnitude, magnitude).astype(np.float32)


def _search(
    codes: Callable[[Ints], Ints],
    low: Ints,
    high: Ints,
    values: Callable[[Ints], Array],
    extremes: tuple[int, int],
    least_code: int,
) -> Thresholds | Refusal:
    """Bisection for all thresholds of all channels at once.

    With t = direction * key the codes rise in t, and threshold k is the least t whose code is above
    ``code_low + k``. Codes that a channel has at its least t already get a threshold that is always reached,
    those that it never has one that is out of reach, so that all channels count from one code.

    Args:
        codes: of keys [C, m].
        low: least key of every channel.
        high: largest key.
        values: what a key stands for.
        extremes: a key that is not above any that occurs, and one that no key which occurs reaches, or the
            largest.
        least_code: the smallest code there is.
    """
    ends = codes(np.stack([low, high], axis=1))
    direction = np.where(ends[:, 1] >= ends[:, 0], 1, -1)
    t_low = np.where(direction > 0, low, -high)
    t_high = np.where(direction > 0, high, -low)
    first, last = ends.min(axis=1), ends.max(axis=1)
    code_low, code_high = int(first.min()), int(last.max())
    if code_low == code_high and code_low > least_code:
        code_low -= 1  # one code throughout: a threshold that is always reached
    count = max(1, code_high - code_low)
    if count > MAX_THRESHOLDS:
        return Refusal(f"its output has {count + 1} codes, more than thresholds are good for")
    wanted = code_low + 1 + np.arange(count)
    below = np.broadcast_to(t_low.reshape(-1, 1), (low.size, count)).copy()
    reached = np.broadcast_to(t_high.reshape(-1, 1), (low.size, count)).copy()
    while np.any(reached - below > 1):
        middle = (below + reached) // 2
        there = codes(direction.reshape(-1, 1) * middle) >= wanted
        reached, below = np.where(there, middle, reached), np.where(there, below, middle)
    found = np.where(codes(direction.reshape(-1, 1) * below) >= wanted, below, reached)

    # A chain that is not monotone after all, such as one that ends in NaN, shows at the thresholds' sides.
    inside = (wanted > first.reshape(-1, 1)) & (wanted <= last.reshape(-1, 1))
    at = codes(direction.reshape(-1, 1) * found)
    before = codes(direction.reshape(-1, 1) * np.maximum(found - 1, t_low.reshape(-1, 1)))
    if np.any(inside & ((at < wanted) | (before >= wanted))):
        return Refusal("the operations behind it do not rise or fall throughout")

    least, most = extremes
    always = np.where(direction > 0, least, most).reshape(-1, 1)
    never = np.where(direction > 0, most, least).reshape(-1, 1)
    keys = np.where(inside, direction.reshape(-1, 1) * found, 0)
    keys = np.where(wanted <= first.reshape(-1, 1), always, keys)
    keys = np.where(wanted > last.reshape(-1, 1), never, keys)
    return Thresholds(values(keys), direction.astype(np.int32), code_low)
