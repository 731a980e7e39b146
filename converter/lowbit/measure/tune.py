"""Measured kernel choices: the fastest row of the kernel table for each node of a model, on this machine.

A session chooses the kernel of a convolution or matrix product by estimated cost. :func:`tune` measures the
candidates at the model's own shapes and keeps the winners in a file that every later session reads, whichever
model it opens. The file's form and what a session makes of it are in ``custom_ops/core/cpu/tune_cache.h``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from lowbit.errors import LowBitError, OutputError
from lowbit.ops import DOMAIN
from lowbit.ops.codes import code_range
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.feeds import Model, as_proto
from lowbit.proto.tensors import Tensors, read_tensors
from lowbit.schemas import attributes_of
from lowbit.sessions.devices import canonical, has_own_memory

if TYPE_CHECKING:
    from lowbit.measure.device_tune import DeviceTuneReport

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
Entries = dict[tuple[str, int], str]
"""(what a node computes, threads) -> name of the fastest kernel."""

KERNEL_OPS = frozenset({"LowBitConv", "APConv", "LowBitConvTranspose", "LowBitGemm", "APGemm"})
"""The ops whose kernels are rows of the kernel table."""

LEAST_GAIN = 1.02
"""A kernel must be this much faster than the estimated choice to replace it: less is noise."""

MOST_CANDIDATES = 6
FARTHEST_ESTIMATE = 8.0
"""Measured are at most so many candidates, none estimated to be so many times slower than the best."""

ROUNDS = 15
"""Turns of every candidate. The duel between the estimated choice and the fastest has twice as many."""

TURN_SECONDS = 1e-3
"""Aimed length of a turn: long against the clock, short against a machine's mood."""


@dataclass
class NodeTuning:
    """What was measured of a node.

    Attributes:
        name: the node's name.
        op_type: its op.
        routed: the kernel of the lowest estimated cost.
        tuned: the kernel that sessions take from now on.
        gain: time of ``routed`` over time of ``tuned``, the median of turns side by side; 1.0 where they are
            the same.
        microseconds: median time of each measured kernel.
        reason: why the node was not measured.
    """

    name: str
    op_type: str
    routed: str | None = None
    tuned: str | None = None
    gain: float = 1.0
    microseconds: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass
