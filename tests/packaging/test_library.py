"""What the built package consists of: one library with few exports, and everything in the wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import lowbit_library, require_native

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")

SANITIZED = bool(os.environ.get("LOWBIT_SANITIZED"))


def output_of(program: str, *args: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} (binutils) is not installed")
    return subprocess.run([program, *args], check=True, text=True, capture_output=True).stdout


def native_module() -> str:
    spec = importlib.util.find_spec("lowbit._native")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


@pytest.mark.skipif(SANITIZED, reason="a sanitizer adds symbols of its own")
@pytest.mark.parametrize(
    ("path_of", "only"),
    [
        (lowbit_library, {"RegisterCustomOps", "CreateEpFactories", "ReleaseEpFactory"}),
        (native_module, {"PyInit__native"}),
    ],
)
def test_exports_nothing_else(path_of: Callable[[], str], only: set[str]) -> None:
    """A visible libstdc++ would bind to the copy of another library in the process."""
    require_native()
    lines = output_of("nm", "-D", "--defined-only", path_of()).splitlines()
    # Version nodes of the linker script appear as absolute symbols (type A).
    names = {line.split()[-1].split("@")[0] for line in lines if line.split()[1] != "A"}
    assert names == only


@pytest.mark.parametrize("path_of", [lowbit_library, native_module])
def test_asks_the_system_for_no_network(path_of: Callable[[], str]) -> None:
    require_native()
    wanted = {line.split()[-1].split("@")[0] for line in output_of("nm", "-D", "-u", path_of()).splitlines()}
    assert "malloc" in wanted
    network = {"socket", "connect", "bind", "listen", "accept", "send", "sendto", "recv", "getaddrinfo"}
    assert not wanted & {*network, "gethostbyname", "sendmsg", "recvmsg"}


@pytest.mark.skipif(SANITIZED, reason="a sanitizer needs the shared libstdc++")
def test_needs_only_the_c_library() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-d", lowbit_library()))
    allowed = re.compile(r"lib(c|m|pthread|dl|rt)\.so\.\d+|ld-linux.*")
    assert not [name for name in needed if not allowed.fullmatch(name)]


def test_is_not_marked_executable_stack() -> None:
    headers = output_of("readelf", "-lW", lowbit_library())
    stack = next(line for line in headers.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack


def test_wheel_holds_everything() -> None:
    distribution = importlib.metadata.distribution("lowbit")
    direct = distribution.read_text("direct_url.json") or ""
    if '"editable": true' in direct:
        pytest.skip("an editable install; `make test FULL=1` installs the wheel and repeats this")
    names = {str(path) for path in distribution.files or []}
    for expected in [
        "lowbit/__init__.py",
        "lowbit/liblowbit.so",
        "lowbit/models/__init__.py",
        "lowbit/cli/__init__.py",
        "lowbit/templates/report.html.j2",
    ]:
        assert expected in names
    assert [name for name in names if re.fullmatch(r"lowbit/_native\..*\.so", name)]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert "lowbit" in {entry.name for entry in distribution.entry_points}


def test_runs_as_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "lowbit", "--help"], check=True, text=True, capture_output=True
    )
    for command in ("convert", "inspect", "verify", "run", "bench", "sys"):
        assert command in shown.stdout


def test_library_path_is_absolute() -> None:
    path = Path(lowbit_library())
    assert path.is_absolute()
    assert path.is_file()


def test_one_version_everywhere() -> None:
    root = Path(__file__).resolve().parents[2]
    projects = [
        tomllib.loads((root / path).read_text())["project"]
        for path in ("pyproject.toml", "ep/cuda/wheel/pyproject.toml")
    ]
    version = projects[0]["version"]
    assert projects[1]["version"] == version
    assert projects[1]["dependencies"] == [f"lowbit=={version}"]
    assert f"project(lowbit VERSION {version} " in (root / "CMakeLists.txt").read_text()
