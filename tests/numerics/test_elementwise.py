"""Every op that is not a matrix product: each instruction-set level equals the definition in every element.

One generator per op makes a random node: shapes around the vector lengths (1 element, odd channels, several
blocks), every encoding, extreme codes, and scales chosen so that many results are ties (powers of two, equal
scales), where a wrong formula shows. Each node runs as the numpy definition, as the C++ reference and at
every level of this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics import random_nodes
from tests.support import require_native

native = require_native()

from lowbit import ops  # noqa: E402  (needs the native module)

Node = tuple[str, dict[str, Any], list[np.ndarray | None]]
Rng = np.random.Generator

CHANNELS = [1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 130, 257, 320]


def scalar(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


def integer(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)


def pick(rng: Rng, *options: Any) -> Any:
    return options[rng.integers(len(options))]


def scale(rng: Rng) -> np.float32:
    """Powers of two make ties; the others are ordinary, tiny, or close to a power of two."""
    kind = rng.integers(5)
    if kind < 2:
        return np.float32(2.0 ** int(rng.integers(-8, 3)))
    if kind == 2:
        return np.float32(rng.uniform(0.001, 0.1))
    if kind == 3:
        return np.nextafter(np.float32(2.0 ** int(rng.integers(-6, 2))), np.float32(pick(rng, 0.0, 10.0)))
    return np.float32(pick(rng, 0.1, 0.3, 1e-6, 1.0, 255.0 / 127.0, 1e-30, 1e30))


def scales(rng: Rng, channels: int) -> np.ndarray:
    return (
        scalar(scale(rng))
        if rng.integers(2)
        else np.asarray([scale(rng) for _ in range(channels)], np.float32)
    )


def low_high(encoding: str, bits: int = 8) -> tuple[int, int]:
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if encoding == "signed" else (0, (1 << bits) - 1)


def encoding(rng: Rng) -> str:
    return pick(rng, "unsigned", "signed")


def zero_point(rng: Rng, enc: str, bits: int = 8) -> int:
    low, high = low_high(enc, bits)
    return int(pick(rng, low, high, 0, rng.integers(low, high + 1)))


def zero_points(rng: Rng, enc: str, channels: int) -> np.ndarray:
    if rng.integers(2):
        return integer(zero_point(rng, enc))
    return np.asarray([zero_point(rng, enc) for _ in range(channels)], np.int32)


def codes(rng: Rng, shape: tuple[int, ...], enc: str) -> np.ndarray:
    low, high = low_high(enc)
    dtype = np.int8 if enc == "signed" else np.uint8
    if rng.integers(4) == 0:
        return rng.choice(np.asarray([low, high], dtype), shape)
    return rng.integers(low, high + 1, shape).astype(dtype)


def image(rng: Rng, spatial: int | None = None, largest: int = 9) -> tuple[int, ...]:
    spatial = int(rng.integers(1, 3)) if spatial is None else spatial
    sizes = [int(v) for v in rng.integers(1, largest + 1, spatial)]
    return (int(rng.integers(1, 3)), *sizes, int(pick(rng, *CHANNELS)))


def output_range(rng: Rng) -> dict[str, Any]:
    enc, bits = encoding(rng), int(pick(rng, 8, 8, 8, 4, 2, 1))
    attrs: dict[str, Any] = {"y_encoding": enc, "y_bits": bits}
    low, high = low_high(enc, bits)
    if rng.integers(3) == 0:
        first, second = sorted(int(v) for v in rng.integers(low, high + 1, 2))
        attrs |= {"y_min": [first], "y_max": [second]}
    return attrs


def quantizer(rng: Rng) -> tuple[dict[str, Any], list[np.ndarray | None]]:
    """Attributes and [y_scale, y_zero_point]; sometimes without them: float output."""
    attrs = output_range(rng)
    if rng.integers(5) == 0:
        return attrs, [None, None]
    zero = None if rng.integers(6) == 0 else integer(zero_point(rng, attrs["y_encoding"], attrs["y_bits"]))
    return attrs, [scalar(scale(rng)), zero]


def affine(rng: Rng) -> Node:
    attrs, out = quantizer(rng)
    enc, shape = encoding(rng), image(rng)
    c = shape[-1]
    per_channel = [
        rng.normal(0, 1, c).astype(np.float32),
        rng.choice([-1, -0.5, 0, 0.25, 1, 2], c).astype(np.float32),
    ]
    gain = pick(rng, scalar(2.0), *per_channel)
    shift = pick(rng, scalar(0.5), *per_channel)
    x_scale = scalar(scale(rng))
    return (
        "LowBitAffine",
        attrs | {"x_encoding": enc},
        [codes(rng, shape, enc), x_scale, integer(zero_point(rng, enc)), gain, shift, *out],
    )


def lookup(rng: Rng) -> Node:
    enc, shape = encoding(rng), image(rng)
    table = rng.integers(0, 256, (shape[-1], 256) if rng.integers(3) == 0 else (256,)).astype(np.uint8)
    return "LowBitLookup", {"x_encoding": enc, "y_encoding": encoding(rng)}, [codes(rng, shape, enc), table]


def broadcast_shapes(rng: Rng) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Equal shapes, [N,1,1,C], scalars, missing leading dims, and mixed broadcasting."""
    full = image(rng, 2)
    kind = rng.integers(6)
    if kind == 0:
        return full, full
    if kind == 1:
        return full, (full[0], 1, 1, full[3])
    if kind == 2:
        return full, ()
    if kind == 3:
        return full, full[2:]
    first, second = list(full), list(full)
    for d in range(4):
        which = rng.integers(3)
        if which == 0:
            first[d] = 1
        elif which == 1:
            second[d] = 1
    return tuple(first), tuple(second)


