"""Some drawn source models: what ONNX Runtime runs converts, and agrees with it in every element."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.campaign import State, fuzz
from tests.support import require_native

_PER_PART = 12


@pytest.mark.parametrize("device", ["cpu-ops", "cpu-ep"])
@pytest.mark.parametrize("part", range(2))
def test_drawn_sources(part: int, device: str, seeds, tmp_path: Path) -> None:
    require_native()
    state = State.read(tmp_path / "state.json")
    fuzz("source", device, _PER_PART * len(seeds(1)), part * 10_000, 1, state)
    (run,) = state.runs.values()
    assert not run["failures"], json.dumps(run["failures"], indent=1)
    assert run["verdicts"]["equal"] > _PER_PART / 3
