"""Running mutants in a process of their own, where a crash is seen and memory is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def outcomes_of(module: str, first: int, count: int) -> dict[int, str]:
    """What became of mutants, by their seeds; fails if the process does, or one was neither of the two.

    Args:
        module: prints one line of JSON about what a mutant is and one about its outcome; run with the first
            seed and the number of seeds.
        first: the first seed.
        count: how many.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(first), str(count)],
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
    return outcomes


def _limit_memory() -> None:
    import resource

    if os.environ.get("LOWBIT_SANITIZED"):
        return  # AddressSanitizer's shadow memory takes terabytes of addresses
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # a shape from a file must not be believed