def binary(op: str) -> Callable[[Rng], Node]:
    def make(rng: Rng) -> Node:
        attrs, out = quantizer(rng)
        ea, eb = encoding(rng), encoding(rng)
        shape_a, shape_b = broadcast_shapes(rng)
        if rng.integers(2):
            shape_a, shape_b = shape_b, shape_a
        a_scale = scale(rng)
        b_scale = a_scale if rng.integers(3) == 0 else scale(rng)
        if out[0] is not None and rng.integers(3) == 0:
            out[0] = scalar(a_scale)
        table = rng.integers(-300, 300, 256).astype(np.float32) * np.float32(b_scale)
        tables = [table] if op == "LowBitAdd" and rng.integers(3) == 0 else []
        return op, attrs | {"a_encoding": ea, "b_encoding": eb}, [
            codes(rng, shape_a, ea), scalar(a_scale), integer(zero_point(rng, ea)),
            codes(rng, shape_b, eb), scalar(b_scale), integer(zero_point(rng, eb)), *out, *tables,
        ]  # fmt: skip

    return make


def window(rng: Rng, shape: tuple[int, ...], dilations: bool) -> dict[str, Any]:
    """A window that fits, with pads smaller than the kernel as pooling demands."""
    spatial = shape[1:-1]
    while True:
        kernel = [int(v) for v in rng.integers(1, 4, len(spatial))]
        dilation = [int(v) for v in rng.integers(1, 3, len(spatial))] if dilations else [1] * len(spatial)
        pads = [int(rng.integers(0, k)) for k in kernel + kernel]
        padded = [s + pads[d] + pads[d + len(spatial)] for d, s in enumerate(spatial)]
        if all(p >= dl * (k - 1) + 1 for p, dl, k in zip(padded, dilation, kernel, strict=True)):
            break
    attrs: dict[str, Any] = {"kernel_shape": kernel, "pads": pads, "ceil_mode": int(rng.integers(2))}
    attrs["strides"] = [int(v) for v in rng.integers(1, 4, len(spatial))]
    return attrs | ({"dilations": dilation} if dilations else {})


def max_pool(rng: Rng) -> Node:
    enc, shape = encoding(rng), image(rng)
    return "LowBitMaxPool", window(rng, shape, True) | {"x_encoding": enc}, [codes(rng, shape, enc)]


def average_pool(rng: Rng) -> Node:
    attrs, out = quantizer(rng)
    enc, shape = encoding(rng), image(rng)
    attrs |= window(rng, shape, False) | {"x_encoding": enc, "count_include_pad": int(rng.integers(2))}
    x_scale = scale(rng)
    if out[0] is not None and rng.integers(2):
        out[0] = scalar(x_scale)
    return (
        "LowBitAveragePool",
        attrs,
        [codes(rng, shape, enc), scalar(x_scale), integer(zero_point(rng, enc)), *out],
    )


