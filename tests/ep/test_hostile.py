"""Broken models on the provider's devices: refused where they are refused without it, never a crash."""

from __future__ import annotations

import pytest

from tests.ep.conftest import fake_library
from tests.hostile.campaign import outcomes_of
from tests.hostile.test_native_hostile import BATCH, NAMES, outcomes


@pytest.fixture(params=["cpu", "fake:0"])
def device(request, monkeypatch) -> str:
    """The device that the child processes take."""
    monkeypatch.setenv("LOWBIT_CUDA_LIBRARY", str(fake_library()))
    monkeypatch.setenv("LOWBIT_FAKE_DELAY_US", "0")
    monkeypatch.setenv("LOWBIT_TEST_DEVICE", request.param)
    return request.param


def test_sound_nodes_run(device: str) -> None:
    assert {name: end for name, end in outcomes("sound").items() if end != "ran"} == {}


@pytest.mark.parametrize("start", range(0, len(NAMES), BATCH))
def test_broken_nodes_are_refused(device: str, start: int) -> None:
    ends = outcomes("broken", start, start + BATCH)
    assert {name: end for name, end in ends.items() if not end.startswith("refused: ")} == {}


def test_random_bytes_never_crash(device: str, seeds) -> None:
    for seed in seeds(1):
        assert len(outcomes("fuzz", 100 + seed, 100)) == 100


def test_mutants_end_as_they_end_without_the_provider(device: str, seeds) -> None:
    ended = outcomes_of("tests.ep.mutants", 0, 40 * len(seeds(1)))
    assert len({end.split(":")[0] for end in ended.values()}) == 2, "both outcomes are expected to occur"
