"""Sessions that come and go for an hour: on threads, at random, of any device; every element right, memory
flat.

`python -m tests.concurrency.soak --minutes 60` draws what each thread does next: open a session of one of
some networks (as custom ops, on the execution provider, or from a compiled model), run a session that is
open with images of a random size, close one, compile a model anew into the file that others have open. Every
output is compared with
what stock ONNX Runtime's neighbour, the reference kernels, made of the same images. `--report` writes
benchmarks/results/soak.md and .json; what the process holds is measured every minute, after the sessions of
that minute were closed. `--stock` does the same with ONNX Runtime alone, on the networks' QDQ siblings: what
is held then is not lowbit's.

ONNX Runtime's own telemetry is switched off, as it keeps some 40 bytes of each session that is ever opened;
`--telemetry` leaves it on.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import onnx
import onnxruntime as ort

from benchmarks import results
from tests.dialects.graphs import CASES
from tests.ep.graphs import bottleneck, chain, images

THREADS = 4
MOST_OPEN = 6  # sessions that a thread holds
SIZES = (4, 5, 6, 8, 11, 16)  # of images whose size a network leaves open
DEVICES = ("cpu-ops", "cpu-ep", "compiled")
STOCK = ("residual_with_downsample", "residual_add_relu", "gemm", "u8_activations_s8_weights")
"""What ONNX Runtime alone opens, of its own quantizer's forms."""


@dataclasses.dataclass
class Subject:
    """A network, its inputs and what they become, and the file that it was compiled into, if it was."""

    model: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]
    expected: list[list[np.ndarray]]
    compiled: Path | None = None
    shapes: dict[str, list[int]] | None = None

    def compile(self) -> None:
        """Writes the file; who opens it meanwhile has the one before."""
        assert self.compiled is not None
        lowbit.compile(self.model, self.compiled, device="cpu-ep", shapes=self.shapes, overwrite=True)


def subjects(folder: Path) -> list[Subject]:
    """Some networks: of open sizes, and of one."""
    made = []
    built = CASES["ort_quantizer.residual_with_downsample"].build(0)
    sizes = [
        {"x": images(n, 3, h, w, seed=h)}
        for n, h, w in zip((1, 2, 1, 3, 1, 1), SIZES, SIZES[::-1], strict=True)
    ]
    for number, (model, feeds) in enumerate(
        [
            (bottleneck(0), sizes),
            (bottleneck(3), sizes),
            (chain("conv", "Relu", "conv"), sizes),
            (lowbit.convert(built.model).model, [built.feed(seed) for seed in range(6)]),
        ]
    ):
        reference = lowbit.session(model, device="cpu-ep", provider_options={"reference": True})
        expected = [reference.run(None, feed) for feed in feeds]
        shapes = None if number == 3 else {"x": [1, 3, 8, 8]}
        made.append(Subject(model, feeds, expected, folder / f"compiled_{number}.onnx", shapes))
        made[-1].compile()
    return made


def stock_subjects() -> list[Subject]:
    """Networks for ONNX Runtime alone."""
    made = []
    for name in STOCK:
        built = CASES[f"ort_quantizer.{name}"].build(0)
        feeds = [built.feed(seed) for seed in range(6)]
        session = stock_session(built.model, 1)
        made.append(Subject(built.model, feeds, [session.run(None, feed) for feed in feeds]))
    return made


def stock_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """A session of which lowbit knows nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@dataclasses.dataclass(frozen=True)
class Held:
    """What the process holds when all sessions are closed.

    Resident memory also has what malloc keeps for later: pages of its arenas that stand between others in
    use. Whether something was never given back shows in what malloc has handed out.
    """

    resident: int
    """Bytes of memory, once malloc gave back all whole pages that it could."""
    allocated: int
    """Bytes that malloc handed out, of all its arenas and mappings, and did not get back."""
    blocks: int
    """Objects of Python."""


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc, from 2.33 on."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost",
    )]  # fmt: skip


def held() -> Held:
    """What the process holds now."""
    gc.collect()
    c = ctypes.CDLL(None)
    c.malloc_trim(0)
    c.mallinfo2.restype = _Mallinfo
    told = c.mallinfo2()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return Held(resident, told.uordblks + told.hblkhd, sys.getallocatedblocks())


class Soak:
    """Threads that draw what to do, and what came of it."""

    def __init__(self, subjects: list[Subject], devices: tuple[str, ...], seed: int) -> None:
        self._subjects = subjects
        self._devices = devices
        self._seed = seed
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def minute(self, number: int, until: float) -> None:
        """All threads at work until then; their sessions are closed at the end."""
        threads = [
            threading.Thread(target=self._work, args=(f"{self._seed} {number} {t}", until))
            for t in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, seed: str, until: float) -> None:
        rng = random.Random(seed)
        held: list[tuple[Subject, str, ort.InferenceSession]] = []
        counts: Counter[str] = Counter()
        try:
            while time.monotonic() < until:
                chosen = rng.random()
                if not held or (chosen < 0.15 and len(held) < MOST_OPEN):
                    subject, device = rng.choice(self._subjects), rng.choice(self._devices)
                    held.append((subject, device, self._open(subject, device, rng.choice((1, 2)))))
                    counts[f"sessions, {device}"] += 1
                elif chosen < 0.28:
                    held.pop(rng.randrange(len(held)))
                elif chosen < 0.285 and "compiled" in self._devices:
                    rng.choice(self._subjects).compile()
                    counts["files compiled anew"] += 1
                else:
                    counts["runs"] += 1
                    self._run(*rng.choice(held), rng)
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
        with self._lock:
            self.counts += counts

    def _open(self, subject: Subject, device: str, threads: int) -> ort.InferenceSession:
        if device == "stock":
            return stock_session(subject.model, threads)
        if device == "compiled":
            return lowbit.session(subject.compiled, device="cpu-ep", threads=threads)
        return lowbit.session(subject.model, device=device, threads=threads)

    def _run(self, subject: Subject, device: str, session: ort.InferenceSession, rng: random.Random) -> None:
        which = rng.randrange(len(subject.feeds))
        outputs: list[Any] = session.run(None, subject.feeds[which])
        for got, want in zip(outputs, subject.expected[which], strict=True):
            if got.shape != want.shape or got.tobytes() != want.tobytes():
                self._tell(f"wrong elements on {device}, input {which}")

    def _tell(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)
        print(what, flush=True)


@dataclasses.dataclass(frozen=True)
class Minute:
    """What had been done and what was held at the end of a minute."""

    runs: int
    sessions: int
    held: Held


def soaked(
    seconds: float, seed: int = 0, part: float = 60.0, devices: tuple[str, ...] = DEVICES
) -> tuple[Soak, list[Minute]]:
    """What a soak came to, and how things stood after each of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = stock_subjects() if devices == ("stock",) else subjects(Path(folder))
        soak = Soak(chosen, devices, seed)
        end, minutes = time.monotonic() + seconds, list[Minute]()
        while time.monotonic() < end and not soak.wrong:
            soak.minute(len(minutes), min(end, time.monotonic() + part))
            sessions = sum(count for what, count in soak.counts.items() if what.startswith("sessions"))
            minutes.append(Minute(soak.counts["runs"], sessions, held()))
            now = minutes[-1].held
            print(
                f"part {len(minutes)}: {soak.counts['runs']} runs, {sessions} sessions; {now.allocated} "
                f"bytes of malloc, {now.blocks} objects, {now.resident} bytes resident",
                flush=True,
            )
    return soak, minutes


