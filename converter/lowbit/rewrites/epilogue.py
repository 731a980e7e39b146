"""Epilogues: a chain as one of the kinds that a lowbit matrix product can end in.

``docs/numerics.md`` gives the formulas. Which one a chain needs follows from what stands in it:

- only Relu and Clip before the quantizer: ``requantize``, the bounds become bounds of the codes;
- nothing at all, and no quantizer: ``float``;
- operations with constants, and a quantizer to few codes: ``thresholds``;
- anything else (a float bias, a BatchNormalization, an addition before the only rounding): ``tail``.

A QDQ pair of a product and its quantizer has the one multiplier ``f32(f32(x_scale * w_scale) / y_scale)``, as
ONNX Runtime defines it. QONNX means its float32 chain instead, a product and a division, which may round
differently; ``requantize`` stands for it only where both agree on every accumulator that can occur.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.attributes import get_float
from lowbit.graph.constants import constant
from lowbit.graph.normal_form import Dequantization, NormalForm, Quantization, clip_bounds, is_op
from lowbit.graph.quantization import Grid, quantize_scalar
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import CodesOutput, Order
from lowbit.rewrites.batch_normalization import fold_batch_normalization
from lowbit.rewrites.chain import Chain, Link
from lowbit.rewrites.operands import Activation, per_channel, read_activation, real_constant
from lowbit.rewrites.thresholds import Thresholds
from lowbit.rewrites.weights import INT32_MAX

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bias:
    """A bias as the epilogue takes it: integers on the accumulator's grid, real numbers, or none."""

    integers: npt.NDArray[np.int64] | None = None
    reals: Floats | None = None
    note: str | None = None


@dataclass(frozen=True)
class Bounds:
    """Real bounds that monotone steps before a quantizer have put on a value."""

    low: float = float("-inf")
    high: float = float("inf")

    def then(self, low: float, high: float) -> Bounds:
        """After one more Clip: ``min(max(v, low), high)`` of both ends."""
        return Bounds(min(max(self.low, low), high), min(max(self.high, low), high))

    def codes(self, quantization: Quantization) -> tuple[int, int]:
        """The bounds as codes: rounding is monotone, so clipping commutes with it.

        A grid per channel has no codes that hold for all channels, except where nothing is cut.
        """
        allowed = quantization.range
        if (self.low, self.high) == (float("-inf"), float("inf")):
            return allowed.low, allowed.high
        return (
            quantize_scalar(self.low, quantization.grid, allowed.low, allowed.high),
            quantize_scalar(self.high, quantization.grid, allowed.low, allowed.high),
        )


@dataclass(frozen=True)
class Epilogue:
    """What follows the exact accumulator.

    Attributes:
        steps: the tail's steps in order.
        bias: the bias.
        scale: factor of the tail's affine step, [out_channels].
        shift: summand of the tail's affine step.
        clip: bounds of the tail's clip step.
        residual: the operand of an addition.
        bounds: real bounds before the last quantizer.
        quantization: the quantizer at the end; None where the result is float.
        thresholds: what stands for all of the above except the integer bias, where it is given.
        literal: whether the quantizer divides, as its graph says, where a multiplier would round differently.
        multiplier: [out_channels], where the output has one scale per channel: what the scales of x, of the
            weights and of the output make together. ``quantization`` is then one of scale 1.
        inner: the quantizer between the accumulator and the residual, if the graph rounds twice.
        inner_bounds: real bounds before that.
    """

    steps: tuple[str, ...] = ()
    bias: Bias = field(default_factory=Bias)
    scale: Floats | None = None
    shift: Floats | None = None
    clip: tuple[float, float] | None = None
    residual: Activation | None = None
    bounds: Bounds = field(default_factory=Bounds)
    quantization: Quantization | None = None
    thresholds: Thresholds | None = None
    literal: bool = False
    multiplier: Floats | None = None
    inner: Quantization | None = None
    inner_bounds: Bounds = field(default_factory=Bounds)

    @property
    def kind(self) -> str:
        """The schema's word."""
        if self.thresholds is not None:
            return "thresholds"
        if (self.steps or self.literal) and self.inner is None:
            return "tail"
        return "requantize" if self.quantization is not None else "float"

    def attributes_and_inputs(
        self, lowering: Lowering, order: Order
    ) -> tuple[dict[str, Any], dict[str, Any], CodesOutput | None]:
        """The epilogue as a node has it.

        Args:
            lowering: the output graph.
            order: order of the node's output, in which it needs the residual.

        Returns:
            Attributes, inputs, and the storage of the output (None for float32).
        """
        attributes: dict[str, Any] = {"epilogue": self.kind}
        inputs: dict[str, Any] = {
            "bias": None if self.bias.integers is None else self.bias.integers.astype(np.int32),
        }
        if self.kind == "tail":
            attributes["tail"] = ",".join(self.steps)
            inputs |= {"tail_bias": self.bias.reals, "tail_scale": self.scale, "tail_shift": self.shift}
            if self.clip is not None:
                attributes["clip_min"], attributes["clip_max"] = self.clip
        if self.residual is not None:
            stored = lowering.codes_in(self.residual.codes, order)
            attributes["residual_encoding"] = stored.encoding
            inputs |= {
                "residual": stored.value,
                "residual_scale": self.residual.grid.scale,
                "residual_zero_point": lowering.zero_point(stored, self.residual.grid),
            }
        if self.inner is not None:
            low, high = self.inner_bounds.codes(self.inner)
            signed = self.inner.range.low < 0
            attributes["inner_encoding"] = "signed" if signed else "unsigned"
            if low != (-128 if signed else 0):
                attributes["inner_min"] = [low]
            if high != (127 if signed else 255):
                attributes["inner_max"] = [high]
            inputs |= {"inner_scale": self.inner.grid.scale, "inner_zero_point": self.inner.grid.zero_point}
        if self.quantization is None:
            return attributes, inputs, None
        if self.thresholds is not None:
            low, high = self.thresholds.low, self.thresholds.low + self.thresholds.count
            output, range_attributes = lowering.quantized_output(self.quantization, low, high)
            inputs |= self.thresholds.inputs(output.offset, inputs_prefix="threshold_")
            kept = {name: range_attributes[name] for name in ("y_bits", "y_encoding")}
            return attributes | kept, inputs, output
        low, high = self.bounds.codes(self.quantization)
        output, range_attributes = lowering.quantized_output(self.quantization, low, high)
        return attributes | range_attributes, inputs | output.inputs, output


