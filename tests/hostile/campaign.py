"""Fuzzing in processes of its own, where a crash or a hang is seen, has a seed, and ends nothing else.

`python -m tests.hostile.campaign --kind lowbit --device cpu-ep --count 100000 --jobs 2 --state FILE` tries so
many more mutants than FILE tells of, and adds to it: runs add up, an interrupted one loses nothing. A case
either ends equally on all that it runs on, or is refused by all; what does not is printed, kept in FILE, and
makes the exit status 1. `--report --state FILE...` writes benchmarks/results/fuzzing.md and .json.

| kind | a case | `--device` | runs beside each other |
| --- | --- | --- | --- |
| lowbit | a mutated model of lowbit nodes | cpu | custom ops and the numpy definitions |
| | | cpu-ep, fake:0 | these and the execution provider |
| | | cuda | custom ops and the GPU |
| source | a drawn source model, converted | cpu-ops, cpu-ep, cuda | the conversion and stock ONNX Runtime |
| context | a mutated compiled region (EPContext) | cpu-ep | the kernels and the reference kernels |
| | | cuda | the GPU and the CPU, or the GPU twice |
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "source": "tests.hostile.differential",
    "lowbit": "tests.hostile.lowbit_mutants",
    "context": "tests.hostile.context_mutants",
}
CHUNK = 500  # cases that a worker is given at once
HANGS = 60.0  # seconds without a new case after which a worker is taken for hung
# ONNX Runtime's Slice asserts on an empty dim. The folder is of the compiler that ONNX Runtime's wheels are
# built with, and that lowbit's build here is not.
_STOCK_ASSERTION = "/opt/rh/gcc-toolset"
MOST_KEPT = 200  # failures that a state file keeps of one kind on one device


def outcomes_of(module: str, first: int, count: int) -> dict[int, str]:
    """What became of mutants, by their seeds; fails if the process does, or one was neither of the two.

    Args:
        module: prints one line of JSON about what a mutant is and one about its outcome; run with the first
            seed and the number of seeds.
        first: the first seed.
        count: how many.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(first), str(count)],
        capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT,
        preexec_fn=_limit_memory if sys.platform == "linux" else None,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = lines[-1] if lines else None
    assert done.returncode == 0, f"status {done.returncode} after {last}: {done.stderr[-2000:]}"
    what = {line["seed"]: line["what"] for line in lines if "what" in line}
    outcomes = {line["seed"]: line["outcome"] for line in lines if "outcome" in line}
    wrong = {s: (what[s], o) for s, o in outcomes.items() if not o.startswith(("converted", "refused: "))}
    assert not wrong, wrong
    assert outcomes.keys() == what.keys()
    return outcomes


def _limit_memory() -> None:
    import resource

    if os.environ.get("LOWBIT_SANITIZED"):
        return  # AddressSanitizer's shadow memory takes terabytes of addresses
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # a shape from a file must not be believed


# ---- a worker

_ORACLE, _OURS = "the oracle runs", "the oracle has run"


def oracle_begins() -> None:
    """Told by a case before it runs code that is not ours and may die of it."""
    print(_ORACLE, file=sys.stderr, flush=True)


def oracle_done() -> None:
    """Told by a case when what dies from here on is ours."""
    print(_OURS, file=sys.stderr, flush=True)


def work(module: str, device: str, mark_path: str) -> None:
    """Answers lines of "FIRST COUNT" with a line of JSON each; the file holds the seed that is tried."""
    fuzzer = importlib.import_module(module).Fuzzer(device)
    with open(mark_path, "r+b") as file, mmap.mmap(file.fileno(), 16) as mark:
        print(json.dumps({"ready": True}), flush=True)
        tried = 0
        for line in sys.stdin:
            first, count = map(int, line.split())
            verdicts: Counter[str] = Counter()
            failures = []
            for seed in range(first, first + count):
                tried += 1
                mark[:16] = struct.pack("qq", seed, tried)
                what, verdict = fuzzer.case(seed)
                if verdict.startswith("FAILED"):
                    failures.append({"seed": seed, "what": what[:500], "verdict": verdict[:1000]})
                    verdict = "FAILED"
                verdicts[verdict] += 1
            print(json.dumps({"verdicts": verdicts, "failures": failures}), flush=True)


