"""ONNX Runtime's profiler shows the kernels of a region (onnxruntime 1.25 or newer)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from tests.ep.conftest import EP
from tests.ep.graphs import chain, images

DEVICES = ["cpu", "fake:0"]
RUNS = 3
MODEL = ("conv", "conv", "LpNormalization", "conv")

Event = dict[str, Any]


def profiled(devices, device: str, folder: Path, threads: int = 1) -> list[Event]:
    """The events of a session that runs the model; each of ``threads`` threads runs it RUNS times."""
    options = devices.options(device)
    options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
    session = ort.InferenceSession(chain(*MODEL).SerializeToString(), options, enable_fallback=0)

    def run() -> None:
        for _ in range(RUNS):
            session.run(None, {"x": images(2, 3, 20, 20)})

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return json.loads(Path(session.end_profiling()).read_text())


def kernels(events: list[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "Kernel" and event["args"].get("provider") == EP]


def regions(events: list[Event]) -> list[Event]:
    """The events of the fused nodes' runs."""
    return [
        event
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time")
        and event["args"].get("provider") == EP and "Memcpy" not in event["args"].get("op_name", "")
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_each_run_shows_each_step_inside_its_region(devices, device: str, tmp_path: Path) -> None:
    events = profiled(devices, device, tmp_path)
    around, inside = regions(events), kernels(events)
    assert len(around) == 2 * RUNS
    steps = [event["name"] for event in inside]
    assert len(steps) == len(set(steps)) * RUNS, "every step once a run"
    assert sum("(LowBitConv)" in name for name in steps) == 3 * RUNS
    for event in inside:
        assert event["args"]["kernel"]
        assert event["args"]["nodes"] in event["name"]
        assert int(event["args"]["duration_ns"]) > 0
        # Its times lie within those of a region; microseconds are rounded.
        begin, end = event["ts"], event["ts"] + event["dur"]
        assert any(r["ts"] <= begin + 1 and end <= r["ts"] + r["dur"] + 2 for r in around), (event, around)
        if device == "cpu":
            assert event["tid"] in {r["tid"] for r in around}, "it stands below its region"


def test_threads_keep_their_events_apart(devices, tmp_path: Path) -> None:
    events = profiled(devices, "cpu", tmp_path, threads=3)
    inside = kernels(events)
    per_thread = {tid: [e["name"] for e in inside if e["tid"] == tid] for tid in {e["tid"] for e in inside}}
    assert len(per_thread) == 3
    assert len({tuple(sorted(names)) for names in per_thread.values()}) == 1


def test_without_a_profiler_nothing_is_kept(devices, tmp_path: Path) -> None:
    """A second session's runs are none of the first one's events."""
    other = devices.session(chain("conv"), "cpu")
    options = devices.options("cpu")
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = ort.InferenceSession(chain("conv").SerializeToString(), options, enable_fallback=0)
    other.run(None, {"x": images(1, 3, 5, 5)})
    assert not kernels(json.loads(Path(session.end_profiling()).read_text()))
