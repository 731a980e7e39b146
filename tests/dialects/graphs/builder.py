"""A small builder of quantized ONNX graphs, and the registry of the cases made with it.

A case is a function `build(g: Graph) -> None` decorated with `@case(...)`. It adds nodes to `g`; the
decorator records what is to be expected of its conversion. `Case.build(seed)` is deterministic. Ordinary
random scales hide wrong formulas, so the seed chooses a flavour:

- seed % 3 == 0, ties: scales are powers of two and inputs lie on half steps; many results fall exactly
  between two codes, and a wrong rounding mode shows;
- seed % 3 == 1, ordinary: arbitrary scales;
- seed % 3 == 2, near ties: scales are products of one decimal number and powers of two, so that ratios of
  scales are powers of two but for the last bit; the order of float32 operations decides which side of a tie
  a result takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support import stock_may_saturate

# name -> (ONNX element type, smallest code, largest code)
TYPES: dict[str, tuple[int, int, int]] = {
    "u8": (TensorProto.UINT8, 0, 255),
    "s8": (TensorProto.INT8, -128, 127),
    "u4": (TensorProto.UINT4, 0, 15),
    "s4": (TensorProto.INT4, -8, 7),
    "u2": (TensorProto.UINT2, 0, 3),
    "s2": (TensorProto.INT2, -2, 1),
    "u16": (TensorProto.UINT16, 0, 65535),
    "s16": (TensorProto.INT16, -32768, 32767),
    "s32": (TensorProto.INT32, -(2**31), 2**31 - 1),
}
_NUMPY = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "s32": np.int32,
    "u4": ml_dtypes.uint4, "s4": ml_dtypes.int4, "u2": ml_dtypes.uint2, "s2": ml_dtypes.int2,
}  # fmt: skip


def as_tensor(values: np.ndarray, kind: str, name: str) -> TensorProto:
    """Integer codes as a TensorProto of type `kind`, sub-byte types packed as ONNX packs them."""
    values = np.asarray(values)
    if kind in ("u2", "s2", "u4", "s4"):
        bits = int(kind[1])
        flat = values.astype(np.int64).reshape(-1) & ((1 << bits) - 1)
        per_byte = 8 // bits
        flat = np.concatenate([flat, np.zeros(-len(flat) % per_byte, np.int64)]).reshape(-1, per_byte)
        packed = sum(flat[:, i] << (bits * i) for i in range(per_byte)) if flat.size else flat[:, 0]
        raw = np.asarray(packed, np.uint8).tobytes()
        return TensorProto(name=name, data_type=TYPES[kind][0], dims=values.shape, raw_data=raw)
    return numpy_helper.from_array(values.astype(_NUMPY[kind]), name)


@dataclass(frozen=True)
class Quant:
    """Parameters of one quantizer: `kind` is a key of TYPES; `axis` is set when the scale is per channel."""

    scale: np.ndarray
    zero: np.ndarray
    kind: str
    axis: int | None = None


class Graph:
    """One ONNX graph under construction. Methods return the names of the tensors they make."""

    def __init__(self, name: str, seed: int):
        self.name = name
        self.rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        self.flavour = ("ties", "ordinary", "near ties")[seed % 3]
        self.opset = 13
        self.ir_version = 8
        self.domain = ""  # of Q/DQ nodes: "" or "com.microsoft"
        self.constants = "initializer"  # or "node", or "input": how parameters are stored
        self.scale_shape = "scalar"  # or "one": how a per-tensor scale is shaped ([] or [1])
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.extra_opsets: dict[str, int] = {}
        self.feeds: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {}
        self._count = 0

    # -- plumbing
    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{hint}_{self._count}"

    def const(self, value: np.ndarray | TensorProto, hint: str = "const") -> str:
        """A constant, as an initializer or as a Constant node."""
        name = self.fresh(hint)
        tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        tensor.name = name
        if self.constants == "node":
            self.nodes.append(
                helper.make_node("Constant", [], [name], name=self.fresh("Constant"), value=tensor)
            )
        else:
            self.initializers.append(tensor)
            if (
                self.constants == "input"
            ):  # with a default that the caller may override, as before IR version 4
                self.inputs.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        return name

    def floats(self, value, hint: str = "float") -> str:
        return self.const(np.asarray(value, np.float32), hint)

    def ints(self, value, hint: str = "shape") -> str:
        return self.const(np.asarray(value, np.int64), hint)

    def node(
        self, op: str, inputs: Sequence[str], *, outputs: int = 1, domain: str = "", **attributes
    ) -> str:
        """Adds a node and returns its output (a list when outputs > 1)."""
        names = [self.fresh(op) for _ in range(outputs)]
        self.nodes.append(
            helper.make_node(
                op, list(inputs), names, name=self.fresh(f"node_{op}"), domain=domain, **attributes
            )
        )
        return names[0] if outputs == 1 else names

    def input(
        self, shape: Sequence[int | str], kind: str = "f32", *, name: str | None = None, step: float = 0.0,
        about: float = 0.03,
    ) -> str:  # fmt: skip
        """A graph input. Floats are normal, 50 times `about` wide; on half steps where ties are wanted."""
        name = name or f"input{len(self.inputs)}"
        element = TensorProto.FLOAT if kind == "f32" else TYPES[kind][0]
        self.inputs.append(helper.make_tensor_value_info(name, element, list(shape)))
        halves = self.flavour != "ordinary"

        def feed(rng: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
            if kind != "f32":
                _, low, high = TYPES[kind]
                return rng.integers(low, high + 1, dims).astype(_NUMPY[kind])
            x = rng.normal(size=dims) * 50 * about
            if step and halves:
                x = np.rint(x / (step / 2)) * (step / 2)
            return x.astype(np.float32)

        self.feeds[name] = feed
        return name

    def output(
        self, tensor: str, shape: Sequence[int | str | None], element: int = TensorProto.FLOAT
    ) -> None:
        self.outputs.append(helper.make_tensor_value_info(tensor, element, list(shape)))

    def proto(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opsets = {"": self.opset, **self.extra_opsets}
        if any(n.domain == "com.microsoft" for n in self.nodes):
            opsets.setdefault("com.microsoft", 1)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()],
            producer_name="lowbit-tests",
        )
        model.ir_version = self.ir_version
        return model

    # -- quantization
    def scale(self, about: float, count: int | None = None) -> np.ndarray:
        """A float32 scale near `about`, or `count` of them, in the graph's flavour."""
        spread = self.rng.uniform(0.7, 1.4, size=count)
        if self.flavour == "ordinary":
            return np.asarray(about * spread, np.float32)
        power = np.exp2(np.rint(np.log2(about * spread)))
        if self.flavour == "near ties":
            power = power * 1.1 ** self.rng.integers(0, 2)
        elif count is not None:
            power = np.where(self.rng.random(count) < 0.3, power * 0.75, power)
        return np.asarray(power, np.float32)

    def act(self, about: float, kind: str = "u8", *, zero: int | str = "random") -> Quant:
        """Quantizer of an activation; `zero`: a number, "random" (middle half), "mid" or "low"."""
        _, low, high = TYPES[kind]
        if zero == "random":
            quarter = (high - low + 1) // 4
            zero = int(self.rng.integers(low + quarter, high - quarter + 1))
        elif zero == "mid":
            zero = (high + low + 1) // 2
        elif zero == "low":
            zero = low
        return Quant(self.scale(about), np.asarray(zero), kind)

    def weight_quant(
        self,
        channels: int | None,
        kind: str = "s8",
        *,
        about: float = 0.02,
        symmetric: bool = True,
        axis: int = 0,
    ) -> Quant:
        """Quantizer of a weight, per channel along `axis` when channels is given."""
        _, low, high = TYPES[kind]
        size = () if channels is None else (channels,)
        middle = 0 if low < 0 else (high + 1) // 2
        zero = np.full(size, middle) if symmetric else self.rng.integers(low, high + 1, size)
        return Quant(self.scale(about, channels), zero, kind, None if channels is None else axis)

    def codes(
        self, shape: Sequence[int], kind: str = "s8", *, low: int | None = None, high: int | None = None
    ):
        _, type_low, type_high = TYPES[kind]
        if kind == "s8" and stock_may_saturate():  # not with weights of 7 bits
            type_low, type_high = -64, 63
        low, high = type_low if low is None else low, type_high if high is None else high
        return self.rng.integers(low, high + 1, tuple(shape))

    def _quant_inputs(self, quant: Quant, zero_point: bool, dtype=np.float32) -> list[str]:
        scale, zero = quant.scale, quant.zero
        if quant.axis is None and self.scale_shape == "one":
            scale, zero = np.reshape(scale, (1,)), np.reshape(zero, (1,))
        names = [self.const(np.asarray(scale, dtype), "scale")]
        if zero_point:
            names.append(self.const(as_tensor(zero, quant.kind, ""), "zero_point"))
        return names

    def _axis(self, quant: Quant, explicit: bool = True) -> dict:
        return {"axis": quant.axis} if quant.axis is not None and explicit else {}

    def q(self, x: str, quant: Quant, *, zero_point: bool = True, dtype=np.float32) -> str:
        inputs = [x, *self._quant_inputs(quant, zero_point, dtype)]
        return self.node("QuantizeLinear", inputs, domain=self.domain, **self._axis(quant))

    def dq(self, x: str, quant: Quant, *, zero_point: bool = True, dtype=np.float32) -> str:
        inputs = [x, *self._quant_inputs(quant, zero_point, dtype)]
        return self.node("DequantizeLinear", inputs, domain=self.domain, **self._axis(quant))

    def qdq(self, x: str, quant: Quant) -> str:
        """Q and DQ that share their scale and zero point tensors, as exporters write them."""
        params = self._quant_inputs(quant, True)
        codes = self.node("QuantizeLinear", [x, *params], domain=self.domain, **self._axis(quant))
        return self.node("DequantizeLinear", [codes, *params], domain=self.domain, **self._axis(quant))

    def weight(self, codes: np.ndarray, quant: Quant) -> str:
        """An integer initializer behind a DQ."""
        return self.dq(self.const(as_tensor(codes, quant.kind, ""), "weight"), quant)

    def float_weight(self, codes: np.ndarray, quant: Quant, **options) -> str:
        """A float32 initializer behind Q and DQ, with values slightly off the grid."""
        shape = [1] * np.ndim(codes)
        if quant.axis is not None:
            shape[quant.axis] = -1
        scale, zero = np.reshape(quant.scale, shape), np.reshape(quant.zero, shape)
        noise = self.rng.uniform(-0.4, 0.4, np.shape(codes))
        value = ((codes - zero + noise) * scale).astype(np.float32)
        return self.qdq(self.const(value, "weight"), quant, **options)

    def bias(self, channels: int, x: Quant, w: Quant, spread: int = 2000) -> str:
        """An int32 bias behind a DQ of scale f32(sx * sw), as ONNX Runtime's quantizer writes it."""
        scale = np.asarray(x.scale, np.float32) * np.asarray(w.scale, np.float32)
        quant = Quant(scale, np.zeros(np.shape(scale)), "s32", None if np.ndim(scale) == 0 else 0)
        return self.dq(
            self.const(self.rng.integers(-spread, spread + 1, channels).astype(np.int32), "bias"), quant
        )

    @staticmethod
    def deviation(x: Quant, w: Quant, k: int, w_range: int | None = None) -> float:
        """About the standard deviation of a sum of k products of codes."""
        reach = [
            max(1.0, r / 3.5)
            for r in (TYPES[x.kind][2] - TYPES[x.kind][1], TYPES[w.kind][2] - TYPES[w.kind][1])
        ]
        if w_range is not None:
            reach[1] = max(1.0, w_range / 3.5)
        return float(np.sqrt(k) * reach[0] * reach[1])

    def after(
        self, x: Quant, w: Quant, k: int, kind: str = "u8", *, w_range: int | None = None, zero="random"
    ) -> Quant:
        """Quantizer of a sum of k products of these operands, such that most codes occur."""
        product = np.float64(np.mean(x.scale)) * np.float64(np.min(w.scale))
        about = self.deviation(x, w, k, w_range) * product * 5 / (TYPES[kind][2] - TYPES[kind][1] + 1)
        quant = self.act(about, kind, zero=zero)
        if self.flavour == "near ties":
            scale = product * np.exp2(np.rint(np.log2(about / product)))
            quant = Quant(np.asarray(scale, np.float32), quant.zero, kind)
        return quant


