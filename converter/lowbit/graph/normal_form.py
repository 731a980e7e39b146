"""The normal form: a float graph in which QuantizeLinear, Clip and DequantizeLinear say all about bits.

Whatever dialect a model speaks, its frontend leaves these and only these statements about quantization:

- ``DequantizeLinear`` gives a tensor of codes its grid (scale, zero point, axis);
- ``QuantizeLinear`` rounds a float tensor onto a grid; its element type bounds the codes; what it cannot say
  is said by a node of :mod:`lowbit.graph.quantizers`;
- a ``Clip`` on codes right behind it narrows those bounds (QCDQ: this is how 4 bits are said in int8).

This module reads them. A statement that lowbit does not understand is answered with a :class:`Refusal`, and
the nodes around it stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from lowbit.graph.attributes import get_int, get_string
from lowbit.graph.constants import Array, constant, scalar
from lowbit.graph.quantization import CODE_TYPES, CodeRange, Grid, differences
from lowbit.graph.quantizers import Law, is_law, read_law
from lowbit.graph.reasons import Refusal

_DOMAINS = ("", "ai.onnx", "com.microsoft")

CODE_MOVERS = frozenset({
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad", "MaxPool",
    "Resize", "DepthToSpace", "SpaceToDepth", "Gather", "Tile", "Expand", "ReduceMax", "ReduceMin",
})  # fmt: skip
"""Ops whose output holds elements of their first input, so that they may run on codes."""

CODE_CHOOSERS = ("MaxPool", "ReduceMax", "ReduceMin")
"""Those of them that choose elements by their size, so that only what rises may move across them."""

ELEMENTWISE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Clip", "Cos", "Cosh",
    "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Log", "Max", "Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tan", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
"""Ops that compute every element of their output from the same element of their inputs."""


HALF = (
    "it computes in float16, which rounds after every operation, as integer sums do not; a model that "
    "quantizes activations converts without keep_float16 (--keep-float16), others if exported with float32"
)
"""Why quantizers of float16 tensors are no grids to most rules.

Only what moves codes, or is a function of one code, can read them, by asking for ``half``: it computes
nothing but what the graph's own nodes say.
"""

DIVIDES = "lowbit.divides"
"""Key of a QuantizeLinear's ``meta`` that says that it rounds a sum which has been rounded before.

What stood between a matrix product, or a mean, and its quantizer has gone elsewhere: there is no multiplier
for both, as there is for a product and the quantizer right behind it.
"""

ROUNDED = "lowbit.rounded"
"""Key of the ``meta`` of codes that a pass made: the model's own float value and what rounds it."""

WRITTEN_OUT = "lowbit.written_out"
"""Key of a node's ``meta`` for the operator that a frontend wrote out as this node and others."""


@dataclass(frozen=True)
class Quantization:
    """A float tensor rounded to codes.

    Attributes:
        source: the float tensor.
        codes: the codes: output of the QuantizeLinear or of the Clip behind it.
        grid: their grid.
        range: the codes that can occur.
        nodes: QuantizeLinear, and the Clip if there is one.
        law: how the codes follow from the source where a frontend wrote it; None for QuantizeLinear.
        half: whether source and scale are float16, see :data:`HALF`.
        divides: whether it divides a sum that has been rounded, see :data:`DIVIDES`.
    """

    source: ir.Value
    codes: ir.Value
    grid: Grid
    range: CodeRange
    nodes: tuple[ir.Node, ...]
    law: Law | None = None
    half: bool = False
    divides: bool = False

    @property
    def linear(self) -> bool:
        """Whether the codes are what QuantizeLinear and a Clip on codes make of the source."""
        return self.law is None or self.law.linear


