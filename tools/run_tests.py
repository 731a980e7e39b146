"""Runs the tests, and with --full everything that CI checks.

    run_tests.py [-- PYTEST_ARGS]     the tests, those in C++ first
    run_tests.py --full               + lint, generated docs, every ISA level, sanitizers, clang, CUDA, all of
                                      ARM, other onnxruntime versions, a wheel built from the sdist
    run_tests.py --lint               ruff, mypy, clang-format, clang-tidy only
    run_tests.py --format             rewrite the C++ sources with clang-format

A full run is a list of steps. A step passes, fails, or is skipped with a printed reason; the last line adds
up the tests of every pytest run and the other steps: `N passed, N failed`. The exit status is 0 when nothing
failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from test_commands import REPORTS, Outcome, install_extra, parallel, run, tool
from test_steps import (
    ARM_SHORT,
    FULL,
    LINT,
    Step,
    arm_tests,
    arm_tools,
    cxx_files,
    cxx_tests,
    fake_device,
)


def cpu_seconds() -> float:
    """The CPU time of all commands that were run, and of what they ran."""
    times = os.times()
    return times.children_user + times.children_system


def run_steps(steps: list[Step]) -> int:
    """Runs every step, prints a table of them and the closing line; returns the exit status."""
    results: list[tuple[str, Outcome, float, float]] = []
    for name, step in steps:
        print(f"\n=== {name}", flush=True)
        start, cpu_start = time.monotonic(), cpu_seconds()
        try:
            outcome = step()
        except Exception as error:  # a step that cannot even start is a failure, and the others still run
            print(f"{type(error).__name__}: {error}")
            outcome = Outcome(failed=1)
        results.append((name, outcome, time.monotonic() - start, cpu_seconds() - cpu_start))
    print("\n=== summary")
    for name, outcome, seconds, cpu in results:
        state = f"skipped: {outcome.skipped}" if outcome.skipped else "FAILED" if outcome.failed else "ok"
        counts = f"{outcome.passed:6} passed {outcome.failed:4} failed"
        print(f"{name:32} {seconds:6.0f} s {cpu:6.0f} s of CPU  {counts}  {state}")
    passed = sum(outcome.passed for _, outcome, _, _ in results)
    failed = sum(outcome.failed for _, outcome, _, _ in results)
    closing = f"{passed} passed, {failed} failed"
    (REPORTS / "summary.txt").write_text(closing + "\n")
    print(closing, flush=True)
    return 1 if failed else 0


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--lint", action="store_true")
    parser.add_argument("--format", action="store_true")
    parser.add_argument(
        "--only", action="append", default=[], help="of --full or --lint, the steps whose name contains this"
    )
    parser.add_argument("pytest_args", nargs="*")
    options = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    if (options.full or options.lint or options.format) and not install_extra("dev"):
        return 1
    if options.format:
        return 0 if run([tool("clang-format"), "-i", *cxx_files()]) else 1
    if options.full or options.lint:
        steps = FULL if options.full else LINT
        return run_steps([s for s in steps if not options.only or any(word in s[0] for word in options.only)])
    if cxx_tests().failed:
        return 1
    missing = arm_tools(install=False)
    if missing:
        print(f"skipped: ARM kernels: {missing}")
    elif arm_tests(ARM_SHORT).failed:
        return 1
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", *parallel(), *options.pytest_args]
    return 0 if run(tests, **fake_device()) else 1


if __name__ == "__main__":
    sys.exit(main())
