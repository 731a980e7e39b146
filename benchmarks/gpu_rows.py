"""What each kernel of the GPU is worth: networks without it, beside the same networks with all kernels.

python benchmarks/gpu_rows.py                                  five networks at batch 1, 16 and 128
python benchmarks/gpu_rows.py --networks resnet50 --batches 16 --without halo,windows
python benchmarks/gpu_rows.py --seconds 180                    begins nothing new after that time
python benchmarks/gpu_rows.py --device cpu-ep --rounds 1       does everything still run?

Every name that LOWBIT_CUDA_WITHOUT takes (docs/execution-provider.md) is left out in a process of its own,
which reads the variable once. The processes stay, open one network after the other and take turns: blocks of
50 ms of queued runs, as in gpu_networks.py. What a name costs is the median over rounds of its block over
that with all kernels in the same round, less one; its spread is half the distance between the highest and the
lowest round. `nothing` leaves nothing out: what is seen there is the error of the measurement. A cost
counts as far as it is above both.

Where the printed plan is the same without a name, nothing is timed: the name is not chosen there. All outputs
are equal in every element, which is checked. Without tuning by default, tuned besides with --tuned, which
takes minutes a network. What is measured is kept in --state and not measured again for the same commit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import lowbit
import numpy as np
import onnx
from gpu_networks import NETWORKS, Network, Subject, facts_of, source_of
from lowbit.sessions.binding import queued_seconds
from lowbit.sessions.devices import canonical
from results import RESULTS, WORK, Cell, Table, commit_here, write

ROWS = (
    "team",
    "bits",
    "flat_bits",
    "halo",
    "windows",
    "wgmma",
    "chain",
    "pair",
    "bit_pair",
    "bit_blocks",
    "conv_pool",
    "affined",
)
FUSIONS = (
    "residual_pair",
    "affine_conv",
    "joined_conv",
    "bottleneck",
    "quantized_conv",
    "dequantized_product",
)
OPTIONS = ("apart", "boxes", "cluster", "kept", "multicast", "producers", "float_sum")
"""What may go: kernels of sm_90 that have a substitute, fusions (pooled_stem is conv_pool) and options."""

CONTROL = "nothing"
CLEARLY = 1.0
"""Percent that a name must cost somewhere, beyond its spread, to be worth its code."""

QONNX = "resnet18_qonnx"
_STEP = re.compile(r"^  (.*: .*?), from", re.MULTILINE)
TUNINGS = {False: "off", True: "on"}


class Process:
    """A process without some kernels, which opens sessions and times their runs."""

    def __init__(self, without: str, device: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        environment = {**os.environ, "LOWBIT_PRINT_PLAN": "1", "LOWBIT_CUDA_WITHOUT": without}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", "--device", device],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def ask(self, **request: Any) -> None:
        """Hands a request over."""
        _stream(self._process.stdin).write(json.dumps(request) + "\n")
        _stream(self._process.stdin).flush()

    def answer(self) -> Any:
        """Waits for the answer to the oldest request.

        Raises:
            SystemExit: The process failed; the message is the end of its errors.
        """
        line = _stream(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"a process failed:\n{self._text()[-3000:]}")
        return json.loads(line)

    def plan(self) -> list[str]:
        """The steps with their kernels of the session that was opened last."""
        return _STEP.findall(self._text().rpartition("lowbit: region")[2])

    def _text(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Ends the process."""
        _stream(self._process.stdin).close()
        self._process.wait()
        self._errors.close()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def serve(device: str) -> None:
    """A process's side: opens sessions and times runs as it is told, until nobody asks."""
    device = canonical(device)
    with tempfile.TemporaryDirectory() as cache:
        subject: Subject | None = None
        for line in sys.stdin:
            request = json.loads(line)
            if "open" in request:
                subject = None  # its memory comes first
                feed = {request["input"]: np.load(request["feed"])}
                network: Any = SimpleNamespace(path=Path(request["open"]))
                subject = Subject(network, device, request["tuning"], cache, feed)
                answer: Any = hashlib.sha256(subject.output.tobytes()).hexdigest()
            else:
                assert subject is not None
                queued_seconds(subject.session, subject.binding, subject.runs // 5)  # after the others' turns
                answer = subject.queued() * 1e6
            print(json.dumps(answer), flush=True)


Measured = dict[str, dict[str, Any]]
"""Name -> rounds: microseconds of its blocks; base: of those with all kernels. Not chosen: no rounds."""


class Processes:
    """One for all kernels and one for each name, started when they are needed first."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        self.base = Process("", device)
        self.without = {name: Process("" if name == CONTROL else name, device) for name in names}

    def close(self) -> None:
        """Ends all."""
        for process in (self.base, *self.without.values()):
            process.close()

    def measure(
        self, network: Network, feed: Path, tuning: str, names: Sequence[str], rounds: int
    ) -> Measured:
        """A network at the batch size of the feed."""
        opened = {"": self.base, **{name: self.without[name] for name in names}}
        request = {"open": str(network.path), "input": network.input, "feed": str(feed), "tuning": tuning}
        outputs = {}
        if tuning == "on":  # what measures has the device to itself
            for name, process in opened.items():
                process.ask(**request)
                outputs[name] = process.answer()
        else:
            for process in opened.values():
                process.ask(**request)
            outputs = {name: process.answer() for name, process in opened.items()}
        for name, output in outputs.items():
            if output != outputs[""]:
                raise SystemExit(f"{network.name}: without {name} the outputs are others")
        plan = self.base.plan()
        timed = [name for name in opened if name in ("", CONTROL) or opened[name].plan() != plan]
        times: dict[str, list[float]] = {name: [] for name in timed}
        for turn in range(rounds):
            for name in timed if turn % 2 == 0 else timed[::-1]:
                opened[name].ask()
                times[name].append(opened[name].answer())
        return {name: {"rounds": times.get(name, []), "base": times[""]} for name in names}


def cost(measured: dict[str, Any]) -> tuple[float, float]:
    """Percent that a name costs where it is chosen, and their spread."""
    costs = (np.asarray(measured["rounds"]) / np.asarray(measured["base"]) - 1) * 100
    return float(np.median(costs)), float(np.ptp(costs) / 2)


def error(place: dict[str, Any], spread: float) -> float:
    """Percent by which a cost may be off there: its spread, or what leaving nothing out seems to cost.

    The latter is larger where kernels are tuned: two processes choose other kernels from the same ones.
    """
    control = place["names"].get(CONTROL)
    return max(spread, abs(cost(control)[0])) if control else spread


def verdict(places: Sequence[dict[str, Any]], name: str) -> list[Cell]:
    """Cells of a name: where it is chosen, the most that it costs there, and what that says."""
    costs = []
    for place in places:
        if place["names"][name]["rounds"]:
            median, spread = cost(place["names"][name])
            costs.append((median, spread if name == CONTROL else error(place, spread)))
    if not costs:
        return [f"0 of {len(places)}", "-", "-", "not chosen"]
    most, off = max(costs, key=lambda each: each[0] - each[1])
    said: Cell = "worth it" if most - off >= CLEARLY else f"under {CLEARLY:g} %"
    return [f"{len(costs)} of {len(places)}", f"{most:+.1f}", f"{off:.1f}", said]


def tables(state: Measured, names: Sequence[str]) -> list[Table]:
    """The verdicts, then each network's costs."""
    out = []
    for tuned, tuning in TUNINGS.items():
        title = "What each name is worth, " + ("tuned" if tuned else "untuned")
        table = Table(title, ["left out", "chosen", "costs at most %", "off by %", "verdict"])
        places = [place for place in state.values() if place["tuning"] == tuning]
        if not places:
            continue
        for name in names:
            found = [place for place in places if name in place["names"]]
            if found:
                cells = verdict(found, name)
                table.rows.append([name, *([*cells[:-1], "-"] if name == CONTROL else cells)])
        out.append(table)
        for network in dict.fromkeys(place["network"] for place in places):
            own = [place for place in places if place["network"] == network]
            columns = [f"batch {place['batch']}" for place in own]
            table = Table(f"{network}, {'tuned' if tuned else 'untuned'}: %", ["left out", *columns])
            table.rows.append(["all kernels, us", *(float(np.median(place["us"])) for place in own)])
            table.rows += [[name, *(_cell(place["names"].get(name)) for place in own)] for name in names]
            out.append(table)
    return out


def _cell(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "not measured"
    if not measured["rounds"]:
        return "not chosen"
    median, spread = cost(measured)
    return f"{median:+.1f} ± {spread:.1f}"


class State:
    """What was measured of a commit on a device, in a file that every place is added to."""

    def __init__(self, path: Path, origin: dict[str, str]) -> None:
        self._path, self._origin = path, origin
        self.places: Measured = {}
        with contextlib.suppress(OSError, ValueError):
            document = json.loads(path.read_text())
            if document["origin"] == origin:
                self.places = document["places"]

    def add(self, key: str, place: dict[str, Any]) -> None:
        """Adds a place, or more names of one."""
        known = self.places.setdefault(key, {**place, "names": {}})
        known["names"] |= place["names"]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps({"origin": self._origin, "places": self.places}))
        written.replace(self._path)


def qonnx_source() -> Path:
    """ResNet-18 with 4 bits as QONNX, with a symbolic batch, in the work folder."""
    path = WORK / f"{QONNX}_batch.onnx"
    if not path.exists():
        converted = lowbit.convert(onnx.load(source_of("resnet18", "w4a4"))).model
        onnx.save(lowbit.export(converted, to="qonnx").model, path)
    return path


def sources(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Names and models that were asked for."""
    for name in filter(None, options.networks.split(",")):
        yield name, qonnx_source() if name == QONNX else source_of(name, "w8a8")
    for text in options.model:
        name, _, path = text.partition("=")
        yield name, Path(path)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", default=",".join([*NETWORKS, QONNX]), help="(default: %(default)s)")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help="also this model")
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--without", default=",".join([*ROWS, *FUSIONS, *OPTIONS]), help="names to leave out")
    parser.add_argument("--tuned", action="store_true", help="tuned besides")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of 50 ms a process (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="time after which nothing is begun"
    )
    parser.add_argument("--state", type=Path, default=WORK / "gpu_rows.json", help="what was measured")
    parser.add_argument("--name", default="gpu_rows", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.device)
        return
    end = time.monotonic() + options.seconds
    device = canonical(options.device)
    commit = options.commit or commit_here()
    names = [CONTROL, *filter(None, options.without.split(","))]
    state = State(options.state, {"commit": commit, **facts_of(device)})
    left = 0
    with contextlib.ExitStack() as stack:
        processes: Processes | None = None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, source in sources(options):
            network: Network | None = None
            for tuned in [False, True][: 1 + options.tuned]:
                for batch in map(int, options.batches.split(",")):
                    key = f"{name}, batch {batch}, tuning {TUNINGS[tuned]}"
                    known = state.places.get(key, {}).get("names", {})
                    missing = [each for each in names if each not in known]
                    if not missing:
                        continue
                    if time.monotonic() >= end:
                        left += 1
                        continue
                    if processes is None:
                        processes = Processes(names, device)
                        stack.callback(processes.close)
                    network = network or Network(name, "-", source)
                    feed = folder / "feed.npy"
                    np.save(feed, network.feed(batch)[network.input])
                    start = time.monotonic()
                    found = processes.measure(network, feed, TUNINGS[tuned], missing, options.rounds)
                    us = next(iter(found.values()))["base"]
                    place = {"network": name, "batch": batch, "tuning": TUNINGS[tuned], "us": us}
                    state.add(key, {**place, "names": found})
                    print(f"{key}: {np.median(us):.4g} us, {time.monotonic() - start:.1f} s", flush=True)
    notes = [
        "Percent that a run takes longer where LOWBIT_CUDA_WITHOUT leaves a name out: device time, processes "
        f"in turns, median of {options.rounds} rounds; the spread is half of the highest less the lowest.",
        f"`{CONTROL}` leaves nothing out: the error of the measurement, between two processes.",
        f"A name is worth its code where it costs {CLEARLY:g} % somewhere, beyond its spread and beyond what "
        f"`{CONTROL}` seems to cost there. Not chosen: the plan is the same without it.",
        "Outputs without a name are equal in every element.",
        "resnet18_qonnx: 4-bit weights and activations, from QONNX; the others have 8 bits.",
    ]
    if left:
        notes.append(f"Not all was measured: {left} pairs of network and batch size are left.")
    write(options.name, "What each GPU kernel is worth", tables(state.places, names), notes, state.places,
          folder=options.out, machine=facts_of(device), commit=commit)  # fmt: skip


if __name__ == "__main__":
    main()
