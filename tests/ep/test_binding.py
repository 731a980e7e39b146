"""IO binding with tensors of the device: no copies, no waiting but the caller's."""

from __future__ import annotations

import gc

import numpy as np
import onnxruntime as ort
import pytest

from tests.ep.conftest import VENDOR
from tests.ep.graphs import chain, images
from tests.support import lowbit_session

SHAPE = (2, 3, 8, 8)


def bound(session: ort.InferenceSession, x: ort.OrtValue, y: ort.OrtValue) -> ort.IOBinding:
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, y)
    return binding


def queued() -> ort.RunOptions:
    """A run that returns as soon as its work is enqueued."""
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


@pytest.mark.parametrize("device", [0, 1])
def test_tensors_of_the_device_go_in_and_out_as_they_are(devices, device: int) -> None:
    model = chain("conv", "conv", "conv")
    x = images(*SHAPE)
    (expected,) = lowbit_session(model).run(None, {"x": x})
    session = devices.session(model, f"fake:{device}")
    x_there, y_there = devices.tensor(x, device), devices.tensor(np.zeros_like(expected), device)
    binding = bound(session, x_there, y_there)
    held = devices.bytes_in_use(device)
    for _ in range(3):
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y_there.numpy(), expected)
        assert devices.bytes_in_use(device) == held


def test_tensors_of_another_device_are_copied(devices) -> None:
    """Input and output lie on device 0, the session on device 1."""
    model = chain("conv", "conv")
    x = images(*SHAPE)
    (expected,) = lowbit_session(model).run(None, {"x": x})
    session = devices.session(model, "fake:1")
    x_there, y_there = devices.tensor(x, 0), devices.tensor(np.zeros_like(expected), 0)
    binding = bound(session, x_there, y_there)
    for _ in range(3):
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y_there.numpy(), expected)


def test_a_queued_run_ends_before_its_output_moves_to_another_device(devices) -> None:
    model = chain("conv", "conv")
    x = images(*SHAPE)
    (expected,) = lowbit_session(model).run(None, {"x": x})
    session = devices.session(model)
    x_there, y_there = devices.tensor(x), devices.tensor(np.zeros_like(expected))
    moved = devices.tensor(np.zeros_like(expected), 1)
    session.run_with_iobinding(bound(session, x_there, y_there), queued())
    ort.copy_tensors([y_there], [moved])
    np.testing.assert_array_equal(moved.numpy(), expected)


def test_alternating_buffers(devices) -> None:
    model = chain("conv", "conv")
    session, alone = devices.session(model), lowbit_session(model)
    inputs = [images(*SHAPE, seed=i) for i in range(5)]
    expected = [alone.run(None, {"x": x})[0] for x in inputs]
    bindings = []
    for x, y in zip(inputs, expected, strict=True):
        tensors = devices.tensor(x), devices.tensor(np.zeros_like(y))
        bindings.append((bound(session, *tensors), *tensors))
    held = devices.bytes_in_use()
    for i in range(40):
        binding, _, y = bindings[i * 3 % 5]
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(y.numpy(), expected[i * 3 % 5])
    assert devices.bytes_in_use() == held


def test_runs_queue_up(devices) -> None:
    """One run's output is the next one's input, and nobody waits in between."""
    model = chain("conv")
    session, alone = devices.session(model), lowbit_session(model)
    x = images(*SHAPE)
    expected = x
    buffers = [devices.tensor(x), devices.tensor(x)]
    bindings = [bound(session, buffers[0], buffers[1]), bound(session, buffers[1], buffers[0])]
    options = queued()
    for i in range(20):
        session.run_with_iobinding(bindings[i % 2], options)
        (expected,) = alone.run(None, {"x": expected})
    bindings[1].synchronize_outputs()
    np.testing.assert_array_equal(buffers[0].numpy(), expected)


def test_queued_runs_that_nobody_waits_for(devices) -> None:
    """The session goes while its work is under way: what the work uses stays until it is done."""
    model = chain("conv", "conv")
    x = devices.tensor(images(*SHAPE))
    session = devices.session(model)
    y = devices.tensor(np.zeros(SHAPE, np.float32))
    binding = bound(session, x, y)
    for _ in range(5):
        session.run_with_iobinding(binding, queued())
    del session, binding
    gc.collect()
    np.testing.assert_array_equal(y.numpy(), lowbit_session(model).run(None, {"x": x.numpy()})[0])


def test_queued_runs_with_inputs_of_the_host(devices) -> None:
    """ONNX Runtime frees its copies of the inputs while the work that reads them is still under way."""
    model = chain("conv", "conv")
    session, alone = devices.session(model), lowbit_session(model)
    outputs = []
    inputs = [images(*SHAPE, seed=i) for i in range(10)]
    for x in inputs:
        y = devices.tensor(np.zeros(SHAPE, np.float32))
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_ortvalue_output(session.get_outputs()[0].name, y)
        session.run_with_iobinding(binding, queued())
        outputs.append((binding, y))
    outputs[-1][0].synchronize_outputs()
    for x, (_, y) in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(y.numpy(), alone.run(None, {"x": x})[0])


def test_outputs_that_onnxruntime_allocates_on_the_device(devices) -> None:
    model = chain("conv", "LpNormalization", "conv")
    session = devices.session(model)
    x = images(*SHAPE)
    (expected,) = lowbit_session(model).run(None, {"x": x})
    kept = []
    # bind_output() names devices of known vendors only ("cuda"), so by the object behind it.
    there = ort.OrtDevice.make("gpu", 0, VENDOR)._get_c_device()
    for _ in range(3):
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding._iobinding.bind_output(session.get_outputs()[0].name, there)
        session.run_with_iobinding(binding)
        kept.append(binding.get_outputs()[0])
    for y in kept:
        np.testing.assert_array_equal(y.numpy(), expected)


def test_copies_between_host_and_device(devices) -> None:
    x = images(4, 5)
    there = devices.tensor(x)
    np.testing.assert_array_equal(there.numpy(), x)
    there.update_inplace(x + 1)
    np.testing.assert_array_equal(there.numpy(), x + 1)
    assert there.device_name().lower() in ("gpu", "cuda")
