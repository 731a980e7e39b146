"""Cross-builds liblowbit and lowbit's wheel for 64-bit ARM Linux, and checks them: `make wheel-aarch64`.

    wheel_aarch64.py [--outdir dist] [--define NAME=VALUE]...

writes DIR/lowbit-VERSION-cpXY-cpXY-manylinux_2_N_aarch64.whl, for the version of the Python that runs this
script, and DIR/aarch64/liblowbit.so, the library in it, for programs without Python. The tag is what the
binaries need: N is the newest symbol version GLIBC_2.N that one of them asks for, and they may link nothing
but glibc.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "aarch64-wheel"
TRIPLE = "aarch64-linux-gnu"
TOOLCHAIN = ROOT / "cmake" / f"{TRIPLE}.cmake"

# Compiled for ARM with the headers of the Python that runs this script. They are the same on every machine
# but for pyconfig.h, and of that the others read what configure found out about types.
CHECK = """\
#include <Python.h>
#include <pthread.h>
#include <sys/types.h>
#include <time.h>
static_assert(sizeof(short) == SIZEOF_SHORT && sizeof(int) == SIZEOF_INT && sizeof(long) == SIZEOF_LONG);
static_assert(sizeof(long long) == SIZEOF_LONG_LONG && sizeof(void*) == SIZEOF_VOID_P);
static_assert(sizeof(size_t) == SIZEOF_SIZE_T && sizeof(wchar_t) == SIZEOF_WCHAR_T);
static_assert(sizeof(float) == SIZEOF_FLOAT && sizeof(double) == SIZEOF_DOUBLE);
static_assert(sizeof(off_t) == SIZEOF_OFF_T && sizeof(time_t) == SIZEOF_TIME_T);
static_assert(sizeof(pid_t) == SIZEOF_PID_T && sizeof(bool) == SIZEOF__BOOL);
static_assert(sizeof(pthread_t) == SIZEOF_PTHREAD_T && sizeof(pthread_key_t) == SIZEOF_PTHREAD_KEY_T);
static_assert(alignof(long) == ALIGNOF_LONG && alignof(size_t) == ALIGNOF_SIZE_T);
#ifdef WORDS_BIGENDIAN
#error "headers of a big-endian Python"
#endif
"""


class WheelError(Exception):
    """Why there is no wheel, or not the one that was meant."""


def output_of(*words: str | Path) -> str:
    """What a program of the cross compiler's prints."""
    return subprocess.run(words, check=True, text=True, capture_output=True).stdout


def run(words: Sequence[str | Path], **env: str) -> None:
    """Runs a command in the repository root, its output going to ours."""
    print("+", " ".join([*(f"{k}={v}" for k, v in env.items()), shlex.join(map(str, words))]), flush=True)
    done = subprocess.run(words, cwd=ROOT, env=os.environ | env, check=False)
    if done.returncode != 0:
        raise WheelError(f"{words[0]} ended with {done.returncode}; what it printed stands above")


def extension_suffix() -> str:
    """How extension modules of this Python are called on ARM, such as .cpython-311-aarch64-linux-gnu.so."""
    here = str(sysconfig.get_config_var("EXT_SUFFIX"))
    there = re.sub(r"-[^-]+-linux-gnu\.so$", f"-{TRIPLE}.so", here)
    if TRIPLE not in there or sys.implementation.name != "cpython":
        raise WheelError(f"expected a CPython of a Linux with glibc, whose modules end in {here}")
    return there


def python_headers() -> Path:
    """The include folder of this Python, for the cross compiler.

    Debian's pyconfig.h includes that of the machine it is compiled for: a copy of the folder has this
    machine's. Only the extension module sees it, so that all else is compiled as without Python, and a
    compiler cache knows it.
    """
    include = Path(sysconfig.get_path("include"))
    here, there = (
        include.parent / triple / include.name / "pyconfig.h"
        for triple in (str(sysconfig.get_config_var("MULTIARCH")), TRIPLE)
    )
    if there.exists() or not here.exists():
        return include
    given = BUILD / "include" / include.name
    shutil.copytree(include, given, dirs_exist_ok=True)
    shutil.copy2(here, given)
    return given


def check_headers(include: Path) -> None:
    """Refuses headers whose pyconfig.h says of types what is not so on ARM."""
    words = [f"{TRIPLE}-g++", "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{include}", "-"]
    done = subprocess.run(words, input=CHECK, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"the headers in {include} do not serve for ARM:\n{done.stderr}")


