"""Every graph of every dialect as regions of the execution provider: the same as node by node."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.conftest import FULL
from tests.dialects.graphs import CASES, Case
from tests.dialects.graphs.qonnx import CASES as QONNX
from tests.support import lowbit_session, require_native

lowbit = pytest.importorskip("lowbit")

_CASES: dict[str, Case] = {**CASES, **{f"qonnx.{name}": case for name, case in QONNX.items()}}
_SOME = [name for i, name in enumerate(_CASES) if i % (2 if FULL else 3) == 0]


@pytest.mark.parametrize("name", _SOME)
def test_regions_compute_what_the_custom_ops_compute(name: str) -> None:
    require_native()
    case = _CASES[name]
    built = case.build(0)
    converted = lowbit.convert(built.model).model
    alone = lowbit_session(converted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nothing in this model", category=RuntimeWarning)
        regions = lowbit.session(converted, device="cpu-ep")
    for k, sizes in enumerate(built.sizes):
        feeds = built.feed(k, **sizes)
        for ours, expected in zip(regions.run(None, feeds), alone.run(None, feeds), strict=True):
            note = f"sizes {sizes}"
            assert ours.dtype == expected.dtype, note
            assert ours.shape == expected.shape, note
            if case.left or case.float_tail:
                np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-30, err_msg=note)
            else:
                np.testing.assert_array_equal(ours, expected, err_msg=note)
