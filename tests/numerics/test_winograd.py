"""Winograd kernels equal the reference kernel in every element, and refuse what would not be exact.

The cases are the edges of these kernels: codes and weights at their ends, whose transforms are largest and
whose sums must be cut into chunks of channels; tiles that reach over the image; groups of up to 8 tiles,
blocks of them, several images in one; channels around the blocks and the panels of 8, 16 and 32; every
epilogue.
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
from tests.numerics.expected import by_reference
from tests.numerics.random_nodes import Node, code_range, codes, zero_point
from tests.support import require_native

native = require_native()

# The level of each row is asked for by name, so that a cap by LOWBIT_ISA does not hide rows.
ISA = {
    row["name"]: row["isa"]
    for row in native.kernel_table()
    if row["algorithm"] == "winograd" and row["isa"] in native.isa_levels()
}
MLA, SMLAL = "winograd_f4_mla_8x16_neon", "winograd_f4_smlal_8x8_neon"
# F(2x2) with 8-bit operands: SDOT, vpdpbusd.
BYTES = [row for row in ISA if "_sdot_" in row or "_u8s8_" in row]
# What fewer bits of an operand or of a sum hold depends on the weights; the others compute all 8-bit layers.
WORDS = [row for row in ISA if row not in (MLA, *BYTES)]
SEEDS = st.integers(0, 2**32 - 1)
# Bytes of a thread. On x86 transformed inputs may lie in L3.
WORKSPACE_LIMIT = (256 if MLA in ISA else 2560) * 1024

pytestmark = pytest.mark.skipif(not ISA, reason="this machine runs no Winograd kernel")
rows = pytest.mark.parametrize("row", ISA)


def refusal(row: str, node: Node, threads: int = 2, **pool: float) -> str:
    """Why the row does not compute the node; where it does, all elements were equal.

    ``task_cycles=1`` cuts blocks as small as they are for so many threads.
    """
    arguments = (node.op_type, node.attrs, node.inputs)
    try:
        got = native.run(*arguments, isa=ISA[row], kernel=row, threads=threads, **pool)
    except native.LowBitError as error:
        return str(error)
    expected = by_reference(node)
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{row}: {differ.sum()} of {differ.size} elements differ: {node}"
    assert native.plan(*arguments, isa=ISA[row], kernel=row)["workspace_bytes"] <= WORKSPACE_LIMIT
    return ""


def conv(
    rng: np.random.Generator,
    shape: list[int],
    out: int,
    *,
    x: tuple[str, int] = ("unsigned", 4),
    w: tuple[str, int] = ("signed", 4),
    extreme: bool = False,
    zeros: bool = True,
    **attrs: Any,
) -> Node:
    """A 3x3 convolution with float output, so that every bit of the accumulator counts."""
    group = attrs.get("group", 1)
    attrs = {
        "in_channels": shape[-1],
        "out_channels": out,
        "kernel_shape": [3, 3],
        "strides": [1, 1],
        "dilations": [1, 1],
        "pads": [1, 1, 1, 1],
        "group": 1,
        "epilogue": "float",
        "x_encoding": x[0],
        "x_bits": x[1],
        "w_encoding": w[0],
        "w_bits": w[1],
    } | attrs

    def draw(size: tuple[int, ...], kind: tuple[str, int]) -> np.ndarray:
        low, high = code_range(kind[1], kind[0])
        if not extreme:
            return codes(rng, size, kind[1], kind[0])
        ends = rng.choice([low, high], size, p=rng.choice([[0.5, 0.5], [0, 1], [1, 0], [0.05, 0.95]]))
        return ends.astype(np.int8 if kind[0] == "signed" else np.uint8)

    taps = int(np.prod(attrs["kernel_shape"])) * (shape[-1] // group)
    inputs: list[np.ndarray | None] = [
        draw(tuple(shape), x),
        pack(draw((out, taps), w), w[1]),
        np.float32(1),
        zero_point(rng, x[1], x[0]) if zeros else np.int32(0),
        np.float32(1),
        zero_point(rng, w[1], w[0], (out,)) if zeros else np.int32(0),
        rng.integers(-1000, 1000, out).astype(np.int32),
    ]
    return Node("LowBitConv", attrs, inputs)


@rows
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    "encodings", [("unsigned", "signed"), ("signed", "unsigned"), ("unsigned", "bipolar")]
)
def test_extreme_operands(encodings, bits, row, seeds):
    """512 channels: where the sums are largest. MLA takes what its lanes can hold, bytes what fits them."""
    w_encoding, w_bits = encodings[1], bits
    if w_encoding == "bipolar":
        w_bits = 1
    elif bits == 8:  # unsigned ones without a zero point would be refused
        w_encoding = "signed"
    fitting = 3 if row in BYTES and w_encoding == "unsigned" else 4  # 9 * 15 is no int8
    for seed in seeds(2):
        rng = np.random.default_rng(seed)
        for channels in (512, 19):
            node = conv(rng, [1, 5, 6, channels], 17, x=(encodings[0], bits), w=(w_encoding, w_bits),
                        extreme=True, zeros=False)  # fmt: skip
            reason = refusal(row, node)
            assert row not in WORDS or not reason, reason
            assert bits > fitting or not reason, reason


@rows
def test_image_edges_and_pads(row):
    """Every position of the image's edge in the last tile, and no pixel that is not padding."""
    rng = np.random.default_rng(1)
    for height, width in [(1, 1), (1, 9), (2, 3), (3, 2), (4, 4), (5, 17), (6, 7), (7, 6), (8, 5), (13, 31)]:
        for pads in ([1, 1, 1, 1], [2, 2, 2, 2], [0, 3, 2, 0], [5, 0, 0, 7]):
            if height + pads[0] + pads[2] < 3 or width + pads[1] + pads[3] < 3:
                continue
            assert not refusal(row, conv(rng, [2, height, width, 11], 18, pads=pads))


