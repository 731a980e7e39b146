"""Builds the wheels onnxruntime-ep-lowbit and lowbit, checks them, and names them by what they need.

    build_wheels.py [--machine x86_64|aarch64] [--compiler g++|zig] [--sdist] [--outdir dist]
                    [--define NAME=VALUE]...

writes DIR/onnxruntime_ep_lowbit-VERSION-py3-none-manylinux_2_N_MACHINE.whl, DIR/lowbit-VERSION-cpXY-... for
the version of the Python that runs this script, and DIR/MACHINE/liblowbit.so, the library in the former, for
programs without Python. The tag is what the binaries need: N is the newest symbol version GLIBC_2.N that one
of them asks for, and they may link nothing but glibc. g++ builds for the glibc of this machine. zig, from the
package ziglang of PyPI, is Clang with the headers of every glibc, and is asked for that of onnxruntime's own
wheels.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import platform
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
PACKAGES = ("./ep/wheel", ".")
GLIBC = "2.28"  # that of the wheels of onnxruntime
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
HERE = platform.machine()

# Compiled for another machine with the headers of the Python that runs this script. They are the same on
# every machine but for pyconfig.h, and of that the others read what configure found out about types.
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


@dataclasses.dataclass(frozen=True)
class Target:
    """What the wheels are built for, and with which compiler: zig or g++."""

    machine: str
    compiler: str

    @property
    def is_other(self) -> bool:
        """Whether it is another machine than this one."""
        return self.machine != HERE

    @property
    def triple(self) -> str:
        """How compilers call it."""
        return f"{self.machine}-linux-gnu"

    @property
    def build(self) -> Path:
        """The CMake build of both packages."""
        return ROOT / "build" / f"wheel-{self.machine}-{self.compiler}"

    @property
    def extension_suffix(self) -> str:
        """The ending of this Python's extension modules there, such as .cpython-311-aarch64-linux-gnu.so."""
        here = str(sysconfig.get_config_var("EXT_SUFFIX"))
        there = re.sub(r"-[^-]+-linux-gnu\.so$", f"-{self.triple}.so", here)
        if self.triple not in there or sys.implementation.name != "cpython":
            raise WheelError(f"expected a CPython of a Linux with glibc, whose modules end in {here}")
        return there


def install_compiler(target: Target) -> list[str]:
    """Installs what is missing of the compiler; returns the words that call it."""
    packages = ["wheel", *(["ziglang"] if target.compiler == "zig" else [])]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--retries", "5", *packages])
    if target.compiler == "zig":
        spec = importlib.util.find_spec("ziglang")
        assert spec is not None
        zig = Path(str(spec.origin)).with_name("zig")
        return [str(zig), "c++", "-target", f"{target.triple}.{GLIBC}"]
    if not target.is_other:
        return ["g++"]
    program = f"{target.triple}-g++"
    run([str(ROOT / "tools" / "setup.sh"), "program", program, f"g++-{target.triple}"])
    return [program]


def python_headers(target: Target) -> Path:
    """The include folder of this Python, for a compiler that has no system headers of this machine.

    Debian's pyconfig.h includes that of the machine it is compiled for: a copy of the folder has this
    machine's. Only the extension module sees it, so that all else is compiled as without Python, and a
    compiler cache knows it.
    """
    include = Path(sysconfig.get_path("include"))
    here = include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name / "pyconfig.h"
    if not here.exists():
        return include
    given = target.build / "include" / include.name
    shutil.copytree(include, given, dirs_exist_ok=True)
    shutil.copy2(here, given)
    return given