@dataclass(frozen=True)
class Dequantization:
    """Codes read as real numbers.

    Attributes:
        codes: uint8, int8, or an element type below a byte; int32 too where they are constant.
        grid: the grid that the reader gives them.
        node: the DequantizeLinear.
        half: whether scale and result are float16, see :data:`HALF`.
    """

    codes: ir.Value
    grid: Grid
    node: ir.Node
    half: bool = False


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of ONNX's own ops of these names."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in op_types


def is_identity(node: ir.Node) -> bool:
    """Whether a node does nothing but return its input: Identity, or a Dropout outside of training.

    One of which somebody reads the mask as well is not.
    """
    if not node.inputs or node.inputs[0] is None:
        return False
    if is_op(node, "Identity"):
        return True
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if not is_op(node, "Dropout") or not (training is None or scalar(training) == 0):
        return False
    return not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])


def is_quantize(node: ir.Node | None) -> bool:
    """QuantizeLinear of the standard or of ONNX Runtime's own domain."""
    return node is not None and node.op_type == "QuantizeLinear" and node.domain in _DOMAINS


def is_dequantize(node: ir.Node | None) -> bool:
    """DequantizeLinear of the standard or of ONNX Runtime's own domain."""
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _DOMAINS


def is_quantizer(node: ir.Node | None) -> bool:
    """A node from real numbers to codes: QuantizeLinear, or what only a frontend can say."""
    return is_quantize(node) or is_law(node)


def may_return(node: ir.Node) -> bool:
    """Whether a node is the float form of an operator that comes back where no rule takes it."""
    return WRITTEN_OUT in node.meta


def rank_of(value: ir.Value) -> int | None:
    """The number of dims, if known."""
    return None if value.shape is None else len(value.shape)


def dims_of(value: ir.Value) -> list[int | None]:
    """The static dims of a value of known rank; None where a dim is symbolic."""
    assert value.shape is not None
    return [dim if isinstance(dim, int) else None for dim in value.shape]


def read_grid(node: ir.Node, tensor: ir.Value, dtype: ir.DataType) -> Grid | Refusal:
    """The grid of a QuantizeLinear or DequantizeLinear.

    Args:
        node: the node; input 1 is the scale, input 2 the zero point.
        tensor: what is (de)quantized.
        dtype: the element type of its codes.

    Returns:
        The grid, its axis counted from the front.
    """
    scale = constant(node.inputs[1])
    if scale is None:
        return Refusal("its scale is computed at run time; lowbit needs a constant")
    if get_int(node, "block_size", 0) != 0:
        return Refusal(f"blocked quantization (block_size={get_int(node, 'block_size', 0)}) is not supported")
    real = node.outputs[0] if is_dequantize(node) else node.inputs[0]
    if scale.dtype == np.float16 and real is not None and real.dtype == ir.DataType.FLOAT16:
        scale = scale.astype(np.float32)
    if scale.dtype != np.float32:
        return Refusal(f"its scale is {scale.dtype}; lowbit computes in float32")
    if not np.all(np.isfinite(scale)) or np.any(scale <= 0):
        return Refusal(f"its scale must be finite and positive, got {_first_bad(scale)}")
    if np.any(scale < np.finfo(np.float32).tiny):
        return Refusal(f"its scale {scale.min()} is subnormal; quotients by it overflow float32")
    if np.any(scale > np.finfo(np.float32).max / 512):
        return Refusal(f"its scale {scale.max()} is so large that codes would overflow float32")
    zero_input = node.inputs[2] if len(node.inputs) > 2 else None
    zero_point = constant(zero_input)
    if zero_point is None:
        if zero_input is not None:
            return Refusal("its zero point is computed at run time; lowbit needs a constant")
        zero_point = np.zeros((), np.int32)
    elif zero_input is not None and zero_input.dtype not in (None, dtype):
        return Refusal(f"its zero point is of type {zero_input.dtype}, its codes of type {dtype}")
    zero_point = zero_point.astype(np.int64)
    if scale.size == 1 and zero_point.size == 1:
        return Grid(scale.reshape(()), zero_point.reshape(()).astype(np.int32))

    rank = rank_of(tensor)
    # A vector has one axis; exporters leave it out for a bias, which ONNX Runtime takes in a QLinearConv.
    axis = get_int(node, "axis", 0 if rank == 1 and is_dequantize(node) else 1)
    if scale.ndim > 1:
        axes = [i for i, size in enumerate(scale.shape) if size != 1]
        if len(axes) != 1 or scale.ndim != rank:
            return Refusal(
                f"its scale has the shape {list(scale.shape)}; expected one scale, or one per channel"
            )
        axis = axes[0]
    elif axis < 0:
        if rank is None:
            return Refusal(f"its axis {axis} counts from the end of a tensor of unknown rank")
        axis += rank
    if rank is not None and not 0 <= axis < rank:
        return Refusal(f"its axis is {get_int(node, 'axis', 1)}, but its input has rank {rank}")
    if zero_point.size not in (1, scale.size) and scale.size != 1:
        return Refusal(f"it has {scale.size} scales but {zero_point.size} zero points")
    count = max(scale.size, zero_point.size)
    size = None if rank is None else dims_of(tensor)[axis]
    if size not in (None, count):
        return Refusal(f"it has {count} scales or zero points for the {size} entries of axis {axis}")
    return Grid(
        np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), (count,))),
        np.ascontiguousarray(np.broadcast_to(zero_point.reshape(-1), (count,)).astype(np.int32)),
        axis,
    )