@rows
def test_blocks_of_tiles(row):
    """Groups of 4 and 8 tiles and what is left of them, in one block and in several, over images."""
    rng = np.random.default_rng(2)
    for tiles in range(1, 50, 9 if SANITIZED else 3):
        assert not refusal(row, conv(rng, [1, 4, 4 * tiles, 16], 16))
    for batch, channels in ((1, 64), (3, 64), (5, 200), (2, 720)):
        assert not refusal(row, conv(rng, [batch, 14, 15, channels], 24, w=("signed", 3)))
    for threads in (1, 3, 16):
        assert not refusal(row, conv(rng, [1, 14, 15, 64], 72, w=("signed", 3)), threads, task_cycles=1)


@rows
def test_channels(row):
    rng = np.random.default_rng(3)
    for channels in range(1, 35):
        assert not refusal(row, conv(rng, [1, 5, 6, channels], 36 - channels))
    for group, inputs, outputs in ((2, 8, 8), (3, 5, 17), (4, 24, 9), (7, 1, 3), (12, 1, 1)):
        node = conv(rng, [1, 9, 6, group * inputs], group * outputs, group=group)
        assert not refusal(row, node)


@rows
@given(seed=SEEDS)
def test_random_nodes(row, seed):
    rng = np.random.default_rng(seed)
    bits = (
        {"x_bits": int(rng.integers(1, 6)), "w_bits": int(rng.integers(1, 5))} if rng.random() < 0.7 else {}
    )
    node = random_nodes.make(str(rng.choice(["LowBitConv", "APConv"])), rng, kind="3x3", **bits)
    refusal(row, node, threads=1 + seed % 7, task_cycles=1)


@rows
@pytest.mark.parametrize("epilogue", ["requantize", "residual", "float", "thresholds", "tail"])
def test_epilogues(epilogue, row, seeds):
    for seed in seeds(6):
        rng = np.random.default_rng(seed)
        node = random_nodes.make("LowBitConv", rng, x_bits=3, w_bits=3, kind="3x3", epilogue=epilogue)
        assert not refusal(row, node)


@rows
def test_refuses_other_geometry(row):
    rng = np.random.default_rng(4)
    for attrs in (
        {"strides": [2, 1]},
        {"dilations": [1, 2]},
        {"kernel_shape": [3, 5]},
        {"kernel_shape": [1, 3]},
    ):
        assert "only 3x3 kernels of stride and dilation 1" in refusal(
            row, conv(rng, [1, 9, 9, 8], 8, **attrs)
        )
    assert "exceed the workspace" in refusal(row, conv(rng, [1, 3, 3, 300000], 2, w=("signed", 1)))


@rows
def test_refuses_weights_beyond_bytes(row):
    """w - zw of 8 bits may have 9; then it depends on the actual ones."""
    rng = np.random.default_rng(5)
    node = conv(rng, [1, 6, 6, 16], 8, x=("unsigned", 1), w=("unsigned", 8), zeros=False)
    for zero, ends in ((130, (2, 255)), (125, (0, 252))):
        node.inputs[5] = np.full(8, zero, np.int32)
        weights = rng.choice([zero - 1, zero, zero + 1], (8, 9, 16)).astype(np.uint8)
        weights[3, 4, 5], weights[6, 8, 15] = ends  # -128 and 125, -125 and 127
        node.inputs[1] = pack(weights.reshape(8, -1), 8)
        assert not refusal(row, node) or row in BYTES
        if zero == 130:
            weights[3, 4, 5] -= 1
        else:
            weights[6, 8, 15] += 1
        node.inputs[1] = pack(weights.reshape(8, -1), 8)
        assert "weights exceed 8 bits" in refusal(row, node)


