"""The bit-serial rows: every pair of bits and encodings, zero points, padding, and codes out of their range.

What all rows have in common (geometry, epilogues, threads) is in test_conv_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.ops import pack

from tests.conftest import SANITIZED
from tests.numerics import random_nodes
from tests.numerics.test_conv_kernels import ISA, SEEDS, check, native

ROWS = [
    row["name"] for row in native.kernel_table() if row["algorithm"] == "bitserial" and row["name"] in ISA
]
BITS = range(1, 5)
ENCODINGS = ("unsigned", "signed", "bipolar")
FEW_WEIGHTS = ((2, "signed"),) if SANITIZED else ((1, "bipolar"), (2, "signed"))


def node(
    rng: np.random.Generator,
    *,
    x: tuple[int, str],
    w: tuple[int, str],
    shape: tuple[int, ...] = (1, 5, 6, 37),
    out: int = 21,
    kernel: tuple[int, int] = (3, 3),
    weights: np.ndarray | None = None,
    w_zero: int | np.ndarray | None = None,
    **attrs: Any,
) -> random_nodes.Node:
    """A convolution with float output: every bit of the accumulators counts."""
    (x_bits, x_encoding), (w_bits, w_encoding) = x, w
    rows = kernel[0] * kernel[1] * (shape[-1] // attrs.get("group", 1))
    stored = "signed" if w_encoding == "signed" else "unsigned"
    codes = weights if weights is not None else random_nodes.codes(rng, (out, rows), w_bits, stored)
    zero = random_nodes.zero_point(rng, w_bits, w_encoding) if w_zero is None else np.int32(w_zero)
    attrs = {
        "in_channels": shape[-1],
        "out_channels": out,
        "kernel_shape": list(kernel),
        "strides": [1, 1],
        "dilations": [1, 1],
        "pads": [1, 0, 1, 2],
        "group": 1,
        "x_bits": x_bits,
        "x_encoding": x_encoding,
        "w_bits": w_bits,
        "w_encoding": w_encoding,
        "epilogue": "float",
    } | attrs
    inputs: list[np.ndarray | None] = [
        random_nodes.codes(rng, shape, x_bits, x_encoding),
        pack(codes, w_bits),
        np.float32(0.5),
        random_nodes.zero_point(rng, x_bits, x_encoding),
        np.float32(0.25),
        np.asarray(zero, np.int32),
        rng.integers(-1000, 1000, out).astype(np.int32),
    ]
    return random_nodes.Node("APConv", attrs, inputs)


def operands(bits: range) -> list[tuple[int, str]]:
    """Every width of every encoding."""
    return [(b, e) for e in ENCODINGS for b in bits if e != "bipolar" or b == 1]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", operands(BITS), ids=str)
@pytest.mark.parametrize("w", operands(BITS), ids=str)
def test_every_pair_of_operands(w, x, row):
    rng = np.random.default_rng([w[0], x[0], ENCODINGS.index(w[1]), ENCODINGS.index(x[1])])
    for shape in ((1, 5, 6, 37), (2, 4, 5, 64), (1, 5, 7, 8)):
        ran = check(row, node(rng, x=x, w=w, shape=shape))
        assert ran or w[0] == 4, (
            "at most 16 products of planes are computed, a zero point may need a fifth plane"
        )


@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS, op_type=st.sampled_from(["LowBitConv", "APConv", "LowBitGemm", "APGemm"]))
def test_random_nodes_of_few_bits(row, seed, op_type):
    rng = np.random.default_rng(seed)
    bits = {"x_bits": int(rng.integers(1, 5)), "w_bits": int(rng.integers(1, 5))}
    if op_type.startswith("AP") and rng.random() < 0.5:
        bits = {"x_bits": 1, "w_bits": 1, "bipolar": True}
    check(row, random_nodes.make(op_type, rng, **bits), threads=1 + seed % 3)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", [(1, "bipolar"), (1, "unsigned"), (3, "signed"), (4, "unsigned")], ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(-1, 1), (0, 1), (-1, 0), (0, 3), (-3, 0), (-2, 1), (-1, 2), (-8, 7), (-7, 8), (-3, 12)]
)
def test_ranges_of_weight_values(low, high, x, row):
    """The planes follow the values, zero points included: ternary, one-sided, or of both signs."""
    rng = np.random.default_rng([low + 16, high])
    codes = rng.integers(low, high + 1, (21, 9 * 37))
    zero = -low
    assert check(row, node(rng, x=x, w=(4, "unsigned"), weights=codes + zero, w_zero=zero)) or high - low > 14


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", [(1, "bipolar"), (2, "unsigned")], ids=str)
@pytest.mark.parametrize("channels", [8, 12, 16, 24, 32, 40, 48])
def test_kernel_rows_across_pixels(channels, x, row):
    """Few channels: a kernel row is read across the pixels, whole units of it or with bits left over."""
    rng = np.random.default_rng(channels)
    for w in FEW_WEIGHTS:
        for kernel in ((1, 2), (3, 3), (2, 5), (4, 4)):
            for strides in ([1, 1], [2, 3]):
                shape, attrs = (2, 9, 11, channels), {"strides": strides, "pads": [2, 1, 0, 3]}
                assert check(row, node(rng, x=x, w=w, shape=shape, kernel=kernel, **attrs), threads=2)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", [(1, "bipolar"), (2, "unsigned"), (3, "signed")], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_kernel_rows_of_images(channels, x, row):
    """Windows of an image, whose kernel rows may share units: many in one, across two, of two words."""
    rng = np.random.default_rng(channels)
    for w in (*FEW_WEIGHTS, (2, "unsigned")):
        for kernel in ((3, 3), (5, 5), (7, 7), (11, 11), (2, 9), (17, 2)):
            for attrs in (
                {"strides": [2, 2], "pads": [3, 3, 2, 2]},
                {"strides": [1, 3], "pads": [kernel[0], 0, 1, 5]},
                {"dilations": [2, 1], "pads": [9, 4, 9, 4]},
            ):
                assert check(
                    row, node(rng, x=x, w=w, shape=(2, 18, 21, channels), kernel=kernel, **attrs), threads=2
                )


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", operands(BITS), ids=str)
@pytest.mark.parametrize("channels", [1, 3, 63, 64, 65, 128, 192, 330])
def test_packing_of_channels(channels, x, row):
    """Few codes, whole vectors and what is left of them, an odd number of runs, runs that lie apart in x."""
    rng = np.random.default_rng(channels)
    for kernel, strides, pads, group in (
        ((1, 1), [1, 1], [0, 0, 0, 0], 1),
        ((1, 1), [2, 3], [0, 0, 0, 0], 1),
        ((1, 1), [2, 2], [1, 1, 0, 0], 2),
        ((3, 3), [1, 1], [1, 1, 1, 1], 1),
        ((1, 3), [1, 2], [0, 1, 0, 1], 2),
    ):
        attrs = {"kernel": kernel, "strides": strides, "pads": pads, "group": group, "out": 5 * group}
        for w in FEW_WEIGHTS:
            assert check(row, node(rng, x=x, w=w, shape=(1, 5, 7, channels * group), **attrs))


# name -> (arguments of `node`)
GEOMETRY: dict[str, dict[str, Any]] = {
    "windows wholly in the padding": {"shape": (1, 2, 2, 8), "kernel": (2, 2), "pads": [3, 3, 3, 3]},
    "dilation reaches over the image": {"shape": (1, 4, 4, 70), "pads": [4, 4, 4, 4], "dilations": [3, 4]},
    "strided pointwise, padded": {"shape": (2, 15, 17, 19), "kernel": (1, 1), "strides": [2, 3],
                                  "pads": [1, 2, 0, 1]},
    "stride beyond the kernel": {"shape": (1, 17, 19, 33), "kernel": (1, 2), "strides": [4, 5]},
    "small groups": {"shape": (1, 6, 7, 3 * 11), "out": 22, "group": 11},
    "groups wider than a panel": {"shape": (1, 5, 5, 2 * 70), "out": 2 * 150, "group": 2},
    "channel multiplier": {"shape": (1, 5, 9, 10), "out": 30, "group": 10},
    "more pixels than a block": {"shape": (1, 45, 47, 5), "out": 5, "kernel": (1, 1), "pads": [0, 0, 0, 0]},
    "one long row": {"shape": (1, 1, 3000, 40), "out": 3, "kernel": (1, 3), "pads": [0, 1, 0, 1]},
    "an image, wide strides in its padding": {
        "shape": (1, 4, 9, 3), "out": 5, "kernel": (3, 5), "strides": [1, 70], "pads": [1, 900, 1, 2000]
    },
    "an image of many columns": {"shape": (1, 3, 2500, 3), "out": 4, "kernel": (3, 7), "strides": [1, 2]},
    "a row beyond the workspace": {"shape": (1, 2, 700, 700), "out": 2, "kernel": (1, 1)},
    "more counts than a byte and a word hold": {"shape": (1, 2, 2, 70000), "out": 3, "kernel": (1, 1)},
    "no images": {"shape": (0, 4, 4, 8)},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", GEOMETRY)
def test_geometry(name, row):
    rng = np.random.default_rng(1)
    for x, w in (
        ((1, "bipolar"), (1, "bipolar")),
        ((2, "unsigned"), (2, "signed")),
        ((3, "signed"), (1, "bipolar")),
    ):
        for threads in (1, 3):
            assert check(row, node(rng, x=x, w=w, **GEOMETRY[name]), threads=threads)


def few_codes(rng: np.random.Generator, encoding: str) -> tuple[int, int]:
    """The bounds of a quantizer of two to five codes."""
    low, high = random_nodes.code_range(8, encoding)
    count = int(rng.integers(1, 5))
    least = int(rng.integers(low, high - count + 1))
    return least, least + count


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", [(1, "bipolar"), (1, "unsigned"), (2, "signed"), (3, "unsigned")], ids=str)
@pytest.mark.parametrize("w", [(1, "bipolar"), (2, "signed")], ids=str)
@given(seed=SEEDS)
def test_few_output_codes(w, x, row, seed):
    """Outputs of few codes, whose epilogue may be comparisons of 16-bit sums."""
    rng = np.random.default_rng(seed)
    out, count = int(rng.choice([3, 16, 21, 40, 70])), int(rng.integers(1, 5))
    shape = (int(rng.integers(1, 3)), 5, int(rng.integers(1, 8)), int(rng.choice([8, 19, 64, 100])))
    encoding = str(rng.choice(["unsigned", "signed"]))
    low, high = random_nodes.code_range(8, encoding)
    attrs: dict[str, Any] = {"y_encoding": encoding}
    if rng.random() < 0.5:
        least, most = few_codes(rng, encoding)
        attrs |= {"epilogue": "requantize", "y_min": [least], "y_max": [most]}
        zero = np.int32(rng.integers(low, high + 1))
        epilogue = [np.float32(2.0 ** rng.integers(-4, 5)), zero]
    else:
        attrs["epilogue"] = "thresholds"
        reach = int(rng.choice([10, 130, 300, 40000]))  # limits that fit bytes, nearly do, do not
        falls = rng.random(out) < 0.5
        steps = np.sort(rng.integers(-reach, reach + 1, (out, count)), axis=1)
        # Some at the ends of what an accumulator can be.
        steps[:, 0][rng.random(out) < 0.1] = -(2**31)
        steps[:, -1][rng.random(out) < 0.1] = 2**31 - 1
        steps[falls] = steps[falls, ::-1]
        direction = np.where(falls, -1, 1).astype(np.int32)
        base = rng.integers(low, high - count + 1, out).astype(np.int32)
        epilogue = [None, None, steps.astype(np.int32), base, direction]
    group = 2 if out % 2 == 0 and shape[-1] % 2 == 0 and rng.random() < 0.3 else 1
    some = node(rng, x=x, w=w, shape=shape, out=out, group=group, **attrs)
    some.inputs += epilogue
    assert check(row, some, threads=1 + seed % 2)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", [(1, "bipolar"), (1, "unsigned"), (2, "signed"), (3, "unsigned")], ids=str)
@pytest.mark.parametrize("w", [(1, "bipolar"), (2, "signed")], ids=str)
@given(seed=SEEDS)
def test_few_output_codes_with_a_residual(w, x, row, seed):
    """Few codes before a residual is added and few behind it: comparisons of sums, then of the residual.

    The residual has any bits, and scales are any that a node may have.
    """
    rng = np.random.default_rng(seed)
    out = int(rng.choice([3, 16, 21, 32, 40, 70]))
    shape = (int(rng.integers(1, 3)), 5, int(rng.integers(1, 8)), int(rng.choice([8, 19, 64, 100])))
    encoding, inner, residual = (str(rng.choice(["unsigned", "signed"])) for _ in range(3))
    (y_min, y_max), (inner_min, inner_max) = few_codes(rng, encoding), few_codes(rng, inner)
    attrs = {
        "epilogue": "requantize",
        "y_encoding": encoding,
        "y_min": [y_min],
        "y_max": [y_max],
        "inner_encoding": inner,
        "inner_min": [inner_min],
        "inner_max": [inner_max],
        "residual_encoding": residual,
    }
    some = node(rng, x=x, w=w, shape=shape, out=out, **attrs)
    scales = (2.0 ** rng.integers(-3, 4, 3)).astype(np.float32)
    if rng.random() < 0.3:  # sums that overflow, or that one side does not reach
        scales[rng.integers(3)] = rng.choice([1e-40, 1e-30, 1e30, 3e38])
        some.inputs[4] = np.float32(min(float(scales[2]) * rng.choice([0.01, 1, 100]), 1e37))
    y_zero, residual_zero, inner_zero = (
        np.int32(rng.integers(*random_nodes.code_range(8, e), endpoint=True)) if rng.random() < 0.3 else near
        for e, near in ((encoding, np.int32(y_min)), (residual, np.int32(0)), (inner, np.int32(inner_min)))
    )
    bits = int(rng.choice([1, 2, 8]))
    some.inputs += [scales[0], y_zero, *[None] * 6]
    some.inputs += [
        random_nodes.codes(rng, (*shape[:3], out), bits, residual),  # y is as large as x
        scales[1],
        residual_zero,
        scales[2],
        inner_zero,
    ]
    assert check(row, some, threads=1 + seed % 2)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("code", ["low", "high"])
def test_largest_sums(code, row):
    rng = np.random.default_rng(1)
    for x in ((1, "bipolar"), (4, "unsigned"), (4, "signed")):
        for w, value in (((1, "bipolar"), code == "high"), ((4, "signed"), 7 if code == "high" else -8)):
            weights = np.full((21, 9 * 600), value, np.int8)
            some = node(rng, x=x, w=w, shape=(1, 4, 4, 600), weights=weights, w_zero=0)
            some.inputs[0][...] = random_nodes.code_range(*x)[1]
            assert check(row, some)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x", operands(BITS), ids=str)
def test_codes_out_of_range_harm_nothing(x, row):
    """Codes beyond their bits are a broken promise: any result, but the same one again, and no crash."""
    rng = np.random.default_rng(5)
    for w in ((1, "bipolar"), (2, "signed")):
        some = node(rng, x=x, w=w)
        codes = some.inputs[0]
        some.inputs[0] = rng.integers(0, 256, codes.shape, np.uint8).view(codes.dtype)
        runs = [native.run(some.op_type, some.attrs, some.inputs, isa=ISA[row], kernel=row) for _ in range(2)]
        np.testing.assert_array_equal(runs[0], runs[1])


@pytest.mark.parametrize("row", ROWS)
def test_refusals_say_why(row):
    rng = np.random.default_rng(3)
    for some, reason in (
        (node(rng, x=(2, "unsigned"), w=(2, "signed"), shape=(1, 5, 5, 24), out=24, group=24), "depthwise"),
        (node(rng, x=(5, "unsigned"), w=(2, "signed")), "5-bit activations"),
        (node(rng, x=(1, "unsigned"), w=(5, "signed")), "5-bit weights"),
        (node(rng, x=(4, "unsigned"), w=(4, "unsigned"), w_zero=3), "more than 16 products of bit planes"),
        (node(rng, x=(1, "unsigned"), w=(1, "signed"), shape=(1, 800, 800, 9), out=2, dilations=[399, 399]),
         "kernel window exceeds the workspace"),
    ):  # fmt: skip
        with pytest.raises(native.LowBitError, match=reason):
            native.plan(some.op_type, some.attrs, some.inputs, isa=ISA[row], kernel=row)
