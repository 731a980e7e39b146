from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lowbit.graph.quantization import CodeRange, Grid
from lowbit.graph.reasons import Refusal
from lowbit.ops import unpack
from lowbit.rewrites.weights import Weights, check_accumulator, encode
from onnx_ir import DataType

from tests.support import require_native

ONE = np.ones((), np.float32)


def zero_points(low: int, high: int):
    return st.integers(low, high).map(lambda z: np.asarray(z, np.int32))


@given(
    codes=hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)),
    zero_point=zero_points(-128, 127),
)
def test_encoding_keeps_every_value(codes, zero_point) -> None:
    require_native()
    weights = Weights(codes, ONE, zero_point)
    encoded = encode(weights)
    stored = unpack(encoded.packed, *codes.shape, encoded.bits, encoded.encoding)
    if encoded.encoding == "bipolar":
        assert np.array_equal(2 * stored - 1, weights.values)
        return
    assert np.array_equal(stored - encoded.zero_point, weights.values)
    lowest, highest = -(1 << (encoded.bits - 1)), (1 << (encoded.bits - 1)) - 1
    assert lowest <= encoded.zero_point <= highest


def test_the_real_range_decides_the_width() -> None:
    require_native()
    for low, high, zero, bits in (
        (-8, 7, 0, 4),
        (-9, 7, 0, 5),
        (120, 127, 124, 3),
        (0, 15, 8, 4),
        (-2, 1, 0, 2),
    ):
        codes = np.array([[low, high]], np.int16)
        assert encode(Weights(codes, ONE, np.asarray(zero, np.int32))).bits == bits


def test_full_range_asymmetric_weights_keep_their_zero_point() -> None:
    require_native()
    encoded = encode(Weights(np.array([[0, 255]], np.uint8), ONE, np.asarray(122, np.int32)))
    assert (encoded.bits, int(encoded.zero_point)) == (8, -6)


def test_weights_of_plus_and_minus_one_take_one_bit() -> None:
    require_native()
    weights = Weights(np.array([[-1, 1, 1]], np.int8), ONE, np.zeros((), np.int32))
    assert (encode(weights).bits, encode(weights).encoding) == (1, "bipolar")


@given(
    codes=hnp.arrays(np.int8, (3, 4)),
    x_zero=st.integers(0, 255),
    x=hnp.arrays(np.uint8, (50, 4)),
    bias=st.integers(-(2**31), 2**31 - 1),
)
def test_the_bound_holds(codes, x_zero, x, bias) -> None:
    """Sums of any codes, padded taps included, stay inside what check_accumulator says fits."""

    weights = Weights(codes, ONE, np.zeros((), np.int32))
    grid = Grid(ONE, np.asarray(x_zero, np.int32))
    bound = check_accumulator(weights, CodeRange.of(DataType.UINT8), grid, np.full(3, bias, np.int64))
    sums = (x.astype(np.int64) - x_zero) @ codes.T.astype(np.int64) + bias
    if sums.max() > 2**31 - 1 or sums.min() < -(2**31):
        assert isinstance(bound, Refusal)


@pytest.mark.parametrize(("room", "fits"), [(2 * 200, True), (2 * 200 - 1, False)])
def test_the_bound_is_that_of_the_native_code(room, fits) -> None:
    """A huge bias, as a quantizer clips it for weights near 0: signs that cancel count for neither."""
    bias, zero = 2**31 - 1 - room, 55
    weights = Weights(np.array([[1, -1]], np.int8), ONE, np.zeros((), np.int32))
    grid = Grid(ONE, np.asarray(zero, np.int32))
    bound = check_accumulator(weights, CodeRange.of(DataType.UINT8), grid, np.array([bias], np.int64))
    assert (bound is None) == fits

    native = require_native()
    packed = native.pack_weights(weights.codes, 8)
    parameters = [ONE, np.asarray(zero, np.int32), ONE, np.zeros((), np.int32), np.array([bias], np.int32)]
    inputs = [np.zeros((1, 2), np.uint8), packed, *parameters, ONE, np.zeros((), np.int32)]
    attributes = {"in_features": 2, "out_features": 1, "w_encoding": "signed"}
    with contextlib.nullcontext() if fits else pytest.raises(native.LowBitError, match="may reach"):
        native.run("LowBitGemm", attributes, inputs)
