"""Whole networks: lowbit beside stock ONNX Runtime int8 of the same network, and OpenVINO where installed.

python benchmarks/networks.py                              one thread, pinned to a core
python benchmarks/networks.py --threads 2                  one and two threads in the same run, not pinned
python benchmarks/networks.py --networks resnet50 --bits w8a8,w4a8,w4a4,w2a8,w2a2
python benchmarks/networks.py --networks resnet50 --bits w2a2,w2a2e8   first and last layers of 8 bits, too
python benchmarks/networks.py --without winograd           also lowbit with the best of its other kernels
python benchmarks/networks.py --custom-ops --threads 2     also what regions gain over custom ops

All sessions of a network are open in one process and take turns in short blocks, so that whatever disturbs
the machine disturbs all of them; the figure is the ratio of medians. Creation time and peak memory come from
fresh processes. Every run checks that the peers compute in int8: ONNX Runtime's optimized graph may hold no
float convolution, and OpenVINO's layers must have int8 kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import openvino_peer
from lowbit import _native
from lowbit.measure import tune
from lowbit.measure.bench import PAUSE_SECONDS, Subject, fresh_process, pinned, take_turns
from lowbit.models import NETWORKS, build, save
from lowbit.models.calibration import images
from results import WORK, Cell, Table, write

STOCK = "onnxruntime w8a8"
CUSTOM_OPS = ", cpu-ops"
"""Behind the name of a row: lowbit on that device, in the same run as on device cpu, which runs regions."""


@dataclass
class Row:
    """What was measured of one session."""

    name: str
    threads: int
    file_bytes: int
    load_ms: float
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)
    processor_ms: float | None = None
    kernels: dict[str, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median milliseconds of a run."""
        return float(np.median(self.seconds)) * 1e3

    @property
    def disturbed(self) -> bool:
        """Whether other work on the machine shows: the median is far above what the session can do."""
        return self.median > 1.3 * float(np.percentile(self.seconds, 10)) * 1e3

    def raw(self) -> dict[str, Any]:
        """Plain data for the results file."""
        p10, median, p90 = (float(ms) for ms in np.percentile(self.seconds, (10, 50, 90)) * 1e3)
        return {
            "name": self.name,
            "threads": self.threads,
            "runs": len(self.seconds),
            "median_ms": median,
            "p10_ms": p10,
            "p90_ms": p90,
            "processor_ms": self.processor_ms,
            "load_ms": self.load_ms,
            "peak_bytes": self.peak_bytes,
            "file_bytes": self.file_bytes,
            "kernels": self.kernels,
        }


def built(network: str, bits: str, *, layers_only: bool = False, batch: int | str = 1) -> Path:
    """The QDQ model of a network in the work folder, built when it is not there yet."""
    form = ("_layers_only" if layers_only else "") + (f"_batch{batch}" if batch != 1 else "")
    path = WORK / f"{network}_{bits}{form}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        widths, _, ends = bits.partition("e")
        w_bits, a_bits = int(widths[1]), int(widths[3])
        model = build(
            network, w_bits, a_bits, layers_only=layers_only, batch=batch, ends=int(ends) if ends else None
        )
        save(model, path)
    return path


def converted(source: Path) -> Path:
    """The lowbit model of a QDQ model; converted anew, because it is the converter that is measured too."""
    path = source.with_suffix(".lowbit.onnx")
    path.unlink(missing_ok=True)
    lowbit.convert(source, path)
    return path


@contextlib.contextmanager
def kernels_without(algorithm: str, path: Path, threads: int) -> Iterator[None]:
    """Sessions of the model opened inside take the best kernels of other algorithms, by its estimate.

    A file of measured choices in a folder of its own says so.
    """
    report = tune.TuneReport("", _native.default_isa(), threads)
    left_out = {row["name"] for row in _native.kernel_table() if row["algorithm"] == algorithm}
    before = os.environ.get("LOWBIT_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWBIT_CACHE_DIR"] = folder
        tune.keep(
            {
                (problem.key, threads): next(name for name in problem.kernels if name not in left_out)
                for problem in tune.problems_of(onnx.load(path), {}, report)
            }
        )
        try:
            yield
        finally:
            del os.environ["LOWBIT_CACHE_DIR"]
            if before is not None:
                os.environ["LOWBIT_CACHE_DIR"] = before


