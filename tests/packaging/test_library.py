"""What the built package consists of: one library with few exports, and everything in the wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import lowbit_library, require_native

require_native()
import lowbit  # noqa: E402
import onnxruntime_ep_lowbit  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_PACKAGE = "onnxruntime-ep-lowbit"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")

SANITIZED = bool(os.environ.get("LOWBIT_SANITIZED"))


def output_of(program: str, *args: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"{program} (binutils) is not installed")
    return subprocess.run([program, *args], check=True, text=True, capture_output=True).stdout


def installed_files(package: str) -> set[str]:
    """The files of a distribution; skips where it is not a wheel's."""
    distribution = importlib.metadata.distribution(package)
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        pytest.skip("an editable install; `make test FULL=1` installs the wheel and repeats this")
    return {str(path) for path in distribution.files or ()}


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
    names = installed_files("lowbit")
    for expected in [
        "lowbit/__init__.py",
        "lowbit/models/__init__.py",
        "lowbit/cli/__init__.py",
        "lowbit/templates/report.html.j2",
    ]:
        assert expected in names
    assert [name for name in names if re.fullmatch(r"lowbit/_native\..*\.so", name)]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} <= {"lowbit", "..", "bin"}
    assert not [name for name in names if "liblowbit" in name], "the library is the other package's"
    assert "lowbit" in {entry.name for entry in importlib.metadata.entry_points(group="console_scripts")}


def test_the_library_has_a_package_of_its_own() -> None:
    names = {name for name in installed_files(LIBRARY_PACKAGE) if not name.endswith(".pyc")}
    assert {name for name in names if ".dist-info" not in name} == {
        f"onnxruntime_ep_lowbit/{name}" for name in ("__init__.py", "py.typed", "liblowbit.so")
    }
    assert Path(lowbit_library()).parent == Path(onnxruntime_ep_lowbit.__file__).resolve().parent


def test_no_package_wants_a_certain_onnxruntime() -> None:
    """As ONNX Runtime asks of plugins: a second distribution would overwrite files of the first."""
    packages = ("lowbit", LIBRARY_PACKAGE)
    wanted = [text for package in packages for text in importlib.metadata.requires(package) or ()]
    stated = [text for text in wanted if text.startswith("onnxruntime") and "extra ==" not in text]
    assert stated == [f"{LIBRARY_PACKAGE}=={onnxruntime_ep_lowbit.__version__}"]


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
    version = onnxruntime_ep_lowbit.__version__
    assert require_native().version == lowbit.__version__ == version
    assert importlib.metadata.version("lowbit") == importlib.metadata.version(LIBRARY_PACKAGE) == version


def test_one_oldest_onnxruntime_everywhere() -> None:
    stated = (ROOT / "custom_ops/include/lowbit.h").read_text()
    (api,) = re.findall(r"^#define LOWBIT_ORT_API (\d+)$", stated, flags=re.MULTILINE)
    assert require_native().required_api == int(api)
    wanted = importlib.metadata.requires("lowbit") or ()
    (extra,) = (text for text in wanted if text.startswith("onnxruntime>"))
    assert extra.replace(" ", "").partition(";")[0] == f"onnxruntime>=1.{api}"


def test_without_onnxruntime_one_error_says_what_to_install(tmp_path: Path) -> None:
    """What needs none runs. (tests/packaging/environments.py tries it in an environment that has none.)"""
    model = ROOT / "models/digits/digits_w8a8.onnx"
    hidden = "import sys; sys.modules['onnxruntime'] = None; from lowbit.cli import main; main()"
    output = tmp_path / "converted.onnx"
    bench = ("bench", model, "--against", model)
    for words in (("convert", model, "-o", output), ("run", model, "--random"), bench):
        done = subprocess.run([sys.executable, "-c", hidden, *words], text=True, capture_output=True)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2, words
        assert "pip install 'lowbit[onnxruntime]'" in line
        assert "onnxruntime-gpu" in line
    assert not output.exists()
    shown = subprocess.run([sys.executable, "-c", hidden, "sys"], text=True, capture_output=True)
    assert shown.returncode == 0, shown.stderr
    assert "not installed" in shown.stdout
