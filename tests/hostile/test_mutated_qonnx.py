"""Broken QONNX models through the converter: refused, or converted to what they mean; never a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.hostile.test_mutated_models import _limit_memory
from tests.support import require_native


@pytest.mark.parametrize("part", range(4 if FULL else 1))
def test_qonnx_mutants(part: int) -> None:
    require_native()
    count = 300 if FULL else 60
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.qonnx_mutations", str(part * 100_000), str(count)],
        capture_output=True, text=True, timeout=1200, check=False, cwd=Path(__file__).resolve().parents[2],
        preexec_fn=_limit_memory if sys.platform == "linux" else None,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = lines[-1] if lines else None
    assert done.returncode == 0, f"status {done.returncode} after {last}: {done.stderr[-2000:]}"
    what = {line["seed"]: line["what"] for line in lines if "what" in line}
    outcomes = {line["seed"]: line["outcome"] for line in lines if "outcome" in line}
    wrong = {s: (what[s], o) for s, o in outcomes.items() if not o.startswith(("converted", "refused: "))}
    assert not wrong, wrong
    assert outcomes.keys() == what.keys()
    assert {"converted, equal"} < set(outcomes.values()), "some mutants are expected to be whole"
