"""What all targets of an export share: the walk over the graph, layouts, names, and every op's float chain.

A lowbit model keeps images channels last; the targets keep them channels first, as ONNX does. The walk never
moves axes by itself: for every value of the lowbit model it remembers the exported tensor that *carries* it
and in which order of axes (:class:`Held`). Convolutions and pools ask for channels first and give channels
first, elementwise ops take what they find, a Transpose of the lowbit model is another reading of the same
tensor. A Transpose is written only where somebody insists on an order that the tensor does not have.

How codes are carried is the target's business: as codes (QDQ), or as float32 integers (QONNX). A target
implements the abstract methods; each op of ``ai.lowbit`` is one method here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lowbit.errors import UnsupportedError
from lowbit.exporters.nodes import Codes, Node, Weights
from lowbit.exporters.writer import Writer, captured
from lowbit.graph.normal_form import ELEMENTWISE
from lowbit.lowering.stored import Order, channels_last, identity
from lowbit.ops import DOMAIN, register_schemas
from lowbit.ops.codes import Array
from lowbit.proto.provenance import KEY

MOVERS = frozenset({
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad", "Gather", "Concat",
    "DepthToSpace", "SpaceToDepth", "Identity", "MaxPool", "Resize", "Expand", "Tile",
    "ReduceMax", "ReduceMin",
})  # fmt: skip
"""Standard ops that give elements of their inputs, so that they may run on whatever carries codes."""


_HALF_PIXEL_SYMMETRIC = 19
"""The first opset whose Resize has coordinates of that name."""


def channels_first(rank: int) -> Order:
    """The order in which a channels-last tensor [N, D1.., C] is carried as [N, C, D1..]."""
    return identity(rank) if rank < 3 else (0, rank - 1, *range(1, rank - 1))


@dataclass(frozen=True)
class Held:
    """The exported tensor that carries a value of the lowbit model.

    Attributes:
        name: the tensor.
        order: its axis k is the value's axis ``order[k]``.
    """

    name: str
    order: Order


class Exporter(Writer, ABC):
    """One export. Subclasses say how codes are carried."""

    target: ClassVar[str]
    other: ClassVar[str]  # the target that says some of what this one cannot

    def __init__(self, model: onnx.ModelProto, places: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes a lowbit model apart.

        Args:
            model: it stays as it is.
            places: the values of its provenance record.
        """
        register_schemas()
        self.model = model
        self.places = places
        self.opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        self.constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for proto in model.graph.node:
            if proto.op_type == "Constant" and proto.attribute and proto.attribute[0].name == "value":
                self.constants[proto.output[0]] = numpy_helper.to_array(proto.attribute[0].t)
        self._held: dict[str, Held] = {}
        self._views: dict[tuple[str, Order], str] = {}
        self._types, self._shapes = _types_and_shapes(model)
        # A value may give its name to the tensor that carries it, unless somebody expects it as it is.
        graph = model.graph
        fixed = {value.name for value in (*graph.input, *graph.output)}
        fixed |= {name for node in graph.node for name in captured(node)}
        self._own_names = {name for node in graph.node for name in node.output} - fixed
        super().__init__(fixed | self._own_names | set(self.constants), {node.name for node in graph.node})

    # ---- the walk

    def export(self) -> onnx.ModelProto:
        """The exported model, without metadata.

        Raises:
            UnsupportedError: if the target cannot say some node; all of them are named.
        """
        lowbit_nodes = [Node.read(n, self.constants) for n in self.model.graph.node if n.domain == DOMAIN]
        pictures = [node.name for node in lowbit_nodes if node.op_type == "LowBitImage"]
        if pictures:
            raise UnsupportedError(
                f"LowBitImage '{pictures[0]}': no standard operator resizes pictures to the same bits; "
                "export the model as it is converted without --preprocess"
            )
        refused = [(node, reason) for node in lowbit_nodes if (reason := self.refusal(node)) is not None]
        if refused:
            told = "; ".join(f"{node.op_type} '{node.name}': {reason}" for node, reason in refused[:10])
            more = f" and {len(refused) - 10} more" if len(refused) > 10 else ""
            raise UnsupportedError(
                f"{self.target} cannot say {len(refused)} of {len(lowbit_nodes)} nodes exactly, export with "
                f"--to {self.other}: {told}{more}"
            )
        self.prepare(lowbit_nodes)
        for value in self.model.graph.input:
            if value.name not in self.constants:
                self._hold_as_is(value.name)
        for proto in self.model.graph.node:
            self.current = proto.name or proto.output[0]
            if proto.domain == DOMAIN:
                self._OPS[proto.op_type](self, Node.read(proto, self.constants))
            elif proto.output[0] not in self.constants:
                self.standard(proto)
        self.current = ""
        self._name_outputs()
        return self._assemble()

    def refusal(self, node: Node) -> str | None:
        """Why the target cannot say a node; None if it can."""
        return None

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Looks at the whole model before the walk."""

    # ---- reading

    def is_codes(self, value: str) -> bool:
        """Whether a value of the lowbit model is a tensor of codes."""
        return self._types.get(value) in (TensorProto.UINT8, TensorProto.INT8)

    def is_signed(self, value: str) -> bool:
        """Whether a tensor of codes is int8."""
        return self._types.get(value) == TensorProto.INT8

    def rank(self, value: str) -> int:
        """The rank of a value of the lowbit model."""
        if value in self.constants:
            return int(self.constants[value].ndim)
        if value in self._held:
            return len(self._held[value].order)
        shape = self._shapes.get(value)
        if shape is None:
            raise UnsupportedError(f"the rank of '{value}' is unknown; give the model's inputs shapes")
        return len(shape)

    def dims(self, value: str) -> list[int | None]:
        """The static dims of a value of the lowbit model."""
        return self._shapes.get(value) or [None] * self.rank(value)

    def order_of(self, value: str) -> Order:
        """The order in which a value is carried."""
        return identity(self.rank(value)) if value in self.constants else self._held[value].order

    def carried(self, value: str, order: Order) -> str:
        """The tensor that carries a value, in a given order of axes, transposed if need be."""
        if value in self.constants:
            return self._carried_constant(value, order)
        held = self._held[value]
        if held.order == order:
            return held.name
        key = (held.name, tuple(held.order.index(axis) for axis in order))
        if key not in self._views:
            self._views[key] = self.node("Transpose", [held.name], perm=list(key[1]))
        return self._views[key]

    def original(self, value: str) -> str:
        """A value exactly as the lowbit model has it: type, codes, order of axes."""
        if value in self.constants:
            return self.constant(self.constants[value])
        return self.carried(value, identity(self.rank(value)))

    def channelwise(self, array: Array, order: Order, axis: int = -1) -> Array:
        """One number for each entry of an axis, [C], shaped to broadcast in an order; scalars stay."""
        if array.size == 1:
            return array.reshape(())
        shape = [1] * len(order)
        shape[order.index(axis % len(order))] = array.size
        return array.reshape(shape)

    # ---- writing

    def define(self, value: str, tensor: str, order: Order) -> None:
        """Says which tensor carries a value from here on."""
        self._held[value] = Held(tensor, order)

    def name_for(self, value: str) -> str:
        """A name for the tensor that carries a value: its name in the original model where that is known."""
        source = str(self.places.get(value, {}).get("source", ""))
        if source and source not in self._used:
            self._used.add(source)
            return source
        if value in self._own_names:
            self._own_names.discard(value)
            return value
        return self.fresh(value)

    # ---- what a target says

    @abstractmethod
    def carry_constant(self, value: str, array: Array) -> str:
        """An initializer that carries constant codes."""

    @abstractmethod
    def dequantize(
        self, value: str, encoding: str, scale: Array, zero_point: Array, order: Order, axis: int = -1
    ) -> str:
        """The real numbers ``f32(q - zero_point) * scale`` of a value's codes."""

    @abstractmethod
    def quantize(self, real: str, codes: Codes, value: str, order: Order) -> None:
        """Rounds a float tensor: ``clip(rint(real / scale) + zero_point, low, high)`` becomes the value."""

    @abstractmethod
    def product_real(self, node: Node) -> tuple[str, Order]:
        """``f32(acc) * f32(x_scale * w_scale[c])`` of a product."""

    @abstractmethod
    def product_codes(self, node: Node, codes: Codes, value: str) -> None:
        """``clip(rint(f32(acc) * m[c]) + zero_point, low, high)``, ``m = f32(f32(sx * sw) / sy)``."""

    @abstractmethod
    def fed_operand(self, node: Node, side: str, order: Order) -> str:
        """Operand ``a`` or ``b`` of a LowBitMatMul, so that :meth:`fed_scale` brings the sum to its scale."""

    @abstractmethod
    def fed_scale(self, node: Node, real: str, codes: Codes | None) -> None:
        """The end of a LowBitMatMul: codes as in :meth:`product_codes`, or the float32 number itself."""

    @abstractmethod
    def thresholds(self, node: Node) -> None:
        """A product that counts thresholds."""

    @abstractmethod
    def threshold(self, node: Node) -> None:
        """LowBitThreshold."""

    @abstractmethod
    def lookup(self, node: Node) -> None:
        """LowBitLookup."""

    @abstractmethod
    def requantize(self, node: Node) -> None:
        """LowBitRequantize."""

    @abstractmethod
    def concat(self, node: Node) -> None:
        """LowBitConcat."""

    @abstractmethod
    def global_average_pool(self, node: Node) -> None:
        """LowBitGlobalAveragePool."""

    @abstractmethod
    def moved(self, source: str, value: str) -> None:
        """A value now holds elements of another one, or copies of them, in whatever way that is carried."""

    @abstractmethod
    def standard_quantizer(self, proto: onnx.NodeProto) -> bool:
        """Says a QuantizeLinear or DequantizeLinear of the lowbit model; False to copy it."""

    # ---- products

    def product(self, node: Node) -> None:
        """LowBitConv, LowBitConvTranspose, LowBitGemm and their other names."""
        kind = node.attributes["epilogue"]
        if kind == "thresholds":
            self.thresholds(node)
        elif kind == "float":
            self.define(node.output, *self.product_real(node))
        elif kind == "requantize" and "residual" not in node.inputs:
            self.product_codes(node, Codes.of(node), node.output)
        elif kind == "requantize":
            inner, inside = f"{node.output}/inner", Codes.inner(node)
            self.product_codes(node, inside, inner)
            order = self.order_of(inner)
            left = self.dequantize(inner, inside.encoding, inside.scale, inside.zero_point, order)
            real = self.node("Add", [left, self._residual(node, order)])
            self.quantize(real, Codes.of(node), node.output, order)
        else:
            self._tail(node)

    def _tail(self, node: Node) -> None:
        """The steps of a `tail` epilogue, as nodes in their order."""
        real, order = self.product_real(node)
        steps = [step for step in node.attributes["tail"].split(",") if step]
        for step in self.tail_steps(node, steps):
            if step == "bias":
                real = self._per_channel("Add", real, node.need("tail_bias"), order)
            elif step == "scale":
                real = self._per_channel("Mul", real, node.need("tail_scale"), order)
            elif step == "shift":
                real = self._per_channel("Add", real, node.need("tail_shift"), order)
            elif step == "residual":
                real = self.node("Add", [real, self._residual(node, order)])
            elif step == "relu":
                real = self.node("Relu", [real])
            elif step == "clip":
                bounds = (np.float32(node.attributes[name]) for name in ("clip_min", "clip_max"))
                real = self.node("Clip", [real, *map(self.constant, bounds)])
            elif step == "silu":
                real = self.node("Mul", [real, self.node("Sigmoid", [real])])
            elif step == "hardswish":
                gate = self.node("HardSigmoid", [real], alpha=1 / 6, beta=0.5)
                real = self.node("Mul", [real, gate])
            elif step == "nothing":
                real = self._per_channel("Mul", real, np.ones((), np.float32), order)
        if "y_scale" in node.inputs:
            self.quantize(real, Codes.of(node), node.output, order)
        else:
            self.define(node.output, real, order)

    def tail_steps(self, node: Node, steps: Sequence[str]) -> list[str]:
        """The steps as single operations; an affine step whose shift is zero everywhere has only one.

        Adding zero would only turn -0.0 into 0.0, which equal each other.
        """
        told: list[str] = []
        for step in steps:
            if step != "affine":
                told.append(step)
            else:
                told += ["scale", "shift"] if np.any(node.need("tail_shift")) else ["scale"]
        return told

    def _per_channel(self, op_type: str, real: str, array: Array, order: Order) -> str:
        return self.node(op_type, [real, self.constant(self.channelwise(array, order))])

    def _residual(self, node: Node, order: Order) -> str:
        return self.dequantize(
            node.inputs["residual"],
            node.attributes["residual_encoding"],
            node.need("residual_scale"),
            node.zero_point("residual_zero_point"),
            order,
        )

    def window(self, node: Node) -> dict[str, Any]:
        """The attributes of a convolution or pool that ONNX has too."""
        names = ("strides", "pads", "dilations", "group", "output_padding", "ceil_mode", "count_include_pad")
        defaults = {"group": 1, "ceil_mode": 0, "count_include_pad": 0}
        found = {name: node.attributes.get(name) for name in names}
        told = {
            name: list(value) if isinstance(value, (list, tuple)) else value for name, value in found.items()
        }
        return {
            "kernel_shape": list(node.attributes["kernel_shape"]),
            **{name: value for name, value in told.items() if value and value != defaults.get(name)},
        }

    def flat_operand(self, node: Node) -> tuple[str, int, Order | None]:
        """The operand of a matrix product, before the dims from ``axis`` on are flattened.

        Returns:
            The value, the axis, and the order in which it is best flattened: one that the tensor has
            already, if all dims are known, so that the weights' columns can follow it.
        """
        value = node.inputs["x"]
        rank = self.rank(value)
        axis = node.attributes["axis"] % rank
        order = self.order_of(value)
        dims = self.dims(value)
        if order[:axis] == identity(rank)[:axis] and None not in dims[axis:]:
            return value, axis, order
        return value, axis, None

    def matrix(self, node: Node) -> tuple[Order, Array]:
        """The order in which a matrix product's operand is flattened, and which column goes where."""
        value, axis, order = self.flat_operand(node)
        columns = np.arange(node.attributes["in_features"])
        if order is None:
            return identity(self.rank(value)), columns
        sizes = [int(dim or 0) for dim in self.dims(value)[axis:]]
        if int(np.prod(sizes)) != columns.size:
            return identity(self.rank(value)), columns
        return order, columns.reshape(sizes).transpose([axis_ - axis for axis_ in order[axis:]]).reshape(-1)

    def flattened(self, node: Node, tensor: str) -> str:
        """The tensor of a matrix product's operand with the dims from ``axis`` on flattened."""
        rank = self.rank(node.inputs["x"])
        axis = node.attributes["axis"] % rank
        if axis == rank - 1:
            return tensor
        if axis == 1:
            return self.node("Flatten", [tensor], axis=1)
        shape = np.array([*(0 for _ in range(axis)), node.attributes["in_features"]], np.int64)
        return self.node("Reshape", [tensor, self.constant(shape)])

    def multiply(self, node: Node, x: str, w: str, bias: str | None) -> tuple[str, Order]:
        """The convolution or matrix product itself.

        Args:
            node: the lowbit node.
            x: float operand, in the order that :meth:`product_operand` says, flattened.
            w: float weights in ONNX's layout, for a matrix product [out, in].
            bias: float [out].
        """
        operands = [x, w, *([bias] if bias else [])]
        if "Gemm" not in node.op_type:
            op_type = "ConvTranspose" if node.op_type == "LowBitConvTranspose" else "Conv"
            rank = 2 + len(node.attributes["kernel_shape"])
            return self.node(op_type, operands, main=True, **self.window(node)), channels_first(rank)
        rank = node.attributes["axis"] % self.rank(node.inputs["x"]) + 1
        if rank == 2:
            return self.node("Gemm", operands, main=True, transB=1), identity(2)
        product = self.node("MatMul", [x, w], main=True)
        return (self.node("Add", [product, bias]) if bias else product), identity(rank)

    def is_gemm(self, node: Node) -> bool:
        """Whether a matrix product is one of two matrices, with the weights as rows."""
        return bool(node.attributes["axis"] % self.rank(node.inputs["x"]) == 1)

    def arranged(self, node: Node, array: Array) -> Array:
        """Weights, or their zero points at full size, in the layout of the ONNX op.

        Args:
            node: the lowbit node.
            array: [out, kernel..., in / group].
        """
        if "Gemm" in node.op_type:
            rows = array[:, self.matrix(node)[1]]
            return np.ascontiguousarray(rows if self.is_gemm(node) else rows.T)
        if node.op_type == "LowBitConvTranspose":
            return Weights.for_conv_transpose(array, node.attributes["group"])
        return Weights.for_conv(array)

    # ---- elementwise ops

    def affine(self, node: Node) -> None:
        """LowBitAffine."""
        order = self.order_of(node.inputs["x"])
        real = self._real_x(node, order)
        real = self._per_channel("Mul", real, node.need("scale"), order)
        real = self._per_channel("Add", real, node.need("shift"), order)
        self._end(node, real, order)

    def binary(self, node: Node) -> None:
        """LowBitAdd and LowBitMul."""
        ranks = [self.rank(node.inputs[side]) for side in "ab"]
        rank = max(ranks)
        varying = [node.inputs[side] for side in "ab" if node.inputs[side] not in self.constants]
        same = all(self.rank(value) == rank for value in varying)
        order = self.order_of(varying[0]) if varying and same else identity(rank)
        reals = []
        for side in "ab":
            value = node.inputs[side]
            own = order if value in self.constants or same else identity(self.rank(value))
            scale, zero_point = node.need(f"{side}_scale"), node.need(f"{side}_zero_point")
            tabled = side == "b" and "b_table" in node.inputs
            if tabled:
                scale, zero_point = np.ones((), np.float32), np.zeros((), np.int32)
            real = self.dequantize(value, node.attributes[f"{side}_encoding"], scale, zero_point, own)
            if tabled:
                # A negative index counts from the end of the table, as a negative code's byte does.
                index = self.node("Cast", [real], to=TensorProto.INT32)
                real = self.node("Gather", [self.constant(node.need("b_table")), index])
            reals.append(real)
        real = self.node("Add" if node.op_type == "LowBitAdd" else "Mul", reals, main=True)
        self._end(node, real, order)

    def fed_product(self, node: Node) -> None:
        """LowBitMatMul."""
        operands = []
        for side in "ab":
            permutation = node.attributes[f"{side}_perm"]
            order = tuple(permutation) or identity(self.rank(node.inputs[side]))
            operands.append(self.fed_operand(node, side, order))
        real = self.node("MatMul", operands, main=True)
        self.fed_scale(node, real, Codes.of(node) if "y_scale" in node.inputs else None)

    def fed_rank(self, node: Node) -> int:
        """The rank of a LowBitMatMul's output."""
        return max(self.rank(node.inputs[side]) for side in "ab")

    def quantize_node(self, node: Node) -> None:
        """LowBitQuantize."""
        tensor, order = self.entrance(node)
        self.quantize(tensor, Codes.of(node), node.output, order)

    def entrance(self, node: Node) -> tuple[str, Order]:
        """The float tensor of a node that makes codes, and in which order it has the axes of the output."""
        held = self.order_of(node.inputs["x"])
        tensor = self.carried(node.inputs["x"], held)
        if not node.attributes["to_channels_last"]:
            return tensor, held
        last = channels_last(len(held))  # the output's axis k is the input's axis last[k]
        return tensor, tuple(last.index(axis) for axis in held)

    def dequantize_node(self, node: Node) -> None:
        """LowBitDequantize."""
        value = node.inputs["x"]
        order = self.order_of(value)
        real = self._real_x(node, order)
        if node.attributes["to_channels_first"]:
            # The output's axis k is the input's axis first[k].
            first = channels_first(len(order))
            order = tuple(first.index(axis) for axis in order)
        self.define(node.output, real, order)

    def max_pool(self, node: Node) -> None:
        """LowBitMaxPool."""
        order = channels_first(2 + len(node.attributes["kernel_shape"]))
        x = self.carried(node.inputs["x"], order)
        y = self.node("MaxPool", [x], main=True, output=self.name_for(node.output), **self.window(node))
        self.define(node.output, y, order)
        self.moved(node.inputs["x"], node.output)

    def average_pool(self, node: Node) -> None:
        """LowBitAveragePool."""
        order = channels_first(2 + len(node.attributes["kernel_shape"]))
        real = self.node("AveragePool", [self._real_x(node, order)], main=True, **self.window(node))
        self._end(node, real, order)

    def resize(self, node: Node) -> None:
        """LowBitResize."""
        value = node.inputs["x"]
        rank = self.rank(value)
        order = channels_first(rank)
        attributes = node.attributes
        copies = attributes["mode"] == "nearest"
        x = self.carried(value, order) if copies else self._real_x(node, order)
        scales, sizes = node.attributes["scales"], node.attributes["sizes"]
        if len(scales):
            inputs = [x, "", self.constant(np.array([1, 1, *scales], np.float32))]
        else:
            lead = self.dims(value)
            if lead[0] is not None and lead[-1] is not None:
                whole = self.constant(np.array([lead[0], lead[-1], *sizes], np.int64))
            else:
                shape = self.node("Shape", [x])
                ends = [self.constant(np.array([i], np.int64)) for i in (0, 2)]
                front = self.node("Slice", [shape, *ends])
                whole = self.node("Concat", [front, self.constant(np.array(sizes, np.int64))], axis=0)
            inputs = [x, "", "", whole]
        told = {"nearest": ("nearest_mode",), "cubic": ("cubic_coeff_a", "exclude_outside")}
        names = ("mode", "coordinate_transformation_mode", *told.get(attributes["mode"], ()))
        if attributes["coordinate_transformation_mode"] == "half_pixel_symmetric":
            self.opset = max(self.opset, _HALF_PIXEL_SYMMETRIC)
        y = self.node(
            "Resize",
            inputs,
            main=True,
            output=self.name_for(node.output) if copies else None,
            **{name: attributes[name] for name in names},
        )
        if not copies:
            self.quantize(y, Codes.of(node), node.output, order)
            return
        self.define(node.output, y, order)
        self.moved(value, node.output)

    def softmax(self, node: Node) -> None:
        """LowBitSoftmax."""
        order = self.order_of(node.inputs["x"])
        axis = order.index(node.attributes["axis"] % len(order))
        real = self.node("Softmax", [self._real_x(node, order)], main=True, axis=axis)
        self.quantize(real, Codes.of(node), node.output, order)

    def normalization(self, node: Node) -> None:
        """LowBitNormalization, as the float operators that it was made from; they sum floats, not codes."""
        value, groups = node.inputs["x"], int(node.attributes["groups"])
        rank, epsilon = self.rank(value), node.attributes["epsilon"]
        axis = node.attributes["axis"] % rank
        gamma, beta = node.need("gamma").reshape(-1), node.need("beta").reshape(-1)
        if groups == 1:
            order = identity(rank)
            real = self._real_x(node, order)
            if max(gamma.size, beta.size) > 1:
                sizes = self.dims(value)[axis:]
                gamma, beta = (_over(array, sizes) for array in (gamma, beta))
            self._end(node, self._layer_norm(real, axis - rank, gamma, beta, epsilon), order)
            return
        order = (*range(axis), rank - 1, *range(axis, rank - 1))
        sizes = self.dims(value)
        channels = sizes[-1] or max(gamma.size, groups)
        real = self._real_x(node, order)
        gamma, beta = (np.broadcast_to(array, (channels,)).copy() for array in (gamma, beta))
        if groups == channels and axis == 1 and rank > 2:
            factors = [self.constant(gamma), self.constant(beta)]
            real = self.node("InstanceNormalization", [real, *factors], main=True, epsilon=epsilon)
        else:  # what GroupNormalization is before opset 21, whose factors are per channel
            if axis != 1 and None in sizes:
                raise UnsupportedError(f"{node.op_type} '{node.name}': groups of a tensor of unknown sizes")
            lead = 0 if axis == 1 else math.prod(size or 0 for size in sizes[:axis])
            shape = self.node("Shape", [real])
            parts = self.node("Reshape", [real, self.constant(np.array([lead, groups, -1], np.int64))])
            ones, zeros = (self.constant(np.full(groups, v, np.float32)) for v in (1, 0))
            parts = self.node("InstanceNormalization", [parts, ones, zeros], main=True, epsilon=epsilon)
            real = self.node("Reshape", [parts, shape])
            real = self.scaled(real, self.channelwise(gamma, order))
            real = self.shifted(real, self.channelwise(beta, order))
        self._end(node, real, order)

    def _layer_norm(self, real: str, axis: int, gamma: Array, beta: Array, epsilon: float) -> str:
        """LayerNormalization over the axes from one on, written out before opset 17."""
        if self.opset >= 17:
            factors = [self.constant(np.atleast_1d(array)) for array in (gamma, beta)]
            return self.node("LayerNormalization", [real, *factors], main=True, axis=axis, epsilon=epsilon)
        axes = list(range(axis, 0))
        centred = self.node("Sub", [real, self.node("ReduceMean", [real], axes=axes, keepdims=1)])
        variance = self.node("ReduceMean", [self.node("Mul", [centred, centred])], axes=axes, keepdims=1)
        deviation = self.node("Sqrt", [self.shifted(variance, np.float32(epsilon))])
        normal = self.node("Div", [centred, deviation], main=True)
        return self.shifted(self.scaled(normal, gamma), beta)

    def depth_to_space(self, node: Node) -> None:
        """LowBitDepthToSpace."""
        value = node.inputs["x"]
        order = channels_first(self.rank(value))
        y = self.node(
            "DepthToSpace",
            [self.carried(value, order)],
            main=True,
            output=self.name_for(node.output),
            blocksize=node.attributes["blocksize"],
            mode=node.attributes["mode"],
        )
        self.define(node.output, y, order)
        self.moved(value, node.output)

    def _real_x(self, node: Node, order: Order) -> str:
        encoding = node.attributes["x_encoding"]
        return self.dequantize(
            node.inputs["x"], encoding, node.need("x_scale"), node.need("x_zero_point"), order
        )

    def _end(self, node: Node, real: str, order: Order) -> None:
        """The end of an elementwise op: a quantizer, or the float32 number itself."""
        if "y_scale" in node.inputs:
            self.quantize(real, Codes.of(node), node.output, order)
        else:
            self.define(node.output, real, order)

    # ---- nodes of ONNX's own

    def standard(self, proto: onnx.NodeProto) -> None:
        """A node that the lowbit model leaves to ONNX Runtime."""
        own = proto.domain in ("", "ai.onnx")
        varying = [name for name in proto.input if name and name not in self.constants]
        moves = own and proto.op_type in MOVERS and bool(varying) and self.is_codes(varying[0])
        quantizes = proto.op_type in ("QuantizeLinear", "DequantizeLinear")
        if own and proto.op_type == "Transpose" and varying:
            self._view(proto)
        elif own and proto.op_type in ELEMENTWISE and self._is_unary(proto, varying):
            self._copy_elementwise(proto, varying[0])
        elif not (moves and self.move(proto)) and not (quantizes and self.standard_quantizer(proto)):
            self._copy(proto)

    def _is_unary(self, proto: onnx.NodeProto, varying: Sequence[str]) -> bool:
        """Whether an elementwise node takes one float tensor and single numbers of no higher rank."""
        if len(varying) != 1 or self.is_codes(varying[0]):
            return False
        constants = [self.constants[name] for name in proto.input if name in self.constants]
        rank = len(self.order_of(varying[0]))
        return all(array.size == 1 and array.ndim <= rank for array in constants)

    def move(self, proto: onnx.NodeProto) -> bool:
        """Moves codes as they are carried; False if the node must have them as they are."""
        source = proto.input[0]
        inputs = [self.carried(source, identity(self.rank(source)))]
        inputs += [self.original(name) if name else "" for name in proto.input[1:]]
        self._emit_copy(proto, inputs)
        for output in proto.output:
            if output:
                self.moved(source, output)
        return True

    def _view(self, proto: onnx.NodeProto) -> None:
        """A Transpose: the same tensor, read in another order."""
        source, value = proto.input[0], proto.output[0]
        rank = self.rank(source)
        perm = next((list(a.ints) for a in proto.attribute if a.name == "perm"), list(range(rank))[::-1])
        held = self._held[source]
        self.define(value, held.name, tuple(perm.index(axis) for axis in held.order))
        if self.is_codes(source):
            self.moved(source, value)

    def _copy_elementwise(self, proto: onnx.NodeProto, varying: str) -> None:
        order = self.order_of(varying)
        inputs = [
            "" if not name else self.carried(name, order) if name == varying
            else self.constant(self.constants[name].reshape(()) if proto.op_type != "Clip"
                               else self.constants[name])
            for name in proto.input
        ]  # fmt: skip
        self._emit_copy(proto, inputs, order)

    def _copy(self, proto: onnx.NodeProto) -> None:
        """The node as it is, on its inputs as they are."""
        inputs = [self.original(name) if name else "" for name in proto.input]
        for name in sorted(captured(proto) & (set(self._held) | set(self.constants))):
            tensor = self.original(name)
            if tensor != name and not any(name in node.output for node in self.nodes):
                self.append("Identity", [tensor], [name], main=False, domain="", attributes={})
        self._emit_copy(proto, inputs)

    def _emit_copy(self, proto: onnx.NodeProto, inputs: Sequence[str], order: Order | None = None) -> None:
        copy = onnx.NodeProto()
        copy.CopyFrom(proto)
        del copy.input[:], copy.output[:]
        copy.input.extend(inputs)
        for value in proto.output:
            name = value and self.name_for(value)
            copy.output.append(name)
            if value:
                shape = self._shapes.get(value)
                rank = len(shape) if shape is not None else None
                if order is None and rank is None and (self.is_codes(value) or value not in self._types):
                    raise UnsupportedError(
                        f"the rank of '{value}' is unknown; give the model's inputs shapes"
                    )
                self.define(value, name, order or identity(rank or 0))
        self.nodes.append(copy)
        self.forms.setdefault(self.current, Counter())[proto.op_type] += 1

    def _hold_as_is(self, value: str) -> None:
        self.define(value, value, identity(len(self._shapes.get(value) or ())))

    def _carried_constant(self, value: str, order: Order) -> str:
        array = self.constants[value]
        wide = array.reshape((1,) * (len(order) - array.ndim) + array.shape).transpose(order)
        return self.carry_constant(value, wide) if self.is_codes(value) else self.constant(wide)

    # ---- the model

    def _name_outputs(self) -> None:
        """Gives every output of the model its name."""
        inputs = {value.name for value in self.model.graph.input}
        taken: set[str] = set()
        for value in self.model.graph.output:
            tensor = self.original(value.name)
            if tensor == value.name:
                taken.add(tensor)
            elif tensor in inputs or tensor in taken or tensor in self.initializers:
                self.append("Identity", [tensor], [value.name], main=False, domain="", attributes={})
            else:
                self._rename(tensor, value.name)
                taken.add(value.name)

    def _rename(self, old: str, new: str) -> None:
        for node in self.nodes:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == old:
                        names[i] = new
        for value, held in self._held.items():
            if held.name == old:
                self._held[value] = Held(new, held.order)
        self._views = {key: new if name == old else name for key, name in self._views.items()}

    def domains(self) -> dict[str, int]:
        """The opsets that the target needs besides those of copied nodes."""
        return {}

    def ir_version(self) -> int:
        """The IR version of the exported model."""
        return int(self.model.ir_version)

    def _assemble(self) -> onnx.ModelProto:
        read = {name for node in self.nodes for name in node.input}
        read |= {name for node in self.nodes for name in captured(node)}
        told = {value.name for value in self.model.graph.output}
        initializers = [tensor for name, tensor in self.initializers.items() if name in read | told]
        inputs = [value for value in self.model.graph.input if value.name not in self.constants]
        graph = helper.make_graph(
            self.nodes,
            self.model.graph.name or "exported",
            inputs,
            list(self.model.graph.output),
            initializers,
            doc_string=self.model.graph.doc_string or None,
        )
        domains = {entry.domain: entry.version for entry in self.model.opset_import if entry.domain != DOMAIN}
        domains[""] = self.opset
        domains |= self.domains()
        used = {node.domain for node in self.nodes} | {""}
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items() if d in used],
            producer_name="lowbit",
        )
        model.ir_version = self.ir_version()
        return model

    _OPS: ClassVar[dict[str, Callable[[Exporter, Node], None]]] = {
        **dict.fromkeys(("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm"), product),
        "LowBitAffine": affine,
        "LowBitLookup": lambda self, node: self.lookup(node),
        "LowBitAdd": binary,
        "LowBitMul": binary,
        "LowBitMatMul": fed_product,
        "LowBitMaxPool": max_pool,
        "LowBitAveragePool": average_pool,
        "LowBitGlobalAveragePool": lambda self, node: self.global_average_pool(node),
        "LowBitConcat": lambda self, node: self.concat(node),
        "LowBitNormalization": normalization,
        "LowBitResize": resize,
        "LowBitSoftmax": softmax,
        "LowBitRequantize": lambda self, node: self.requantize(node),
        "LowBitQuantize": quantize_node,
        "LowBitThreshold": lambda self, node: self.threshold(node),
        "LowBitDequantize": dequantize_node,
        "LowBitDepthToSpace": depth_to_space,
    }


def _over(array: Array, sizes: Sequence[int | None]) -> Array:
    """One number, one per channel, or one per element of the last axes, so that it broadcasts with them."""
    return (
        array
        if array.size in (1, sizes[-1]) or None in sizes
        else array.reshape([size or 0 for size in sizes])
    )


def _types_and_shapes(model: onnx.ModelProto) -> tuple[dict[str, int], dict[str, list[int | None]]]:
    """Element types and dims of all values, symbolic dims as None."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    shapes: dict[str, list[int | None]] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type:
            types[value.name] = int(tensor.elem_type)
        if tensor.HasField("shape"):
            shapes[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return types, shapes


def places_of(model: onnx.ModelProto) -> dict[str, Any]:
    """The values of a lowbit model's provenance record; empty if it has none that can be read."""
    import json

    for entry in model.metadata_props:
        if entry.key == KEY:
            try:
                values = json.loads(entry.value)["values"]
            except (ValueError, KeyError, TypeError):
                return {}
            return values if isinstance(values, dict) else {}
    return {}