def optimized_ops(path: Path) -> dict[str, int]:
    """Operator -> count of what ONNX Runtime makes of a stock model."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return dict(Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node))


def logits(path: Path, sample: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The output of a model, lowbit or stock, for one sample."""
    return np.asarray(lowbit.session(path, threads=1).run(None, {"input": sample})[0], np.float32)


def measure(
    network: str, threads: list[int], openvino: bool, options: argparse.Namespace
) -> tuple[list[Row], list[str]]:
    """Measures one network as the command line asks; returns the rows and what is worth noting."""
    notes = []
    sample = images(1, 224, seed=3)
    stock = built(network, "w8a8")
    ops = optimized_ops(stock)
    floats = {op: ops[op] for op in ("Conv", "Gemm", "FusedConv", "MatMul") if op in ops}
    if floats:
        raise RuntimeError(f"stock ONNX Runtime leaves float layers in {network} w8a8: {floats}")

    rows: list[Row] = []
    runs: list[Callable[[], None]] = []

    def add(name: str, path: Path, count: int, device: str = "cpu") -> None:
        subject = Subject.read(str(path), threads=count, seed=3, shapes=None, device=device)
        load_ms, peak = fresh_process(subject)
        rows.append(Row(name, count, subject.file_bytes, load_ms, peak))
        runs.append(subject.bound_run())

    for count in threads:
        add(STOCK, stock, count)
        rows[-1].kernels = ops
    for bits in options.bits.split(","):
        source = built(network, bits)
        target = converted(source)
        if bits == "w8a8":
            ours, theirs = logits(target, sample), logits(source, sample)
            difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
            same = int(ours.argmax()) == int(theirs.argmax())
            notes.append(
                f"{network} w8a8: largest logit difference to stock {difference:.3g} of the largest logit, "
                f"top-1 {'equal' if same else 'different'}."
            )
        for count in threads:
            add(f"lowbit {bits}", target, count)
            if options.custom_ops:
                add(f"lowbit {bits}{CUSTOM_OPS}", target, count, "cpu-ops")
            if options.without:
                with kernels_without(options.without, target, count):
                    add(f"lowbit {bits} without {options.without}", target, count)
    if openvino:
        for count in threads:
            more = add_openvino(network, sample, count, rows, runs)
            notes += more if count == threads[0] else []
    pause = PAUSE_SECONDS if max(threads) > 1 else 0.0
    for row, seconds in zip(rows, take_turns(runs, options.rounds, pause=pause), strict=True):
        row.seconds = seconds
    if options.custom_ops:
        alone = [i for i, row in enumerate(rows) if row.threads == 1 and row.name.startswith("lowbit")]
        taken = take_turns([runs[i] for i in alone], options.rounds, clock=time.thread_time)
        for i, seconds in zip(alone, taken, strict=True):
            rows[i].processor_ms = float(np.median(seconds)) * 1e3
    return rows, notes


def add_openvino(
    network: str,
    sample: npt.NDArray[np.float32],
    threads: int,
    rows: list[Row],
    runs: list[Callable[[], None]],
) -> list[str]:
    """Adds OpenVINO on the same file or, where it crashes, on one whose Concats and pools are float."""
    notes: list[str] = []
    name, path = "openvino w8a8", built(network, "w8a8")
    facts = openvino_peer.probe(path, threads)
    if facts is None:
        name, path = "openvino w8a8, layers only", built(network, "w8a8", layers_only=True)
        facts = openvino_peer.probe(path, threads)
        notes.append(
            f"{network}: OpenVINO fails on the fully quantized file; here its Concats and pools are float."
        )
    if facts is None:
        return [f"{network}: OpenVINO fails, also with float Concats and pools."]
    floats = {kernel: count for kernel, count in facts["kernels"].items() if not kernel.endswith("I8")}
    if floats:
        notes.append(f"{network}: OpenVINO runs layers without int8 kernels: {floats}.")
    rows.append(
        Row(name, threads, path.stat().st_size, facts["load_ms"], facts["peak"], kernels=facts["kernels"])
    )
    runs.append(openvino_peer.open_run(path, sample, threads))
    return notes