def read_epilogue(
    form: NormalForm,
    chain: Chain,
    accumulator_scale: Floats,
    channels: int,
    *,
    rank: int,
    channel_axis: int,
    bias: ir.Value | None,
    bias_factor: float = 1.0,
    round_bias: bool = False,
) -> Epilogue | Refusal:
    """A chain as an epilogue.

    Args:
        form: the graph.
        chain: the chain.
        accumulator_scale: ``f32(x_scale * w_scale)``, [channels].
        channels: number of output channels.
        rank: rank of the core's output.
        channel_axis: its channel axis.
        bias: the core's own bias operand.
        bias_factor: what the core multiplies it with (a Gemm's beta).
        round_bias: whether a bias off the accumulator's grid may be rounded onto it.
    """
    if chain.quantization is not None and not chain.quantization.linear:
        return Refusal("its quantizer rounds in another way than QuantizeLinear")
    quantization = chain.quantization
    literal = quantization is not None and (quantization.law is not None or quantization.divides)
    links = list(chain.links)
    if (
        bias is None
        and not literal
        and links
        and is_op(links[0].node, "Add")
        and _is_bias(form, links[0], rank, channel_axis, channels)
    ):
        bias = links.pop(0).other
    read = read_bias(form, bias, accumulator_scale, rank, channel_axis, bias_factor, round_bias)
    if isinstance(read, Refusal):
        return read
    epilogue = Epilogue(
        steps=() if read.reals is None else ("bias",),
        bias=read,
        quantization=chain.quantization,
        literal=literal,
    )
    for position, link in enumerate(links):
        last = all(is_op(later.node, "Relu", "Clip") for later in links[position + 1 :])
        extended = _extend(form, epilogue, link, channels, rank, channel_axis, into_bounds=last)
        if isinstance(extended, Refusal):
            return extended
        epilogue = extended
    if epilogue.quantization is None or epilogue.quantization.grid.per_tensor:
        return epilogue
    return _with_multiplier(epilogue, epilogue.quantization, accumulator_scale, channel_axis)


