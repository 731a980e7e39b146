"""What a GPU's trace tells of its time, and what a model is worth that was compiled without that GPU.

python benchmarks/gpu_shipping.py                                          on an NVIDIA GPU

A network is tuned, then compiled twice from the measured choices: on the GPU, and for its architecture by a
process that sees none (`lowbit compile --target`). Times are device times of a run among many
(`gpu_networks.py`), all of a network in turns. The trace is that of ONNX Runtime's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lowbit
import numpy as np
import onnxruntime as ort
from gpu_networks import Network, Subject, facts_of, source_of
from lowbit.sessions.devices import canonical
from results import RESULTS, Table, write

PROFILED_RUNS = 20


def profiled_us(path: Path, device: str, cache: str, feed: dict[str, Any], folder: str) -> float:
    """Microseconds of a run's kernels together, by the trace: the median of runs."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "trace")
    session = lowbit.session(path, device=device, sess_options=options, provider_options={"cache_dir": cache})
    for _ in range(PROFILED_RUNS):
        session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [event["args"] for event in events if event["cat"] == "Kernel" and event["args"].get("kernel")]
    times = np.array([int(kernel["duration_ns"]) for kernel in kernels])
    runs = times.reshape(PROFILED_RUNS, -1).sum(axis=1)
    return float(np.median(runs)) / 1e3


def compile_apart(path: Path, output: Path, *options: str, **environment: str) -> None:
    """Compiles in a process of its own."""
    command = [sys.executable, "-m", "lowbit", "compile", str(path), "-o", str(output), "-q", *options]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def opening_ms(path: Path, device: str) -> float:
    """Milliseconds to open a compiled model, CUDA being up: the median of five."""
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        session = lowbit.session(path, device=device)
        spent.append((time.perf_counter() - start) * 1e3)
        del session  # what it takes to close is not counted
    return float(np.median(spent))


def measure(network: Network, batch: int, device: str, target: str, rounds: int) -> dict[str, Any]:
    """All that there is to know of a network at one batch size."""
    feed = network.feed(batch)
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "cache")
        Subject(network, device, "on", cache, feed)
        here, elsewhere, apart = (Path(folder) / f"{name}.onnx" for name in ("here", "elsewhere", "apart"))
        compile_apart(network.path, here, "--device", device, LOWBIT_CACHE_DIR=cache)
        for path, options in ((elsewhere, ()), (apart, ("--external",))):
            compile_apart(
                network.path, path, "--target", target, "--cache", cache, *options, CUDA_VISIBLE_DEVICES="-1"
            )
        tuned = Subject(network, device, "cached", cache, feed)
        place: Any = SimpleNamespace(path=elsewhere)
        compiled = Subject(place, device, "cached", cache, feed)
        if not np.array_equal(tuned.output, compiled.output):
            raise SystemExit(f"{network.name}, batch {batch}: a compiled model computes something else")
        times: dict[str, list[float]] = {"tuned": [], "compiled": []}
        for _ in range(rounds):
            times["tuned"].append(tuned.queued() * 1e6)
            times["compiled"].append(compiled.queued() * 1e6)
        return {
            "times": times,
            "opening": [opening_ms(path, device) for path in (elsewhere, apart)],
            "equal": here.read_bytes() == elsewhere.read_bytes(),
            "trace": profiled_us(network.path, device, cache, feed, folder),
        }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="sm_90", help="the GPU's architecture (default: sm_90)")
    parser.add_argument("--networks", default="resnet50,mobilenetv2", help="(default: resnet50,mobilenetv2)")
    parser.add_argument("--batches", default="1,16", help="(default: 1,16)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of 50 ms each (default: 7)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    table = Table(
        "compiled without a GPU, and traced",
        ["network", "batch", "tuned us", "compiled us", "compiled / tuned", "equal to the GPU's file",
         "opening one file ms", "opening two ms", "kernels of the trace us", "trace / tuned"],
    )  # fmt: skip
    raw = {}
    for name in options.networks.split(","):
        network = Network(name, "w8a8", source_of(name, "w8a8"))
        for batch in map(int, options.batches.split(",")):
            found = measure(network, batch, device, options.target, options.rounds)
            raw[f"{name}, batch {batch}"] = found
            tuned, compiled = (float(np.median(found["times"][mode])) for mode in ("tuned", "compiled"))
            table.rows.append(
                [name, batch, tuned, compiled, compiled / tuned, "yes" if found["equal"] else "no",
                 *found["opening"], found["trace"], found["trace"] / tuned]
            )  # fmt: skip
            print(Table("", table.columns, table.rows[-1:]).markdown(), flush=True)
    notes = [
        "Device time of a run, of many that are queued; the median of rounds in which both take turns.",
        "Two files: a small model and what was compiled beside it (`lowbit compile --external`).",
        "The kernels of a profiled run share its usual time, by what each takes alone.",
        "Outputs of the compiled model are those of the tuned session.",
    ]
    write("gpu_shipping", "A GPU's trace, and models compiled without a GPU", [table], notes, raw,
          folder=options.out, machine=facts_of(device), commit=options.commit)  # fmt: skip


if __name__ == "__main__":
    main()
