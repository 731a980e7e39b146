"""Small sound graphs of lowbit nodes with standard nodes between them, drawn by a seed, and what they mean.

Sizes are a few pixels and channels: a fuzzer makes thousands of sessions of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import lowbit.ops
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.numerics import random_nodes

F32, I32 = np.float32, np.int32
TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "float32": TensorProto.FLOAT}
BITS = (1, 2, 2, 3, 4, 4, 8, 8)
CHANNELS = (1, 2, 3, 4, 8, 16, 17)
Feeds = dict[str, np.ndarray]


@dataclasses.dataclass
class Value:
    """A tensor of the graph: floats, or codes of `bits` bits."""

    name: str
    shape: list[int]
    bits: int = 0
    signed: bool = False

    @property
    def encoding(self) -> str:
        return "signed" if self.signed else "unsigned"

    @property
    def dtype(self) -> str:
        return "float32" if not self.bits else "int8" if self.signed else "uint8"

    @property
    def is_image(self) -> bool:
        """Whether it is an image or a volume, channels last or first."""
        return len(self.shape) in (4, 5)

    @property
    def spatial(self) -> range:
        """The axes between the batch and the channels."""
        return range(1, len(self.shape) - 1)


class Graph:
    """Draws nodes one after the other; every tensor may be read by any later node."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrays = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: list[Value] = []
        self.inputs: list[Value] = []

    def const(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def scale(self, low: int = -6, high: int = 0) -> np.ndarray:
        return random_nodes.scale(self.arrays, self.rng.random() < 0.5, low, high)

    def zero(self, bits: int, signed: bool) -> np.ndarray:
        return random_nodes.zero_point(self.arrays, bits, "signed" if signed else "unsigned")

    def node(
        self, op: str, inputs: list[str], shape: list[int], bits: int, signed: bool, **attributes: Any
    ) -> Value:
        y = Value(f"t{len(self.nodes)}", shape, bits, signed)
        domain = "ai.lowbit" if op.startswith(("LowBit", "AP")) else ""
        self.nodes.append(
            helper.make_node(op, inputs, [y.name], f"{op}_{y.name}", domain=domain, **attributes)
        )
        self.values.append(y)
        return y

    def output(self) -> tuple[dict[str, Any], list[str], int, bool]:
        """Attributes and constants of an output quantizer, its bits, whether its codes are signed."""
        bits, signed = self.rng.choice(BITS), self.rng.random() < 0.5
        attributes = {"y_bits": bits, "y_encoding": "signed" if signed else "unsigned"}
        return attributes, [self.const(self.scale(-5, 1)), self.const(self.zero(bits, signed))], bits, signed

    def add_input(self) -> Value:
        rng = self.rng
        bits = rng.choice([0, 0, 0, *BITS])
        spatial = [rng.randint(1, 6), rng.randint(1, 6)]
        if rng.random() < 0.2:
            spatial = [rng.randint(1, 4) for _ in range(3)]
        shape = [rng.choice([1, 1, 2]), *spatial, rng.choice(CHANNELS)]
        value = Value(f"x{len(self.inputs)}", shape, bits, bool(bits) and rng.random() < 0.5)
        self.inputs.append(value)
        self.values.append(value)
        return value

    def pick(self, accept: Callable[[Value], bool]) -> Value | None:
        """Mostly the newest tensor that will do."""
        found = [value for value in self.values if accept(value)]
        if not found:
            return None
        return found[-1] if self.rng.random() < 0.7 else self.rng.choice(found)

    def grow(self) -> None:
        x = self.pick(lambda value: min(value.shape) > 0)
        assert x is not None
        makers = _FROM_CODES if x.bits else _FROM_FLOATS
        self.rng.choice(makers)(self, x)

    def model(self) -> tuple[onnx.ModelProto, Feeds]:
        read = {name for node in self.nodes for name in node.input}
        # The last tensor, and some of those that nobody reads; the others' nodes make what nobody needs.
        made = [value for value in self.values if value not in self.inputs]
        outputs = [
            value
            for value in made
            if value is made[-1] or self.rng.random() < (0.15 if value.name in read else 0.6)
        ]

        def info(value: Value, open_dims: bool) -> onnx.ValueInfoProto:
            # ONNX Runtime plans its memory by the names: one name, one size.
            shape = [f"N{size}" if open_dims and i == 0 else size for i, size in enumerate(value.shape)]
            return helper.make_tensor_value_info(value.name, TYPES[value.dtype], shape)

        open_dims = self.rng.random() < 0.3
        graph = helper.make_graph(
            self.nodes,
            "fuzzed",
            [info(value, open_dims) for value in self.inputs],
            [helper.make_tensor_value_info(value.name, TYPES[value.dtype], None) for value in outputs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.lowbit", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        return model, {value.name: self.fed(value) for value in self.inputs}

    def fed(self, value: Value) -> np.ndarray:
        if not value.bits:
            return self.arrays.normal(0, 1.5, value.shape).astype(F32)
        return random_nodes.codes(self.arrays, value.shape, value.bits, value.encoding)


def _quantize(g: Graph, x: Value) -> None:
    attributes, (scale, zero), bits, signed = g.output()
    shape, last = list(x.shape), int(x.is_image and g.rng.random() < 0.3)
    if last:
        shape = [shape[0], *shape[2:], shape[1]]
    g.node("LowBitQuantize", [x.name, scale, zero], shape, bits, signed, to_channels_last=last, **attributes)


def _threshold(g: Graph, x: Value) -> None:
    bits, signed = g.rng.choice(BITS), g.rng.random() < 0.5
    count = g.rng.randint(1, min(2**bits - 1, 5))
    rows = np.sort(g.arrays.normal(0, 1, (1, count)).astype(F32), axis=1)
    base = np.asarray(-(2 ** (bits - 1)) if signed else 0, I32)
    inputs = [x.name, g.const(rows), g.const(base), g.const(np.asarray(1, I32))]
    encoding = "signed" if signed else "unsigned"
    g.node("LowBitThreshold", inputs, list(x.shape), bits, signed, y_bits=bits, y_encoding=encoding)


def _relu(g: Graph, x: Value) -> None:
    g.node("Relu", [x.name], list(x.shape), 0, False)


def _float_add(g: Graph, x: Value) -> None:
    other = g.pick(lambda value: not value.bits and value.shape == x.shape)
    assert other is not None
    g.node(g.rng.choice(["Add", "Mul"]), [x.name, other.name], list(x.shape), 0, False)


def _matmul(g: Graph, x: Value) -> None:
    kinds = ["conv", "conv", "conv", *(["transpose"] if len(x.shape) == 4 else []), "gemm"]
    kind = g.rng.choice(kinds) if x.is_image else "gemm"
    out = g.rng.choice(CHANNELS)
    w_bits = g.rng.choice(BITS)
    w_encoding = "bipolar" if w_bits == 1 and g.rng.random() < 0.5 else g.rng.choice(["signed", "unsigned"])
    x_encoding = "bipolar" if x.bits == 1 and not x.signed and g.rng.random() < 0.5 else x.encoding
    # Sometimes more bits than the codes have; never fewer.
    x_bits = x.bits if x_encoding == "bipolar" or g.rng.random() < 0.7 else g.rng.randint(x.bits, 8)
    attributes: dict[str, Any] = {
        "x_bits": x_bits, "x_encoding": x_encoding, "w_bits": w_bits, "w_encoding": w_encoding,
    }  # fmt: skip
    if kind == "gemm":
        axis = g.rng.choice([-1, 1])
        lead = x.shape[:axis]
        k = int(np.prod(x.shape[axis:])) if axis == 1 else x.shape[-1]
        attributes |= {"in_features": k, "out_features": out, "axis": axis}
        shape, op = [*lead, out], g.rng.choice(["LowBitGemm", "APGemm"])
    else:
        cin, group = x.shape[-1], 1
        if g.rng.random() < 0.25:
            group, out = cin, cin
        kernel, stride = ([g.rng.choice(sizes) for _ in x.spatial] for sizes in ([1, 3], [1, 1, 2]))
        pads = [size // 2 for size in kernel] * 2
        attributes |= {"in_channels": cin, "out_channels": out, "kernel_shape": kernel, "group": group,
                       "strides": stride, "pads": pads}  # fmt: skip
        k = int(np.prod(kernel)) * (cin // group)
        if kind == "conv":
            sizes = [(x.shape[1 + d] - 1) // step + 1 for d, step in enumerate(stride)]
            op = g.rng.choice(["LowBitConv", "APConv"])
        else:
            sizes = [(x.shape[1 + d] - 1) * step + 1 for d, step in enumerate(stride)]
            op = "LowBitConvTranspose"
        shape = [x.shape[0], *sizes, out]
    inputs = [x.name, g.const(g.arrays.integers(0, 256, out * ((k * w_bits + 7) // 8)).astype(np.uint8))]
    inputs += [g.const(g.scale()), g.const(_zero_of(g, x_bits, x_encoding)), g.const(g.scale(-8, -2))]
    inputs += [g.const(_zero_of(g, w_bits, w_encoding))]
    inputs.append(g.const(g.arrays.integers(-50, 50, out).astype(I32)) if g.rng.random() < 0.5 else "")
    _epilogue(g, op, attributes, inputs, shape)


def _zero_of(g: Graph, bits: int, encoding: str) -> np.ndarray:
    return random_nodes.zero_point(g.arrays, bits, encoding)


def _epilogue(g: Graph, op: str, attributes: dict[str, Any], inputs: list[str], shape: list[int]) -> None:
    out = shape[-1]
    quantizer, scales, bits, signed = g.output()
    kind = g.rng.choice(["requantize", "requantize", "residual", "float", "thresholds", "tail"])
    residual = g.pick(lambda value: value.bits and value.shape == shape) if kind == "residual" else None
    if kind == "float":
        g.node(op, inputs, shape, 0, False, epilogue="float", **attributes)
        return
    inputs += scales
    if kind == "thresholds":
        count = g.rng.randint(1, min(2**bits - 1, 4))
        inputs[-2:] = ["", ""]
        rows = np.sort(g.arrays.integers(-99, 99, (out, count)).astype(I32), axis=1)
        base = np.full(out, -(2 ** (bits - 1)) if signed else 0, I32)
        inputs += [g.const(rows), g.const(base), g.const(np.ones(out, I32))]
        g.node(op, inputs, shape, bits, signed, epilogue="thresholds", **quantizer, **attributes)
        return
    inputs += ["", "", ""]
    if kind == "tail":
        inputs += [g.const(g.arrays.normal(0, 1, out).astype(F32)) for _ in range(3)]
        tail = g.rng.choice(["bias", "bias,affine", "affine,relu", "relu", "bias,clip"])
        attributes |= {"tail": tail, "clip_min": -1.0, "clip_max": 3.0}
        g.node(op, inputs, shape, bits, signed, epilogue="tail", **quantizer, **attributes)
        return
    if residual is not None:
        inner = ["residual_scale", "residual_zero_point", "inner_scale", "inner_zero_point"]
        zeros = {"residual_zero_point": g.zero(8, residual.signed), "inner_zero_point": g.zero(8, False)}
        inputs += ["", "", "", residual.name]
        inputs += [g.const(zeros[name] if name in zeros else g.scale(-4, 0)) for name in inner]
        attributes["residual_encoding"] = residual.encoding
    g.node(op, inputs, shape, bits, signed, **quantizer, **attributes)


def _unary(g: Graph, x: Value) -> None:
    op = g.rng.choice(["LowBitRequantize", "LowBitAffine"])
    attributes, (scale, zero), bits, signed = g.output()
    inputs = [x.name, g.const(g.scale()), g.const(g.zero(8, x.signed))]
    if op == "LowBitAffine":
        inputs += [g.const(g.arrays.normal(0, 1, x.shape[-1]).astype(F32)), g.const(F32(0.25))]
    g.node(op, [*inputs, scale, zero], list(x.shape), bits, signed, x_encoding=x.encoding, **attributes)


def _lookup(g: Graph, x: Value) -> None:
    bits, signed = g.rng.choice(BITS), g.rng.random() < 0.5
    encoding = "signed" if signed else "unsigned"
    table = random_nodes.codes(g.arrays, 256, bits, encoding).astype(np.uint8)
    g.node("LowBitLookup", [x.name, g.const(table)], list(x.shape), bits, signed, x_encoding=x.encoding,
           y_encoding=encoding)  # fmt: skip


def _binary(g: Graph, x: Value) -> None:
    other = g.pick(lambda value: value.bits and (value.shape == x.shape or np.prod(value.shape) == 1))
    assert other is not None
    attributes, (scale, zero), bits, signed = g.output()
    inputs = [x.name, g.const(g.scale()), g.const(g.zero(8, x.signed))]
    inputs += [other.name, g.const(g.scale()), g.const(g.zero(8, other.signed)), scale, zero]
    shape = list(np.broadcast_shapes(tuple(x.shape), tuple(other.shape)))
    g.node(g.rng.choice(["LowBitAdd", "LowBitMul"]), inputs, shape, bits, signed, a_encoding=x.encoding,
           b_encoding=other.encoding, **attributes)  # fmt: skip


def _pool(g: Graph, x: Value) -> None:
    if not x.is_image:
        return _unary(g, x)
    kernel = [g.rng.randint(1, min(3, x.shape[axis])) for axis in x.spatial]
    stride = [g.rng.choice([1, 2]) for _ in x.spatial]
    sizes = [(x.shape[1 + d] - size) // stride[d] + 1 for d, size in enumerate(kernel)]
    shape = [x.shape[0], *sizes, x.shape[-1]]
    window = {"kernel_shape": kernel, "strides": stride, "x_encoding": x.encoding}
    kind = g.rng.choice(["max", "average", "global"])
    if kind == "max":
        g.node("LowBitMaxPool", [x.name], shape, x.bits, x.signed, **window)
        return None
    attributes, (scale, zero), bits, signed = g.output()
    inputs = [x.name, g.const(g.scale()), g.const(g.zero(8, x.signed)), scale, zero]
    if kind == "average":
        g.node("LowBitAveragePool", inputs, shape, bits, signed, **window, **attributes)
    else:
        g.node("LowBitGlobalAveragePool", inputs, [x.shape[0], *(1 for _ in x.spatial), x.shape[-1]],
               bits, signed, x_encoding=x.encoding, **attributes)  # fmt: skip
    return None


def _concat(g: Graph, x: Value) -> None:
    other = g.pick(lambda value: value.bits and value.shape == x.shape)
    assert other is not None
    attributes, (scale, zero), bits, signed = g.output()
    scales = [g.scale(), g.scale()]
    zeros = np.array([int(g.zero(8, value.signed)) for value in (x, other)], I32)
    inputs = [g.const(np.array(scales, F32)), g.const(zeros), scale, zero, x.name, other.name]
    shape = [*x.shape[:-1], 2 * x.shape[-1]]
    g.node("LowBitConcat", inputs, shape, bits, signed, axis=-1, **attributes,
           x_encodings=f"{x.encoding},{other.encoding}")  # fmt: skip


def _resize(g: Graph, x: Value) -> None:
    if len(x.shape) != 4 or max(x.shape[1:3]) > 8:
        return _unary(g, x)
    if x.shape[3] % 4 == 0 and g.rng.random() < 0.5:
        shape = [x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3] // 4]
        g.node("LowBitDepthToSpace", [x.name], shape, x.bits, x.signed, x_encoding=x.encoding, blocksize=2,
               mode=g.rng.choice(["DCR", "CRD"]))  # fmt: skip
        return None
    shape = [x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]]
    g.node("LowBitResize", [x.name], shape, x.bits, x.signed, x_encoding=x.encoding, scales=[2.0, 2.0])
    return None


def _dequantize(g: Graph, x: Value) -> None:
    shape, first = list(x.shape), int(x.is_image and g.rng.random() < 0.4)
    if first:
        shape = [shape[0], shape[-1], *shape[1:-1]]
    inputs = [x.name, g.const(g.scale()), g.const(g.zero(8, x.signed))]
    g.node("LowBitDequantize", inputs, shape, 0, False, x_encoding=x.encoding, to_channels_first=first)


def _move(g: Graph, x: Value) -> None:
    """A standard node that only moves elements, floats or codes."""
    kind = g.rng.choice(["Reshape", "Transpose", "Identity", "Slice", "Flatten"])
    if kind == "Reshape":
        shape = [x.shape[0], int(np.prod(x.shape[1:]))]
        g.node(kind, [x.name, g.const(np.array([0, -1], np.int64))], shape, x.bits, x.signed)
    elif kind == "Transpose":
        perm = list(range(len(x.shape)))
        g.rng.shuffle(perm)
        g.node(kind, [x.name], [x.shape[i] for i in perm], x.bits, x.signed, perm=perm)
    elif kind == "Flatten":
        shape = [x.shape[0], int(np.prod(x.shape[1:]))]
        g.node(kind, [x.name], shape, x.bits, x.signed, axis=1)
    elif kind == "Slice":
        axis = g.rng.randrange(len(x.shape))
        shape = list(x.shape)
        shape[axis] = (shape[axis] + 1) // 2
        bounds = [g.const(np.array([value], np.int64)) for value in (0, 1 << 40, axis, 2)]
        g.node(kind, [x.name, *bounds], shape, x.bits, x.signed)
    else:
        g.node(kind, [x.name], list(x.shape), x.bits, x.signed)


_FROM_CODES = [
    _matmul, _matmul, _matmul, _matmul, _unary, _lookup, _binary, _pool, _concat, _resize, _dequantize, _move,
]  # fmt: skip
_FROM_FLOATS = [_quantize, _quantize, _quantize, _quantize, _threshold, _relu, _float_add, _move]


def _single(seed: int) -> tuple[onnx.ModelProto, Feeds]:
    """One random node of any op."""
    rng = np.random.default_rng(seed)
    ops = [*random_nodes.MATMULS, *random_nodes._MAKERS]
    drawn = random_nodes.make(str(rng.choice(ops)), rng)
    schema = _schemas()[drawn.op_type]
    names, constants, feeds = [], [], {}
    for i, array in enumerate(drawn.inputs):
        described = schema["inputs"][min(i, len(schema["inputs"]) - 1)]
        names.append("" if array is None else f"{described['name']}_{i}")
        if array is None:
            continue
        if described["constant"]:
            constants.append(numpy_helper.from_array(array, names[-1]))
        else:
            feeds[names[-1]] = array
    node = helper.make_node(drawn.op_type, names, ["y"], "single", domain="ai.lowbit", **drawn.attrs)
    shapes = [
        list(a.shape) if a is not None else None for a in drawn.inputs
    ] + [None] * (len(schema["inputs"]) - len(drawn.inputs))  # fmt: skip
    present = [shape is not None for shape in shapes]
    _, dtype = _native().infer_output(drawn.op_type, drawn.attrs, shapes, present)
    inputs = [helper.make_tensor_value_info(n, TYPES[str(a.dtype)], a.shape) for n, a in feeds.items()]
    output = helper.make_tensor_value_info("y", TYPES[str(dtype)], None)
    graph = helper.make_graph([node], "single", inputs, [output], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.lowbit", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feeds


def _native() -> Any:
    from lowbit import _native as native

    return native


def _schemas() -> Mapping[str, Mapping[str, Any]]:
    if not _SCHEMAS:
        _SCHEMAS.update({schema["name"]: schema for schema in _native().schemas()})
    return _SCHEMAS


_SCHEMAS: dict[str, Mapping[str, Any]] = {}


def draw(seed: int) -> tuple[onnx.ModelProto, Feeds]:
    """A sound model and what it is fed: one node, or a graph of up to nine."""
    if seed % 3 == 0:
        return _single(seed)
    graph = Graph(seed)
    for _ in range(1 + (seed % 5 == 1)):
        graph.add_input()
    for _ in range(graph.rng.randint(2, 9)):
        graph.grow()
    return graph.model()


def _moved(node: onnx.NodeProto, attributes: dict[str, Any], given: list[np.ndarray]) -> np.ndarray | None:
    """A standard node's output, as ONNX defines it; None where this file does not draw such nodes."""
    x = given[0]
    if node.op_type == "Relu":
        return np.maximum(x, x.dtype.type(0))
    if node.op_type in ("Add", "Mul") and len(given) == 2:
        return given[0] + given[1] if node.op_type == "Add" else given[0] * given[1]
    if node.op_type == "Identity":
        return x
    if node.op_type == "Transpose":
        return np.transpose(x, attributes.get("perm"))
    if node.op_type == "Flatten":
        axis = attributes.get("axis", 1)
        return x.reshape(int(np.prod(x.shape[:axis])), -1) if x.size else None
    return None


def definition(model: onnx.ModelProto, feeds: Feeds) -> Feeds | None:
    """The outputs by the numpy definitions; None where a node is none of those that they cover."""
    values: dict[str, np.ndarray] = dict(feeds)
    read = {name for node in model.graph.node for name in node.input}
    for tensor in model.graph.initializer:
        if tensor.name in read:
            values[tensor.name] = numpy_helper.to_array(tensor)
    with np.errstate(all="ignore"):
        for node in model.graph.node:
            if len(node.output) != 1 or any(name and name not in values for name in node.input):
                return None
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
            given = [values[name] if name else None for name in node.input]
            if node.domain == "ai.lowbit":
                known = {a["name"] for a in _schemas()[node.op_type]["attributes"]}
                attributes = {k: v for k, v in attributes.items() if k in known}
                y = lowbit.ops.evaluate(node.op_type, attributes, given)
            else:
                if any(array is None for array in given) or not given:
                    return None
                found = _moved(node, attributes, given)
                if found is None:
                    return None
                y = found
            values[node.output[0]] = y
    return {value.name: values[value.name] for value in model.graph.output}
