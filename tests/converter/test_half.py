"""Float16 around int8, kept: what is exact on every code is converted, the rest stays with its reason."""

from __future__ import annotations

from collections.abc import Callable

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.graph.quantization import CODE_TYPES, CodeRange, Grid, survives_half

from tests.converter.graphs import Converted
from tests.dialects.graphs.builder import Built, Graph, Quant
from tests.support import lowbit_session, stock_run

_HALF = int(onnx.TensorProto.FLOAT16)


def half(g: Graph, x: str, quant: Quant) -> str:
    """A pair of float16: QuantizeLinear and DequantizeLinear."""
    return g.dq(g.q(x, quant, dtype=np.float16), quant, dtype=np.float16)


def s8(scale: float, zero: int = 0) -> Quant:
    return Quant(np.float32(np.float16(scale)), np.asarray(zero), "s8")


def constant(g: Graph, array: np.ndarray) -> str:
    return g.const(array.astype(np.float16))


def converted(build: Callable[[Graph, str], str], *, optimize: bool = False) -> Converted:
    """A float16 graph between two Casts, converted; it computes what it did.

    ONNX Runtime computes float16 in float32 and leaves out roundings between neighbours: a graph whose float
    nodes have other neighbours now is compared with what it makes of both when it optimizes.
    """
    g = Graph(build.__name__, 1)
    g.opset, g.ir_version = 19, 9
    y = build(g, g.node("Cast", [g.input((2, 4, 8, 8))], to=_HALF))
    g.output(g.node("Cast", [y], to=int(onnx.TensorProto.FLOAT)), ("a", "b", "c", "d"))
    built = Built(g.proto(), g.feeds, 1)
    result = lowbit.convert(built.model, keep_float16=True)
    feeds = built.feed(0, **built.sizes[0])
    (before,) = stock_run(built.model, feeds, optimize=optimize)
    (after,) = lowbit_session(result.model, optimize=optimize).run(None, feeds)
    assert np.array_equal(before, after)
    return Converted(built, result)


def pool(g: Graph, x: str) -> str:
    return half(g, g.node("MaxPool", [half(g, x, s8(0.02))], kernel_shape=[3, 3]), s8(0.02))


def raised(g: Graph, x: str) -> str:
    return half(g, g.node("MaxPool", [g.node("Relu", [x])], kernel_shape=[2, 2]), s8(0.03))


def moved(g: Graph, x: str) -> str:
    y = g.node("Transpose", [half(g, x, s8(0.02))], perm=[0, 2, 3, 1])
    return half(g, g.node("Reshape", [half(g, y, s8(0.02)), g.ints([2, 8, 4, 8])]), s8(0.02))


def joined(g: Graph, x: str) -> str:
    parts = [half(g, part, s8(0.02)) for part in (x, g.node("Relu", [x]))]
    return half(g, g.node("Concat", parts, axis=1), s8(0.02))


def silu(g: Graph, x: str) -> str:
    x = half(g, x, s8(0.02))
    return half(g, g.node("Mul", [x, g.node("Sigmoid", [x])]), s8(0.013, -100))


def between_moves(g: Graph, x: str) -> str:
    x = g.node("Transpose", [half(g, x, s8(0.02))], perm=[0, 2, 3, 1])
    return half(g, g.node("HardSwish", [half(g, x, s8(0.02))]), s8(0.015, 3))


@pytest.mark.parametrize(
    ("build", "ops", "pairs"),
    [
        (pool, {"LowBitMaxPool": 1}, 1),
        (raised, {"LowBitMaxPool": 1, "Relu": 1}, 1),
        (moved, {"Transpose": 1, "Reshape": 1}, 1),
        (joined, {"Concat": 1, "Relu": 1}, 2),
        (silu, {"LowBitLookup": 1}, 1),
        (between_moves, {"LowBitLookup": 1}, 1),
    ],
)
def test_what_is_exact_on_every_code(
    build: Callable[[Graph, str], str], ops: dict[str, int], pairs: int
) -> None:
    result = converted(build)
    assert {op: result.ops[op] for op in ops} == ops
    assert (result.ops["QuantizeLinear"], result.ops["DequantizeLinear"]) == (pairs, 1)


def test_pairs_vanish_where_every_code_survives_them() -> None:
    assert _pairs(0.02) == 1
    assert _pairs(600.0) == 2  # 127 * 600 is infinite


def _pairs(scale: float) -> int:
    def twice(g: Graph, x: str) -> str:
        return half(g, half(g, x, s8(scale)), s8(scale))

    return converted(twice).ops["QuantizeLinear"]


@pytest.mark.parametrize("scale", [2**-24, 3e-7, 1e-5, 0.0173, 1.0, 300.0, 600.0])
@pytest.mark.parametrize("zero", [0, -128, 17])
def test_survival_by_float16_arithmetic(scale: float, zero: int) -> None:
    """The claim against ONNX Runtime itself, which divides in float32."""
    quant = s8(scale, zero)
    grid = Grid(np.asarray(quant.scale), np.asarray(zero, np.int32))
    g = Graph("survival", 1)
    g.opset, g.ir_version = 19, 9
    y = g.q(g.dq(g.input((256,), "s8"), quant, dtype=np.float16), quant, dtype=np.float16)
    g.output(y, (256,), onnx.TensorProto.INT8)
    codes = np.arange(-128, 128).astype(np.int8)
    (found,) = stock_run(g.proto(), {"input0": codes}, optimize=False)
    survives = survives_half(grid, CodeRange.of(next(t for t, r in CODE_TYPES.items() if r == (-128, 127))))
    assert not survives or np.array_equal(found, codes)
    assert survives == (max(128 + zero, 127 - zero) * scale < 65520), "only overflow loses codes here"


def conv(g: Graph, x: str) -> str:
    codes = g.const(g.rng.integers(-127, 128, (4, 4, 3, 3)).astype(np.int8))
    weight = g.dq(codes, Quant(np.full(4, 0.01, np.float32), np.zeros(4), "s8", 0), dtype=np.float16)
    y = g.node("Conv", [half(g, x, s8(0.02)), weight, constant(g, g.rng.normal(size=4))])
    return half(g, y, s8(0.05))


def add(g: Graph, x: str) -> str:
    return half(g, g.node("Add", [half(g, x, s8(0.02)), half(g, g.node("Relu", [x]), s8(0.03))]), s8(0.05))


def head(g: Graph, x: str) -> str:
    """The head of a detector: distances as the mean of a softmax, in float16 behind a quantized layer."""
    y = g.node("Reshape", [conv(g, x), g.ints([2, 2, 2, 36])])
    y = g.node("Softmax", [g.node("Transpose", [y], perm=[0, 2, 1, 3])], axis=1)
    return g.node("Conv", [y, constant(g, np.arange(2).reshape(1, 2, 1, 1))])


@pytest.mark.parametrize(("build", "op_type"), [(conv, "Conv"), (add, "Add"), (head, "Softmax")])
def test_what_rounds_to_float16_in_between_stays(build: Callable[[Graph, str], str], op_type: str) -> None:
    result = converted(build, optimize=True)
    assert not [name for name in result.ops if name.startswith("LowBit")]
    reasons = {node.op_type: str(node.reason) for node in result.result.report.kept}
    assert op_type == "Softmax" or "computes in float16" in reasons[op_type]
