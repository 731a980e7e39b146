"""Runs the tests, and with --full everything that CI checks.

    run_tests.py [-- PYTEST_ARGS]     the tests, those in C++ first
    run_tests.py --full               + lint, generated docs, every ISA level, sanitizers, clang, CUDA, all of
                                      ARM, other onnxruntime versions, a wheel built from the sdist
    run_tests.py --lint               ruff, mypy, clang-format, clang-tidy only
    run_tests.py --format             rewrite the C++ sources with clang-format

A full run is a list of steps. A step passes, fails, or is skipped with a printed reason; the last line adds
up the tests of every pytest run and the other steps: `N passed, N failed`. The exit status is 0 when nothing
failed. Three steps run at a time: most have phases of one process (the last file of a build, collecting
tests) or of none (downloads, servers that start), and two at a time left an eighth of two cores idle. What a
step prints is shown when it ends; until then it is in build/reports.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from test_commands import REPORTS, Outcome, install_extras, parallel, run, tool
from test_steps import (
    AFTER,
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

AT_ONCE = 3


@dataclasses.dataclass
class Running:
    """A step in a process of its own."""

    name: str
    start: float
    printed: Path
    outcome: Path

    def told(self) -> Outcome:
        """What the step came to; one failure where it did not live to say so."""
        return Outcome(**json.loads(self.outcome.read_text())) if self.outcome.exists() else Outcome(failed=1)


def start(name: str, step: Callable[[], Outcome]) -> tuple[int, Running]:
    """Starts a step in a process whose CPU time, with that of all it runs, the system then tells."""
    base = REPORTS / re.sub(r"\W+", "-", name)
    started = Running(name, time.monotonic(), base.with_suffix(".log"), base.with_suffix(".json"))
    started.outcome.unlink(missing_ok=True)
    print(f"... {name}", flush=True)
    process = os.fork()
    if process:
        return process, started
    with open(started.printed, "w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    try:
        outcome = step()
    except Exception as error:  # a step that cannot even start is a failure, and the others still run
        print(f"{type(error).__name__}: {error}", flush=True)
        outcome = Outcome(failed=1)
    started.outcome.write_text(json.dumps(dataclasses.asdict(outcome)))
    sys.stdout.flush()
    os._exit(0)


def run_steps(steps: list[Step]) -> int:
    """Runs every step, prints a table of them and the closing line; returns the exit status."""
    waiting, running = list(steps), dict[int, Running]()
    results: dict[str, tuple[Outcome, float, float]] = {}
    while waiting or running:
        unfinished = {name for name, _ in waiting} | {step.name for step in running.values()}
        ready = (item for item in waiting if not unfinished & set(AFTER.get(item[0], ())))
        following = next(ready, None) if len(running) < AT_ONCE else None
        if following is not None:
            waiting.remove(following)
            process, started = start(*following)
            running[process] = started
            continue
        process, _, usage = os.wait4(-1, 0)
        step = running.pop(process)
        cpu = usage.ru_utime + usage.ru_stime
        results[step.name] = (step.told(), time.monotonic() - step.start, cpu)
        print(f"\n=== {step.name}\n{step.printed.read_text(errors='replace')}", flush=True)
    print("\n=== summary")
    for name, _ in steps:
        outcome, seconds, cpu = results[name]
        state = f"skipped: {outcome.skipped}" if outcome.skipped else "FAILED" if outcome.failed else "ok"
        counts = f"{outcome.passed:6} passed {outcome.failed:4} failed"
        print(f"{name:32} {seconds:6.0f} s {cpu:6.0f} s of CPU  {counts}  {state}")
    passed = sum(outcome.passed for outcome, _, _ in results.values())
    failed = sum(outcome.failed for outcome, _, _ in results.values())
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
    # All that steps need of PyPI in this environment comes before them: another may be importing from it.
    extras = ["dev", "docs"] if options.full else ["dev"] if options.lint or options.format else []
    if extras and not install_extras(*extras):
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
