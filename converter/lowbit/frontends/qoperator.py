"""QOperator models: ONNX Runtime's operator form, ``QLinearConv`` and its kin.

Such an operator takes codes with their scales and zero points as inputs and gives codes. Written out it is
DequantizeLinear -> the float operator -> QuantizeLinear, the normal form, and that is what this frontend
writes. The integer operators of ONNX (``ConvInteger``, ``MatMulInteger``) give an int32 sum, which a Cast
makes a float32; written out, both of their operands have the scale 1.

What an operator means:

- Convolutions and matrix products are the same numbers in both forms: the exact sum, an int32 bias on the
  grid ``x_scale * w_scale`` included, is rounded once.
- The others are what the written-out form says. ONNX Runtime's kernels use formulas of their own for some
  (QLinearAdd, QLinearMul, the pools) and differ from it, and from each other on different machines, by one
  step where the exact result lies at a tie.

An operator that no rule takes (QLinearSoftmax, QLinearWhere) becomes one node again (:func:`restore`) and
stays with ONNX Runtime as the model has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from lowbit.errors import ModelError
from lowbit.graph.attributes import get_float, get_int, get_ints
from lowbit.graph.constants import Array, add_initializer, constant
from lowbit.graph.normal_form import CODE_MOVERS, WRITTEN_OUT, is_dequantize, is_op, rank_of
from lowbit.graph.opsets import quantizer_domain
from lowbit.graph.reasons import REASON, has_to_stay, working_on
from lowbit.graph.shapes import infer_shapes

_MICROSOFT = "com.microsoft"

_ROUNDS = 8
"""How often shapes are inferred; networks need it once, for a mean over channels-last pixels."""


def normalize(model: ir.Model) -> None:
    """Writes out every operator of the form, in place; one that cannot be read stays and says why."""
    for node in model.graph:
        if (node.domain, node.op_type) in _LEFT_ALONE:
            node.meta[REASON] = _LEFT_ALONE[node.domain, node.op_type]
    waiting = [node for node in model.graph if _expander(node) is not None and not has_to_stay(node)]
    if not waiting:
        return
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    taken = {value.name for node in model.graph.all_nodes() for value in node.outputs}
    taken |= {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for _ in range(_ROUNDS):
        waiting = [node for node in waiting if not _expand(model.graph, node, taken)]
        if not waiting:
            return
        infer_shapes(model)  # what they wait for follows from what has been written out by now
    for node in waiting:
        node.meta[REASON] = "the rank or the type of its input is unknown"


def restore(graph: ir.Graph, covered: set[ir.Node], reasons: Mapping[ir.Node, str]) -> bool:
    """Makes written-out operators one node again, unless a region covers them whole.

    Args:
        graph: the graph.
        covered: the nodes of all regions.
        reasons: why nodes are in none.

    Returns:
        Whether anything changed.
    """
    changed = False
    for node in list(graph):
        group = node.meta.get(WRITTEN_OUT)
        if isinstance(group, _Group) and not covered.issuperset(group.work) and group.intact(graph):
            with working_on(node):
                group.restore(graph, next((reasons[n] for n in group.nodes if n in reasons), None))
            changed = True
    return changed


@dataclass
class _Group:
    """The nodes that an operator was written out as.

    Attributes:
        original: the operator; no longer part of the graph.
        inputs: what it read.
        nodes: the nodes in order, their DequantizeLinear nodes first.
        cast: the Cast of an integer operator's int32 sum, which the nodes include.
    """

    original: ir.Node
    inputs: list[ir.Value | None]
    nodes: list[ir.Node] = field(default_factory=list)
    cast: ir.Node | None = None
    _readers: dict[int, tuple[ir.Node, int]] = field(default_factory=dict)

    def add(self, node: ir.Node) -> None:
        """Appends a node and remembers which of the operator's inputs it reads."""
        self.nodes.append(node)
        for index, value in enumerate(node.inputs):
            for position, given in enumerate(self.inputs):
                if value is not None and value is given:
                    self._readers[position] = node, index

    @property
    def work(self) -> list[ir.Node]:
        """All but the DequantizeLinear nodes, which regions read through."""
        return [node for node in self.nodes if not is_dequantize(node)]

    def intact(self, graph: ir.Graph) -> bool:
        """Whether the nodes still are as they were written, so that the operator computes the same."""
        inside = set(self.nodes)
        between = [value for node in self.nodes[:-1] for value in node.outputs]
        return (
            all(node.graph is graph for node in self.nodes)
            and all(
                v.uses() and not v.is_graph_output() and inside.issuperset(v.consumers()) for v in between
            )
            and all(_same_type(self._now(position), given) for position, given in enumerate(self.inputs))
        )

    def restore(self, graph: ir.Graph, reason: str | None) -> None:
        """Puts the operator back, behind its inputs as they are computed now."""
        last = self.nodes[-1].outputs[0]
        result = ir.val(f"{last.name}.sum", ir.DataType.INT32 if self.cast else last.dtype, last.shape)
        inputs = [self._now(position) for position in range(len(self.inputs))]
        written = [_copy(self.original, inputs, result)]
        if reason is not None:
            written[0].meta[REASON] = reason
        if self.cast is not None:
            result = ir.val(None, ir.DataType.FLOAT)
            written.append(_copy(self.cast, written[0].outputs, result))
        graph.insert_before(self.nodes[-1], written)
        _take_place(last, result)
        graph.remove(list(reversed(self.nodes)), safe=True)

    def _now(self, position: int) -> ir.Value | None:
        """What the node that took over an input reads there by now."""
        node, index = self._readers.get(position, (None, 0))
        return self.inputs[position] if node is None else node.inputs[index]


