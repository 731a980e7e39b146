"""Every file operation of the tools fails once: disk full, read error, killed: nothing half-written, nothing
lost.

`python -m tests.faults.files` runs the commands that write, in a process of its own for each operation below
the folder of their files that fails; `--job` and `--every` choose less, `--report` writes
benchmarks/results/fault_injection_files.md and .json. After each: the inputs are what they were, each output
is the whole one or what was there before, and the command ended well or with one line that says what is
wrong. The next run then ends well and leaves nothing else behind: neither what a killed process could not
clear, nor what a quantization keeps to go on from.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.faults.allocations import ROOT, injector

FAULTS = {"disk full": 1, "read error": 2, "killed": 3}
KILLED = -9


@dataclasses.dataclass
class Job:
    """A command, the files that it reads, and those that it writes, in the folder where it runs."""

    what: str
    run: Callable[[], object]
    reads: dict[str, bytes]
    writes: list[str]
    earlier: bytes | None = None  # what the outputs hold before; None: they are not there
    every: int = 1  # of a job that takes a second, fewer of its many operations


def command(*words: str) -> Callable[[], object]:
    """A run of the command line, whose exit status is raised."""

    def run() -> object:
        from lowbit.cli import cli

        return cli.main(list(words), standalone_mode=True)

    return run


def jobs() -> dict[str, Job]:
    """What is tried."""
    import lowbit
    import numpy as np

    from tests.quantize.networks import images, residual
    from tests.tools.conftest import qdq_conv

    source = qdq_conv().SerializeToString()
    converted = lowbit.convert(qdq_conv()).model.SerializeToString()
    with tempfile.TemporaryFile() as file:
        np.savez(file, x=images(4))
        file.seek(0)
        calibration = file.read()
    convert = ("convert", "in.onnx", "-o", "out.onnx")
    quantize = (
        "quantize",
        "in.onnx",
        "-o",
        "out.onnx",
        "--calib",
        "calib.npz",
        "--threads",
        "1",
        "--bits",
        "w8a8",
    )
    return {
        "convert": Job("lowbit convert", command(*convert), {"in.onnx": source}, ["out.onnx"]),
        "replace": Job(
            "lowbit convert --overwrite --report",
            command(*convert, "--overwrite", "--report", "out.html"),
            {"in.onnx": source}, ["out.onnx", "out.html"], b"what was there",
        ),
        "quantize": Job(
            "lowbit quantize", command(*quantize),
            {"in.onnx": residual().SerializeToString(), "calib.npz": calibration}, ["out.onnx", "out.yaml"],
            every=9,
        ),
        "compile": Job(
            "lowbit compile", command("compile", "in.onnx", "-o", "out.onnx", "--device", "cpu-ep"),
            {"in.onnx": converted}, ["out.onnx"],
        ),
        "compile beside": Job(
            "lowbit compile --external",
            command("compile", "in.onnx", "-o", "out.onnx", "--device", "cpu-ep", "--external"),
            {"in.onnx": converted}, ["out.onnx", "*.bin"],
        ),
        "export": Job(
            "lowbit export", command("export", "in.onnx", "-o", "out.onnx", "--to", "qdq"),
            {"in.onnx": converted}, ["out.onnx"],
        ),
        "choices": Job("measured choices are kept", keep, {}, ["cache/*.txt"]),
    }  # fmt: skip


def keep() -> object:
    """Adds to a cache that holds an entry already."""
    from lowbit.measure.tune import keep

    return keep({("another node", 1): "another kernel"})


def prepare(job: Job, folder: Path) -> None:
    """The folder as it is before the job."""
    from lowbit import _native

    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, data in job.reads.items():
        (folder / name).write_bytes(data)
    for name in job.writes if job.earlier is not None else []:
        (folder / name).write_bytes(job.earlier or b"")
    if job.run is keep:
        cache = Path(_native.tune_cache_path())
        cache.parent.mkdir()
        cache.write_bytes(_native.format_tune_cache([("a node", 1, "a kernel")]))


def outputs(job: Job, folder: Path) -> dict[str, bytes]:
    """The files that the job may write, as they are."""
    found = (path for pattern in job.writes for path in sorted(folder.glob(pattern)))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def strangers(job: Job, folder: Path, good: dict[str, bytes]) -> set[str]:
    """Files that are neither read nor written by the job."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return found - {*job.reads, *good}


def status_of(job: Job, folder: Path, fault: int, turn: int) -> tuple[int, int, str]:
    """The exit status of a run that meets a fault, how many operations could have met it, what it said."""
    with tempfile.TemporaryDirectory() as beside:
        told, seen = Path(beside, "stderr"), Path(beside, "seen")
        child = os.fork()
        if child == 0:
            status, library = 0, ctypes.CDLL(None)
            with told.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            library.LowBitFaultsFilesSeen.restype = ctypes.c_int64
            library.LowBitFaultsFiles(str(folder).encode(), fault, ctypes.c_int64(turn))
            try:
                job.run()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            except BaseException as error:
                status = 2
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            count = library.LowBitFaultsFilesSeen()
            library.LowBitFaultsFiles(b"", 0, ctypes.c_int64(0))
            seen.write_text(str(count))
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, int(seen.read_text()) if seen.exists() else 0, told.read_text(errors="replace")


