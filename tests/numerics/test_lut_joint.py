"""The look-up kernel of three activations and three weights at once equals the reference kernel everywhere.

The cases are its edges: channels around the triples and their steps of four, output channels around vectors
of 64 and panels of 128, sums that just fit a byte and 16 bits, weights whose values do not begin at the least
code, and every way of an output to its code.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.ops import pack

from tests.conftest import SANITIZED
from tests.numerics import random_nodes
from tests.numerics.expected import by_reference
from tests.numerics.random_nodes import Node
from tests.numerics.test_lut import EDGES, W_TYPES, conv
from tests.support import require_native

native = require_native()

ROW, ISA = "lut_u2w2_4x128_avx512popcnt", "avx512popcnt"
X_TYPES = [(encoding, bits) for encoding in ("unsigned", "signed") for bits in (1, 2)]
WORKSPACE_LIMIT = 256 * 1024

pytestmark = pytest.mark.skipif(ISA not in native.isa_levels(), reason=f"this machine has no {ISA}")


def refusal(node: Node, threads: int = 1) -> str:
    """Why the row does not compute the node; where it does, all elements were equal."""
    arguments = (node.op_type, node.attrs, node.inputs)
    try:
        got = native.run(*arguments, isa=ISA, kernel=ROW, threads=threads)
    except native.LowBitError as error:
        return str(error)
    expected = by_reference(node)
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{differ.sum()} of {differ.size} elements differ: {node}"
    assert native.plan(*arguments, isa=ISA, kernel=ROW)["workspace_bytes"] <= WORKSPACE_LIMIT
    return ""


@pytest.mark.parametrize("x", X_TYPES, ids=str)
@pytest.mark.parametrize("w", W_TYPES, ids=str)
def test_operand_types(w, x, seeds):
    """A zero point for each channel may give weights more than four values; they are the reason then."""
    for seed in seeds(2):
        for zeros in (True, False):
            pads = [1, 0, 2, 1]
            for node in (
                conv(seed, [2, 5, 6, 37], 41, [3, 2], x=x, w=w, zeros=zeros, pads=pads),
                conv(seed, [1, 3, 7, 64], 130, [1, 1], x=x, w=w, zeros=zeros),
            ):
                reason = refusal(node, threads=2)
                assert not reason or (zeros and "more than four values" in reason), reason


@pytest.mark.parametrize("least", [-8, -5, -2, 0, 1, 4])
def test_four_values_of_wider_weights(least):
    """Of 4-bit weights what counts are their values; as large as -8 twelve products leave a byte."""
    node = conv(
        2, [1, 4, 5, 50], 70, [3, 3], x=("unsigned", 2), w=("signed", 4), zeros=False, pads=[1, 1, 1, 1]
    )
    weights = np.random.default_rng(least + 8).integers(least, least + 4, (70, 450)).astype(np.int8)
    node.inputs[1] = pack(weights, 4)
    assert ("sums of twelve products exceed a byte" in refusal(node)) == (least == -8)


@given(seed=st.integers(0, 2**32 - 1))
def test_random_nodes(seed):
    rng = np.random.default_rng(seed)
    node = random_nodes.make(
        str(rng.choice(["LowBitConv", "APConv", "LowBitGemm", "APGemm"])),
        rng,
        x_bits=int(rng.integers(1, 3)),
        w_bits=int(rng.integers(1, 3)),
        kind=str(rng.choice(["dense", "pointwise", "grouped", "one_d", "wide"])),
    )
    refusal(node, threads=1 + seed % 3)


@pytest.mark.parametrize("epilogue", ["requantize", "residual", "float", "thresholds", "tail"])
def test_epilogues(epilogue, seeds):
    """Codes of every number of bits, few ones by comparisons."""
    for seed in seeds(12):
        rng = np.random.default_rng(seed)
        node = random_nodes.make("APConv", rng, x_bits=2, w_bits=1, kind="dense", epilogue=epilogue)
        assert not refusal(node) or node.attrs["x_encoding"] == "bipolar"


@pytest.mark.parametrize("w", W_TYPES, ids=str)
def test_largest_sums(w):
    """All codes at an end of their range; 27 for a triple of 2-bit weights are 65,529 of 7,281 channels."""
    for code in (0, -1):
        for channels in (64, 3640, 7281):
            node = conv(1, [1, 1, 3, channels], 33, [1, 1], x=("unsigned", 2), w=w, zeros=False)
            low = -(2 ** (w[1] - 1)) if w[0] == "signed" else 0
            weights = np.full((33, channels), (low, low + 2 ** w[1] - 1)[code])
            weights[0, 0] = (low + 2 ** w[1] - 1, low)[code]  # so that the values span what they can
            node.inputs[0][...] = 3
            node.inputs[1] = pack(weights.astype(np.int8 if w[0] == "signed" else np.uint8), w[1])
            assert not refusal(node)
    if w == ("signed", 2):
        assert "sums exceed 16 bits" in refusal(
            conv(1, [1, 1, 3, 7284], 8, [1, 1], x=("unsigned", 2), w=w, zeros=False)
        )


def test_channels_1_to_140():
    for channels in range(1, 141, 7 if SANITIZED else 1):
        assert not refusal(
            conv(channels, [1, 4, 5, channels], 141 - channels, [3, 3], x=("unsigned", 2), zeros=False,
                 pads=[1, 0, 1, 2])
        )  # fmt: skip
        assert not refusal(
            conv(channels, [1, 1, 7, channels], 141 - channels, [1, 1], x=("signed", 2), zeros=False)
        )


@pytest.mark.parametrize("name", EDGES)
def test_edge_geometry(name):
    shape, out, kernel, attrs = EDGES[name]
    for seed, x in enumerate(X_TYPES):
        assert not refusal(conv(seed, shape, out, kernel, x=x, zeros=False, **attrs), threads=1 + seed % 3)


@pytest.mark.parametrize("name", ["wide padding on one side", "several images", "small groups"])
def test_codes_out_of_range(name):
    """Their results are unspecified, but nothing outside the tensors is read or written."""
    shape, out, kernel, attrs = EDGES[name]
    node = conv(3, shape, out, kernel, x=("unsigned", 2), zeros=False, **attrs)
    node.inputs[0] = np.random.default_rng(4).integers(0, 256, shape).astype(np.uint8)
    first, second = (native.run(node.op_type, node.attrs, node.inputs, isa=ISA, kernel=ROW) for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"x": ("unsigned", 3)}, "3-bit activations"),
        ({"x": ("bipolar", 1)}, "bipolar activations"),
        ({"w": ("signed", 5)}, "5-bit weights"),
        ({"w": ("signed", 3)}, "more than four values"),
        ({"shape": [1, 5, 5, 16], "out": 16, "group": 16}, "depthwise"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(case, reason):
    arguments = {
        "shape": [1, 5, 5, 20],
        "out": 20,
        "kernel": [3, 3],
        "x": ("unsigned", 2),
        "zeros": False,
    } | case
    node = conv(1, **arguments)
    with pytest.raises(native.LowBitError, match=re.escape(ROW)) as error:
        native.run(node.op_type, node.attrs, node.inputs, isa=ISA, kernel=ROW)
    assert reason in str(error.value)
