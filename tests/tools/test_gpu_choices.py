"""benchmarks/gpu_choices.py: what a tuner's log says about the cost model's choices."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOG = [
    "alone\ta\tfast\t2.0",
    "chosen\ta\tslow\t2.5",
    "alone\ta\tother\t3.0",
    "chosen\tb\tonly\t1.0",
    "alone\tb\tnear\t1.1",
    "chosen\tc\tnever tried\t1.0",
    "region\t\t\t100.0",
    "region\ta\tslow\t104.0",
    "region\ta\tother\t98.0",  # clearly faster, and again: it stays
    "region\ta\tother\t98.5",
    "region\tb\tnear\t98.1",  # clearly faster at the first look alone
    "region\tb\tnear\t98.6",
    "region\ta\tslow\t103.5",
    "region\t\t\t98.5",
    "region\tchain\tchain_1x1\t90.0",
    "region\tchain\tchain_1x1\t91.0",
]


@pytest.fixture
def gpu_choices(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("gpu_choices")


def test_what_choices_cost(gpu_choices):
    first, second = gpu_choices.read(LOG)
    assert (first.what, first.chosen, first.fastest) == ("a", "slow", "other")
    assert (first.chosen_alone, first.fastest_alone) == (2.5, 3.0)
    # 5 us more than what was in use then, which is 1.5 us less than what was in use first.
    assert first.lost == pytest.approx(5.0)
    assert (second.what, second.chosen, second.fastest, second.lost) == ("b", "only", "only", 0.0)


def test_a_log_without_trials(gpu_choices):
    assert gpu_choices.read(LOG[:6]) == []
    assert gpu_choices.read([]) == []
