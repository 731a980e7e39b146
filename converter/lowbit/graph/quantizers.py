"""Quantizers that QuantizeLinear cannot say: the laws by which QONNX turns real numbers into codes.

QONNX clips before it rounds, knows seven rounding modes, bipolar numbers and lists of thresholds, and its
graph means the float32 chain as written. In normal form such a quantizer is one node of the internal domain
:data:`DOMAIN`, from a float tensor to int8 or uint8 codes, followed by a DequantizeLinear:

    Quantize<Mode>(x, scale, zero_point, low, high)   ``mode(clip(x / scale + zero_point, low, high))``
    Bipolar(x, scale, zero_point)                     ``+1 if x >= 0 else -1``
    Count(x, scale, zero_point, thresholds)           how many of its thresholds an element reaches

``scale`` and ``zero_point`` are float32 and broadcast against x, as QONNX has them; they are the grid of the
codes in all three. ``thresholds`` has one more, last, axis than the scale. An attribute ``to`` says the type
of the codes.

Every op here has a body of standard ONNX ops (:func:`definition`), so that a quantizer which no rule takes is
inlined and the model still runs, and so that ONNX Runtime can evaluate it; and it has a definition in numpy
(:meth:`Law.codes`), in which thresholds are searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper

from lowbit.graph.attributes import get_int
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.quantization import CODE_TYPES, CodeRange, Grid
from lowbit.graph.reasons import Refusal

DOMAIN = "ai.lowbit.form"

Floats = npt.NDArray[np.float32]

ROUNDINGS = {
    "ROUND": "QuantizeRound",
    "HALF_EVEN": "QuantizeRound",
    "CEIL": "QuantizeCeil",
    "FLOOR": "QuantizeFloor",
    "UP": "QuantizeUp",
    "DOWN": "QuantizeDown",
    "HALF_UP": "QuantizeHalfUp",
    "HALF_DOWN": "QuantizeHalfDown",
}
"""QONNX's rounding modes and the ops that have them. Half-even; up; down; away from 0; towards 0; to the
nearest, halves away from 0; to the nearest, halves towards 0."""

_HALF = np.float32(0.5)
_NUMPY_ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "QuantizeRound": np.rint,
    "QuantizeCeil": np.ceil,
    "QuantizeFloor": np.floor,
    "QuantizeUp": lambda v: np.sign(v) * np.ceil(np.abs(v)),
    "QuantizeDown": np.trunc,
    "QuantizeHalfUp": lambda v: np.sign(v) * np.floor(np.abs(v) + _HALF),
    "QuantizeHalfDown": lambda v: np.sign(v) * np.ceil(np.abs(v) - _HALF),
}

_OPS = (*_NUMPY_ROUNDINGS, "Bipolar", "Count")


@dataclass(frozen=True)
class Law:
    """How real numbers become codes.

    Attributes:
        op_type: one of the ops of this module.
        scale: float32, broadcasts against the tensor.
        zero_point: float32 integers, likewise.
        low: smallest code.
        high: largest code.
        thresholds: float32, ascending along the last axis, which comes on top of the tensor's; only of Count.
    """

    op_type: str
    scale: Floats
    zero_point: Floats
    low: int
    high: int
    thresholds: Floats | None = None

    @property
    def uniform(self) -> bool:
        """Whether one law serves all channels."""
        rows = 1 if self.thresholds is None else self.thresholds.size // max(1, self.thresholds.shape[-1])
        return self.scale.size == 1 and self.zero_point.size == 1 and rows == 1

    @property
    def linear(self) -> bool:
        """Whether QuantizeLinear and a Clip on its codes say the same.

        ``rint(clip(x / s))`` is ``clip(rint(x / s))``, since the bounds are integers. With a zero point the
        two differ: one adds it before the rounding, the other behind it.
        """
        return self.op_type == "QuantizeRound" and not np.any(self.zero_point)

    def codes(self, x: Floats) -> npt.NDArray[np.int32]:
        """The codes of real numbers; NaN gives the lowest.

        Args:
            x: float32; scale and zero point broadcast against it.
        """
        if self.op_type == "Bipolar":
            return np.where(x >= 0, np.int32(1), np.int32(-1))
        if self.thresholds is not None:
            counts: npt.NDArray[np.int32] = np.sum(x[..., None] >= self.thresholds, axis=-1, dtype=np.int32)
            return counts
        with np.errstate(over="ignore", invalid="ignore"):
            v = x / self.scale + self.zero_point
        v = np.fmin(np.fmax(v, np.float32(self.low)), np.float32(self.high))
        return _NUMPY_ROUNDINGS[self.op_type](v).astype(np.int32)


def is_law(node: ir.Node | None) -> bool:
    """Whether a node is one of this module's quantizers."""
    return node is not None and node.domain == DOMAIN and node.op_type in _OPS


def read_law(node: ir.Node) -> tuple[Law, Grid, CodeRange] | Refusal:
    """What a quantizer of this module says.

    Returns:
        Its law, the grid of its codes and the codes that can occur; a refusal if a scale is not one number
        or one per channel.
    """
    source = node.inputs[0]
    scale, zero_point, *rest = (constant(value) for value in node.inputs[1:])
    assert source is not None
    assert scale is not None
    assert zero_point is not None, "frontends write constant parameters"
    rank = len(source.shape) if source.shape is not None else None
    grid = _grid(scale, zero_point, rank)
    if isinstance(grid, Refusal):
        return grid
    dtype = ir.DataType(get_int(node, "to", 0))
    if node.op_type == "Bipolar":
        return (
            Law(node.op_type, scale, zero_point, -1, 1),
            grid,
            CodeRange(dtype, -1, 1, bipolar=not np.any(zero_point)),
        )
    if node.op_type == "Count":
        (thresholds,) = rest
        assert thresholds is not None
        high = int(thresholds.shape[-1])
        return Law(node.op_type, scale, zero_point, 0, high, thresholds), grid, CodeRange(dtype, 0, high)
    low, high = (int(array) for array in rest if array is not None)
    return Law(node.op_type, scale, zero_point, low, high), grid, CodeRange(dtype, low, high)


