"""Sessions on several GPUs of one machine; skipped where there is one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.gpu.support import NVIDIA, PROVIDER, gpu_devices, gpu_options, whole_on_gpu
from tests.support import lowbit_session

SEED = 5


@pytest.fixture(autouse=True)
def several() -> None:
    count = len(gpu_devices())
    if count < 2:
        pytest.skip(f"needs two GPUs, found {count}")


def images(batch: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (batch, 3, 32, 32)).astype(np.float32)


def tensor(value: np.ndarray, gpu: int) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(value, "gpu", gpu, NVIDIA)


@pytest.mark.parametrize("options", [{}, {"cuda_graph": "0"}, {"tuning": "on"}], ids=str)
def test_every_gpu_computes_the_same(model: onnx.ModelProto, options: dict[str, str], tmp_path: Path) -> None:
    x = images(3)
    (expected,) = lowbit_session(model).run(None, {"input": x})
    for gpu in range(len(gpu_devices())):
        session = whole_on_gpu(model, gpu=gpu, cache_dir=str(tmp_path), **options)
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"input": x})[0], expected)


@pytest.mark.parametrize("gpu", [0, 1])
def test_tensors_of_another_gpu_are_copied(model: onnx.ModelProto, gpu: int) -> None:
    x = images(2)
    (expected,) = lowbit_session(model).run(None, {"input": x})
    session = whole_on_gpu(model, gpu=gpu)
    there = tensor(x, 1 - gpu), tensor(np.full_like(expected, np.nan), 1 - gpu)
    binding = session.io_binding()
    binding.bind_ortvalue_input("input", there[0])
    binding.bind_ortvalue_output(session.get_outputs()[0].name, there[1])
    for _ in range(3):
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(there[1].numpy(), expected)


def test_torch_tensors_of_the_second_gpu(model: onnx.ModelProto) -> None:
    torch = pytest.importorskip("torch")
    x = images(2)
    (expected,) = lowbit_session(model).run(None, {"input": x})
    session = whole_on_gpu(model, gpu=1)
    given = torch.from_numpy(x).to("cuda:1")
    result = torch.full(expected.shape, float("nan"), device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    binding = session.io_binding()
    with torch.cuda.device(1):  # torch exports tensors of its current device only
        binding.bind_ortvalue_input("input", ort.OrtValue.from_dlpack(given))
        binding.bind_ortvalue_output(session.get_outputs()[0].name, ort.OrtValue.from_dlpack(result))
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(result.cpu().numpy(), expected)


def test_threads_on_all_gpus_at_once(model: onnx.ModelProto) -> None:
    alone = lowbit_session(model)
    feeds = [images(1 + i % 3, seed=i) for i in range(6)]
    expected = [alone.run(None, {"input": feed})[0] for feed in feeds]
    sessions = [whole_on_gpu(model, gpu=gpu) for gpu in range(len(gpu_devices()))]
    wrong: list[str] = []

    def work(first: int) -> None:
        for i in range(first, first + 200):
            (got,) = sessions[i % len(sessions)].run(None, {"input": feeds[i % len(feeds)]})
            if not np.array_equal(got, expected[i % len(feeds)]):
                wrong.append(f"run {i} on GPU {i % len(sessions)}")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


def test_a_model_compiled_on_one_gpu_opens_on_another(model: onnx.ModelProto, tmp_path: Path) -> None:
    """Both of one architecture: the file is for the architecture, not for the card."""
    names = {device.ep_metadata["description"] for device in gpu_devices()[:2]}
    if len(names) > 1:
        pytest.skip(f"the GPUs differ: {names}")
    x = images(2)
    (expected,) = lowbit_session(model).run(None, {"input": x})
    compiled = tmp_path / "compiled.onnx"
    compiler = ort.ModelCompiler(
        gpu_options(), model.SerializeToString(), embed_compiled_data_into_model=True
    )
    compiler.compile_to_file(str(compiled))
    session = whole_on_gpu(compiled, gpu=1)
    assert PROVIDER in session.get_providers()
    np.testing.assert_array_equal(session.run(None, {"input": x})[0], expected)