def _same_type(now: ir.Value | None, before: ir.Value | None) -> bool:
    return now is before or (now is not None and before is not None and now.dtype == before.dtype)


def _copy(node: ir.Node, inputs: Sequence[ir.Value | None], output: ir.Value) -> ir.Node:
    copy = ir.Node(node.domain, node.op_type, inputs, node.attributes, outputs=[output], name=node.name)
    copy.meta.update(node.meta)
    return copy


def _take_place(old: ir.Value, new: ir.Value) -> None:
    """Gives a value the name, the readers and all that is known of another."""
    new.name, new.shape, new.doc_string = old.name, old.shape, old.doc_string
    new.type = old.type or new.type
    new.metadata_props.update(old.metadata_props)
    old.replace_all_uses_with(new, replace_graph_outputs=True)


# Writing an operator out ---------------------------------------------------------------------------------


class _WaitsError(Exception):
    """An operator cannot be written out before the rank and the type of its operand are known."""


class _StaysError(Exception):
    """An operator cannot be written out, for the reason given."""


def _expand(graph: ir.Graph, node: ir.Node, taken: set[str | None]) -> bool:
    """Writes one operator out, or notes why not; False if it has to wait for shapes."""
    expander = _expander(node)
    assert expander is not None
    writer = _Writer(graph, node, taken)
    with working_on(node):
        try:
            expander(writer)
        except _WaitsError:
            writer.discard()
            return False
        except _StaysError as error:
            writer.discard()
            node.meta[REASON] = str(error)
            return True
        writer.finish()
        return True


