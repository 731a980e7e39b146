"""Two models side by side: time, size, load time and memory.

Both sessions live in one process and take turns in short blocks, so that whatever disturbs the machine
disturbs both. Load time and peak memory come from fresh processes, one per model and try.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.errors import LowBitError, ModelError, RefusedError, raise_if_out_of_memory
from lowbit.library import get_ep_name, require_onnxruntime
from lowbit.sessions.binding import bind, queued_seconds
from lowbit.sessions.devices import canonical, has_own_memory, runs_as_it_is
from lowbit.sessions.session import for_device, is_ready, open_session, prepare, refusal_of, run_session

if (
    TYPE_CHECKING
):  # onnx and onnxruntime are imported where they are used: the fresh processes import this file
    import numpy.typing as npt
    import onnx
    import onnxruntime

Progress = Callable[[int, int], None]

BLOCK_SECONDS = 0.05
"""Aimed length of one turn: long against a cache refill, short against a machine's mood."""

FRESH_TRIES = 3

QUEUED_ROUNDS = 9
"""Measurements of queued runs; the figure is their median."""

PAUSE_SECONDS = 0.06
"""Longer than ONNX Runtime's worker threads spin after a run before they sleep."""


@dataclass
class Timing:
    """What was measured of one model. Times in milliseconds, sizes in bytes."""

    path: str
    file_bytes: int
    device: str = "cpu"
    runs: int = 0
    median_ms: float = 0.0
    p10_ms: float = 0.0
    p90_ms: float = 0.0
    queued_ms: float | None = None  # a GPU's own time: per run of many that are queued
    load_ms: float = 0.0  # median over fresh processes
    peak_memory_bytes: int = 0  # VmHWM of a fresh process: median; 0 where the system does not tell
    nodes: list[NodeTime] = field(default_factory=list)


@dataclass
class NodeTime:
    """One node of a profiled session, or one step of a region: the names of its nodes, and the kernel."""

    name: str
    op_type: str
    mean_ms: float


@dataclass
class BenchReport:
    """``model`` beside ``against`` (None when measured alone); ratios below 1 favour ``model``."""

    model: Timing
    against: Timing | None
    threads: int
    rounds: int
    pinned: list[int]

    @property
    def ratios(self) -> dict[str, float]:
        """Model divided by against: medians, file sizes, load times, peak memories."""
        if self.against is None:
            return {}
        pairs = {
            "time": (self.model.median_ms, self.against.median_ms),
            "size": (self.model.file_bytes, self.against.file_bytes),
            "load": (self.model.load_ms, self.against.load_ms),
            "memory": (self.model.peak_memory_bytes, self.against.peak_memory_bytes),
        }
        return {name: ours / theirs for name, (ours, theirs) in pairs.items() if theirs}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {
            "model": asdict(self.model),
            "against": None if self.against is None else asdict(self.against),
            "ratios": self.ratios,
            "threads": self.threads,
            "rounds": self.rounds,
            "pinned": self.pinned,
        }


