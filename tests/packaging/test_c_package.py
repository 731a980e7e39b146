"""The C and C++ package: installed, found by CMake and by pkg-config, linked by examples/c, which runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.packaging.test_examples import ort_include, ort_library
from tests.support import require_native

require_native()
import lowbit  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "editable"
EXAMPLE = ROOT / "examples" / "c"


def run(*words: str | Path, **env: str) -> str:
    done = subprocess.run([str(word) for word in words], text=True, capture_output=True, env=os.environ | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """What `cmake --install` makes of the build behind the editable install."""
    if shutil.which("cmake") is None or not (BUILD / "custom_ops" / "liblowbit.so").exists():
        pytest.skip("no build of the library with CMake at hand (`make setup`)")
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def onnxruntime(tmp_path_factory) -> tuple[Path, Path]:
    """Headers of ONNX Runtime, and its library under the name that programs ask for."""
    include, library = ort_include(), ort_library()
    if include is None or library is None:
        pytest.skip("ONNX Runtime's headers, or a library to link, are not at hand")
    linked = tmp_path_factory.mktemp("onnxruntime") / "libonnxruntime.so.1"
    linked.symlink_to(library)
    return include, linked


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.lowbit.onnx"
    lowbit.convert(ROOT / "models/digits/digits_w2a2.onnx", path)
    return path


def expected(model: Path) -> list[float]:
    feed = (np.arange(64) % 17 / np.float32(16)).astype(np.float32).reshape(1, 1, 8, 8)
    (output,) = lowbit.session(model).run(None, {"input": feed})
    return output.ravel().tolist()


def test_nothing_of_python_is_installed(prefix: Path) -> None:
    assert sorted(str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()) == [
        "include/lowbit.h",
        "lib/cmake/lowbit/lowbit-config-version.cmake",
        "lib/cmake/lowbit/lowbit-config.cmake",
        "lib/cmake/lowbit/lowbit-targets-release.cmake",
        "lib/cmake/lowbit/lowbit-targets.cmake",
        "lib/liblowbit.so",
        "lib/pkgconfig/lowbit.pc",
    ]


def test_cmake_finds_it_and_the_example_runs(prefix: Path, onnxruntime, model: Path, tmp_path: Path) -> None:
    include, library = onnxruntime
    settings = {"CMAKE_PREFIX_PATH": prefix, "ORT_INCLUDE_DIR": include, "ORT_LIBRARY": library}
    settings |= {"CMAKE_C_FLAGS": "-Wall -Wextra -Werror"}
    words = [f"-D{name}={value}" for name, value in settings.items()]
    run("cmake", "-S", EXAMPLE, "-B", tmp_path, "-G", "Ninja", *words)
    run("cmake", "--build", tmp_path)
    program = tmp_path / "run_model"
    for where in ((), (prefix / "lib/liblowbit.so",)):  # custom ops, the execution provider
        shown = run(program, model, *where)
        assert [np.float32(line) for line in shown.split()] == expected(model)


def test_pkg_config_finds_it(prefix: Path, onnxruntime, model: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    include, library = onnxruntime
    found = {"PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    assert run("pkg-config", "--modversion", "lowbit", **found).strip() == lowbit.__version__
    flags = run("pkg-config", "--cflags", "--libs", "lowbit", **found).split()
    program = tmp_path / "run_model"
    rpath = f"-Wl,-rpath,{prefix / 'lib'}:{library.parent}"
    run("cc", EXAMPLE / "run_model.c", *flags, f"-I{include}", library, rpath, "-o", program)
    assert [np.float32(line) for line in run(program, model).split()] == expected(model)
