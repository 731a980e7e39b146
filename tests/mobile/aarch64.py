"""What programs for 64-bit ARM need here: a cross compiler, an emulator, ONNX Runtime's library."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import onnxruntime

from tools.aarch64_python import CPUINFO

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "aarch64"
TRIPLE = "aarch64-linux-gnu"
COMPILER = f"{TRIPLE}-g++"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def missing() -> str | None:
    """What keeps this machine from building and running programs for ARM; None where nothing does."""
    for program in (COMPILER, "qemu-aarch64"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not Path("/usr", TRIPLE, "lib").is_dir():
        return f"the cross compiler's libraries are not in /usr/{TRIPLE}"
    return None


def emulator(libraries: Path, cpu: str = "cortex-a53") -> list[str]:
    """The command that runs a program on a CPU, with the libraries of the cross compiler and of a folder."""
    root = CACHE / "root"
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "cpuinfo").write_text(CPUINFO)
    if not (root / "lib").exists():
        (root / "lib").symlink_to(Path("/usr", TRIPLE, "lib"))
    return ["qemu-aarch64", "-cpu", cpu, "-L", str(root), "-E", f"LD_LIBRARY_PATH={libraries}"]


def onnxruntime_library() -> Path | None:
    """libonnxruntime for ARM, of the release that is installed here, fetched once; None where there is none.

    Its name is the one that programs look for when they start.
    """
    version = onnxruntime.__version__
    folder = CACHE / f"onnxruntime-{version}"
    library = folder / "libonnxruntime.so.1"
    if library.exists():
        return library
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "5", "--no-deps"]
    download += ["--only-binary=:all:", "--dest", str(folder)]
    download += [word for platform in PLATFORMS for word in ("--platform", platform)]
    if subprocess.run([*download, f"onnxruntime=={version}"], check=False).returncode != 0:
        return None
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name.startswith("libonnxruntime.so"):
                partial = library.with_suffix(".part")
                partial.write_bytes(archive.read(name))
                partial.rename(library)
    wheel.unlink()
    return library if library.exists() else None
