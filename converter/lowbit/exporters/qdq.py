"""The target QDQ: standard ONNX, codes between QuantizeLinear and DequantizeLinear.

Codes are carried as they are, in 8-bit tensors; a range narrower than the type is a Clip on codes (QCDQ). A
convolution with its two DequantizeLinear in front and a QuantizeLinear behind *means* the one-multiplier
formula of ``docs/numerics.md``, so that ``requantize`` needs nothing else. Thresholds can be said only where
they lie on a line (:mod:`lowbit.exporters.fit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from lowbit.exporters.exporter import Exporter, channels_first
from lowbit.exporters.fit import Line, fit_thresholds
from lowbit.exporters.nodes import Codes, Node, Weights
from lowbit.lowering.stored import Order, identity
from lowbit.ops.codes import Array, code_range, storage
from lowbit.ops.softmax import softmax_table

THRESHOLDS = "it counts thresholds that no QuantizeLinear gives"


class QdqExporter(Exporter):
    """See the module."""

    target, other = "qdq", "qonnx"

    def __init__(
        self, model: onnx.ModelProto, places: Mapping[str, Mapping[str, Any]], *, sub_byte: bool = False
    ) -> None:
        """Takes a lowbit model apart.

        Args:
            model: it stays as it is.
            places: the values of its provenance record.
            sub_byte: store weights of up to 4 bits as int4, of up to 2 bits as int2.
        """
        super().__init__(model, places)
        self.sub_byte = sub_byte
        self._signed: dict[str, bool] = {}
        self._lines: dict[str, Line] = {}
        self._bipolar: dict[str, str] = {}

    def refusal(self, node: Node) -> str | None:
        """Thresholds that are no line, and numbers that the element types of ONNX do not hold."""
        if node.op_type == "LowBitThreshold":
            return THRESHOLDS
        if node.attributes.get("epilogue") == "thresholds":
            line = fit_thresholds(node)
            if line is None:
                return THRESHOLDS
            self._lines[node.output] = line
        if node.op_type == "LowBitSoftmax" and np.any(
            node.need("table") != softmax_table(float(node.need("x_scale").reshape(())))
        ):
            return "its table is another function than exp"
        if node.attributes.get("mode") == "cubic" and self.rank(node.inputs["x"]) != 4:
            return "ONNX Runtime has no cubic Resize but that of 2-D images"
        for value, _, zero_point in node.data:
            low, high = (-128, 127) if self.is_signed(value) else (0, 255)
            if np.any(zero_point < low) or np.any(zero_point > high):
                return f"the zero point {zero_point} of '{value}' is no code of its type"
        if node.op_type == "LowBitConvTranspose" and _scales_per_group(node) is None:
            return "its groups have different scales per channel, which ConvTranspose has no axis for"
        return None

    def carry_constant(self, value: str, array: Array) -> str:
        """The codes."""
        return self.constant(array)

    def is_signed(self, value: str) -> bool:
        """Whether codes are int8; those inside a node are known too."""
        return self._signed.get(value, super().is_signed(value))

    def dequantize(
        self, value: str, encoding: str, scale: Array, zero_point: Array, order: Order, axis: int = -1
    ) -> str:
        """DequantizeLinear."""
        if encoding == "bipolar":
            inputs = [self._signs(value, order), *self._parameters(scale, zero_point, np.int8)]
        else:
            dtype = np.int8 if self.is_signed(value) else np.uint8
            inputs = [self.carried(value, order), *self._parameters(scale, zero_point, dtype)]
        many = max(scale.size, zero_point.size) > 1
        return self.node("DequantizeLinear", inputs, axis=order.index(axis % len(order)) if many else None)

    def _signs(self, value: str, order: Order) -> str:
        """Bipolar codes 0 and 1 as the int8 codes -1 and +1; no zero point lies in their middle."""
        tensor = self.carried(value, order)
        if tensor not in self._bipolar:
            index = self.node("Cast", [tensor], to=TensorProto.INT32)
            self._bipolar[tensor] = self.node("Gather", [self.constant(np.array([-1, 1], np.int8)), index])
        return self._bipolar[tensor]

    def quantize(self, real: str, codes: Codes, value: str, order: Order) -> None:
        """QuantizeLinear, and a Clip where the bounds are narrower than the type."""
        dtype = storage(codes.encoding)
        inputs = [real, *self._parameters(codes.scale, codes.zero_point, dtype)]
        many = max(codes.scale.size, codes.zero_point.size) > 1
        axis = order.index(len(order) - 1) if many else None
        cut = (codes.low, codes.high) != code_range(8, codes.encoding)
        tensor = self.node("QuantizeLinear", inputs, axis=axis, output=None if cut else self.name_for(value))
        if cut:
            bounds = [self.constant(np.asarray(bound, dtype)) for bound in (codes.low, codes.high)]
            tensor = self.node("Clip", [tensor, *bounds], output=self.name_for(value))
        self._signed[value] = codes.encoding == "signed"
        self.define(value, tensor, order)

    def product_real(self, node: Node) -> tuple[str, Order]:
        """The product of real numbers."""
        attributes = node.attributes
        x_scale, x_zero_point = node.need("x_scale"), node.need("x_zero_point")
        if "Gemm" in node.op_type:
            order = self.matrix(node)[0]
        else:
            order = channels_first(2 + len(attributes["kernel_shape"]))
        x = self.dequantize(node.inputs["x"], attributes["x_encoding"], x_scale, x_zero_point, order)
        if "Gemm" in node.op_type:
            x = self.flattened(node, x)
        bias = node.array("bias")
        told = None
        if bias is not None:
            scale = node.real_scale.reshape(-1) if node.real_scale.size > 1 else node.real_scale.reshape(())
            inputs = [self.constant(bias.astype(np.int32)), self.constant(scale)]
            told = self.node("DequantizeLinear", inputs, axis=0 if scale.ndim else None)
        return self.multiply(node, x, self._weights(node), told)

    def product_codes(self, node: Node, codes: Codes, value: str) -> None:
        """The product, then QuantizeLinear."""
        real, order = self.product_real(node)
        self.quantize(real, codes, value, order)

    def tail_steps(self, node: Node, steps: Sequence[str]) -> list[str]:
        """The steps, with a multiplication by one where a reader would take them for bounds of the codes.

        Product -> [Relu, Clip] -> QuantizeLinear means one rounding multiplication; a tail has two.
        """
        told = super().tail_steps(node, steps)
        idle = {"relu", "clip"} | (set() if np.any(_or_zero(node.array("tail_bias"))) else {"bias"})
        return ["nothing", *told] if "y_scale" in node.inputs and set(told) <= idle else told

    def fed_operand(self, node: Node, side: str, order: Order) -> str:
        """DequantizeLinear."""
        scale, zero_point = node.need(f"{side}_scale"), node.need(f"{side}_zero_point")
        encoding = node.attributes[f"{side}_encoding"]
        return self.dequantize(node.inputs[side], encoding, scale, zero_point, order)

    def fed_scale(self, node: Node, real: str, codes: Codes | None) -> None:
        """QuantizeLinear behind a MatMul of codes means the multiplier."""
        order = identity(self.fed_rank(node))
        if codes is None:
            self.define(node.output, real, order)
        else:
            self.quantize(real, codes, node.output, order)

    def thresholds(self, node: Node) -> None:
        """The product on a line, then QuantizeLinear of scale 1."""
        line = self._lines[node.output]
        real, order = self.product_real(node)
        real = self._per_channel("Mul", real, line.slope, order)
        real = self._per_channel("Add", real, line.offset, order)
        codes = Codes(
            np.ones((), np.float32), np.zeros((), np.int32), line.low, line.high, 8,
            node.attributes["y_encoding"],
        )  # fmt: skip
        self.quantize(real, codes, node.output, order)

    def threshold(self, node: Node) -> None:
        """Refused before."""
        raise AssertionError(THRESHOLDS)

    def lookup(self, node: Node) -> None:
        """A Gather from the table; a negative index counts from its end, as a negative code's byte does."""
        value, table = node.inputs["x"], node.need("table")
        order = self.order_of(value)
        index = self.node("Cast", [self.carried(value, order)], to=TensorProto.INT32)
        if table.ndim == 2:
            # One table behind the other. Bytes, not codes, count inside each of them.
            if self.is_signed(value):
                table = np.roll(table, 128, axis=1)
                index = self.node("Add", [index, self.constant(np.asarray(128, np.int32))])
            first = np.arange(table.shape[0], dtype=np.int32) * 256
            index = self.node("Add", [index, self.constant(self.channelwise(first, order))])
        entries = table.reshape(-1).view(storage(node.attributes["y_encoding"]))
        y = self.node("Gather", [self.constant(entries), index], main=True, output=self.name_for(node.output))
        self.define(node.output, y, order)

    def depth_to_space(self, node: Node) -> None:
        """DepthToSpace, of real numbers where the codes are int8, for which ONNX Runtime has no kernel."""
        value = node.inputs["x"]
        if not self.is_signed(value):
            super().depth_to_space(node)
            return
        unit = Codes(np.ones((), np.float32), np.zeros((), np.int32), -128, 127, 8, "signed")
        order = channels_first(self.rank(value))
        real = self.node(
            "DepthToSpace",
            [self.dequantize(value, "signed", unit.scale, unit.zero_point, order)],
            main=True,
            blocksize=node.attributes["blocksize"],
            mode=node.attributes["mode"],
        )
        self.quantize(real, unit, node.output, order)

    def requantize(self, node: Node) -> None:
        """DequantizeLinear, QuantizeLinear."""
        order = self.order_of(node.inputs["x"])
        real = self._real_x(node, order)
        self.quantize(real, Codes.of(node), node.output, order)

    def concat(self, node: Node) -> None:
        """Concat of real numbers; of codes where all are copied, or where copies escape the bounds."""
        codes = Codes.of(node)
        order = self.order_of(node.many[0])
        axis = order.index(node.attributes["axis"] % len(order))
        parts = [(*data, scale) for data, scale in zip(node.data, node.need("x_scales"), strict=True)]
        copied = [
            scale == codes.scale and zero_point == codes.zero_point and encoding == codes.encoding
            for _, encoding, zero_point, scale in parts
        ]
        bounded = (codes.low, codes.high) != code_range(8, codes.encoding)
        if not all(copied) and not (any(copied) and bounded):
            reals = [self.dequantize(value, enc, scale, zero, order) for value, enc, zero, scale in parts]
            self.quantize(self.node("Concat", reals, main=True, axis=axis), codes, node.output, order)
            return
        tensors = []
        for i, (value, encoding, zero_point, scale) in enumerate(parts):
            if copied[i]:
                tensors.append(self.carried(value, order))
                continue
            part = f"{node.output}/part{i}"
            self.quantize(self.dequantize(value, encoding, scale, zero_point, order), codes, part, order)
            tensors.append(self.carried(part, order))
        y = self.node("Concat", tensors, main=True, output=self.name_for(node.output), axis=axis)
        self.define(node.output, y, order)

    def global_average_pool(self, node: Node) -> None:
        """GlobalAveragePool, and a Flatten where the node drops the image's dims."""
        rank = self.rank(node.inputs["x"])
        order = channels_first(rank)
        real = self.node("GlobalAveragePool", [self._real_x(node, order)], main=True)
        if node.attributes["keepdims"]:
            self._end(node, real, order)
            return
        if "y_scale" not in node.inputs:
            self.define(node.output, self.node("Flatten", [real], axis=1), identity(2))
            return
        whole = f"{node.output}/image"
        self.quantize(real, Codes.of(node), whole, order)
        flat = self.node("Flatten", [self.carried(whole, order)], axis=1, output=self.name_for(node.output))
        self.define(node.output, flat, identity(2))

    def moved(self, source: str, value: str) -> None:
        """Codes are codes wherever they are moved."""

    def standard_quantizer(self, proto: onnx.NodeProto) -> bool:
        """One with a single scale takes its operand in whatever order it is carried."""
        operand, parameters = proto.input[0], list(proto.input[1:])
        sizes = [self.constants[name].size for name in parameters if name in self.constants]
        if operand in self.constants or len(sizes) != len(parameters) or max(sizes, default=2) > 1:
            return False
        order = self.order_of(operand)
        inputs = [self.carried(operand, order), *(self.constant(self.constants[n]) for n in parameters)]
        self._emit_copy(proto, inputs, order)
        return True

    def ir_version(self) -> int:
        """The version in which the element types of the weights exist."""
        kinds = {tensor.data_type for tensor in self.initializers.values()}
        two, four = {TensorProto.INT2, TensorProto.UINT2}, {TensorProto.INT4, TensorProto.UINT4}
        return max(super().ir_version(), 13 if kinds & two else 10 if kinds & four else 0)

    def _parameters(
        self,
        scale: Array,
        zero_point: Array,
        dtype: npt.DTypeLike,
        narrow: int | None = None,
        *,
        shared: bool = True,
    ) -> list[str]:
        """Scale and zero point, of one shape as ONNX wants them; ``narrow`` is a type that numpy lacks."""
        count = max(scale.size, zero_point.size)
        if count == 1:
            pair = scale.reshape(()), zero_point.reshape(())
        else:
            pair = np.broadcast_to(scale.reshape(-1), count), np.broadcast_to(zero_point.reshape(-1), count)
        return [self.constant(pair[0]), self.constant(pair[1].astype(dtype), narrow, shared=shared)]

    def _weights(self, node: Node) -> str:
        """The weights behind their DequantizeLinear."""
        weights = Weights.of(node)
        if weights.encoding == "bipolar":
            codes, bits, signed = weights.values, 2, True
        else:
            codes, bits, signed = weights.codes, weights.bits, weights.encoding == "signed"
        scale, zero_point, axis = weights.scale, weights.zero_point, 0
        if node.op_type == "LowBitConvTranspose":
            per_group = _scales_per_group(node)
            assert per_group is not None, "refused before"
            (scale, zero_point), axis = per_group, 1
        elif "Gemm" in node.op_type:
            axis = 0 if self.is_gemm(node) else 1
        dtype, narrow = np.dtype(np.int8 if signed else np.uint8), self._container(bits, signed)
        # With session.x64quantprecision ONNX Runtime rewrites s8 weights and their zero points as u8, once
        # for each node that reads them, and trips over those that two nodes share.
        inputs = [
            self.constant(self.arranged(node, codes).astype(dtype), narrow, shared=False),
            *self._parameters(scale, zero_point, dtype, narrow, shared=False),
        ]
        many = max(scale.size, zero_point.size) > 1
        return self.node("DequantizeLinear", inputs, axis=axis if many else None)

    def _container(self, bits: int, signed: bool) -> int | None:
        """The element type of weights where it is narrower than a byte."""
        if not self.sub_byte or bits > 4:
            return None
        if bits > 2:
            return int(TensorProto.INT4 if signed else TensorProto.UINT4)
        return int(TensorProto.INT2 if signed else TensorProto.UINT2)


def weight_opset(model_bits: Sequence[int]) -> int:
    """The opset in which weights of these widths have an element type of their own."""
    narrowest = min(model_bits, default=8)
    return 25 if narrowest <= 2 else 21 if narrowest <= 4 else 13


def _or_zero(array: Array | None) -> Array:
    return np.zeros((), np.float32) if array is None else array


def _scales_per_group(node: Node) -> tuple[Array, Array] | None:
    """Scale and zero point of a ConvTranspose's weights along its channel axis, [out / group] or ().

    None where groups differ.
    """
    weights, group = Weights.of(node), node.attributes["group"]
    told: list[Array] = []
    for array in (weights.scale, weights.zero_point):
        if array.size == 1:
            told.append(array.reshape(()))
            continue
        rows = array.reshape(group, -1)
        if np.any(rows != rows[0]):
            return None
        told.append(rows[0])
    return told[0], told[1]
