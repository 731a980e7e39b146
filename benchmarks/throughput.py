"""Images a second on a CPU, as a server asks for them: large batches, and a session for each core.

python benchmarks/throughput.py                                 all cores, batches of 1, 8 and 32
python benchmarks/throughput.py --networks resnet50 --bits w8a8,w2a2 --threads 16

lowbit in regions (device cpu) and as custom ops (cpu-ops), stock ONNX Runtime int8, and OpenVINO int8 where
it is installed, from one QDQ file. A batch runs in one session with all threads. "Sessions" are as many as
there are threads, each with one thread and called from one of its own, an image a run; OpenVINO gets its
setting for that, as many streams in one model. All are open in one process and take turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openvino_peer
from lowbit.measure.bench import PAUSE_SECONDS, Subject, take_turns
from lowbit.models import NETWORKS
from lowbit.models.calibration import images
from networks import CUSTOM_OPS, STOCK, built, converted
from results import Table, write

Run = Callable[[], None]

PEER = "openvino w8a8"


def side_by_side(runs: Sequence[Run], times: int, pool: ThreadPoolExecutor) -> Run:
    """A function that calls all of ``runs`` at once, each ``times`` times on a thread of its own."""

    def repeated(run: Run) -> None:
        for _ in range(times):
            run()

    def run_all() -> None:
        for finished in [pool.submit(repeated, run) for run in runs]:
            finished.result()

    return run_all


def opened(path: Path, batch: int, threads: int, device: str) -> Run:
    """A function that runs a batch in a new session of ONNX Runtime."""
    shapes = {"input": [batch, 3, 224, 224]}
    return Subject.read(str(path), threads, 3, shapes, device).bound_run()


def of_peer(path: Path, batch: int, threads: int, streams: int) -> list[Run]:
    """Functions that run a batch in OpenVINO, one for each stream."""
    return openvino_peer.open_runs(path, images(batch, 224, seed=3), threads, streams)


def measure(network: str, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Images a second of every way to run a network, in turns for each column of the table."""
    stock = built(network, "w8a8", batch="N")
    subjects = {STOCK: (stock, "cpu")}
    for bits in options.bits.split(","):
        path = converted(built(network, bits, batch="N"))
        subjects[f"lowbit {bits}"] = path, "cpu"
        subjects[f"lowbit {bits}{CUSTOM_OPS}"] = path, "cpu-ops"
    with_peer = not options.no_openvino and openvino_peer.probe(stock, options.threads) is not None
    names = [*subjects, *([PEER] if with_peer else [])]
    batches = [int(batch) for batch in options.batches.split(",")]
    columns = [f"batch {batch}" for batch in batches] + [f"{options.threads} sessions"]
    seconds: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(options.threads) as pool:
        for column, batch in zip(columns, [*batches, 1], strict=True):
            is_single = column in columns[:-1]
            runs = []
            for path, device in subjects.values():
                if is_single:
                    runs.append(opened(path, batch, options.threads, device))
                else:
                    alone = [opened(path, 1, 1, device) for _ in range(options.threads)]
                    runs.append(side_by_side(alone, options.repeats, pool))
            if with_peer:
                streams = of_peer(stock, batch, options.threads, 1 if is_single else options.threads)
                runs.append(streams[0] if is_single else side_by_side(streams, options.repeats, pool))
            count = batch if is_single else options.threads * options.repeats
            taken = take_turns(runs, options.rounds, pause=PAUSE_SECONDS)
            seconds[column] = {
                name: float(np.median(s)) / count for name, s in zip(names, taken, strict=True)
            }
    table = Table(network, ["model", *(cell for column in columns for cell in (column, "ratio"))])
    for name in names:
        cells: list[str | int | float] = [name]
        for column in columns:
            cells += [1 / seconds[column][name], seconds[column][name] / seconds[column][STOCK]]
        table.rows.append(cells)
    return table, seconds


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=",".join(NETWORKS), help="default: all")
    parser.add_argument("--bits", default="w8a8", help="bit pairs of lowbit (default: w8a8)")
    parser.add_argument("--batches", default="1,8,32", help="batch sizes (default: 1,8,32)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of a session, or sessions (default: cores)"
    )
    parser.add_argument("--repeats", type=int, default=4, help="runs of each of the sessions in a block")
    parser.add_argument("--rounds", type=int, default=10, help="blocks per way (default: 10)")
    parser.add_argument("--no-openvino", action="store_true", help="leave OpenVINO out")
    parser.add_argument("--name", default="throughput", help="name of the results file")
    options = parser.parse_args()
    options.no_openvino |= not openvino_peer.available()
    notes = [
        "224x224, seeded weights, one QDQ file for all. Columns: images a second, and the ratio of times per "
        f"image to {STOCK} in the same column (below 1 is faster).",
        f"batch: one session with {options.threads} threads. sessions: each with one thread and a caller of "
        "its own, an image a run.",
        f"Medians of {options.rounds} blocks, in turns, not pinned.",
    ]
    tables, raw = [], {}
    for network in options.networks.split(","):
        table, raw[network] = measure(network, options)
        tables.append(table)
        print(table.markdown(), flush=True)
    write(options.name, f"Throughput on {options.threads} cores", tables, notes, raw)


if __name__ == "__main__":
    main()
