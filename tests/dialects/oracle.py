"""What a quantized ONNX graph means, executed in numpy: the yardstick for everything the converter writes.

The meaning of a graph is its nodes in order, in float32, each operation rounded once, except that every sum
of products of codes is taken exactly (https://onnx.ai/onnx/operators for the operators; the formulas are
those of the op pages in docs/ops). Three kinds of regions have formulas of their own, because a sum is
rounded once only:

- Conv, ConvTranspose, Gemm or MatMul on codes, with no bias or an integer bias on its own grid, in front of a
  QuantizeLinear (Relu, Clip and pure data movement may stand between):
  `clip(rint(f32(acc) * m[c]) + z, lo, hi)` with `m = f32(f32(sx * sw) / sy)`;
- a mean over all pixels in front of a QuantizeLinear: the same with `m = f32(sx / f32(sy * f32(pixels)))`;
- a Softmax, or a Resize that computes, between codes and a QuantizeLinear: those of docs/numerics.md.

Nothing here is shared with the converter or with `lowbit.ops`. Operators without arithmetic of their own
(data movement, elementwise float operations) run in ONNX Runtime, one node at a time, without optimizations.
"""

# ruff: noqa: N802 - methods are named after the operators they execute
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

F32 = np.float32

_RANGES = {
    TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127),
    TensorProto.UINT4: (0, 15), TensorProto.INT4: (-8, 7),
    TensorProto.UINT2: (0, 3), TensorProto.INT2: (-2, 1),
    TensorProto.UINT16: (0, 65535), TensorProto.INT16: (-32768, 32767),
}  # fmt: skip
# numpy containers: sub-byte codes travel in bytes
_CONTAINERS = {
    TensorProto.UINT8: np.uint8, TensorProto.INT8: np.int8,
    TensorProto.UINT4: np.uint8, TensorProto.INT4: np.int8,
    TensorProto.UINT2: np.uint8, TensorProto.INT2: np.int8,
    TensorProto.UINT16: np.uint16, TensorProto.INT16: np.int16,
}  # fmt: skip