def _with_multiplier(
    epilogue: Epilogue, quantization: Quantization, accumulator_scale: Floats, channel_axis: int
) -> Epilogue | Refusal:
    """A requantizing epilogue whose output has one scale per channel, on an output grid of scale 1.

    ``m[c] = f32(accumulator_scale[c] / s_y[c])`` is all that requantizing asks for. With x_scale 1, w_scale m
    and y_scale 1 the node computes ``f32(f32(1 * m[c]) / 1)``, the very same number.
    """
    grid = quantization.grid
    if epilogue.kind != "requantize":
        return Refusal("its output has one scale per channel, but it is not rounded from the exact sum alone")
    if grid.axis != channel_axis or np.unique(grid.zero_point).size != 1:
        return Refusal("its output has one zero point per channel; lowbit needs one per activation tensor")
    zero_point = grid.zero_point[:1].reshape(())
    bounds = {
        epilogue.bounds.codes(replace(quantization, grid=Grid(scale.reshape(()), zero_point)))
        for scale in grid.scale
    }
    if len(bounds) != 1:
        return Refusal("its output has one scale per channel, and a Clip in front of it")
    ((low, high),) = bounds
    with np.errstate(over="ignore"):
        multiplier = (accumulator_scale / grid.scale).astype(np.float32)
    if not np.all(np.isfinite(multiplier)):
        return Refusal("its output scales are too small for its accumulator's")
    plain = replace(quantization, grid=Grid(np.ones((), np.float32), zero_point))
    shifted = Bounds(low - int(zero_point), high - int(zero_point))
    return replace(epilogue, bounds=shifted, quantization=plain, multiplier=multiplier)


def refuse_per_channel(quantization: Quantization) -> Refusal | None:
    """A refusal where an output has a scale per channel."""
    if quantization.grid.per_tensor:
        return None
    return Refusal("its output has one scale per channel; lowbit needs one scale per activation tensor")


def with_residual(
    form: NormalForm, inner: Epilogue, residual: ir.Value | None, bounds: Bounds, quantization: Quantization
) -> Epilogue | Refusal:
    """A requantizing epilogue followed by an addition and a second quantizer.

    Args:
        form: the graph.
        inner: the convolution's own epilogue.
        residual: the other operand of the addition.
        bounds: real bounds between the addition and the second quantizer.
        quantization: the second quantizer.
    """
    if inner.kind != "requantize" or inner.residual is not None or inner.multiplier is not None:
        return Refusal("the convolution before it does not end in a plain quantizer")
    if (refusal := refuse_per_channel(quantization)) is not None:
        return refusal
    activation = read_activation(form, residual, "residual operand")
    if isinstance(activation, Refusal):
        return activation
    return replace(
        inner,
        residual=activation,
        bounds=bounds,
        quantization=quantization,
        inner=inner.quantization,
        inner_bounds=inner.bounds,
    )


def _extend(
    form: NormalForm,
    epilogue: Epilogue,
    link: Link,
    channels: int,
    rank: int,
    axis: int,
    *,
    into_bounds: bool,
) -> Epilogue | Refusal:
    """The epilogue with one more node of the chain."""
    node = link.node
    if is_op(node, "Relu", "Clip"):
        bounds = clip_bounds(node)
        assert bounds is not None
        return _add_bounds(epilogue, bounds, node.op_type, into_bounds=into_bounds)

    if is_op(node, "HardSigmoid"):
        slope, shift = (np.float32(get_float(node, *given)) for given in (("alpha", 0.2), ("beta", 0.5)))
        scaled = _add_affine(
            epilogue, *(np.full(channels, constant, np.float32) for constant in (slope, shift))
        )
        if isinstance(scaled, Refusal):
            return scaled
        return _add_bounds(scaled, (0.0, 1.0), "Clip", into_bounds=into_bounds)

    if link.gate is not None or is_op(node, "HardSwish"):
        step = "silu" if is_op(link.gate, "Sigmoid") else "hardswish"
        if step in epilogue.steps:
            return Refusal(f"two {node.op_type} nodes follow it")
        return replace(epilogue, steps=(*epilogue.steps, step))

    if is_op(node, "BatchNormalization"):
        folded = fold_batch_normalization(form, node, channels, axis)
        return folded if isinstance(folded, Refusal) else _add_affine(epilogue, *folded)

    if not (is_op(node, "Add", "Mul") or (is_op(node, "Sub") and link.path == 0)):
        return Refusal(f"a {node.op_type} follows it")  # only thresholds can contain it
    other = real_constant(form, link.other)
    if other is None:
        if not is_op(node, "Add"):
            return Refusal(f"the second operand of its {node.op_type} is not constant")
        if "residual" in epilogue.steps:
            return Refusal("two additions follow it")
        activation = read_activation(form, link.other, "residual operand")
        if isinstance(activation, Refusal):
            return activation
        path = node.inputs[link.path]
        assert path is not None
        if not same_shape(path, activation.codes):
            return Refusal("the other operand of its Add has another shape")
        return replace(epilogue, steps=(*epilogue.steps, "residual"), residual=activation)

    constants = per_channel(other, rank, axis, channels)
    if constants is None:
        return Refusal(
            f"the constant of its {node.op_type} has the shape {list(other.shape)}, expected one per channel"
        )
    if not np.all(np.isfinite(constants)):
        return Refusal(f"the constant of its {node.op_type} is not finite")
    if is_op(node, "Mul"):
        return _add_affine(epilogue, constants, np.zeros(channels, np.float32))
    if is_op(node, "Sub"):
        constants = -constants
    if epilogue.steps and epilogue.steps[-1] == "affine" and not np.any(epilogue.shift):
        return replace(epilogue, shift=constants)
    if "bias" in epilogue.steps:
        return Refusal("two additions of a constant follow it")
    return replace(epilogue, steps=(*epilogue.steps, "bias"), bias=replace(epilogue.bias, reals=constants))


