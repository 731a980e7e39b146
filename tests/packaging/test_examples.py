"""The examples run, the C++ one too where the onnxruntime package brings a library to link."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.dialects.graphs import CASES
from tests.support import lowbit_library, require_native

require_native()
import lowbit  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CASE = "ort_quantizer.u8_activations_s8_weights"


def ort_include() -> Path | None:
    """ONNX Runtime's headers, where the build would find them."""
    candidates = [
        os.environ.get("ORT_INCLUDE_DIR"),
        ROOT / ".cache/ort-headers/include",
        "/usr/include/onnxruntime",
    ]
    return next((Path(c) for c in candidates if c and (Path(c) / "onnxruntime_cxx_api.h").exists()), None)


def ort_library() -> Path | None:
    """libonnxruntime.so.X inside the installed onnxruntime package; not every release has one."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    return next(iter((Path(spec.origin).parent / "capi").glob("libonnxruntime.so*")), None)


def test_convert_and_run(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "model.lowbit.onnx"
    onnx.save(CASES[CASE].build(0).model, source)
    command = [sys.executable, str(ROOT / "examples/convert_and_run.py"), str(source), str(target)]
    shown = subprocess.run(command, text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    assert target.exists()
    assert "float32" in shown.stdout


def test_gpu_session(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = tmp_path / "model.onnx"
    onnx.save(CASES[CASE].build(0).model, source)
    command = [sys.executable, str(ROOT / "examples/gpu_session.py"), str(source)]
    shown = subprocess.run(command, text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(("cuda:0: ", "cpu-ep: "))


def test_register_yourself(tmp_path: Path) -> None:
    compiler, include, library = shutil.which("c++"), ort_include(), ort_library()
    if compiler is None or include is None:
        pytest.skip(
            "no C++ compiler"
            if compiler is None
            else "ONNX Runtime's headers are not at hand (ORT_INCLUDE_DIR)"
        )
    compile_command = [
        compiler,
        "-std=c++20",
        "-Wall",
        str(ROOT / "examples/register_yourself.cc"),
        f"-I{include}",
    ]
    if library is None:
        subprocess.run([*compile_command, "-fsyntax-only"], check=True)
        pytest.skip("compiled only: this onnxruntime package has no library to link")
    program = tmp_path / "run"
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # its SONAME
    link = [f"-L{tmp_path}", "-l:libonnxruntime.so.1", f"-Wl,-rpath,{tmp_path}", "-o", str(program)]
    subprocess.run([*compile_command, *link], check=True)
    model = tmp_path / "model.lowbit.onnx"
    lowbit.convert(CASES[CASE].build(0).model, model)
    shown = subprocess.run([str(program), lowbit_library(), str(model)], text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    assert "values" in shown.stdout
