"""QONNX models: Brevitas, QKeras, FINN.

Their quantizers turn a float tensor into a float tensor whose values lie on a grid:

- ``Quant`` (``IntQuant``): ``(round(clip(x / scale + zero_point)) - zero_point) * scale``;
- ``BipolarQuant``: ``x >= 0 ? scale : -scale``;
- ``Trunc``: ``x / scale`` cut by a number of low bits;
- ``MultiThreshold``: ``out_scale * #{thresholds that x reaches} + out_bias``.

Here each becomes a quantizer of :mod:`lowbit.graph.quantizers` and a DequantizeLinear; on constants, integer
codes and a DequantizeLinear. What has no codes of at most 8 bits (wider quantizers, zero points between two
codes) is written out in standard ops instead, with the reason, so that ONNX Runtime can run it.

The definitions are those of the qonnx package: custom_op/general/{intquant,bipolar_quant,trunc,
multithreshold}.py. Early exports of Brevitas have the same operators in ONNX's own domain, which has none of
these names; :func:`qualified` moves them into QONNX's.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from lowbit.errors import ModelError
from lowbit.frontends.expressions import fold_expressions
from lowbit.graph.attributes import get_float, get_int, get_string
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.quantization import CODE_TYPES
from lowbit.graph.quantizers import ROUNDINGS, Law, is_law, quantizer
from lowbit.graph.reasons import REASON
from lowbit.graph.shapes import infer_shapes
from lowbit.graph.subgraphs import graphs_of
from lowbit.passes.fold import fold_constants
from lowbit.proto.model_file import nodes_of

DOMAINS = frozenset({"qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general", "finn"})
"""The domains under which the operators are found, ONNX's own apart."""

_DOMAIN = "qonnx.custom_op.general"

Floats = npt.NDArray[np.float32]

_MAX_BITS = 32
_EXPORT = "export the model again from the tool that made it"


def speaks(model: ir.Model | onnx.ModelProto) -> bool:
    """Whether a model holds one of the dialect's quantizers."""
    nodes = nodes_of(model) if isinstance(model, onnx.ModelProto) else model.graph.all_nodes()
    return any(is_quantizer(node) for node in nodes)


def is_quantizer(node: ir.Node | onnx.NodeProto) -> bool:
    """Whether a node is one of the dialect's quantizers."""
    if node.op_type not in _REWRITES:
        return False
    return node.domain in DOMAINS or (node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, ""))