def _add_bounds(
    epilogue: Epilogue, bounds: tuple[float, float], op_type: str, *, into_bounds: bool
) -> Epilogue | Refusal:
    """The epilogue with a Relu or Clip, which right in front of the quantizer bounds the codes."""
    if into_bounds and epilogue.quantization is not None:
        return replace(epilogue, bounds=epilogue.bounds.then(*bounds))
    step = op_type.lower()
    if step in epilogue.steps:
        return Refusal(f"two {op_type} nodes follow it")
    clip = bounds if step == "clip" else epilogue.clip
    return replace(epilogue, steps=(*epilogue.steps, step), clip=clip)


def _add_affine(epilogue: Epilogue, scale: Floats, shift: Floats) -> Epilogue | Refusal:
    if "affine" in epilogue.steps:
        return Refusal("two multiplications by a constant follow it")
    return replace(epilogue, steps=(*epilogue.steps, "affine"), scale=scale, shift=shift)


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values have one shape: equal numbers, and dynamic dims in the same places.

    Two dynamic dims could still differ at run time; the node checks its residual then and fails cleanly.
    """
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(
        x == y or not (isinstance(x, int) or isinstance(y, int))
        for x, y in zip(a.shape, b.shape, strict=True)
    )


def _is_bias(form: NormalForm, link: Link, rank: int, axis: int, channels: int) -> bool:
    array = real_constant(form, link.other)
    return array is not None and per_channel(array, rank, axis, channels) is not None


def read_bias(
    form: NormalForm,
    value: ir.Value | None,
    accumulator_scale: Floats,
    rank: int,
    axis: int,
    factor: float,
    round_bias: bool,
) -> Bias | Refusal:
    """The bias of a core: integers if its grid is exactly the accumulator's, else real numbers.

    A factor of 0 leaves it out, whatever it holds.
    """
    if value is None or factor == 0:
        return Bias()
    dequantization = form.dequantization(value)
    if isinstance(dequantization, Refusal):
        return Refusal(f"its bias cannot be read: {dequantization.reason}")
    channels = accumulator_scale.size
    # A Conv's bias is [C] whatever the rank of its output; a Gemm's or an Add's broadcasts.
    array = real_constant(form, value)
    if array is None:
        return Refusal("its bias is not constant")
    reals = array if array.shape == (channels,) else per_channel(array, rank, axis, channels)
    if reals is None:
        return Refusal(f"its bias has the shape {list(array.shape)}, expected [{channels}]")

    if isinstance(dequantization, Dequantization) and factor == 1.0:
        integers = _on_grid(dequantization, accumulator_scale)
        if integers is not None:
            return Bias(integers=integers)
    with np.errstate(all="ignore"):
        reals = reals if factor == 1.0 else np.float32(factor) * reals
    if not np.all(np.isfinite(reals)):
        return Refusal("its bias is not finite")
    if not np.any(reals):
        return Bias()
    if not round_bias:
        return Bias(reals=reals)
    with np.errstate(over="ignore", divide="ignore"):
        rounded = np.rint(reals / accumulator_scale)
    if not np.all(np.abs(rounded) <= INT32_MAX):
        return Refusal("its bias, rounded to the accumulator's grid, does not fit int32")
    error = np.abs(rounded * accumulator_scale - reals).max()
    return Bias(
        integers=rounded.astype(np.int64),
        note=f"its bias was rounded to the accumulator's grid (largest change {error:.3g})",
    )


def _on_grid(dequantization: Dequantization, accumulator_scale: Floats) -> npt.NDArray[np.int64] | None:
    """The integers of a quantized bias whose grid is exactly the accumulator's; None otherwise."""
    codes = constant(dequantization.codes)
    grid = dequantization.grid
    if codes is None or codes.size != accumulator_scale.size or np.any(grid.zero_point):
        return None
    if not np.array_equal(np.broadcast_to(grid.scale, accumulator_scale.shape), accumulator_scale):
        return None
    return codes.reshape(-1).astype(np.int64)
