"""LowBitMatMul at sizes that random nodes do not reach: many columns, parts of rows, extreme sums."""

from __future__ import annotations

import numpy as np
import pytest
from lowbit import ops

from tests.numerics import random_nodes
from tests.support import require_native

native = require_native()

LEVELS = native.isa_levels()


def check(node: random_nodes.Node, isa: str, threads: int = 1) -> None:
    expected = ops.evaluate(node.op_type, node.attrs, node.inputs)
    got = native.run(node.op_type, node.attrs, node.inputs, isa=isa, threads=threads)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected, err_msg=f"{node} at {isa}")


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("m", "k", "n", "lead"),
    [
        (197, 64, 197, (3,)),  # attention of a vision transformer
        (197, 197, 64, (3,)),
        (300, 40, 20, ()),  # one product: its rows are dealt out
        (3, 20, 2100, ()),  # more columns than one task packs
        (2, 9000, 70, ()),  # so long a sum that few columns fit
        (66, 3, 1, (2, 3)),
        (1, 1, 1, (5,)),
        (4, 0, 3, ()),  # empty sums
    ],
)
def test_sizes(m: int, k: int, n: int, lead: tuple[int, ...], isa: str, seeds) -> None:
    for seed in seeds(2):
        check(random_nodes.mat_mul(np.random.default_rng([seed, m, k]), m, k, n, lead), isa, threads=2)


def longest(a_zero: int, b_zero: int, k: int, a_code: int, b_code: int) -> random_nodes.Node:
    """All products of one kind: the largest sums that zero points and codes allow."""
    one = np.ones((), np.float32)
    inputs = [
        np.full((2, k), a_code, np.uint8), one, np.asarray(a_zero, np.int32),
        np.full((k, 3), b_code, np.uint8), one, np.asarray(b_zero, np.int32),
    ]  # fmt: skip
    return random_nodes.Node("LowBitMatMul", {}, inputs)


@pytest.mark.parametrize("isa", [*LEVELS, "reference"])
def test_largest_sums_and_one_product_more(isa: str) -> None:
    for a_zero, b_zero in ((0, 0), (255, 255), (128, 128), (0, 255), (200, 90)):
        largest = max(a_zero, 255 - a_zero) * max(b_zero, 255 - b_zero)
        k = (2**31 - 1) // largest
        ends = [255 if zero < 128 else 0 for zero in (a_zero, b_zero)]
        node = longest(a_zero, b_zero, k, *ends)
        options = {"reference": True} if isa == "reference" else {"isa": isa}
        got = native.run(node.op_type, node.attrs, node.inputs, **options)
        np.testing.assert_array_equal(got, ops.evaluate(node.op_type, node.attrs, node.inputs))
        assert abs(float(got[0, 0])) > 2**31 - 2**18
        node = longest(a_zero, b_zero, k + 1, *ends)
        with pytest.raises(native.LowBitError, match="may leave int32"):
            native.run(node.op_type, node.attrs, node.inputs, **options)
