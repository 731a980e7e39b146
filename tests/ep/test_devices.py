"""What is offered, and what happens where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.ep.conftest import EP, fake_library, host_program
from tests.ep.graphs import chain, images
from tests.support import lowbit_library

_REGISTER = """
import json, sys
import onnxruntime as ort
for name in sys.argv[2:]:
    ort.register_execution_provider_library(name, sys.argv[1])
found = [d for d in ort.get_ep_devices() if d.ep_name == "LowBitExecutionProvider"]
print(json.dumps([dict(d.ep_metadata) for d in found]))
"""


def offered(*names: str, **environment: str) -> tuple[list[dict[str, str]], str]:
    """The metadata of the devices in a process of this environment, and what it logged.

    The library is registered under each of ``names``; "lowbit" where there is none.
    """
    done = subprocess.run(
        [sys.executable, "-c", _REGISTER, lowbit_library(), *(names or ("lowbit",))],
        capture_output=True, text=True, check=True, env=os.environ | environment, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_device_is_offered_under_one_name(devices) -> None:
    found = [device for device in ort.get_ep_devices() if device.ep_name == EP]
    names = [device.ep_metadata["device"] for device in found]
    assert names[-3:] == ["cpu", "fake:0", "fake:1"]
    assert names.count("fake:0") == 1, "a second registration would not know the memory of the first"
    assert {device.ep_metadata["version"] for device in found} == {lowbit.__version__}
    assert found[-1].ep_metadata["description"] == "fake device 1"


def test_a_name_is_registered_once_and_a_library_often(devices) -> None:
    with pytest.raises(Exception, match="already registered"):
        ort.register_execution_provider_library("lowbit_tests", lowbit_library())
    before = len(ort.get_ep_devices())
    ort.register_execution_provider_library("lowbit_again", lowbit_library())
    assert len(ort.get_ep_devices()) > before
    ort.unregister_execution_provider_library("lowbit_again")
    assert len(ort.get_ep_devices()) == before
    devices.session(chain("conv")).run(None, {"x": images(1, 3, 4, 4)})


def test_without_the_gpu_library_there_is_the_cpu_and_the_reason() -> None:
    found, log = offered(LOWBIT_CUDA_LIBRARY="")
    if any(device["device"].startswith("cuda") for device in found):
        pytest.skip("this machine has a GPU")
    assert [device["device"] for device in found] == ["cpu"]
    assert "liblowbit_cuda" in found[0]["cuda_unavailable"]
    assert "GPUs are not offered" not in log  # nothing is wrong with a machine without


def test_a_library_that_cannot_be_loaded_is_told_and_harmless(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    found, log = offered(LOWBIT_CUDA_LIBRARY=str(broken))
    assert [device["device"] for device in found] == ["cpu"]
    assert "broken.so" in found[0]["cuda_unavailable"]
    assert "GPUs are not offered" in log
    found, log = offered(LOWBIT_CUDA_LIBRARY=str(tmp_path / "missing.so"))
    assert "missing.so" in found[0]["cuda_unavailable"]
    assert "GPUs are not offered" in log


def test_another_library_in_its_place_is_recognized() -> None:
    found, log = offered(LOWBIT_CUDA_LIBRARY=lowbit_library())
    assert "is not lowbit's library for GPUs" in found[0]["cuda_unavailable"]
    assert "reinstall" in log


def test_a_name_that_ends_in_cpu_offers_the_cpu_alone_and_opens_no_other_library(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    found, log = offered("lowbit.cpu", LOWBIT_CUDA_LIBRARY=str(broken))
    assert "GPUs are not offered" not in log
    (cpu,) = found
    assert (cpu["device"], cpu["cpu_alone"]) == ("cpu", "1")
    assert "registered as 'lowbit.cpu', which offers the CPU alone" in cpu["cuda_unavailable"]
    found, log = offered("lowbit.cpu", "lowbit", LOWBIT_CUDA_LIBRARY=str(broken))
    assert "GPUs are not offered" in log
    assert [device.get("cpu_alone") for device in found] == ["1", None]


def test_gpus_are_found_after_the_cpu_alone() -> None:
    found, _ = offered("a.cpu", "b", "c.cpu", LOWBIT_CUDA_LIBRARY=str(fake_library()))
    assert [device["device"] for device in found] == ["cpu", "cpu", "fake:0", "fake:1", "cpu"]


_BOTH = """
import sys
import lowbit, numpy as np, onnxruntime as ort
from lowbit.sessions.devices import ep_device

def mapped():
    with open("/proc/self/maps") as lines:
        return "fake_device" in lines.read()

feed = {"x": np.load(sys.argv[2])}
first = lowbit.session(sys.argv[1])
assert first.get_providers()[0] == lowbit.get_ep_name(), first.get_providers()
assert not mapped(), "the library of GPUs was opened for the CPU"
(expected,) = first.run(None, feed)
assert {"cpu", "cpu-ops", "cpu-ep", "fake:0", "fake:1"} <= {device.name for device in lowbit.devices()}
assert mapped()
sessions = [first, *(lowbit.session(sys.argv[1], device=d) for d in ("fake:1", "cpu", "cpu-ep", "fake:0"))]
assert len([each for each in ort.get_ep_devices() if each.ep_name == lowbit.get_ep_name()]) == 4
for session in [*sessions, *reversed(sessions)]:
    np.testing.assert_array_equal(session.run(None, feed)[0], expected)
print("equal")
"""


def test_a_process_may_want_the_cpu_first_and_a_gpu_later(tmp_path: Path) -> None:
    onnx.save(chain("conv", "conv"), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", images(1, 3, 6, 7))
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, tmp_path / "model.onnx", tmp_path / "x.npy"], capture_output=True,
        text=True, timeout=120, env=os.environ | {"LOWBIT_CUDA_LIBRARY": str(fake_library())},
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr


def test_without_a_usable_device_the_reason_reaches_the_user() -> None:
    found, log = offered(LOWBIT_CUDA_LIBRARY=str(fake_library()), LOWBIT_FAKE_DEVICES="0")
    assert [device["device"] for device in found] == ["cpu"]
    assert found[0]["cuda_unavailable"] == "lowbit: no fake device can be used: LOWBIT_FAKE_DEVICES is 0"
    assert "no fake device" not in log, "a machine without a GPU is nothing to warn of"


def test_an_environment_may_go_in_a_static_destructor() -> None:
    done = subprocess.run(
        host_program("lowbit_exit_test"), capture_output=True, text=True, timeout=120,
        env=os.environ | {"LOWBIT_CUDA_LIBRARY": str(fake_library()), "MALLOC_PERTURB_": "165"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "released\n"), done.stderr


def test_more_devices_than_onnxruntime_takes_are_left_out_with_a_word() -> None:
    found, log = offered(
        LOWBIT_CUDA_LIBRARY=str(fake_library()), LOWBIT_FAKE_DEVICES="9", LOWBIT_FAKE_BYTES="1048576"
    )
    assert [device["device"] for device in found] == ["cpu", *(f"fake:{i}" for i in range(8))]
    assert "fake:8 is not offered" in log
