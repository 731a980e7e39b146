"""How the steps of a test run call programs, and what a step comes to."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
REPORTS = BUILD / "reports"
JOBS = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclasses.dataclass
class Outcome:
    """What one step came to. `skipped` is the reason when it did not run."""

    passed: int = 0
    failed: int = 0
    skipped: str | None = None


Command = Sequence[str | Path]
PIP_INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "--retries", "5")


def run(command: Command, **env: str) -> bool:
    """Runs a command in the repository root, its output going to ours; True when it exits with 0."""
    words = [str(word) for word in command]
    print("+", " ".join([*(f"{k}={v}" for k, v in env.items()), *words]), flush=True)
    return subprocess.run(words, cwd=ROOT, env=os.environ | env).returncode == 0


def checked(*commands: Command, **env: str) -> Outcome:
    """One step that is right when every command exits with 0; the commands after a failure are not run."""
    return Outcome(passed=1) if all(run(command, **env) for command in commands) else Outcome(failed=1)


def pytest(name: str, *args: str, python: Path | str = sys.executable, **env: str) -> Outcome:
    """Runs pytest and counts its tests; a run that ends badly without a failed test counts as one failure."""
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    succeeded = run([python, "-m", "pytest", "-q", f"--junitxml={report}", "-rs", *args], **env)
    outcome = Outcome()
    if report.exists():
        for suite in xml.etree.ElementTree.parse(report).iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            outcome.failed += bad
            outcome.passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    if not succeeded and outcome.failed == 0:
        outcome.failed = 1
    return outcome


def parallel() -> list[str]:
    """pytest-xdist's arguments; one process per core this run may use."""
    return ["-n", JOBS] if JOBS != "1" else []


def environment(name: str, *packages: str) -> Path | None:
    """The Python of an environment on top of this one, in which some packages, and what they need, go first.

    None where they cannot be had.
    """
    folder = BUILD / name
    python = folder / "bin" / "python"
    if list(folder.glob("lib/python*/site-packages/below.pth")):
        return python
    make: Command = [sys.executable, "-m", "venv", "--clear", "--without-pip", folder]
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, *PIP_INSTALL[3:], *packages]
    if not (run(make) and run(install)):
        return None
    (site,) = folder.glob("lib/python*/site-packages")
    # addsitedir, unlike a path alone, also reads the .pth file of an editable install.
    (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


def install_extras(*extras: str) -> bool:
    """Installs the packages of some of pyproject.toml's extras that are missing."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        groups = tomllib.load(file)["project"]["optional-dependencies"]
    packages = [package for extra in extras for package in groups[extra]]
    return run([*PIP_INSTALL, *(package for package in packages if not package.startswith("lowbit["))])


def tool(name: str) -> str:
    """Path of a program, the one of this virtual environment first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def pybind11_dir() -> str:
    """Folder of pybind11's CMake package."""
    import pybind11

    return str(pybind11.get_cmake_dir())


def oldest_api() -> int:
    """The oldest API of ONNX Runtime, where it is stated; release 1.N offers API N."""
    stated = (ROOT / "custom_ops" / "include" / "lowbit.h").read_text()
    (api,) = re.findall(r"^#define LOWBIT_ORT_API (\d+)$", stated, flags=re.MULTILINE)
    return int(api)


def ort_headers() -> str:
    """Include folder of ONNX Runtime, as the Makefile finds it."""
    found = subprocess.run(
        [ROOT / "tools/setup.sh", "headers"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    )
    return found.stdout.strip()


def configure(folder: Path, *options: str) -> Command:
    """The command that configures a CMake build of the repository."""
    command: list[str | Path] = [tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja"]
    command += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    return [*command, f"-DCMAKE_PREFIX_PATH={pybind11_dir()}", *options]


def install_variant(name: str, *settings: str, **env: str) -> Path | None:
    """Installs lowbit, built with CMake definitions, into build/<name>/site; None when that fails."""
    site = BUILD / name / "site"
    shutil.rmtree(site, ignore_errors=True)
    command: list[str | Path] = [*PIP_INSTALL, "--no-deps", "--no-build-isolation", "--target", site]
    command += ["./ep/wheel", ".", f"--config-settings=build-dir={BUILD / name / 'cmake'}"]
    command += [f"--config-settings=cmake.define.{setting}" for setting in settings]
    return site if run(command, ORT_INCLUDE_DIR=ort_headers(), **env) else None


def built(folder: Path, *targets: str) -> Command:
    """The command that builds a configured folder; without targets, all of it."""
    return [tool("cmake"), "--build", folder, *(["--target", *targets] if targets else [])]


def ctest(folder: Path, *options: str) -> Command:
    """The command that runs the C++ tests of a build."""
    return [tool("ctest"), "--test-dir", folder, "--output-on-failure", "--parallel", JOBS, *options]


def cached_compiler() -> dict[str, str]:
    """The environment in which equal files are compiled once, whichever build they belong to.

    Empty where ccache is not installed and could not be. Paths below the repository do not count: a source
    lies as deep in an unpacked sdist as in the repository.
    """
    if not run(["tools/setup.sh", "program", "ccache", "ccache"]):
        return {}
    return {
        # To the cache, the same compiler by another name is another: the Makefile names one for all builds.
        "CXX": os.environ.get("CXX") or shutil.which("g++") or "c++",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CCACHE_DIR": str(ROOT / ".cache/ccache"),
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }
