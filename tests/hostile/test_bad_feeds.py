"""Converted models fed the wrong thing: ONNX Runtime gets a status, the process lives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dialects import oracle
from tests.dialects.graphs import CASES
from tests.support import lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")


@pytest.fixture(scope="module")
def built():
    require_native()
    return CASES["constructs.dynamic_batch_and_image"].build(1)


@pytest.fixture(scope="module")
def session(built):
    return lowbit_session(lowbit.convert(built.model).model)


_WRONG = {
    "float64": np.zeros((1, 3, 8, 8)),
    "uint8": np.zeros((1, 3, 8, 8), np.uint8),
    "rank 2": np.zeros((3, 8), np.float32),
    "rank 5": np.zeros((1, 3, 8, 8, 1), np.float32),
    "4 channels": np.zeros((1, 4, 8, 8), np.float32),
    "no channels": np.zeros((1, 0, 8, 8), np.float32),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_type_or_shape(session, wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)input|shape|dim|rank|type|channel|expected"):
        session.run(None, {"input0": _WRONG[wrong]})


def test_wrong_name(session) -> None:
    with pytest.raises(Exception, match=r"(?i)input"):
        session.run(None, {"nobody": np.zeros((1, 3, 8, 8), np.float32)})


def test_rank_unknown_to_the_model(built) -> None:
    """Without declared shapes ONNX Runtime lets anything through to the kernels; they check it."""
    model = lowbit.convert(built.model).model
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    session = lowbit_session(model)
    for wrong in ("rank 2", "rank 5", "4 channels", "no channels"):
        with pytest.raises(Exception, match=r"."):
            session.run(None, {"input0": _WRONG[wrong]})
    feeds = built.feed(**built.sizes[0])
    np.testing.assert_array_equal(session.run(None, feeds)[0], oracle.run(built.model, feeds)[0])


def test_empty_batch(built, session) -> None:
    y = session.run(None, {"input0": np.zeros((0, 3, 8, 8), np.float32)})[0]
    assert y.shape[:2] == (0, 8)


def test_image_smaller_than_the_kernel(session) -> None:
    """1x1 survives the padded convolutions, the 2x2 pool behind them has no place left."""
    with pytest.raises(Exception, match=r"."):
        session.run(None, {"input0": np.zeros((1, 3, 1, 1), np.float32)})


def test_not_a_number_and_infinity(built, session) -> None:
    """NaN counts as the smallest code, infinities as the ends of the range."""
    x = built.feed(**built.sizes[0])["input0"].copy()
    x.reshape(-1)[:6] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45]
    np.testing.assert_array_equal(
        session.run(None, {"input0": x})[0], oracle.run(built.model, {"input0": x})[0]
    )


def test_the_session_still_works_afterwards(built, session) -> None:
    feeds = built.feed(**built.sizes[0])
    np.testing.assert_array_equal(session.run(None, feeds)[0], oracle.run(built.model, feeds)[0])