def qualified(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose quantizers of ONNX's own domain stand in QONNX's, where ONNX's checker lets them pass.

    Args:
        proto: a model; it stays as it is.

    Returns:
        The model itself if it has no such quantizer, else a copy.
    """

    def is_early(node: onnx.NodeProto) -> bool:
        return node.domain not in DOMAINS and is_quantizer(node)

    if not any(is_early(node) for node in nodes_of(proto)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in nodes_of(copy):
        if is_early(node):
            node.domain = _DOMAIN
    for function in copy.functions:
        _import(function.opset_import)
    _import(copy.opset_import)
    return copy


def _import(opsets: MutableSequence[onnx.OperatorSetIdProto]) -> None:
    if all(entry.domain != _DOMAIN for entry in opsets):
        opsets.append(onnx.helper.make_opsetid(_DOMAIN, 1))


def normalize(model: ir.Model) -> None:
    """Brings a model into normal form, in place. Its meaning and its interface stay.

    Raises:
        ModelError: if a quantizer's parameters contradict each other or the tensor they quantize, or for an
            operator that neither ONNX Runtime nor lowbit has.
    """
    if not speaks(model):
        return
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    infer_shapes(model, keeps_shape=is_quantizer)
    fold_expressions(model.graph)
    fold_constants(model.graph)
    for node in list(model.graph):
        if is_quantizer(node):
            _rewrite(node)
            continue
        hidden = [inner for graph in graphs_of(node) for inner in graph.all_nodes() if is_quantizer(inner)]
        for inner in hidden:
            _rewrite(inner)
        if hidden:
            node.meta[REASON] = (
                f"its subgraph holds {len(hidden)} quantizers, such as {hidden[0].op_type} "
                f"'{_name(hidden[0])}'; lowbit converts nothing in there, they are written in standard ops"
            )
    infer_shapes(model)


def _rewrite(node: ir.Node) -> None:
    assert isinstance(node.graph, ir.Graph)
    _REWRITES[node.op_type](node, _Maker(node.graph, node))


# Quantizers as plain data ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantizer:
    """What a node does to a tensor: codes by a law, read on a grid that may be another than the law's.

    Attributes:
        law: how a real number becomes a code.
        scale: what a code is worth; broadcasts against the tensor.
        zero_point: likewise, the code of 0.
    """

    law: Law
    scale: Floats
    zero_point: Floats

    def reason_against_codes(self, rank: int | None) -> str | None:
        """Why its codes cannot be written; None if they can."""
        if self.law.high - self.law.low > 255 or self.law.high > 255:
            bits = max(int(self.law.high).bit_length() + (self.law.low < 0), 9)
            return f"it quantizes to {bits} bits; lowbit has 1 to 8"
        dtype = ir.DataType.INT8 if self.law.low < 0 else ir.DataType.UINT8
        low, high = CODE_TYPES[dtype]
        odd = self.zero_point[(self.zero_point != np.rint(self.zero_point))]
        if odd.size:
            return f"its zero point {odd[0]} is no code, so that no integer stands for the real number 0"
        beyond = self.zero_point[(self.zero_point < low) | (self.zero_point > high)]
        if beyond.size:
            return f"its zero point {beyond[0]:.0f} is outside of {low}..{high}"
        axes = _wide_axes(self.scale, self.zero_point)
        if len(axes) > 1:
            shape = list(np.broadcast_shapes(self.scale.shape, self.zero_point.shape))
            return f"its scale has the shape {shape}; expected one scale, or one per channel"
        if axes and rank is None:
            return "it has one scale per channel of a tensor of unknown rank"
        return None


def _wide_axes(*arrays: Array) -> list[int]:
    """The axes, counted from the end, along which arrays that broadcast hold more than one entry."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return [i - len(shape) for i, size in enumerate(shape) if size != 1]


# The operators --------------------------------------------------------------------------------------------


def _quant(node: ir.Node, maker: _Maker) -> None:
    x = _float_input(node)
    scale, zero_point = _scale(node, 1, x), _parameter(node, 2, "zero point", x)
    bits = _bits(node, 3, "bit width")
    signed, narrow = bool(get_int(node, "signed", 1)), bool(get_int(node, "narrow", 0))
    if bits == 1 and signed:
        _sign(maker, x, scale, zero_point)
        return
    low, high = _bounds(bits, signed=signed, narrow=narrow)
    law = Law(_rounding(node, "ROUND"), scale, zero_point, low, high)
    _write(maker, x, _Quantizer(law, scale, zero_point))


def _bipolar_quant(node: ir.Node, maker: _Maker) -> None:
    x = _float_input(node)
    scale = _scale(node, 1, x)
    _sign(maker, x, scale, np.zeros((), np.float32), divided=False)


def _sign(maker: _Maker, x: ir.Value, scale: Floats, zero_point: Floats, *, divided: bool = True) -> None:
    """``(x / scale + zero_point >= 0 ? 1 : -1)`` on the grid; a BipolarQuant looks at x itself."""
    law = Law("Bipolar", scale, zero_point, -1, 1)
    if constant(x) is None and divided and (np.any(scale > 1) or np.any(zero_point)):
        # Dividing by a number up to 1 changes no sign; a larger one may turn the least numbers into -0.
        x = maker.emit("Div", x, maker.number("scale", scale))
        if np.any(zero_point):
            x = maker.emit("Add", x, maker.number("zero_point", zero_point))
    elif divided and constant(x) is not None:
        array = constant(x)
        assert array is not None
        x = ir.val(x.name, const_value=ir.tensor(array / scale + zero_point))
    _write(maker, x, _Quantizer(law, scale, zero_point))


def _trunc(node: ir.Node, maker: _Maker) -> None:
    """``round(x / scale + zero_point)``, divided by a power of two, rounded again by the node's own mode."""
    second = len(node.inputs) > 5
    x = _float_input(node)
    scale, zero_point = _scale(node, 1, x), _parameter(node, 2, "zero point", x)
    in_bits = _bits(node, 3, "input bit width", 64)
    out_bits = _bits(node, 5 if second else 4, "output bit width", 64)
    mode = _rounding(node, "FLOOR")
    v = maker.emit("Div", x, maker.number("scale", scale))
    if np.any(zero_point):
        v = maker.emit("Add", v, maker.number("zero_point", zero_point))
    v = maker.emit("Round", v)
    none = np.zeros((), np.float32)
    if second:
        out_scale = _scale(node, 4, x)
        step = np.exp2(np.round(np.log2(out_scale / scale))).astype(np.float32)
        low, high = _bounds(
            out_bits, signed=bool(get_int(node, "signed", 1)), narrow=bool(get_int(node, "narrow", 0))
        )
        law = Law(mode, step, none, low, high)
        _write(maker, v, _Quantizer(law, out_scale, (zero_point / step).astype(np.float32)))
        return
    step = np.asarray(np.exp2(np.float32(in_bits - out_bits)), np.float32)
    # The first version does not clip: its codes are as wide as what comes in.
    reach = _reach(x)
    law = Law(mode, step, none, -(2**31), 2**31)
    if reach is not None:
        ends = np.stack([np.broadcast_to(np.float32(end), zero_point.shape) for end in reach])
        codes = law.codes(np.rint(ends / scale + zero_point))
        law = replace(law, low=min(0, int(codes.min())), high=max(1, int(codes.max())))
    _write(maker, v, _Quantizer(law, scale, zero_point), bounded=False)


def _multi_threshold(node: ir.Node, maker: _Maker) -> None:
    x = _float_input(node)
    thresholds = _constant_input(node, 1, "thresholds")
    rank, dims = _rank(x), x.shape
    if rank is None or dims is None:
        raise _bad(node, "reads a tensor of unknown rank", "a known one", "add shapes to the model's inputs")
    axis = _channel_axis(node, rank)
    if thresholds.ndim != 2 or thresholds.shape[0] not in (1, dims[axis]) or not thresholds.shape[1]:
        raise _bad(
            node, f"has thresholds of shape {list(thresholds.shape)}",
            f"[{dims[axis]}, n] or [1, n] for an input of shape {_text(dims)}", _EXPORT,
        )  # fmt: skip
    if np.any(np.isnan(thresholds)):
        raise _bad(node, "has a threshold that is no number", "numbers", _EXPORT)
    thresholds = np.sort(thresholds.astype(np.float32), axis=1)  # how many are reached knows no order
    count = thresholds.shape[1]
    shape = [1] * rank
    shape[axis] = thresholds.shape[0]
    slope, shift = np.float32(get_float(node, "out_scale", 1.0)), np.float32(get_float(node, "out_bias", 0.0))
    if not (np.isfinite(slope) and np.isfinite(shift)):
        raise _bad(node, f"gives {slope} * count + {shift}", "finite numbers", _EXPORT)
    real = slope * np.arange(count + 1, dtype=np.float32) + shift
    if count == 1 and real[1] == -real[0] and real[1] > 0 and np.all(np.isfinite(thresholds)):
        # x >= t and x - t >= 0 are the same, since differences of floats do not underflow to 0.
        if np.any(thresholds):
            x = maker.emit("Sub", x, maker.number("threshold", thresholds.reshape(shape)))
        _sign(maker, x, np.asarray(real[1]), np.zeros((), np.float32), divided=False)
        return
    none, one = np.zeros((), np.float32), np.ones((), np.float32)
    law = Law("Count", one, none, 0, count, thresholds.reshape(*shape, count))
    zero_point = np.asarray(np.rint(-shift / slope) if slope > 0 else 0, np.float32)
    codes = np.arange(count + 1, dtype=np.float32)
    if slope > 0 and np.array_equal((codes - zero_point) * slope, real):
        scale = np.asarray(slope)
        _write(maker, x, _Quantizer(replace(law, scale=scale), scale, zero_point))
    else:
        _write_out_count(maker, x, law, slope, shift)


def _float_quant(node: ir.Node, maker: _Maker) -> None:
    raise ModelError(
        f"{node.op_type} '{_name(node)}' rounds to small floating-point numbers, which neither ONNX Runtime "
        "nor lowbit can compute; export the model with integer quantizers (Quant)"
    )


_REWRITES: dict[str, Callable[[ir.Node, _Maker], None]] = {
    "Quant": _quant,
    "IntQuant": _quant,
    "BipolarQuant": _bipolar_quant,
    "Trunc": _trunc,
    "MultiThreshold": _multi_threshold,
    "FloatQuant": _float_quant,
}


# Parameters -----------------------------------------------------------------------------------------------


def _name(node: ir.Node) -> str:
    return node.name or f"of {node.outputs[0].name}"


def _bad(node: ir.Node, found: str, expected: str, todo: str) -> ModelError:
    return ModelError(f"{node.op_type} '{_name(node)}' {found}; expected {expected}; {todo}")


def _text(dims: ir.Shape) -> str:
    return f"[{', '.join(str(d) for d in dims)}]"


def _rank(x: ir.Value) -> int | None:
    return None if x.shape is None else len(x.shape)


def _float_input(node: ir.Node) -> ir.Value:
    x = node.inputs[0] if node.inputs else None
    if x is None or len(node.outputs) != 1:
        raise _bad(node, "has no input", "a tensor to quantize", _EXPORT)
    if x.dtype not in (None, ir.DataType.FLOAT):
        raise _bad(node, f"quantizes a tensor of type {x.dtype}", "float32", "put a Cast in front of it")
    return x


def _constant_input(node: ir.Node, index: int, what: str) -> Array:
    value = node.inputs[index] if len(node.inputs) > index else None
    if value is None:
        raise _bad(node, f"has no {what} (input {index})", "all inputs of its definition", _EXPORT)
    array = constant(value)
    if array is None:
        raise _bad(node, f"computes its {what} at run time", "a constant", "fix it before the export")
    if array.dtype.kind not in "fiu":
        raise _bad(node, f"has a {what} of type {array.dtype}", "float32", _EXPORT)
    return array


def _parameter(node: ir.Node, index: int, what: str, x: ir.Value) -> Floats:
    """A finite constant that broadcasts against the tensor without widening it."""
    array = _constant_input(node, index, what).astype(np.float32)
    if not array.size or not np.all(np.isfinite(array)):
        raise _bad(node, f"has the {what} {_sample(array, ~np.isfinite(array))}", "finite numbers", _EXPORT)
    rank = _rank(x)
    if rank is not None and x.shape is not None:
        padded = (1,) * (rank - array.ndim) + array.shape
        fits = len(padded) == rank and all(
            size == 1 or not isinstance(dim, int) or size == dim
            for size, dim in zip(padded, x.shape, strict=True)
        )
        if not fits and array.size == 1:
            return array.reshape(())
        if not fits:
            raise _bad(
                node, f"has a {what} of shape {list(array.shape)}",
                f"one that broadcasts to its input's shape {_text(x.shape)}", _EXPORT,
            )  # fmt: skip
    return array.reshape(()) if array.size == 1 else array


def _scale(node: ir.Node, index: int, x: ir.Value) -> Floats:
    scale = _parameter(node, index, "scale", x)
    if np.any(scale <= 0):
        raise _bad(node, f"has the scale {_sample(scale, scale <= 0)}", "positive numbers", _EXPORT)
    return scale


def _sample(array: Array, wrong: npt.NDArray[np.bool_]) -> str:
    return str(array[wrong].reshape(-1)[0]) if np.any(wrong) else f"of shape {list(array.shape)}"


def _bits(node: ir.Node, index: int, what: str, most: int = _MAX_BITS) -> int:
    array = _constant_input(node, index, what)
    bits = float(array.reshape(-1)[0]) if array.size == 1 else float("nan")
    if array.size != 1 or not 1 <= bits <= most or bits != int(bits):
        found = f"{bits:g}" if array.size == 1 else f"of shape {list(array.shape)}"
        raise _bad(node, f"has the {what} {found}", f"one whole number from 1 to {most}", _EXPORT)
    return int(bits)


def _bounds(bits: int, *, signed: bool, narrow: bool) -> tuple[int, int]:
    """The codes of a width; narrow drops the lowest signed or the highest unsigned one."""
    if signed:
        return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1
    return 0, 2**bits - 1 - narrow


def _rounding(node: ir.Node, default: str) -> str:
    mode = get_string(node, "rounding_mode", default)
    if mode.upper() not in ROUNDINGS:
        raise _bad(node, f"has the rounding mode '{mode}'", f"one of {', '.join(ROUNDINGS)}", _EXPORT)
    return ROUNDINGS[mode.upper()]


def _channel_axis(node: ir.Node, rank: int) -> int:
    """Where a MultiThreshold has its channels: as its layout says, else as qonnx guesses from the rank."""
    layout = get_string(node, "data_layout", "") or {2: "NC", 3: "NWC", 4: "NCHW"}.get(rank, "NC")
    axis = layout.index("C") if "C" in layout else 1
    if axis >= rank:
        raise _bad(node, f"has the layout {layout} on a tensor of rank {rank}", "one of its rank", _EXPORT)
    return axis


_MOVES = frozenset({
    "MaxPool", "AveragePool", "GlobalAveragePool", "Identity", "Reshape", "Flatten", "Transpose", "Squeeze",
    "Unsqueeze",
})  # fmt: skip


def _reach(x: ir.Value) -> tuple[float, float] | None:
    """Bounds of a float tensor that codes were moved, averaged and scaled into; None if it has none.

    They are a little wide, so that they hold whatever way an average is rounded.
    """
    factor = 1.0
    while True:
        node = x.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            return None
        if node.domain == "" and node.op_type == "DequantizeLinear":
            break
        if node.domain != "" or node.op_type not in (*_MOVES, "Mul"):
            return None
        if node.op_type == "Mul":
            arrays = [constant(value) for value in node.inputs]
            index = 1 if arrays[0] is None else 0
            array = arrays[index]
            if array is None or array.size != 1:
                return None
            factor *= float(array.reshape(()))
            x = node.inputs[1 - index]  # type: ignore[assignment]
        else:
            x = node.inputs[0]
    scale, codes = constant(node.inputs[1]), node.inputs[0].dtype
    given = node.inputs[2] if len(node.inputs) > 2 else None
    zero_point = np.zeros((), np.float32) if given is None else constant(given)
    if scale is None or zero_point is None or codes not in CODE_TYPES:
        return None
    made = node.inputs[0].producer()
    low, high = CODE_TYPES[codes]
    if made is not None and is_law(made) and len(made.inputs) == 5:
        low, high = (int(array) for array in map(constant, made.inputs[3:]) if array is not None)
    ends = (np.array([[low], [high]]) - zero_point.reshape(-1).astype(float)) * scale.reshape(-1) * factor
    return float(ends.min()) * (1 + 1e-5), float(ends.max()) * (1 + 1e-5)


# Writing --------------------------------------------------------------------------------------------------


class _Maker:
    """Writes standard nodes in front of a node that they replace."""

    def __init__(self, graph: ir.Graph, node: ir.Node):
        self.graph = graph
        self.node = node
        self.stem = node.outputs[0].name or "quantizer"
        self._count = 0

    def number(self, what: str, array: Array | np.float32, dtype: type = np.float32) -> ir.Value:
        """A constant operand."""
        return add_initializer(self.graph, f"{self.stem}.{what}", np.asarray(array, dtype))

    def emit(
        self, op_type: str, *inputs: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: int
    ) -> ir.Value:
        """A node on tensors of the shape of the first input."""
        self._count += 1
        output = ir.val(f"{self.stem}.{op_type.lower()}.{self._count}", dtype, inputs[0].shape)
        listed = [ir.AttrInt64(name, value) for name, value in attributes.items()]
        self.add(ir.Node("", op_type, list(inputs), listed, outputs=[output], name=str(output.name)))
        return output

    def add(self, made: ir.Node) -> ir.Value:
        """A node that was made elsewhere; it speaks for the node it replaces."""
        made.meta.update(self.node.meta)
        self.graph.insert_before(self.node, made)
        return made.outputs[0]

    def finish(self, result: ir.Value) -> None:
        """Puts a value in the place of the node's output."""
        old = self.node.outputs[0]
        name, old.name = old.name, f"{old.name}.replaced"
        if old.type is not None:
            result.type = old.type
        if result.shape is None:
            result.shape = old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name = name
        self.graph.remove(self.node, safe=True)


def _write(maker: _Maker, x: ir.Value, wanted: _Quantizer, *, bounded: bool = True) -> None:
    """Replaces a node by codes and a DequantizeLinear, or by standard ops and a reason."""
    array, law = constant(x), wanted.law
    if array is not None:
        _write_constant(maker, array, wanted)
        return
    reason = wanted.reason_against_codes(_rank(x))
    if not bounded and law.high >= 2**31:
        reason = "it does not clip, and nothing bounds its input, so that its codes have no width"
    if reason is not None:
        maker.node.meta[REASON] = reason
        if law.op_type == "Count":
            _write_out_count(maker, x, law, wanted.scale, -wanted.zero_point * wanted.scale)
        else:
            _write_out(maker, x, wanted, bounded)
        return
    made = quantizer(
        maker.graph,
        law.op_type,
        x,
        law.scale,
        law.zero_point,
        low=law.low,
        high=law.high,
        thresholds=law.thresholds,
        name=_name(maker.node),
    )
    _dequantize(maker, maker.add(made), wanted.scale, wanted.zero_point, _rank(x))


def _write_constant(maker: _Maker, array: Array, wanted: _Quantizer) -> None:
    """Integer codes: of the node's own width, or int32 from 9 bits on, there without their zero point."""
    law, graph, node = wanted.law, maker.graph, maker.node
    if np.any(np.isnan(array)):
        raise _bad(node, "quantizes a constant that is not a number", "numbers", _EXPORT)
    if law.op_type == "Bipolar":
        codes = np.where(array >= 0, 1.0, -1.0)
    else:
        codes = _real_codes(law, array.astype(np.float32)).astype(np.float64)
    reason = wanted.reason_against_codes(array.ndim)
    shifted = codes - wanted.zero_point
    wide = len(_wide_axes(wanted.scale, wanted.zero_point)) > 1
    if reason is not None and array.ndim > 1:  # a vector is a bias, which may be wide
        for user in node.outputs[0].consumers():
            user.meta[REASON] = f"the quantizer of its weights: {reason}"
    whole = np.array_equal(shifted, np.rint(shifted)) and np.all(np.abs(shifted) < 2**31)
    if reason is None:
        dtype = np.int8 if law.low < 0 else np.uint8
        value = add_initializer(graph, f"{maker.stem}.codes", codes.astype(dtype))
        _dequantize(maker, value, wanted.scale, wanted.zero_point, array.ndim)
    elif whole and not wide:
        value = add_initializer(graph, f"{maker.stem}.codes", shifted.astype(np.int32))
        _dequantize(maker, value, wanted.scale, None, array.ndim)
    else:
        real = (codes.astype(np.float32) - wanted.zero_point) * wanted.scale
        maker.finish(add_initializer(graph, f"{maker.stem}.real", real.astype(np.float32)))


def _real_codes(law: Law, x: Floats) -> Floats:
    """The codes of a law as float32, which holds those of 32 bits as QONNX computes them."""
    if law.high < 2**24:
        return law.codes(x).astype(np.float32)
    small = replace(
        law, scale=np.ones((), np.float32), zero_point=np.zeros((), np.float32), low=-(2**24), high=2**24
    )
    v = x / law.scale + law.zero_point
    v = np.fmin(np.fmax(v, np.float32(law.low)), np.float32(law.high))
    # From 2^23 on every float32 is whole.
    return np.where(np.abs(v) < 2**23, small.codes(v).astype(np.float32), v)


def _dequantize(
    maker: _Maker, codes: ir.Value, scale: Floats, zero_point: Floats | None, rank: int | None
) -> None:
    """A DequantizeLinear of codes, its parameters one or one per entry of an axis."""
    arrays = [scale] if zero_point is None else [scale, zero_point]
    axes = _wide_axes(*arrays)
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    size = (int(np.prod(shape)),) if axes else ()
    inputs = [codes, maker.number("scale", np.broadcast_to(scale, shape).reshape(size))]
    attributes = {}
    if axes:
        assert rank is not None
        attributes["axis"] = rank + axes[0]
    if zero_point is not None:
        assert codes.dtype is not None
        integer = np.int8 if codes.dtype == ir.DataType.INT8 else np.uint8
        inputs.append(maker.number("zero_point", np.broadcast_to(zero_point, shape).reshape(size), integer))
    output = ir.val(f"{maker.stem}.real", ir.DataType.FLOAT, codes.shape)
    listed = [ir.AttrInt64(name, value) for name, value in attributes.items()]
    made = ir.Node("", "DequantizeLinear", inputs, listed, outputs=[output], name=f"{maker.stem}.dequantize")
    maker.graph.insert_before(maker.node, made)
    maker.finish(output)


_SIMPLE_ROUNDINGS = {"QuantizeRound": "Round", "QuantizeCeil": "Ceil", "QuantizeFloor": "Floor"}


def _write_out(maker: _Maker, x: ir.Value, wanted: _Quantizer, bounded: bool) -> None:
    """A node that rounds, in standard ops."""
    law = wanted.law
    if law.op_type == "Bipolar":
        positive = maker.emit(
            "GreaterOrEqual", x, maker.number("zero", np.float32(0)), dtype=ir.DataType.BOOL
        )
        ones = [maker.number(what, np.float32(v)) for what, v in (("one", 1), ("minus", -1))]
        v = maker.emit("Where", positive, *ones)
    else:
        v = maker.emit("Div", x, maker.number("scale", law.scale))
        if np.any(law.zero_point):
            v = maker.emit("Add", v, maker.number("zero_point", law.zero_point))
        if bounded:
            v = maker.emit("Min", v, maker.number("high", np.float32(law.high)))
            v = maker.emit("Max", v, maker.number("low", np.float32(law.low)))
        v = _write_out_rounding(maker, law.op_type, v)
    if np.any(wanted.zero_point):
        v = maker.emit("Sub", v, maker.number("zero_point", wanted.zero_point))
    maker.finish(maker.emit("Mul", v, maker.number("scale", wanted.scale)))


def _write_out_rounding(maker: _Maker, op_type: str, v: ir.Value) -> ir.Value:
    if op_type in _SIMPLE_ROUNDINGS:
        return maker.emit(_SIMPLE_ROUNDINGS[op_type], v)
    size = maker.emit("Abs", v)
    if op_type == "QuantizeHalfUp":
        size = maker.emit("Add", size, maker.number("half", np.float32(0.5)))
    if op_type == "QuantizeHalfDown":
        size = maker.emit("Sub", size, maker.number("half", np.float32(0.5)))
    size = maker.emit("Ceil" if op_type in ("QuantizeUp", "QuantizeHalfDown") else "Floor", size)
    return maker.emit("Mul", maker.emit("Sign", v), size)


def _write_out_count(
    maker: _Maker, x: ir.Value, law: Law, slope: Array | np.float32, shift: Array | np.float32
) -> None:
    """Counting stays a law if it has few enough codes; what they are worth is computed in float."""
    assert law.thresholds is not None
    one, none = np.ones((), np.float32), np.zeros((), np.float32)
    maker.node.meta[REASON] = (
        f"its values {slope} * count + {shift} are no multiples of one scale"
        if law.high <= 255
        else f"it counts to {law.high}; lowbit's codes end at 255"
    )
    if law.high <= 255:
        made = quantizer(
            maker.graph, "Count", x, one, none, thresholds=law.thresholds, name=_name(maker.node)
        )
        v = maker.emit("Cast", maker.add(made), to=int(ir.DataType.FLOAT))
    else:
        last = maker.number("last", np.array([-1]), np.int64)
        column = maker.emit("Unsqueeze", x, last)
        column.shape = None
        reached = maker.emit(
            "GreaterOrEqual", column, maker.number("thresholds", law.thresholds), dtype=ir.DataType.BOOL
        )
        counts = maker.emit("Cast", reached, to=int(ir.DataType.FLOAT))
        v = maker.emit("ReduceSum", counts, last, keepdims=0)
        v.shape = x.shape
    v = maker.emit("Mul", v, maker.number("out_scale", np.asarray(slope)))
    maker.finish(maker.emit("Add", v, maker.number("out_bias", np.asarray(shift))))