def read_quantize(node: ir.Node, *, half: bool = False) -> Quantization | Refusal:
    """What a QuantizeLinear says; one of float16 speaks only to those who ask for ``half``."""
    source, codes = node.inputs[0], node.outputs[0]
    assert source is not None
    dtype = _code_type(node, codes)
    if dtype not in CODE_TYPES:
        return Refusal(f"codes of type {dtype} are not supported; lowbit has 1 to 8 bit integers")
    is_half = source.dtype == ir.DataType.FLOAT16
    if is_half and not half:
        return Refusal(HALF)
    if source.dtype not in (None, ir.DataType.FLOAT) and not is_half:
        return Refusal(f"it quantizes {source.dtype}; lowbit computes in float32")
    if get_int(node, "precision", 0) not in (0, int(ir.DataType.FLOAT)):
        return Refusal("it asks for another precision than float32")
    assert dtype is not None
    grid = read_grid(node, source, dtype)
    if isinstance(grid, Refusal):
        return grid
    divides = DIVIDES in node.meta
    return Quantization(source, codes, grid, CodeRange.of(dtype), (node,), half=is_half, divides=divides)


def read_dequantize(node: ir.Node, *, half: bool = False) -> Dequantization | Refusal:
    """What a DequantizeLinear says; one of float16 speaks only to those who ask for ``half``."""
    codes, real = node.inputs[0], node.outputs[0]
    assert codes is not None
    dtype = _code_type(node, codes) if codes.dtype is None else codes.dtype
    if dtype not in CODE_TYPES and not (dtype == ir.DataType.INT32 and constant(codes) is not None):
        return Refusal(f"codes of type {dtype} are not supported; lowbit has 1 to 8 bit integers")
    is_half = real.dtype == ir.DataType.FLOAT16
    if is_half and not half:
        return Refusal(HALF)
    if real.dtype not in (None, ir.DataType.FLOAT) and not is_half:
        return Refusal(f"it gives {real.dtype}; lowbit computes in float32")
    assert dtype is not None
    grid = read_grid(node, codes, dtype)
    if isinstance(grid, Refusal):
        return grid
    array = constant(codes)
    if dtype == ir.DataType.INT32 and array is not None and _wraps(array, grid):
        return Refusal(
            f"'{codes.name}' less its zero point leaves int32, where ONNX Runtime wraps around in silence"
        )
    return Dequantization(codes, grid, node, is_half)


