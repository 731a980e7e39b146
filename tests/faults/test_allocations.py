"""A sample of lives in which an allocation fails; `python -m tests.faults.allocations` tries all of them."""

from __future__ import annotations

import pytest

from tests.conftest import FULL, SANITIZED
from tests.faults.allocations import WAYS, injector, tried
from tests.support import require_native

pytestmark = [
    pytest.mark.skipif(injector() is None, reason="liblowbit_faults is not built (-DLOWBIT_TESTS=ON)"),
    pytest.mark.skipif(SANITIZED, reason="a sanitizer has a malloc of its own"),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_life_without_memory(way: str) -> None:
    require_native()
    tally = tried(way, first=13, every=499 if FULL else 997)
    assert tally.verdicts["refused"] > 0, "no allocation has failed"
    assert not tally.failures, tally.failures