class TuneReport:
    """All nodes that have a choice of kernels.

    Attributes:
        cache: the file that holds the choices.
        isa: the instruction set they are for.
        threads: the number of threads they are for.
        problems: different problems among the nodes; each was measured once.
        nodes: in the order of the model.
        warnings: what the user should know beyond that.
    """

    cache: str
    isa: str
    threads: int
    problems: int = 0
    nodes: list[NodeTuning] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def changed(self) -> int:
        """Nodes that get another kernel than the estimate would give them."""
        return sum(node.tuned != node.routed for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {**asdict(self), "changed": self.changed}


@overload
def tune(
    model: Model,
    *,
    shapes: Mapping[str, list[int]] | None = None,
    threads: int | None = None,
    isa: str | None = None,
    device: Literal["cpu", "cpu-ep"] = "cpu",
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> TuneReport: ...
@overload
def tune(
    model: Model,
    *,
    shapes: Mapping[str, list[int]] | None = None,
    threads: int | None = None,
    isa: str | None = None,
    device: str,
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> TuneReport | DeviceTuneReport: ...
def tune(
    model: Model,
    *,
    shapes: Mapping[str, list[int]] | None = None,
    threads: int | None = None,
    isa: str | None = None,
    device: str = "cpu",
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> TuneReport | DeviceTuneReport:
    """Measures the kernels that could run each convolution and matrix product, and keeps the fastest.

    Results do not change: every kernel computes the same numbers. On a GPU the execution provider measures,
    in one profile run for each batch size (:func:`lowbit.measure.device_tune.tune_device`).

    Args:
        model: a converted model, or one that is converted in memory.
        device: "cpu" or "cpu-ep", which share their choices, or a GPU.
        batches: batch sizes to tune a GPU for; none: a symbolic batch counts as 1.
        shapes: sizes of inputs with symbolic dims; as in :func:`lowbit.inspect` otherwise. A choice for a
            model that leaves sizes open holds for whatever sizes it is fed.
        threads: as many as the sessions will have; None: one for each CPU of this process.
        isa: the instruction set to tune for; None: the best of this machine under the cap of ``LOWBIT_ISA``.
        progress: called with (problems done, problems in all).

    Raises:
        ModelError: if the model cannot be read.
        OutputError: if the file cannot be written; what it held before stays.
        LowBitError: for arguments out of range.
    """
    from lowbit import _native

    place = canonical(device)
    if has_own_memory(place):
        from lowbit.measure.device_tune import tune_device

        if threads is not None or isa is not None:
            raise LowBitError("threads and instruction sets are of the CPU; a GPU is tuned without them")
        return tune_device(model, place, cache=str(cache_path().parent), batches=batches, shapes=shapes,
                           progress=progress)  # fmt: skip
    if batches:
        raise LowBitError("batches are for GPUs: what is measured on a CPU holds for every batch")
    proto = as_proto(model)
    if not any(node.domain == DOMAIN for node in proto.graph.node):
        from lowbit.conversion.convert import convert

        proto = convert(Path(model) if isinstance(model, (str, os.PathLike)) else proto).model
    count = _cpus() if threads is None else threads
    _require_cache(cache_path())  # before minutes of measuring
    report = TuneReport(str(cache_path()), isa or _native.default_isa(), count)
    try:
        problems = list(problems_of(proto, shapes or {}, report))
        winners: dict[str, _Winner] = {}
        report.problems = len({problem.key for problem in problems})
        for problem in problems:
            if problem.key not in winners:
                if progress is not None:
                    progress(len(winners), report.problems)
                winners[problem.key] = _measure(problem, report)
            winner = winners[problem.key]
            node = problem.node
            node.routed, node.tuned, node.gain = problem.kernels[0], winner.kernel, winner.gain
            node.microseconds = winner.microseconds
    except _native.LowBitError as error:
        raise LowBitError(str(error)) from error
    if winners:
        report.warnings += keep({(key, count): winner.kernel for key, winner in winners.items()})
    if not _native.tune_cache_enabled():
        report.warnings.append("LOWBIT_TUNE is off: sessions do not take measured choices")
    return report


@dataclass(frozen=True)
class Problem:
    """A node with everything that its kernels need."""

    node: NodeTuning
    attrs: dict[str, Any]
    inputs: list[Array | None]
    key: str
    kernels: list[str]  # to be measured, the estimated choice first


@dataclass(frozen=True)
class _Winner:
    kernel: str
    gain: float
    microseconds: dict[str, float]


def problems_of(
    model: onnx.ModelProto, shapes: Mapping[str, list[int]], report: TuneReport
) -> Iterator[Problem]:
    """The nodes that have a choice; the report gets every node of the kernel table's ops."""
    from lowbit import _native

    tensors = read_tensors(model, shapes)
    for name, sizes in tensors.assumed.items():
        report.warnings.append(
            f"the sizes of input '{name}' are symbolic; kernels are measured for {sizes}. Give others with "
            f"--shape {name}=D0,D1,.."
        )
    rng = np.random.default_rng(0)
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in KERNEL_OPS:
            continue
        entry = NodeTuning(node.name or f"{node.op_type} of {node.output[0]}", node.op_type)
        report.nodes.append(entry)
        attrs = attributes_of(node)
        inputs: list[Array | None] = []
        for i, name in enumerate(node.input):
            if name in tensors.constants or not name:
                inputs.append(tensors.constants.get(name))
            elif (value := _codes(rng, name, tensors, attrs if i == 0 else {})) is not None:
                inputs.append(value)
            else:
                entry.reason = f"the shape of '{name}' is not known; give sizes with --shape"
                break
        if entry.reason:
            continue
        plan = _native.plan(
            node.op_type, attrs, inputs, isa=report.isa, threads=report.threads,
            x_shape=tensors.stated.get(node.input[0], []),
        )  # fmt: skip
        candidates = plan["candidates"]
        limit = candidates[0]["cycles"] * FARTHEST_ESTIMATE
        kernels = [each["kernel"] for each in candidates if each["cycles"] <= limit]
        yield Problem(entry, attrs, inputs, plan["tune_key"], kernels[:MOST_CANDIDATES])


def _codes(rng: np.random.Generator, name: str, tensors: Tensors, attrs: Mapping[str, Any]) -> Array | None:
    """Random codes for a fed input; None where its shape is not known."""
    sizes = tensors.sizes(name)
    if sizes is None:
        return None
    dtype = helper.tensor_dtype_to_np_dtype(tensors.types[name].tensor_type.elem_type)
    encoding = attrs.get("x_encoding", "signed" if dtype == np.int8 else "unsigned")
    low, high = code_range(attrs.get("x_bits", 8), encoding)
    return rng.integers(low, high, sizes, endpoint=True).astype(dtype)


def _measure(problem: Problem, report: TuneReport) -> _Winner:
    """Lets the candidates take turns, then the estimated choice and the fastest alone."""
    routed, times = problem.kernels[0], _race(problem, problem.kernels, report, ROUNDS)
    medians = np.median(times, axis=1)
    microseconds = {name: float(s) * 1e6 for name, s in zip(problem.kernels, medians, strict=True)}
    fastest = problem.kernels[int(np.argmin(medians))]
    if fastest == routed or medians[0] / medians.min() <= LEAST_GAIN:
        return _Winner(routed, 1.0, microseconds)
    # The minimum of several medians flatters; what counts is whether it wins again, turn against turn.
    duel = _race(problem, [routed, fastest], report, 2 * ROUNDS)
    gain = float(np.median(duel[0] / duel[1]))
    return _Winner(fastest, gain, microseconds) if gain > LEAST_GAIN else _Winner(routed, 1.0, microseconds)


def _race(problem: Problem, kernels: Sequence[str], report: TuneReport, rounds: int) -> Array:
    """Seconds of a run, [kernels, rounds]."""
    from lowbit import _native

    if len(kernels) == 1:
        rounds = min(rounds, 3)  # nothing to compare; for the table
    runners = [(problem.node.op_type, problem.attrs, problem.inputs, kernel) for kernel in kernels]
    times: Array = _native.race(
        runners, isa=report.isa, threads=report.threads, rounds=rounds, turn_seconds=TURN_SECONDS
    )
    return times


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- the file


def cache_path() -> Path:
    """The file of this machine and this build of lowbit. Raises LowBitError where no folder is known."""
    from lowbit import _native

    path = _native.tune_cache_path()
    if not path:
        raise LowBitError("no folder for measured choices: neither LOWBIT_CACHE_DIR nor HOME is set")
    return Path(path)


def keep(entries: Entries) -> list[str]:
    """Adds entries to the file, replacing those of equal keys; returns warnings.

    Raises:
        OutputError: if the file cannot be written; what it held before stays.
    """
    from lowbit import _native

    path = cache_path()
    warnings: list[str] = []
    _require_cache(path)
    with _locked(path.parent):
        merged: Entries = {}
        try:
            merged = {(key, threads): kernel for key, threads, kernel in
                      _native.parse_tune_cache(path.read_bytes())}  # fmt: skip
        except FileNotFoundError:
            pass
        except OSError as error:
            raise OutputError(f"{path}: what it holds cannot be read: {error.strerror or error}") from error
        except _native.LowBitError as error:
            warnings.append(f"{path}: its old entries are lost: {error}")
        merged |= entries
        text = _native.format_tune_cache([(*key, kernel) for key, kernel in merged.items()])
        write_atomically(path, lambda temporary: _write(temporary, text), overwrite=True)
    return warnings


def _require_cache(path: Path) -> None:
    """Makes the folder of the file and checks that the file can be read and written; a pipe would wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: cannot be created: {error.strerror or error}; set LOWBIT_CACHE_DIR"
        ) from error
    try:
        check_writable(path, overwrite=True)
    except OutputError as error:
        raise OutputError(f"{error}, or set LOWBIT_CACHE_DIR, where measured choices are kept") from error


def clear() -> list[Path]:
    """Removes the files of measured choices of all builds, and returns which there were."""
    removed = []
    for path in sorted(cache_path().parent.glob("tune-*.txt")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{path}: cannot be removed: {error.strerror or error}") from error
        removed.append(path)
    return removed


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that tune from merging at the same time.

    The folder itself is locked, which leaves no lock file behind. Where a system or a file system has no such
    locks the last writer may drop what another one added in the same instant; never a damaged file.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
