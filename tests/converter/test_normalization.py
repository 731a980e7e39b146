"""Layer, group and instance normalization, as ops and written out."""

from __future__ import annotations

from collections.abc import Callable

import lowbit
import numpy as np
import onnx
import pytest

from tests.converter.graphs import SEEDS, Converted, conv, converted, image, output, refuses
from tests.dialects.graphs.builder import Graph
from tests.hostile.differential import verdict
from tests.support import lowbit_session, stock_run

Build = Callable[[Graph], None]


def becomes(build: Build, **attributes: object) -> Converted:
    """Asserts that a graph gets one LowBitNormalization that agrees with stock; the last conversion."""
    for seed in SEEDS:
        result = converted(build, seed)
        given = result.attributes("LowBitNormalization")
        assert {name: given.get(name) for name in attributes} == attributes
        assert not {"ReduceMean", "Sqrt", "LayerNormalization"} & set(result.ops), result.ops
        report = lowbit.verify(result.result.model, result.built.model, samples=1)
        assert report.ok, report.nodes
        feeds = result.built.feed(seed, **result.built.sizes[0])
        session = lowbit_session(result.result.model)
        for ours, stock in zip(
            session.run(None, feeds), stock_run(result.built.model, feeds, optimize=False), strict=True
        ):
            assert ours.shape == stock.shape
            assert np.abs(ours - stock).max() < 0.11  # two steps of the output's scale
    return result


def factors(g: Graph, *shape: int) -> list[str]:
    return [g.floats(g.rng.normal(size=shape) + shift) for shift in (1.0, 0.0)]


def normalized(g: Graph, op: str, x: str, count: int, **attributes: object) -> str:
    return g.qdq(g.node(op, [x, *factors(g, count)], **attributes), g.act(0.05, zero=120))


def tokens(g: Graph) -> str:
    """A quantized [n, 5, 12]."""
    quant = g.act(0.03)
    return g.qdq(g.input(("n", 5, 12), step=float(quant.scale)), quant)


def test_layer_normalization() -> None:
    def build(g: Graph) -> None:
        g.opset = 17
        output(g, normalized(g, "LayerNormalization", tokens(g), 12, epsilon=1e-3), "n", 5, 12)

    becomes(build, axis=None, groups=None)


def test_layer_normalization_over_channels_of_an_image() -> None:
    """ConvNeXt: a Transpose on both sides, which are ways to read what is stored channels last."""

    def build(g: Graph) -> None:
        g.opset = 17
        x, xq = image(g)
        y, yq = conv(g, x, xq, out=8, pads=[1, 1, 1, 1])
        y = g.node("Transpose", [g.qdq(y, yq)], perm=[0, 2, 3, 1])
        y = normalized(g, "LayerNormalization", y, 8)
        output(g, g.node("Transpose", [y], perm=[0, 3, 1, 2]), 2, 8, 6, 6)

    result = becomes(build)
    assert result.ops["Transpose"] <= 1


def test_layer_normalization_of_several_axes() -> None:
    def build(g: Graph) -> None:
        g.opset = 17
        x, _ = image(g)
        y = g.node("LayerNormalization", [x, *factors(g, 4, 6, 6)], axis=1)
        output(g, g.qdq(y, g.act(0.05, zero=120)), 2, 4, 6, 6)

    becomes(build, axis=-3)


def test_group_normalization() -> None:
    def build(g: Graph) -> None:
        g.opset = 21
        x, _ = image(g, channels=6)
        output(g, normalized(g, "GroupNormalization", x, 6, num_groups=2), 2, 6, 6, 6)

    becomes(build, axis=-3, groups=2)


def test_instance_normalization() -> None:
    def build(g: Graph) -> None:
        x, _ = image(g, channels=5)
        y = g.node("InstanceNormalization", [x, *factors(g, 5)])
        output(g, g.qdq(g.node("Relu", [y]), g.act(0.05, zero=0)), 2, 5, 6, 6)

    becomes(build, axis=-3, groups=5)


def written_out(g: Graph, x: str, axis: int, shape: tuple[int, ...], *, twice: bool, square: str) -> str:
    """As torch wrote a LayerNorm before opset 17."""
    mean = g.node("ReduceMean", [x], axes=[axis], keepdims=1)
    centred = g.node("Sub", [x, mean])
    again = g.node("Sub", [x, mean]) if twice else centred
    two = g.floats(np.float32(2))
    power = g.node("Pow", [again, two]) if square == "Pow" else g.node("Mul", [again, again])
    variance = g.node("ReduceMean", [power], axes=[axis], keepdims=1)
    root = g.node("Sqrt", [g.node("Add", [variance, g.floats(np.float32(1e-4))])])
    y = g.node("Div", [centred, root])
    gamma, beta = factors(g, *shape)
    return g.node("Add", [g.node("Mul", [y, gamma]), beta])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_written_out(twice: bool, square: str) -> None:
    def build(g: Graph) -> None:
        g.opset = 13
        y = written_out(g, tokens(g), -1, (12,), twice=twice, square=square)
        output(g, g.qdq(y, g.act(0.05, zero=120)), "n", 5, 12)

    becomes(build)


def test_written_out_over_the_channels_of_an_image() -> None:
    def build(g: Graph) -> None:
        g.opset = 13
        x, _ = image(g)
        y = written_out(g, x, 1, (4, 1, 1), twice=False, square="Pow")
        output(g, g.qdq(y, g.act(0.05, zero=120)), 2, 4, 6, 6)

    becomes(build)


