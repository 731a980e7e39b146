"""The kernels equal the numpy definitions, and the definitions equal ONNX Runtime, in every element."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit import ops
from lowbit.ops.epilogue import Epilogue
from lowbit.ops.softmax import softmax_table
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import SANITIZED
from tests.numerics import random_nodes
from tests.numerics.expected import by_definition
from tests.support import require_native, stock_may_saturate, stock_run

native = require_native()

SEEDS = st.integers(0, 2**32 - 1)
OPS = list(ops.DEFINITIONS)
LEVELS = native.isa_levels()
COORDINATES = [
    *("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"),
    "half_pixel_symmetric",
]


def assert_same(got: np.ndarray, expected: np.ndarray, node: random_nodes.Node) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape, node
    differ = ~((got == expected) | ((got != got) & (expected != expected)))
    assert not differ.any(), f"{differ.sum()} of {differ.size} elements differ: {node}"


@pytest.mark.parametrize("op_type", OPS)
@given(seed=SEEDS)
def test_reference_kernels_equal_the_definitions(op_type, seed):
    node = random_nodes.make(op_type, np.random.default_rng(seed))
    got = native.run(node.op_type, node.attrs, node.inputs, reference=True)
    assert_same(got, by_definition(node), node)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("op_type", OPS)
@given(seed=SEEDS)
def test_every_level_equals_the_definitions(op_type, isa, seed):
    node = random_nodes.make(op_type, np.random.default_rng(seed))
    got = native.run(node.op_type, node.attrs, node.inputs, isa=isa, threads=1 + seed % 2)
    assert_same(got, by_definition(node), node)


@functools.cache
def of_every_kind(x_bits, w_bits, seed):
    """A node of each kind with what the definition makes of it, which takes longer than a level's kernels."""
    rng = np.random.default_rng([seed, x_bits, w_bits])
    nodes = []
    for kind in ("dense", "pointwise", "grouped", "depthwise", "stem", "wide", "gemm"):
        op_type, fixed = ("LowBitGemm", {}) if kind == "gemm" else ("LowBitConv", {"kind": kind})
        node = random_nodes.make(op_type, rng, x_bits=x_bits, w_bits=w_bits, **fixed)
        nodes.append((node, by_definition(node)))
    return nodes


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("w_bits", range(1, 9))
@pytest.mark.parametrize("x_bits", range(1, 9))
def test_all_64_bit_pairs_on_every_level(x_bits, w_bits, isa, seeds):
    for seed in seeds(1 if SANITIZED else 2):
        for node, expected in of_every_kind(x_bits, w_bits, seed):
            assert_same(native.run(node.op_type, node.attrs, node.inputs, isa=isa), expected, node)


@functools.cache
def for_a_row(op_type, seed, x_bits_max, w_bits_max, **kind):
    """A node that rows of the table may compute, and what the definition makes of it."""
    rng = np.random.default_rng(seed)
    x_bits, w_bits = int(rng.integers(1, x_bits_max + 1)), int(rng.integers(1, w_bits_max + 1))
    node = random_nodes.make(op_type, rng, x_bits=x_bits, w_bits=w_bits, **kind)
    return node, by_definition(node)