@rows
def test_weights_of_four_bits_and_one_more(row):
    """Four bits are held as halves of bytes; a single weight beyond them makes whole ones of all."""
    rng = np.random.default_rng(8)
    node = conv(rng, [1, 9, 10, 37], 21, x=("unsigned", 2), w=("signed", 5), zeros=False)
    weights = rng.integers(-8, 8, (21, 9, 37)).astype(np.int8)
    for value in (-8, 7, 8):
        weights[17, 8, 36] = value
        node.inputs[1] = pack(weights.reshape(21, -1), 5)
        assert not refusal(row, node)


@pytest.mark.parametrize("row", WORDS)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 300])
def test_sums_at_the_end_of_a_chunk(beyond, row):
    """Sums of 255 |w| span 2^26 or 2^30, less or more than a chunk of channels may; both ends are met."""
    rng = np.random.default_rng(9)
    bits = 26 if "_f4_" in row else 30
    magnitude = 2**bits // 255 + beyond
    channels = magnitude // (9 * 120) + 1
    weights = np.full(9 * channels, magnitude // (9 * channels))
    weights[: magnitude % (9 * channels)] += 1
    assert weights.sum() == magnitude
    weights *= rng.choice([-1, 1], weights.shape)
    node = conv(rng, [1, 3, 3, channels], 3, x=("unsigned", 8), w=("signed", 8), zeros=False, pads=[0] * 4)
    node.inputs[0] = np.where(weights > 0, 255, 0).astype(np.uint8).reshape(1, 3, 3, channels)
    node.inputs[1] = pack(np.stack([weights, -weights, np.abs(weights)]).astype(np.int8), 8)
    assert not refusal(row, node)


@pytest.mark.parametrize("row", BYTES)
def test_bytes_in_several_chunks(row):
    """63 times 9 * 14 of so many channels span more than 2^30."""
    if row.endswith("dotprod"):
        pytest.skip("so many channels exceed the workspace there")
    channels = 150_000
    node = conv(
        np.random.default_rng(10), [1, 3, 3, channels], 2, x=("unsigned", 6), w=("signed", 5), zeros=False
    )
    node.inputs[0][...] = 63
    weights = np.full((2, 9, channels), 14, np.int8)
    weights[1] = -14
    node.inputs[1] = pack(weights.reshape(2, -1), 5)
    assert not refusal(row, node)


@pytest.mark.parametrize("row", BYTES)
def test_bytes_refuse_weights_that_transforms_take_out_of_8_bits(row):
    """9 w must fit where all taps are that."""
    rng = np.random.default_rng(7)
    for x in (("unsigned", 6), ("signed", 6)):
        node = conv(rng, [1, 6, 6, 16], 8, x=x, w=("signed", 5), zeros=False, extreme=True)
        weights = rng.integers(-14, 15, (8, 9, 16)).astype(np.int8)
        weights[3, :, 5] = 14
        node.inputs[1] = pack(weights.reshape(8, -1), 5)
        assert not refusal(row, node)
        weights[3, :, 5] = 15
        node.inputs[1] = pack(weights.reshape(8, -1), 5)
        assert "transformed weights exceed 8 bits" in refusal(row, node)


def test_mla_neon_refuses_weights_whose_sums_leave_14_bits():
    """A block's 72 products by 31 must span less than 2^14: sum |w| of any channel at most 528."""
    if MLA not in ISA:
        pytest.skip("not among the levels of this machine")
    rng = np.random.default_rng(6)
    node = conv(rng, [1, 6, 6, 24], 20, x=("unsigned", 5), w=("signed", 5), zeros=False)
    node.inputs[0][...] = 31
    weights = np.full((20, 9, 24), 7, np.int8)
    weights[rng.random(weights.shape) < 0.5] = -7
    weights[7, :3, 8:16] = 8  # of the second block: 24 * 8 + 48 * 7 = 528
    node.inputs[1] = pack(weights.reshape(20, -1), 5)
    assert not refusal(MLA, node)
    weights[7, 3, 9] = 8
    node.inputs[1] = pack(weights.reshape(20, -1), 5)
    assert "the sums of 8 channels span 2^14 or more" in refusal(MLA, node)