def _wraps(codes: Array, grid: Grid) -> bool:
    """Whether ``code - zero_point`` leaves int32 anywhere."""
    if not codes.size or not np.any(grid.zero_point):
        return False
    exact = differences(codes, grid)
    info = np.iinfo(np.int32)
    return bool(exact.min() < info.min or exact.max() > info.max)


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """The constant bounds of a Clip (or Relu); None where one is computed at run time, or is no number.

    Both forms of Clip are read: bounds as inputs (since opset 11) and as attributes.
    """
    if node.op_type == "Relu":
        return 0.0, float("inf")
    bounds = [float("-inf"), float("inf")]
    for i, name in enumerate(("min", "max")):
        given = node.inputs[i + 1] if len(node.inputs) > i + 1 else None
        if given is not None:
            value = scalar(given)
            if value is None:
                return None
            bounds[i] = float(value)
        elif name in node.attributes:
            bounds[i] = node.attributes[name].as_float()
    return None if any(map(math.isnan, bounds)) else (bounds[0], bounds[1])


class NormalForm:
    """Answers questions about a graph in normal form.

    The graph must not change while a NormalForm of it is in use: answers are remembered.
    """

    def __init__(self, graph: ir.Graph, ranges: dict[ir.Value, CodeRange | None] | None = None):
        """Takes, and adds to, what is known about ranges: no rewriting changes the codes of a value."""
        self.graph = graph
        self._quantizations: dict[ir.Value, Quantization | Refusal | None] = {}
        self._dequantizations: dict[ir.Value, Dequantization | Refusal | None] = {}
        self._ranges: dict[ir.Value, CodeRange | None] = {} if ranges is None else ranges

    def quantization(self, codes: ir.Value, *, half: bool = False) -> Quantization | Refusal | None:
        """How a value came to be codes; None if no QuantizeLinear made it. See :data:`HALF`."""
        if codes not in self._quantizations:
            self._quantizations[codes] = self._read_quantization(codes)
        read = self._quantizations[codes]
        return Refusal(HALF) if isinstance(read, Quantization) and read.half and not half else read

    def dequantization(self, real: ir.Value | None, *, half: bool = False) -> Dequantization | Refusal | None:
        """The codes behind a float value; None if it is no DequantizeLinear's output. See :data:`HALF`."""
        if real is None:
            return None
        if real not in self._dequantizations:
            node = real.producer()
            made = node is not None and is_dequantize(node)
            self._dequantizations[real] = read_dequantize(node, half=True) if node and made else None
        read = self._dequantizations[real]
        return Refusal(HALF) if isinstance(read, Dequantization) and read.half and not half else read

    def code_range(self, codes: ir.Value) -> CodeRange | None:
        """The codes that can occur in a value; None if it does not hold codes of a known type."""
        waiting = [codes]
        while waiting:
            value = waiting[-1]
            missing = self._range_sources(value)
            if not missing:
                if value not in self._ranges:
                    self._ranges[value] = self._read_range(value)
                waiting.pop()
            waiting.extend(missing)
        return self._ranges[codes]

    def _range_sources(self, codes: ir.Value) -> list[ir.Value]:
        """The values whose ranges are still unknown and from which that of a value follows."""
        node = codes.producer()
        if codes in self._ranges or node is None:
            return []
        if isinstance(self.quantization(codes, half=True), Quantization):
            return []
        given = node.inputs if is_op(node, "Concat") else node.inputs[:1] if is_op(node, *CODE_MOVERS) else ()
        return [value for value in given if value is not None and value not in self._ranges]

    def quantizers(self, real: ir.Value) -> list[ir.Node]:
        """The QuantizeLinear nodes that read a float value."""
        return [node for node in real.consumers() if is_quantize(node)]

    def used_once(self, value: ir.Value) -> bool:
        """Whether exactly one node reads a value and nobody outside the graph does."""
        return len(value.uses()) == 1 and not value.is_graph_output()

    def codes_used_once(self, codes: ir.Value) -> ir.Node | None:
        """The one node that reads these codes as real numbers, if it is the only reader of any kind.

        The codes may pass through several DequantizeLinear nodes as long as one of them is read, once.
        """
        if codes.is_graph_output():
            return None
        readers: list[ir.Node] = []
        for node in codes.consumers():
            if not is_dequantize(node) or node.outputs[0].is_graph_output():
                return None
            readers.extend(node.outputs[0].consumers())
        return readers[0] if len(readers) == 1 and len(readers[0].inputs) >= 1 else None

    def _read_quantization(self, codes: ir.Value) -> Quantization | Refusal | None:
        node = codes.producer()
        if node is None:
            return None
        if is_quantize(node):
            return read_quantize(node, half=True)
        if is_law(node):
            return _read_law(node)
        if is_op(node, "Clip") and node.inputs[0] is not None and is_quantize(node.inputs[0].producer()):
            inner = self.quantization(node.inputs[0], half=True)
            bounds = clip_bounds(node)
            if not isinstance(inner, Quantization):
                return inner
            if bounds is None:
                return Refusal("the bounds of the Clip on its codes are computed at run time, or no numbers")
            low, high = (max(-512, min(512, bound)) for bound in bounds)
            return Quantization(
                inner.source,
                codes,
                inner.grid,
                inner.range.clipped(int(low), int(high)),
                (*inner.nodes, node),
                half=inner.half,
                divides=inner.divides,
            )
        return None

    def _read_range(self, codes: ir.Value) -> CodeRange | None:
        quantization = self.quantization(codes, half=True)
        if isinstance(quantization, Quantization):
            return quantization.range
        node = codes.producer()
        if node is not None and is_op(node, *CODE_MOVERS) and node.inputs[0] is not None:
            moved = self.code_range(node.inputs[0])
            if moved is not None and _leaves_range(node):
                return CodeRange.of(moved.dtype)
            if moved is None or not is_op(node, "Pad"):
                return moved
            fill = _pad_value(node)
            return None if fill is None else moved.union(CodeRange(moved.dtype, fill, fill))
        if node is not None and is_op(node, "Concat"):
            parts = [None if part is None else self.code_range(part) for part in node.inputs]
            union = parts[0]
            for part in parts[1:]:
                union = None if union is None or part is None else union.union(part)
            return union
        return CodeRange.of(codes.dtype) if codes.dtype in CODE_TYPES else None


