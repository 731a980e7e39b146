"""What convolutions and matrix products have in common: codes times constant weights, and an epilogue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from lowbit.graph.normal_form import Quantization, clip_bounds
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, StoredReal
from lowbit.rewrites.chain import Chain, chain_at
from lowbit.rewrites.epilogue import Bias, Bounds, Epilogue, read_bias, read_epilogue, with_residual
from lowbit.rewrites.operands import Activation
from lowbit.rewrites.rule import Context, Region
from lowbit.rewrites.thresholds import (
    Thresholds,
    add_step,
    quantize_step,
    read_step,
    search_accumulators,
)
from lowbit.rewrites.weights import Weights, accumulator_bounds, check_accumulator, encode


def accumulator_scale(x_scale: npt.NDArray[np.float32], weights: Weights) -> npt.NDArray[np.float32]:
    """``f32(x_scale * w_scale)``, per output channel: what one unit of the accumulator is worth."""
    scale: npt.NDArray[np.float32] = x_scale * weights.scale
    return np.ascontiguousarray(np.broadcast_to(scale, (weights.rows,)))


@dataclass(frozen=True)
class Product:
    """A core that a rule understood.

    Attributes:
        x: its activation.
        x_scale: the activation's scale as the node has it; a Gemm's alpha is in it.
        weights: its weights.
        bias: its bias operand.
        bias_factor: what it multiplies the bias with.
    """

    x: Activation
    x_scale: npt.NDArray[np.float32]
    weights: Weights
    bias: ir.Value | None
    bias_factor: float = 1.0


@dataclass
class ProductRegion(Region):
    """A matrix product with its epilogue; subclasses say how x and y are laid out."""

    product: Product
    epilogue: Epilogue
    chain: Chain
    result: ir.Value
    nodes: Sequence[ir.Node]

    op_types = ("", "")
    """The lowbit op, and its name where an operand is bipolar."""

    @property
    def core(self) -> ir.Node:  # type: ignore[override]
        """The convolution or matrix product."""
        return self.chain.core

    @property
    def codes(self) -> list[ir.Value]:
        """The activation and the residual."""
        residual = self.epilogue.residual
        return [self.product.x.codes, *([residual.codes] if residual else [])]

    @property
    def notes(self) -> list[str]:
        """A rounded bias."""
        return [self.epilogue.bias.note] if self.epilogue.bias.note else []

    @property
    @abstractmethod
    def output_order(self) -> Order:
        """How the output is stored."""

    @abstractmethod
    def read_x(self, lowering: Lowering) -> tuple[Stored, Weights, dict[str, Any]]:
        """The stored activation, the weights in the order of its elements, and the geometry's attributes."""

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        x, weights, geometry = self.read_x(lowering)
        encoded = encode(weights)
        x_zero_point = lowering.zero_point(x, self.product.x.grid)
        attributes, inputs, output = self.epilogue.attributes_and_inputs(lowering, self.output_order)
        x_scale, w_scale = self.product.x_scale, encoded.scale
        if self.epilogue.multiplier is not None:
            x_scale, w_scale = np.ones((), np.float32), self.epilogue.multiplier
        value = lowering.node(
            self.op_types[lowering.ap or "bipolar" in (x.encoding, encoded.encoding)],
            {
                "x": x.value,
                "w": encoded.packed,
                "x_scale": x_scale,
                "x_zero_point": x_zero_point,
                "w_scale": w_scale,
                "w_zero_point": encoded.zero_point,
                **inputs,
            },
            {
                "x_bits": x.bits(int(x_zero_point)),
                "x_encoding": x.encoding,
                "w_bits": encoded.bits,
                "w_encoding": encoded.encoding,
                **attributes,
                **geometry,
            },
            self.result,
            ir.DataType.FLOAT if output is None else output.dtype,
            self.output_order,
            origins=self.nodes,
        )
        if output is None:
            lowering.define_real(self.result, StoredReal(value, self.output_order))
        else:
            lowering.define_codes(self.result, output.stored(value, self.output_order))
        return value


