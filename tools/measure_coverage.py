"""Which lines and branches of the library and of the package the tests run: `make coverage`.

C++ is built by clang with counters (LOWBIT_COVERAGE) but for the kernels for one instruction set, of which
tests compare every element. Python is watched by the package coverage, in the processes that tests start
too, and has PyTorch, in an environment of its own. Written are benchmarks/results/coverage.md and .json:
figures by folder, and every place that nothing runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_commands import BUILD, ROOT, ctest, environment, install_variant, parallel, run, tool

FOLDER = BUILD / "coverage"
PROFILES = FOLDER / "profiles"
PACKAGES = ("coverage>=7.10", "scikit-learn", "torch")
# The numerics of kernels take most of the time of all tests; these run all of core.
TESTS = (
    *(
        f"tests/{folder}"
        for folder in ("converter", "dialects", "ep", "hostile", "models", "quantize", "smoke")
    ),
    *(f"tests/{folder}" for folder in ("tools", "finetune", "releases")),
    *(
        f"tests/numerics/test_{each}.py"
        for each in ("definitions", "elementwise", "fed_matmul", "normalization")
    ),
)
CXX_FOLDERS = (
    "custom_ops/core",
    "custom_ops/ort",
    "custom_ops/python",
    "ep/region",
    "ep/ort",
    "ep/cpu",
    "ep/entry.cc",
)
LINES, BRANCHES = 95.0, 90.0
"""What is asked of the converter, of core and of ep/region, in percent."""
ASKED = ("custom_ops/core", "ep/region", "converter/lowbit")


@dataclass
class Covered:
    """Counts of one file, and the lines of it that nothing runs."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0
    missed: tuple[int, ...] = ()


def share(part: int, whole: int) -> float:
    """In percent; of nothing, all."""
    return 100.0 * part / whole if whole else 100.0


def build() -> Path | None:
    """The site folder of the build with counters."""
    settings = ("LOWBIT_COVERAGE=ON", "LOWBIT_TESTS=ON")
    return install_variant("coverage", *settings, CXX="clang++")


def run_tests(python: Path, site: Path, chosen: tuple[str, ...]) -> bool:
    """Runs the tests with all counters on."""
    shutil.rmtree(PROFILES, ignore_errors=True)
    PROFILES.mkdir(parents=True)
    settings = PROFILES / "coveragerc"
    # Commands that a signal meets in native code end by os._exit.
    settings.write_text(
        f"[run]\nbranch = true\nparallel = true\nsource = {site / 'lowbit'}\npatch = subprocess, _exit\n"
        f"data_file = {PROFILES / 'python'}\ndisable_warnings = no-data-collected\n",
        encoding="utf-8",
    )
    variables = {
        "LLVM_PROFILE_FILE": str(PROFILES / "%4m.profraw"),  # processes add up in four files of each library
        "LOWBIT_SITE": str(site),
        "LOWBIT_FAKE_DEVICE": str(FOLDER / "cmake/ep/liblowbit_fake_device.so"),
    }
    succeeded = run(ctest(FOLDER / "cmake"), **variables)
    command: list[str | Path] = [
        python,
        "-m",
        "coverage",
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        "-q",
        *parallel(),
        *chosen,
    ]
    return run(command, **variables) and succeeded


def cxx_coverage() -> dict[str, Covered]:
    """Counts by file, as llvm-cov tells them."""
    merged = PROFILES / "all.profdata"
    run([llvm("llvm-profdata"), "merge", "-sparse", *PROFILES.glob("*.profraw"), "-o", merged])
    cmake = FOLDER / "cmake"
    objects = [*cmake.glob("custom_ops/*.so"), *cmake.glob("ep/*.so")]
    objects += [path for path in cmake.glob("*/lowbit_*test*") if path.is_file() and os.access(path, os.X_OK)]
    command: list[str | Path] = [
        llvm("llvm-cov"),
        "export",
        "-format=text",
        f"-instr-profile={merged}",
        objects[0],
    ]
    for each in objects[1:]:
        command += ["-object", each]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {}
    for file in json.loads(done.stdout)["data"][0]["files"]:
        path = (cmake / file["filename"]).resolve()  # a compiler's cache makes them relative
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if not name.startswith(CXX_FOLDERS) or "/tests/" in name:
            continue
        lines, branches = file["summary"]["lines"], file["summary"]["branches"]
        found[name] = Covered(lines["count"], lines["covered"], branches["count"], branches["covered"],
                              tuple(missed_lines(file["segments"])))  # fmt: skip
    return found


def llvm(name: str) -> str:
    """A program of clang's release, which Debian gives a number."""
    version = subprocess.run(["clang", "-dumpversion"], check=True, capture_output=True, text=True).stdout
    numbered = f"{name}-{version.split('.')[0]}"
    return numbered if shutil.which(numbered) else tool(name)