def check_headers(compiler: Sequence[str], include: Path) -> None:
    """Refuses headers whose pyconfig.h says of types what is not so on the other machine."""
    words = [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{include}", "-"]
    done = subprocess.run(words, input=CHECK, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise WheelError(f"the headers in {include} do not serve for the other machine:\n{done.stderr}")


def zig_programs(target: Target, compiler: Sequence[str]) -> dict[str, Path | str]:
    """CMake's names for zig's compiler and archiver, as programs of one word."""
    folder = target.build / "zig"
    folder.mkdir(parents=True, exist_ok=True)
    defines: dict[str, Path | str] = {"CMAKE_SHARED_LINKER_FLAGS": "-s", "CMAKE_MODULE_LINKER_FLAGS": "-s"}
    calls = {"CXX_COMPILER": compiler, "AR": [compiler[0], "ar"], "RANLIB": [compiler[0], "ranlib"]}
    for name, words in calls.items():
        path, text = folder / name.lower(), f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
        # To a compiler cache, a newer file is another compiler.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            path.chmod(0o755)
        defines[f"CMAKE_{name}"] = path
    if target.is_other:
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": target.machine}
    return defines


def build(folder: Path, target: Target, compiler: Sequence[str], settings: Sequence[str]) -> list[Path]:
    """The wheels as the compiler leaves them, with tags that promise nothing about glibc."""
    import pybind11

    include = python_headers(target)
    defines: dict[str, Path | str] = {
        "LOWBIT_CUDA": "OFF",
        "Python_INCLUDE_DIR": include,
        # CMake looks for packages below a cross compiler's own root.
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    env = {"ORT_INCLUDE_DIR": output_of(ROOT / "tools" / "setup.sh", "headers").strip()}
    if target.is_other:
        check_headers(compiler, include)
        defines["PYBIND11_USE_CROSSCOMPILING"] = "ON"
        env |= {"SETUPTOOLS_EXT_SUFFIX": target.extension_suffix}
        env |= {"_PYTHON_HOST_PLATFORM": f"linux-{target.machine}"}
    if target.compiler == "zig":
        defines |= zig_programs(target, compiler)
    elif not target.is_other:
        env["CXX"] = os.environ.get("CXX", "g++")
    else:
        defines["CMAKE_TOOLCHAIN_FILE"] = ROOT / "cmake" / f"{target.triple}.cmake"
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    words += ["--wheel-dir", str(folder), f"--config-settings=build-dir={target.build}"]
    if target.compiler == "zig":
        # The linker did, and this machine's program may not know the other's files.
        words.append("--config-settings=install.strip=false")
    settings = [*(f"{name}={value}" for name, value in defines.items()), *settings]
    run([*words, *(f"--config-settings=cmake.define.{setting}" for setting in settings), *PACKAGES], **env)
    return sorted(folder.glob("*.whl"))


def glibc_needed(binary: Path, machine: str) -> int:
    """The N of the newest symbol version GLIBC_2.N that a binary asks for.

    Raises:
        WheelError: for anything that is not a library for the machine that needs glibc alone.
    """
    header = output_of("readelf", "-h", binary)
    if "ELF64" not in header or MACHINES[machine] not in header:
        raise WheelError(f"{binary.name} is no library for {machine}:\n{header}")
    dynamic = output_of("readelf", "-dW", binary)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    glibc = re.compile(r"lib(c|m|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d")
    foreign = [name for name in needed if not glibc.fullmatch(name)]
    if foreign:
        raise WheelError(f"{binary.name} links {', '.join(foreign)}, which is not glibc")
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        raise WheelError(f"{binary.name} looks for libraries in a folder of the machine that built it")
    versions = re.findall(r"Name: (\w+?)_([\d.]+)", output_of("readelf", "-VW", binary))
    others = {name for name, _ in versions if name != "GLIBC"}
    if others:
        raise WheelError(f"{binary.name} asks for symbol versions of {', '.join(sorted(others))}")
    return max(int(version.split(".")[1]) for _, version in versions)


def check(wheels: Sequence[Path], unpacked: Path, target: Target) -> int:
    """Looks at the binaries in the wheels; returns the N of manylinux_2_N that they fulfil."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    found = sorted(unpacked.rglob("*.so"))
    expected = {"liblowbit.so", f"_native{target.extension_suffix}"}
    if {path.name for path in found} != expected:
        raise WheelError(
            f"expected {', '.join(sorted(expected))} in the wheels, found {', '.join(p.name for p in found)}"
        )
    # 2.17 is the first glibc for 64-bit ARM, and the oldest that any wheel for x86-64 is built for.
    return max(17, *(glibc_needed(path, target.machine) for path in found))


def tagged(wheel: Path, platform_tag: str, outdir: Path) -> Path:
    """The wheel under its true tag, moved into a folder."""
    words = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag, str(wheel)]
    name = output_of(*words).split()[-1]
    machine = platform_tag.split("_", 3)[-1]
    for older in outdir.glob(f"{name.partition('-')[0]}-*_{machine}.whl"):
        older.unlink()
    return Path(shutil.move(wheel.with_name(name), outdir / name))


def make(target: Target, outdir: Path, settings: Sequence[str]) -> None:
    """Builds, checks, names the wheels."""
    compiler = install_compiler(target)
    outdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = build(Path(folder), target, compiler, settings)
        unpacked = Path(folder) / "unpacked"
        newest = check(wheels, unpacked, target)
        for wheel in wheels:
            print(tagged(wheel, f"manylinux_2_{newest}_{target.machine}", outdir))
        library = outdir / target.machine / "liblowbit.so"
        library.parent.mkdir(exist_ok=True)
        shutil.copy2(unpacked / "onnxruntime_ep_lowbit" / library.name, library)
    print(f"{library}\nneed glibc 2.{newest} or newer on {target.machine}, and nothing else")


def make_sdists(outdir: Path) -> None:
    """The sources of both packages."""
    run([sys.executable, "-m", "pip", "install", "--quiet", "--retries", "5", "build"])
    for package in PACKAGES:
        run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(outdir), package])


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=MACHINES, default=HERE)
    parser.add_argument("--compiler", choices=("g++", "zig"), default="g++")
    parser.add_argument("--sdist", action="store_true", help="write the sources of both, too")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    parser.add_argument("--define", action="append", default=[], help="a CMake variable: NAME=VALUE")
    options = parser.parse_args()
    try:
        if options.sdist:
            make_sdists(options.outdir)
        make(Target(options.machine, options.compiler), options.outdir, options.define)
    except WheelError as error:
        print(f"build_wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
