"""benchmarks/gpu_throughput.py: what it says of rounds, and how it feeds its threads."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_throughput(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_throughput")


def place(**rounds: list[float]) -> dict:
    names = {name: {"rounds": values} for name, values in rounds.items()}
    return {"batch": 16, "threads": 8, "from": "host", "bytes": 1_000_000, "names": names}


def test_several_gpus_are_compared_with_the_mean_of_one(gpu_throughput):
    several = place(a=[100.0, 102.0, 104.0], b=[100.0, 98.0, 104.0], all=[190.0, 196.0, 208.0])
    assert gpu_throughput.cells(several) == [16, 8, "host", 100.0, 196.0, "1.960", "0.050", "1.95", 0.1]
    assert gpu_throughput.cells(place(a=[100.0])) == [16, 8, "host", 100.0, "-", "-", "-", "-", 0.1]


def test_every_request_is_answered_once(gpu_throughput):
    lock, answered = threading.Lock(), []

    class Answers:
        def run(self, index):
            with lock:
                answered.append(index)

    assert gpu_throughput.serve([Answers() for _ in range(3)], 50) > 0
    assert sorted(answered) == sorted(number % gpu_throughput.REQUESTS for number in range(50))

    class Fails:
        def run(self, index):
            raise ValueError(f"request {index}")

    with pytest.raises(ValueError, match="request 0"):
        gpu_throughput.serve([Fails()], 1)


@pytest.mark.parametrize("text", ["128", "128:", "0:4", "128:0", "a:b", "1:2:3"])
def test_loads_are_batch_and_threads(gpu_throughput, text):
    assert gpu_throughput.Load.parse("128:4") == gpu_throughput.Load(128, 4)
    with pytest.raises(SystemExit, match="BATCH:THREADS"):
        gpu_throughput.Load.parse(text)