def table(network: str, rows: list[Row]) -> Table:
    """The rows of a network, each beside stock ONNX Runtime with as many threads."""
    columns = ["model", "threads", "ms", "ratio", "create ms", "peak MB", "file MB"]
    several = len({row.threads for row in rows}) > 1
    if several:
        columns.insert(4, "gain over one thread")
    out = Table(network, columns)
    medians = {(row.name, row.threads): row.median for row in rows}
    for row in rows:
        cells: list[str | int | float] = [row.name, row.threads, row.median]
        cells.append(row.median / medians[STOCK, row.threads])
        if several:
            cells.append(medians[row.name, 1] / row.median)
        out.rows.append([*cells, row.load_ms, row.peak_bytes / 1e6, row.file_bytes / 1e6])
    return out


def regions_over_custom_ops(raw: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """What regions take of what custom ops take, of every network that was measured with both."""
    out = Table(
        "Regions (device cpu) over custom ops (device cpu-ops)",
        ["network", "bits", "threads", "time", "processor time", "create", "peak memory"],
    )
    for network, rows in raw.items():
        measured = {(row["name"], row["threads"]): row for row in rows}
        for (name, threads), ops in measured.items():
            if name.endswith(CUSTOM_OPS):
                regions = measured[name.removesuffix(CUSTOM_OPS), threads]
                ratios: list[Cell] = [
                    regions[key] / ops[key] if ops[key] else ""
                    for key in ("median_ms", "processor_ms", "load_ms", "peak_bytes")
                ]
                bits = name.removesuffix(CUSTOM_OPS).split()[-1]
                out.rows.append([network, bits, threads, *ratios])
    return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS), help="default: all")
    parser.add_argument(
        "--bits", default="w8a8", help="bit pairs of lowbit, such as w8a8,w4a8 (default: w8a8)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="also measure with this many threads, not pinned"
    )
    parser.add_argument("--core", type=int, default=0, help="core of a run with one thread (default: 0)")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of 50 ms per session (default: 20)")
    parser.add_argument("--no-openvino", action="store_true", help="leave OpenVINO out")
    parser.add_argument("--without", default="", help="an algorithm that is left out for comparison")
    parser.add_argument("--custom-ops", action="store_true", help="also lowbit on device cpu-ops")
    parser.add_argument("--name", help="name of the results file (default: networks_<threads>t)")
    options = parser.parse_args()
    openvino = not options.no_openvino and openvino_peer.available()
    threads = [1] if options.threads == 1 else [1, options.threads]
    pinning = f"pinned to core {options.core}" if len(threads) == 1 else "not pinned"
    notes = [
        f"Batch 1, 224x224, seeded weights; {options.rounds} blocks a session, in turns.",
        f"ms: median; ratio: of medians, to {STOCK} with as many threads.",
        f"Threads: {options.threads}, {pinning}.",
        "Stock ONNX Runtime runs every convolution and fully connected layer of w8a8 in an integer kernel.",
    ]
    tables, raw = [], {}
    for network in options.networks.split(","):
        with pinned([options.core] if len(threads) == 1 else []):
            rows, more = measure(network, threads, openvino, options)
        notes += more
        disturbed = [f"{row.name} ({row.threads})" for row in rows if row.disturbed]
        if disturbed:
            names = ", ".join(disturbed)
            notes.append(f"{network}: disturbed, median over 1.3 times the tenth percentile: {names}.")
        tables.append(table(network, rows))
        raw[network] = [row.raw() for row in rows]
        print(tables[-1].markdown(), flush=True)
    if options.custom_ops:
        tables.insert(0, regions_over_custom_ops(raw))
        notes.append(
            "processor time: of the one thread, which leaves out what other work on the machine takes."
        )
    title = f"Whole networks, {options.threads} thread{'s' if options.threads > 1 else ''}"
    write(options.name or f"networks_{options.threads}t", title, tables, notes, raw)


if __name__ == "__main__":
    main()