def test_what_stays_says_why() -> None:
    def computed_scale(g: Graph) -> None:
        g.opset = 17
        y = g.node("LayerNormalization", [tokens(g), g.input((12,))])
        output(g, g.qdq(y, g.act(0.05)), "n", 5, 12)

    def not_quantized(g: Graph) -> None:
        g.opset = 17
        y = g.node("LayerNormalization", [g.input((2, 12)), *factors(g, 12)])
        output(g, g.qdq(y, g.act(0.05)), 2, 12)

    def read_inside(g: Graph) -> None:
        g.opset = 13
        x = tokens(g)
        y = written_out(g, x, -1, (12,), twice=False, square="Pow")
        output(g, g.qdq(y, g.act(0.05)), "n", 5, 12)
        root = next(node for node in g.nodes if node.op_type == "Sqrt")
        output(g, root.output[0], "n", 5, 1)

    refuses(computed_scale, "LayerNormalization", "not a float32 constant")
    refuses(not_quantized, "LayerNormalization", "input is not quantized")
    kept = converted(read_inside).result.report.kept
    assert any("read elsewhere" in (entry.reason or "") for entry in kept), kept


def refused(op: str, shape: tuple[int | str, ...], factor: np.ndarray, **attributes: object) -> Build:
    """A normalization of a quantized tensor of some shape, with this factor and no summand."""

    def build(g: Graph) -> None:
        g.opset = 21
        x = g.qdq(g.input(shape), g.act(0.03))
        summand = g.floats(np.zeros_like(factor))
        output(g, g.qdq(g.node(op, [x, g.floats(factor), summand], **attributes), g.act(0.05)), *shape)

    return build


def mean_is_used(g: Graph) -> None:
    g.opset = 17
    y, mean, _ = g.node("LayerNormalization", [tokens(g), *factors(g, 12)], outputs=3)
    output(g, g.qdq(y, g.act(0.05)), "n", 5, 12)
    output(g, mean, "n", 5, 1)


@pytest.mark.parametrize(
    ("build", "op", "reason"),
    [
        (
            refused("LayerNormalization", (2, 5, 12), np.ones(12), epsilon=0.0),
            "Layer",
            "a positive one",
        ),
        (refused("LayerNormalization", (2, 5, 12), np.full(12, 1e38)), "Layer", "out of float32's range"),
        (refused("LayerNormalization", (1, 1 << 24), np.ones(1)), "Layer", "sums up to 2.23 exactly"),
        (refused("LayerNormalization", (2, 5, "w"), np.ones((5, 1)), axis=1), "Layer", "unknown"),
        (refused("LayerNormalization", (2, 5, 12), np.ones((5, 12)), axis=-1), "Layer", "not normalized"),
        (refused("LayerNormalization", (2, 5, 12), np.ones(12), stash_type=16), "Layer", "not float32"),
        (refused("InstanceNormalization", (2, "c", 6), np.ones(5)), "Instance", "channels is unknown"),
        (
            refused("GroupNormalization", (2, 6, 5), np.ones(6), num_groups=4),
            "Group",
            "4 groups of 6",
        ),
        (mean_is_used, "Layer", "its mean or its deviation is used"),
    ],
)
def test_what_lowbit_does_not_normalize(build: Build, op: str, reason: str) -> None:
    refuses(build, f"{op}Normalization", reason)


def of(nodes: list[onnx.NodeProto], op: str, index: int = 0) -> onnx.NodeProto:
    return [node for node in nodes if node.op_type == op][index]


ALMOST: dict[str, Callable[[Graph, str], None]] = {
    "nothing added under the root": lambda g, _: of(g.nodes, "Sqrt").input.__setitem__(
        0, of(g.nodes, "ReduceMean", 1).output[0]
    ),
    "an epsilon for each token": lambda g, _: of(g.nodes, "Add").input.__setitem__(
        1, g.floats(np.full((5, 1), 1e-4))
    ),
    "a cube": lambda g, _: of(g.nodes, "Pow").input.__setitem__(1, g.floats(np.float32(3))),
    "the square of what was read": lambda g, x: of(g.nodes, "Pow").input.__setitem__(0, x),
    "the difference to another mean": lambda g, x: of(g.nodes, "Sub", 1).input.__setitem__(
        1, g.node("ReduceMean", [x], axes=[1], keepdims=1)
    ),
    "the difference of something else": lambda g, x: of(g.nodes, "Sub", 1).input.__setitem__(
        0, g.node("Neg", [x])
    ),
    "a variance along another axis": lambda g, _: (
        of(g.nodes, "ReduceMean", 1).attribute[0].ints.__setitem__(0, 1)
    ),
    "a product in the place of the root": lambda g, _: setattr(of(g.nodes, "Sqrt"), "op_type", "Exp"),
    "a sum in the place of the difference": lambda g, _: setattr(of(g.nodes, "Sub"), "op_type", "Add"),
    "a largest one in the place of a mean": lambda g, _: setattr(
        of(g.nodes, "ReduceMean"), "op_type", "ReduceMax"
    ),
}


@pytest.mark.parametrize("what", ALMOST)
def test_written_out_almost(what: str) -> None:
    """One step is another one: nothing is normalized, and the results are stock's."""

    def build(g: Graph) -> None:
        g.opset = 13
        x = tokens(g)
        y = written_out(g, x, -1, (12,), twice=True, square="Pow")
        ALMOST[what](g, x)
        output(g, g.qdq(y, g.act(0.05, zero=120)), "n", 5, 12)

    result = converted(build)
    assert "LowBitNormalization" not in result.ops
    feed = result.built.feed(0, **result.built.sizes[0])
    assert verdict(result.built.model, [feed], "cpu-ops") == "equal"
