"""LowBitNormalization beyond random nodes: rows shared by tasks, extreme sums, ONNX Runtime beside it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from lowbit import ops
from onnx import TensorProto, helper, numpy_helper

from tests.numerics import random_nodes
from tests.support import require_native, stock_run

native = require_native()

LEVELS = native.isa_levels()


def check(node: random_nodes.Node, isa: str) -> None:
    expected = ops.evaluate(node.op_type, node.attrs, node.inputs)
    got = native.run(node.op_type, node.attrs, node.inputs, isa=isa, threads=2)
    np.testing.assert_array_equal(got, expected, err_msg=f"{node} at {isa}")


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("shape", "axis", "groups"),
    [
        ((2, 197, 192), -1, 1),
        ((2, 300, 300), 1, 1),  # rows that several tasks share
        ((1, 120, 120, 24), 1, 24),  # instance normalization
        ((2, 50, 50, 64), 1, 8),
        ((2, 40, 40, 3), 1, 3),
        ((1, 5, 5, 600), 1, 2),  # more channels than one call sums
        ((3, 70_000), -1, 1),
        ((1, 70_000, 1), 1, 1),
    ],
)
def test_large_tensors(shape: tuple[int, ...], axis: int, groups: int, isa: str, seeds) -> None:
    for seed in seeds(1):
        check(random_nodes.normalization(np.random.default_rng(seed), shape, axis, groups), isa)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("codes", [(0, 0), (255, 255), (0, 255), (254, 255)])
def test_extreme_sums(codes: tuple[int, int], isa: str) -> None:
    """As many elements as sums are exact for, on both paths; equal codes have no variance at all."""
    rng = np.random.default_rng(0)
    one, zero = np.ones((), np.float32), np.zeros((), np.int32)
    for shape, attrs in (((1, 1 << 23), {}), ((1, 1 << 16, 2), {"axis": 1, "groups": 2})):
        x = rng.choice(codes, shape).astype(np.uint8)
        quantizer = [np.float32(0.03), np.asarray(128, np.int32)]
        check(random_nodes.Node("LowBitNormalization", attrs, [x, one, zero, one, one, *quantizer]), isa)
    with pytest.raises(native.LowBitError, match="expected at most"):
        native.run("LowBitNormalization", {}, [np.zeros((1, (1 << 23) + 1), np.uint8), one, zero, one, one])


@pytest.mark.parametrize("op", ["LayerNormalization", "InstanceNormalization", "GroupNormalization"])
def test_onnx_runtime_differs_within_the_bound(op: str, seeds) -> None:
    """Between QuantizeLinear and DequantizeLinear; every difference is one step, at a tie."""
    for seed in seeds(20):
        rng = np.random.default_rng(seed)
        ties_rich = bool(seed % 2)
        c, groups = 8, {"InstanceNormalization": 8, "GroupNormalization": 2}.get(op, 1)
        x = random_nodes.codes(rng, (2, 5, 6, c))
        x_scale, y_scale = (
            random_nodes.scale(rng, ties_rich, -6, -2),
            random_nodes.scale(rng, ties_rich, -6, -4),
        )
        x_zero, y_zero = rng.integers(0, 256, 2)
        gamma, beta = (np.asarray(rng.integers(-8, 9, c) * 0.25, np.float32) for _ in range(2))
        first = op != "LayerNormalization"
        constants = {
            "xs": x_scale, "xz": np.uint8(x_zero), "g": gamma, "b": beta,
            "ys": y_scale, "yz": np.uint8(y_zero),
        }  # fmt: skip
        extra = {"num_groups": groups} if op == "GroupNormalization" else {}
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["r"]),
            helper.make_node(op, ["r", "g", "b"], ["n"], epsilon=1e-3, **extra),
            helper.make_node("QuantizeLinear", ["n", "ys", "yz"], ["y"]),
        ]
        fed = np.ascontiguousarray(np.moveaxis(x, -1, 1)) if first else x
        graph = helper.make_graph(
            nodes, "g",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, fed.shape)],
            [helper.make_tensor_value_info("y", TensorProto.UINT8, fed.shape)],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        onnx.checker.check_model(model)
        (stock,) = stock_run(model, {"x": fed}, optimize=False)
        stock = np.moveaxis(stock, 1, -1) if first else stock
        attrs = {"axis": 1 if first else -1, "groups": groups, "epsilon": 1e-3}
        zeros = [np.asarray(zero, np.int32) for zero in (x_zero, y_zero)]
        inputs = [x, x_scale, zeros[0], gamma, beta, y_scale, zeros[1]]
        ours = ops.evaluate("LowBitNormalization", attrs, inputs)
        chain = ops.chain("LowBitNormalization", attrs, inputs)
        assert chain is not None
        differ = ours != stock
        assert not (differ & ~chain.explains(ours, stock)).any(), seed
        assert differ.mean() < 0.1


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [(0, 3, 4), (2, 0, 4)])
def test_no_codes_have_no_moments(dims: tuple[int, ...], groups: int) -> None:
    x = np.zeros(dims, np.uint8)
    scale, zero, one = np.float32(0.1), np.int32(3), np.ones(1, np.float32)
    y = ops.evaluate(
        "LowBitNormalization", {"axis": 1, "groups": groups}, [x, scale, zero, one, one, scale, zero]
    )
    assert y.shape == dims