def missed_lines(segments: Iterable[list[Any]]) -> Iterable[int]:
    """The lines at which a stretch of code starts that never ran."""
    seen = set()
    for line, _, count, has_count, is_entry, *_ in segments:
        if has_count and is_entry and count == 0 and line not in seen:
            seen.add(line)
            yield line


def python_coverage(python: Path, site: Path) -> dict[str, Covered]:
    """Counts by file, as the package coverage tells them."""
    settings, told = PROFILES / "coveragerc", PROFILES / "python.json"
    base: list[str | Path] = [python, "-m", "coverage"]
    run([*base, "combine", "-q", f"--rcfile={settings}", "--keep", str(PROFILES)])
    run([*base, "json", "-q", f"--rcfile={settings}", "-o", str(told)])
    found = {}
    for name, file in json.loads(told.read_text(encoding="utf-8"))["files"].items():
        path = Path(name) if Path(name).is_absolute() else ROOT / name
        inside = path.relative_to(site / "lowbit").as_posix()
        if inside.startswith("models/"):
            continue  # builders of benchmarks' networks, no part of what users run
        totals = file["summary"]
        found[f"converter/lowbit/{inside}"] = Covered(
            totals["num_statements"], totals["covered_lines"],
            totals["num_branches"], totals["covered_branches"],
            tuple(file["missing_lines"]),
        )  # fmt: skip
    return found


def folder_of(name: str) -> str:
    """The row that a file counts in."""
    parts = name.split("/")
    return "/".join(parts[: 3 if parts[0] == "converter" and len(parts) > 3 else 2])


def stretches(lines: Iterable[int]) -> str:
    """Line numbers with neighbours joined: "3, 7..9"."""
    texts: list[str] = []
    first = last = 0
    for line in [*sorted(lines), 0]:
        if last and line != last + 1:
            texts.append(str(first) if first == last else f"{first}..{last}")
            first = line
        first, last = first or line, line
    return ", ".join(texts)


def report(found: dict[str, Covered], chosen: tuple[str, ...], *, at_once: bool) -> bool:
    """benchmarks/results/coverage.md and .json; whether what is asked for is there."""
    sys.path.insert(0, str(ROOT))
    results: Any = importlib.import_module("benchmarks.results")

    sums: dict[str, Covered] = defaultdict(Covered)
    for name, one in sorted(found.items()):
        for row in {folder_of(name), *(asked for asked in ASKED if name.startswith(f"{asked}/"))}:
            total = sums[row]
            total.lines, total.lines_run = total.lines + one.lines, total.lines_run + one.lines_run
            total.branches, total.branches_run = (
                total.branches + one.branches,
                total.branches_run + one.branches_run,
            )
    table = results.Table("Covered", ["folder", "lines", "run", "branches", "taken", "asked for"])
    enough = True
    for row in sorted(sums, key=lambda each: (each not in ASKED, each)):
        total, is_asked = sums[row], row in ASKED
        lines, branches = share(total.lines_run, total.lines), share(total.branches_run, total.branches)
        enough &= not is_asked or (lines >= LINES and branches >= BRANCHES)
        asked = f"{LINES:.0f} %, {BRANCHES:.0f} %" if is_asked else ""
        table.rows.append([row, total.lines, f"{lines:.1f} %", total.branches, f"{branches:.1f} %", asked])
    missed = results.Table("What no test runs", ["file", "lines"])
    missed.rows = [[name, stretches(one.missed)] for name, one in sorted(found.items()) if one.missed]
    notes = [
        f"Tests: the C++ tests, and {', '.join(chosen)}.{'' if at_once else ' In several runs, added up.'}",
        "C++: the lines at which a stretch of code starts that nothing ran. A branch is a condition "
        "that was true, or that was false. Kernels for one instruction set are not counted: tests compare "
        "each of their elements.",
    ]
    raw = {
        name: [one.lines, one.lines_run, one.branches, one.branches_run]
        for name, one in sorted(found.items())
    }
    results.write("coverage", "Coverage by tests", [table, missed], notes, raw)
    return enough


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--built", action="store_true", help="take build/coverage as it is")
    parser.add_argument("--ran", action="store_true", help="take the counters as they are")
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest is given")
    given = parser.parse_args()
    site: Path | None = FOLDER / "site"
    if not given.built and not given.ran:
        site = build()
    python = environment(f"{FOLDER.name}/python", *PACKAGES)
    if site is None or python is None:
        return 1
    chosen = tuple(given.tests)
    passed = given.ran or run_tests(python, site, chosen)
    enough = report({**cxx_coverage(), **python_coverage(python, site)}, chosen, at_once=not given.ran)
    if not enough:
        print(
            f"less than {LINES:.0f} % of lines or {BRANCHES:.0f} % of branches are covered", file=sys.stderr
        )
    return 0 if passed and enough else 1


if __name__ == "__main__":
    sys.exit(main())
