"""Hostile lowbit models: ONNX Runtime answers with an error that names the node, the process lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import native_nodes
from tests.support import lowbit_library

ROOT = Path(__file__).resolve().parents[2]
BATCH = 60
NAMES = [name for name, _ in native_nodes.cases()]


def outcomes(*arguments: object) -> dict[str, str]:
    """Case -> what happened, from a child process that must survive all of them."""
    command = [
        sys.executable,
        "-m",
        "tests.hostile.native_nodes",
        str(lowbit_library()),
        *map(str, arguments),
    ]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    tried = [line[4:] for line in child.stdout.splitlines() if line.startswith("try ")]
    ended = [line[4:] for line in child.stdout.splitlines() if line.startswith("end ")]
    assert child.returncode == 0, f"the process died of case {tried[-1:]}: {child.stderr[-2000:]}"
    return dict(zip(tried, ended, strict=True))


def test_there_are_enough_cases() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert len(NAMES) >= 200


def test_sound_models_run() -> None:
    """The broken models below differ from these in one thing each."""
    assert {name: end for name, end in outcomes("sound").items() if end != "ran"} == {}


@pytest.mark.parametrize("start", range(0, len(NAMES), BATCH))
def test_broken_models_are_refused(start: int) -> None:
    ends = outcomes("broken", start, start + BATCH)
    assert {name: end for name, end in ends.items() if not end.startswith("refused: ")} == {}


def test_random_bytes_never_crash(seeds) -> None:
    for seed in seeds(2):
        assert len(outcomes("fuzz", seed, 150)) == 150