# Operators that move elements without changing them: they commute with rounding.
_MOVES = {
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Split", "Gather",
    "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A float tensor's exact meaning: `f32(codes) * scale`, codes with the zero point already taken off."""

    codes: np.ndarray  # int64
    scale: np.ndarray  # float32, broadcastable to codes


@dataclass(frozen=True)
class Sum:
    """An exact integer result in front of its first rounding."""

    acc: np.ndarray  # int64
    scale: np.ndarray  # float32, broadcastable: f32(sx * sw), or sx of a mean
    pixels: int = 0  # of a mean; 0 for a product

    def real(self) -> np.ndarray:
        scale = F32(self.scale / F32(self.pixels)) if self.pixels else self.scale
        return self.acc.astype(F32) * scale

    def codes(self, y_scale: np.ndarray, y_zero: np.ndarray, low, high) -> np.ndarray:
        if self.pixels:
            multiplier = (self.scale / (y_scale * F32(self.pixels))).astype(F32)
        else:
            multiplier = (self.scale / y_scale).astype(F32)
        return _to_code(np.rint(self.acc.astype(F32) * multiplier) + y_zero.astype(F32), low, high)


@dataclass(frozen=True)
class Share(Sum):
    """exp of the distances from a row's largest number, in units of 2^-24; `scale` holds the rows' sums."""

    def codes(self, y_scale: np.ndarray, y_zero: np.ndarray, low, high) -> np.ndarray:
        multiplier = F32(1) / (self.scale.astype(F32) * y_scale)
        return _to_code(np.rint(self.acc.astype(F32) * multiplier) + y_zero.astype(F32), low, high)


@dataclass(frozen=True)
class Blend(Sum):
    """Numbers of an image, `acc` in units of its scale, that a Resize has put together in float32."""

    def codes(self, y_scale: np.ndarray, y_zero: np.ndarray, low, high) -> np.ndarray:
        return _to_code(np.rint(self.acc * (self.scale / y_scale)) + y_zero.astype(F32), low, high)


@dataclass(frozen=True)
class Value:
    array: np.ndarray
    type: int  # ONNX element type; tells int4 from int8
    grid: Grid | None = None
    sum: Sum | None = None


def _to_code(rounded: np.ndarray, low, high) -> np.ndarray:
    return np.where(np.isnan(rounded), low, np.clip(rounded, low, high)).astype(np.int64)


def quantize(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, low: int, high: int) -> np.ndarray:
    """`clip(rint(x / scale) + zero, low, high)` in float32, real division, half to even."""
    with np.errstate(all="ignore"):
        return _to_code(np.rint(x.astype(F32) / scale.astype(F32)) + zero.astype(F32), low, high)


def _attributes(node: onnx.NodeProto) -> dict:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _from_tensor(tensor: TensorProto) -> Value:
    array = numpy_helper.to_array(tensor)
    if tensor.data_type in _CONTAINERS:
        array = array.astype(_CONTAINERS[tensor.data_type])
    return Value(array, tensor.data_type)


def _align(parameter: np.ndarray, rank: int, axis: int) -> np.ndarray:
    """A scalar, [1], [C] or full-rank parameter, shaped to broadcast along `axis`."""
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.ndim == rank and rank > 1:
        return parameter
    shape = [1] * rank
    shape[axis] = -1
    return parameter.reshape(shape)


class Oracle:
    """Executes one graph; `values` holds every tensor afterwards."""

    def __init__(
        self, model: onnx.ModelProto, graph: onnx.GraphProto | None = None, outer: Oracle | None = None
    ):
        self.model = model
        self.graph = model.graph if graph is None else graph
        self.values: dict[str, Value | None] = {} if outer is None else dict(outer.values)
        self.values[""] = None
        self.opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
        self.producers = {} if outer is None else dict(outer.producers)
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            self.producers.update(dict.fromkeys(node.output, node))
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.results = {o.name for o in self.graph.output}
        self.constants = {t.name for t in self.graph.initializer}
        self.values.update({t.name: _from_tensor(t) for t in self.graph.initializer})

    def run(self, feeds: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        for name, array in (feeds or {}).items():
            self.values[name] = Value(
                np.asarray(array), helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
            )
        for node in self.graph.node:
            outputs = self._execute(node)
            self.values.update(zip(node.output, outputs, strict=False))
        return {o.name: self.values[o.name].array for o in self.graph.output}

    # -- dispatch
    def _execute(self, node: onnx.NodeProto) -> list[Value]:
        inputs = [self.values[name] for name in node.input]
        attributes = _attributes(node)
        special = getattr(self, f"_{node.op_type}", None)
        if special is not None and node.domain in ("", "ai.onnx", "com.microsoft"):
            return [*special(node, inputs, attributes)]
        outputs = self._plain(node, [None if v is None else v.array for v in inputs])
        values = [Value(a, helper.np_dtype_to_tensor_dtype(a.dtype)) for a in outputs]
        if node.op_type in _MOVES and inputs[0].type in _CONTAINERS:
            values = [replace(v, type=inputs[0].type) for v in values]
        return self._carry_grid(node, inputs, attributes, values)

    def _carry_grid(self, node, inputs, attributes, values) -> list[Value]:
        """Codes follow their values through operators that only move (or pick, for MaxPool and Relu) them."""
        if not inputs or inputs[0] is None or inputs[0].grid is None:
            return values
        grid = inputs[0].grid
        rest = [None if v is None else v.array for v in inputs[1:]]
        uniform = grid.scale.ndim == 0
        moved = node.op_type in _MOVES
        if uniform and not moved:
            moved = (
                node.op_type in ("MaxPool", "ReduceMax", "ReduceMin", "Relu")
                or self._is_nearest(node, attributes)
                or self._pads_zero(node, inputs, attributes)
            )
        elif not moved and node.op_type == "MaxPool":  # which compares within channels
            moved = [axis for axis, size in enumerate(grid.scale.shape) if size > 1] == [1]
        if moved:
            codes = self._plain(node, [grid.codes.astype(F32), *rest])
            scales = [grid.scale] * len(codes)
            if not uniform:
                scales = self._plain(node, [np.broadcast_to(grid.scale, grid.codes.shape).copy(), *rest])
            return [
                replace(v, grid=Grid(c.astype(np.int64), s))
                for v, c, s in zip(values, codes, scales, strict=False)
            ]
        if node.op_type == "Cast" and np.array_equal(
            values[0].array.astype(np.float64), inputs[0].array.astype(np.float64)
        ):
            return [replace(values[0], grid=grid)]
        if node.op_type == "Concat" and all(
            v.grid is not None and v.grid.scale.ndim == 0 and v.grid.scale == grid.scale for v in inputs
        ):
            codes = np.concatenate([v.grid.codes for v in inputs], axis=attributes["axis"])
            return [replace(values[0], grid=Grid(codes, grid.scale))]
        return values

    @staticmethod
    def _is_nearest(node, attributes) -> bool:
        return node.op_type in ("Resize", "Upsample") and attributes.get("mode", b"nearest") == b"nearest"

    @staticmethod
    def _pads_zero(node, inputs, attributes) -> bool:
        if node.op_type != "Pad":
            return False
        given = len(inputs) > 2 and inputs[2] is not None
        return (
            attributes.get("mode", b"constant") != b"constant" or not given or float(inputs[2].array) == 0.0
        )

    def _plain(self, node: onnx.NodeProto, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        """One node in ONNX Runtime, without optimizations."""
        names = [f"i{k}" if a is not None else "" for k, a in enumerate(arrays)]
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:], copy.output[:]
        copy.input.extend(names)
        copy.output.extend(f"o{k}" for k in range(len(node.output)))
        copy.name = ""
        given = [(n, np.asarray(a)) for n, a in zip(names, arrays, strict=True) if n]
        # Shapes, axes, sizes are constants in every exporter's graph, and shape inference wants to see them.
        fixed = tuple((n, a.shape, a.tobytes()) for n, a in given if a.dtype == np.int64)
        types = tuple(
            (n, helper.np_dtype_to_tensor_dtype(a.dtype), a.ndim) for n, a in given if a.dtype != np.int64
        )
        session = _session(copy.SerializeToString(deterministic=True), types, fixed, self.opset)
        return session.run(None, {n: a for n, a in given if a.dtype != np.int64})

    def _Sigmoid(self, node, inputs, attributes) -> list[Value]:
        """Of numbers that are no codes, beside a Mul of both: the float32 definition of a tail's SiLU."""
        readers = [consumer.op_type for consumer in self.consumers.get(node.input[0], [])]
        if inputs[0].grid is not None or sorted(readers) != ["Mul", "Sigmoid"]:
            return [Value(*self._plain(node, [inputs[0].array]), TensorProto.FLOAT)]
        t = np.clip(-inputs[0].array, F32(-86), F32(86))
        n = np.rint(t * F32(1.44269504088896341))
        r = (t - n * F32(0.693359375)) + n * F32(2.12194440e-4)
        p = np.full_like(r, 1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + F32(c)
        exponential = np.ldexp((p * (r * r) + r) + F32(1), n.astype(np.int32))
        return [Value(F32(1) / (F32(1) + exponential), TensorProto.FLOAT)]

    # -- quantization
    def _QuantizeLinear(self, node, inputs, attributes) -> list[Value]:
        x, scale = inputs[0].array, inputs[1].array
        zero = inputs[2] if len(inputs) > 2 else None
        kind = attributes.get("output_dtype", 0) or (TensorProto.UINT8 if zero is None else zero.type)
        if attributes.get("block_size", 0) or kind not in _RANGES:
            raise NotImplementedError(f"QuantizeLinear to {TensorProto.DataType.Name(kind)}, or blocked")
        axis = attributes.get("axis", 1)
        low, high = _RANGES[kind]
        scale = _align(scale.astype(F32), x.ndim, axis)
        shift = _align(np.zeros(1) if zero is None else zero.array, x.ndim, axis).astype(F32)
        codes = self._codes_of_a_sum(node, scale, shift, low, high)
        if codes is None:
            codes = quantize(x, scale, shift, low, high)
        return [Value(codes.astype(_CONTAINERS[kind]), kind)]

    def _codes_of_a_sum(self, node, scale, shift, low, high) -> np.ndarray | None:
        """The two formulas of the module's docstring, where they apply to this QuantizeLinear; else None."""
        name, between = node.input[0], []
        while True:
            producer = self.producers.get(name)
            if producer is None or not self._feeds_quantizers_only(name):
                return None
            if producer.op_type in _MOVES | {"Relu", "Clip"}:
                between.append(producer)
                name = producer.input[0]
                continue
            break
        source = self.values[name]
        if source.sum is None:
            return None
        moves = [n for n in reversed(between) if n.op_type in _MOVES]
        if moves and (scale.ndim or len(source.sum.acc.shape) == 0):
            return None
        for step in reversed(between):  # graph order: a later bound is the outer one
            if step.op_type not in ("Relu", "Clip"):
                continue
            least, most = self._bounds(step)
            if least is not None:
                bound = quantize(np.asarray(least, F32), scale, shift, low, high)
                low, high = np.maximum(low, bound), np.maximum(high, bound)
            if most is not None:
                bound = quantize(np.asarray(most, F32), scale, shift, low, high)
                low, high = np.minimum(low, bound), np.minimum(high, bound)
        codes = source.sum.codes(scale, shift, low, high)
        for move in moves:
            rest = [None if not n else self.values[n].array for n in move.input[1:]]
            outputs = self._plain(move, [codes.astype(F32), *rest])
            codes = outputs[list(move.output).index(self._next_name(move, between, node))].astype(np.int64)
        return codes

    def _next_name(self, move, between, node) -> str:
        """Which output of `move` the chain towards `node` uses."""
        chain = [*reversed(between), node]
        return next(n for n in chain[chain.index(move) + 1].input if n in move.output)

    def _bounds(self, node) -> tuple[float | None, float | None]:
        if node.op_type == "Relu":
            return 0.0, None
        attributes = _attributes(node)
        if "min" in attributes or "max" in attributes:
            return attributes.get("min"), attributes.get("max")
        values = [self.values[n] if n else None for n in node.input[1:]]
        values += [None] * (2 - len(values))
        return tuple(None if v is None else F32(v.array.reshape(())) for v in values)

    def _feeds_quantizers_only(self, name: str) -> bool:
        """Whether a float tensor ends in QuantizeLinear nodes alone, through bounds and data movement."""
        if name in self.results:
            return False
        return all(
            c.op_type == "QuantizeLinear"
            or (
                c.op_type in _MOVES | {"Relu", "Clip"}
                and all(self._feeds_quantizers_only(o) for o in c.output)
            )
            for c in self.consumers.get(name, [])
        )

    def _DequantizeLinear(self, node, inputs, attributes) -> list[Value]:
        q, scale = inputs[0].array, inputs[1].array
        if attributes.get("block_size", 0) or inputs[0].type not in (*_RANGES, TensorProto.INT32):
            return [
                Value(a, helper.np_dtype_to_tensor_dtype(a.dtype)) for a in self._with_types(node, inputs)
            ]
        axis = attributes.get("axis", 1)
        codes = q.astype(np.int64)
        if len(inputs) > 2 and inputs[2] is not None:
            codes = codes - _align(inputs[2].array.astype(np.int64), q.ndim, axis)
        scale = _align(scale, q.ndim, axis)
        wide = scale.astype(F32)
        value = (codes.astype(F32) * wide).astype(scale.dtype)
        exact = scale.dtype == F32 or np.array_equal(
            value.astype(np.float64), codes * wide.astype(np.float64)
        )
        return [
            Value(value, helper.np_dtype_to_tensor_dtype(value.dtype), Grid(codes, wide) if exact else None)
        ]

    def _with_types(self, node, inputs) -> list[np.ndarray]:
        """A DequantizeLinear of a type numpy cannot feed: its constants become initializers."""
        tensors, names = [], []
        for k, value in enumerate(inputs):
            names.append(f"i{k}" if value is not None else "")
            if value is not None:
                tensors.append(
                    helper.make_tensor(names[-1], value.type, value.array.shape, value.array.reshape(-1))
                )
        copy = helper.make_node("DequantizeLinear", names, ["y"], domain=node.domain, **_attributes(node))
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        model = helper.make_model(
            helper.make_graph([copy], "one", [], [output], tensors), opset_imports=self.model.opset_import
        )
        model.ir_version = self.model.ir_version
        return ort.InferenceSession(model.SerializeToString(), _options()).run(None, {})

    # -- products
    def _product(
        self, total: np.ndarray, scale: np.ndarray, bias: Value | None, shape, factor: float = 1.0
    ) -> Value:
        """Scale and bias of an exact sum: an integer bias on the sum's own grid joins it, else floats add."""
        if bias is not None and bias.grid is not None and factor == 1.0:
            bias_scale = np.broadcast_to(bias.grid.scale, bias.grid.codes.shape).reshape(shape)
            if np.array_equal(
                np.broadcast_to(scale, np.broadcast_shapes(scale.shape, bias_scale.shape)), bias_scale
            ) or (
                bias_scale.size == 1
                and scale.size == 1
                and float(bias_scale.reshape(())) == float(scale.reshape(()))
            ):
                total = total + bias.grid.codes.reshape(shape)
                bias = None
        result = Sum(total, scale)
        if bias is None or not np.any(bias.array):
            return Value(result.real(), TensorProto.FLOAT, sum=result)
        added = bias.array.reshape(shape)
        if factor != 1.0:
            added = F32(factor) * added
        return Value(result.real() + added, TensorProto.FLOAT)

    def _Conv(self, node, inputs, attributes, transposed: bool = False) -> list[Value]:
        x, w = inputs[0], inputs[1]
        bias = inputs[2] if len(inputs) > 2 else None
        group = attributes.get("group", 1)
        rank = x.array.ndim - 2
        geometry = _geometry(x.array.shape, w.array.shape, attributes, transposed)
        run = _transposed_sum if transposed else _window_sum
        channels = w.array.shape[1] * group if transposed else w.array.shape[0]
        shape = (-1,) + (1,) * rank
        scales = _conv_scales(x.grid, w.grid, group, channels, transposed) if x.grid and w.grid else None
        if scales is None:
            real = run(x.array.astype(np.float64), w.array.astype(np.float64), group, geometry)
            if bias is not None:
                real = real + bias.array.reshape(shape)
            return [Value(real.astype(x.array.dtype), x.type)]
        total = run(x.grid.codes.astype(np.float64), w.grid.codes.astype(np.float64), group, geometry).astype(
            np.int64
        )
        return [self._product(total, scales.reshape(shape) if scales.ndim else scales, bias, shape)]

    def _ConvTranspose(self, node, inputs, attributes) -> list[Value]:
        return self._Conv(node, inputs, attributes, transposed=True)

    def _MatMul(self, node, inputs, attributes) -> list[Value]:
        return [self._matrix(inputs[0], inputs[1], None, 1.0, 1.0)]

    def _Gemm(self, node, inputs, attributes) -> list[Value]:
        a, b = (
            self._swap(v) if attributes.get(flag, 0) else v
            for v, flag in zip(inputs, ("transA", "transB"), strict=False)
        )
        bias = inputs[2] if len(inputs) > 2 else None
        return [self._matrix(a, b, bias, attributes.get("alpha", 1.0), attributes.get("beta", 1.0))]

    @staticmethod
    def _swap(value: Value) -> Value:
        grid = value.grid
        if grid is not None:
            grid = Grid(grid.codes.T, grid.scale.T)
        return replace(value, array=value.array.T, grid=grid)

    def _matrix(self, a: Value, b: Value, bias: Value | None, alpha: float, beta: float) -> Value:
        scale = None
        if a.grid is not None and b.grid is not None and a.grid.scale.ndim == 0:
            scale = _constant_along(b.grid, -2)
        if scale is None:
            real = F32(alpha) * np.matmul(a.array.astype(np.float64), b.array.astype(np.float64))
            if bias is not None:
                real = real + F32(beta) * bias.array
            return Value(real.astype(F32), TensorProto.FLOAT)
        total = np.matmul(a.grid.codes.astype(np.float64), b.grid.codes.astype(np.float64)).astype(np.int64)
        scale = (F32(F32(alpha) * a.grid.scale) * scale).astype(F32)
        return self._product(total, scale, bias, bias.array.shape if bias is not None else None, beta)

    def _Add(self, node, inputs, attributes) -> list[Value]:
        """A constant added to a product without a bias is its bias, as in MatMul -> Add."""
        for k, (source, constant) in enumerate((inputs, inputs[::-1])):
            producer = self.producers.get(node.input[k])
            if (
                source.sum is None
                or producer.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul")
                or len(producer.input) > 2
                or not self._is_constant(node.input[1 - k])
            ):
                continue
            shape = (1,) * (source.array.ndim - constant.array.ndim) + constant.array.shape
            return [self._product(source.sum.acc, source.sum.scale, constant, shape)]
        (result,) = self._plain(node, [v.array for v in inputs])
        return [Value(result, helper.np_dtype_to_tensor_dtype(result.dtype))]

    def _is_constant(self, name: str) -> bool:
        producer = self.producers.get(name)
        if producer is None:
            return name in self.constants
        return producer.op_type in ("Constant", "DequantizeLinear") and all(
            map(self._is_constant, producer.input)
        )

    # -- sums of floats
    def _AveragePool(self, node, inputs, attributes) -> list[Value]:
        """Columns from the front and the top, then columns from the left, float32; one division."""
        x = inputs[0].array
        rank = x.ndim - 2
        kernel = attributes["kernel_shape"]
        size, strides, _, begin, end = _pool_geometry(x.shape, attributes)
        widths = [(0, 0), (0, 0)] + [
            (begin[i], max(0, (size[i] - 1) * strides[i] + kernel[i] - x.shape[2 + i] - begin[i]))
            for i in range(rank)
        ]
        padded = np.pad(x, widths)
        inside = np.pad(np.ones(x.shape[2:], F32), widths[2:])
        if attributes.get("count_include_pad", 0):
            inside[...] = 0
            inside[tuple(slice(0, begin[i] + x.shape[2 + i] + end[i]) for i in range(rank))] = 1

        def window(array: np.ndarray, tap: tuple[int, ...]) -> np.ndarray:
            where = [slice(t, t + (size[i] - 1) * strides[i] + 1, strides[i]) for i, t in enumerate(tap)]
            return array[(..., *where)]

        total = count = np.zeros(1, F32)
        for column in range(kernel[-1]):
            part = np.zeros(1, F32)
            for row in np.ndindex(*kernel[:-1]):
                tap = (*row, column)
                part = part + window(padded, tap)
                count = count + window(inside, tap)
            total = total + part
        return [Value((total / count).astype(F32), TensorProto.FLOAT)]

    def _mean(self, value: Value, axes: tuple[int, ...], keepdims: bool) -> Value:
        pixels = int(np.prod([value.array.shape[a] for a in axes]))
        if value.grid is None or value.grid.scale.ndim:
            mean = value.array.astype(np.float64).mean(axis=axes, keepdims=keepdims)
            return Value(mean.astype(F32), TensorProto.FLOAT)
        result = Sum(value.grid.codes.sum(axis=axes, keepdims=keepdims), value.grid.scale, pixels)
        return Value(result.real(), TensorProto.FLOAT, sum=result)

    def _GlobalAveragePool(self, node, inputs, attributes) -> list[Value]:
        return [self._mean(inputs[0], tuple(range(2, inputs[0].array.ndim)), True)]

    def _ReduceMean(self, node, inputs, attributes) -> list[Value]:
        axes = attributes.get("axes")
        if axes is None and len(inputs) > 1 and inputs[1] is not None:
            axes = inputs[1].array.tolist()
        rank = inputs[0].array.ndim
        axes = tuple(sorted(a % rank for a in (range(rank) if axes is None else axes)))
        if rank < 3 or len(axes) != rank - 2 or 0 in axes:  # not a mean over all pixels
            arrays = [None if v is None else v.array for v in inputs]
            return [Value(a, helper.np_dtype_to_tensor_dtype(a.dtype)) for a in self._plain(node, arrays)]
        return [self._mean(inputs[0], axes, bool(attributes.get("keepdims", 1)))]

    def _Softmax(self, node, inputs, attributes) -> list[Value]:
        x, grid = inputs[0], inputs[0].grid
        (real,) = self._plain(node, [x.array])
        axis = attributes.get("axis", -1)
        if grid is None or grid.scale.ndim or self.opset < 13:
            return [Value(real, TensorProto.FLOAT)]
        distance = grid.codes.max(axis=axis, keepdims=True) - grid.codes
        parts = np.rint(np.exp(-distance * grid.scale.astype(np.float64)) * (1 << 24)).astype(np.int64)
        total = np.broadcast_to(parts.sum(axis=axis, keepdims=True), parts.shape)
        return [Value(real, TensorProto.FLOAT, sum=Share(parts, total))]

    def _Resize(self, node, inputs, attributes) -> list[Value]:
        arrays = [None if v is None else v.array for v in inputs]
        (real,) = self._plain(node, arrays)
        value = Value(real, helper.np_dtype_to_tensor_dtype(real.dtype))
        grid, mode = inputs[0].grid, attributes.get("mode", b"nearest").decode()
        if mode == "nearest" or grid is None or grid.scale.ndim or attributes.get("antialias", 0):
            return self._carry_grid(node, inputs, attributes, [value])
        scales = arrays[2] if len(arrays) > 2 and arrays[2] is not None and arrays[2].size else None
        numbers = grid.codes.astype(F32)
        for axis in range(2, real.ndim):
            out, size = real.shape[axis], numbers.shape[axis]
            scale = None if scales is None else F32(scales[axis])
            taps = [self._taps(o, size, out, scale, mode, attributes) for o in range(out)]
            lines = []
            for line in taps:
                terms = [numbers.take(min(max(i, 0), size - 1), axis) * w for i, w in line]
                lines.append(functools.reduce(np.add, terms))
            numbers = np.stack(lines, axis)
        return [replace(value, sum=Blend(numbers, grid.scale))]

    @staticmethod
    def _taps(o: int, size: int, out: int, scale, mode: str, attributes) -> list[tuple[int, np.float32]]:
        """Which pixels an output index of a Resize reads, and with which weights."""
        kind = attributes.get("coordinate_transformation_mode", b"half_pixel").decode()
        ratio = F32(out) / F32(size) if scale is None else scale
        half, one = F32(0.5), F32(1)
        if kind == "asymmetric":
            p = F32(o) * F32(size) / F32(out) if scale is None else F32(o) / ratio
        elif kind == "align_corners":
            p = F32(o) * F32(size - 1) / F32(out - 1) if out > 1 else F32(0)
        elif kind == "pytorch_half_pixel" and out == 1:
            p = F32(0)
        elif kind == "half_pixel_symmetric":
            begin = F32(size) / F32(2) * (one - F32(out) / (ratio * F32(size)))
            p = F32(float(begin) + (o + 0.5) / float(ratio) - 0.5)
        else:
            p = (F32(o) + half) / ratio - half
        if mode == "linear":
            p = min(max(p, F32(0)), F32(size - 1))
        first = int(np.floor(p))
        f = p - F32(first)
        if mode == "linear":
            return [(first, one - f), (first + 1, f)]
        a = F32(attributes.get("cubic_coeff_a", -0.75))
        weights = []
        for distance in (f + one, f, one - f, one - f + one):
            if len(weights) in (1, 2):
                near = (a + F32(2)) * distance - (a + F32(3))
                weights.append(near * distance * distance + one)
            else:
                far = (a * distance - F32(5) * a) * distance + F32(8) * a
                weights.append(far * distance - F32(4) * a)
        indices = range(first - 1, first + 3)
        if attributes.get("exclude_outside", 0):
            weights = [w if 0 <= i < size else F32(0) for i, w in zip(indices, weights, strict=True)]
            total = functools.reduce(np.add, weights)
            weights = [w / total for w in weights]
        return list(zip(indices, weights, strict=True))

    def _BatchNormalization(self, node, inputs, attributes) -> list[Value]:
        x, gamma, beta, mean, variance = (v.array for v in inputs[:5])
        inverse = F32(1) / np.sqrt(variance + F32(attributes.get("epsilon", 1e-5)))
        slope = gamma * inverse
        shift = beta - mean * slope
        shape = (-1,) + (1,) * (x.ndim - 2)
        return [Value(x * slope.reshape(shape) + shift.reshape(shape), TensorProto.FLOAT)]

    # -- ONNX Runtime's operator form: DequantizeLinear, the float operator, QuantizeLinear in one
    def _read(self, operand: list[Value | None], axis: int = 1) -> Value:
        """The real numbers of an operand: codes, scale, zero point."""
        return self._DequantizeLinear(None, operand, {"axis": axis})[0]

    def _written(self, result: Value, y: list[Value | None], like: Value) -> list[Value]:
        """A result as codes of y's scale and zero point; its type is `like`'s where the latter is absent."""
        scale, zero = [*y, None][:2]
        kind = like.type if zero is None else zero.type
        shift = np.zeros((), F32) if zero is None else zero.array.reshape(()).astype(F32)
        low, high = _RANGES[kind]
        step = scale.array.reshape(()).astype(F32)
        if result.sum is not None:
            codes = result.sum.codes(step, shift, low, high)
        else:
            codes = quantize(result.array, step, shift, low, high)
        return [Value(codes.astype(_CONTAINERS[kind]), kind)]

    def _turned(self, value: Value, perm: list[int]) -> Value:
        """Also moves what is known about the values."""
        grid, total = value.grid, value.sum
        if grid is not None:
            grid = Grid(grid.codes.transpose(perm), grid.scale)
        if total is not None:
            scale = total.scale if total.scale.size == 1 else np.broadcast_to(total.scale, total.acc.shape)
            scale = scale if scale.size == 1 else scale.transpose(perm)
            total = replace(total, acc=total.acc.transpose(perm), scale=scale)
        return replace(value, array=value.array.transpose(perm), grid=grid, sum=total)

    def _first(self, value: Value, attributes) -> Value:
        rank = value.array.ndim
        last = attributes.get("channels_last", 0)
        return self._turned(value, [0, rank - 1, *range(1, rank - 1)]) if last else value

    def _last(self, value: Value, attributes) -> Value:
        rank = value.array.ndim
        return self._turned(value, [0, *range(2, rank), 1]) if attributes.get("channels_last", 0) else value

    @staticmethod
    def _int_bias(codes: Value | None, x: Value, w: Value, alpha: float = 1.0) -> Value | None:
        if codes is None:
            return None
        scale = (F32(F32(alpha) * x.array) * w.array).astype(F32).reshape(-1)
        scale = scale.reshape(()) if scale.size == 1 else scale
        shape = np.broadcast_shapes(codes.array.shape, scale.shape)
        integers = np.broadcast_to(codes.array.astype(np.int64), shape)
        return Value(integers * scale, TensorProto.FLOAT, Grid(integers, scale))

    def _QLinearConv(self, node, inputs, attributes) -> list[Value]:
        bias = self._int_bias(inputs[8] if len(inputs) > 8 else None, inputs[1], inputs[4])
        x, w = self._first(self._read(inputs[:3]), attributes), self._read(inputs[3:6], 0)
        (y,) = self._Conv(node, [x, w, bias], attributes)
        return self._written(self._last(y, attributes), inputs[6:8], inputs[0])

    def _QLinearMatMul(self, node, inputs, attributes) -> list[Value]:
        a, b = self._read(inputs[:3]), self._read(inputs[3:6], inputs[3].array.ndim - 1)
        return self._written(self._matrix(a, b, None, 1.0, 1.0), inputs[6:8], inputs[0])

    def _QGemm(self, node, inputs, attributes) -> list[Value]:
        inputs = [*inputs, *[None] * (9 - len(inputs))]
        alpha = attributes.get("alpha", 1.0)
        bias = self._int_bias(inputs[6], inputs[1], inputs[4], alpha)
        b = self._read(inputs[3:6], 0 if attributes.get("transB", 0) else 1)
        (y,) = self._Gemm(node, [self._read(inputs[:3]), b, bias], attributes)
        if inputs[7] is None:
            return [y]
        return self._written(y, inputs[7:9], inputs[0])

    def _MatMulIntegerToFloat(self, node, inputs, attributes) -> list[Value]:
        inputs = [*inputs, *[None] * (7 - len(inputs))]
        a, b = self._read(inputs[0:5:2]), self._read(inputs[1:6:2], 1)
        y = self._matrix(a, b, None, 1.0, 1.0)
        return [y if inputs[6] is None else Value(y.array + inputs[6].array, TensorProto.FLOAT)]

    def _ConvInteger(self, node, inputs, attributes) -> list[Value]:
        x, w = self._differences(inputs, 0)
        (y,) = self._Conv(node, [x, w, None], attributes)
        return [Value(y.sum.acc.astype(np.int32), TensorProto.INT32)]

    def _MatMulInteger(self, node, inputs, attributes) -> list[Value]:
        a, b = self._differences(inputs, 1)
        total = np.matmul(a.grid.codes, b.grid.codes)
        return [Value(total.astype(np.int32), TensorProto.INT32)]

    @staticmethod
    def _differences(inputs: list[Value | None], axis: int) -> list[Value]:
        """Both operands less their zero points, on a grid of scale 1."""
        values = []
        for operand, zero in zip(inputs, [*inputs[2:], None, None], strict=False):
            shift = np.zeros(1) if zero is None else zero.array.astype(np.int64)
            codes = operand.array.astype(np.int64) - _align(shift, operand.array.ndim, axis).astype(np.int64)
            values.append(Value(codes.astype(F32), TensorProto.FLOAT, Grid(codes, np.ones((), F32))))
        return values[:2]

    def _binary(self, op: str, inputs) -> list[Value]:
        a, b = self._read(inputs[:3]), self._read(inputs[3:6])
        (y,) = self._plain(helper.make_node(op, ["a", "b"], ["y"]), [a.array, b.array])
        return self._written(Value(y, TensorProto.FLOAT), inputs[6:8], inputs[0])

    def _QLinearAdd(self, node, inputs, attributes) -> list[Value]:
        return self._binary("Add", inputs)

    def _QLinearMul(self, node, inputs, attributes) -> list[Value]:
        return self._binary("Mul", inputs)

    def _unary(self, op: str, inputs, **attributes) -> list[Value]:
        (y,) = self._plain(helper.make_node(op, ["x"], ["y"], **attributes), [self._read(inputs[:3]).array])
        return self._written(Value(y, TensorProto.FLOAT), inputs[3:5], inputs[0])

    def _QLinearLeakyRelu(self, node, inputs, attributes) -> list[Value]:
        return self._unary("LeakyRelu", inputs, **attributes)

    def _QLinearSigmoid(self, node, inputs, attributes) -> list[Value]:
        return self._unary("Sigmoid", inputs)

    def _QLinearSoftmax(self, node, inputs, attributes) -> list[Value]:
        return self._unary("Softmax", inputs, axis=attributes["axis"])

    def _QLinearConcat(self, node, inputs, attributes) -> list[Value]:
        parts = [self._read(inputs[i : i + 3]).array for i in range(2, len(inputs), 3)]
        joined = Value(np.concatenate(parts, attributes["axis"]), TensorProto.FLOAT)
        return self._written(joined, inputs[:2], inputs[2])

    def _QLinearWhere(self, node, inputs, attributes) -> list[Value]:
        x, y = self._read(inputs[1:4]), self._read(inputs[4:7])
        chosen = Value(np.where(inputs[0].array, x.array, y.array), TensorProto.FLOAT)
        return self._written(chosen, inputs[7:9], inputs[1])

    def _NhwcMaxPool(self, node, inputs, attributes) -> list[Value]:
        first = self._turned(inputs[0], [0, inputs[0].array.ndim - 1, *range(1, inputs[0].array.ndim - 1)])
        (y,) = self._plain(helper.make_node("MaxPool", ["x"], ["y"], **attributes), [first.array])
        return [self._last(Value(y, inputs[0].type), {"channels_last": 1})]

    def _QLinearAveragePool(self, node, inputs, attributes) -> list[Value]:
        (y,) = self._AveragePool(node, [self._first(self._read(inputs[:3]), attributes)], attributes)
        return self._written(self._last(y, attributes), inputs[3:5], inputs[0])

    def _QLinearGlobalAveragePool(self, node, inputs, attributes) -> list[Value]:
        rank, last = inputs[0].array.ndim, attributes.get("channels_last", 0)
        y = self._mean(self._read(inputs[:3]), tuple(range(1, rank - 1) if last else range(2, rank)), True)
        return self._written(y, inputs[3:5], inputs[0])

    def _QLinearReduceMean(self, node, inputs, attributes) -> list[Value]:
        y = self._mean(self._read(inputs[:3]), tuple(attributes["axes"]), bool(attributes["keepdims"]))
        return self._written(y, inputs[3:5], inputs[0])

    # -- structure
    def _Constant(self, node, inputs, attributes) -> list[Value]:
        if "value" in attributes:
            return [_from_tensor(attributes["value"])]
        (value,) = attributes.values()
        array = np.asarray(
            value, F32 if isinstance(value, float) or "float" in node.attribute[0].name else np.int64
        )
        return [Value(array, helper.np_dtype_to_tensor_dtype(array.dtype))]

    def _If(self, node, inputs, attributes) -> list[Value]:
        branch = attributes["then_branch" if bool(inputs[0].array) else "else_branch"]
        inner = Oracle(self.model, branch, self)
        inner.run()
        return [inner.values[o.name] for o in branch.output]


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


@functools.lru_cache(maxsize=2000)
def _session(node: bytes, types: tuple, fixed: tuple, opset: int) -> ort.InferenceSession:
    proto = onnx.NodeProto.FromString(node)
    inputs = [helper.make_tensor_value_info(name, kind, [None] * rank) for name, kind, rank in types]
    constants = [numpy_helper.from_array(np.frombuffer(raw, np.int64).reshape(s), n) for n, s, raw in fixed]
    outputs = [onnx.ValueInfoProto(name=o) for o in proto.output]
    graph = helper.make_graph([proto], "one", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", opset)]
    if proto.domain:
        opsets.append(helper.make_opsetid(proto.domain, 1))
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 13 if opset >= 25 else 10
    return ort.InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])


def _constant_along(grid: Grid, axis: int) -> np.ndarray | None:
    """The scale with `axis` taken off, or None where it varies along it."""
    if grid.scale.ndim == 0:
        return grid.scale
    full = np.broadcast_to(grid.scale, grid.codes.shape)
    first = np.take(full, [0], axis=axis)
    if not np.array_equal(full, np.broadcast_to(first, full.shape)):
        return None
    return np.squeeze(first, axis=axis)


def _conv_scales(x: Grid, w: Grid, group: int, channels: int, transposed: bool) -> np.ndarray | None:
    """f32(sx * sw) per output channel (or a scalar), or None where a scale varies inside a sum."""
    sx = x.scale
    if sx.ndim:
        full = np.moveaxis(np.broadcast_to(sx, x.codes.shape), 1, 0).reshape(group, -1)
        if not np.array_equal(full, np.broadcast_to(full[:, :1], full.shape)):
            return None
        sx = np.repeat(full[:, 0], channels // group)
    sw = w.scale
    if sw.ndim:
        full = np.broadcast_to(sw, w.codes.shape)
        if transposed:  # [in, out / group, ...] -> one row per output channel
            full = full.reshape(group, full.shape[0] // group, full.shape[1], -1).transpose(0, 2, 1, 3)
        full = full.reshape(channels, -1)
        if not np.array_equal(full, np.broadcast_to(full[:, :1], full.shape)):
            return None
        sw = full[:, 0]
    return (sx * sw).astype(F32)


def _geometry(x_shape, w_shape, attributes, transposed: bool):
    """(output size, strides, dilations, begin pads, end pads), each a list over the spatial dims."""
    rank = len(x_shape) - 2
    strides = list(attributes.get("strides", [1] * rank))
    dilations = list(attributes.get("dilations", [1] * rank))
    pads = list(attributes.get("pads", [0] * 2 * rank))
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    reach = [(w_shape[2 + i] - 1) * dilations[i] + 1 for i in range(rank)]
    begin, end = pads[:rank], pads[rank:]
    if mode == "VALID":
        begin, end = [0] * rank, [0] * rank
    if transposed:
        extra = list(attributes.get("output_padding", [0] * rank))
        wanted = attributes.get("output_shape") or (
            [x_shape[2 + i] * strides[i] for i in range(rank)] if mode.startswith("SAME") else None
        )
        if wanted:
            for i in range(rank):
                total = max(0, strides[i] * (x_shape[2 + i] - 1) + extra[i] + reach[i] - wanted[i])
                half = total // 2
                begin[i], end[i] = (half, total - half) if mode == "SAME_UPPER" else (total - half, half)
        size = [
            strides[i] * (x_shape[2 + i] - 1) + extra[i] + reach[i] - begin[i] - end[i] for i in range(rank)
        ]
        return size, strides, dilations, begin, end
    if mode.startswith("SAME"):
        for i in range(rank):
            out = -(-x_shape[2 + i] // strides[i])
            total = max(0, (out - 1) * strides[i] + reach[i] - x_shape[2 + i])
            half = total // 2
            begin[i], end[i] = (half, total - half) if mode == "SAME_UPPER" else (total - half, half)
    size = [(x_shape[2 + i] + begin[i] + end[i] - reach[i]) // strides[i] + 1 for i in range(rank)]
    return size, strides, dilations, begin, end


def _pool_geometry(x_shape, attributes):
    kernel = attributes["kernel_shape"]
    size, strides, dilations, begin, end = _geometry(x_shape, (0, 0, *kernel), attributes, False)
    if attributes.get("ceil_mode", 0):
        for i in range(len(kernel)):
            span = x_shape[2 + i] + begin[i] + end[i] - kernel[i]
            size[i] = -(-span // strides[i]) + 1
            if (size[i] - 1) * strides[i] >= x_shape[2 + i] + begin[i]:
                size[i] -= 1
    return size, strides, dilations, begin, end


def _window_sum(x: np.ndarray, w: np.ndarray, group: int, geometry) -> np.ndarray:
    """Convolution in float64, exact for integers below 2^53."""
    size, strides, dilations, begin, end = geometry
    rank = len(size)
    x = np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    windows = np.lib.stride_tricks.sliding_window_view(
        x, [(w.shape[2 + i] - 1) * dilations[i] + 1 for i in range(rank)], axis=tuple(range(2, 2 + rank))
    )
    steps = [slice(None, None, step) for step in (*strides, *dilations)]
    windows = windows[(slice(None), slice(None), *steps)]
    parts = []
    inputs, outputs = x.shape[1] // group, w.shape[0] // group
    taps = tuple(range(2 + rank, 2 + 2 * rank))
    for g in range(group):
        part = windows[:, g * inputs : (g + 1) * inputs]
        rows = w[g * outputs : (g + 1) * outputs]
        parts.append(np.tensordot(part, rows, axes=((1, *taps), (1, *range(2, 2 + rank)))))
    return np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)


def _transposed_sum(x: np.ndarray, w: np.ndarray, group: int, geometry) -> np.ndarray:
    size, strides, dilations, begin, end = geometry
    outputs, inputs = w.shape[1], x.shape[1] // group
    full = [
        max(s + b + e, (x.shape[2 + i] - 1) * strides[i] + (w.shape[2 + i] - 1) * dilations[i] + 1)
        for i, (s, b, e) in enumerate(zip(size, begin, end, strict=True))
    ]
    y = np.zeros((x.shape[0], outputs * group, *full))
    for tap in np.ndindex(*w.shape[2:]):
        where = [
            slice(t * d, t * d + (x.shape[2 + i] - 1) * s + 1, s)
            for i, (t, d, s) in enumerate(zip(tap, dilations, strides, strict=True))
        ]
        for g in range(group):
            taken = slice(g * inputs, (g + 1) * inputs)
            part = np.tensordot(x[:, taken], w[(taken, slice(None), *tap)], axes=((1,), (0,)))
            y[(slice(None), slice(g * outputs, (g + 1) * outputs), *where)] += np.moveaxis(part, -1, 1)
    return y[(..., *(slice(b, b + s) for b, s in zip(begin, size, strict=True)))]


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of a quantized model in order, as its graph defines them."""
    results = Oracle(model).run(feeds)
    return [results[o.name] for o in model.graph.output]