def global_average_pool(rng: Rng) -> Node:
    attrs, out = quantizer(rng)
    enc, shape = encoding(rng), image(rng, largest=pick(rng, 4, 9, 30))
    attrs |= {"x_encoding": enc, "keepdims": int(rng.integers(2))}
    x_scale = scale(rng)
    if out[0] is not None and rng.integers(2):
        out[0] = scalar(x_scale)
    return (
        "LowBitGlobalAveragePool",
        attrs,
        [codes(rng, shape, enc), scalar(x_scale), integer(zero_point(rng, enc)), *out],
    )


def concat(rng: Rng) -> Node:
    attrs = output_range(rng)
    shape, count = list(image(rng)), int(rng.integers(1, 4))
    axis = int(rng.integers(-len(shape), len(shape)))
    y_scale, y_zero = scale(rng), zero_point(rng, attrs["y_encoding"], attrs["y_bits"])
    tensors, x_scales, x_zeros, encodings = [], [], [], []
    for _ in range(count):
        same = rng.integers(2) == 0  # the output's own grid: copied
        enc = attrs["y_encoding"] if same else encoding(rng)
        shape[axis] = int(pick(rng, 1, 2, 3, 5, 12, 16, 20, 32, 33, 40, 64, 70, 300))
        encodings.append(enc)
        x_scales.append(y_scale if same else scale(rng))
        x_zeros.append(y_zero if same else zero_point(rng, enc))
        tensors.append(codes(rng, tuple(shape), enc))
    attrs |= {"axis": axis, "x_encodings": ",".join(encodings)}
    return (
        "LowBitConcat",
        attrs,
        [
            np.asarray(x_scales, np.float32),
            np.asarray(x_zeros, np.int32),
            scalar(y_scale),
            integer(y_zero),
            *tensors,
        ],
    )


