"""Look-up kernels equal the reference kernel in every element.

The cases are the edges of these kernels: channels around the tables of 4, the quads of 16 and the steps of
four look-ups, output channels around the units of 16 and 32, sums that just fit a byte, windows deeper than
L1, the ring of input rows (strides and dilations that skip rows, blocks of columns), weights with and without
zero points, and codes outside their range. test_conv_kernels.py adds random nodes with every epilogue.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.ops import pack

from tests.conftest import SANITIZED
from tests.numerics import random_nodes
from tests.numerics.expected import by_reference
from tests.numerics.random_nodes import Node, code_range, codes, zero_point
from tests.support import require_native

native = require_native()

# The level of each row is asked for by name, so that a cap by LOWBIT_ISA does not hide rows.
ISA = {
    row["name"]: row["isa"]
    for row in native.kernel_table()
    if row["algorithm"] == "lut" and "_u6" in row["name"] and row["isa"] in native.isa_levels()
}
SEEDS = st.integers(0, 2**32 - 1)
WORKSPACE_LIMIT = 512 * 1024
X_TYPES = [("bipolar", 1), *((e, b) for e in ("unsigned", "signed") for b in range(1, 7))]
W_TYPES = [("bipolar", 1), *((e, b) for e in ("unsigned", "signed") for b in (1, 2))]

pytestmark = pytest.mark.skipif(not ISA, reason="this machine runs no look-up kernel")
rows = pytest.mark.parametrize("row", ISA)


def check(row: str, node: Node, threads: int = 1) -> None:
    """Compares one row with the reference."""
    arguments = (node.op_type, node.attrs, node.inputs)
    expected = by_reference(node)
    got = native.run(*arguments, isa=ISA[row], kernel=row, threads=threads)
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{row}: {differ.sum()} of {differ.size} elements differ: {node}"
    assert native.plan(*arguments, isa=ISA[row], kernel=row)["workspace_bytes"] <= WORKSPACE_LIMIT


def conv(
    seed: int,
    shape: list[int],
    out: int,
    kernel: list[int],
    *,
    x: tuple[str, int] = ("unsigned", 4),
    w: tuple[str, int] = ("signed", 2),
    zeros: bool = True,
    **attrs: Any,
) -> Node:
    """A convolution with float output, so that every bit of the accumulator counts."""
    rng = np.random.default_rng(seed)
    spatial, channels = len(kernel), shape[-1]
    attrs = {
        "in_channels": channels,
        "out_channels": out,
        "kernel_shape": kernel,
        "strides": [1] * spatial,
        "dilations": [1] * spatial,
        "pads": [0] * (2 * spatial),
        "group": 1,
        "epilogue": "float",
        "x_encoding": x[0],
        "x_bits": x[1],
        "w_encoding": w[0],
        "w_bits": w[1],
    } | attrs
    depth = int(np.prod(kernel)) * (channels // attrs["group"])
    weights = codes(rng, (out, depth), w[1], "signed" if w[0] == "signed" else "unsigned")
    inputs: list[np.ndarray | None] = [
        codes(rng, shape, x[1], x[0]),
        pack(weights, w[1]),
        np.float32(1),
        zero_point(rng, x[1], x[0]) if zeros else np.int32(0),
        np.float32(1),
        zero_point(rng, w[1], w[0], (out,)) if zeros else np.int32(0),
        rng.integers(-1000, 1000, out).astype(np.int32),
    ]
    return Node("LowBitConv", attrs, inputs)


@rows
@pytest.mark.parametrize("x", X_TYPES, ids=str)
@pytest.mark.parametrize("w", W_TYPES, ids=str)
def test_operand_types(w, x, row, seeds):
    """Every pair of operand types, with padding, whose value is zero in each of them."""
    for seed in seeds(1):
        for zeros in (True, False):
            pads = [1, 0, 2, 1]
            check(row, conv(seed, [2, 5, 6, 37], 41, [3, 2], x=x, w=w, zeros=zeros, pads=pads), threads=2)
            check(row, conv(seed, [1, 3, 7, 64], 32, [1, 1], x=x, w=w, zeros=zeros))


@rows
@given(seed=SEEDS)
def test_random_nodes(row, seed):
    rng = np.random.default_rng(seed)
    op_type = str(rng.choice(["LowBitConv", "APConv", "LowBitGemm", "APGemm"]))
    node = random_nodes.make(
        op_type,
        rng,
        x_bits=int(rng.integers(1, 7)),
        w_bits=int(rng.integers(1, 3)),
        kind=str(rng.choice(["dense", "pointwise", "grouped", "one_d", "wide"])),
        bipolar=bool(rng.integers(2)),
    )
    if node.attrs.get("group", 1) == node.attrs.get("in_channels") == node.attrs.get("out_channels", 0) > 1:
        return  # drawn as groups, but depthwise
    check(row, node, threads=1 + seed % 3)


@rows
@pytest.mark.parametrize("epilogue", ["requantize", "residual", "float", "thresholds", "tail"])
def test_epilogues(epilogue, row, seeds):
    for seed in seeds(6):
        rng = np.random.default_rng(seed)
        check(row, random_nodes.make("APConv", rng, x_bits=4, w_bits=1, kind="dense", epilogue=epilogue))


@rows
@pytest.mark.parametrize("bits", range(1, 7))
@pytest.mark.parametrize("w", W_TYPES, ids=str)
def test_largest_sums(w, bits, row):
    """All codes at an end of their range: bytes and 16-bit words hold as much as they ever do."""
    for code in ("low", "high"):
        for channels in (64, 2048, 4096 + 20):  # the last ones are deeper than one run of 16-bit sums
            node = conv(1, [1, 1, 3, channels], 33, [1, 1], x=("unsigned", bits), w=w, zeros=False)
            low, high = code_range(w[1], w[0])
            node.inputs[0][...] = 2**bits - 1
            weights = np.full((33, channels), low if code == "low" else high)
            node.inputs[1] = pack(weights.astype(np.int8 if w[0] == "signed" else np.uint8), w[1])
            check(row, node)


@rows
@pytest.mark.parametrize("w", [("bipolar", 1), ("signed", 2)], ids=str)
def test_channels_1_to_70(w, row):
    for channels in range(1, 71):
        check(row, conv(channels, [1, 4, 5, channels], 71 - channels, [3, 3], w=w, pads=[1, 0, 1, 2]))
        check(row, conv(channels, [1, 1, 1, channels], 71 - channels, [1, 1], w=w))


# name -> (input shape, output channels, kernel, attributes)
EDGES: dict[str, tuple[list[int], int, list[int], dict[str, Any]]] = {
    "one pixel, all padding but one tap": ([1, 1, 1, 20], 9, [3, 3], {"pads": [1, 1, 1, 1]}),
    "windows wholly in the padding": ([1, 2, 2, 8], 8, [2, 2], {"pads": [3, 3, 3, 3]}),
    "wide padding on one side": ([2, 3, 4, 6], 10, [3, 2], {"pads": [0, 5, 4, 0], "strides": [2, 3]}),
    "padded pointwise": ([2, 3, 4, 70], 10, [1, 1], {"pads": [1, 2, 3, 4], "strides": [2, 3]}),
    "dilation reaches over the image": ([1, 4, 4, 7], 5, [3, 3], {"pads": [4, 4, 4, 4], "dilations": [3, 4]}),
    "dilated rows of many blocks": ([1, 40, 9, 17], 5, [3, 3], {"dilations": [7, 2], "strides": [2, 1]}),
    "stride skips rows and columns": ([2, 33, 31, 18], 20, [2, 2], {"strides": [5, 4]}),
    "strided pointwise": ([2, 15, 17, 19], 64, [1, 1], {"strides": [2, 3]}),
    "column kernel, strided": ([1, 15, 40, 19], 24, [3, 1], {"strides": [1, 3], "pads": [1, 0, 1, 0]}),
    "more rows than a block": ([1, 61, 29, 16], 33, [3, 3], {"pads": [1, 1, 1, 1]}),
    "several blocks of columns": ([1, 4, 450, 16], 20, [3, 3], {"pads": [1, 1, 1, 1], "strides": [1, 2]}),
    "wide and deep": ([1, 3, 90, 520], 17, [3, 3], {"pads": [1, 1, 1, 1]}),
    "deeper than L1": ([1, 2, 9, 2100], 50, [1, 1], {}),
    "window deeper than L1": ([1, 9, 9, 530], 70, [3, 3], {"pads": [1, 1, 1, 1]}),
    "several images": ([7, 3, 5, 12], 20, [3, 3], {"pads": [1, 1, 1, 1]}),
    "first layer": ([1, 40, 37, 3], 64, [7, 7], {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    "one long row": ([1, 900, 40], 6, [5], {"pads": [4, 0]}),
    "panels of uneven width": ([1, 5, 5, 24], 144 + 9, [1, 1], {}),
    "more panels than a chunk": ([1, 3, 5, 520], 2100, [1, 1], {}),
    "large kernel": ([1, 30, 30, 4], 4, [29, 29], {"pads": [2, 2, 2, 2]}),
    "small groups": ([1, 6, 7, 3 * 11], 2 * 11, [3, 3], {"group": 11, "pads": [1, 1, 1, 1]}),
    "groups wider than a panel": ([1, 5, 5, 2 * 30], 2 * 70, [3, 3], {"group": 2, "pads": [0, 1, 1, 1]}),
    "empty batch": ([0, 5, 5, 16], 16, [3, 3], {}),
}  # fmt: skip


@rows
@pytest.mark.parametrize("name", EDGES)
def test_edge_geometry(name, row):
    shape, out, kernel, attrs = EDGES[name]
    pairs = [
        (("unsigned", 4), ("bipolar", 1)),
        (("signed", 5), ("signed", 2)),
        (("unsigned", 6), ("unsigned", 2)),
        (("bipolar", 1), ("bipolar", 1)),
    ]
    for seed, (x, w) in enumerate(pairs[:2] if SANITIZED else pairs):
        check(row, conv(seed, shape, out, kernel, x=x, w=w, **attrs), threads=1 + seed % 3)


@rows
@pytest.mark.parametrize("bits", [1, 4, 6])
@pytest.mark.parametrize("name", ["wide padding on one side", "several images", "small groups"])
def test_codes_out_of_range(name, bits, row):
    """Their results are unspecified, but nothing outside the tensors is read or written."""
    shape, out, kernel, attrs = EDGES[name]
    for w in W_TYPES:
        node = conv(3, shape, out, kernel, x=("unsigned", bits), w=w, **attrs)
        node.inputs[0] = np.random.default_rng(4).integers(0, 256, shape).astype(np.uint8)
        first, second = (
            native.run(node.op_type, node.attrs, node.inputs, isa=ISA[row], kernel=row) for _ in range(2)
        )
        assert (first == second).all()


@rows
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"x": ("unsigned", 7)}, "7-bit activations"),
        ({"w": ("signed", 3)}, "3-bit weights"),
        ({"shape": [1, 5, 5, 16], "out": 16, "group": 16}, "depthwise"),
        ({"shape": [1, 1, 1, 70000], "kernel": [1, 1]}, "exceed the workspace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(case, reason, row):
    arguments: dict[str, Any] = {"shape": [1, 5, 5, 20], "out": 20, "kernel": [3, 3]} | case
    node = conv(1, **arguments)
    with pytest.raises(native.LowBitError, match=re.escape(row)) as error:
        native.run(node.op_type, node.attrs, node.inputs, isa=ISA[row], kernel=row)
    assert reason in str(error.value)
