"""Device tensors of torch and CuPy go in and come out without a copy."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from tests.gpu.support import NVIDIA, whole_on_gpu
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
from lowbit.models import build  # noqa: E402


@pytest.fixture(scope="module")
def case():
    model = lowbit.convert(build("resnet18", 8, 8, image=32, batch="N", classes=10)).model
    images = np.random.default_rng(0).normal(0, 1, (5, 3, 32, 32)).astype(np.float32)
    return model, images, lowbit_session(model).run(None, {"input": images})[0]


def bound(session, x, y):
    """A binding of the session's only input and output to tensors of another library."""
    binding = session.io_binding()
    binding.bind_ortvalue_input("input", ort.OrtValue.from_dlpack(x))
    binding.bind_ortvalue_output(session.get_outputs()[0].name, ort.OrtValue.from_dlpack(y))
    return binding


def test_torch_tensors_by_dlpack(case) -> None:
    torch = pytest.importorskip("torch")
    model, images, expected = case
    session = whole_on_gpu(model)
    x = torch.from_numpy(images).cuda()
    y = torch.full(expected.shape, float("nan"), device="cuda")
    torch.cuda.synchronize()
    session.run_with_iobinding(bound(session, x, y))
    np.testing.assert_array_equal(y.cpu().numpy(), expected)


def test_torch_pointers(case) -> None:
    torch = pytest.importorskip("torch")
    model, images, expected = case
    session = whole_on_gpu(model)
    x = torch.from_numpy(images).cuda()
    y = torch.full(expected.shape, float("nan"), device="cuda")
    torch.cuda.synchronize()
    assert ort.OrtValue.from_dlpack(x).data_ptr() == x.data_ptr()
    binding = bound(session, x, y)
    for _ in range(3):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y.cpu().numpy(), expected)


def test_cupy_arrays(case) -> None:
    cupy = pytest.importorskip("cupy")
    model, images, expected = case
    session = whole_on_gpu(model)
    x, y = cupy.asarray(images), cupy.full(expected.shape, cupy.nan, cupy.float32)
    cupy.cuda.Device().synchronize()
    session.run_with_iobinding(bound(session, x, y))
    np.testing.assert_array_equal(cupy.asnumpy(y), expected)


def test_slices_that_are_not_aligned(case) -> None:
    """A pointer that no vector load can take is copied first; the neighbours stay what they were."""
    torch = pytest.importorskip("torch")
    model, images, expected = case
    session = whole_on_gpu(model)
    x_room = torch.zeros(images.size + 8, device="cuda")
    y_room = torch.full((expected.size + 8,), 7.0, device="cuda")
    x_room[1 : 1 + images.size] = torch.from_numpy(images).cuda().flatten()
    x = x_room[1 : 1 + images.size].view(images.shape)
    y = y_room[3 : 3 + expected.size].view(expected.shape)
    torch.cuda.synchronize()
    binding = session.io_binding()
    binding.bind_ortvalue_input("input", ort.OrtValue.from_dlpack(x))
    binding.bind_ortvalue_output(session.get_outputs()[0].name, ort.OrtValue.from_dlpack(y))
    for _ in range(2):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y.cpu().numpy(), expected)
    assert (y_room[:3] == 7).all()
    assert (y_room[3 + expected.size :] == 7).all()


def test_outputs_that_onnxruntime_allocates(case) -> None:
    model, images, expected = case
    session = whole_on_gpu(model)
    name = session.get_outputs()[0].name
    binding = session.io_binding()
    binding.bind_ortvalue_input("input", ort.OrtValue.ortvalue_from_numpy(images, "gpu", 0, NVIDIA))
    binding.bind_output(name, "cuda", 0)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), expected)


def test_host_memory_in_and_out(case) -> None:
    model, images, expected = case
    session = whole_on_gpu(model)
    binding = session.io_binding()
    binding.bind_cpu_input("input", images)
    binding.bind_output(session.get_outputs()[0].name, "cpu")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected)
