"""What the GPU tests share: the provider's devices, sessions on them, comparison with the CPU session."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from tests.support import lowbit_library, lowbit_session

PROVIDER = "LowBitExecutionProvider"
NVIDIA = 0x10DE
# The sign of a node that ONNX Runtime would have to run on the CPU.
NO_FALLBACK = ("session.disable_cpu_ep_fallback", "1")


@functools.cache
def devices() -> list[ort.OrtEpDevice]:
    """All devices of the provider: the CPU first, then the GPUs."""
    if not _offered():
        ort.register_execution_provider_library(PROVIDER, lowbit_library())
    return _offered()


def _offered() -> list[ort.OrtEpDevice]:
    """The provider's devices, without those of registrations that look for no GPU."""
    return [
        device
        for device in ort.get_ep_devices()
        if device.ep_name == PROVIDER and "cpu_alone" not in device.ep_metadata
    ]


def gpu_devices() -> list[ort.OrtEpDevice]:
    return [device for device in devices() if device.ep_metadata["device"].startswith("cuda")]


def why_no_gpu() -> str:
    """Why there is no GPU device; empty where there is one."""
    if gpu_devices():
        return ""
    reasons = [device.ep_metadata.get("cuda_unavailable", "") for device in devices()]
    return next((reason for reason in reasons if reason), "the provider offers no GPU and does not say why")


def gpu_options(
    options: Mapping[str, str] | None = None, config: Mapping[str, str] | None = None, *, gpu: int = 0
) -> ort.SessionOptions:
    session = ort.SessionOptions()
    session.log_severity_level = 2
    for key, value in (config or {}).items():
        session.add_session_config_entry(key, value)
    session.add_provider_for_devices([gpu_devices()[gpu]], dict(options or {}))
    return session


def source_of(model: onnx.ModelProto | str | Path) -> bytes | str:
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)


def gpu_session(
    model: onnx.ModelProto | str | Path,
    options: Mapping[str, str] | None = None,
    config: Mapping[str, str] | None = None,
    *,
    gpu: int = 0,
) -> ort.InferenceSession:
    """A session on a GPU, the first one unless told; nodes that the GPU leaves run on the CPU."""
    return ort.InferenceSession(source_of(model), gpu_options(options, config, gpu=gpu), enable_fallback=0)


def whole_on_gpu(
    model: onnx.ModelProto | str | Path, *, gpu: int = 0, **options: str
) -> ort.InferenceSession:
    """As `gpu_session`, but no node may be left for the CPU."""
    return gpu_session(model, options, dict([NO_FALLBACK]), gpu=gpu)


def assert_equal(got: list[np.ndarray], want: list[np.ndarray], what: str) -> None:
    """Integer tensors in every element; float tensors to 1e-6 (what follows the last integer node)."""
    assert len(got) == len(want), what
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == w.dtype, f"{what}, output {i}"
        if np.issubdtype(w.dtype, np.floating) and not np.array_equal(g, w, equal_nan=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6, err_msg=f"{what}, output {i}")
        elif not np.issubdtype(w.dtype, np.floating):
            np.testing.assert_array_equal(g, w, err_msg=f"{what}, output {i}")


def compare(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    what: str,
    options: Mapping[str, str] | None = None,
) -> None:
    """One run on the GPU and one on the CPU."""
    want = lowbit_session(model).run(None, dict(feeds))
    assert_equal(gpu_session(model, options).run(None, dict(feeds)), want, what)


def in_new_process(code: str, environment: Mapping[str, str] | None = None) -> dict:
    """Runs Python code that leaves its findings in a dict `found`; returns it."""
    script = "import json\nfound = {}\n" + code + "\nprint('FOUND' + json.dumps(found))\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **(environment or {})},
        cwd=Path(__file__).resolve().parents[2],
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return {**json.loads(lines[-1][len("FOUND") :]), "stderr": done.stderr, "exit_code": done.returncode}