@pytest.mark.parametrize("row", [row["name"] for row in native.kernel_table()])
def test_every_row_of_the_kernel_table_equals_the_definitions(row, seeds):
    """Each row by name, wherever it does not refuse: selection could otherwise hide a wrong kernel."""
    entry = next(r for r in native.kernel_table() if r["name"] == row)
    if entry["isa"] not in LEVELS:
        pytest.skip(f"this machine has no {entry['isa']}")
    ran = 0
    kinds = ("dense", "pointwise", "grouped", "depthwise", "stem", "one_d", "wide")
    for seed in seeds(60):
        transposed = entry["op"] == "conv_transpose"
        op_type = "LowBitConvTranspose" if transposed else "LowBitGemm" if seed % 4 == 3 else "LowBitConv"
        kind = {} if op_type == "LowBitGemm" else {"kind": kinds[seed % len(kinds)]}
        if "depthwise" in row and seed % 2:  # of the kinds above it would refuse nearly all
            op_type, kind = "LowBitConv", {"kind": "depthwise"}
        if "winograd" in row and seed % 2:
            op_type, kind = "LowBitConv", {"kind": "3x3"}
        node, expected = for_a_row(op_type, seed, entry["x_bits_max"], entry["w_bits_max"], **kind)
        try:
            got = native.run(node.op_type, node.attrs, node.inputs, isa=entry["isa"], kernel=row)
        except native.LowBitError as refusal:
            if row not in str(refusal):
                raise
            continue
        assert_same(got, expected, node)
        ran += 1
    assert ran, "no random node suits this row; teach random_nodes about it"


# ---- against ONNX Runtime