@dataclass(frozen=True)
class Candidate:
    """A chain, and where it stands if it is the inner part of a region that rounds twice."""

    chain: Chain
    result: ir.Value
    nodes: Sequence[ir.Node]
    residual: ir.Value | None = None
    bounds: Bounds = field(default_factory=Bounds)
    quantization: Quantization | None = None


def candidates(context: Context, sink: ir.Node, cores: Sequence[str]) -> list[Candidate]:
    """The chains that end in a node, the widest first.

    Where the graph says product -> Q -> DQ -> Add -> [Relu] -> Q, the region is the whole of it, with both
    roundings; the addition may take the product from either side.
    """
    form = context.form
    chain = chain_at(form, sink, cores, laws=True)
    if chain is not None:
        return [Candidate(chain, chain.result, chain.nodes)]
    outer = chain_at(form, sink, ("Add",), bare=False)
    if outer is None or outer.quantization is None:
        return []
    bounds = Bounds()
    for link in outer.links:
        if link.node.op_type not in ("Relu", "Clip"):
            return []
        clip = clip_bounds(link.node)
        assert clip is not None, "a chain holds no Clip without constant bounds"
        bounds = bounds.then(*clip)
    found = []
    for path in (1, 0):
        inner = _inner_chain(context, outer.core, path, cores)
        if inner is not None:
            found.append(
                Candidate(
                    inner,
                    outer.result,
                    [*inner.nodes, *outer.nodes],
                    outer.core.inputs[1 - path],
                    bounds,
                    outer.quantization,
                )
            )
    return found


def first_region(
    context: Context,
    sink: ir.Node,
    cores: Sequence[str],
    match: Callable[[Context, Candidate], Region | Refusal],
) -> Region | Refusal | None:
    """The region of the first candidate that a rule takes; else the first reason why it takes none."""
    refusal = None
    for candidate in candidates(context, sink, cores):
        region = match(context, candidate)
        if not isinstance(region, Refusal):
            return region
        refusal = refusal or region
    return refusal


def _inner_chain(context: Context, add: ir.Node, path: int, cores: Sequence[str]) -> Chain | None:
    """The chain behind one operand of an addition, if nothing else reads its codes."""
    form = context.form
    dequantization = form.dequantization(add.inputs[path])
    if dequantization is None or isinstance(dequantization, Refusal):
        return None
    quantization = form.quantization(dequantization.codes)
    if not isinstance(quantization, Quantization) or not quantization.grid.equals(dequantization.grid):
        return None
    if form.codes_used_once(dequantization.codes) is not add:
        return None
    return chain_at(form, quantization.nodes[-1], cores, laws=True)


def _check_scales(product: Product, epilogue: Epilogue) -> Refusal | None:
    """Refuses scales whose product or ratio leaves float32."""
    with np.errstate(over="ignore", under="ignore"):
        scale = accumulator_scale(product.x_scale, product.weights)
        for quantization in (epilogue.inner, epilogue.quantization):
            if quantization is not None and not np.all(np.isfinite(scale / quantization.grid.scale)):
                return Refusal(
                    f"its output scale {quantization.grid.scale} is too small for its accumulator's"
                )
    if not np.all(np.isfinite(scale)):
        return Refusal("the product of its scales overflows float32")
    return None


def finish(
    context: Context, candidate: Candidate, product: Product, *, rank: int, channel_axis: int
) -> Epilogue | Refusal:
    """The epilogue of a candidate whose core a rule understood, and the proof that its sums fit int32."""
    epilogue: Epilogue | Refusal = read_epilogue(
        context.form,
        candidate.chain,
        accumulator_scale(product.x_scale, product.weights),
        product.weights.rows,
        rank=rank,
        channel_axis=channel_axis,
        bias=product.bias,
        bias_factor=product.bias_factor,
        round_bias=context.round_bias,
    )
    epilogue = _with_thresholds(context, candidate.chain, product, epilogue, rank, channel_axis)
    if isinstance(epilogue, Refusal):
        return epilogue
    refusal = _check_scales(product, epilogue) or check_accumulator(
        product.weights, product.x.range, product.x.grid, epilogue.bias.integers
    )
    if refusal is not None:
        return refusal
    if candidate.quantization is None:
        return epilogue
    return with_residual(context.form, epilogue, candidate.residual, candidate.bounds, candidate.quantization)


