"""Nodes of a lowbit model as plain data: attributes with their defaults, constant inputs as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from lowbit.ops.codes import Array, Floats, Ints, code_range, output_range, unpack
from lowbit.schemas import attributes_of, signatures

PRODUCTS = ("LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm")


@dataclass(frozen=True)
class Node:
    """One lowbit node.

    Attributes:
        name: its name.
        op_type: its op.
        attributes: all of them, at the schema's default where the file says nothing.
        inputs: name in the schema -> name of the value; absent ones are left out.
        many: the values of the variadic input, for LowBitConcat.
        output: the value it computes.
        constants: the model's initializers.
    """

    name: str
    op_type: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, str]
    many: Sequence[str]
    output: str
    constants: Mapping[str, Array]

    @classmethod
    def read(cls, proto: onnx.NodeProto, constants: Mapping[str, Array]) -> Node:
        """A node of domain ``ai.lowbit``."""
        signature = signatures()[proto.op_type]
        attributes = {**signature.defaults, **attributes_of(proto)}
        many = list(proto.input)[len(signature.inputs) - 1 :] if proto.op_type == "LowBitConcat" else []
        inputs = {k: name for k, name in zip(signature.inputs, proto.input, strict=False) if name}
        return cls(proto.name, proto.op_type, attributes, inputs, many, proto.output[0], constants)

    def array(self, name: str) -> Array | None:
        """A constant input; None where the node does without it."""
        return self.constants[self.inputs[name]] if name in self.inputs else None

    def need(self, name: str) -> Array:
        """A constant input that the node has."""
        array = self.array(name)
        assert array is not None, f"{self.op_type} '{self.name}' has no {name}"
        return array

    def zero_point(self, name: str) -> Array:
        """A constant zero point, 0 where the node does without it."""
        array = self.array(name)
        return np.zeros((), np.int32) if array is None else array

    @property
    def is_product(self) -> bool:
        """Whether it is a convolution or a matrix product."""
        return self.op_type in PRODUCTS

    @property
    def data(self) -> list[tuple[str, str, Array]]:
        """Its inputs of codes as ``(value, encoding, zero point)``; the zero point 0 where it states none."""
        if self.op_type == "LowBitConcat":
            encodings = self.attributes["x_encodings"] or ",".join(["unsigned"] * len(self.many))
            zero_points = self.need("x_zero_points")
            return list(zip(self.many, encodings.split(","), zero_points, strict=True))
        return [
            (self.inputs[name], self.attributes.get(f"{name}_encoding", "unsigned"),
             self.zero_point(f"{name}_zero_point"))
            for name in ("x", "a", "b", "residual")
            if name in self.inputs and self.op_type not in ("LowBitQuantize", "LowBitThreshold")
        ]  # fmt: skip

    def states_zero_point(self, value: str) -> bool:
        """Whether it says what a code of one of its inputs stands for."""
        return any(
            self.inputs.get(name) == value and (f"{name}_zero_point" in self.inputs)
            for name in ("x", "a", "b", "residual")
        ) or (self.op_type == "LowBitConcat" and value in self.many)

    @property
    def real_scale(self) -> Floats:
        """``f32(x_scale * w_scale[c])``: what one unit of a product's accumulator is worth."""
        scale: Floats = self.need("x_scale") * self.need("w_scale")
        return scale

    @property
    def is_bipolar(self) -> bool:
        """Whether a product reads its x as ``2q - 1``."""
        return bool(self.attributes.get("x_encoding") == "bipolar")


