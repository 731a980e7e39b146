"""What only ONNX Runtime's C interface offers: shared memory and semaphores, and what hardware fits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import onnx
import pytest

from tests.ep.conftest import fake_library, host_program
from tests.ep.graphs import chain, images
from tests.support import lowbit_session

SHAPE = (2, 3, 7, 5)
FITS, DEVICE, MISSING, UNKNOWN = 0, 1 << 1, 1 << 2, 1 << 31


def told(folder: Path, **environment: str) -> dict[str, str]:
    """What the application says, by what each line is about."""
    model = chain("conv", "conv", shape=SHAPE)
    onnx.save(model, folder / "model.onnx")
    x = images(*SHAPE)
    x.tofile(folder / "x")
    lowbit_session(model).run(None, {"x": x})[0].tofile(folder / "y")
    done = subprocess.run(
        [*host_program("lowbit_interop_test"), *(folder / name for name in ("model.onnx", "x", "y"))],
        capture_output=True, text=True, timeout=120, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fake device: " not in done.stderr
    lines = (line.partition(": ") for line in done.stdout.splitlines())
    return {subject: text for subject, _, text in lines}


def reasons(text: str) -> int:
    return int(text.split()[0], 16)


def test_a_device_runs_in_the_memory_of_an_application(tmp_path: Path) -> None:
    said = told(tmp_path, LOWBIT_CUDA_LIBRARY=str(fake_library()), LOWBIT_FAKE_BYTES=str(1 << 24))
    assert "shared" in said
    assert said["memory of cpu"] == "as the host"
    assert said["memory of fake:1"] == str(1 << 24)
    assert reasons(said["cpu"]) == FITS
    assert reasons(said["fake gpu"]) == FITS
    assert reasons(said["npu"]) == DEVICE


@pytest.mark.parametrize(
    ("environment", "expected", "why"),
    [
        ({"LOWBIT_CUDA_LIBRARY": "/nowhere/liblowbit_cuda.so"}, MISSING, "cannot load it: "),
        ({"LOWBIT_FAKE_DEVICES": "0"}, UNKNOWN, "LOWBIT_FAKE_DEVICES is 0"),
    ],
)
def test_hardware_that_cannot_be_used_is_told_why(
    tmp_path: Path, environment: dict[str, str], expected: int, why: str
) -> None:
    said = told(tmp_path, **({"LOWBIT_CUDA_LIBRARY": str(fake_library())} | environment))
    assert "shared" not in said
    assert reasons(said["nvidia gpu"]) == expected
    assert why in said["nvidia gpu"]
    assert reasons(said["npu"]) == DEVICE
    assert reasons(said["cpu"]) == FITS
