"""Sessions that come and go for an hour: on threads, at random, of any device; every element right, memory
flat.

`python -m tests.concurrency.soak --minutes 60` draws what each thread does next: open a session of one of
some networks (as custom ops, on the execution provider, or from a compiled model), run a session that is
open with images of a random size, close one, compile a model anew into the file that others have open. Every
output is compared with
what stock ONNX Runtime's neighbour, the reference kernels, made of the same images. `--report` writes
benchmarks/results/soak.md and .json; what the process holds is measured every minute, after the sessions of
that minute were closed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
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

from tests.dialects.graphs import CASES
from tests.ep.graphs import bottleneck, chain, images

THREADS = 4
MOST_OPEN = 6  # sessions that a thread holds
SIZES = (4, 5, 6, 8, 11, 16)  # of images whose size a network leaves open
DEVICES = ("cpu-ops", "cpu-ep", "compiled")


@dataclasses.dataclass
class Subject:
    """A network, its inputs and what they become, and the file that it was compiled into."""

    model: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]
    expected: list[list[np.ndarray]]
    compiled: Path
    shapes: dict[str, list[int]] | None

    def compile(self) -> None:
        """Writes the file; who opens it meanwhile has the one before."""
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


def settled_bytes() -> int:
    """What the process holds in memory when nothing of it can be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Soak:
    """Threads that draw what to do, and what came of it."""

    def __init__(self, subjects: list[Subject], seed: int) -> None:
        self._subjects = subjects
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
                    subject, device = rng.choice(self._subjects), rng.choice(DEVICES)
                    held.append((subject, device, self._open(subject, device, rng.choice((1, 2)))))
                    counts[f"sessions, {device}"] += 1
                elif chosen < 0.28:
                    held.pop(rng.randrange(len(held)))
                elif chosen < 0.285:
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


def soaked(seconds: float, seed: int = 0, part: float = 60.0) -> tuple[Soak, list[int]]:
    """What a soak came to, and what the process held after each of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(subjects(Path(folder)), seed)
        end, held, number = time.monotonic() + seconds, [], 0
        while time.monotonic() < end and not soak.wrong:
            soak.minute(number, min(end, time.monotonic() + part))
            held.append(settled_bytes())
            number += 1
            print(f"part {number}: {held[-1] >> 20} MiB, {dict(soak.counts)}", flush=True)
    return soak, held


def report(soak: Soak, held: list[int], minutes: float, seed: int) -> None:
    """benchmarks/results/soak.md and .json."""
    from benchmarks import results

    mib = [round(each / 2**20, 1) for each in held]
    table = results.Table("Soak", ["what", "number"])
    table.rows += [["minutes", round(minutes, 1)], ["threads", THREADS], ["seed", seed]]
    table.rows += [[what, f"{count:,}"] for what, count in sorted(soak.counts.items())]
    table.rows += [["runs with a wrong element, errors", len(soak.wrong)]]
    later = mib[len(mib) // 2 :]
    table.rows += [["MiB held after the first minute", mib[0]], ["after half of the time", later[0]],
                   ["the most after that", max(later)], ["at the end", mib[-1]]]  # fmt: skip
    notes = [
        "Sessions are opened, run and closed at random, with images of random sizes and counts, and the "
        "files of compiled models are written anew; every element is compared with the reference kernels'.",
        "What the process holds is measured each minute, with all sessions closed and free pages given back.",
    ]
    raw = {"counts": soak.counts, "wrong": soak.wrong, "mib": mib}
    results.write("soak", "Sessions that come and go", [table], notes, raw)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    ort.set_default_logger_severity(3)
    begun = time.monotonic()
    soak, held = soaked(given.minutes * 60, given.seed)
    if given.report:
        report(soak, held, (time.monotonic() - begun) / 60, given.seed)
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