class _Writer:
    """The normal form of one operator in the making.

    Attributes:
        graph: its graph.
        node: the operator.
        group: what has been written.
        dtype: the element type between the quantizers.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node, taken: set[str | None]):
        self.graph, self.node = graph, node
        self.group = _Group(node, list(node.inputs))
        self.dtype = ir.DataType.FLOAT
        self._taken = taken

    def given(self, position: int) -> ir.Value | None:
        """An input, or None where it is left out."""
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def require(self, *positions: int) -> None:
        """Checks that the operator has the inputs that it needs; ONNX Runtime may abort where one is missing.

        Raises:
            ModelError: if one is missing.
        """
        missing = [position for position in positions if self.given(position) is None]
        if missing:
            name = self.node.name or self.node.outputs[0].name
            raise ModelError(f"{self.node.op_type} '{name}' has no input {missing[0]}")

    def attributes(self, *names: str) -> list[ir.Attr]:
        """Those of the operator's attributes that it has."""
        return [self.node.attributes[name] for name in names if name in self.node.attributes]

    def real(self, codes: int, scale: int, zero_point: int, axis: int | None = None) -> ir.Value:
        """The real numbers behind an operand.

        Args:
            codes: position of its codes among the inputs.
            scale: position of its scale.
            zero_point: position of its zero point.
            axis: the axis of the parameters where they are one per channel.
        """
        parameters = [self.given(scale), self.given(zero_point)]
        for value in parameters:
            self._check(value, per_tensor=axis is None)
        return self._dequantize([self.given(codes), *parameters], axis)

    def difference(self, codes: int, zero_point: int, axis: int) -> ir.Value:
        """The codes of an operand less its zero point: real numbers on a grid of scale 1."""
        zero = self.given(zero_point)
        known = constant(zero)
        one = np.ones(() if known is None else known.shape, np.float32)
        return self._dequantize([self.given(codes), self.constant("scale", one), zero], axis)

    def bias(self, codes: ir.Value | None, scale: Array) -> ir.Value | None:
        """An int32 bias on the grid of the accumulator."""
        return None if codes is None else self._dequantize([codes, self.constant("bias_scale", scale)], 0)

    def constant(self, name: str, array: Array) -> ir.Value:
        """A new initializer."""
        return add_initializer(self.graph, self._name(name), array)

    def core(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()
    ) -> ir.Value:
        """The float operator; its name and its entry in the report are the original's."""
        node = self._write("", op_type, inputs, attributes, name=self.node.name)
        node.meta.update(self.node.meta)
        node.meta[WRITTEN_OUT] = self.group
        return node.outputs[0]

    def further(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()
    ) -> ir.Value:
        """One more node before or behind it."""
        return self._write("", op_type, inputs, attributes).outputs[0]

    def channels_first(self, value: ir.Value, rank: int) -> ir.Value:
        """[N, D1.., C] as [N, C, D1..]."""
        perm = [0, rank - 1, *range(1, rank - 1)]
        return self.further("Transpose", [value], [ir.AttrInt64s("perm", perm)])

    def channels_last(self, value: ir.Value, rank: int) -> ir.Value:
        """[N, C, D1..] as [N, D1.., C]."""
        return self.further("Transpose", [value], [ir.AttrInt64s("perm", [0, *range(2, rank), 1])])

    def quantize(self, real: ir.Value, scale: int, zero_point: int) -> None:
        """Rounds the result to the codes that are the operator's output."""
        self._check(self.given(scale), per_tensor=True)
        zero = self.given(zero_point)
        self._check(zero, per_tensor=True)
        if zero is None:
            dtype = np.int8 if _code_type(self.given(0)) == ir.DataType.INT8 else np.uint8
            zero = self.constant("zero_point", np.zeros((), dtype))
            # Said explicitly if the operator comes back: some of ONNX Runtime's abort where it is left out.
            self.group.inputs += [None] * (zero_point + 1 - len(self.group.inputs))
            self.group.inputs[zero_point] = zero
        codes = self._write("", "QuantizeLinear", [real, self.given(scale), zero]).outputs[0]
        codes.type = None if zero.dtype is None else ir.TensorType(zero.dtype)

    def finish(self) -> None:
        """Puts what was written in the place of the operator, and of the Cast behind it."""
        last = self.node if self.group.cast is None else self.group.cast
        self.graph.insert_before(last, self.group.nodes)
        _take_place(last.outputs[0], self.group.nodes[-1].outputs[0])
        self.graph.remove([last] if last is self.node else [last, self.node], safe=True)

    def discard(self) -> None:
        """Takes what was written off the lists of readers of its inputs."""
        for node in self.group.nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)

    @staticmethod
    def _check(parameter: ir.Value | None, *, per_tensor: bool) -> None:
        """Refuses scales and zero points per channel where there is one, and scales of no use.

        With scales near the ends of float32, real numbers overflow or vanish that the integer kernels never
        compute.
        """
        if parameter is not None and parameter.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise _StaysError(f"a scale is {parameter.dtype}; expected float32")
        array = constant(parameter)
        if array is None:
            return
        if per_tensor and array.size != 1:
            raise _StaysError(f"a scale or zero point has the shape {list(array.shape)}; expected a scalar")
        smallest, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max / 512
        if array.dtype == np.float32 and np.any((array > largest) | ((array > 0) & (array < smallest))):
            raise _StaysError(f"a scale of {array.max()} lies too near the ends of float32")

    def _dequantize(self, inputs: Sequence[ir.Value | None], axis: int | None) -> ir.Value:
        while inputs[-1] is None:
            inputs = inputs[:-1]
        attributes = []
        sizes = [None if v is None or v.shape is None else list(v.shape) for v in inputs[1:]]
        if axis is not None and any(size not in ([], [1]) for size in sizes):
            attributes.append(ir.AttrInt64("axis", axis))
        domain = quantizer_domain(self.graph, per_channel=bool(attributes))
        return self._write(domain, "DequantizeLinear", inputs, attributes).outputs[0]

    def _write(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Iterable[ir.Attr] = (),
        name: str | None = None,
    ) -> ir.Node:
        output = ir.val(self._name(op_type), self.dtype)
        node = ir.Node(domain, op_type, inputs, attributes, outputs=[output], name=name or output.name)
        self.group.add(node)
        return node

    def _name(self, wanted: str) -> str:
        base = name = f"{self.node.outputs[0].name}.{wanted}"
        count = 1
        while name in self._taken:
            count += 1
            name = f"{base}.{count}"
        self._taken.add(name)
        return name


