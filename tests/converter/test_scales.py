"""Scales that are nodes of their own: moved into quantizers where that changes no number, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dialects import oracle
from tests.dialects.graphs.builder import Built, Graph, Quant
from tests.support import lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")

UNIT = np.float32(1)
CHANNELS = 8


def unit_conv(g: Graph, bias: bool) -> str:
    """A convolution of integers: x, weights and bias have the scale 1."""
    x = g.dq(g.input([2, 4, 7, 7], "u8"), Quant(UNIT, np.asarray(3), "u8"))
    w = g.weight(g.codes((CHANNELS, 4, 3, 3), low=-7, high=7), Quant(UNIT, np.asarray(0), "s8"))
    inputs = [x, w]
    if bias:
        codes = g.const(g.rng.integers(-900, 900, CHANNELS).astype(np.int32), "bias")
        inputs.append(g.dq(codes, Quant(UNIT, np.asarray(0), "s32"), zero_point=False))
    return g.node("Conv", inputs, kernel_shape=[3, 3])


def per_channel(g: Graph, about: float) -> str:
    return g.floats(g.scale(about, CHANNELS).reshape(1, CHANNELS, 1, 1))


def finish(g: Graph, real: str, scale: np.ndarray, seed: int, rank: int = 4) -> tuple[list, Built]:
    """A quantizer, the conversion of all of it, and its comparison with what the graph means."""
    y = Quant(np.asarray(scale, np.float32), np.asarray(11), "u8")
    g.output(g.dq(g.q(real, y), y), [None] * rank)
    built = Built(g.proto(), g.feeds, seed)
    result = lowbit.convert(built.model, all_regions=True)
    feeds = built.feed()
    (ours,) = lowbit_session(result.model).run(None, feeds)
    (meant,) = oracle.run(built.model, feeds)
    np.testing.assert_array_equal(ours, meant, err_msg=f"seed {seed}")
    assert len(np.unique(ours)) > 8
    return [node.op_type for node in result.model.graph.node], built


@pytest.mark.parametrize("bias", [False, True])
def test_a_multiplier_becomes_the_scale_of_the_weights(bias: bool, seeds) -> None:
    require_native()
    for seed in seeds(6):
        g = Graph(f"multiplier {bias}", seed)
        real = g.node("Mul", [unit_conv(g, bias), per_channel(g, 0.02)])
        ops, _ = finish(g, real, UNIT, seed)
        assert ops == ["Transpose", "LowBitConv", "LowBitDequantize"] or ops == [
            "LowBitConv",
            "LowBitDequantize",
        ]


@pytest.mark.parametrize("bias", [False, True])
def test_two_roundings_stay_two(bias: bool, seeds) -> None:
    """In front of another scale the product is multiplied, then divided: not one multiplication."""
    require_native()
    for seed in seeds(12):
        g = Graph(f"two {bias}", seed)
        real = g.node("Mul", [unit_conv(g, bias), per_channel(g, 0.013)])
        finish(g, real, g.scale(0.7), seed)


@pytest.mark.parametrize("steps", ["Div", "Relu Div", "Bias Div", "Bias Relu Div", "Mul Div"])
def test_a_division_behind_a_product(steps: str, seeds) -> None:
    require_native()
    for seed in seeds(8):
        g = Graph(steps, seed)
        real = g.node("Mul", [unit_conv(g, True), per_channel(g, 0.013)])
        for step in steps.split():
            if step == "Relu":
                real = g.node("Relu", [real])
            elif step == "Bias":
                offsets = g.rng.normal(size=(1, CHANNELS, 1, 1)).astype(np.float32)
                real = g.node("Add", [real, g.floats(offsets)])
            elif step == "Mul":
                real = g.node("Mul", [real, per_channel(g, 1.0)])
            else:
                real = g.node("Div", [real, g.floats(g.scale(0.7))])
        finish(g, real, UNIT, seed)


def test_scales_of_an_addition(seeds) -> None:
    """What ``lowbit export`` makes of LowBitAdd is one LowBitAdd again."""
    require_native()
    for seed in seeds(6):
        g = Graph("addition", seed)
        reals = []
        for about in (0.05, 0.08):
            x = g.dq(g.input([2, CHANNELS, 5, 5], "u8"), Quant(UNIT, np.asarray(100), "u8"))
            reals.append(g.node("Mul", [x, g.floats(g.scale(about))]))
        real = g.node("Div", [g.node("Add", reals), g.floats(g.scale(0.1))])
        ops, _ = finish(g, real, UNIT, seed)
        assert "LowBitAdd" in ops
        assert not {"Add", "Mul", "Div"} & set(ops)


def test_a_sum_of_pixels_is_a_mean(seeds) -> None:
    require_native()
    for seed in seeds(6):
        g = Graph("sum", seed)
        x = g.dq(g.input([3, 40, 7, 7], "u8"), Quant(UNIT, np.asarray(0), "u8"))
        total = g.node("ReduceSum", [x, g.ints([2, 3])], keepdims=1)
        real = g.node("Mul", [total, g.floats(g.scale(0.008) * np.float32(1.37))])
        ops, _ = finish(g, real, UNIT, seed)
        assert "LowBitGlobalAveragePool" in ops
        assert "ReduceSum" not in ops


@pytest.mark.parametrize("added", ["zeros", "codes"])
def test_an_addition_behind_a_multiplier(added: str, seeds) -> None:
    """Neither may be taken for the bias of a product that the multiplier has become the scale of."""
    require_native()
    for seed in seeds(12):
        g = Graph(added, seed)
        factor = g.scale(0.05)
        real = g.node("Mul", [unit_conv(g, False), g.floats(factor)])
        if added == "zeros":
            other = g.floats(np.zeros((1, CHANNELS, 1, 1), np.float32))
        else:
            codes = g.const(g.rng.integers(-99, 99, (1, CHANNELS, 1, 1)).astype(np.int32), "offsets")
            other = g.dq(codes, Quant(factor, np.asarray(0), "s32"), zero_point=False)
        finish(g, g.node("Add", [real, other]), g.scale(0.7) if added == "zeros" else UNIT, seed)


def test_factors_of_a_gemm(seeds) -> None:
    """Alpha is part of the multiplier, which no scale of a reader may change."""
    require_native()
    for seed in seeds(6):
        g = Graph("alpha", seed)
        x = g.dq(g.input([64, 16], "u8"), Quant(UNIT, np.asarray(3), "u8"))
        w = g.weight(g.codes((16, 24), low=-7, high=7), Quant(g.scale(0.1), np.asarray(0), "s8"))
        y = Quant(UNIT, np.asarray(101), "u8")
        codes = g.q(g.node("Gemm", [x, w], alpha=0.3), y)
        g.output(g.dq(codes, Quant(g.scale(0.3), np.asarray(101), "u8")), [None] * 2)
        built = Built(g.proto(), g.feeds, seed)
        feeds = built.feed()
        (ours,) = lowbit_session(lowbit.convert(built.model).model).run(None, feeds)
        (meant,) = oracle.run(built.model, feeds)
        np.testing.assert_array_equal(ours, meant, err_msg=f"seed {seed}")


@pytest.mark.parametrize("op", ["Mul", "Div"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 3, 1, 1)])
def test_operands_that_widen_a_tensor(op: str, shape: tuple[int, ...]) -> None:
    """Broadcasting gives the result more dims or channels than a grid could."""
    require_native()
    g = Graph("wide", 0)
    unit, factor = Quant(UNIT, np.asarray(9), "u8"), g.floats(np.full(shape, 0.25, np.float32))
    if op == "Mul":
        real = g.node("Mul", [g.dq(g.input([2, 1, 5, 5], "u8"), unit), factor])
    else:
        real = g.node(
            "Div", [g.dq(g.input([2, 1, 5, 5], "u8"), Quant(g.scale(0.1), np.asarray(9), "u8")), factor]
        )
        real = g.dq(g.q(real, unit), unit)
    g.output(g.node("MaxPool", [real], kernel_shape=[2, 2]) if len(shape) == 4 else real, [None] * len(shape))
    built = Built(g.proto(), g.feeds, 0)
    feeds = built.feed()
    (ours,) = lowbit_session(lowbit.convert(built.model).model).run(None, feeds)
    (meant,) = oracle.run(built.model, feeds)
    np.testing.assert_array_equal(ours, meant)


def test_a_constant_along_the_batch() -> None:
    """Even where the batch has as many entries as there are codes, in whose place a table is computed."""
    require_native()
    g = Graph("batch", 0)
    real = g.dq(g.input([256, 8], "u8"), Quant(g.scale(0.1), np.asarray(9), "u8"))
    factors = g.floats(g.rng.normal(size=(256, 8)).astype(np.float32))
    finish(g, g.node("Mul", [real, factors]), g.scale(0.2), 0, rank=2)
