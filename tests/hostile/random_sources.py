"""Random quantized source graphs, and plausible changes to them: what an exporter might write one day.

`mutations.py` breaks models so that they must be refused; these should mostly load in ONNX Runtime. Every
node is run by itself as soon as it is drawn: its output gives shapes to the next draws and ranges to
quantizers, and a node that ONNX Runtime does not run is drawn again. Then the finished model is changed in
structure: dynamic dims, outputs, names, attributes, grids, subgraphs, spliced edges. The seed alone decides
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from lowbit.exporters.writer import captured
from onnx import TensorProto, helper, numpy_helper

from tests.dialects.graphs.builder import TYPES, as_tensor

OPSETS = range(10, 25)
_IR_VERSION = 10
_MOST_ELEMENTS = 6000
_FLOAT = TensorProto.FLOAT
_UNARY = (
    "Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Elu", "Softplus", "Neg", "Abs", "Exp", "Sqrt",
    "Erf", "Floor", "Identity", "Softsign", "Sign",
)  # fmt: skip
_UNARY_SINCE = {"HardSwish": 14, "Mish": 18, "Gelu": 20, "Round": 11, "Swish": 24}


@dataclass(frozen=True)
class Source:
    """A model that may convert, and inputs that fit it.

    Attributes:
        model: the model.
        feeds: one or two sets of inputs; a second one has another batch size.
        told: what was done to the model after it was drawn.
    """

    model: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]
    told: str


class UnusableError(Exception):
    """ONNX Runtime does not run a node as it was drawn."""


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


class SourceGraph:
    """A quantized graph under construction; the value of every tensor is known for one set of inputs."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng([seed, 0xD1FF])
        self.opset = int(self.rng.choice(OPSETS))
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.values: dict[str, np.ndarray] = {}
        self.reals: list[str] = []  # float tensors that later nodes may read
        self.codes: list[str] = []
        self.options = _options()
        self.count = 0
        # How the exporter of this graph writes things.
        self.kinds = self.pick([["u8"], ["u8"], ["s8"], ["u8", "s8"], ["u8", "s8", "u4", "s4", "u16"]])
        self.kinds = [k for k in self.kinds if self.opset >= 21 or k in ("u8", "s8")]
        self.quantized = self.pick([1.0, 1.0, 0.9, 0.6])
        self.scale_of_one = self.chance(0.2)
        self.own_pairs = self.chance(0.2)  # a DequantizeLinear for every reader
        self.constant_nodes = self.chance(0.2)

    # -- drawing
    def pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}_{self.count}"

    # -- plumbing
    def constant(self, value: np.ndarray | TensorProto, hint: str = "const") -> str:
        name = self.fresh(hint)
        tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        tensor.name = name
        if self.constant_nodes:
            self.nodes.append(helper.make_node("Constant", [], [name], name=self.fresh("n"), value=tensor))
        else:
            self.initializers.append(tensor)
        self.values[name] = numpy_helper.to_array(tensor)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64), "ints")

    def floats(self, value: Any) -> str:
        return self.constant(np.asarray(value, np.float32), "floats")

    def node(self, op: str, inputs: Sequence[str], *, outputs: int = 1, domain: str = "", **attributes: Any):
        """Adds a node and runs it; the name of its output, or a list of names.

        Raises:
            UnusableError: if ONNX Runtime does not run it, or its output is too large or not finite.
        """
        names = [self.fresh(op.lower()) for _ in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=self.fresh("n"), domain=domain, **attributes)
        self.run(node)
        self.nodes.append(node)
        return names[0] if outputs == 1 else names

    def run(self, node: onnx.NodeProto) -> None:
        """Computes a node's outputs from the values of what it and its subgraphs read."""
        read = {name for name in node.input if name} | captured(node)
        given = {name: self.values[name] for name in read if name in self.values}
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in given.items()
        ]
        graph = helper.make_graph([node], "one", infos, [onnx.ValueInfoProto(name=n) for n in node.output])
        try:
            session = ort.InferenceSession(self._wrap(graph).SerializeToString(), self.options)
            results = session.run(None, given)
        except Exception as error:
            raise UnusableError(str(error)) from error
        for name, value in zip(node.output, results, strict=True):
            value = np.asarray(value)
            if value.size > _MOST_ELEMENTS or not np.all(np.isfinite(value.astype(np.float32))):
                raise UnusableError("too large, or not finite")
            self.values[name] = value

    def _wrap(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="lowbit-tests")
        model.ir_version = _IR_VERSION
        return model

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def recent(self, *, rank: int | None = None) -> str:
        """A float tensor, most likely a late one."""
        fitting = [n for n in self.reals if rank is None or self.values[n].ndim == rank]
        if not fitting:
            raise UnusableError(f"no tensor of rank {rank}")
        return fitting[-1 - min(int(self.rng.geometric(0.6)) - 1, len(fitting) - 1)]

    def image(self) -> str:
        """A tensor with a batch, channels and at least one spatial dim."""
        fitting = [n for n in self.reals if self.values[n].ndim in (3, 4, 5) and 0 not in self.shape(n)]
        if not fitting:
            raise UnusableError("no image")
        return fitting[-1 - min(int(self.rng.geometric(0.6)) - 1, len(fitting) - 1)]

    # -- quantization
    def grid(self, low: float, high: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """A scale and a zero point whose codes about cover a range."""
        _, first, last = TYPES[kind]
        low, high = min(low, 0.0), max(high, 0.0)
        span = max(high - low, 1e-3)
        scale = np.float32(span / (last - first))
        if self.chance(0.4):
            scale = np.float32(2.0 ** np.rint(np.log2(scale)))  # ties
        zero = int(np.clip(np.rint(first - low / scale), first, last))
        if self.chance(0.3):
            zero = first if low == 0 and first == 0 else 0 if first < 0 else zero
        return np.asarray(scale), np.asarray(zero)

    def quantize(self, real: str) -> str:
        """Q and DQ behind a float tensor; the tensor that later nodes read."""
        value = self.values[real]
        if value.dtype != np.float32 or value.size == 0:
            return real
        kind = self.pick(self.kinds)
        scale, zero = self.grid(float(value.min()), float(value.max()), kind)
        shape = (1,) if self.scale_of_one else ()
        if self.opset >= 13 and value.ndim > 1 and self.chance(0.04):  # a grid per channel
            shape = (value.shape[1],)
            spread = self.rng.uniform(0.5, 1.5, shape).astype(np.float32)
            grid = [self.constant(scale * spread), self.constant(as_tensor(np.full(shape, zero), kind, ""))]
            attributes: dict[str, Any] = {"axis": 1}
        else:
            attributes = {}
            grid = [self.constant(np.broadcast_to(scale, shape).copy(), "scale")]
            if kind != "u8" or zero != 0 or self.chance(0.8):
                grid.append(self.constant(as_tensor(np.broadcast_to(zero, shape), kind, ""), "zero"))
        domain = "com.microsoft" if kind in ("u16", "s16") and self.opset < 21 else ""
        codes = self.node("QuantizeLinear", [real, *grid], domain=domain, **attributes)
        self.codes.append(codes)
        if kind in ("u8", "s8") and self.opset >= 12 and self.chance(0.1):  # QCDQ
            middle = int(zero)
            bounds = [np.clip(middle + side, *TYPES[kind][1:]) for side in (-self.pick([1, 8, 40]), 60)]
            narrow = [self.constant(np.asarray(b, np.uint8 if kind == "u8" else np.int8)) for b in bounds]
            codes = self.node("Clip", [codes, *narrow])
        return self.node("DequantizeLinear", [codes, *grid], domain=domain, **attributes)

    def keep(self, real: str) -> None:
        """Registers a float tensor, mostly behind a quantizer."""
        if self.values[real].dtype != np.float32:
            return
        self.reals.append(self.quantize(real) if self.chance(self.quantized) else real)
        if self.chance(0.05):
            self.reals.insert(0, real)  # somebody reads the float tensor, too

    def weight(self, shape: Sequence[int], axis: int = 0) -> str:
        """A constant operand: codes behind a DQ, floats behind Q and DQ, or plain floats."""
        deviation = 1.5 / np.sqrt(max(1, np.prod(shape[1:])))
        if self.chance(0.1):
            return self.floats(self.rng.normal(size=shape) * deviation)
        kind = self.pick(["s8", "s8", "s8", "u8"] + (["s4", "u4"] if self.opset >= 21 else []))
        _, low, high = TYPES[kind]
        per_channel = self.opset >= 13 and self.chance(0.6)
        size = (shape[axis],) if per_channel else ((1,) if self.scale_of_one else ())
        spread = self.rng.uniform(0.7, 1.4, size)
        scale = np.asarray(deviation * 4 / (high - low) * spread, np.float32)
        if self.chance(0.4):
            scale = np.exp2(np.rint(np.log2(scale)))
        middle = 0 if low < 0 else (high + 1) // 2
        zero = np.full(size, middle) if self.chance(0.8) else self.rng.integers(low, high + 1, size)
        grid = [self.constant(scale, "scale"), self.constant(as_tensor(zero, kind, ""), "zero")]
        attributes = {"axis": axis} if per_channel else {}
        codes = self.constant(as_tensor(self.rng.integers(low, high + 1, shape), kind, ""), "weight")
        if self.chance(0.1):
            real = self.node("DequantizeLinear", [codes, *grid], **attributes)
            codes = self.node("QuantizeLinear", [self.constant(self.values[real]), *grid], **attributes)
        return self.node("DequantizeLinear", [codes, *grid], **attributes)

    def bias(self, channels: int, x: str, w: str) -> list[str]:
        """Nothing, floats, or int32 on the accumulator's grid where x and w have one."""
        kind = self.pick(["none", "float", "int", "int"])
        if kind == "none":
            return []
        x_scale, w_scale = self._scale_of(x), self._scale_of(w)
        if kind == "float" or x_scale is None or w_scale is None or x_scale.size > 1:
            return [self.floats(self.rng.normal(size=channels))]
        scale = np.asarray(x_scale.reshape(-1)[0] * w_scale, np.float32)
        codes = self.constant(self.rng.integers(-3000, 3000, channels).astype(np.int32), "bias")
        inputs = [codes, self.constant(scale, "scale")]
        if self.chance(0.7):
            inputs.append(self.constant(np.zeros(scale.shape, np.int32), "zero"))
        return [self.node("DequantizeLinear", inputs, **({"axis": 0} if scale.size > 1 else {}))]

    def _scale_of(self, real: str) -> np.ndarray | None:
        for node in reversed(self.nodes):
            if real in node.output:
                return self.values[node.input[1]] if node.op_type == "DequantizeLinear" else None
        return None

    # -- steps
    def convolution(self) -> None:
        x = self.image()
        channels, spatial = self.shape(x)[1], self.shape(x)[2:]
        group = self.pick([1, 1, 1, channels] + ([2] if channels % 2 == 0 else []))
        kernel = [int(self.rng.integers(1, min(n, 3) + 1)) for n in spatial]
        out = group * int(self.rng.integers(1, 7 if group == 1 else 3))
        attributes: dict[str, Any] = {"group": group} if group > 1 or self.chance(0.3) else {}
        if self.chance(0.15):
            attributes["auto_pad"] = self.pick(["SAME_UPPER", "SAME_LOWER", "VALID"])
        elif self.chance(0.8):
            attributes["pads"] = [int(v) for v in self.rng.integers(0, 3, 2 * len(spatial))]
        if self.chance(0.4):
            attributes["strides"] = [int(v) for v in self.rng.integers(1, 4, len(spatial))]
        if self.chance(0.15):
            attributes["dilations"] = [int(v) for v in self.rng.integers(1, 3, len(spatial))]
        if self.chance(0.7):
            attributes["kernel_shape"] = kernel
        w = self.weight((out, channels // group, *kernel))
        self.activated(self.node("Conv", [x, w, *self.bias(out, x, w)], **attributes))

    def activated(self, real: str) -> None:
        """What commonly follows a product, then a quantizer."""
        follows = self.pick(["nothing", "nothing", "Relu", "Clip", "batch", "silu", "affine"])
        if follows == "Relu":
            real = self.node("Relu", [real])
        elif follows == "Clip":
            real = self.clipped(real, 0.0, float(self.rng.uniform(0.5, 6)))
        elif follows == "batch" and self.values[real].ndim > 1:
            real = self.batch_normalized(real)
        elif follows == "silu":
            real = self.quantize(real) if self.chance(0.5) else real
            gate = self.node("Sigmoid", [real])
            real = self.node("Mul", [real, self.quantize(gate) if self.chance(0.5) else gate])
        elif follows == "affine":
            real = self.node(self.pick(["Add", "Mul"]), [real, self.floats(self.rng.normal())])
        self.keep(real)

    def clipped(self, real: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.node("Clip", [real], min=low, max=high)
        bounds = [self.floats(low), self.floats(high)]
        if self.chance(0.15):
            bounds = [bounds[0]] if self.chance(0.5) else ["", bounds[1]]
        return self.node("Clip", [real, *bounds])

    def batch_normalized(self, real: str) -> str:
        c = self.shape(real)[1]
        parameters = [self.rng.normal(1, 0.4, c), self.rng.normal(size=c), self.rng.normal(size=c)]
        variance = self.rng.uniform(0.3, 2, c)
        return self.node("BatchNormalization", [real, *map(self.floats, parameters), self.floats(variance)])

    def batch_normalization(self) -> None:
        x = self.recent()
        if self.values[x].ndim < 2:
            raise UnusableError("no channels")
        self.keep(self.batch_normalized(x))

    def transposed_convolution(self) -> None:
        x = self.image()
        channels, spatial = self.shape(x)[1], self.shape(x)[2:]
        group = self.pick([1, 1, 1, channels])
        kernel = [int(self.rng.integers(1, 4)) for _ in spatial]
        attributes: dict[str, Any] = {"group": group}
        if self.chance(0.7):
            attributes["strides"] = [int(v) for v in self.rng.integers(1, 3, len(spatial))]
        if self.chance(0.3):
            attributes["pads"] = [int(v) for v in self.rng.integers(0, 2, 2 * len(spatial))]
        out = int(self.rng.integers(1, 4))
        w = self.weight((channels, out, *kernel), axis=1 if group == 1 else 0)
        self.activated(self.node("ConvTranspose", [x, w, *self.bias(out * group, x, w)], **attributes))

    def dense(self) -> None:
        x = self.recent(rank=2)
        k, out = self.shape(x)[1], int(self.rng.integers(1, 9))
        transposed = self.chance(0.5)
        w = self.weight((out, k) if transposed else (k, out), axis=0 if transposed else 1)
        attributes: dict[str, Any] = {"transB": int(transposed)}
        if self.chance(0.1):
            attributes["alpha"] = 0.5
        bias = self.bias(out, x, w)
        if not bias and self.opset < 11:
            bias = [self.floats(np.zeros(out))]
        self.activated(self.node("Gemm", [x, w, *bias], **attributes))

    def product(self) -> None:
        x = self.recent()
        k, out = self.shape(x)[-1], int(self.rng.integers(1, 7))
        w = self.weight((k, out), axis=1)
        y = self.node("MatMul", [x, w])
        if self.chance(0.5):
            y = self.node("Add", [y, *self.bias(out, x, w)] if self.chance(0.5) else [y, self.floats(1.5)])
        self.activated(y)

    def attention(self) -> None:
        a = self.recent()
        rank = self.values[a].ndim
        b = self.recent(rank=rank)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        y = self.node("MatMul", [a, self.node("Transpose", [b], perm=perm)])
        self.keep(y)
        self.keep(self.node("Softmax", [self.reals[-1]], axis=-1 if self.opset >= 13 else rank - 1))

    def binary(self) -> None:
        a = self.recent()
        op = self.pick(["Add", "Add", "Add", "Mul", "Mul", "Sub", "Div", "Max", "Min"])
        shape = self.shape(a)
        same = [n for n in self.reals if self.shape(n) == shape]
        kind = self.pick(["same", "same", "scalar", "channel", "any", "row"])
        if kind == "same":
            b = self.pick(same)
        elif kind == "scalar":
            b = self.floats(self.rng.normal())
        elif kind == "channel" and len(shape) > 2:
            b = self.floats(self.rng.normal(1, 0.5, (shape[1], *[1] * (len(shape) - 2))))
        elif kind == "row":
            b = (
                self.weight((1, shape[-1]))
                if self.chance(0.5)
                else self.floats(self.rng.normal(size=shape[-1]))
            )
        else:
            b = self.pick(self.reals)
        self.keep(self.node(op, [a, b] if self.chance(0.7) else [b, a]))

    def unary(self) -> None:
        ops = [*_UNARY, *(op for op, since in _UNARY_SINCE.items() if self.opset >= since)]
        self.keep(self.node(self.pick(ops), [self.recent()]))

    def parametric_relu(self) -> None:
        x = self.recent()
        rank = self.values[x].ndim
        if rank == 1:
            raise UnusableError("no channels")
        slope = self.rng.normal(size=(self.shape(x)[1], *[1] * (rank - 2)) if rank > 2 else ())
        self.keep(self.node("PRelu", [x, self.floats(slope)]))

    def clip(self) -> None:
        low, high = sorted(self.rng.normal(size=2) * 2)
        self.keep(self.clipped(self.recent(), float(low), float(high)))

    def pool(self) -> None:
        x = self.image()
        spatial = self.shape(x)[2:]
        kernel = [int(self.rng.integers(1, min(n, 3) + 1)) for n in spatial]
        op = self.pick(["MaxPool", "MaxPool", "AveragePool"])
        attributes: dict[str, Any] = {"kernel_shape": kernel}
        if self.chance(0.7):
            attributes["strides"] = [int(v) for v in self.rng.integers(1, 3, len(spatial))]
        if self.chance(0.4):
            attributes["pads"] = [int(self.rng.integers(0, k)) for k in (*kernel, *kernel)]
        if self.chance(0.2):
            attributes["ceil_mode"] = 1
        if op == "AveragePool" and self.chance(0.3):
            attributes["count_include_pad"] = 1
        self.keep(self.node(op, [x], **attributes))

    def global_pool(self) -> None:
        x = self.image()
        self.keep(self.node(self.pick(["GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool"]), [x]))

    def reduction(self) -> None:
        x = self.recent()
        rank = self.values[x].ndim
        op = self.pick(["ReduceMean", "ReduceMean", "ReduceMax", "ReduceSum"])
        count = int(self.rng.integers(1, rank + 1))
        axes = sorted(int(v) for v in self.rng.choice(rank, count, replace=False))
        if self.chance(0.5) and rank > 2:
            axes = [*range(2, rank)]
        keep = {"keepdims": int(self.chance(0.6))}
        as_input = self.opset >= 18 or (op == "ReduceSum" and self.opset >= 13)
        y = (
            self.node(op, [x, self.ints(*axes)], **keep)
            if as_input
            else self.node(op, [x], axes=axes, **keep)
        )
        self.keep(y)

    def reshape(self) -> None:
        x = self.recent()
        dims = list(self.shape(x))
        kind = self.pick(["merge", "split", "zero", "flatten", "flat_node", "view", "shuffle"])
        if kind == "flat_node":
            self.keep(self.node("Flatten", [x], axis=int(self.rng.integers(0, len(dims) + 1))))
            return
        if kind == "view":
            self.view(x)
            return
        if kind == "shuffle" and len(dims) == 4 and dims[1] % 2 == 0:
            y = self.node("Reshape", [x, self.ints(dims[0], 2, dims[1] // 2, *dims[2:])])
            y = self.node("Transpose", [y], perm=[0, 2, 1, 3, 4])
            self.keep(self.node("Reshape", [y, self.ints(dims[0], dims[1], *dims[2:])]))
            return
        if kind == "merge" and len(dims) > 2:
            i = int(self.rng.integers(0, len(dims) - 1))
            target = [*dims[:i], dims[i] * dims[i + 1], *dims[i + 2 :]]
        elif kind == "split":
            i = int(self.rng.integers(0, len(dims)))
            factor = self.pick([f for f in (1, 2, 3) if dims[i] % f == 0])
            target = [*dims[:i], factor, dims[i] // factor, *dims[i + 1 :]]
        elif kind == "zero" and len(dims) > 1:
            target = [0, -1]
        else:
            target = [dims[0] if dims else 1, -1]
        if -1 not in target and target and self.chance(0.3):
            target[int(self.rng.integers(len(target)))] = -1
        self.keep(self.node("Reshape", [x, self.ints(*target)]))

    def view(self, x: str) -> None:
        """x.view(x.size(0), -1), as torch writes it."""
        source = x if self.chance(0.7) else self.pick(self.reals)
        if self.values[source].ndim == 0:
            raise UnusableError("a scalar")
        size = self.node("Gather", [self.node("Shape", [source]), self.ints(0)], axis=0)
        target = self.node("Concat", [size, self.ints(-1)], axis=0)
        self.keep(self.node("Reshape", [x, target]))

    def transpose(self) -> None:
        x = self.recent()
        rank = self.values[x].ndim
        perms = [[int(v) for v in self.rng.permutation(rank)]]
        if rank == 4:
            perms += [[0, 2, 3, 1], [0, 3, 1, 2], [0, 2, 1, 3]]
        self.keep(self.node("Transpose", [x], perm=self.pick(perms)))

    def squeeze(self) -> None:
        x = self.recent()
        if self.chance(0.5):
            ones = [i for i, n in enumerate(self.shape(x)) if n == 1]
            if not ones:
                raise UnusableError("nothing to squeeze")
            op, axis = "Squeeze", self.pick(ones)
        else:
            op, axis = "Unsqueeze", int(self.rng.integers(0, self.values[x].ndim + 1))
            if self.values[x].ndim >= 5:
                raise UnusableError("deep enough")
        if self.opset >= 13:
            self.keep(self.node(op, [x, self.ints(axis)]))
        else:
            self.keep(self.node(op, [x], axes=[axis]))

    def slicing(self) -> None:
        x = self.recent()
        axis = int(self.rng.integers(0, self.values[x].ndim))
        n = self.shape(x)[axis]
        start, stop = sorted(int(v) for v in self.rng.integers(-n, n + 1, 2))
        step = self.pick([1, 1, 1, 2])
        if self.chance(0.1):
            start, stop, step = n, -n - 1, -1
        y = self.node("Slice", [x, *(self.ints(v) for v in (start, stop, axis, step))])
        if self.values[y].size == 0 and self.chance(0.9):
            raise UnusableError("empty")
        self.keep(y)

    def splitting(self) -> None:
        x = self.recent()
        axis = int(self.rng.integers(0, self.values[x].ndim))
        n = self.shape(x)[axis]
        if n < 2:
            raise UnusableError("nothing to split")
        first = int(self.rng.integers(1, n))
        if self.opset >= 13:
            parts = self.node("Split", [x, self.ints(first, n - first)], outputs=2, axis=axis)
        else:
            parts = self.node("Split", [x], outputs=2, axis=axis, split=[first, n - first])
        for part in parts:
            self.keep(part)

    def concatenation(self) -> None:
        a = self.recent()
        axis = int(self.rng.integers(0, self.values[a].ndim))

        def rest(n: str) -> tuple[int, ...]:
            return self.shape(n)[:axis] + self.shape(n)[axis + 1 :]

        fitting = [n for n in self.reals if self.values[n].ndim == self.values[a].ndim and rest(n) == rest(a)]
        self.keep(
            self.node("Concat", [a, *(self.pick(fitting) for _ in range(self.pick([1, 1, 2])))], axis=axis)
        )

    def padding(self) -> None:
        x = self.recent()
        rank = self.values[x].ndim
        pads = np.zeros(2 * rank, np.int64)
        for axis in range(max(0, rank - 2), rank):
            pads[[axis, axis + rank]] = self.rng.integers(0, 2, 2)
        if self.chance(0.1):
            pads[rank - 1] = -1
        mode = self.pick(["constant", "constant", "reflect", "edge"])
        fill = float(self.pick([0.0, 0.0, 1.0]))
        if self.opset < 11:
            self.keep(self.node("Pad", [x], mode=mode, pads=[int(p) for p in pads], value=fill))
        else:
            inputs = [x, self.ints(*pads.tolist())] + ([self.floats(fill)] if self.chance(0.6) else [])
            self.keep(self.node("Pad", inputs, mode=mode))

    def resize(self) -> None:
        x = self.image()
        rank = self.values[x].ndim
        mode = self.pick(["nearest", "nearest", "linear", "cubic"])
        scales = [1.0, 1.0, *(float(self.pick([1, 2, 2, 0.5, 1.5])) for _ in range(rank - 2))]
        if self.opset < 11:
            self.keep(self.node("Resize", [x, self.floats(scales)], mode=self.pick(["nearest", "linear"])))
            return
        where = self.pick(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
        attributes = {"mode": mode, "coordinate_transformation_mode": where}
        if mode == "nearest":
            attributes["nearest_mode"] = self.pick(
                ["floor", "round_prefer_floor", "ceil", "round_prefer_ceil"]
            )
        roi = "" if self.opset >= 13 else self.floats([])
        if self.chance(0.5):
            self.keep(self.node("Resize", [x, roi, self.floats(scales)], **attributes))
        else:
            sizes = [max(1, int(n * s)) for n, s in zip(self.shape(x), scales, strict=True)]
            empty = "" if self.opset >= 13 else self.floats([])
            self.keep(self.node("Resize", [x, roi, empty, self.ints(*sizes)], **attributes))

    def blocks(self) -> None:
        x = self.recent(rank=4)
        c, h, w = self.shape(x)[1:]
        if c % 4 == 0 and self.chance(0.6):
            mode = {"mode": self.pick(["DCR", "CRD"])} if self.opset >= 11 else {}
            self.keep(self.node("DepthToSpace", [x], blocksize=2, **mode))
        elif h % 2 == 0 and w % 2 == 0:
            self.keep(self.node("SpaceToDepth", [x], blocksize=2))

    def moving(self) -> None:
        """Gather, Tile, Expand."""
        x = self.recent()
        shape = self.shape(x)
        if not shape:
            raise UnusableError("a scalar")
        axis = int(self.rng.integers(0, len(shape)))
        kind = self.pick(["gather", "gather", "tile", "expand"])
        if kind == "gather":
            if not shape[axis]:
                raise UnusableError("empty")
            size = self.pick([(), (1,), (2,), (2, 2)])
            index = self.constant(self.rng.integers(-shape[axis], shape[axis], size))
            self.keep(self.node("Gather", [x, index], axis=axis))
        elif kind == "tile":
            repeats = [1] * len(shape)
            repeats[axis] = 2
            self.keep(self.node("Tile", [x, self.ints(*repeats)]))
        else:
            target = [2 if n == 1 else n for n in shape]
            self.keep(self.node("Expand", [x, self.ints(*target)]))

    def choosing(self) -> None:
        """ArgMax, Where."""
        x = self.recent()
        rank = self.values[x].ndim
        if self.chance(0.5):
            y = self.node("ArgMax", [x], axis=int(self.rng.integers(0, rank)), keepdims=int(self.chance(0.5)))
            self.keep(self.node("Cast", [y], to=_FLOAT))
        else:
            mask = self.constant(self.rng.random(self.shape(x)) < 0.5)
            self.keep(self.node("Where", [mask, x, self.floats(0)]))

    def softmax(self) -> None:
        x = self.recent()
        self.keep(self.node("Softmax", [x], axis=int(self.rng.integers(0, self.values[x].ndim))))

    def normalization(self) -> None:
        x = self.recent()
        rank = self.values[x].ndim
        kinds = (
            ["instance"] + (["layer"] if self.opset >= 17 else []) + (["group"] if self.opset >= 21 else [])
        )
        kind = self.pick(kinds)
        if kind == "layer":
            n = self.shape(x)[-1]
            parameters = [self.floats(self.rng.normal(1, 0.3, n)), self.floats(self.rng.normal(size=n))]
            self.keep(self.node("LayerNormalization", [x, *parameters], axis=-1))
            return
        if rank < 3:
            raise UnusableError("no image")
        c = self.shape(x)[1]
        parameters = [self.floats(self.rng.normal(1, 0.3, c)), self.floats(self.rng.normal(size=c))]
        if kind == "instance":
            self.keep(self.node("InstanceNormalization", [x, *parameters]))
        else:
            groups = self.pick([g for g in (1, 2, 3) if c % g == 0])
            self.keep(self.node("GroupNormalization", [x, *parameters], num_groups=groups))

    def squeeze_and_excite(self) -> None:
        x = self.image()
        c = self.shape(x)[1]
        gate = self.quantize(self.node("GlobalAveragePool", [x]))
        w = self.weight((c, c, *[1] * (self.values[x].ndim - 2)))
        gate = self.quantize(self.node("Conv", [gate, w]))
        gate = self.quantize(self.node(self.pick(["Sigmoid", "HardSigmoid"]), [gate]))
        self.keep(self.node("Mul", [x, gate]))

    def casting(self) -> None:
        x = self.recent()
        kind = self.pick([TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.FLOAT])
        self.keep(self.node("Cast", [self.node("Cast", [x], to=kind)], to=_FLOAT))

    def dropping(self) -> None:
        self.keep(self.node("Dropout", [self.recent()]))

    def branching(self) -> None:
        """An If whose branches read tensors of the outer graph; sometimes a constant decides."""
        x = self.recent()
        branches = []
        for side in ("then", "else"):
            output = self.fresh(side)
            inner = self.fresh("inner")
            nodes = [helper.make_node(self.pick(["Relu", "Neg", "Identity"]), [x], [inner])]
            nodes.append(helper.make_node("Identity", [inner], [output]))
            info = helper.make_tensor_value_info(output, _FLOAT, list(self.shape(x)))
            branches.append(helper.make_graph(nodes, side, [], [info]))
        decides = self.constant(np.asarray(self.chance(0.5)), "condition")
        self.keep(self.node("If", [decides], then_branch=branches[0], else_branch=branches[1]))

    def looping(self) -> None:
        x = self.recent()
        carried, result, going, still, number = (self.fresh("loop") for _ in range(5))
        scaled = helper.make_node("Mul", [carried, self.floats(0.5)], [result])
        body = helper.make_graph(
            [scaled, helper.make_node("Identity", [going], [still])],
            "body",
            [
                helper.make_tensor_value_info(number, TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                helper.make_tensor_value_info(carried, _FLOAT, list(self.shape(x))),
            ],
            [
                helper.make_tensor_value_info(still, TensorProto.BOOL, []),
                helper.make_tensor_value_info(result, _FLOAT, list(self.shape(x))),
            ],
        )
        trips = self.constant(np.asarray(2, np.int64), "trips")
        self.keep(self.node("Loop", [trips, self.constant(np.asarray(True), "going"), x], body=body))

    # -- the whole
    def begin(self) -> None:
        channels = self.pick([1, 2, 3, 4, 8])
        shape = self.pick([
            (1, channels, 6, 6), (1, channels, 7, 5), (2, channels, 6, 8), (1, channels, 9),
            (1, channels, 4, 4, 4), (2, 5, channels), (3, 8),
        ])  # fmt: skip
        for _ in range(self.pick([1, 1, 1, 2])):
            name = self.fresh("input")
            value = (self.rng.normal(size=shape) * 2).astype(np.float32)
            self.inputs[name] = self.values[name] = value
            self.keep(name)

    def draw(self) -> None:
        """Steps until the graph is large enough.

        A step that does not fit the tensors at hand is undone; numpy complains with a ValueError where a draw
        has nothing to choose from.
        """
        self.begin()
        for _ in range(int(self.rng.integers(3, 15))):
            step = self.pick(_STEPS)
            nodes, initializers = len(self.nodes), len(self.initializers)
            reals, codes = len(self.reals), len(self.codes)
            try:
                step(self)
            except (UnusableError, ValueError, IndexError, ZeroDivisionError):
                del self.nodes[nodes:], self.initializers[initializers:]
                del self.reals[reals:], self.codes[codes:]
        known = {name for node in self.nodes for name in node.output} | set(self.inputs)
        self.reals = [name for name in self.reals if name in known]

    def finish(self) -> onnx.ModelProto:
        last = [n for n in self.reals if n not in self.inputs][-1:] or self.reals[-1:]
        chosen = [*last, *(self.pick(self.reals) for _ in range(self.pick([0, 0, 1, 2])))]
        if self.codes and self.chance(0.15):
            chosen.append(self.pick(self.codes))
        outputs = []
        for name in dict.fromkeys(chosen):
            if name in self.inputs:
                name = self.node("Identity", [name])
            value = self.values[name]
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            outputs.append(helper.make_tensor_value_info(name, kind, list(value.shape)))
        inputs = [helper.make_tensor_value_info(n, _FLOAT, list(v.shape)) for n, v in self.inputs.items()]
        return self._wrap(helper.make_graph(self.nodes, "drawn", inputs, outputs, self.initializers))


_WEIGHTS: dict[Callable[[SourceGraph], None], int] = {
    SourceGraph.convolution: 8, SourceGraph.dense: 3, SourceGraph.product: 3, SourceGraph.binary: 4,
    SourceGraph.unary: 3, SourceGraph.pool: 3, SourceGraph.reshape: 4, SourceGraph.transpose: 2,
    SourceGraph.concatenation: 2, SourceGraph.slicing: 2, SourceGraph.resize: 2, SourceGraph.moving: 2,
    SourceGraph.transposed_convolution: 1, SourceGraph.attention: 1, SourceGraph.parametric_relu: 1,
    SourceGraph.clip: 1, SourceGraph.global_pool: 1, SourceGraph.reduction: 2, SourceGraph.squeeze: 1,
    SourceGraph.splitting: 1, SourceGraph.padding: 2, SourceGraph.blocks: 1, SourceGraph.choosing: 1,
    SourceGraph.softmax: 1, SourceGraph.normalization: 2, SourceGraph.squeeze_and_excite: 1,
    SourceGraph.casting: 1, SourceGraph.dropping: 1, SourceGraph.branching: 1, SourceGraph.looping: 1,
    SourceGraph.batch_normalization: 1,
}  # fmt: skip
_STEPS = [step for step, weight in _WEIGHTS.items() for _ in range(weight)]


# ---- changes to a finished model

Change = Callable[[onnx.ModelProto, np.random.Generator], str]


def _choose(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def open_dims(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Symbolic dims for inputs; the shapes of outputs are told loosely or not at all."""
    every = rng.random() < 0.2
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        for i, dim in enumerate(dims):
            if i == 0 or every:
                dim.dim_param = f"{info.name}_{i}" if every else "N"
    for node in model.graph.node:  # branches say what no longer holds
        for attribute in node.attribute:
            for info in attribute.g.output:
                info.type.tensor_type.ClearField("shape")
    for info in model.graph.output:
        if rng.random() < 0.3:
            info.type.tensor_type.ClearField("shape")
        else:
            for i, dim in enumerate(info.type.tensor_type.shape.dim):
                dim.dim_param = f"{info.name}_{i}"
    return "dims opened"


def forget_outputs(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Outputs without a shape, or without a type."""
    for info in model.graph.output:
        if rng.random() < 0.7:
            info.type.tensor_type.ClearField("shape")
        elif rng.random() < 0.5:
            info.ClearField("type")
    return "outputs untold"


def add_outputs(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Inner tensors as outputs."""
    made = [name for node in model.graph.node for name in node.output if name]
    given = {info.name for info in model.graph.output}
    for _ in range(int(rng.integers(1, 4))):
        name = _choose(rng, made)
        if name not in given:
            given.add(name)
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    return "more outputs"


def rename_nodes(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Nodes without names, or with the names of others or of tensors."""
    for node in model.graph.node:
        if rng.random() < 0.5:
            node.name = _choose(rng, ["", "", node.output[0], f"{node.op_type}/é \x1b[31m"])
    return "nodes renamed"


def change_attribute(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """An integer attribute by one."""
    kinds = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS)
    found = [(n, a) for n in model.graph.node for a in n.attribute if a.type in kinds]
    if not found:
        return "no attribute"
    node, attribute = _choose(rng, found)
    step = int(_choose(rng, [-1, 1, 1, 2]))
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i += step
    elif len(attribute.ints):
        attribute.ints[int(rng.integers(len(attribute.ints)))] += step
    return f"{node.op_type}.{attribute.name} by {step}"


def drop_attribute(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """An attribute left out."""
    found = [n for n in model.graph.node if n.attribute and n.op_type not in ("Constant", "If", "Loop")]
    if not found:
        return "no attribute"
    node = _choose(rng, found)
    index = int(rng.integers(len(node.attribute)))
    name = node.attribute[index].name
    del node.attribute[index]
    return f"{node.op_type}.{name} dropped"


def change_grid(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Another scale or zero point."""
    read = {name for n in model.graph.node if n.op_type.endswith("eLinear") for name in n.input[1:]}
    found = [t for t in model.graph.initializer if t.name in read and t.raw_data]
    if not found:
        return "no grid"
    tensor = _choose(rng, found)
    value = numpy_helper.to_array(tensor).copy()
    flat = value.reshape(-1)
    if not flat.size or value.dtype.itemsize < 1 or value.dtype.kind not in "iuf":
        return "no grid"
    at = int(rng.integers(flat.size))
    if value.dtype.kind == "f":
        flat[at] = flat[at] * _choose(rng, [2.0, 0.5, 1.1, 1e-3, 1e3, -1.0, 0.0, np.nan, np.inf, 1e-40])
    else:
        info = np.iinfo(value.dtype)
        flat[at] = _choose(rng, [info.min, info.max, 0, 1, (int(info.min) + int(info.max)) // 2])
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return f"{tensor.name}[{at}] = {flat[at]}"


def splice(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """A node reads another tensor than it did."""
    made = [name for node in model.graph.node for name in node.output if name]
    at = int(rng.integers(len(model.graph.node)))
    node = model.graph.node[at]
    earlier = [name for n in model.graph.node[:at] for name in n.output if name]
    if not node.input or not earlier:
        return "nothing to splice"
    name = _choose(rng, earlier if rng.random() < 0.98 else made)
    node.input[0] = name
    return f"{node.op_type} reads {name}"


def skip_node(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """A node is left out: its readers read what it read."""
    found = [n for n in model.graph.node if n.input and len(n.output) == 1]
    node = _choose(rng, found)
    source, target = node.input[0], node.output[0]
    if any(info.name == target for info in model.graph.output):
        return "nothing skipped"
    for reader in model.graph.node:
        for i, name in enumerate(reader.input):
            if name == target:
                reader.input[i] = source
    model.graph.node.remove(node)
    return f"{node.op_type} skipped"


def insert_node(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """An Identity, Dropout, Relu, Cast or quantizer pair in an edge between floats or codes."""
    at = int(rng.integers(len(model.graph.node)))
    reader = model.graph.node[at]
    if not reader.input or not reader.input[0]:
        return "nothing inserted"
    op, name = _choose(rng, ["Identity", "Dropout", "Relu", "Abs", "Identity"]), f"inserted_{at}"
    model.graph.node.insert(at, helper.make_node(op, [reader.input[0]], [name], name=name))
    reader = model.graph.node[at + 1]
    reader.input[0] = name
    return f"{op} in front of {reader.op_type}"


def ask_shape(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """A reshape of a tensor to its own shape, asked at run time."""
    at = int(rng.integers(len(model.graph.node)))
    reader = model.graph.node[at]
    if not reader.input or not reader.input[0] or reader.op_type in ("If", "Loop"):
        return "nothing asked"
    made = [name for n in model.graph.node[:at] for name in n.output if name]
    asked = reader.input[0] if rng.random() < 0.8 or not made else _choose(rng, made)
    shape, name = f"shape_{at}", f"reshaped_{at}"
    nodes = [
        helper.make_node("Shape", [asked], [shape], name=shape),
        helper.make_node("Reshape", [reader.input[0], shape], [name], name=name),
    ]
    reader.input[0] = name
    for i, node in enumerate(nodes):
        model.graph.node.insert(at + i, node)
    return f"{reader.op_type} reads through a reshape"


def change_opset(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Another opset than the nodes were drawn for."""
    version = int(_choose(rng, list(OPSETS)))
    model.opset_import[0].version = version
    return f"opset {version}"


def initializers_as_inputs(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Initializers that are listed as inputs, too, as before IR version 4."""
    listed = {info.name for info in model.graph.input}
    for tensor in model.graph.initializer:
        if rng.random() < 0.5 and tensor.name not in listed:
            model.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return "initializers listed as inputs"


def wrap_in_branch(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """One node moves into both branches of an If."""
    found = [
        i for i, n in enumerate(model.graph.node)
        if len(n.output) == 1 and n.op_type not in ("If", "Loop", "Constant")
    ]  # fmt: skip
    if not found:
        return "nothing to move into a branch"
    at = _choose(rng, found)
    node = model.graph.node[at]
    branches = []
    for side in ("then", "else"):
        inner = onnx.NodeProto()
        inner.CopyFrom(node)
        inner.output[0] = f"{side}_of_{node.output[0]}"
        inner.name = ""
        branches.append(helper.make_graph([inner], side, [], [onnx.ValueInfoProto(name=inner.output[0])]))
    condition = f"condition_{at}_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(rng.random() < 0.5), condition))
    wrapped = helper.make_node(
        "If", [condition], list(node.output), name=node.name, then_branch=branches[0], else_branch=branches[1]
    )
    model.graph.node[at].CopyFrom(wrapped)
    return f"a node moved into If_{at}"


CHANGES: list[Change] = [
    open_dims, open_dims, open_dims, forget_outputs, add_outputs, add_outputs, rename_nodes, change_attribute,
    drop_attribute, change_grid, change_grid, splice, skip_node, insert_node, ask_shape, ask_shape,
    change_opset, initializers_as_inputs, wrap_in_branch,
]  # fmt: skip


def random_source(seed: int) -> Source:
    """The source model of a seed."""
    for attempt in range(20):
        graph = SourceGraph(seed + (attempt << 40))
        try:
            graph.draw()
            model = graph.finish()
        except UnusableError:
            continue
        break
    else:
        raise RuntimeError(f"seed {seed}: no graph in 20 attempts")
    rng = np.random.default_rng([seed, 0xC4A2])
    told = [_choose(rng, CHANGES)(model, rng) for _ in range(_choose(rng, [0, 1, 1, 2, 3]))]
    feeds = [dict(graph.inputs)]
    if "dims opened" in told:
        feeds.append({n: np.concatenate([v, v[::-1]]).astype(np.float32) for n, v in graph.inputs.items()})
    return Source(model, feeds, f"opset {model.opset_import[0].version}: {'; '.join(told) or 'as drawn'}")
