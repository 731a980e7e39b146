"""How much of an app lowbit's static library is: everything, and what single models need.

    python benchmarks/library_size.py [--preset minimal-linux-aarch64] [NAME=required_operators.config ...]

Builds the library for each config of `lowbit export --to mobile` and once without one, links what
RegisterCustomOps reaches into a shared library of its own, as an app's linker would (--gc-sections), strips
that, and prints a table.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORTS = ROOT / "custom_ops" / "ort" / "exports.map"
STATIC = ["-static-libstdc++", "-static-libgcc"]
# Where libstdc++ is linked statically, its terminate handler brings a demangler of 47 KB along, to print the
# name of an exception that nobody caught. An app that defines the handler goes without.
QUIET = ROOT / "examples" / "mobile" / "quiet_terminate.cc"
RUNTIMES = {
    "shared C++ runtime": [],
    "static C++ runtime": STATIC,
    "static, quiet terminate handler": [*STATIC, str(QUIET)],
}
# Pages of 16 KiB, as Android asks for; 64 KiB, GNU ld's default for ARM, would show in the sizes of files.
LINK = ["-shared", "-Wl,-u,RegisterCustomOps", "-Wl,--gc-sections", "-Wl,-z,max-page-size=16384"]
LINK += [f"-Wl,--version-script={EXPORTS}", "-Wl,--exclude-libs,ALL", "-Wl,--no-undefined"]


def build(preset: str, name: str, config: Path | None) -> Path:
    """The static library for one config, or with everything."""
    folder = ROOT / "build" / f"size-{name}"
    configure = ["cmake", "--preset", preset, "-B", folder]
    configure += [f"-DLOWBIT_OPS_CONFIG={config.resolve() if config else ''}"]
    for command in (configure, ["cmake", "--build", folder]):
        subprocess.run([str(word) for word in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "custom_ops" / "liblowbit.a"


def linked(archive: Path, compiler: str, strip: str, runtime: list[str]) -> int:
    """Bytes of a stripped library of what an app would link."""
    library = archive.with_suffix(".so")
    subprocess.run([compiler, *LINK, *runtime, str(archive), "-o", str(library)], check=True)
    subprocess.run([strip, "--strip-all", str(library)], check=True)
    return library.stat().st_size


def main() -> None:
    """Builds, links, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="minimal-linux-aarch64")
    parser.add_argument("--prefix", default="aarch64-linux-gnu-", help="of the compiler's programs")
    parser.add_argument("configs", nargs="*", metavar="NAME=CONFIG")
    options = parser.parse_args()
    compiler, strip = (shutil.which(options.prefix + name) for name in ("g++", "strip"))
    if compiler is None or strip is None:
        parser.error(f"{options.prefix}g++ and {options.prefix}strip are not installed")
    version = subprocess.run([compiler, "--version"], check=True, text=True, capture_output=True)
    print(f"{version.stdout.splitlines()[0]}, MinSizeRel, stripped, KB of 1000 bytes\n")
    print(f"| Library | {' | '.join(RUNTIMES)} |\n| --- |{' --- |' * len(RUNTIMES)}")
    wanted: list[tuple[str, Path | None]] = [("everything", None)]
    wanted += [(name, Path(path)) for name, _, path in (text.partition("=") for text in options.configs)]
    for name, config in wanted:
        archive = build(options.preset, name, config)
        sizes = [linked(archive, compiler, strip, runtime) for runtime in RUNTIMES.values()]
        print(f"| {name} | {' | '.join(f'{size / 1000:.0f}' for size in sizes)} |")


if __name__ == "__main__":
    main()