def _read_law(node: ir.Node) -> Quantization | Refusal:
    read = read_law(node)
    source = node.inputs[0]
    assert source is not None
    if isinstance(read, Refusal):
        return read
    law, grid, code_range = read
    return Quantization(source, node.outputs[0], grid, code_range, (node,), law)


def _leaves_range(node: ir.Node) -> bool:
    """Whether a Resize of codes gives others than its input holds: overshoots, or a number for outside."""
    if not is_op(node, "Resize"):
        return False
    outside = get_string(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize"
    return outside or get_string(node, "mode", "nearest") == "cubic"


def _pad_value(node: ir.Node) -> int | None:
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None:
        return 0
    value = scalar(given)
    return None if value is None else int(value)


def _code_type(node: ir.Node, codes: ir.Value) -> ir.DataType | None:
    """The element type of codes: the zero point's, else the one asked for, else uint8; None if unknown."""
    if len(node.inputs) > 2 and node.inputs[2] is not None and node.inputs[2].dtype is not None:
        return node.inputs[2].dtype
    wanted = get_int(node, "output_dtype", 0) if is_quantize(node) else 0
    if wanted:
        return next((dtype for dtype in ir.DataType if dtype == wanted), None)
    return codes.dtype or ir.DataType.UINT8


def _first_bad(scale: Array) -> float:
    return float(scale[~(np.isfinite(scale) & (scale > 0))].reshape(-1)[0])
