"""Quantizers behind ops between layers, where NVIDIA's tools leave them, raised to the layers before."""

from __future__ import annotations

import json
from collections.abc import Callable

import lowbit
import numpy as np
import pytest

from tests.converter.graphs import conv, converted, converts, image, output
from tests.dialects.graphs.builder import Graph, Quant
from tests.hostile.differential import verdict

Quantized = tuple[str, Quant]


def layer(g: Graph, x: str, xq: Quant, out: int = 4, channels: int = 4, kernel: int = 1) -> str:
    """A convolution with a float bias and a SiLU, whose result is not rounded."""
    wq = g.weight_quant(out)
    weight = g.weight(g.codes((out, channels, kernel, kernel), low=-127), wq)
    bias = g.floats(g.rng.normal(size=out))
    y = g.node("Conv", [x, weight, bias], pads=[kernel // 2] * 4)
    return g.node("Mul", [y, g.node("Sigmoid", [y])])


def rounded(g: Graph, x: str, about: float = 0.05, kind: str = "u8") -> Quantized:
    """A float tensor behind a pair of its own."""
    quant = g.act(about, kind)
    return g.qdq(x, quant), quant


def last(g: Graph, x: str, channels: int, about: float = 0.05) -> None:
    """A quantized convolution of a tensor, as an output of the graph."""
    y, yq = conv(g, *rounded(g, x, about), channels=channels, kernel=1)
    output(g, g.qdq(y, yq), 2, 5, "h", "w")


@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_the_parts_of_a_block_are_convolutions_of_their_own(shortcut: bool, whole: bool) -> None:
    """A block of YOLO: half of a layer's channels go through others, then all are joined."""

    def build(g: Graph) -> None:
        parts = g.node("Split", [layer(g, *image(g), out=8), g.ints([3, 5])], axis=1, outputs=2)
        y, yq = rounded(g, parts[1])
        z = layer(g, y, yq, 5, 5, 3)
        z = g.node("Add", [y, z]) if shortcut else z
        joined = [parts[0], parts[1] if whole else y, z]
        last(g, g.node("Concat", joined, axis=1), 13, 0.07)

    # Of a part that the layers and the Concat round to two grids, real numbers stay.
    result = converts(build, *["LowBitConv"] * 4, "LowBitConcat")
    assert result.ops["LowBitQuantize"] == (3 if whole else 1)


def test_parts_of_one_grid_are_cut_as_codes() -> None:
    def build(g: Graph) -> None:
        yq = g.act(0.05)
        parts = g.node("Split", [layer(g, *image(g), out=8), g.ints([3, 5])], axis=1, outputs=2)
        for part, channels in zip(parts, (3, 5), strict=True):
            z, zq = conv(g, g.qdq(part, yq), yq, channels=channels, kernel=1)
            output(g, g.qdq(z, zq), 2, 5, 6, 6)

    converts(build, *["LowBitConv"] * 3, "Split")


def test_parts_of_other_layers_than_convolutions_are_not_cut() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        a, b = layer(g, x, xq), layer(g, x, xq)
        parts = g.node("Split", [g.node("Add", [a, b]), g.ints([2, 2])], axis=1, outputs=2)
        for part in parts:
            last(g, part, 2, 0.05 if part is parts[0] else 0.2)

    assert converted(build).ops["LowBitConv"] == 4
    converted(build).assert_equal()


def test_pools_of_pools_share_the_quantizer_of_the_concat_behind_them() -> None:
    def build(g: Graph) -> None:
        joined = [layer(g, *image(g))]
        for _ in range(3):
            pool = g.node("MaxPool", [joined[-1]], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            joined.append(pool)
        last(g, g.node("Concat", joined, axis=1), 16)

    result = converts(build, *["LowBitConv"] * 2, *["LowBitMaxPool"] * 3, "LowBitConcat")
    assert result.ops["LowBitQuantize"] == 1


def test_a_tensor_that_is_joined_on_two_grids_is_quantized_for_each() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y, small = layer(g, x, xq), layer(g, *image(g, size=3))
        large = g.node("Resize", [small, "", g.floats([1, 1, 2, 2])], mode="nearest", nearest_mode="floor",
                       coordinate_transformation_mode="asymmetric")  # fmt: skip
        last(g, g.node("Concat", [large, y], axis=1), 8)
        last(g, g.node("Concat", [y, layer(g, x, xq)], axis=1), 8, 0.3)

    result = converts(build, *["LowBitConv"] * 5, "LowBitResize", *["LowBitConcat"] * 2)
    assert result.ops["LowBitQuantize"] == 4


def test_a_concat_for_readers_on_two_grids_is_made_for_each() -> None:
    def build(g: Graph) -> None:
        (x, xq), (other, _) = image(g), image(g)
        y = g.node("Concat", [layer(g, x, xq), other, layer(g, x, xq)], axis=1)
        last(g, y, 12)
        last(g, y, 12, 0.2)

    result = converts(build, *["LowBitConv"] * 4, *["LowBitConcat"] * 2)
    assert result.ops["LowBitQuantize"] == 6


def test_codes_of_raised_quantizers_are_compared_with_the_real_numbers_of_the_model() -> None:
    def build(g: Graph) -> None:
        parts = g.node("Split", [layer(g, *image(g), out=8), g.ints([3, 5])], axis=1, outputs=2)
        y, yq = rounded(g, parts[1], kind="s8")
        pool = g.node("MaxPool", [layer(g, y, yq, 4, 5)], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        last(g, g.node("Concat", [*parts, pool], axis=1), 12)

    result = converted(build)
    report = lowbit.verify(result.result.model, result.built.model, samples=4)
    assert report.ok
    assert not [node.name for node in report.nodes if node.note]
    (record,) = (p.value for p in result.result.model.metadata_props if p.key == "lowbit.provenance")
    assert sum("rounded" in entry for entry in json.loads(record)["values"].values()) == 4


@pytest.mark.parametrize("kind", ["u8", "s8"])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_sum_behind_a_concat_is_rounded_before_it_is_quantized(kind: str, pooled: bool) -> None:
    """There is no multiplier for a product and a quantizer that stands behind a Concat."""

    def build(g: Graph) -> None:
        (x, xq), (other, _) = image(g), image(g)
        y, yq = conv(g, x, xq, pads=[1, 1, 1, 1])
        yq = Quant(yq.scale, np.asarray(3), kind)
        y = g.node("MaxPool", [g.node("Relu", [y])], kernel_shape=[3, 3], pads=[1, 1, 1, 1]) if pooled else y
        z, zq = conv(g, g.qdq(g.node("Concat", [y, other], axis=1), yq), yq, channels=9)
        output(g, g.qdq(z, zq), 2, 5, 4, 4)

    result = converts(build, *["LowBitConv"] * 2, "LowBitConcat", *["LowBitMaxPool"] * pooled)
    assert result.ops["LowBitQuantize"] == 2


def test_a_mean_behind_a_concat_is_rounded_before_it_is_quantized() -> None:
    def build(g: Graph) -> None:
        (a, _), (b, bq) = image(g), image(g)
        means = [g.node("GlobalAveragePool", [value]) for value in (a, b)]
        yq = Quant(np.asarray(bq.scale / 8, np.float32), bq.zero, bq.kind)
        z, zq = conv(g, g.qdq(g.node("Concat", means, axis=1), yq), yq, channels=8, kernel=1)
        output(g, g.qdq(z, zq), 2, 5, 1, 1)

    converted(build).assert_equal()


def test_what_someone_reads_as_real_numbers_stays() -> None:
    def build(g: Graph) -> None:
        y = g.node("Concat", [layer(g, *image(g)), layer(g, *image(g))], axis=1)
        last(g, y, 8)
        output(g, y, 2, 8, 6, 6)

    assert {"Concat", "LowBitQuantize"} <= set(converted(build).ops)


def test_a_small_part_of_a_tensor_is_cut_before_it_is_quantized() -> None:
    def build(g: Graph) -> None:
        y = layer(g, *image(g), out=8)
        last(g, g.node("Slice", [y, g.ints([0]), g.ints([1]), g.ints([1])]), 1)
        last(g, y, 8, 0.2)

    result = converts(build, *["LowBitConv"] * 3, "Slice", "Transpose")
    assert result.ops["LowBitQuantize"] == 3


def test_a_clip_on_the_codes_goes_along() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        y = g.node("Concat", [layer(g, x, xq), layer(g, x, xq)], axis=1)
        yq = g.act(0.3, zero=4)
        codes = g.node("Clip", [g.q(y, yq), g.const(np.uint8(0)), g.const(np.uint8(15))])
        z, zq = conv(g, g.dq(codes, yq), yq, channels=8, kernel=1)
        output(g, g.qdq(z, zq), 2, 5, 6, 6)

    converts(build, *["LowBitConv"] * 3, "LowBitConcat")


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_every_kind_of_weights(per_channel: bool, bias: bool) -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(8 if per_channel else None)
        inputs = [x, g.float_weight(g.codes((8, 4, 3, 3), low=-127), wq)]
        inputs += [g.bias(8, xq, wq)] if bias else []
        y = g.node("Relu", [g.node("Conv", inputs)])
        for part in g.node("Split", [y], axis=1, outputs=2):
            last(g, part, 4, float(g.after(xq, wq, 36).scale))

    converts(build, *["LowBitConv"] * 4)


def pooled(g: Graph, y: str) -> str:
    return g.node("MaxPool", [y], kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def shifted(g: Graph, y: str) -> str:
    return g.node("Add", [y, g.floats(np.linspace(-1, 1, 8).reshape(8, 1, 1))])


def read_inside(g: Graph, y: str) -> str:
    output(g, y, 2, 8, 4, 4)
    return g.node("Relu", [y])


def of_two(g: Graph, y: str) -> str:
    x, xq = image(g)
    return g.node("Add", [y, conv(g, x, xq, 8)[0]])


def plain(g: Graph, y: str) -> str:
    return g.node("Relu", [y])


@pytest.mark.parametrize(
    ("behind", "group"), [(plain, 2), *((each, 1) for each in (pooled, shifted, read_inside, of_two))]
)
def test_what_cannot_be_made_in_parts_is_cut(behind: Callable[[Graph, str], str], group: int) -> None:
    """A layer of groups, and one behind which more stands than functions of single elements of its own."""

    def build(g: Graph) -> None:
        y = behind(g, conv(g, *image(g), 8, group=group)[0])
        for i, part in enumerate(g.node("Split", [y], axis=1, outputs=2)):
            last(g, part, 4, 0.05 * (1 + i))

    result = converted(build)
    assert result.ops["Split"] == 1
    assert verdict(result.built.model, [result.built.feed()], "cpu-ops") == "equal"


@pytest.mark.parametrize("axis", [1, 2])
def test_parts_that_nobody_reads_are_not_made(axis: int) -> None:
    def build(g: Graph) -> None:
        y = g.node("Relu", [conv(g, *image(g), 8, pads=[1, 1, 1, 1])[0]])
        sizes = g.ints([3, 2, 3] if axis == 1 else [2, 2, 2])
        parts = g.node("Split", [y, sizes], axis=axis, outputs=3)
        for i in (0, 2):
            last(g, parts[i], 3 if axis == 1 else 8, 0.05 * (1 + i))

    result = converted(build)
    assert result.ops["Split"] == axis - 1
    assert verdict(result.built.model, [result.built.feed()], "cpu-ops") == "equal"
