"""Depthwise kernels equal the reference kernel in every element.

The cases are the edges of these kernels: channel counts around the blocks of 16, 32 and 64 and their
overlaps, windows that slide (3 columns, strides 1 and 2) and windows that do not, rows and columns of padding
alone, weights that fit int8 and weights minus zero points that do not. test_definitions.py adds every other
epilogue.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit import ops

from tests.numerics.expected import by_reference
from tests.numerics.random_nodes import Node, code_range, codes, scale, zero_point
from tests.support import require_native

native = require_native()

ROWS = [
    row["name"]
    for row in native.kernel_table()
    if row["algorithm"] == "depthwise" and row["isa"] in native.isa_levels()
]
# The level of each row is asked for by name, so that a cap by LOWBIT_ISA does not hide rows.
ISA = {row["name"]: row["isa"] for row in native.kernel_table()}
CHANNELS = [16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 112, 127, 128, 129, 144, 200]
SEEDS = st.integers(0, 2**32 - 1)


def window(rng: np.random.Generator, sliding: bool) -> dict[str, Any]:
    if sliding:
        kernel, strides = [int(rng.integers(1, 4)), 3], [int(rng.integers(1, 4)), int(rng.integers(1, 3))]
        dilations = [int(rng.integers(1, 3)), 1]
    else:
        kernel, strides, dilations = (rng.integers(1, high, 2).tolist() for high in (6, 4, 3))
    pads = rng.integers(0, 5, 4).tolist()
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}


def image(rng: np.random.Generator, attrs: dict[str, Any], channels: int) -> tuple[int, ...]:
    """A batch whose images the window just fits, or a little larger."""
    sizes = []
    for d in range(2):
        reach = attrs["dilations"][d] * (attrs["kernel_shape"][d] - 1) + 1
        least = max(1, reach - attrs["pads"][d] - attrs["pads"][2 + d])
        sizes.append(least + int(rng.integers(0, 9)))
    return (int(rng.integers(1, 3)), *sizes, channels)


def depthwise(rng: np.random.Generator, *, sliding: bool, fits_int8: bool, most_bits: int = 8) -> Node:
    ties, channels = bool(rng.integers(2)), int(rng.choice(CHANNELS))
    x_encoding, y_encoding = (str(e) for e in rng.choice(["unsigned", "signed"], 2))
    w_encoding = "signed" if fits_int8 else "unsigned"
    w_bits = int(rng.integers(1, most_bits + 1)) if fits_int8 else 8
    attrs = window(rng, sliding) | {
        "x_encoding": x_encoding,
        "w_encoding": w_encoding,
        "w_bits": w_bits,
        "y_encoding": y_encoding,
        "in_channels": channels,
        "out_channels": channels,
        "group": channels,
    }
    low, high = code_range(8, y_encoding)
    if rng.integers(2):
        attrs |= {"y_min": [int(rng.integers(low, 0 + 1))], "y_max": [int(rng.integers(1, high + 1))]}
    taps = int(np.prod(attrs["kernel_shape"]))
    x = codes(rng, image(rng, attrs, channels), 8, x_encoding)
    weights = codes(rng, (channels, taps), w_bits, w_encoding)
    w_zero = np.zeros((), np.int32) if fits_int8 else np.asarray(rng.integers(0, 256, channels), np.int32)
    x_scale, w_scale = scale(rng, ties, -6, -1), scale(rng, ties, -8, -2, channels)
    spread = float(x_scale) * float(w_scale.mean()) * np.sqrt(taps) * 2.0 ** (w_bits + 1)
    y_scale = np.float32(2.0 ** np.round(np.log2(spread))) if ties else np.float32(spread)
    bias = rng.integers(-5000, 5001, channels).astype(np.int32) if rng.integers(2) else None
    inputs: list[np.ndarray | None] = [
        x,
        ops.pack(weights, w_bits),
        x_scale,
        zero_point(rng, 8, x_encoding),
        w_scale,
        w_zero,
        bias,
    ]
    if rng.integers(4) == 0:
        attrs = {k: v for k, v in attrs.items() if not k.startswith("y_")} | {"epilogue": "float"}
        return Node("LowBitConv", attrs, inputs + [None] * 13)
    inputs += [np.asarray(y_scale), zero_point(rng, 8, y_encoding)]
    return Node("LowBitConv", attrs, inputs + [None] * 11)


def assert_row_is_exact(row: str, node: Node, *, may_refuse: bool = True) -> None:
    """Only narrow sums may be refused."""
    refusal = ""
    try:
        got = native.run(
            node.op_type, node.attrs, node.inputs, isa=ISA[row], kernel=row, threads=2, task_cycles=1
        )
    except native.LowBitError as error:
        refusal = str(error)
    if refusal:
        assert may_refuse
        assert "sums of a window do not fit int16" in refusal
        return
    expected = by_reference(node)
    different = np.count_nonzero(got.view(np.uint8) != expected.view(np.uint8))
    assert different == 0, f"{different} of {expected.nbytes} bytes differ: {node}"


@pytest.mark.parametrize("sliding", [True, False], ids=["sliding", "general"])
@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS)
def test_int8_weights(row: str, sliding: bool, seed: int) -> None:
    assert_row_is_exact(row, depthwise(np.random.default_rng(seed), sliding=sliding, fits_int8=True))


@pytest.mark.parametrize("sliding", [True, False], ids=["sliding", "general"])
@pytest.mark.parametrize("row", [row for row in ROWS if "u8s16" in row or "words" in row])
@given(seed=SEEDS)
def test_weights_minus_zero_points_of_nine_bits(row: str, sliding: bool, seed: int) -> None:
    assert_row_is_exact(row, depthwise(np.random.default_rng(seed), sliding=sliding, fits_int8=False))


@pytest.mark.parametrize("sliding", [True, False], ids=["sliding", "general"])
@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS)
def test_few_bits_are_not_refused(row: str, sliding: bool, seed: int) -> None:
    """Weights of 4 bits and at most 20 taps: every sum is below 128 * 8 * 20."""
    node = depthwise(np.random.default_rng(seed), sliding=sliding, fits_int8=True, most_bits=4)
    assert_row_is_exact(row, node, may_refuse=False)


@pytest.mark.parametrize("row", ROWS)
def test_extreme_sums(row: str) -> None:
    """All codes and weights at their ends: the largest sums either way, and biases near int32's ends."""
    for code in (0, 255):
        for weight in (-128, 127):
            for bias in (-(2**31) + 2**21, 2**31 - 2**21):
                attrs = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "group": 72, "w_encoding": "signed"}
                attrs |= {"in_channels": 72, "out_channels": 72}
                one = np.float32(1)
                node = Node(
                    "LowBitConv",
                    attrs,
                    [
                        np.full((1, 5, 4, 72), code, np.uint8),
                        ops.pack(np.full((72, 9), weight, np.int8), 8),
                        np.asarray(one),
                        np.asarray(255 - code, np.int32),
                        np.asarray(one),
                        np.asarray(0, np.int32),
                        np.full(72, bias, np.int32),
                        np.asarray(one),
                        np.asarray(7, np.int32),
                        *[None] * 11,
                    ],
                )
                assert_row_is_exact(row, node)


@pytest.mark.parametrize("row", ROWS)
def test_refusals_state_their_reason(row: str) -> None:
    few = {"kernel_shape": [1, 1], "group": 4, "in_channels": 4, "out_channels": 4, "w_encoding": "signed"}
    weights = ops.pack(np.ones((4, 1), np.int8), 8)
    zero, one = np.asarray(0, np.int32), np.asarray(1, np.float32)
    inputs = [np.zeros((1, 2, 2, 4), np.uint8), weights, one, zero, one, zero, None, one, zero, *[None] * 11]
    with pytest.raises(native.LowBitError, match=r"fewer than (8|16) channels"):
        native.run("LowBitConv", few, inputs, isa=ISA[row], kernel=row)
