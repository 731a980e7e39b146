"""examples/mobile, built with the static library for ARM and run under an emulator: the classes are ours.

The library holds the ops and kernels that the exported model's required_operators.config names. Needs a cross
compiler, an emulator, and minutes to compile: part of `make test FULL=1`, which installs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.mobile import aarch64
from tests.packaging.test_examples import ort_include
from tests.support import lowbit_library, require_native

require_native()
import lowbit  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "models" / "digits"
CPUS = ["cortex-a53", "cortex-a76", "max,sve=off,sme=off"]

pytestmark = pytest.mark.skipif(
    not os.environ.get("LOWBIT_AARCH64"), reason="compiles for ARM; `make test FULL=1` does"
)


@pytest.fixture(scope="module")
def library() -> Path:
    why = aarch64.missing()
    if why is not None:
        pytest.skip(why)
    if ort_include() is None:
        pytest.skip("ONNX Runtime's headers are not at hand (ORT_INCLUDE_DIR)")
    found = aarch64.onnxruntime_library()
    if found is None:
        pytest.skip("no onnxruntime for aarch64 could be fetched, or it brings no library to link")
    return found


def build(model: Path, library: Path) -> Path:
    """The example with what one exported model needs; a second model compiles what differs."""
    folder = ROOT / "build" / "mobile-example"
    program = shutil.which("cmake")
    assert program is not None
    configure = [program, "-S", ROOT / "examples" / "mobile", "-B", folder, "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=MinSizeRel", "-DLOWBIT_WERROR=ON"]
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}"]
    configure += [f"-DLOWBIT_OPS_CONFIG={model / 'required_operators.config'}"]
    configure += [f"-DORT_INCLUDE_DIR={ort_include()}", f"-DORT_LIBRARY={library}"]
    for command in (configure, [program, "--build", folder]):
        done = subprocess.run([str(word) for word in command], text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "classify"


def classify(program: Path, library: Path, cpu: str, *arguments: object, code: int = 0):
    command = [*aarch64.emulator(library.parent, cpu), program, *arguments]
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True)
    assert done.returncode == code, done.stderr
    return done


def write_image(path: Path, pixels: np.ndarray) -> None:
    """[H, W, C] as a binary PGM or PPM."""
    height, width, channels = pixels.shape
    head = f"P{5 if channels == 1 else 6}\n{width} {height}\n255\n"
    path.write_bytes(head.encode() + pixels.tobytes())


def best_here(model: Path, feed: np.ndarray) -> list[tuple[int, str]]:
    options = ort.SessionOptions()
    options.register_custom_ops_library(lowbit_library())
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: feed})
    flat = scores.reshape(-1).astype(np.float64)
    return [(int(i), f"{flat[i]:g}") for i in np.argsort(-flat, kind="stable")[:5]]


def best_there(text: str) -> list[tuple[int, str]]:
    return [(int(line.split()[0]), line.split()[1]) for line in text.splitlines()]


def export(source: Path, folder: Path) -> Path:
    lowbit.convert(source, folder / "model.onnx")
    lowbit.export_mobile(folder / "model.onnx", folder / "app")
    return folder / "app"


def test_digits(library, tmp_path):
    app = export(DIGITS / "digits_w4a4.onnx", tmp_path)
    program = build(app, library)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 1)).astype(np.uint8)
    write_image(tmp_path / "digit.pgm", pixels)
    (tmp_path / "labels.txt").write_text("\n".join(f"digit_{i}" for i in range(10)))
    feed = (pixels.transpose(2, 0, 1)[None] / np.float32(255)).astype(np.float32)
    for cpu in CPUS:
        for name in ("model.ort", "model.with_runtime_opt.ort"):
            inputs = app / name, tmp_path / "digit.pgm", tmp_path / "labels.txt"
            shown = classify(program, library, cpu, *inputs)
            assert best_there(shown.stdout) == best_here(app / name, feed), cpu
            first = shown.stdout.splitlines()[0].split()
            assert first[2] == f"digit_{first[0]}"

    # What the config leaves out is not there, and the program says so instead of ending.
    other = tmp_path / "other"
    other.mkdir()
    lacking = export(DIGITS / "digits_w1a2.onnx", other)
    operators = {node.op_type for node in onnx.load(other / "model.onnx").graph.node}
    held = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert operators - held, "the other model is to need more ops"
    failed = classify(program, library, CPUS[0], lacking / "model.ort", tmp_path / "digit.pgm", code=1)
    assert any(op in failed.stderr for op in operators - held)


def test_mobilenet(library, shared_models, tmp_path):
    source = shared_models / "qdq" / "mobilenetv2_1.0_224_w8a8_qat.onnx"
    if not source.exists():
        pytest.skip(f"{source} is not there")
    app = export(source, tmp_path)
    program = build(app, library)
    coarse = np.random.default_rng(5).integers(0, 256, (7, 7, 3)).astype(np.uint8)
    pixels = coarse.repeat(32, axis=0).repeat(32, axis=1)
    write_image(tmp_path / "image.ppm", pixels)
    shown = classify(program, library, CPUS[0], app / "model.ort", tmp_path / "image.ppm")
    assert best_there(shown.stdout) == best_here(app / "model.ort", pixels.transpose(2, 0, 1)[None])