class Worker:
    """A child process, started again where one died."""

    def __init__(self, kind: str, device: str, folder: Path, number: int) -> None:
        self._command = [
            sys.executable,
            "-m",
            "tests.hostile.campaign",
            "--device",
            device,
            "--work",
            KINDS[kind],
        ]
        self._device = device
        self._mark = folder / f"worker_{number}"
        self._errors = folder / f"worker_{number}.stderr"
        self._child: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._mark.write_bytes(struct.pack("qq", -1, 0))
        bounded = sys.platform == "linux" and not self._device.startswith("cuda")  # CUDA takes all addresses
        with self._errors.open("wb") as errors:
            child = subprocess.Popen(
                [*self._command, str(self._mark)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, cwd=ROOT, preexec_fn=_limit_memory if bounded else None,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        if self._line(child, 600.0) is None:
            raise SystemExit(f"a worker does not start: {self._errors.read_text()[-2000:]}")
        return child

    def _line(self, child: subprocess.Popen[bytes], patience: float) -> dict[str, Any] | None:
        """The next answer; None where the process died or was hung, after which it is gone."""
        assert child.stdout is not None
        seen, since = self._mark.read_bytes(), time.monotonic()
        while True:
            if select.select([child.stdout], [], [], 1.0)[0]:
                line = child.stdout.readline()
                if line:
                    return dict(json.loads(line))
                child.wait()
                return None
            now = self._mark.read_bytes()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                child.kill()
                child.wait()
                return None

    def run(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        """The answers for these seeds; a crash or a hang is one of them, and the others are tried again."""
        open_parts = [(first, count)]
        while open_parts:
            part, size = open_parts.pop()
            if self._child is None:
                self._child = self._start()
            assert self._child.stdin is not None
            self._child.stdin.write(f"{part} {size}\n".encode())
            self._child.stdin.flush()
            answer = self._line(self._child, HANGS)
            if answer is not None:
                yield answer
                continue
            seed, _ = struct.unpack("qq", self._mark.read_bytes())
            status = self._child.returncode
            self._child = None
            seed = min(max(seed, part), part + size - 1)
            how = f"no end after {HANGS:.0f} s" if status == -9 else f"the process died with status {status}"
            errors = self._errors.read_text(errors="replace")
            if errors.rfind(_ORACLE) > errors.rfind(_OURS):
                yield {"verdicts": {"the oracle died": 1}, "failures": []}
            elif status == -signal.SIGABRT and _STOCK_ASSERTION in errors:
                yield {"verdicts": {"ONNX Runtime aborted": 1}, "failures": []}
            else:
                verdict = f"FAILED: {how}: {errors[-500:]}"
                yield {
                    "verdicts": {"FAILED": 1},
                    "failures": [{"seed": seed, "what": "", "verdict": verdict}],
                }
            open_parts += [(a, b) for a, b in ((part, seed - part), (seed + 1, part + size - seed - 1)) if b]

    def end(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(10)
            self._child.kill()


# ---- the state


@dataclasses.dataclass
class State:
    """What a file tells of the cases tried so far, by kind and device."""

    path: Path
    runs: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> State:
        return cls(path, json.loads(path.read_text())["runs"] if path.exists() else {})

    def of(self, name: str) -> dict[str, Any]:
        return self.runs.setdefault(name, {"seeds": [], "verdicts": {}, "failures": [], "parts": []})

    def next_seed(self, name: str) -> int:
        return max((first + count for first, count in self.of(name)["seeds"]), default=0)

    def add(self, name: str, first: int, count: int, answers: list[dict[str, Any]]) -> None:
        run = self.of(name)
        seeds = sorted([*run["seeds"], [first, count]])
        run["seeds"] = []
        for start, size in seeds:  # neighbours become one
            if run["seeds"] and sum(run["seeds"][-1]) == start:
                run["seeds"][-1][1] += size
            else:
                run["seeds"].append([start, size])
        for answer in answers:
            for verdict, number in answer["verdicts"].items():
                run["verdicts"][verdict] = run["verdicts"].get(verdict, 0) + number
            run["failures"] = (run["failures"] + answer["failures"])[:MOST_KEPT]

    def save(self) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
        temporary.replace(self.path)


def machine_text(device: str) -> str:
    from lowbit.inspection.sysinfo import sysinfo

    facts = sysinfo()
    machine = facts["machine"]
    text = f"{machine.get('cpu', 'unknown CPU')}, {facts['isa']['used']}"
    if device.startswith("cuda"):
        from tests.hostile.lowbit_mutants import provider_device

        text += f", {provider_device(device).ep_metadata.get('name', 'NVIDIA GPU')}"
    return text


def commit() -> str:
    """As git says, or LOWBIT_COMMIT where it cannot: a copy of the tree."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LOWBIT_COMMIT", "unknown")


def fuzz(
    kind: str, device: str, count: int, first: int | None, jobs: int, state: State, seconds: float = math.inf
) -> int:
    """Tries `count` more cases, or fewer in that time; returns how many of them failed."""
    name = f"{kind} {device}"
    first = state.next_seed(name) if first is None else first
    chunks = iter([(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)])
    lock = threading.Lock()
    begun, done, failed, stop = time.monotonic(), 0, 0, threading.Event()
    part = {"first": first, "count": 0, "commit": commit(), "jobs": jobs, "machine": machine_text(device),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": 0.0}  # fmt: skip
    state.of(name)["parts"].append(part)
    problems: list[BaseException] = []

    def serve(number: int, folder: Path) -> None:
        nonlocal done, failed
        worker = Worker(kind, device, folder, number)
        try:
            while not stop.is_set() and time.monotonic() - begun < seconds:
                with lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                answers = list(worker.run(*chunk))
                with lock:
                    done += chunk[1]
                    state.add(name, *chunk, answers)
                    part["count"] += chunk[1]
                    part["seconds"] = round(time.monotonic() - begun, 1)
                    for failure in (f for answer in answers for f in answer["failures"]):
                        failed += 1
                        print(f"seed {failure['seed']} ({failure['what']}): {failure['verdict']}", flush=True)
        except BaseException as error:
            problems.append(error)
            stop.set()
        finally:
            worker.end()

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=serve, args=(n, Path(folder))) for n in range(jobs)]
        for thread in threads:
            thread.start()
        told = begun
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
                if time.monotonic() - told >= 10:
                    told = time.monotonic()
                    with lock:
                        state.save()
                        print(_progress(name, done, count, failed, begun), flush=True)
        except KeyboardInterrupt:
            stop.set()
            print("stopping; what was tried is kept", flush=True)
        for thread in threads:
            thread.join()
    state.save()
    print(_progress(name, done, count, failed, begun), flush=True)
    print(json.dumps(state.of(name)["verdicts"]), flush=True)
    if problems:
        raise problems[0]
    return failed


def _progress(name: str, done: int, count: int, failed: int, begun: float) -> str:
    rate = done / max(time.monotonic() - begun, 1e-9)
    return f"{name}: {done:,} of {count:,}, {rate:.0f} a second, {failed} failed"


def report(states: list[State], further: list[str]) -> None:
    """benchmarks/results/fuzzing.md and .json, with further notes."""
    from benchmarks import results

    totals = results.Table(
        "Cases", ["kind and device", "cases", "failed", "equal", "refused by all", "no oracle", "seeds"]
    )
    parts = results.Table(
        "Runs",
        ["kind and device", "first seed", "cases", "seconds", "processes", "machine", "commit", "date"],
    )
    for state in states:
        for name, run in state.runs.items():
            verdicts = Counter(run["verdicts"])
            by_kind = [
                sum(n for v, n in verdicts.items() if v.startswith(kind))
                for kind in ("FAILED", "equal", "refused", ("no oracle", "the oracle died"))
            ]
            seeds = ", ".join(f"{first}..{first + count - 1}" for first, count in run["seeds"])
            totals.rows.append([name, f"{sum(verdicts.values()):,}", *(f"{n:,}" for n in by_kind), seeds])
            for part in run["parts"]:
                row = [
                    part[key] for key in ("first", "count", "seconds", "jobs", "machine", "commit", "date")
                ]
                parts.rows.append([name, *map(str, row)])
    notes = [
        "Mutated models of lowbit nodes and mutated compiled regions: every one runs with equal elements "
        "wherever it is tried, or is refused everywhere (tests/hostile/campaign.py says where that is).",
        "A case that fails a check, a process that dies, and one that does not end count as failed.",
        "Drawn source models are run by stock ONNX Runtime beside their conversion. What lowbit alone runs "
        "is in no column; tests/hostile/differential.py tells where stock is no oracle.",
        *further,
    ]
    raw = {str(state.path.name): state.runs for state in states}
    results.write("fuzzing", "Fuzzing", [totals, parts], notes, raw)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, default="lowbit")
    parser.add_argument("--device", default="cpu-ep", help="cpu, cpu-ep, cuda or fake:0")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument(
        "--seed", type=int, help="the first; without it, the first that the state does not hold"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after that time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, nargs="+", default=[ROOT / "build" / "fuzzing.json"])
    parser.add_argument(
        "--report", action="store_true", help="write the results of these states, try nothing"
    )
    parser.add_argument("--note", action="append", default=[], help="a sentence to write into the report")
    parser.add_argument(
        "--one", type=int, metavar="SEED", help="try one case in this process and say what it is"
    )
    parser.add_argument("--work", nargs=2, metavar=("MODULE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], options.device, options.work[1])
        return 0
    if options.one is not None:
        what, verdict = importlib.import_module(KINDS[options.kind]).Fuzzer(options.device).case(options.one)
        print(f"{what}\n{verdict}")
        return int(verdict.startswith("FAILED"))
    states = [State.read(path) for path in options.state]
    if options.report:
        report(states, options.note)
        return 0
    failed = fuzz(
        options.kind, options.device, options.count, options.seed, options.jobs, states[0], options.seconds
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
