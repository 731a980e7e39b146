"""Python for 64-bit ARM on another machine: Debian's arm64 packages and PyPI's wheels, under qemu-user.

    aarch64_python.py setup [WHEEL...]         fetches what is missing; installs the wheels of lowbit there
    aarch64_python.py run [--cpu CPU] ARG...   the interpreter, with these arguments

Nothing is installed on this machine: everything goes into .cache/aarch64/python, apt's own state too. `setup`
ends with 3 and the reason where this machine cannot have it (no emulator, no apt, no network). The versions
of lowbit's dependencies are those of the Python that runs this script, so that both sides run the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "aarch64" / "python"
DEBIAN = FOLDER / "root"
DEPENDENCIES = FOLDER / "packages"
LOWBIT = FOLDER / "lowbit"
EMULATOR = "qemu-aarch64"
CANNOT = 3  # the exit status of `setup` where the reason is this machine

# ONNX Runtime asks this file for the kind of core, and does not survive an answer about an x86 CPU. Which
# instructions there are it asks the emulator.
CPUINFO = """\
processor	: 0
BogoMIPS	: 100.00
Features	: fp asimd evtstrm crc32 cpuid
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd03
CPU revision	: 4

"""


class CannotError(Exception):
    """What this machine lacks."""


def interpreter() -> Path | None:
    """Debian's Python for ARM, when it was fetched."""
    return next(iter(sorted(DEBIAN.glob("usr/bin/python3.[0-9]*"))), None)


def command(*arguments: str | Path, cpu: str) -> list[str]:
    """The command that runs the interpreter as a CPU, such as cortex-a53."""
    found = interpreter()
    assert found is not None, "`setup` comes first"
    words = [
        EMULATOR,
        "-cpu",
        cpu,
        "-L",
        DEBIAN,
        "-E",
        f"PYTHONPATH={LOWBIT}:{DEPENDENCIES}",
        found,
        *arguments,
    ]
    return [str(word) for word in words]


def apt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Debian's apt-get for arm64: this machine's archive, and a state in which nothing is installed."""
    for sub in ("lists/partial", "archives/partial"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Debug::NoLocking": "true",
        "Dir::Cache::archives": folder / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
    }
    given = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    return subprocess.run(["apt-get", "-qq", *given, *words], text=True, capture_output=True, check=False)


def fetch_debian() -> None:
    """Debian's Python for ARM with what extension modules link, unpacked."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise CannotError(f"{program} is not installed: Python for ARM comes from Debian's packages")
    work = FOLDER / "unfinished"
    shutil.rmtree(work, ignore_errors=True)
    state, made = work / "apt", work / "root"
    apt(state, "update")  # a source without arm64 makes it fail, which is none of our business
    fetched = apt(state, "install", "-y", "--download-only", "python3", "libstdc++6")
    archives = sorted((state / "archives").glob("*.deb"))
    if fetched.returncode != 0 or not archives:
        raise CannotError("apt gives no Python for arm64: " + " ".join(fetched.stderr.split()[-40:]))
    for archive in archives:
        subprocess.run(["dpkg-deb", "-x", archive, made], check=True)
    (made / "proc").mkdir(exist_ok=True)
    (made / "proc" / "cpuinfo").write_text(CPUINFO)
    made.rename(DEBIAN)
    shutil.rmtree(work)


def ask(code: str) -> str:
    """What a line of Python prints there."""
    words = command("-S", "-c", code, cpu="cortex-a53")
    return subprocess.run(words, check=True, text=True, capture_output=True).stdout.strip()


def version() -> str:
    """The version of the language, such as 3.11."""
    return ask("import sys; print('%d.%d' % sys.version_info[:2])")


def pip_install(target: Path, *packages: str | Path) -> None:
    """Puts wheels for that Python into a folder; pip refuses those whose tags do not fit it.

    Raises:
        CalledProcessError: if pip does.
    """
    libc = ask("import os; print(os.confstr('CS_GNU_LIBC_VERSION'))")  # such as "glibc 2.36"
    newest = int(libc.split(".")[1])
    fits = [f"manylinux_2_{minor}_aarch64" for minor in range(newest, 16, -1)] + ["manylinux2014_aarch64"]
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "5",
        "--no-compile",
        "--only-binary=:all:",
    ]
    words += ["--implementation", "cp", "--python-version", version()]
    words += [word for name in fits for word in ("--platform", name)]
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run([*words, "--target", str(partial), *map(str, packages)], check=True)
    # Compiled here, which is quicker than there; less what few programs import.
    seldom = "/tests?/|/backend/|/sympy/|/mpmath/"
    compiler = [sys.executable, "-m", "compileall", "-q", "-x", seldom, "-s", partial, "-p", target, partial]
    subprocess.run([str(word) for word in compiler], check=False)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def requirements() -> list[str]:
    """What lowbit depends on, of the versions that are installed here."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        stated = tomllib.load(file)["project"]["dependencies"]
    names = [*(text.partition(">")[0].strip() for text in stated), "onnxruntime"]
    return [f"{name}=={metadata.version(name)}" for name in names]


def setup(wheels: Sequence[Path]) -> None:
    """Fetches what is missing, installs the wheels."""
    if shutil.which(EMULATOR) is None:
        raise CannotError(f"{EMULATOR} is not installed (Debian package qemu-user)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if interpreter() is None:
        fetch_debian()
    wanted = requirements()
    listed = DEPENDENCIES / "requirements.txt"
    if not listed.exists() or listed.read_text().split() != wanted:
        try:
            pip_install(DEPENDENCIES, *wanted)
        except subprocess.CalledProcessError as error:
            raise CannotError(
                f"PyPI has not all of {', '.join(wanted)} for it; pip says why above"
            ) from error
        listed.write_text("\n".join(wanted) + "\n")
    if not wheels:
        return
    here = ".".join(platform.python_version_tuple()[:2])
    if version() != here:
        raise CannotError(
            f"Debian's Python for ARM is {version()}, this one is {here}: a wheel built here does not fit it"
        )
    pip_install(LOWBIT, "--no-deps", *(wheel.resolve() for wheel in wheels))


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("setup").add_argument("wheels", nargs="*", type=Path)
    commands.add_parser("run").add_argument("--cpu", default="cortex-a53")
    ours, theirs = sys.argv[1:], []
    if ours[:1] == ["run"]:  # what follows is the interpreter's, options too
        behind = 3 if ours[1:2] == ["--cpu"] else 1
        ours, theirs = ours[:behind], ours[behind:]
    options = parser.parse_args(ours)
    if options.action == "run":
        if interpreter() is None:
            parser.error("`aarch64_python.py setup` comes first")
        words = command(*theirs, cpu=options.cpu)
        os.execvp(words[0], words)
    try:
        setup(options.wheels)
    except CannotError as error:
        print(f"aarch64_python: {error}", file=sys.stderr)
        return CANNOT
    return 0


if __name__ == "__main__":
    sys.exit(main())