def one_node(op_type, inputs, outputs, feeds, constants, output_type, domain="", opset=13, **attributes):
    node = helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        op_type,
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for name, v in feeds.items()
        ],
        [helper.make_tensor_value_info(outputs[0], output_type, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def random_qlinear_conv(seed):
    """A QLinearConv as ONNX Runtime takes it, and the same convolution as a lowbit node."""
    rng = np.random.default_rng(seed)
    ties, spatial = bool(seed % 2), 1 if seed % 7 == 0 else 2
    group = int(rng.choice([1, 1, 1, 2, 3]))
    cin, cout = group * int(rng.integers(1, 20)), group * int(rng.integers(1, 20))
    if rng.random() < 0.2:
        group = cin = cout = int(rng.integers(2, 40))
    kernel, strides, dilations = (list(map(int, rng.integers(1, high, spatial))) for high in (5, 4, 3))
    pads = list(map(int, rng.integers(0, 3, 2 * spatial)))
    sizes = [
        max(1, d * (k - 1) + 1 - pads[i] - pads[spatial + i]) + int(rng.integers(0, 9))
        for i, (d, k) in enumerate(zip(dilations, kernel, strict=True))
    ]
    x = random_nodes.codes(rng, (int(rng.integers(1, 3)), cin, *sizes))
    w = random_nodes.codes(rng, (cout, cin // group, *kernel), 8, "signed")
    x_scale, w_scale = random_nodes.scale(rng, ties, -6, -1), random_nodes.scale(rng, ties, -8, -2, cout)
    spread = np.sqrt(w[0].size) * 2.0**14 * x_scale * w_scale.mean() / 32
    y_scale = np.asarray(2.0 ** np.round(np.log2(spread)) if ties else spread, np.float32)
    x_zero, y_zero = (np.asarray(rng.integers(0, 256), np.uint8) for _ in range(2))
    bias = rng.integers(-5000, 5001, cout).astype(np.int32)

    model = one_node(
        "QLinearConv",
        ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"],
        ["y"],
        {"x": x},
        {"xs": x_scale, "xz": x_zero, "w": w, "ws": w_scale, "wz": np.zeros(cout, np.int8), "ys": y_scale,
         "yz": y_zero, "b": bias},
        TensorProto.UINT8,
        kernel_shape=kernel, strides=strides, dilations=dilations, pads=pads, group=group,
    )  # fmt: skip
    geometry = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": pads,
        "group": group,
    }
    attrs = {**geometry, "in_channels": cin, "out_channels": cout, "w_encoding": "signed"}
    packed = ops.pack(np.moveaxis(w, 1, -1).reshape(cout, -1), 8)
    inputs = [np.ascontiguousarray(np.moveaxis(x, 1, -1)), packed, x_scale, x_zero.astype(np.int32), w_scale,
              np.zeros((), np.int32), bias, y_scale, y_zero.astype(np.int32)]  # fmt: skip
    return model, {"x": x}, random_nodes.Node("LowBitConv", attrs, inputs)


@pytest.mark.parametrize("block", range(10))
def test_convolution_equals_qlinearconv(block, seeds):
    """Definition and default kernel against QLinearConv: 500 in all, every other one tie-rich."""
    for seed in seeds(50):
        model, feeds, node = random_qlinear_conv(1000 * block + seed)
        (expected,) = stock_run(model, feeds)
        expected = np.moveaxis(expected, 1, -1)
        assert_same(ops.evaluate(node.op_type, node.attrs, node.inputs), expected, node)
        assert_same(native.run(node.op_type, node.attrs, node.inputs), expected, node)


def test_gemm_equals_qlinearmatmul(seeds):
    for seed in seeds(100):
        rng = np.random.default_rng(seed)
        ties, (m, k, n) = bool(seed % 2), map(int, rng.integers(1, 70, 3))
        a, b = random_nodes.codes(rng, (m, k)), random_nodes.codes(rng, (k, n), 8, "signed")
        a_scale, b_scale = random_nodes.scale(rng, ties, -6, -1), random_nodes.scale(rng, ties, -8, -2)
        y_scale = np.asarray(a_scale * b_scale * 2.0 ** (9 if ties else 9.3), np.float32)
        a_zero, y_zero = (np.asarray(rng.integers(0, 256), np.uint8) for _ in range(2))
        constants = {"as": a_scale, "az": a_zero, "b": b, "bs": b_scale, "bz": np.zeros((), np.int8),
                     "ys": y_scale, "yz": y_zero}  # fmt: skip
        names = ["a", "as", "az", "b", "bs", "bz", "ys", "yz"]
        model = one_node("QLinearMatMul", names, ["y"], {"a": a}, constants, TensorProto.UINT8)
        (expected,) = stock_run(model, {"a": a})
        attrs = {"in_features": k, "out_features": n, "w_encoding": "signed"}
        zero = np.zeros((), np.int32)
        inputs = [a, ops.pack(b.T, 8), a_scale, a_zero.astype(np.int32), b_scale, zero, None, y_scale,
                  y_zero.astype(np.int32)]  # fmt: skip
        node = random_nodes.Node("LowBitGemm", attrs, inputs)
        assert_same(ops.evaluate(node.op_type, node.attrs, node.inputs), expected, node)
        assert_same(native.run(node.op_type, node.attrs, node.inputs), expected, node)


def test_mat_mul_equals_qlinearmatmul(seeds):
    for seed in seeds(60):
        rng = np.random.default_rng(seed)
        ties, (m, k, n) = bool(seed % 2), map(int, rng.integers(1, 70, 3))
        kind = "signed" if seed % 3 == 0 else "unsigned"
        a, b = random_nodes.codes(rng, (3, m, k)), random_nodes.codes(rng, (3, k, n), 8, kind)
        if kind == "signed" and stock_may_saturate():
            b = b // 2  # of 7 bits
        a_scale, b_scale = random_nodes.scale(rng, ties, -6, -1), random_nodes.scale(rng, ties, -8, -2)
        y_scale = np.asarray(a_scale * b_scale * 2.0 ** (10 if ties else 10.3), np.float32)
        a_zero, y_zero = (np.asarray(rng.integers(0, 256), np.uint8) for _ in range(2))
        b_zero = np.asarray(rng.integers(-9, 9) if kind == "signed" else rng.integers(0, 256), b.dtype)
        constants = {"as": a_scale, "az": a_zero, "bs": b_scale, "bz": b_zero, "ys": y_scale, "yz": y_zero}
        names = ["a", "as", "az", "b", "bs", "bz", "ys", "yz"]
        feeds = {"a": a, "b": b}
        model = one_node("QLinearMatMul", names, ["y"], feeds, constants, TensorProto.UINT8)
        (expected,) = stock_run(model, feeds)
        zeros = [zero.astype(np.int32) for zero in (a_zero, b_zero, y_zero)]
        inputs = [a, a_scale, zeros[0], b, b_scale, zeros[1], y_scale, zeros[2]]
        node = random_nodes.Node("LowBitMatMul", {"b_encoding": kind}, inputs)
        assert_same(ops.evaluate(node.op_type, node.attrs, node.inputs), expected, node)
        assert_same(native.run(node.op_type, node.attrs, node.inputs), expected, node)


def qdq(op_type, inputs, attributes, y, opset=13, more=()):
    """DequantizeLinear -> op -> QuantizeLinear, as written: nothing is fused.

    `inputs` are (codes, scale, zero point), `y` is (scale, zero point), `more` are constant inputs of the op.
    """
    nodes, feeds, constants, reals = [], {}, {}, []
    for i, (q, scale, zero) in enumerate(inputs):
        feeds[f"q{i}"], constants[f"s{i}"], constants[f"z{i}"] = q, scale, np.asarray(zero, q.dtype)
        nodes.append(helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", f"z{i}"], [f"x{i}"]))
        reals.append(f"x{i}")
    for i, value in enumerate(more):
        reals.append("" if value is None else f"m{i}")
        constants |= {} if value is None else {f"m{i}": value}
    if op_type != "Identity":
        nodes.append(helper.make_node(op_type, reals, ["r"], **attributes))
    constants |= {"ys": y[0], "yz": y[1]}
    result = "x0" if op_type == "Identity" else "r"
    nodes.append(helper.make_node("QuantizeLinear", [result, "ys", "yz"], ["y"]))
    graph = helper.make_graph(
        nodes,
        op_type,
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in feeds.items()
        ],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(y[1].dtype), None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return stock_run(model, feeds, optimize=False)[0]


def first(nhwc: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(nhwc, -1, 1))


@pytest.mark.parametrize("op_type", ["Add", "Mul"])
def test_elementwise_definitions_follow_the_graph_as_written(op_type, seeds):
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        ties, shape = bool(seed % 2), [2, 3, 5, 17]
        a, b = random_nodes.codes(rng, shape), random_nodes.codes(rng, shape)
        (a_s, b_s), y_s = random_nodes.scale(rng, ties, -5, -2, 2), random_nodes.scale(rng, ties, -4, -1)
        a_z, b_z, y_z = (np.asarray(rng.integers(0, 256), np.int32) for _ in range(3))
        a_s, b_s = np.asarray(a_s), np.asarray(b_s)
        expected = qdq(op_type, [(a, a_s, a_z), (b, b_s, b_z)], {}, (y_s, y_z.astype(np.uint8)))
        node = random_nodes.Node(f"LowBit{op_type}", {}, [a, a_s, a_z, b, b_s, b_z, y_s, y_z])
        assert_same(ops.evaluate(node.op_type, node.attrs, node.inputs), expected, node)


def quantized(rng, shape, ties=True):
    """Random unsigned codes [N, .., C] with a scale and a zero point."""
    zero = np.asarray(rng.integers(0, 256), np.int32)
    return random_nodes.codes(rng, shape), random_nodes.scale(rng, ties, -5, -2), zero


def output_grid(rng, ties=True):
    return random_nodes.scale(rng, ties, -4, -1), np.asarray(rng.integers(0, 256), np.uint8)


def assert_follows(op_type, attrs, inputs, expected):
    """The definition, channels last, against ONNX Runtime's channels-first result."""
    node = random_nodes.Node(op_type, attrs, inputs)
    assert_same(first(ops.evaluate(op_type, attrs, inputs)), expected, node)


def test_pools_follow_the_graph_as_written(seeds):
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        q, s, z = quantized(rng, [1, 9, 8, 5])
        window = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 1, 1, 0], "ceil_mode": seed // 2 % 2}
        expected = qdq("MaxPool", [(first(q), s, z)], window, (s, z.astype(np.uint8)))
        assert_follows("LowBitMaxPool", window, [q], expected)
        # Powers of two: the sums are exact in any order, so only the division and the rounding are compared.
        window |= {"count_include_pad": seed // 4 % 2}
        y = output_grid(rng)
        expected = qdq("AveragePool", [(first(q), s, z)], window, y)
        assert_follows("LowBitAveragePool", window, [q, s, z, y[0], y[1].astype(np.int32)], expected)


def test_global_average_equals_qlinearglobalaveragepool(seeds):
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        q, s, z = quantized(rng, [2, *map(int, rng.integers(1, 9, 2)), 17], ties=bool(seed % 2))
        y_s, y_z = output_grid(rng, ties=bool(seed % 2))
        constants = {"s": s, "z": z.astype(np.uint8), "ys": y_s, "yz": y_z}
        names = ["x", "s", "z", "ys", "yz"]
        x = {"x": first(q)}
        model = one_node("QLinearGlobalAveragePool", names, ["y"], x, constants, TensorProto.UINT8,
                         domain="com.microsoft", channels_last=0)  # fmt: skip
        (expected,) = stock_run(model, x)
        assert_follows("LowBitGlobalAveragePool", {}, [q, s, z, y_s, y_z.astype(np.int32)], expected)


def test_requantize_concat_and_affine_follow_the_graph_as_written(seeds):
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        ties = bool(seed % 2)
        parts = [quantized(rng, [1, 4, 5, c], ties) for c in (3, 8)]
        y_s, y_z = output_grid(rng, ties)
        y_zero = y_z.astype(np.int32)
        (q, s, z), (q2, s2, z2) = parts
        expected = qdq("Identity", [(first(q), s, z)], {}, (y_s, y_z))
        assert_follows("LowBitRequantize", {}, [q, s, z, y_s, y_zero], expected)

        expected = qdq("Concat", [(first(q), s, z), (first(q2), s2, z2)], {"axis": 1}, (y_s, y_z))
        inputs = [np.stack([s, s2]), np.stack([z, z2]), y_s, y_zero, q, q2]
        assert_follows("LowBitConcat", {"axis": -1}, inputs, expected)

        factor = rng.uniform(-2, 2, q.shape[-1]).astype(np.float32)
        expected = qdq("Mul", [(first(q), s, z)], {}, (y_s, y_z), more=[factor.reshape(1, -1, 1, 1)])
        shift = np.zeros_like(factor)
        assert_follows("LowBitAffine", {}, [q, s, z, factor, shift, y_s, y_zero], expected)


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("mode", COORDINATES)
def test_resize_equals_onnxruntime(mode, nearest, seeds):
    for seed in seeds(10):
        rng = np.random.default_rng(seed)
        q, s, z = quantized(rng, [1, *map(int, rng.integers(1, 9, 2)), 3])
        attrs = {"coordinate_transformation_mode": mode, "nearest_mode": nearest}
        if seed % 2:
            attrs["scales"] = [float(v) for v in rng.choice([1.0, 1.5, 2.0, 3.0], 2)]
            more = [None, np.asarray([1, 1, *attrs["scales"]], np.float32)]
        else:
            attrs["sizes"] = [int(v) for v in rng.integers(1, 17, 2)]
            more = [None, None, np.asarray([1, 3, *attrs["sizes"]], np.int64)]
        geometry = {k: v for k, v in attrs.items() if k not in ("scales", "sizes")}
        expected = qdq("Resize", [(first(q), s, z)], {**geometry, "mode": "nearest"}, (s, z.astype(np.uint8)),
                       19 if mode == "half_pixel_symmetric" else 13, more)  # fmt: skip
        assert_follows("LowBitResize", attrs, [q], expected)


def test_resize_that_computes_equals_onnxruntime_but_for_ties(seeds):
    """Every mode, coordinates, sizes and scales; what differs lies within the bound that `verify` uses."""
    compared = different = 0
    for seed in seeds(80):
        rng = np.random.default_rng(seed)
        q, s, z = quantized(rng, [1, *map(int, rng.integers(1, 9, 2)), 3], bool(seed % 3))
        y_s, y_z = output_grid(rng, bool(seed % 3))
        attrs = {"mode": str(rng.choice(["linear", "cubic"])),
                 "coordinate_transformation_mode": str(rng.choice(COORDINATES))}  # fmt: skip
        if attrs["mode"] == "cubic":
            attrs |= {"exclude_outside": int(rng.integers(2)), "cubic_coeff_a": (-0.75, -0.5)[seed % 2]}
        if seed % 2:
            attrs["scales"] = [float(v) for v in rng.choice([1.0, 1.5, 2.0, 3.0], 2)]
            more = [None, np.asarray([1, 1, *attrs["scales"]], np.float32)]
        else:
            attrs["sizes"] = [int(v) for v in rng.integers(1, 17, 2)]
            more = [None, None, np.asarray([1, 3, *attrs["sizes"]], np.int64)]
        geometry = {k: v for k, v in attrs.items() if k not in ("scales", "sizes")}
        theirs = np.moveaxis(qdq("Resize", [(first(q), s, z)], geometry, (y_s, y_z), 19, more), 1, -1)
        inputs = [q, s, z, y_s, y_z.astype(np.int32)]
        ours = ops.evaluate("LowBitResize", attrs, inputs)
        apart = ours != theirs
        assert ops.chain("LowBitResize", attrs, inputs).explains(theirs, ours)[apart].all(), attrs
        compared, different = compared + ours.size, different + int(apart.sum())
    assert different < compared / 50


def test_softmax_equals_onnxruntime_but_for_ties(seeds):
    compared = different = 0
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        shape = [int(n) for n in rng.integers(1, 30, 3)]
        q, s, z = quantized(rng, shape, bool(seed % 3))
        y_s, y_z = np.asarray(rng.choice([1 / 256, 1 / 255]), np.float32), np.asarray(0, np.uint8)
        axis = int(rng.integers(-3, 3))
        theirs = qdq("Softmax", [(q, s, z)], {"axis": axis}, (y_s, y_z))
        inputs = [q, s, z, softmax_table(float(s)), y_s, y_z.astype(np.int32)]
        ours = ops.evaluate("LowBitSoftmax", {"axis": axis}, inputs)
        apart = ours != theirs
        assert ops.chain("LowBitSoftmax", {"axis": axis}, inputs).explains(theirs, ours)[apart].all()
        compared, different = compared + ours.size, different + int(apart.sum())
    assert different < compared / 200  # two equal maxima are a tie at 1 / 255


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_equals_onnxruntime(mode, seeds):
    for seed in seeds(5):
        rng = np.random.default_rng(seed)
        block = int(rng.integers(1, 4))
        q, s, z = quantized(rng, [1, *map(int, rng.integers(1, 6, 2)), int(rng.integers(1, 4)) * block**2])
        attrs = {"blocksize": block, "mode": mode}
        expected = qdq("DepthToSpace", [(first(q), s, z)], attrs, (s, z.astype(np.uint8)))
        assert_follows("LowBitDepthToSpace", attrs, [q], expected)


def test_transposed_convolution_follows_the_graph_as_written(seeds):
    """Powers of two and fewer than 2^24 steps: ONNX Runtime's float sums are exact."""
    for seed in seeds(40):
        rng = np.random.default_rng(seed)
        group = int(rng.choice([1, 2]))
        cin, cout = group * int(rng.integers(1, 6)), group * int(rng.integers(1, 6))
        q, s, z = quantized(rng, [1, 4, 5, cin])
        w = random_nodes.codes(rng, (cin, cout // group, 3, 2), 8, "signed")
        w_s = random_nodes.scale(rng, True, -8, -4)
        geometry = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "group": group}
        geometry |= {"output_padding": [1, 0], "dilations": [1, 2]}
        y_s, y_z = (
            np.asarray(2.0 ** rng.integers(-3, 2), np.float32),
            np.asarray(rng.integers(0, 256), np.uint8),
        )
        real = w.astype(np.float32) * w_s
        expected = qdq("ConvTranspose", [(first(q), s, z)], geometry, (y_s, y_z), more=[real])
        # ONNX stores [in, out / group, kernel..]; a lowbit row belongs to one output channel.
        rows = w.reshape(group, cin // group, cout // group, 3, 2).transpose(0, 2, 3, 4, 1).reshape(cout, -1)
        attrs = {**geometry, "in_channels": cin, "out_channels": cout, "w_encoding": "signed"}
        inputs = [q, ops.pack(rows, 8), s, z, w_s, np.zeros((), np.int32), None, y_s, y_z.astype(np.int32)]
        assert_follows("LowBitConvTranspose", attrs, inputs, expected)


def test_quantize_and_dequantize_equal_onnxruntime(seeds):
    for seed in seeds(20):
        rng = np.random.default_rng(seed)
        y_s, y_z = output_grid(rng, ties=bool(seed % 2))
        x = (rng.integers(-600, 601, (1, 4, 3, 5)) * 0.5 * y_s).astype(np.float32)  # half steps: ties
        x.reshape(-1)[:4] = [np.inf, -np.inf, 1e30, -1e30]
        model = one_node("QuantizeLinear", ["x", "s", "z"], ["y"], {"x": x}, {"s": y_s, "z": y_z},
                         TensorProto.UINT8)  # fmt: skip
        (codes,) = stock_run(model, {"x": x})
        got = ops.evaluate("LowBitQuantize", {"to_channels_last": 1}, [x, y_s, y_z.astype(np.int32)])
        np.testing.assert_array_equal(first(got), codes)
        model = one_node("DequantizeLinear", ["x", "s", "z"], ["y"], {"x": codes}, {"s": y_s, "z": y_z},
                         TensorProto.FLOAT)  # fmt: skip
        (real,) = stock_run(model, {"x": codes})
        back = ops.evaluate("LowBitDequantize", {"to_channels_first": 1}, [got, y_s, y_z.astype(np.int32)])
        np.testing.assert_array_equal(back, real)


# ---- the definitions and the schemas are one op set


def test_every_schema_has_a_definition_with_its_names_and_defaults():
    schemas = {schema["name"]: schema for schema in native.schemas()}
    assert list(ops.DEFINITIONS) == list(schemas) or set(ops.DEFINITIONS) == set(schemas)
    epilogue = inspect.signature(Epilogue).parameters
    for name, schema in schemas.items():
        given_to = dict(inspect.signature(ops.DEFINITIONS[name]).parameters)
        if "epilogue" in given_to:
            del given_to["epilogue_inputs"], given_to["epilogue"]
            given_to |= {n: p for n, p in epilogue.items() if n not in ("x_scale", "w_scale")}
        names = [n for n, p in given_to.items() if p.kind is not p.KEYWORD_ONLY]
        assert names == [i["name"] for i in schema["inputs"]], name
        attributes = {n: p.default for n, p in given_to.items() if p.kind is p.KEYWORD_ONLY}
        assert set(attributes) == {a["name"] for a in schema["attributes"]}, name
        for attribute in schema["attributes"]:
            default = attributes[attribute["name"]]
            if attribute["required"]:
                assert default is inspect.Parameter.empty, (name, attribute["name"])
            else:
                plain = list(default) if isinstance(default, tuple) else default
                if isinstance(plain, float):
                    plain = float(np.float32(plain))  # as the attribute holds it
                assert plain == attribute["default"], (name, attribute["name"])


@given(seed=SEEDS)
def test_packing_equals_the_native_packing(seed):
    rng = np.random.default_rng(seed)
    bits, (rows, k) = int(rng.integers(1, 9)), map(int, rng.integers(1, 70, 2))
    for encoding in ("unsigned", "signed"):
        weights = random_nodes.codes(rng, (rows, k), bits, encoding)
        packed = ops.pack(weights, bits)
        np.testing.assert_array_equal(packed, native.pack_weights(weights.astype(np.int64), bits))
        np.testing.assert_array_equal(ops.unpack(packed, rows, k, bits, encoding), weights)
        unpacked = native.unpack_weights(packed, rows, k, bits, encoding == "signed")
        np.testing.assert_array_equal(unpacked, weights)


@pytest.mark.parametrize("op_type", OPS)
def test_onnx_checks_and_infers_our_nodes(op_type, seeds):
    """With the schemas registered, onnx's full check passes and infers the shape that the definition has."""
    ops.register_schemas()
    ops.register_schemas()  # harmless the second time
    for seed in seeds(5):
        node = random_nodes.make(op_type, np.random.default_rng(seed))
        y = ops.evaluate(node.op_type, node.attrs, node.inputs)
        schema = next(s for s in native.schemas() if s["name"] == op_type)
        names = [f"i{i}" if value is not None else "" for i, value in enumerate(node.inputs)]
        constant = [s["constant"] for s in schema["inputs"]]
        constant += [constant[-1]] * (len(names) - len(constant))
        fed = [(n, v) for n, v, c in zip(names, node.inputs, constant, strict=False) if n and not c]
        fixed = [(n, v) for n, v, c in zip(names, node.inputs, constant, strict=False) if n and c]
        attrs = {k: v for k, v in node.attrs.items() if v not in ([], "")}
        made = helper.make_node(op_type, names, ["y"], domain=ops.DOMAIN, **attrs)
        graph = helper.make_graph(
            [made],
            "g",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for n, v in fed
            ],
            [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(y.dtype), [None] * y.ndim)],
            [numpy_helper.from_array(np.asarray(v), n) for n, v in fixed],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ops.DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        dims = inferred.graph.output[0].type.tensor_type.shape.dim
        assert tuple(d.dim_value for d in dims) == y.shape, node


@pytest.mark.parametrize("op_type", OPS)
def test_a_parameter_of_one_element_may_have_any_dims(op_type, seeds):
    schema = next(schema for schema in native.schemas() if schema["name"] == op_type)
    for seed in seeds(4):
        node = random_nodes.make(op_type, np.random.default_rng([seed, 9]))
        for i, array in enumerate(node.inputs):
            spec = schema["inputs"][min(i, len(schema["inputs"]) - 1)]
            if array is None or not spec["constant"] or np.size(array) != 1:
                continue
            for dims in [(), (1,), (1, 1), (1,) * 6]:
                inputs = [*node.inputs[:i], np.reshape(array, dims), *node.inputs[i + 1 :]]
                try:
                    expected = native.run(op_type, node.attrs, inputs, reference=True)
                except ValueError:  # a matrix of one element keeps its dims
                    assert spec["name"] in ("thresholds", "table"), (spec["name"], dims)
                    continue
                assert_same(ops.evaluate(op_type, node.attrs, inputs), expected, node)


def test_a_wrong_call_is_one_clear_error():
    from lowbit.errors import LowBitError

    x, scale, zero = np.zeros((1, 2), np.uint8), np.float32(1), np.int32(0)
    with pytest.raises(LowBitError, match="not an op of"):
        ops.evaluate("LowBitNothing", {}, [x])
    with pytest.raises(LowBitError, match="unexpected keyword"):
        ops.evaluate("LowBitDequantize", {"bits": 3}, [x, scale, zero])
    with pytest.raises(LowBitError, match="float64"):
        ops.evaluate("LowBitDequantize", {}, [x, np.float64(1), zero])