@dataclass(frozen=True)
class Codes:
    """What a quantizer of a node gives: ``clip(rint(v / scale) + zero_point, low, high)``.

    Attributes:
        scale: float32, () or [C].
        zero_point: int32, () or [C].
        low: smallest code.
        high: largest code.
        bits: the bit width that the node states.
        encoding: ``unsigned`` (uint8) or ``signed`` (int8).
    """

    scale: Array
    zero_point: Array
    low: int
    high: int
    bits: int
    encoding: str

    @classmethod
    def of(cls, node: Node) -> Codes:
        """The quantizer at the end of a node."""
        bits, encoding = node.attributes["y_bits"], node.attributes["y_encoding"]
        low, high = output_range(bits, encoding, node.attributes["y_min"], node.attributes["y_max"])
        return cls(node.need("y_scale"), node.zero_point("y_zero_point"), low, high, bits, encoding)

    @classmethod
    def inner(cls, node: Node) -> Codes:
        """A product's own quantizer in front of its residual."""
        encoding = node.attributes["inner_encoding"]
        low, high = output_range(8, encoding, node.attributes["inner_min"], node.attributes["inner_max"])
        return cls(node.need("inner_scale"), node.zero_point("inner_zero_point"), low, high, 8, encoding)

    @property
    def type_range(self) -> tuple[int, int]:
        """All codes of the bit width."""
        return code_range(self.bits, self.encoding)


@dataclass(frozen=True)
class Weights:
    """The weights of a product.

    Attributes:
        codes: [out, kernel..., in / group]; the kernel is empty for a matrix product.
        zero_point: int64 of the shape [out, 1..] or 0-d.
        scale: float32, () or [out].
        bits: their bit width.
        encoding: ``unsigned``, ``signed`` or ``bipolar``.
    """

    codes: Ints
    zero_point: Ints
    scale: Floats
    bits: int
    encoding: str

    @classmethod
    def of(cls, node: Node) -> Weights:
        """Unpacks the weights of a product."""
        attributes = node.attributes
        kernel = list(attributes.get("kernel_shape", ()))
        if "Gemm" in node.op_type:
            rows, columns = attributes["out_features"], attributes["in_features"]
        else:
            rows, columns = attributes["out_channels"], attributes["in_channels"] // attributes["group"]
        bits, encoding = attributes["w_bits"], attributes["w_encoding"]
        codes = unpack(node.need("w"), rows, math.prod(kernel) * columns, bits, encoding)
        zero_point: Ints = node.need("w_zero_point").astype(np.int64)
        many = (rows, *(1 for _ in kernel), 1) if zero_point.size > 1 else ()
        scale = node.need("w_scale")
        return cls(
            codes.reshape(rows, *kernel, columns),
            zero_point.reshape(many),
            scale.reshape(()) if scale.size == 1 else scale,
            bits,
            encoding,
        )

    @property
    def values(self) -> Ints:
        """The integers that the codes stand for."""
        return 2 * self.codes - 1 if self.encoding == "bipolar" else self.codes - self.zero_point

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return int(self.codes.shape[0])

    @staticmethod
    def for_conv(array: Array) -> Array:
        """[out, kernel..., in / group] as ONNX's Conv has it: [out, in / group, kernel...]."""
        return np.ascontiguousarray(np.moveaxis(array, -1, 1))

    @staticmethod
    def for_conv_transpose(array: Array, group: int) -> Array:
        """[out, kernel..., in / group] as ONNX's ConvTranspose has it: [in, out / group, kernel...]."""
        out, *kernel, inner = array.shape
        by_group = np.moveaxis(array.reshape(group, out // group, *kernel, inner), -1, 1)
        return np.ascontiguousarray(by_group.reshape(group * inner, out // group, *kernel))


def accumulator_range(node: Node) -> tuple[Ints, Ints]:
    """The smallest and the largest accumulator of every channel, the bias included, from the weights.

    With P and N the sums of a row's positive and negative values and x in [a, b], a <= 0 <= b (padding
    contributes 0), the sum lies in ``[P * a + N * b, P * b + N * a]``.
    """
    weights = Weights.of(node).values
    rows = weights.reshape(weights.shape[0], -1)
    positive, negative = np.maximum(rows, 0).sum(axis=1), np.minimum(rows, 0).sum(axis=1)
    if node.is_bipolar:
        a, b = -1, 1
    else:
        low, high = code_range(node.attributes["x_bits"], node.attributes["x_encoding"])
        zero_point = int(node.zero_point("x_zero_point"))
        a, b = min(0, low - zero_point), max(0, high - zero_point)
    bias = node.array("bias")
    offset = np.zeros(len(rows), np.int64) if bias is None else bias.astype(np.int64)
    return positive * a + negative * b + offset, positive * b + negative * a + offset