@dataclass(frozen=True)
class Built:
    """A model and how to feed it."""

    model: onnx.ModelProto
    feeds: Mapping[str, Callable]
    seed: int

    def feed(self, seed: int = 0, **symbols: int) -> dict[str, np.ndarray]:
        """Inputs; every symbolic dim must be among `symbols`."""
        rng = np.random.default_rng([self.seed, seed, 77])
        out = {}
        for value in self._fed():
            dims = value.type.tensor_type.shape.dim
            shape = tuple(d.dim_value if d.HasField("dim_value") else symbols[d.dim_param] for d in dims)
            out[value.name] = self.feeds[value.name](rng, shape)
        return out

    def _fed(self) -> list[onnx.ValueInfoProto]:
        return [v for v in self.model.graph.input if v.name in self.feeds]

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Values of the symbolic dims to run at: two sets where there are any, else one empty set."""
        dims = [d.dim_param for v in self._fed() for d in v.type.tensor_type.shape.dim]
        symbols = sorted({name for name in dims if name})
        if not symbols:
            return [{}]
        batch = {"N", "batch"}
        return [
            {name: (2 if name in batch else 8 + k) for k, name in enumerate(symbols)},
            {name: (1 if name in batch else 13 - 2 * k) for k, name in enumerate(symbols)},
        ]


@dataclass(frozen=True)
class Case:
    """A registered graph and what its conversion must show.

    Attributes:
        name: Registered name, `<file>.<function>`.
        left: Operator types of float matrix products that stay, mapped to a regular expression that the
            stated reason must match. Empty: none may stay. stock_equal: Stock ONNX Runtime, optimized and
            exact, gives the same bits. float_tail: Results pass float operations behind the last integer
            node: compare within 1e-6 relative. loads_in_stock: Stock ONNX Runtime can load the model at all,
            with optimizations disabled. ties_differ: It does, but its kernels round ties by other formulas.
    """

    name: str
    build_into: Callable[[Graph], None]
    left: Mapping[str, str] = field(default_factory=dict)
    stays: Sequence[str] = ()
    stock_equal: bool = False
    float_tail: bool = False
    loads_in_stock: bool = True
    ties_differ: bool = False

    def build(self, seed: int = 0) -> Built:
        g = Graph(self.name, seed)
        self.build_into(g)
        return Built(g.proto(), g.feeds, seed)


CASES: dict[str, Case] = {}


def case(**expected):
    """Registers a graph function under `<module>.<function>`."""

    def register(function: Callable[[Graph], None]) -> Callable[[Graph], None]:
        name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, function, **expected)
        return function

    return register