def _code_type(codes: ir.Value | None) -> ir.DataType:
    """The element type of codes, which ops that move them hand on."""
    while codes is not None and codes.dtype is None:
        node = codes.producer()
        codes = node.inputs[0] if node and is_op(node, *CODE_MOVERS, "Concat", "Identity") else None
    if codes is None or codes.dtype is None:
        raise _WaitsError
    return codes.dtype


def _rank(value: ir.Value | None) -> int:
    rank = None if value is None else rank_of(value)
    if rank is None:
        raise _WaitsError
    return rank


def _accumulator_scale(writer: _Writer, x: int, w: int) -> Array:
    """``f32(x_scale * w_scale)``, a scalar or [channels]; a Gemm's alpha belongs to x_scale."""
    x_scale, w_scale = constant(writer.given(x)), constant(writer.given(w))
    if x_scale is None or w_scale is None:
        raise _StaysError("its scales are computed at run time; lowbit needs constants")
    if x_scale.dtype != np.float32 or w_scale.dtype != np.float32:
        raise _StaysError(f"its scales are {x_scale.dtype} and {w_scale.dtype}; lowbit computes in float32")
    if x_scale.size != 1 or (w_scale.size != 1 and w_scale.ndim != 1):
        raise _StaysError(
            f"its scales have the shapes {list(x_scale.shape)} and {list(w_scale.shape)}; expected one for "
            "its input and one, or one per channel, for its weights"
        )
    alpha = get_float(writer.node, "alpha", 1.0)
    with np.errstate(all="ignore"):
        x_scale = x_scale.reshape(()) if alpha == 1.0 else np.float32(alpha) * x_scale.reshape(())
        scale = np.asarray(x_scale * w_scale, np.float32)
    if not np.all(np.isfinite(scale)) or np.any(scale <= 0):
        raise _StaysError("the product of its scales must be finite and positive")
    return scale.reshape(()) if scale.size == 1 else scale


# The operators -------------------------------------------------------------------------------------------

_MAX_POOL = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")


def _conv(writer: _Writer) -> None:
    """QLinearConv: x, scale, zero point, w, scale, zero point, y's scale, zero point, bias."""
    writer.require(*range(8))
    bias = writer.given(8)
    scale = np.ones(()) if bias is None else _accumulator_scale(writer, 1, 4)
    last = get_int(writer.node, "channels_last", 0)
    rank = _rank(writer.given(3)) if last else 0
    x, w = writer.real(0, 1, 2), writer.real(3, 4, 5, axis=0)
    bias = writer.bias(bias, scale)
    x = writer.channels_first(x, rank) if last else x
    y = writer.core("Conv", [x, w] if bias is None else [x, w, bias], writer.attributes(*_WINDOW))
    writer.quantize(writer.channels_last(y, rank) if last else y, 6, 7)


def _matmul(writer: _Writer) -> None:
    """QLinearMatMul: a, scale, zero point, b, scale, zero point, y's scale, zero point."""
    writer.require(*range(8))
    y = writer.core("MatMul", [writer.real(0, 1, 2, axis=-2), writer.real(3, 4, 5, axis=-1)])
    writer.quantize(y, 6, 7)


def _gemm(writer: _Writer) -> None:
    """QGemm: A, scale, zero point, B, scale, zero point, int32 C, y's scale (none: a float y), zero point."""
    writer.require(*range(6))
    bias = writer.given(6)
    axis = 0 if get_int(writer.node, "transB", 0) else 1
    if bias is not None:
        scale = _accumulator_scale(writer, 1, 4)
        bias = writer.bias(writer.constant("bias", _row(bias, writer.given(3), axis)), scale)
    operands = [writer.real(0, 1, 2), writer.real(3, 4, 5, axis), *([] if bias is None else [bias])]
    y = writer.core("Gemm", operands, writer.attributes("alpha", "transA", "transB"))
    if writer.given(7) is not None:
        writer.quantize(y, 7, 8)