def left_by_a_session(minutes: list[Minute]) -> tuple[float, int]:
    """Bytes that malloc handed out and did not get back, a session, once caches had filled for a tenth of the
    time, the largest step between two minutes apart; and that step.

    A leak is in every minute. A table of Python's own that doubles once is one step.
    """
    counted = minutes[len(minutes) // 10 :]
    steps = [b.held.allocated - a.held.allocated for a, b in itertools.pairwise(counted)]
    largest = max(steps, key=abs, default=0)
    return (sum(steps) - largest) / max(1, counted[-1].sessions - counted[0].sessions), largest


def report(soak: Soak, minutes: list[Minute], taken: float, seed: int, commit: str) -> None:
    """benchmarks/results/soak.md and .json."""
    left, step = left_by_a_session(minutes)
    table = results.Table("Soak", ["what", "number"])
    table.rows += [["minutes", round(taken, 1)], ["threads", THREADS], ["seed", seed]]
    table.rows += [[what, f"{count:,}"] for what, count in sorted(soak.counts.items())]
    table.rows += [
        ["runs with a wrong element, errors", len(soak.wrong)],
        ["bytes that malloc did not get back, a session, one step apart", f"{left:.2f}"],
        ["that step, bytes", f"{step:,}"],
    ]
    columns = ["after minute", "runs", "sessions", "handed out by malloc, MiB", "objects of Python",
               "resident, MiB"]  # fmt: skip
    memory = results.Table("Held with all sessions closed", columns)
    every = max(1, len(minutes) // 10)
    for number in sorted({1, *range(every, len(minutes) + 1, every), len(minutes)}):
        each = minutes[number - 1]
        mib = [f"{size / 2**20:.3f}" for size in (each.held.allocated, each.held.resident)]
        memory.rows.append(
            [number, f"{each.runs:,}", f"{each.sessions:,}", mib[0], f"{each.held.blocks:,}", mib[1]]
        )
    notes = [
        "Sessions are opened, run and closed at random, with images of random sizes and counts, and the "
        "files of compiled models are written anew; every element is compared with the reference kernels'.",
        "What the process holds is measured each minute, with all sessions closed and free pages given "
        "back. A leak shows in what malloc handed out and did not get back; resident memory also has the "
        "pages that malloc keeps between blocks in use.",
        "The largest step between two minutes is told apart: one of 1.92 MB is CPython's table of interned "
        "strings, which doubles its 2^17 places once as many strings have come and gone (44,000 of them "
        "stay, as a debugger showed).",
        "ONNX Runtime's own telemetry is off: with it, each session that is ever opened leaves some 40 "
        "bytes, in ONNX Runtime alone as well (`--stock --telemetry`).",
    ]
    raw = {
        "counts": soak.counts,
        "wrong": soak.wrong,
        "minutes": [[each.runs, each.sessions, *dataclasses.astuple(each.held)] for each in minutes],
    }
    results.write("soak", "Sessions that come and go", [table, memory], notes, raw, commit=commit)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="ONNX Runtime alone")
    parser.add_argument("--telemetry", action="store_true", help="leave ONNX Runtime's own on")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report and (given.stock or given.telemetry):
        parser.error("the page is about lowbit: no --stock or --telemetry with --report")
    ort.set_default_logger_severity(3)
    if not given.telemetry:
        ort.disable_telemetry_events()
    begun, commit = time.monotonic(), results.commit_here()
    soak, minutes = soaked(given.minutes * 60, given.seed, devices=("stock",) if given.stock else DEVICES)
    left, step = left_by_a_session(minutes)
    print(f"a session leaves {left:.2f} bytes, beside one step of {step}")
    if given.report:
        report(soak, minutes, (time.monotonic() - begun) / 60, given.seed, commit)
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
