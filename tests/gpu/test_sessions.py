"""Many threads, many shapes, many buffers: no wrong element, and memory that stays what it was."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.conftest import FULL
from tests.dialects.graphs import CASES
from tests.gpu.support import NVIDIA, assert_equal, whole_on_gpu
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
from lowbit.models import build  # noqa: E402

THREADS = 8
RUNS = 10_000 if FULL else 2_000
MIB = 1 << 20


def host_bytes() -> int:
    """Memory of this process that is its own."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Memory of the GPU that is in use."""
    torch = pytest.importorskip("torch")
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def trim() -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="module")
def model():
    return lowbit.convert(build("resnet18", 8, 8, image=32, batch="N", classes=10)).model


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


def test_image_sizes_that_the_model_leaves_open() -> None:
    built = CASES["ort_quantizer.residual_with_downsample"].build(0)
    model = lowbit.convert(built.model).model
    graph_input = model.graph.input[0].type.tensor_type
    batch, channels, height, width = (d.dim_value or 1 for d in graph_input.shape.dim)
    for axis, name in ((0, "N"), (2, "H"), (3, "W")):
        graph_input.shape.dim[axis].dim_param = name
    for value in [*model.graph.output, *model.graph.value_info]:
        value.type.tensor_type.ClearField("shape")
    session, on_cpu = whole_on_gpu(model), lowbit_session(model)
    rng = np.random.default_rng(2)
    for b, h, w in [
        (batch, height, width),
        (2, height + 4, width),
        (1, height, width + 8),
        (3, height, width),
    ]:
        feed = {model.graph.input[0].name: rng.normal(0, 1, (b, channels, h, w)).astype(np.float32)}
        assert_equal(session.run(None, feed), on_cpu.run(None, feed), f"{b}x{h}x{w}")


def test_sessions_come_and_go_while_others_run(model) -> None:
    feed = {"input": np.random.default_rng(3).normal(0, 1, (1, 3, 32, 32)).astype(np.float32)}
    expected = lowbit_session(model).run(None, feed)

    def caller(_: int) -> None:
        for _ in range(4):
            assert_equal(whole_on_gpu(model).run(None, feed), expected, "a fresh session")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(caller, range(THREADS)))


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