def quantizer(
    graph: ir.Graph,
    op_type: str,
    x: ir.Value,
    scale: Array,
    zero_point: Array,
    *,
    low: int = -1,
    high: int = 1,
    thresholds: Array | None = None,
    name: str,
) -> ir.Node:
    """Makes a quantizer, for frontends; it is not yet part of the graph.

    Args:
        graph: gets the parameters as initializers.
        op_type: an op of this module; :data:`ROUNDINGS` names those that round.
        x: the float tensor.
        scale: finite and positive, broadcasts against x.
        zero_point: integers, likewise; inside the type of the codes.
        low: smallest code.
        high: largest code.
        thresholds: of Count.
        name: of the node; its output is called ``<name>.codes``.
    """
    if thresholds is not None:
        low, high = 0, int(thresholds.shape[-1])
    dtype = ir.DataType.INT8 if low < 0 else ir.DataType.UINT8
    assert CODE_TYPES[dtype][0] <= low <= high <= CODE_TYPES[dtype][1]
    parameters: list[tuple[str, Array]] = [("scale", scale), ("zero_point", zero_point)]
    if thresholds is not None:
        parameters.append(("thresholds", thresholds))
    elif op_type != "Bipolar":
        parameters += [("low", np.array(low)), ("high", np.array(high))]
    inputs = [add_initializer(graph, f"{name}.{what}", np.asarray(a, np.float32)) for what, a in parameters]
    output = ir.val(f"{name}.codes", dtype, x.shape)
    return ir.Node(
        DOMAIN, op_type, [x, *inputs], [ir.AttrInt64("to", int(dtype))], outputs=[output], name=name
    )


def add_definitions(model: ir.Model) -> None:
    """Gives a model the bodies of the quantizers that are left in it, so that they can be inlined."""
    for op_type in sorted({node.op_type for node in model.graph.all_nodes() if is_law(node)}):
        function = ir.serde.deserialize_function(definition(op_type, model.graph.opset_imports.get("", 13)))
        model.functions[function.identifier()] = function


def definition(op_type: str, opset: int) -> onnx.FunctionProto:
    """The body of an op in standard ONNX.

    Args:
        op_type: the op.
        opset: version of ai.onnx to write it in, 13 or later.
    """
    nodes: list[onnx.NodeProto] = []

    def emit(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def number(value: float | list[int]) -> str:
        array = np.array(value, np.int64 if isinstance(value, list) else np.float32)
        return emit("Constant", value=onnx.numpy_helper.from_array(array))

    if op_type == "Bipolar":
        inputs = ["x", "scale", "zero_point"]
        codes = emit("Where", emit("GreaterOrEqual", "x", number(0)), number(1), number(-1))
    elif op_type == "Count":
        inputs = ["x", "scale", "zero_point", "thresholds"]
        last = number([-1])
        reached = emit("GreaterOrEqual", emit("Unsqueeze", "x", last), "thresholds")
        counts = emit("Cast", reached, to=onnx.TensorProto.FLOAT)
        codes = emit("ReduceSum", counts, last, keepdims=0)
    else:
        inputs = ["x", "scale", "zero_point", "low", "high"]
        v = emit("Add", emit("Div", "x", "scale"), "zero_point")
        codes = _rounded(op_type, emit("Max", emit("Min", v, "high"), "low"), emit, number)
    cast = helper.make_node("Cast", [codes], ["y"])
    reference = cast.attribute.add()
    reference.name = reference.ref_attr_name = "to"
    reference.type = onnx.AttributeProto.INT
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, op_type, inputs, ["y"], [*nodes, cast], opsets, ["to"])


def _rounded(op_type: str, v: str, emit: Any, number: Any) -> str:
    simple = {"QuantizeRound": "Round", "QuantizeCeil": "Ceil", "QuantizeFloor": "Floor"}
    if op_type in simple:
        return str(emit(simple[op_type], v))
    size = emit("Abs", v)
    if op_type == "QuantizeHalfUp":
        size = emit("Add", size, number(0.5))
    if op_type == "QuantizeHalfDown":
        size = emit("Sub", size, number(0.5))
    up = op_type in ("QuantizeUp", "QuantizeHalfDown")
    return str(emit("Mul", emit("Sign", v), emit("Ceil" if up else "Floor", size)))


def _grid(scale: Array, zero_point: Array, rank: int | None) -> Grid | Refusal:
    """The grid of parameters that broadcast against a tensor."""
    shape = np.broadcast_shapes(scale.shape, zero_point.shape)
    wide = [i for i, size in enumerate(shape) if size != 1]
    if not wide:
        return Grid(scale.reshape(()), zero_point.reshape(()).astype(np.int32))
    if len(wide) > 1:
        return Refusal(f"its scale has the shape {list(shape)}; expected one scale, or one per channel")
    if rank is None:
        return Refusal("it has one scale per channel of a tensor of unknown rank")
    count = shape[wide[0]]
    return Grid(
        np.ascontiguousarray(np.broadcast_to(scale, shape).reshape(count)),
        np.ascontiguousarray(np.broadcast_to(zero_point, shape).reshape(count).astype(np.int32)),
        wide[0] + rank - len(shape),
    )
