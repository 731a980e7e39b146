"""The target QONNX: standard ONNX on float32 tensors, with Quant, BipolarQuant and MultiThreshold.

Codes are carried as the integers that they stand for, ``q - zero_point`` (``2q - 1`` for bipolar ones), in
float32; scales are nodes of their own. A convolution of integers with integer weights is exact in float32 as
long as its sums stay below 2^24, so that a whole ``requantize`` epilogue,

    Conv -> Mul(m[c]) -> Quant(scale 1),        m = f32(f32(x_scale * w_scale[c]) / y_scale),

is computed by every executor of QONNX exactly as the lowbit node computes it. With scales inside the Quant
nodes, as training writes them, each convolution would round its own sum and the product would be divided
instead of multiplied: other codes at ties.

A Quant clips before it rounds, and adds its zero point before both. Where the zero point is not zero, a Round
in front of it restores the order of lowbit's quantizers; integers are then all that Quant sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from lowbit.errors import UnsupportedError
from lowbit.exporters.exporter import Exporter, channels_first
from lowbit.exporters.nodes import Codes, Node, Weights, accumulator_range
from lowbit.graph.quantization import bits_of
from lowbit.lowering.stored import Order, identity
from lowbit.ops import DOMAIN
from lowbit.ops.codes import Array, code_range, storage

QONNX = "qonnx.custom_op.general"
EXACT = 1 << 24
"""Up to here float32 holds every integer."""

_ONE = np.float32(1)
_UNIT = np.ones((), np.float32)
_NO_ZERO_POINT = np.zeros((), np.int32)
_MANY_STEPS = 255
_MOVING = ("LowBitMaxPool", "LowBitResize", "LowBitDepthToSpace")


@dataclass(frozen=True)
class Meaning:
    """Which integer carries a code q: ``factor * q + offset``, factor 1, or 2 for bipolar codes."""

    factor: int
    offset: int

    @classmethod
    def of(cls, encoding: str, zero_point: Array) -> Meaning | None:
        """The integers that codes of a tensor stand for; None where zero points differ per channel."""
        if encoding == "bipolar":
            return cls(2, -1)
        different = np.unique(zero_point)
        return cls(1, -int(different[0])) if different.size == 1 else None

    def integers(self, codes: Array) -> Array:
        """What carries codes."""
        return self.factor * codes.astype(np.int64) + self.offset


CODES = Meaning(1, 0)


class QonnxExporter(Exporter):
    """See the module."""

    target, other = "qonnx", "qdq"

    def refusal(self, node: Node) -> str | None:
        """What a float op between two quantizers means here depends on who runs it."""
        if node.op_type == "LowBitSoftmax":
            return "no chain of float operations has its exact sum"
        if node.op_type == "LowBitResize" and node.attributes["mode"] != "nearest":
            return f"the order in which a {node.attributes['mode']} Resize adds up is left open"
        return None

    def prepare(self, nodes: Sequence[Node]) -> None:
        """Finds out how every tensor of codes is best carried: as its first reader wants it."""
        self._meaning: dict[str, Meaning] = {}
        self._wanted: dict[str, Meaning] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        self._converted: dict[tuple[str, Meaning], str] = {}
        self._originals: dict[str, str] = {}
        by_output = {node.output: node for node in nodes}
        for proto in reversed(self.model.graph.node):
            if proto.domain == DOMAIN:
                node = by_output[proto.output[0]]
                for value, encoding, zero_point in reversed(node.data):
                    meaning = Meaning.of(encoding, zero_point)
                    if node.op_type in _MOVING and node.output in self._wanted:
                        self._wanted[value] = self._wanted[node.output]
                    elif node.states_zero_point(value) and meaning is not None:
                        self._wanted[value] = meaning
            elif proto.op_type == "DequantizeLinear" and len(proto.input) > 2:
                stated = self.constants.get(proto.input[2])
                meaning = None if stated is None else Meaning.of("unsigned", stated)
                if meaning is not None:
                    self._wanted[proto.input[0]] = meaning
            elif proto.input and self.is_codes(proto.input[0]) and proto.output[0] in self._wanted:
                self._wanted[proto.input[0]] = self._wanted[proto.output[0]]

    # ---- carrying

    def carry_constant(self, value: str, array: Array) -> str:
        """Constant codes as float32, to be shifted by their readers."""
        return self.constant(self._wanted.get(value, CODES).integers(array).astype(np.float32))

    def integers(self, value: str, meaning: Meaning, order: Order) -> str:
        """The tensor that carries codes with a given meaning."""
        if value in self.constants:
            current = self._wanted.get(value, CODES)
        elif value in self._meaning:
            current = self._meaning[value]
        else:
            return self._from_codes(value, meaning, order)
        return self._converted_to(self.carried(value, order), current, meaning)

    def _converted_to(self, tensor: str, current: Meaning, meaning: Meaning) -> str:
        key = (tensor, meaning)
        if key not in self._converted:
            self._converted[key] = self._shift(tensor, current, meaning)
        return self._converted[key]

    def _shift(self, tensor: str, current: Meaning, meaning: Meaning) -> str:
        """With ``q = (n - offset) / factor``: ``factor' * q + offset'``, all of it exact."""
        factor = meaning.factor / current.factor
        scaled = self.scaled(tensor, np.float32(factor))
        return self.shifted(scaled, np.float32(meaning.offset - current.offset * factor))

    def _from_codes(self, value: str, meaning: Meaning, order: Order) -> str:
        """Codes that come as such, from the caller of the model or from a node that stays."""
        tensor = self.carried(value, order)
        key = (tensor, meaning)
        if key not in self._converted:
            read = meaning if self._is_zero_point(value, meaning) else CODES
            zero_point = np.asarray(-read.offset, self._dtype(value))
            inputs = [tensor, self.constant(_ONE), self.constant(zero_point)]
            self._converted[key] = self._converted_to(self.node("DequantizeLinear", inputs), read, meaning)
        return self._converted[key]

    def original(self, value: str) -> str:
        """Codes as the lowbit model has them, where a node or the caller of the model wants those."""
        meaning = self._meaning.get(value)
        if meaning is None:
            return super().original(value)
        if value not in self._originals:
            read = meaning if self._is_zero_point(value, meaning) else CODES
            tensor = self.integers(value, read, identity(self.rank(value)))
            zero_point = np.asarray(-read.offset, self._dtype(value))
            inputs = [tensor, self.constant(_ONE), self.constant(zero_point)]
            self._originals[value] = self.node("QuantizeLinear", inputs)
        return self._originals[value]

    def _dtype(self, value: str) -> np.dtype[Any]:
        return np.dtype(np.int8 if self.is_signed(value) else np.uint8)

    def _is_zero_point(self, value: str, meaning: Meaning) -> bool:
        """Whether ONNX's own pair can say a meaning: a zero point that is a code."""
        low, high = (-128, 127) if self.is_signed(value) else (0, 255)
        return meaning.factor == 1 and low <= -meaning.offset <= high

    def dequantize(
        self, value: str, encoding: str, scale: Array, zero_point: Array, order: Order, axis: int = -1
    ) -> str:
        """The integers times their scale."""
        meaning = Meaning.of(encoding, zero_point)
        if meaning is None:
            tensor = self.integers(value, CODES, order)
            offset = -zero_point.astype(np.float32)
            tensor = self.shifted(tensor, self.channelwise(offset, order, axis))
        else:
            tensor = self.integers(value, meaning, order)
        return self.scaled(tensor, self.channelwise(scale, order, axis))

    def moved(self, source: str, value: str) -> None:
        """What moves keeps its meaning."""
        if source in self._meaning:
            self._meaning[value] = self._meaning[source]
        if source in self._ranges:
            self._ranges[value] = self._ranges[source]

    def move(self, proto: onnx.NodeProto) -> bool:
        """Moves the integers that carry codes; a Pad's fill value becomes one of them."""
        codes = [name for name in proto.input if name and self.is_codes(name)]
        meaning = next((self._meaning[name] for name in codes if name in self._meaning), None)
        modes = [a.s for a in proto.attribute if a.name == "mode"]
        computes = proto.op_type == "Resize" and modes not in ([], [b"nearest"])
        indices = proto.op_type == "MaxPool" and len(proto.output) > 1
        if meaning is None or computes or indices:
            return False
        inputs = [
            self.integers(name, meaning, identity(self.rank(name))) if name in codes
            else name and self.original(name)
            for name in proto.input
        ]  # fmt: skip
        if proto.op_type == "Pad" and modes in ([], [b"constant"]):
            given = proto.input[2] if len(proto.input) > 2 else ""
            fill = self.constants[given] if given else np.zeros((), np.uint8)
            carried = self.constant(meaning.integers(fill).astype(np.float32).reshape(()))
            inputs = [*inputs[:2], carried, *inputs[3:]]
        self._emit_copy(proto, inputs)
        for output in proto.output:
            if output:
                self._meaning[output] = meaning
                self._ranges.pop(output, None)
        return True

    def standard_quantizer(self, proto: onnx.NodeProto) -> bool:
        """A pair of ONNX's own, in the words of QONNX."""
        operand, value = proto.input[0], proto.output[0]
        arrays = [self.constants.get(name) for name in proto.input[1:]]
        if operand in self.constants or any(a is None or a.dtype.itemsize > 4 for a in arrays):
            return False
        scale = arrays[0]
        assert scale is not None
        zero_point = arrays[1] if len(arrays) > 1 and arrays[1] is not None else np.zeros((), np.uint8)
        axis = next((a.i for a in proto.attribute if a.name == "axis"), 1)
        order = self.order_of(operand)
        if proto.op_type == "DequantizeLinear":
            if not self.is_codes(operand):
                return False
            wide = zero_point.astype(np.int32)
            self.define(value, self.dequantize(operand, "unsigned", scale, wide, order, axis), order)
            return True
        if not self.is_codes(value) or scale.size > 1 or zero_point.size > 1:
            return False
        signed = self.is_signed(value)
        encoding = "signed" if signed else "unsigned"
        low, high = code_range(8, encoding)
        codes = Codes(scale.reshape(()), zero_point.astype(np.int32).reshape(()), low, high, 8, encoding)
        self.quantize(self.carried(operand, order), codes, value, order)
        return True

    # ---- quantizers

    def quantize(self, real: str, codes: Codes, value: str, order: Order) -> None:
        """A division by the scale, then the rounding."""
        if np.any(codes.scale != 1):
            scale = self.channelwise(codes.scale, order)
            real = self.node("Div", [real, self.constant(scale)])
        self._round(real, codes, value, order)

    def _round(self, real: str, codes: Codes, value: str, order: Order) -> None:
        """``clip(rint(real) + zero_point, low, high) - zero_point`` as Quant says it."""
        zero_points = np.unique(codes.zero_point)
        smallest, largest = codes.type_range
        if zero_points.size > 1:
            shift = self.channelwise(codes.zero_point.astype(np.float32), order)
            if (codes.low, codes.high) != (smallest, largest):
                real = self.clipped(real, codes.low - shift, codes.high - shift)
            real = self.node("Round", [real])
            tensor = self._quant(real, codes.bits, codes.encoding == "signed", shift)
            self._carry(self.shifted(tensor, shift), CODES, codes, value, order)
            return
        zero_point = int(zero_points[0])
        low, high = codes.low - zero_point, codes.high - zero_point
        symmetric = _zero_free(low, high)
        if symmetric is None:
            bits, signed, offset = codes.bits, codes.encoding == "signed", zero_point
            bounds = (smallest - zero_point, largest - zero_point)
        else:
            (bits, signed), offset = symmetric, 0
            bounds = code_range(bits, "signed" if signed else "unsigned")
        if (low, high) != bounds:
            if low == 0 and high == bounds[1]:
                real = self.node("Relu", [real])
            else:
                real = self.clipped(real, low, high)
        if offset:
            real = self.node("Round", [real])
        tensor = self._quant(real, bits, signed, np.float32(offset))
        self._carry(tensor, Meaning(1, -zero_point), codes, value, order)

    def _quant(self, real: str, bits: int, signed: bool, zero_point: Array | np.float32) -> str:
        """A Quant of scale 1."""
        inputs = [
            real,
            self.constant(_ONE),
            self.constant(np.asarray(zero_point, np.float32)),
            self.constant(np.float32(bits)),
        ]
        return self.node("Quant", inputs, domain=QONNX, signed=int(signed), narrow=0, rounding_mode="ROUND")

    def _carry(self, tensor: str, meaning: Meaning, codes: Codes, value: str, order: Order) -> None:
        wanted = self._wanted.get(value, meaning)
        tensor = self._shift(tensor, meaning, wanted)
        if self.is_written_last(tensor):
            tensor = self.rename_last(self.name_for(value))
        self._meaning[value], self._ranges[value] = wanted, (codes.low, codes.high)
        self.define(value, tensor, order)

    # ---- products

    def _accumulator(self, node: Node) -> tuple[str, Order]:
        """The exact accumulator, as float32."""
        attributes = node.attributes
        gemm = "Gemm" in node.op_type
        order = self.matrix(node)[0] if gemm else channels_first(2 + len(attributes["kernel_shape"]))
        meaning = Meaning.of(attributes["x_encoding"], node.need("x_zero_point"))
        assert meaning is not None, "a product has one zero point"
        x = self.integers(node.inputs["x"], meaning, order)
        return self.multiply(
            node, self.flattened(node, x) if gemm else x, self._weights(node), self._bias(node)
        )

    def _weights(self, node: Node) -> str:
        """The integer weights behind their quantizer."""
        weights = Weights.of(node)
        values = weights.values
        stored = self.constant(self.arranged(node, values).astype(np.float32))
        if weights.encoding == "bipolar":
            return self.node("BipolarQuant", [stored, self.constant(_ONE)], domain=QONNX)
        if weights.encoding == "unsigned" and not weights.zero_point.any():
            return self._quant(stored, weights.bits, False, np.float32(0))
        bits = max(2, weights.bits, bits_of(int(values.min()), int(values.max()), signed=True))
        if bits <= 8:
            return self._quant(stored, bits, True, np.float32(0))
        zero_point = self._weight_zero_point(node, weights)
        return self._quant(stored, weights.bits, weights.encoding == "signed", zero_point)

    def _weight_zero_point(self, node: Node, weights: Weights) -> Array:
        """The zero points of weights, to broadcast in their layout."""
        zero_point = weights.zero_point.astype(np.float32)
        if not zero_point.ndim:
            return zero_point
        if "Gemm" in node.op_type:
            return zero_point if self.is_gemm(node) else zero_point.T
        if node.op_type != "LowBitConvTranspose":
            return Weights.for_conv(zero_point)
        if node.attributes["group"] == 1:
            return Weights.for_conv_transpose(zero_point, 1)
        return self.arranged(node, np.broadcast_to(zero_point, weights.codes.shape))

    def _bias(self, node: Node) -> str | None:
        """An integer bias: 32-bit codes; as a tensor of integers where float32 does not hold them."""
        bias = node.array("bias")
        if bias is None:
            return None
        if np.abs(bias.astype(np.int64)).max(initial=0) > EXACT:
            return self.node("DequantizeLinear", [self.constant(bias.astype(np.int32)), self.constant(_ONE)])
        return self._quant(self.constant(bias.astype(np.float32)), 32, True, np.float32(0))

    def product_real(self, node: Node) -> tuple[str, Order]:
        """The accumulator times its scale."""
        acc, order = self._accumulator(node)
        return self.scaled(acc, self.channelwise(node.real_scale, order)), order

    def product_codes(self, node: Node, codes: Codes, value: str) -> None:
        """The accumulator times the multiplier, rounded."""
        acc, order = self._accumulator(node)
        multiplier = node.real_scale / codes.scale
        self._round(self.scaled(acc, self.channelwise(multiplier, order)), codes, value, order)

    def fed_operand(self, node: Node, side: str, order: Order) -> str:
        """The integers that are multiplied."""
        meaning = Meaning.of(node.attributes[f"{side}_encoding"], node.need(f"{side}_zero_point"))
        assert meaning is not None, "one zero point for all"
        return self.integers(node.inputs[side], meaning, order)

    def fed_scale(self, node: Node, real: str, codes: Codes | None) -> None:
        """The sum times one number."""
        order = identity(self.fed_rank(node))
        scale = node.need("a_scale") * node.need("b_scale")
        if codes is None:
            self.define(node.output, self.scaled(real, scale), order)
        else:
            self._round(self.scaled(real, scale / codes.scale), codes, node.output, order)

    # ---- thresholds

    def thresholds(self, node: Node) -> None:
        """A MultiThreshold on the accumulator.

        Thresholds beyond what the accumulator can be (those of constant channels, for example) move to its
        ends, where float32 holds them.
        """
        lowest, highest = (end[:, None] for end in accumulator_range(node))
        falls = node.need("threshold_dir").reshape(-1, 1) < 0
        rows = node.need("thresholds").astype(np.int64)
        # Reached by all: T <= lowest; by none: T > highest. Where counting falls: T >= highest, T < lowest.
        rows = np.clip(rows, np.where(falls, lowest - 1, lowest), np.where(falls, highest, highest + 1))
        if not np.array_equal(rows.astype(np.float32).astype(np.int64), rows):
            raise UnsupportedError(
                f"{node.op_type} '{node.name}': its thresholds exceed 2^24 and are no float32 numbers, which "
                "is all that MultiThreshold has"
            )
        acc, order = self._accumulator(node)
        self._count(node, acc, order, rows.astype(np.float32), "threshold_base", "threshold_dir")

    def threshold(self, node: Node) -> None:
        """A MultiThreshold on a float tensor."""
        tensor, order = self.entrance(node)
        self._count(node, tensor, order, node.need("thresholds"), "base", "dir")

    def _count(self, node: Node, tensor: str, order: Order, rows: Array, base: str, direction: str) -> None:
        """``base[c] + #{k : dir[c] * v >= dir[c] * T[c, k]}``.

        MultiThreshold counts what a value reaches; where the direction is -1, it counts for the negated one.
        """
        sign = node.need(direction).astype(np.float32).reshape(-1)
        first = node.need(base).astype(np.int64).reshape(-1)
        bits, encoding = node.attributes["y_bits"], node.attributes["y_encoding"]
        low, high = int(first.min()), int(first.max()) + rows.shape[1]
        codes = Codes(_UNIT, _NO_ZERO_POINT, low, high, bits, encoding)
        wanted = self._wanted.get(node.output, CODES)
        tensor = self.scaled(tensor, self.channelwise(sign, order))
        self._steps(tensor, rows * sign[:, None], wanted.integers(first), wanted, codes, node.output, order)

    def _steps(
        self,
        tensor: str,
        rows: Array,
        first: Array,
        meaning: Meaning,
        codes: Codes,
        value: str,
        order: Order,
    ) -> None:
        """A value that rises by one code at every threshold.

        Args:
            tensor: what is compared.
            rows: ascending thresholds, [1 or C, n].
            first: the integers below the first threshold, [1 or C].
            meaning: the meaning of these integers.
            codes: the codes that occur.
            value: what is computed.
            order: the axes of ``tensor``.
        """
        uniform = np.unique(first).size == 1
        low, high = meaning.integers(np.array([codes.low, codes.high]))
        if meaning == Meaning(2, -1) and (low, high) == (-1, 1):
            told = "BIPOLAR"
        else:
            bits = bits_of(int(low), int(high), signed=bool(low < 0))
            told = f"INT{bits}" if low < 0 else f"UINT{bits}"
        counted = self.node(
            "MultiThreshold",
            [tensor, self.constant(rows.astype(np.float32))],
            domain=QONNX,
            out_dtype=told,
            out_scale=float(meaning.factor),
            out_bias=float(first[0]) if uniform else 0.0,
            data_layout=_layout(order),
        )
        if not uniform:
            counted = self.shifted(counted, self.channelwise(first.astype(np.float32), order))
        self._carry(counted, meaning, codes, value, order)

    # ---- other ops

    def lookup(self, node: Node) -> None:
        """A table: another name of the same integers, a MultiThreshold where it is monotone, or a Gather."""
        value, table = node.inputs["x"], node.need("table")
        order = self.order_of(value)
        encoding = "signed" if self.is_signed(value) else "unsigned"
        low, high = self._ranges.get(value, code_range(8, encoding))
        reached = np.arange(low, high + 1)
        rows = np.atleast_2d(table)[:, reached & 255].view(storage(node.attributes["y_encoding"]))
        source = self._meaning.get(value) or self._wanted.get(value, CODES)
        meaning = self._wanted.get(node.output, CODES)
        before, after = source.integers(reached), meaning.integers(rows)
        y_encoding = node.attributes["y_encoding"]
        codes = Codes(_UNIT, _NO_ZERO_POINT, int(rows.min()), int(rows.max()), 8, y_encoding)
        if np.all(after == before) and value not in self.constants:
            self.define(node.output, self.integers(value, source, order), order)
            self._meaning[node.output], self._ranges[node.output] = meaning, (codes.low, codes.high)
            return
        tensor = self.integers(value, source, order)
        steps = np.diff(rows.astype(np.int64), axis=1)
        rising, falling = np.all(steps >= 0, axis=1), np.all(steps <= 0, axis=1)
        counts = np.abs(steps).sum(axis=1)
        if np.all(rising | falling) and 0 < counts.max(initial=0) <= _MANY_STEPS:
            sign = np.where(rising, 1, -1)
            ascending = np.where(rising[:, None], rows.astype(np.int64), rows.astype(np.int64)[:, ::-1])
            grid = np.where(rising[:, None], before[None], -before[::-1][None])
            beyond = int(np.abs(before).max()) + 1
            told = np.full((len(rows), int(counts.max())), beyond, np.float32)
            for c, row in enumerate(ascending):
                thresholds = np.repeat(grid[c, 1:], np.diff(row))
                told[c, : len(thresholds)] = thresholds
            tensor = self.scaled(tensor, self.channelwise(sign.astype(np.float32), order))
            start = meaning.integers(ascending[:, 0])
            if meaning.factor == 1 and start.min() > 0 and start.min() + told.shape[1] <= _MANY_STEPS:
                # Counting from 0 has a zero point that is a code; the first thresholds are always reached.
                lead = np.full((len(told), int(start.min())), grid.min(), np.float32)
                told, start = np.concatenate([lead, told], axis=1), start - start.min()
            self._steps(tensor, told, start, meaning, codes, node.output, order)
            return
        # index = q - low + c * (high - low + 1)
        plain = self._converted_to(tensor, source, Meaning(1, -low))
        start = np.arange(len(rows), dtype=np.float32) * len(reached)
        index = self.node("Cast", [self.shifted(plain, self.channelwise(start, order))], to=TensorProto.INT64)
        entries = self.constant(after.reshape(-1).astype(np.float32))
        self._carry(self.node("Gather", [entries, index]), meaning, codes, node.output, order)

    def requantize(self, node: Node) -> None:
        """Real numbers in between; nothing at all where codes are only counted from another zero."""
        value, codes = node.inputs["x"], Codes.of(node)
        order = self.order_of(value)
        scales, zero_points = node.need("x_scale"), node.need("x_zero_point")
        plain = (
            scales.size == codes.scale.size == zero_points.size == codes.zero_point.size == 1
            and scales == codes.scale == 1
            and value in self._meaning
            and value in self._ranges
        )
        if plain:
            shift = int(codes.zero_point) - int(zero_points)
            low, high = (bound + shift for bound in self._ranges[value])
            if codes.low <= low and high <= codes.high:
                source = self._meaning[value]
                self.define(node.output, self.carried(value, order), order)
                self._meaning[node.output] = Meaning(source.factor, source.offset - source.factor * shift)
                self._ranges[node.output] = (low, high)
                return
        self.quantize(self._real_x(node, order), codes, node.output, order)

    def concat(self, node: Node) -> None:
        """Integers side by side, requantized where their grid is not the output's."""
        codes = Codes.of(node)
        order = self.order_of(node.many[0])
        meaning = self._wanted.get(node.output, Meaning(1, -int(codes.zero_point)))
        parts = []
        for i, ((value, encoding, zero_point), scale) in enumerate(
            zip(node.data, node.need("x_scales"), strict=True)
        ):
            copied = scale == codes.scale and zero_point == codes.zero_point and encoding == codes.encoding
            part = value
            if not copied:
                part = f"{node.output}/part{i}"
                self._wanted[part] = meaning
                real = self.dequantize(value, encoding, np.asarray(scale), np.asarray(zero_point), order)
                self.quantize(real, codes, part, order)
            parts.append(self.integers(part, meaning, order))
        axis = order.index(node.attributes["axis"] % len(order))
        y = self.node("Concat", parts, main=True, output=self.name_for(node.output), axis=axis)
        self.define(node.output, y, order)
        self._meaning[node.output] = meaning

    def global_average_pool(self, node: Node) -> None:
        """A sum of integers times a constant, which every executor computes exactly.

        The number of pixels is in the constant, so that it is computed from the image where that may vary.
        """
        value = node.inputs["x"]
        rank, order = self.rank(value), self.order_of(value)
        meaning = Meaning.of(node.attributes["x_encoding"], node.need("x_zero_point"))
        assert meaning is not None, "a mean has one zero point"
        axes = np.array([order.index(axis) for axis in range(1, rank - 1)], np.int64)
        keepdims = int(node.attributes["keepdims"])
        tensor = self.integers(value, meaning, order)
        total = self.node("ReduceSum", [tensor, self.constant(axes)], main=True, keepdims=keepdims)
        if not keepdims:
            order = (0, 1) if order.index(0) < order.index(rank - 1) else (1, 0)
        codes = Codes.of(node) if "y_scale" in node.inputs else None
        divisor = _UNIT if codes is None else codes.scale
        sizes = [size for size in self.dims(value)[1:-1] if size is not None]
        if len(sizes) == rank - 2:
            mean = self.scaled(total, node.need("x_scale") / (divisor * np.float32(np.prod(sizes))))
        else:
            counted = self.node("Gather", [self.node("Shape", [tensor]), self.constant(axes)])
            pixels = self.node("ReduceProd", [counted], keepdims=0)
            whole = self.scaled(self.node("Cast", [pixels], to=TensorProto.FLOAT), divisor)
            mean = self.node("Mul", [total, self.node("Div", [self.constant(node.need("x_scale")), whole])])
        if codes is None:
            self.define(node.output, mean, order)
        else:
            self._round(mean, codes, node.output, order)

    def domains(self) -> dict[str, int]:
        """QONNX's ops."""
        return {QONNX: 1}


def _zero_free(low: int, high: int) -> tuple[int, bool] | None:
    """The narrowest Quant without a zero point that has these integers: its bits, and whether signed."""
    if low >= 0:
        bits, signed = bits_of(low, high, signed=False), False
    else:
        bits, signed = max(2, bits_of(low, high, signed=True)), True
    return (bits, signed) if bits <= 8 else None


def _layout(order: Order) -> str:
    """QONNX's name of a layout: where the channels, the value's last axis, are."""
    rank = len(order)
    letters = iter({3: "W", 4: "HW", 5: "DHW"}.get(rank, "DHW"[: max(rank - 2, 0)]))
    channels, batch = order.index(rank - 1), order.index(0)
    return "".join(
        "C" if axis == channels else "N" if axis == batch else next(letters) for axis in range(rank)
    )
