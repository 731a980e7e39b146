"""Hosts that load custom-op libraries, and nothing else, get the execution provider through LOWBIT_EP."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.ep.conftest import EP, fake_library, host_program
from tests.ep.graphs import chain, images
from tests.support import lowbit_library, lowbit_session

BATCHES = 3
SESSIONS = 4
"""What lowbit_triton_test makes: 2 instances in each of 2 environments, batches of 3 sizes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(chain("conv", "conv", shape=("N", 3, 6, 7)), path)
    return path


def serve(model: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the model as Triton's onnxruntime backend does; what it computes is in ``folder``."""
    images(8, 3, 6, 7).tofile(folder / "x")
    return subprocess.run(
        [*host_program("lowbit_triton_test"), model, folder / "x", folder / "y"],
        capture_output=True, text=True, timeout=120,
        env=os.environ
        | {"LOWBIT_CUDA_LIBRARY": str(fake_library()), "LOWBIT_PRINT_PLAN": "json"}
        | environment,
    )  # fmt: skip


def assert_served(model: Path, folder: Path) -> None:
    (expected,) = lowbit_session(model).run(None, {"x": images(8, 3, 6, 7)})
    served = np.fromfile(folder / "y", np.float32).reshape(SESSIONS, *expected.shape)
    for each in served:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("asked", ["cpu", "fake", "fake:1", "cpu,reference=1,tuning=off"])
def test_a_server_runs_regions_where_it_is_asked_to(model: Path, asked: str, tmp_path: Path) -> None:
    done = serve(model, tmp_path, LOWBIT_EP=asked)
    assert done.returncode == 0, done.stderr
    assert_served(model, tmp_path)
    assert done.stderr.count('"lowbit": "region"') == SESSIONS * BATCHES
    assert '"lowbit": "node"' not in done.stderr
    assert "[W:" not in done.stderr


@pytest.mark.parametrize("asked", ["", "none"])
def test_a_server_that_is_not_asked_runs_custom_ops(model: Path, asked: str, tmp_path: Path) -> None:
    done = serve(model, tmp_path, LOWBIT_EP=asked)
    assert done.returncode == 0, done.stderr
    assert_served(model, tmp_path)
    assert '"lowbit": "region"' not in done.stderr
    assert "[W:" not in done.stderr


def test_custom_ops_stand_in_for_a_device_that_is_missing_and_say_so(model: Path, tmp_path: Path) -> None:
    done = serve(model, tmp_path, LOWBIT_EP="cuda:1", LOWBIT_CUDA_LIBRARY=str(tmp_path / "missing.so"))
    assert done.returncode == 0, done.stderr
    assert_served(model, tmp_path)
    assert '"lowbit": "region"' not in done.stderr
    told = "run as custom ops, not on the execution provider's device 'cuda:1': "
    assert done.stderr.count(told) == SESSIONS, "each session tells it once"
    assert "'cuda:1' is not there, there is cpu; cannot load it: " in done.stderr
    assert "missing.so" in done.stderr


def test_without_an_environment_there_are_custom_ops_and_the_reason(model: Path, tmp_path: Path) -> None:
    done = serve(model, tmp_path, LOWBIT_EP="cpu")
    assert "'cpu': there is no OrtEnv yet; create it before" in done.stdout
    assert not serve(model, tmp_path).stdout


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("CUDA", "LOWBIT_EP is 'CUDA': 'CUDA' is no device; expected a device and options"),
        ("cuda:", "'cuda:' is no device"),
        ("cuda:one", "'cuda:one' is no device"),
        ("cuda:*1", "'cuda:*1' is no device"),
        (",tuning=on", "'' is no device"),
        ("cpu,tuning", "'tuning' is no option=value; expected a device and options"),
        ("cpu,", "'' is no option=value"),
        ("cpu,tunning=on", "option 'tunning' is unknown; there are device_id, tuning"),
        ("cpu,tuning=maybe", "option 'tuning' is 'maybe', expected off, cached, on"),
    ],
)
def test_what_is_asked_wrongly_is_refused(model: Path, asked: str, message: str, tmp_path: Path) -> None:
    done = serve(model, tmp_path, LOWBIT_EP=asked)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize("device", ["cpu", "fake:1"])
def test_a_session_may_ask_for_itself(devices, model: Path, device: str, monkeypatch) -> None:
    monkeypatch.setenv("LOWBIT_EP", "fake:0")
    options = ort.SessionOptions()
    options.add_session_config_entry("lowbit.ep", f"{device},tuning=off")
    before = len(ort.get_ep_devices())
    for _ in range(2):  # an application and a helper of it
        options.register_custom_ops_library(lowbit_library())
    session = ort.InferenceSession(model, options, enable_fallback=0)
    assert session.get_providers()[0] == EP
    assert session.get_provider_options()[EP]["tuning"] == "off"
    assert len(ort.get_ep_devices()) == before, "the library was registered already"
    x = images(2, 3, 6, 7)
    np.testing.assert_array_equal(
        session.run(None, {"x": x})[0], lowbit_session(model).run(None, {"x": x})[0]
    )


def test_sessions_take_devices_in_turn(devices, model: Path, monkeypatch) -> None:
    """The option device_id, which has to be that of the device, tells which one a session was given."""
    monkeypatch.setenv("LOWBIT_EP", "fake:*,device_id=0")
    given = []
    for _ in range(4):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(lowbit_library())
        try:
            ort.InferenceSession(model, options, enable_fallback=0)
            given.append(0)
        except Exception as refused:
            given.append(int(str(refused).split("the session was given device ")[1][0]))
    assert given in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_lowbit_itself_takes_no_notice(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOWBIT_EP", "what no session accepts")
    assert lowbit.session(model, device="cpu-ops").get_providers() == ["CPUExecutionProvider"]
    assert lowbit.convert(chain("conv", converted=False)).report.converted