def verdict_of(job: Job, folder: Path, good: dict[str, bytes], fault: int, turn: int) -> str:
    """What came of one run that meets a fault: "done", "refused", "killed", or what is wrong with it."""
    prepare(job, folder)
    before = outputs(job, folder)
    status, _, said = status_of(job, folder, fault, turn)
    after = outputs(job, folder)
    wrong = [name for name, data in after.items() if data != good.get(name) and data != before.get(name)]
    if wrong or any(name not in after for name in before):
        return f"FAILED: {wrong or before.keys() - after.keys()} half-written or lost: {said[-300:]}"
    if any((folder / name).read_bytes() != data for name, data in job.reads.items()):
        return "FAILED: an input was changed"
    if status == 0 and after != good:
        return f"FAILED: the command ended well without {good.keys() - after.keys()}"
    if status not in (0, KILLED) and ("Traceback" in said or not said.strip()):
        return f"FAILED: status {status}: {said[-500:]}"
    if status != 0 or strangers(job, folder, good):
        for name in after.keys() - before.keys():  # whole, and in the way of the next run
            (folder / name).unlink()
        again, _, said = status_of(job, folder, 0, 0)
        if again != 0 or outputs(job, folder) != good:
            return f"FAILED: the next run: {again}: {said[-300:]}"
        if left := strangers(job, folder, good):
            return f"FAILED: {sorted(left)} left behind"
    return {0: "done", KILLED: "killed"}.get(status, "refused")


def work(names: list[str], every: int) -> None:
    """Prints a line of JSON about each job and fault, and about each run that failed."""
    with tempfile.TemporaryDirectory(prefix="lowbit_faults_") as beside:
        folder = Path(beside, "files")
        folder.mkdir()
        os.environ["LOWBIT_CACHE_DIR"] = str(folder / "cache")
        os.chdir(folder)
        all_jobs = jobs()
        for job in (all_jobs[name] for name in names or all_jobs):
            prepare(job, folder)
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
                job.run()  # here, so that the runs to come find everything imported
            good = outputs(job, folder)
            if good.keys() == job.reads.keys() or not good:
                raise SystemExit(f"{job.what} writes nothing")
            gc.freeze()
            for name, fault in FAULTS.items():
                prepare(job, folder)
                count = status_of(job, folder, fault, 0)[1]
                verdicts: Counter[str] = Counter()
                for turn in range(1, count + 1, every * job.every):
                    verdict = verdict_of(job, folder, good, fault, turn)
                    verdicts[verdict.split(":")[0]] += 1
                    if verdict.startswith("FAILED"):
                        failure = f"{job.what}, {name}, operation {turn} of {count}: {verdict}"
                        print(json.dumps({"failure": failure}), flush=True)
                print(
                    json.dumps({"job": job.what, "fault": name, "operations": count, "verdicts": verdicts}),
                    flush=True,
                )


def tried(names: list[str], every: int = 1) -> tuple[list[dict[str, object]], list[str]]:
    """What came of the jobs, and what failed."""
    library = injector()
    if library is None:
        raise SystemExit("liblowbit_faults is not built: configure with -DLOWBIT_TESTS=ON")
    choice = [word for name in names for word in ("--job", name)]
    done = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.files", "--work", "--every", str(every), *choice],
        cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout is not None
    rows, failures = [], []
    for line in done.stdout:
        told = json.loads(line)
        if "failure" in told:
            failures.append(told["failure"])
            print(told["failure"], flush=True)
        else:
            rows.append(told)
            print(
                f"{told['job']}, {told['fault']}: {told['operations']} operations, {told['verdicts']}",
                flush=True,
            )
    if done.wait() != 0:
        failures.append(f"the process ended with status {done.returncode}")
    return rows, failures


def report(rows: list[dict[str, object]], failures: list[str], every: int, seconds: float) -> None:
    """benchmarks/results/fault_injection_files.md and .json."""
    from benchmarks import results

    columns = ["refused", "done", "killed", "FAILED"]
    table = results.Table("Runs", ["job", "fault", "operations", "refused", "done", "killed", "failed"])
    for row in rows:
        verdicts = row["verdicts"]
        assert isinstance(verdicts, dict)
        cells = (row["job"], row["fault"], row["operations"])
        table.rows.append([*map(str, cells), *(verdicts.get(column, 0) for column in columns)])
    which = "each operation" if every == 1 else f"every {every}th operation"
    notes = [
        f"At {which} below the folder of the command's files the disk is full (and stays so), it cannot be "
        "read, or the process is killed. Done: the command did without.",
        "Failed: an output that is neither whole nor what was there before, an input that changed, an end "
        "without a message, a next run that fails or leaves a file behind.",
        f"{seconds:.0f} seconds, one process.",
        *failures,
    ]
    results.write("fault_injection_files", "File operations that fail", [table], notes, rows)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--job", action="append", default=[], help="only these")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        with contextlib.suppress(BrokenPipeError):
            work(given.job, given.every)
        return 0
    begun = time.monotonic()
    rows, failures = tried(given.job, given.every)
    if given.report:
        report(rows, failures, given.every, time.monotonic() - begun)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
