"""Memory of host and GPU: it does not grow, and when it is used up that is said and survived.

The figures are those of the whole GPU: run this file while nothing else uses it (no `-n`).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.conftest import FULL
from tests.gpu.support import NVIDIA, assert_equal, whole_on_gpu
from tests.support import lowbit_session

THREADS = 8
RUNS = 10_000 if FULL else 2_000
MIB = 1 << 20


def image(batch: int) -> dict[str, np.ndarray]:
    return {"input": np.random.default_rng(batch).normal(0, 1, (batch, 3, 32, 32)).astype(np.float32)}


def trim() -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def device_bytes() -> int:
    """Memory of the GPU that is in use."""
    torch = pytest.importorskip("torch")
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@pytest.fixture(autouse=True)
def torch_is_loaded() -> None:
    """Half a gigabyte of its own, which must not count as growth."""
    device_bytes()


def host_bytes() -> int:
    """Memory of this process that is its own."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_eight_threads_on_two_sessions(model) -> None:
    sessions = [whole_on_gpu(model) for _ in range(2)]
    rng = np.random.default_rng(0)
    feeds = [{"input": rng.normal(0, 1, (1 + i % 3, 3, 32, 32)).astype(np.float32)} for i in range(THREADS)]
    on_cpu = lowbit_session(model)
    expected = [on_cpu.run(None, feed) for feed in feeds]

    def caller(index: int, runs: int) -> None:
        for step in range(runs):
            which = (index + step) % len(feeds)
            outputs = sessions[(index + step // 2) % 2].run(None, feeds[which])
            for got, want in zip(outputs, expected[which], strict=True):
                if not np.array_equal(got, want):
                    np.testing.assert_array_equal(got, want, err_msg=f"thread {index}, run {step}")

    def all_threads(runs: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for finished in [pool.submit(caller, index, runs // THREADS) for index in range(THREADS)]:
                finished.result()

    all_threads(RUNS // 4)  # every shape, plan and instance has been made
    trim()
    host, device = host_bytes(), device_bytes()
    all_threads(RUNS)
    trim()
    assert device_bytes() - device <= 4 * MIB
    assert host_bytes() - host <= 16 * MIB


def test_fifty_shapes_keep_memory_flat(model) -> None:
    session, on_cpu = whole_on_gpu(model), lowbit_session(model, threads=4)
    rng = np.random.default_rng(1)
    feeds = [{"input": rng.normal(0, 1, (1 + i, 3, 32, 32)).astype(np.float32)} for i in range(50)]
    for feed in feeds:
        assert_equal(session.run(None, feed), on_cpu.run(None, feed), f"batch {len(feed['input'])}")
    trim()
    host, device = host_bytes(), device_bytes()
    for _ in range(3):
        for feed in feeds:
            session.run(None, feed)
    trim()
    assert device_bytes() - device <= 64 * MIB
    assert host_bytes() - host <= 32 * MIB


def test_alternating_buffers(model) -> None:
    """Two pairs of device buffers in turn: the instance is patched, nothing is copied and nothing grows."""
    session = whole_on_gpu(model)
    on_cpu = lowbit_session(model)
    rng = np.random.default_rng(4)
    images = [rng.normal(0, 1, (2, 3, 32, 32)).astype(np.float32) for _ in range(3)]
    expected = [on_cpu.run(None, {"input": image})[0] for image in images]
    inputs = [ort.OrtValue.ortvalue_from_numpy(image, "gpu", 0, NVIDIA) for image in images]
    outputs = [ort.OrtValue.ortvalue_from_numpy(np.zeros_like(e), "gpu", 0, NVIDIA) for e in expected]
    name = session.get_outputs()[0].name
    device = 0
    for step in range(300):
        which, to = step % 3, (step // 2) % 3
        binding = session.io_binding()
        binding.bind_ortvalue_input("input", inputs[which])
        binding.bind_ortvalue_output(name, outputs[to])
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(outputs[to].numpy(), expected[which], err_msg=f"step {step}")
        if step == 50:
            device = device_bytes()
    assert device_bytes() - device <= 4 * MIB


def test_out_of_memory_is_one_clear_error_and_passes(model) -> None:
    torch = pytest.importorskip("torch")
    session = whole_on_gpu(model)
    expected = lowbit_session(model).run(None, image(1))
    assert_equal(session.run(None, image(1)), expected, "before")
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 128 * MIB, dtype=torch.uint8, device="cuda")
    try:
        # The images (96 MiB) fit, what the region needs between its nodes (64 MiB) does not.
        with pytest.raises(Exception, match=r"out of memory on GPU 0.*bytes were asked for.*bytes free"):
            session.run(None, image(8192))
        # Not even the images fit.
        with pytest.raises(Exception, match=r"Allocation failed|memory"):
            session.run(None, image(32768))
        assert_equal(session.run(None, image(1)), expected, "while memory is short")
    finally:
        del hog
        torch.cuda.empty_cache()
    big = session.run(None, image(8192))
    assert_equal([big[0][:1]], [session.run(None, {"input": image(8192)["input"][:1]})[0]], "memory is back")