def _row(bias: ir.Value, weights: ir.Value | None, axis: int) -> Array:
    """A QGemm's C as one integer per output feature, however it broadcasts."""
    array, w = constant(bias), constant(weights)
    if array is None or w is None or array.dtype != np.int32 or w.ndim != 2:
        raise _StaysError("its C and its weights must be constant: int32, and a matrix of codes")
    features = w.shape[axis]
    if array.ndim > 2 or array.shape[:-1] not in ((), (1,)) or array.size not in (1, features):
        raise _StaysError(f"its C has the shape {list(array.shape)}, expected [{features}]")
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (features,)))


def _integer(op_type: str, x_axis: int, w_axis: int) -> _Expander:
    """ConvInteger, MatMulInteger: x, w, zero points; the int32 sum goes through one Cast to float32."""

    def expand(writer: _Writer) -> None:
        writer.require(0, 1)
        total = writer.node.outputs[0]
        readers = total.consumers()
        if total.is_graph_output() or len(readers) != 1 or not is_op(readers[0], "Cast"):
            raise _StaysError("its int32 result is not read by one Cast to float32 alone")
        if get_int(readers[0], "to", 0) != ir.DataType.FLOAT:
            raise _StaysError("its int32 result is cast to another type than float32")
        writer.group.cast = readers[0]
        operands = [writer.difference(0, 2, x_axis), writer.difference(1, 3, w_axis)]
        writer.core(op_type, operands, writer.attributes(*_WINDOW) if op_type == "Conv" else ())

    return expand


def _matmul_to_float(writer: _Writer) -> None:
    """MatMulIntegerToFloat: A, B, their scales, their zero points, a float bias."""
    writer.require(*range(4))
    y = writer.core("MatMul", [writer.real(0, 2, 4, axis=-2), writer.real(1, 3, 5, axis=-1)])
    if writer.given(6) is not None:
        writer.further("Add", [y, writer.given(6)])


def _binary(op_type: str) -> _Expander:
    """QLinearAdd, QLinearMul: A, scale, zero point, B, scale, zero point, C's scale, zero point."""

    def expand(writer: _Writer) -> None:
        writer.require(0, 1, 3, 4, 6)
        writer.quantize(writer.core(op_type, [writer.real(0, 1, 2), writer.real(3, 4, 5)]), 6, 7)

    return expand


def _unary(op_type: str, *attributes: str) -> _Expander:
    """QLinearLeakyRelu, QLinearSigmoid: X, scale, zero point, Y's scale, zero point."""

    def expand(writer: _Writer) -> None:
        writer.require(0, 1, 3)
        writer.quantize(writer.core(op_type, [writer.real(0, 1, 2)], writer.attributes(*attributes)), 3, 4)

    return expand


def _softmax(writer: _Writer) -> None:
    """QLinearSoftmax, whose attribute ``opset`` says which Softmax it is: since 13 it is about one axis.

    The older one flattens all dims from the axis on; on the last axis that is the same.
    """
    writer.require(0, 1, 3, 4)
    own, model = get_int(writer.node, "opset", 13), writer.graph.opset_imports.get("", 1)
    axis = get_int(writer.node, "axis", -1 if own >= 13 else 1)
    if (own >= 13) != (model >= 13) and axis != -1:
        raise _StaysError(f"it is the Softmax of opset {own} on axis {axis}, in a model of opset {model}")
    writer.quantize(writer.core("Softmax", [writer.real(0, 1, 2)], [ir.AttrInt64("axis", axis)]), 3, 4)


def _concat(writer: _Writer) -> None:
    """QLinearConcat: Y's scale, zero point, then tensor, scale, zero point of each operand."""
    count = len(writer.node.inputs)
    writer.require(*range(max(5, count + (2 - count) % 3)))
    operands = [writer.real(i, i + 1, i + 2) for i in range(2, count, 3)]
    writer.quantize(writer.core("Concat", operands, writer.attributes("axis")), 0, 1)


def _average_pool(writer: _Writer) -> None:
    """QLinearAveragePool: X, scale, zero point, Y's scale, zero point."""
    writer.require(0, 1, 3)
    last = get_int(writer.node, "channels_last", 0)
    rank = 2 + len(get_ints(writer.node, "kernel_shape") or ())
    x = writer.real(0, 1, 2)
    x = writer.channels_first(x, rank) if last else x
    y = writer.core("AveragePool", [x], writer.attributes(*_POOL))
    writer.quantize(writer.channels_last(y, rank) if last else y, 3, 4)