def bench(
    model: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    rounds: int = 20,
    threads: int = 1,
    pin: Sequence[int] = (),
    shapes: Mapping[str, list[int]] | None = None,
    seed: int = 0,
    profile: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> BenchReport:
    """Measures a model, and another one in turns with it.

    Both sessions get the same options: ``threads`` intra-op threads, everything else as ONNX Runtime sets it.
    Inputs are random, inputs and outputs are bound once (IO binding), on the GPU for a model that runs there,
    so that only the model runs.

    Args:
        model: a file, converted or not.
        against: the file to compare with, usually the original. On another device than "cpu" it runs there
            too if it was converted, and in stock ONNX Runtime on the CPU otherwise.
        rounds: blocks per model; a block is as many runs as fit 50 ms, at least one.
        threads: intra-op threads of both sessions.
        pin: CPU numbers to pin this process to while it measures; empty: not pinned.
        shapes: sizes of inputs with symbolic dims.
        seed: of the random inputs.
        profile: also run ONNX Runtime's profiler and report mean times per node; on the execution provider,
            per kernel of its regions, where this ONNX Runtime asks for them (1.25 or newer).
        device: where ``model`` runs, see :func:`lowbit.session`; converted in memory for it if need be.
        progress: called with (rounds done, rounds in all).

    Raises:
        ModelError: if a file cannot be read or opened.
        LowBitError: for arguments out of range.
    """
    if rounds < 1:
        raise LowBitError(f"rounds must be at least 1, got {rounds}")
    paths = [os.fspath(path) for path in (model, against) if path is not None]
    for path in paths:
        if not os.path.isfile(path):
            raise ModelError(f"{path}: no such file")
    place = canonical(device)
    subjects = [Subject.read(path, threads, seed, shapes, place, convert=first)
                for path, first in zip(paths, (True, False), strict=False)]  # fmt: skip
    if subjects[0].takes(subjects[-1].feed):  # the same values for both
        subjects[-1] = replace(subjects[-1], feed=subjects[0].feed)
    timings = [Timing(path, subject.file_bytes, subject.device)
               for path, subject in zip(paths, subjects, strict=True)]  # fmt: skip

    with pinned(pin):
        runs = [_bound_run(subject, paths) for subject in subjects]
        pause = PAUSE_SECONDS if threads > 1 else 0.0
        for timing, seconds in zip(timings, take_turns(runs, rounds, progress, pause), strict=True):
            timing.runs = len(seconds)
            timing.p10_ms, timing.median_ms, timing.p90_ms = (
                float(ms) for ms in np.percentile(seconds, (10, 50, 90)) * 1e3
            )
        del runs
        for timing, subject in zip(timings, subjects, strict=True):
            timing.queued_ms = subject.queued_ms()
            timing.load_ms, timing.peak_memory_bytes = fresh_process(subject)
            if profile:
                timing.nodes = _profile(subject)
    other = timings[1] if len(timings) > 1 else None
    return BenchReport(timings[0], other, threads, rounds, list(pin))


def _bound_run(subject: Subject, paths: Sequence[str]) -> Callable[[], None]:
    """:meth:`Subject.bound_run`; of a model that is refused it tells whether the other one is, too."""
    try:
        return subject.bound_run()
    except RefusedError as error:
        for other in (path for path in paths if path != subject.path):
            reason = refusal_of(other)
            told = f"it loads {other}" if reason is None else f"it refuses {other}, too: {reason}"
            raise ModelError(f"{error}; {told}") from error
        raise


@dataclass(frozen=True)
class Subject:
    """A model under measurement."""

    path: str
    file_bytes: int
    feed: dict[str, npt.NDArray[Any]]
    threads: int
    lowbit: bool  # needs the custom-op library; a stock model runs without it, as its users run it
    device: str = "cpu"

    @classmethod
    def read(
        cls,
        path: str,
        threads: int,
        seed: int,
        shapes: Mapping[str, list[int]] | None,
        device: str = "cpu",
        *,
        convert: bool = False,
    ) -> Subject:
        """Reads the model's interface and draws random inputs for it.

        A model that is not lowbit's runs on the CPU, unless ``convert`` asks to convert it for the device.
        """
        from lowbit.frontends.standard_ops import needs_standard_form, standard_form
        from lowbit.ops import DOMAIN
        from lowbit.proto.feeds import random_feeds
        from lowbit.proto.model_file import load_proto, stored_bytes

        model = load_proto(path, external_data=False)
        file_bytes = stored_bytes(path, model)
        if not runs_as_it_is(device) and convert and not is_ready(model):
            ready = for_device(path, everything=has_own_memory(device))
            if ready is not path:
                model = ready.model
                path = _temporary_file(model, "converted.onnx")
        if not is_ready(model):
            device = "cpu"
        if needs_standard_form(model):
            # What its users run today: every quantizer as float operations.
            model = standard_form(load_proto(path))
            path = _temporary_file(model, "standard_form.onnx")
        return cls(
            path,
            file_bytes,
            random_feeds(model, seed, shapes),
            threads,
            any(opset.domain == DOMAIN for opset in model.opset_import) or not runs_as_it_is(device),
            device,
        )

    def takes(self, feed: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Whether ``feed`` has this model's inputs, in name, type and size."""
        return {n: (v.dtype, v.shape) for n, v in feed.items()} == {
            n: (v.dtype, v.shape) for n, v in self.feed.items()
        }

    def open(self, profile_prefix: str = "") -> onnxruntime.InferenceSession:
        """A new session; one that profiles runs custom ops on device "cpu", where nodes have times."""
        options = _options(self.path, self.threads, self.lowbit, self.device, profile_prefix)
        return open_session(self.path, options, self.device)

    def bound_run(self) -> Callable[[], None]:
        """A function that runs the model once on inputs and outputs bound beforehand.

        Raises:
            ModelError: if it does not run.
        """
        opened = self.open()
        run_session(opened, self.feed)
        if has_own_memory(self.device):
            on_device = bind(opened, self.feed, self.device)
            return lambda: opened.run_with_iobinding(on_device)
        binding = opened.io_binding()
        for name, value in self.feed.items():
            binding.bind_cpu_input(name, np.asarray(value, order="C"))
        names = [output.name for output in opened.get_outputs()]

        def bind_outputs() -> None:
            for name in names:
                binding.bind_output(name)

        def run() -> None:
            opened.run_with_iobinding(binding)

        def run_with_new_outputs() -> None:
            bind_outputs()
            run()

        bind_outputs()
        run()
        try:
            run()
        except RuntimeError:
            # ONNX Runtime holds the outputs of a run before against the shapes that the model states for
            # them, which are wrong here; new ones it takes as they come.
            return run_with_new_outputs
        return run

    def queued_ms(self) -> float | None:
        """Milliseconds per run of runs that are queued on a GPU; None for a CPU, where nothing is queued."""
        if not has_own_memory(self.device):
            return None
        opened = self.open()
        binding = bind(opened, self.feed, self.device)
        runs = max(10, round(BLOCK_SECONDS / queued_seconds(opened, binding, 10)))
        return float(np.median([queued_seconds(opened, binding, runs) for _ in range(QUEUED_ROUNDS)])) * 1e3


def _temporary_file(model: onnx.ModelProto, name: str) -> str:
    """Writes a model to a file that lasts as long as this process."""
    import onnx

    folder = tempfile.mkdtemp(prefix="lowbit-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, name)
    onnx.save(model, path)
    return path


def _options(
    path: str, threads: int, lowbit: bool, device: str, profile_prefix: str = ""
) -> onnxruntime.SessionOptions:
    ort = require_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if profile_prefix:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    if lowbit:
        prepare(options, device, None, path)
    return options


def take_turns(
    runs: Sequence[Callable[[], None]],
    rounds: int,
    progress: Progress | None = None,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds per run of each function, measured in alternating blocks after a warm-up.

    Args:
        runs: what to measure.
        rounds: blocks per function.
        progress: called with (rounds done, rounds in all).
        pause: seconds of sleep before each block. The worker threads of a session spin for a while after its
            last run; they must be asleep before another session's block, see :data:`PAUSE_SECONDS`.
        clock: what counts as time, in seconds; ``time.thread_time`` leaves out what other work on the machine
            takes, of functions that run on the calling thread alone.
    """
    counts = []
    for run in runs:
        for _ in range(2):
            run()
        counts.append(max(1, round(BLOCK_SECONDS / max(_timed(run, clock), 1e-6))))
    seconds: list[list[float]] = [[] for _ in runs]
    for done in range(rounds):
        # Whoever goes first would always meet the other's heat and cache contents: swap every round.
        order = range(len(runs)) if done % 2 == 0 else reversed(range(len(runs)))
        for i in order:
            time.sleep(pause)
            runs[i]()  # the first run after the other model refills the caches
            seconds[i] += [_timed(runs[i], clock) for _ in range(counts[i])]
        if progress is not None:
            progress(done + 1, rounds)
    return seconds


def _timed(run: Callable[[], None], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


@contextlib.contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Keeps the process, and the processes it starts, on some CPUs."""
    if not cpus:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise LowBitError("this system cannot pin a process to a CPU; leave out --pin")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise LowBitError(f"cannot pin to CPU {', '.join(map(str, cpus))}: {error.strerror}") from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _profile(subject: Subject, runs: int = 20) -> list[NodeTime]:
    """Mean milliseconds of every node per run, slowest first, from ONNX Runtime's own profiler.

    In the place of a region that the execution provider compiled stand its steps, where this ONNX Runtime
    asks for them (1.25 or newer): the names of the nodes that one kernel computes, and the kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        opened = subject.open(profile_prefix=os.path.join(folder, "profile"))
        for _ in range(runs):
            opened.run(None, subject.feed)
        events = json.loads(Path(opened.end_profiling()).read_text(encoding="utf-8"))
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    steps = [event["args"] for event in events if event.get("cat") == "Kernel" and _is_ours(event)]
    for step in steps:
        durations[step["nodes"], step["kernel"]].append(int(step["duration_ns"]) / 1e3)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name, op_type = event["name"].removesuffix("_kernel_time"), event["args"].get("op_name", "")
            if steps and _is_ours(event) and not op_type.startswith("Memcpy"):
                continue  # a region, whose steps are told
            durations[name, op_type].append(event["dur"])
    times = [
        NodeTime(name, op_type, sum(microseconds) / 1e3 / runs)
        for (name, op_type), microseconds in durations.items()
    ]
    return sorted(times, key=lambda node: -node.mean_ms)


def _is_ours(event: Mapping[str, Any]) -> bool:
    """Whether an event of ONNX Runtime's profiler is the execution provider's."""
    return bool(event["args"].get("provider") == get_ep_name())


def fresh_process(subject: Subject) -> tuple[float, int]:
    """Median load time (ms) and peak memory (bytes) of new processes that load and run the model once."""
    with tempfile.TemporaryDirectory() as folder:
        samples = os.path.join(folder, "feeds.npz")
        np.savez(samples, **subject.feed)  # type: ignore[arg-type]
        arguments = [subject.path, samples, str(subject.threads), str(int(subject.lowbit)), subject.device]
        command = [sys.executable, "-c", "from lowbit.measure.bench import fresh_main; fresh_main()"]
        results = []
        for _ in range(FRESH_TRIES):
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise_if_out_of_memory(RuntimeError(reason))
                raise ModelError(f"{subject.path}: failed in a fresh process: {reason}")
            results.append(json.loads(done.stdout))
    return (
        float(np.median([result["load_ms"] for result in results])),
        int(np.median([result["peak"] for result in results])),
    )


def fresh_main() -> None:
    """Runs in the fresh process: loads a model, runs it once, prints load time and peak memory as JSON."""
    path, samples, threads, lowbit, device = sys.argv[1:6]
    options = _options(path, int(threads), lowbit == "1", device)
    start = time.perf_counter()
    opened = open_session(path, options, device)
    load_ms = (time.perf_counter() - start) * 1e3
    with np.load(samples) as feed:
        opened.run(None, {name: feed[name] for name in feed.files})
    print(json.dumps({"load_ms": load_ms, "peak": _peak_memory()}))


def _peak_memory() -> int:
    """VmHWM of this process in bytes, 0 where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