def resize(rng: Rng) -> Node:
    enc, shape = encoding(rng), image(rng)
    attrs: dict[str, Any] = {
        "x_encoding": enc,
        "coordinate_transformation_mode": pick(
            rng, "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"
        ),
        "nearest_mode": pick(rng, "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
        "mode": pick(rng, "nearest", "linear", "cubic"),
    }
    if attrs["mode"] != "nearest" and rng.integers(4) == 0 and len(shape) == 4:  # three spatial dims
        shape = (*shape[:3], int(rng.integers(1, 5)), shape[3])
    if attrs["mode"] == "cubic":
        attrs |= {"exclude_outside": int(rng.integers(2)), "cubic_coeff_a": pick(rng, -0.75, -0.5, 9.0)}
    if rng.integers(2):
        attrs["sizes"] = [int(v) for v in rng.integers(1, 20, len(shape) - 2)]
    else:
        attrs["scales"] = [
            float(pick(rng, 1.0, 1.5, 2.0, 3.0, 2.3, *([0.5, 0.3] if s > 3 else []))) for s in shape[1:-1]
        ]
    x = codes(rng, shape, enc)
    if attrs["mode"] == "nearest":
        return "LowBitResize", attrs, [x]
    attrs |= output_range(rng)
    # A scale far too small makes numbers that no fast kernel converts.
    y_scale = scalar(1e-9) if rng.integers(10) == 0 else scalar(scale(rng))
    y_zero = integer(zero_point(rng, attrs["y_encoding"], bits=attrs["y_bits"]))
    zeros = integer(zero_point(rng, enc))
    return "LowBitResize", attrs, [x, scalar(scale(rng)), zeros, y_scale, y_zero]


def softmax(rng: Rng) -> Node:
    """Any table, any axis, rows on both sides of the length up to which a kernel keeps their entries."""
    enc, shape = encoding(rng), list(image(rng, largest=9))
    axis = int(rng.integers(-len(shape), len(shape)))
    shape[axis] = int(pick(rng, shape[axis], shape[axis], 1024, 1025))
    if shape[axis] > 1000:
        shape = [min(size, 3) if size < 1000 else size for size in shape]
    table = rng.integers(0, 2**24 + 1, 256).astype(np.int32)
    table[0] = pick(rng, 1, 2**24)
    attrs = output_range(rng) | {"axis": axis, "x_encoding": enc}
    y_zero = integer(zero_point(rng, attrs["y_encoding"], bits=attrs["y_bits"]))
    # 2^-22 and below is what the fast kernels leave to the reference.
    y_scale = scalar(pick(rng, 1 / 256, 1 / 255, 2.0**-10, 1e-8, 3.0))
    x = codes(rng, tuple(shape), enc)
    zeros = integer(zero_point(rng, enc))
    return "LowBitSoftmax", attrs, [x, scalar(scale(rng)), zeros, table, y_scale, y_zero]


def depth_to_space(rng: Rng) -> Node:
    enc, block = encoding(rng), int(rng.integers(1, 5))
    n, h, w, c = image(rng, 2)
    attrs = {"x_encoding": enc, "blocksize": block, "mode": pick(rng, "DCR", "CRD")}
    return "LowBitDepthToSpace", attrs, [codes(rng, (n, h, w, min(c, 33) * block**2), enc)]


def picture(rng: Rng) -> Node:
    node = random_nodes.random_image(rng, largest=40)
    return node.op_type, node.attrs, node.inputs


def requantize(rng: Rng) -> Node:
    attrs = output_range(rng) | {"y_bits": 8, "y_min": [], "y_max": []}
    enc, shape = encoding(rng), image(rng)
    c = shape[-1]
    return "LowBitRequantize", attrs | {"x_encoding": enc}, [
        codes(rng, shape, enc), scales(rng, c), zero_points(rng, enc, c),
        scales(rng, c), zero_points(rng, attrs["y_encoding"], c),
    ]  # fmt: skip


def quantize(rng: Rng) -> Node:
    attrs = output_range(rng) | {"y_bits": 8, "y_min": [], "y_max": []}
    to_last = int(rng.integers(2))
    shape = image(rng, largest=14)
    c = shape[-1]
    y_scales = scales(rng, c)
    # Halves of the scale are ties; a few infinities, NaNs, huge and tiny numbers among them.
    x = (rng.integers(-600, 600, shape) * 0.5 * y_scales).astype(np.float32)
    special = np.asarray([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -0.0], np.float32)
    x = np.where(rng.random(shape) < 0.05, rng.choice(special, shape), x)
    if to_last:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return (
        "LowBitQuantize",
        attrs | {"to_channels_last": to_last},
        [x, y_scales, zero_points(rng, attrs["y_encoding"], c)],
    )


def threshold_rows(rng: Rng, rows: int, count: int, dirs: np.ndarray) -> np.ndarray:
    """Sorted rows on a grid of halves, with duplicates and infinities (always reached, never reached)."""
    out = (rng.integers(-40, 40, (rows, count)) * 0.5).astype(np.float32)
    out[rng.random(out.shape) < 0.1] = pick(rng, np.inf, -np.inf)
    sign = dirs[:, None].astype(np.float32)
    return np.sort(out * sign, axis=1) * sign


def threshold(rng: Rng) -> Node:
    enc, bits = encoding(rng), int(pick(rng, 1, 2, 2, 3, 4, 5, 8))
    low, high = low_high(enc, bits)
    to_last = int(rng.integers(2))
    shape = image(rng, largest=14)
    c = shape[-1]
    count = int(rng.integers(1, high - low + 1))
    dirs = rng.choice(np.asarray([-1, 1], np.int32), pick(rng, 1, c))
    rows = pick(rng, 1, c) if len(dirs) == 1 or len(set(dirs)) == 1 else c
    spread = dirs if len(dirs) == rows else np.full(rows, dirs[0])
    base = rng.integers(low, high - count + 1, pick(rng, 1, c)).astype(np.int32)
    x = (rng.integers(-50, 50, shape) * 0.5).astype(np.float32)
    special = np.asarray([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -0.0], np.float32)
    x = np.where(rng.random(shape) < 0.05, rng.choice(special, shape), x)
    if to_last:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    scalar_base = base.reshape(()) if base.size == 1 and rng.integers(2) else base
    return (
        "LowBitThreshold",
        {"y_bits": bits, "y_encoding": enc, "to_channels_last": to_last},
        [x, threshold_rows(rng, rows, count, spread), scalar_base, dirs],
    )


def dequantize(rng: Rng) -> Node:
    enc, shape = encoding(rng), image(rng, largest=14)
    c = shape[-1]
    return (
        "LowBitDequantize",
        {"x_encoding": enc, "to_channels_first": int(rng.integers(2))},
        [codes(rng, shape, enc), scales(rng, c), zero_points(rng, enc, c)],
    )


OPS = {
    "affine": affine,
    "lookup": lookup,
    "add": binary("LowBitAdd"),
    "mul": binary("LowBitMul"),
    "max_pool": max_pool,
    "average_pool": average_pool,
    "global_average_pool": global_average_pool,
    "concat": concat,
    "resize": resize,
    "depth_to_space": depth_to_space,
    "image": picture,
    "softmax": softmax,
    "requantize": requantize,
    "quantize": quantize,
    "threshold": threshold,
    "dequantize": dequantize,
}


def assert_same(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    # Bytes, not values: -0.0 and NaN count too.
    different = np.count_nonzero(actual.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8))
    assert different == 0, f"{what}: {different} of {expected.nbytes} bytes differ"


@pytest.mark.parametrize("op", OPS)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_level_equals_the_definition(op: str, seed: int) -> None:
    name, attrs, inputs = OPS[op](np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        expected = np.ascontiguousarray(ops.evaluate(name, attrs, inputs))
    assert_same(native.run(name, attrs, inputs, reference=True), expected, "reference")
    for isa in native.isa_levels():
        assert_same(native.run(name, attrs, inputs, isa=isa, threads=2, task_cycles=1), expected, isa)


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize("width", [1, 3, 17, 255])
def test_many_short_rows_are_joined(isa: str, width: int) -> None:
    """More rows than a block of the scratch memory holds, beside copied ones, over several tasks."""
    rng = np.random.default_rng(width)
    parts = [codes(rng, (1, 5000, n), "unsigned") for n in (width, 2, width)]
    scales, zeros = np.float32([0.1, 0.05, 0.03]), np.int32([7, 2, 250])
    node = [scales, zeros, scalar(0.05), integer(2), *parts]
    joined = native.run("LowBitConcat", {"axis": 2}, node, isa=isa, threads=2)
    assert_same(joined, ops.evaluate("LowBitConcat", {"axis": 2}, node), isa)


@pytest.mark.parametrize("isa", native.isa_levels())
def test_division_by_a_constant_is_correctly_rounded(isa: str) -> None:
    """x / s for every product of two codes with reciprocals that round badly (Markstein's sequence)."""
    rng = np.random.default_rng(7)
    a, b = (v.ravel().astype(np.uint8) for v in np.meshgrid(np.arange(256), np.arange(256)))
    just_below_two = [np.float32(2) - np.float32(2.0**-23) * np.float32(k) for k in range(1, 5)]
    for divisor in [*just_below_two, *rng.uniform(1, 2, 20).astype(np.float32), np.float32(1 + 2.0**-23)]:
        a_scale, b_scale = (np.float32(v) for v in rng.uniform(0.01, 0.02, 2))
        y_scale = scalar(divisor * np.float32(0.01))
        node = [a, scalar(a_scale), integer(3), b, scalar(b_scale), integer(129), y_scale, None]
        assert_same(native.run("LowBitAdd", {}, node, isa=isa), ops.evaluate("LowBitAdd", {}, node), isa)


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize("enc", ["unsigned", "signed"])
def test_global_sums_survive_many_pixels(isa: str, enc: str) -> None:
    """Extreme codes over more pixels than 16-bit partial sums can hold."""
    low, high = low_high(enc)
    for value in (low, high):
        x = np.full((1, 37, 41, 67), value, np.int8 if enc == "signed" else np.uint8)
        inputs = [x, scalar(0.05), integer(0), None, None]
        attrs = {"x_encoding": enc}
        assert_same(
            native.run("LowBitGlobalAveragePool", attrs, inputs, isa=isa),
            ops.evaluate("LowBitGlobalAveragePool", attrs, inputs),
            isa,
        )