def _max_pool(writer: _Writer) -> None:
    """NhwcMaxPool, a MaxPool of codes with the channels last."""
    writer.require(0)
    codes = writer.given(0)
    assert codes is not None
    writer.dtype = _code_type(codes)
    rank = 2 + len(get_ints(writer.node, "kernel_shape") or ())
    pooled = writer.core("MaxPool", [writer.channels_first(codes, rank)], writer.attributes(*_MAX_POOL))
    writer.channels_last(pooled, rank)


def _global_average_pool(writer: _Writer) -> None:
    """QLinearGlobalAveragePool: X, scale, zero point, Y's scale, zero point."""
    writer.require(*range(5))
    if get_int(writer.node, "channels_last", 0):
        axes = list(range(1, _rank(writer.given(0)) - 1))
        y = _mean(writer, writer.real(0, 1, 2), axes, keepdims=1)
    else:
        y = writer.core("GlobalAveragePool", [writer.real(0, 1, 2)])
    writer.quantize(y, 3, 4)


def _reduce_mean(writer: _Writer) -> None:
    """QLinearReduceMean: data, scale, zero point, the result's scale, zero point."""
    writer.require(0, 1, 3)
    axes, keepdims = get_ints(writer.node, "axes"), get_int(writer.node, "keepdims", 1)
    axes = list(range(_rank(writer.given(0)))) if axes is None else axes
    writer.quantize(_mean(writer, writer.real(0, 1, 2), axes, keepdims), 3, 4)


def _mean(writer: _Writer, x: ir.Value, axes: Sequence[int], keepdims: int) -> ir.Value:
    """A ReduceMean; its axes are an input since opset 18."""
    attributes = [ir.AttrInt64("keepdims", keepdims)]
    if writer.graph.opset_imports.get("", 1) < 18:
        return writer.core("ReduceMean", [x], [ir.AttrInt64s("axes", list(axes)), *attributes])
    return writer.core("ReduceMean", [x, writer.constant("axes", np.array(axes, np.int64))], attributes)


def _where(writer: _Writer) -> None:
    """QLinearWhere: condition, X, scale, zero point, Y, scale, zero point, Z's scale, zero point."""
    writer.require(*range(9))
    operands = [writer.given(0), writer.real(1, 2, 3), writer.real(4, 5, 6)]
    writer.quantize(writer.core("Where", operands), 7, 8)


_Expander = Callable[[_Writer], None]

_EXPANDERS: dict[tuple[str, str], _Expander] = {
    ("", "QLinearConv"): _conv,
    ("", "QLinearMatMul"): _matmul,
    ("", "ConvInteger"): _integer("Conv", 1, 0),
    ("", "MatMulInteger"): _integer("MatMul", -2, -1),
    (_MICROSOFT, "QLinearConv"): _conv,
    (_MICROSOFT, "QGemm"): _gemm,
    (_MICROSOFT, "MatMulIntegerToFloat"): _matmul_to_float,
    (_MICROSOFT, "QLinearAdd"): _binary("Add"),
    (_MICROSOFT, "QLinearMul"): _binary("Mul"),
    (_MICROSOFT, "QLinearConcat"): _concat,
    (_MICROSOFT, "NhwcMaxPool"): _max_pool,
    (_MICROSOFT, "QLinearAveragePool"): _average_pool,
    (_MICROSOFT, "QLinearGlobalAveragePool"): _global_average_pool,
    (_MICROSOFT, "QLinearReduceMean"): _reduce_mean,
    (_MICROSOFT, "QLinearLeakyRelu"): _unary("LeakyRelu", "alpha"),
    (_MICROSOFT, "QLinearSigmoid"): _unary("Sigmoid"),
    (_MICROSOFT, "QLinearSoftmax"): _softmax,
    (_MICROSOFT, "QLinearWhere"): _where,
}

_DYNAMIC = "it quantizes by a scale that it computes at run time; lowbit needs static quantization"

_LEFT_ALONE = {
    ("", "DynamicQuantizeLinear"): _DYNAMIC,
    (_MICROSOFT, "DynamicQuantizeMatMul"): _DYNAMIC,
    (_MICROSOFT, "DynamicQuantizeLSTM"): _DYNAMIC,
    (_MICROSOFT, "QAttention"): "attention as one operator is not read",
    (_MICROSOFT, "QEmbedLayerNormalization"): "an embedding as one operator is not read",
}
"""Operators about quantized tensors that no rule could take, and why."""


def _expander(node: ir.Node) -> _Expander | None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return _EXPANDERS.get((domain, node.op_type)) if len(node.outputs) == 1 else None
