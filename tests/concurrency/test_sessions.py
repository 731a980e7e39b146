"""Eight threads on two sessions of one model: Compute is re-entrant and shared weights stay what they are."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.dialects.graphs import CASES
from tests.ep.graphs import bottleneck, images
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
import lowbit.models  # noqa: E402


@pytest.mark.parametrize("intra_op_threads", [1, 2])
def test_eight_threads_on_two_sessions(intra_op_threads: int) -> None:
    built = CASES["ort_quantizer.residual_with_downsample"].build(0)
    model = lowbit.convert(built.model).model
    sessions = [lowbit_session(model, threads=intra_op_threads) for _ in range(2)]
    feeds = [built.feed(seed) for seed in range(8)]
    expected = [sessions[0].run(None, feed) for feed in feeds]

    def caller(index: int) -> None:
        for step in range(40):
            which = (index + step) % len(feeds)
            outputs = sessions[(index + step // 2) % 2].run(None, feeds[which])
            for got, want in zip(outputs, expected[which], strict=True):
                np.testing.assert_array_equal(got, want)

    with ThreadPoolExecutor(8) as pool:
        for finished in [pool.submit(caller, index) for index in range(8)]:
            finished.result()


def test_regions_on_fewer_or_more_threads_than_they_were_told() -> None:
    """Whoever comes late, or never, leaves its share of a region's loops to the others."""
    feed = {"x": images(1, 3, 96, 96, seed=1)}
    sessions = []
    for threads, told in ((1, None), (2, None), (1, 8), (2, 16), (3, 2), (4, 4)):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        if told is not None:
            options.add_session_config_entry("lowbit.threads", str(told))
        sessions.append(lowbit.session(bottleneck(0), device="cpu-ep", sess_options=options))
    expected = lowbit.session(bottleneck(0), device="cpu-ep", provider_options={"reference": True}).run(
        None, feed
    )

    def caller(index: int) -> None:
        for _ in range(20):
            for got, want in zip(sessions[index % len(sessions)].run(None, feed), expected, strict=True):
                np.testing.assert_array_equal(got, want)

    with ThreadPoolExecutor(12) as pool:
        for finished in [pool.submit(caller, index) for index in range(12)]:
            finished.result()


def test_sessions_come_and_go_while_others_run() -> None:
    built = CASES["ort_quantizer.u8_activations_s8_weights"].build(1)
    model = lowbit.convert(built.model).model
    feeds = built.feed(0)
    expected = lowbit_session(model).run(None, feeds)

    def caller(_: int) -> None:
        for _ in range(10):
            for got, want in zip(lowbit_session(model).run(None, feeds), expected, strict=True):
                np.testing.assert_array_equal(got, want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(caller, range(8)))


_SESSIONS = """
import ctypes, gc, json, sys
import lowbit
import numpy as np

x = np.zeros((1, 3, 32, 32), np.float32)

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

def opened():
    session = lowbit.session(sys.argv[1], device=sys.argv[2], threads=1)
    session.run(None, {"input": x})
    return session

seen, sessions = [held()], []
for count in (1, 4):
    sessions += [opened() for _ in range(count)]
    seen.append(held())
print(json.dumps([seen[1] - seen[0], (seen[2] - seen[1]) / 4]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what is held")
@pytest.mark.parametrize(("device", "own"), [("cpu", 0), ("cpu-ops", 1)])
def test_packed_weights_are_held_once_by_all_sessions_of_a_process(device, own, tmp_path) -> None:
    """Beside them ONNX Runtime keeps the model's own weights for custom ops, in each session."""
    path = tmp_path / "model.onnx"
    lowbit.convert(lowbit.models.build("resnet18", 8, 8, image=32), path, verify=False)
    weights = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", _SESSIONS, path, device], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, further = json.loads(done.stdout)
    assert first > (own + 0.9) * weights, "the first session must hold the packed weights"
    assert further < (own + 0.25) * weights