def build(folder: Path, include: Path, settings: Sequence[str]) -> Path:
    """The wheel as the compiler leaves it, with a tag that promises nothing about glibc."""
    import pybind11

    defines = {
        "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN,
        "LOWBIT_CUDA": "OFF",
        "PYBIND11_USE_CROSSCOMPILING": "ON",
        "Python_INCLUDE_DIR": include,
        # CMake looks for packages below the cross compiler's own root.
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    words += ["--wheel-dir", str(folder), f"--config-settings=build-dir={BUILD}", "."]
    settings = [*(f"{name}={value}" for name, value in defines.items()), *settings]
    words += [f"--config-settings=cmake.define.{setting}" for setting in settings]
    headers = output_of(ROOT / "tools" / "setup.sh", "headers").strip()
    target = {"SETUPTOOLS_EXT_SUFFIX": extension_suffix(), "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    run(words, ORT_INCLUDE_DIR=headers, **target)
    (wheel,) = folder.glob("*.whl")
    return wheel


def glibc_needed(binary: Path) -> int:
    """The N of the newest symbol version GLIBC_2.N that a binary asks for.

    Raises:
        WheelError: for anything that is not a library for ARM that needs glibc alone.
    """
    readelf = f"{TRIPLE}-readelf"
    header = output_of(readelf, "-h", binary)
    if "ELF64" not in header or "AArch64" not in header:
        raise WheelError(f"{binary.name} is no library for 64-bit ARM:\n{header}")
    dynamic = output_of(readelf, "-dW", binary)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    glibc = re.compile(r"lib(c|m|pthread|dl|rt)\.so\.\d+|ld-linux-aarch64\.so\.1")
    foreign = [name for name in needed if not glibc.fullmatch(name)]
    if foreign:
        raise WheelError(f"{binary.name} links {', '.join(foreign)}, which is not glibc")
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        raise WheelError(f"{binary.name} looks for libraries in a folder of the machine that built it")
    versions = re.findall(r"Name: (\w+?)_([\d.]+)", output_of(readelf, "-VW", binary))
    others = {name for name, _ in versions if name != "GLIBC"}
    if others:
        raise WheelError(f"{binary.name} asks for symbol versions of {', '.join(sorted(others))}")
    return max(int(version.split(".")[1]) for _, version in versions)


def check(wheel: Path, unpacked: Path) -> int:
    """Looks at the binaries in a wheel; returns the N of manylinux_2_N that they fulfil."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    found = sorted(unpacked.rglob("*.so"))
    expected = {"liblowbit.so", f"_native{extension_suffix()}"}
    if {path.name for path in found} != expected:
        raise WheelError(
            f"expected {', '.join(sorted(expected))} in the wheel, found {', '.join(p.name for p in found)}"
        )
    return max(17, *(glibc_needed(path) for path in found))  # 2.17 is the first glibc for 64-bit ARM


def tagged(wheel: Path, platform_tag: str, outdir: Path) -> Path:
    """The wheel under its true tag, moved into a folder."""
    words = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag, str(wheel)]
    name = output_of(*words).split()[-1]
    outdir.mkdir(parents=True, exist_ok=True)
    for older in outdir.glob("lowbit-*_aarch64.whl"):
        older.unlink()
    return Path(shutil.move(wheel.with_name(name), outdir / name))


def make(outdir: Path, settings: Sequence[str]) -> Path:
    """Builds, checks, names; returns the wheel."""
    setup = str(ROOT / "tools" / "setup.sh")
    run([setup, "program", f"{TRIPLE}-g++", f"g++-{TRIPLE}"])
    run([sys.executable, "-m", "pip", "install", "--quiet", "--retries", "5", "wheel"])
    include = python_headers()
    check_headers(include)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder), include, settings)
        unpacked = Path(folder) / "unpacked"
        newest = check(wheel, unpacked)
        wheel = tagged(wheel, f"manylinux_2_{newest}_aarch64", outdir)
        library = outdir / "aarch64" / "liblowbit.so"
        library.parent.mkdir(exist_ok=True)
        shutil.copy2(unpacked / "lowbit" / library.name, library)
    print(f"{wheel}\n{library}\nneed glibc 2.{newest} or newer on 64-bit ARM, and nothing else")
    return wheel


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    parser.add_argument("--define", action="append", default=[], help="a CMake variable: NAME=VALUE")
    options = parser.parse_args()
    try:
        make(options.outdir, options.define)
    except WheelError as error:
        print(f"wheel_aarch64: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
