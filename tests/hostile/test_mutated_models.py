"""Hundreds of broken models through the converter: refused or converted, never a crash or a leftover."""

from __future__ import annotations

import pytest

from tests.conftest import SANITIZED
from tests.hostile.campaign import outcomes_of
from tests.support import require_native

_PER_PROCESS = 30 if SANITIZED else 40


@pytest.mark.parametrize("part", range(4))
def test_mutants(part: int, seeds) -> None:
    require_native()
    first = part * 100_000
    outcomes = outcomes_of("tests.hostile.mutations", first, _PER_PROCESS * len(seeds(1)))
    assert len({o.split(":")[0] for o in outcomes.values()}) == 2, "both outcomes are expected to occur"
