"""Every row of the kernel table equals the reference kernel in every element, where it does not refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.ops import pack

from tests.numerics import random_nodes
from tests.numerics.expected import by_reference
from tests.support import require_native

native = require_native()

SEEDS = st.integers(0, 2**32 - 1)
LEVELS = native.isa_levels()
# The level of each row is asked for by name, so that a cap by LOWBIT_ISA does not hide rows.
ISA = {
    row["name"]: row["isa"]
    for row in native.kernel_table()
    if row["isa"] in LEVELS and row["algorithm"] != "reference"
}
ROWS = [row["name"] for row in native.kernel_table() if row["op"] == "conv" and row["name"] in ISA]
TRANSPOSED_ROWS = [
    row["name"] for row in native.kernel_table() if row["op"] == "conv_transpose" and row["name"] in ISA
]
WORKSPACE_LIMIT = 768 * 1024  # but for Winograd's kernels, whose tests have their own


def check(row: str, node: random_nodes.Node, threads: int = 3) -> bool:
    """Compares one row with the reference; False where the row refuses the node and says why."""
    arguments = (node.op_type, node.attrs, node.inputs)
    try:
        # Tasks as small as the kernel makes them for so many threads.
        got = native.run(*arguments, isa=ISA[row], kernel=row, threads=threads, task_cycles=1)
    except native.LowBitError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert row in refusal
        return False
    expected = by_reference(node)
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{row}: {differ.sum()} of {differ.size} elements differ: {node}"
    if not row.startswith("winograd"):
        assert native.plan(*arguments, isa=ISA[row], kernel=row)["workspace_bytes"] <= WORKSPACE_LIMIT
    return True


def conv(
    seed: int, shape: list[int], out: int, kernel: list[int], *, zeros: bool = True, **attrs: Any
) -> random_nodes.Node:
    """A requantizing convolution of given geometry with random weights and asymmetric zero points."""
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
        "w_encoding": "signed",
    } | attrs
    x_bits, w_bits = attrs.get("x_bits", 8), attrs.get("w_bits", 8)
    x_encoding, w_encoding = attrs.get("x_encoding", "unsigned"), attrs["w_encoding"]
    rows = int(np.prod(kernel)) * (channels // attrs["group"])
    weights = random_nodes.codes(rng, (out, rows), w_bits, "signed" if w_encoding == "signed" else "unsigned")
    spread = np.sqrt(rows) * 2.0 ** (x_bits + w_bits - 2) / 32
    inputs: list[np.ndarray | None] = [
        random_nodes.codes(rng, shape, x_bits, x_encoding),
        pack(weights, w_bits),
        np.float32(0.5),
        random_nodes.zero_point(rng, x_bits, x_encoding) if zeros else np.int32(0),
        np.float32(2.0 ** rng.integers(-3, 0, out)),
        np.int32(0),
        rng.integers(-1000, 1000, out).astype(np.int32),
        np.float32(2.0 ** np.round(np.log2(spread * 0.15))),
        np.int32(128),
    ]
    return random_nodes.Node("LowBitConv", attrs, inputs)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("op_type", ["LowBitConv", "APConv", "LowBitGemm", "APGemm"])
@given(seed=SEEDS)
def test_random_nodes(op_type, row, seed):
    check(row, random_nodes.make(op_type, np.random.default_rng(seed)), threads=1 + seed % 3)


@pytest.mark.parametrize("row", TRANSPOSED_ROWS)
@given(seed=SEEDS)
def test_random_transposed_nodes(row, seed):
    check(row, random_nodes.make("LowBitConvTranspose", np.random.default_rng(seed)), threads=1 + seed % 3)


@pytest.mark.parametrize("row", TRANSPOSED_ROWS)
@pytest.mark.parametrize(
    ("shape", "out", "kernel", "attrs"),
    [
        ([1, 2, 300, 5], 7, [3, 3], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),  # several blocks a row
        ([2, 3, 257, 16], 40, [5, 5], {"strides": [3, 2], "pads": [2, 0, 1, 3], "output_padding": [2, 1]}),
        ([1, 3, 5, 12], 24, [2, 2], {"strides": [4, 4]}),  # outputs that no tap reaches
        ([1, 5, 9, 20], 20, [3, 3], {"strides": [2, 2], "dilations": [2, 3]}),  # phases without taps
        ([1, 4, 4, 32], 32, [3, 3], {"strides": [2, 2], "group": 4}),
        ([3, 1, 1, 8], 8, [4, 4], {"strides": [1, 1], "pads": [1, 1, 1, 1]}),
    ],
    ids=str,
)
def test_transposed_geometry(row, shape, out, kernel, attrs):
    node = conv(7, shape, out, kernel, w_bits=4, **attrs)
    node.op_type = "LowBitConvTranspose"
    assert check(row, node, threads=2)


@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS)
def test_random_thresholds(row, seed):
    rng = np.random.default_rng(seed)
    check(row, random_nodes.make("LowBitConv", rng, epilogue="thresholds"), threads=1 + seed % 3)


@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS)
def test_thresholds_on_a_line(row, seed):
    """What a chain of scales and a quantizer has: kernels may take it for a line, where it is one."""
    rng = np.random.default_rng(seed)
    node = random_nodes.make("LowBitConv", rng, epilogue="thresholds")
    thresholds, base, direction = (given for given in node.inputs[9:12] if given is not None)
    out, count = thresholds.shape
    spacing = np.exp(rng.uniform(np.log(0.2), np.log(5000), (out, 1)))
    exact = spacing * (np.arange(count) - rng.uniform(-2, count + 2, (out, 1)))
    places = np.ceil(exact).astype(np.int64)
    if rng.random() < 0.5:  # as the converter writes those that no sum reaches, or every one
        places[:, int(rng.integers(count // 2, count + 1)) :] = 2**31 - 1
        places[:, : int(rng.integers(0, count // 2 + 1))] = -(2**31)
    if rng.random() < 0.3:  # hardly off the line, or far
        places[rng.integers(out), rng.integers(count)] += int(rng.choice([-1, 1, 40]))
    places = np.sort(places, axis=1) * direction[:, None]
    thresholds[:] = np.clip(places, -(2**31), 2**31 - 1)
    if rng.random() < 0.7:  # one first code, as the converter writes it
        base[:] = base[0]
    check(row, node, threads=1 + seed % 3)


BIPOLAR: dict[str, tuple[list[int], int, list[int], dict[str, Any]]] = {
    "padded": ([2, 9, 11, 20], 33, [3, 3], {"pads": [1, 1, 1, 1]}),
    "8-bit weights": (
        [1, 6, 6, 24],
        40,
        [3, 3],
        {"pads": [1, 0, 1, 2], "w_bits": 8, "w_encoding": "unsigned"},
    ),
    "8-bit weights, pointwise": ([2, 5, 60, 7], 65, [1, 1], {"w_bits": 8, "w_encoding": "signed"}),
    "few channels": ([1, 12, 40, 3], 16, [5, 5], {"pads": [2, 2, 2, 2], "strides": [2, 2]}),
    "many channels": ([1, 5, 5, 700], 16, [3, 3], {"pads": [1, 1, 1, 1]}),
    "dilated": ([1, 9, 30, 10], 8, [3, 3], {"pads": [2, 3, 2, 3], "dilations": [2, 3]}),
    "grouped": ([1, 7, 8, 24], 36, [3, 3], {"pads": [1, 1, 1, 1], "group": 3}),
    "depthwise": ([1, 7, 8, 37], 37, [3, 3], {"pads": [1, 1, 1, 1], "group": 37, "strides": [2, 1]}),
    "wide rows": ([1, 3, 2000, 12], 8, [3, 3], {"pads": [1, 1, 1, 1]}),
    "windows wholly in the padding": ([1, 2, 2, 8], 8, [2, 2], {"pads": [3, 3, 3, 3]}),
}


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("igemm")])
@pytest.mark.parametrize("name", BIPOLAR)
def test_bipolar_activations(name, row):
    shape, out, kernel, attrs = BIPOLAR[name]
    bits = {"x_bits": 1, "x_encoding": "bipolar", "w_bits": 1, "w_encoding": "bipolar"}
    for seed, threads in ((1, 1), (2, 3)):
        assert check(row, conv(seed, shape, out, kernel, **(bits | attrs)), threads=threads)


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("igemm")])
@given(seed=SEEDS)
def test_first_layers(row, seed):
    """Few channels, pads of any size: several pixels may become one."""
    rng = np.random.default_rng(seed)
    large = bool(rng.random() < 0.5)
    kernel = (
        [int(rng.integers(1, 9)), int(rng.choice([7, 8]))]
        if large
        else [int(n) for n in rng.integers(1, 5, 2)]
    )
    strides = [2, 2] if large else [int(n) for n in rng.integers(1, 4, 2)]
    shape = [int(rng.integers(1, 3)), *(int(n) for n in rng.integers(1, 60, 2)), int(rng.integers(1, 5))]
    pads = [int(rng.integers(0, size)) for size in kernel * 2]
    for axis in (0, 1):
        pads[axis] += max(0, kernel[axis] - shape[1 + axis] - pads[axis] - pads[axis + 2])
    bits = {
        "x_bits": int(rng.choice([2, 8, 8])),
        "x_encoding": str(rng.choice(["unsigned", "signed"])),
        "w_bits": int(rng.choice([4, 8, 8])),
        "w_encoding": str(rng.choice(["unsigned", "signed"])),
    }
    node = conv(seed, shape, int(rng.integers(1, 70)), kernel, strides=strides, pads=pads, **bits)
    check(row, node, threads=1 + seed % 3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("igemm")])
def test_first_layers_read_nothing_behind_an_image(row, channels):
    """Pixels are read as four bytes: under AddressSanitizer the last ones of a tensor must not be."""
    for width in (40, 41):
        shape = [1, 9, width, channels]
        for kernel, stride in ((7, 2), (3, 1)):
            geometry: dict[str, Any] = {"strides": [stride] * 2, "pads": [kernel // 2] * 4}
            check(row, conv(width, shape, 16, [kernel] * 2, **geometry, x_bits=8, w_bits=8))


@pytest.mark.parametrize("row", ROWS)
@given(seed=SEEDS)
def test_codes_that_rise_from_the_zero_point(row, seed):
    """As behind a ReLU: sums far below it, sums beyond 2^23 and codes at the end of their range."""
    rng = np.random.default_rng(seed)
    k, out = int(rng.integers(1, 700)), int(rng.integers(1, 70))
    encoding = str(rng.choice(["unsigned", "signed"]))
    node = conv(seed, [1, 3, int(rng.integers(1, 30)), k], out, [1, 1], x_encoding=encoding, zeros=False)
    y_signed = bool(rng.random() < 0.3)
    node.inputs[6] = rng.choice([0, 2**22, 2**23 - 1, -(2**23), 2**24, 2**28, -(2**28)], out).astype(
        np.int32
    ) + rng.integers(-300, 300, out).astype(np.int32)
    node.inputs[7] = np.float32(2.0 ** rng.integers(-6, 16) * rng.choice([1, 1.1]))
    node.inputs[8] = np.int32(-128 if y_signed else 0)
    if y_signed:
        node.attrs["y_encoding"] = "signed"
    check(row, node, threads=1 + seed % 3)


SPLIT: dict[str, tuple[list[int], int, list[int], dict[str, Any]]] = {
    "one block": ([1, 7, 7, 64], 640, [3, 3], {"pads": [1, 1, 1, 1]}),
    "groups": ([1, 7, 7, 192], 1152, [3, 3], {"pads": [1, 1, 1, 1], "group": 2}),
    "bipolar, few channels": (
        [1, 9, 9, 8],
        1024,
        [7, 7],
        {"pads": [3, 3, 3, 3], "x_bits": 1, "x_encoding": "bipolar"},
    ),
    "signed, weights of 9 bits": (
        [1, 7, 7, 64],
        640,
        [3, 3],
        {"pads": [1, 1, 1, 1], "x_bits": 8, "x_encoding": "signed", "w_bits": 8, "w_encoding": "unsigned"},
    ),
}


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("igemm")])
@pytest.mark.parametrize("name", SPLIT)
def test_tasks_of_one_block_of_pixels(name, row):
    """Threads take turns at the channels of a block: what one of them has prepared it may find again."""
    shape, out, kernel, attrs = SPLIT[name]
    for threads in (1, 3):
        # Sums of 16 bits do not hold these products.
        assert check(row, conv(3, shape, out, kernel, **attrs), threads=threads) or "acc16" in row


@pytest.mark.parametrize("row", ROWS)
def test_windows_beyond_all_memory(row):
    """Pads may be as large as a dilated window: here 2^30 rows of 2^34 bytes, together 0 modulo 2^64."""
    attrs = {"dilations": [(2**30 - 1) // 3] * 2, "pads": [2**30 - 1] * 2 + [0, 0]}
    bits = {"x_bits": 1, "x_encoding": "bipolar", "w_bits": 1, "w_encoding": "bipolar"}
    check(row, conv(1, [1, 1, 1, 16], 8, [4, 4], **(bits | attrs)))


@pytest.mark.parametrize("row", TRANSPOSED_ROWS)
@pytest.mark.parametrize("x", ["bipolar", "unsigned"])
def test_transposed_bipolar_operands(x, row):
    for seed, attrs in enumerate(
        [
            {"strides": [2, 2], "pads": [1, 1, 1, 1]},
            {"strides": [2, 2], "dilations": [2, 3]},  # phases without taps
            {"strides": [3, 1], "pads": [0, 1, 2, 0], "output_padding": [1, 0], "group": 2},
        ]
    ):
        node = conv(
            seed, [2, 5, 9, 12], 20, [3, 3], x_bits=1, x_encoding=x, w_bits=1, w_encoding="bipolar", **attrs
        )
        node.op_type = "LowBitConvTranspose"
        assert check(row, node, threads=2)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x_bits", range(1, 9))
def test_all_bit_pairs(x_bits, row, seeds):
    ran = 0
    for w_bits in range(1, 9):
        for seed in seeds(1):
            rng = np.random.default_rng([seed, x_bits, w_bits])
            for kind in ("dense", "grouped", "depthwise", "stem"):
                ran += check(
                    row, random_nodes.make("LowBitConv", rng, x_bits=x_bits, w_bits=w_bits, kind=kind)
                )
    assert ran > 0 or not row.startswith("igemm"), f"{row} refuses every node of {x_bits}-bit activations"


EXTREME_BITS = [(8, 8), (8, 7), (8, 4), (8, 2), (8, 1), (7, 8), (4, 4), (2, 8), (1, 8), (1, 1)]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bits", EXTREME_BITS)
@pytest.mark.parametrize("code", ["low", "high"])
def test_extreme_codes(bits, code, row):
    """The largest sums that the bits allow, where 16-bit accumulators would overflow first."""
    for encoding in ("signed", "unsigned"):
        node = conv(1, [1, 3, 5, 260], 17, [3, 3], pads=[1, 1, 1, 1], x_bits=bits[0], w_bits=bits[1],
                    w_encoding=encoding, zeros=False)  # fmt: skip
        low, high = random_nodes.code_range(bits[1], encoding)
        dtype = np.int8 if encoding == "signed" else np.uint8
        node.inputs[0][...] = 2 ** bits[0] - 1
        node.inputs[1] = pack(np.full((17, 9 * 260), low if code == "low" else high, dtype), bits[1])
        check(row, node)


WORST_BITS = [*((bits, bits) for bits in range(1, 9)), (2, 4), (4, 2), (8, 4), (4, 8)]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bits", WORST_BITS)
@pytest.mark.parametrize("lowest", ["full range", "symmetric weights"])
def test_worst_case_sums(lowest, bits, row):
    """Every sum of products that narrow accumulators may meet first, exactly.

    A pixel takes turns between the ends of its range every 1, 2, ... products, and so does a channel, in
    either phase: all pairs of such sequences are multiplied, equal signs and opposite ones.
    """
    length, turns = 600, (1, 2, 3, 4, 600)
    for encoding in ("unsigned", "signed"):
        node = conv(1, [1, 2, len(turns), length], 2 * len(turns), [1, 1], zeros=False,
                    x_bits=bits[0], w_bits=bits[1], x_encoding=encoding)  # fmt: skip
        second = np.stack([(np.arange(length) // every + phase) % 2 for phase in (0, 1) for every in turns])
        x_low, x_high = random_nodes.code_range(bits[0], encoding)
        w_low, w_high = random_nodes.code_range(bits[1], "signed")
        if lowest == "symmetric weights" and bits[1] > 1:
            w_low += 1
        x, w = np.where(second == 1, x_high, x_low), np.where(second == 1, w_high, w_low)
        node.inputs[0] = x.reshape(1, 2, len(turns), length).astype(np.int8 if x_low < 0 else np.uint8)
        node.inputs[1] = pack(w.astype(np.int8), bits[1])
        node.attrs["epilogue"] = "float"
        check(row, random_nodes.Node(node.op_type, node.attrs, node.inputs[:7]))


# Steps between two widenings of narrow sums in "Extremely Low-bit Convolution Optimization for Quantized
# Neural Network on Modern Computer Architectures" (ICPP 2020), 3.3: bits -> (bits of the sums, steps).
PAPER_INTERVALS = {2: (8, 31), 3: (8, 7), 4: (16, 511), 5: (16, 127), 6: (16, 31), 7: (16, 8), 8: (16, 2)}


def test_the_papers_intervals_overflow_at_full_range():
    def worst(bits: int) -> int:
        steps, least = PAPER_INTERVALS[bits][1], -(2 ** (bits - 1))
        return steps * least * least

    overflow = [bits for bits, (lane, _) in PAPER_INTERVALS.items() if worst(bits) >= 2 ** (lane - 1)]
    assert overflow == [7, 8]
    assert worst(7) == worst(8) == 2**15  # one more than int16 holds


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bits", PAPER_INTERVALS)
def test_least_codes_around_the_papers_intervals(bits, row):
    """Every product is the largest; a sum that wraps changes its sign."""
    least, steps = -(2 ** (bits - 1)), PAPER_INTERVALS[bits][1]
    for k in {max(steps - 1, 1), steps, steps + 1, 2 * steps, 3 * steps + 2}:
        node = conv(1, [1, 3, 5, k], 35, [1, 1], x_bits=bits, x_encoding="signed", w_bits=bits, zeros=False)
        node.inputs[0][...] = least
        node.inputs[1] = pack(np.full((35, k), least, np.int8), bits)
        check(row, node)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("x_bits", [4, 7, 8])
def test_zero_points_that_take_weights_out_of_int8(x_bits, row):
    """What is multiplied is then moved back into int8, and may reach both of its ends."""
    for zero_point in (-128, -122, -73, -1, 1, 73, 122, 127):
        node = conv(x_bits, [1, 6, 5, 20], 19, [3, 3], x_bits=x_bits, x_encoding="signed", zeros=False)
        low, high = random_nodes.code_range(8, "signed")
        w = np.full((19, 180), low, np.int8)
        w[::2, -1] = high
        w[1::4] = high
        w[1::4, 0] = low
        node.inputs[0][...] = random_nodes.code_range(x_bits, "signed")[0]
        node.inputs[1] = pack(w, 8)
        node.inputs[5] = np.int32(zero_point)
        check(row, node)


@pytest.mark.parametrize("row", ROWS)
def test_channels_1_to_70(row):
    for channels in range(1, 71):
        check(row, conv(channels, [1, 4, 5, channels], 71 - channels, [3, 3], pads=[1, 0, 1, 2]))
        check(row, conv(channels, [1, 1, 1, channels], 71 - channels, [1, 1]))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("products", [514, 1026, 2052, 16390])
def test_long_windows(products, row):
    """Around the chunks in which long windows are multiplied, for weights of every width they are held in."""
    for w_bits, x_bits, pixels in ((1, 2, 13), (2, 2, 49), (4, 4, 27), (8, 8, 26)):
        node = conv(products, [1, 1, pixels, products], 19, [1, 1], w_bits=w_bits, x_bits=x_bits)
        check(row, node, threads=2)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("w_bits", [2, 4, 8])
def test_zero_points_that_move_weights_out_of_their_bits(w_bits, row):
    """Panels hold weights less their least value, 0 included, which fills them up."""
    rng = np.random.default_rng(w_bits)
    low, high = random_nodes.code_range(w_bits, "signed")
    for zeros in ([low - 1, high + 1], [high, high], [low, low], [-9, 3], [0, 0]):
        node = conv(w_bits, [1, 5, 7, 18], 37, [3, 3], w_bits=w_bits, x_bits=2, pads=[1, 1, 1, 1])
        node.inputs[5] = np.clip(rng.choice(zeros, 37), low, high).astype(np.int32)
        check(row, node)


# name -> (input shape, output channels, kernel, attributes)
EDGES: dict[str, tuple[list[int], int, list[int], dict[str, Any]]] = {
    "one pixel, all padding but one tap": ([1, 1, 1, 5], 9, [3, 3], {"pads": [1, 1, 1, 1]}),
    "windows wholly in the padding": ([1, 2, 2, 8], 8, [2, 2], {"pads": [3, 3, 3, 3]}),
    "wide padding on one side": ([2, 3, 4, 6], 10, [3, 2], {"pads": [0, 5, 4, 0], "strides": [2, 3]}),
    "dilation reaches over the image": ([1, 4, 4, 7], 5, [3, 3], {"pads": [4, 4, 4, 4], "dilations": [3, 4]}),
    "more pixels than a block": ([1, 23, 29, 16], 33, [3, 3], {"pads": [1, 1, 1, 1]}),
    "several images per block": ([7, 3, 5, 12], 20, [1, 1], {}),
    "strided pointwise": ([2, 15, 17, 19], 64, [1, 1], {"strides": [2, 3]}),
    "first layer": ([2, 40, 37, 3], 64, [7, 7], {"pads": [3, 3, 3, 3], "strides": [2, 2]}),
    "first layer at stride 1": ([2, 20, 37, 3], 64, [3, 3], {"pads": [1, 1, 1, 1]}),
    "first layer, dilated rows": ([1, 20, 21, 1], 13, [5, 3], {"pads": [2, 1, 2, 1], "dilations": [2, 1]}),
    "one long row, few channels": ([1, 9000, 2], 6, [5], {"pads": [2, 2], "strides": [2]}),
    "one long row, many channels": ([1, 700, 40], 6, [5], {"pads": [4, 0]}),
    "panels of uneven width": ([1, 5, 5, 24], 144 + 9, [1, 1], {}),
    "large kernel": ([1, 30, 30, 4], 4, [29, 29], {"pads": [2, 2, 2, 2]}),
    "small groups side by side": ([1, 6, 7, 3 * 11], 2 * 11, [3, 3], {"group": 11, "pads": [1, 1, 1, 1]}),
    "groups wider than a panel": ([1, 5, 5, 2 * 30], 2 * 70, [3, 3], {"group": 2}),
    "channel multiplier": ([1, 5, 9, 10], 30, [3, 3], {"group": 10, "pads": [0, 1, 1, 0]}),
    "signed activations": ([1, 6, 6, 10], 18, [3, 3], {"x_encoding": "signed", "pads": [1, 1, 1, 1]}),
    "a row wider than a band": ([1, 3, 1500, 64], 8, [2, 3], {"pads": [1, 1, 0, 1]}),
    "more rows than a band": ([1, 75, 40, 130], 5, [3, 3], {"pads": [1, 1, 1, 1]}),
    "unsigned weights": ([1, 6, 6, 10], 18, [3, 3], {"w_encoding": "unsigned", "pads": [1, 1, 1, 1]}),
    "unsigned weights in groups": ([1, 6, 6, 12], 8, [3, 3], {"w_encoding": "unsigned", "group": 4}),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", EDGES)
def test_edge_geometry(name, row):
    shape, out, kernel, attrs = EDGES[name]
    for seed, threads in ((1, 1), (2, 3)):
        check(row, conv(seed, shape, out, kernel, **attrs), threads=threads)


# Engines that multiply tiles of pixels copy x so that all windows begin equally far apart (igemm.cc, "even").
@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("igemm")])
@given(seed=SEEDS)
def test_even_windows(row, seed):
    rng = np.random.default_rng(seed)
    draw = lambda low, high: int(rng.integers(low, high + 1))  # noqa: E731
    kernel, dilation = [draw(1, 4), draw(2, 5)], [draw(1, 3), 1]
    pads = [draw(0, 3) for _ in range(4)]
    least = [dilation[d] * (kernel[d] - 1) + 1 for d in range(2)]
    channels = 64 * draw(1, 2) if draw(0, 2) == 0 else draw(16, 70)  # whole steps have an order of their own
    shape = [draw(1, 2), draw(least[0], least[0] + 12), draw(least[1], least[1] + 20), channels]
    attrs = {"pads": pads, "strides": [draw(1, 3), draw(1, 3)], "dilations": dilation}
    attrs["x_encoding"] = str(rng.choice(["unsigned", "signed"]))
    check(row, conv(seed, shape, draw(1, 70), kernel, **attrs), threads=draw(1, 3))


def test_dense_and_grouped_rows_refuse_little():
    """igemm takes every plain node; what it refuses, it refuses with a reason."""
    node = conv(1, [1, 5, 5, 8], 8, [3, 3])
    for level in LEVELS[1:]:
        plan = native.plan(node.op_type, node.attrs, node.inputs, isa=level)
        assert plan["kernel"].startswith("igemm"), plan
        assert all(": " in reason for reason in plan["refused"]), plan
