"""Broken QONNX models through the converter: refused, or converted to what they mean; never a crash."""

from __future__ import annotations

import pytest

from tests.conftest import FULL
from tests.hostile.campaign import outcomes_of
from tests.support import require_native


@pytest.mark.parametrize("part", range(2 if FULL else 1))
def test_qonnx_mutants(part: int) -> None:
    require_native()
    count = 90 if FULL else 60
    outcomes = outcomes_of("tests.hostile.qonnx_mutations", part * 100_000, count)
    assert {"converted, equal"} < set(outcomes.values()), "some mutants are expected to be whole"
