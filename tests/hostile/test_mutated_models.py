"""Hundreds of broken models through the converter: refused or converted, never a crash or a leftover."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import require_native

_PER_PROCESS = 60


def _limit_memory() -> None:
    import resource

    if os.environ.get("LOWBIT_SANITIZED"):
        return  # AddressSanitizer's shadow memory takes terabytes of addresses
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # a shape from a file must not be believed


@pytest.mark.parametrize("part", range(4))
def test_mutants(part: int, seeds) -> None:
    require_native()
    first = part * 100_000
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.mutations", str(first), str(_PER_PROCESS * len(seeds(1)))],
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
    assert len({o.split(":")[0] for o in outcomes.values()}) == 2, "both outcomes are expected to occur"