FEW_THRESHOLDS = 15
"""Up to here counting them costs no more than the tail that they replace."""
MOST_THRESHOLDS = 63
"""Up to here they take the place of a chain that no tail can say; more would outweigh the weights."""


def _with_thresholds(
    context: Context, chain: Chain, product: Product, epilogue: Epilogue | Refusal, rank: int, axis: int
) -> Epilogue | Refusal:
    """Thresholds in place of an epilogue where they are better or the only way.

    What follows a product and means its float32 chain (:attr:`Epilogue.literal`) is ``requantize`` if that is
    the same for all accumulators, else thresholds if they are few, else the tail. Any other chain gets
    thresholds where no other epilogue can say it.
    """
    quantization = chain.quantization
    if quantization is None:
        return epilogue
    code_range = quantization.range
    few = code_range.bipolar or code_range.high - code_range.low <= FEW_THRESHOLDS
    if isinstance(epilogue, Epilogue) and (
        not epilogue.literal or epilogue.residual is not None or (epilogue.steps and not few)
    ):
        return epilogue
    found = _search_chain(context, chain, quantization, product, rank, axis)
    if isinstance(found, Refusal):
        return epilogue if isinstance(epilogue, Epilogue) else found
    bias, thresholds, bounds = found
    if isinstance(epilogue, Epilogue) and not epilogue.steps:
        multiplied = _search_multiplier(epilogue, quantization, product, bounds)
        if isinstance(multiplied, Thresholds) and thresholds.equals(multiplied):
            return replace(epilogue, literal=False)
    if few or (isinstance(epilogue, Refusal) and thresholds.count <= MOST_THRESHOLDS):
        return Epilogue(bias=replace(bias, reals=None), quantization=quantization, thresholds=thresholds)
    return epilogue


AccumulatorBounds = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _search_chain(
    context: Context, chain: Chain, quantization: Quantization, product: Product, rank: int, axis: int
) -> tuple[Bias, Thresholds, AccumulatorBounds] | Refusal:
    """The thresholds of a chain, the integer bias in front of it, and the bounds of the accumulators."""
    form, channels = context.form, product.weights.rows
    scale = accumulator_scale(product.x_scale, product.weights)
    bias = read_bias(form, product.bias, scale, rank, axis, product.bias_factor, context.round_bias)
    if isinstance(bias, Refusal):
        return bias
    steps = [] if bias.reals is None else [add_step(bias.reals)]
    for link in chain.links:
        step = read_step(form, link, channels, rank, axis)
        if isinstance(step, Refusal):
            return step
        steps.append(step)
    quantize = quantize_step(quantization, channels, rank, axis)
    if isinstance(quantize, Refusal):
        return quantize
    bounds = accumulator_bounds(product.weights, product.x.range, product.x.grid, bias.integers)
    found = search_accumulators(scale, steps, quantize, bounds, _least_code(quantization))
    return found if isinstance(found, Refusal) else (bias, found, bounds)


def _search_multiplier(
    epilogue: Epilogue, quantization: Quantization, product: Product, bounds: AccumulatorBounds
) -> Thresholds | Refusal:
    """The thresholds of ``clip(rint(f32(acc) * m) + z, lo, hi)``, which is ``requantize``."""
    low, high = epilogue.bounds.codes(quantization)
    zero_point = quantization.grid.zero_point.astype(np.float32)

    def quantize(v: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        codes: npt.NDArray[np.int64] = np.fmin(np.fmax(np.rint(v) + zero_point, low), high).astype(np.int64)
        return codes

    with np.errstate(over="ignore"):
        multiplier = accumulator_scale(product.x_scale, product.weights) / quantization.grid.scale
    return search_accumulators(multiplier, (), quantize, bounds, _least_code(quantization))


def _least_code(quantization: Quantization) -> int:
    return 0 if quantization.range.bipolar else quantization.range.low
