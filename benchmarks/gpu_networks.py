"""Whole networks on a GPU, through InferenceSession with inputs and outputs bound there.

python benchmarks/gpu_networks.py                                     four networks at batch 1, 16 and 128
python benchmarks/gpu_networks.py --networks resnet50 --batches 1,16
python benchmarks/gpu_networks.py --networks resnet50 --bits w8a8,w4a8,w2a8 --name cuda_resnet50_bits
python benchmarks/gpu_networks.py --model mine=model_qdq.onnx         a file with a symbolic batch
python benchmarks/gpu_networks.py --device cpu-ep --rounds 2          does everything still run?

- us: device time of a run. Many runs are queued one behind the other, then the device is waited for once;
  wall time over runs, the median of rounds. Weights and activations are then as warm in L2 as they ever are.
- run + wait: median wall time of `run_with_iobinding`, which waits for the device each time.
- Kernels are chosen three times: by the cost model (tuning=off), in a profile run (tuning=on), and from what
  that kept (tuning=cached, the default); the latter also without a CUDA graph. The sessions take turns; the
  cache is a fresh folder. Sessions that would leave a node to the CPU are refused.

Outputs are compared with the CPU's. The peers are recorded figures, see RECORDED; they are not measured here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from lowbit.models import build, save
from lowbit.models.calibration import images
from lowbit.proto.feeds import model_inputs
from lowbit.sessions.binding import bind, queued_seconds
from lowbit.sessions.devices import canonical
from results import RESULTS, WORK, Table, write

NETWORKS = ("resnet18", "resnet50", "mobilenetv2", "densenet121")
MODES = {
    "off": {"tuning": "off"},
    "on": {"tuning": "on"},
    "cached": {"tuning": "cached"},
    "no graph": {"tuning": "cached", "cuda_graph": "0"},
}
"""Name -> provider options. The second fills the cache that those after it read."""

BLOCK_SECONDS = 0.05
COMPARED = 4

RECORDED = """
Recorded on one NVIDIA H200, 2026-11-20, microseconds, medians of CUDA-graph replays with random data, checked
on samples: onnxruntime-gpu's CUDA provider, cuDNN 9.19 (fused, best of its plans). In the int8 QDQ model that
provider dequantizes the weights on the CPU in every run, so that no graph can be captured.
"""
PEERS: dict[str, dict[str, dict[int, float]]] = {
    "resnet50": {
        "ONNX Runtime CUDA int8": {1: 2834, 8: 5547, 16: 8849, 128: 48567},
        "ONNX Runtime CUDA fp32": {1: 2250, 16: 6571},
        "ONNX Runtime CUDA fp16": {1: 580, 8: 1127, 16: 1764, 128: 12036},
        "cuDNN int8": {1: 373, 8: 517, 16: 722, 128: 4036},
        "cuDNN fp16": {1: 314, 8: 453, 16: 639, 128: 3539},
    },
    "resnet18": {
        "ONNX Runtime CUDA int8": {1: 1378, 8: 2229, 16: 3401, 128: 16153},
        "ONNX Runtime CUDA fp16": {1: 248, 8: 828, 16: 1243, 128: 6777},
        "cuDNN int8": {1: 177, 8: 290, 16: 434, 128: 2425},
        "cuDNN fp16": {1: 142, 8: 210, 16: 270, 128: 1312},
    },
}
SHOWN = ("ONNX Runtime CUDA int8", "ONNX Runtime CUDA fp16", "cuDNN int8", "cuDNN fp16")

Array = npt.NDArray[Any]


@dataclass
class Row:
    """A network at one batch size; times in microseconds."""

    network: str
    bits: str
    batch: int
    queued: dict[str, list[float]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    profile_seconds: float = 0.0
    difference: float = 0.0

    def median(self, mode: str) -> float:
        """Device time of a run."""
        return float(np.median(self.queued[mode]))

    @property
    def wall(self) -> float:
        """Median time of a run that is waited for."""
        return float(np.median(self.walls))

    def peer(self, name: str) -> float | None:
        """A recorded time of the network at 8 bits."""
        return PEERS.get(self.network, {}).get(name, {}).get(self.batch)

    def raw(self) -> dict[str, Any]:
        """Plain data for the results file."""
        return {
            "network": self.network,
            "bits": self.bits,
            "batch": self.batch,
            "median_us": {mode: self.median(mode) for mode in self.queued},
            "rounds_us": self.queued,
            "wall_us": self.wall,
            "wall_p90_us": float(np.percentile(self.walls, 90)),
            "profile_seconds": self.profile_seconds,
            "difference": self.difference,
        }


class Network:
    """A converted model, and what is known of its input."""

    def __init__(self, name: str, bits: str, source: Path) -> None:
        self.name, self.bits = name, bits
        self.path = source.with_suffix(".lowbit.onnx")
        lowbit.convert(source, self.path, overwrite=True)
        ((self.input, value),) = model_inputs(onnx.load(self.path, load_external_data=False)).items()
        dims = value.type.tensor_type.shape.dim
        self.sizes = [dim.dim_value for dim in dims][1:]
        if dims[0].HasField("dim_value") or not all(self.sizes):
            raise SystemExit(f"{source}: expected one input with a symbolic batch and no other open size")
        self.cpu = lowbit.session(self.path)

    def feed(self, batch: int) -> dict[str, Array]:
        """Different images."""
        if self.sizes == [3, 224, 224]:
            return {self.input: images(batch, 224, seed=3)}
        rng = np.random.default_rng(3)
        return {self.input: rng.standard_normal((batch, *self.sizes), dtype=np.float32)}

    def difference(self, feed: dict[str, Array], got: Array) -> float:
        """Largest difference to the CPU's outputs for some of the images, over the largest output."""
        some = np.unique(np.linspace(0, len(got) - 1, COMPARED).astype(int))
        expected = self.cpu.run(None, {self.input: feed[self.input][some]})[0]
        return float(np.abs(got[some] - expected).max() / np.abs(expected).max())


class Subject:
    """A session of one mode, with more options of the provider, and bound tensors."""

    def __init__(
        self,
        network: Network,
        device: str,
        mode: str,
        cache: str,
        feed: dict[str, Array],
        more: Mapping[str, str] | None = None,
    ) -> None:
        whole = ort.SessionOptions()
        # Float nodes stay with ONNX Runtime where the CPU poses as a device.
        if device != "cpu-ep":
            whole.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options = {**MODES[mode], "cache_dir": cache, **(more or {})}
        self.session = lowbit.session(
            network.path, device=device, sess_options=whole, provider_options=options
        )
        start = time.perf_counter()
        self.output = np.asarray(self.session.run(None, feed)[0])
        self.first_seconds = time.perf_counter() - start
        self.binding = bind(self.session, feed, device)
        self.runs = 10
        self.runs = max(10, round(BLOCK_SECONDS / self.queued()))

    def queued(self) -> float:
        """Seconds of a run among many."""
        seconds = queued_seconds(self.session, self.binding, self.runs)
        _check_idle(seconds * self.runs)
        return seconds

    def walls(self, count: int) -> list[float]:
        """Microseconds of runs that are waited for."""
        out = []
        for _ in range(count):
            start = time.perf_counter()
            self.session.run_with_iobinding(self.binding)
            out.append((time.perf_counter() - start) * 1e6)
        return out


def _check_idle(block: float) -> None:
    """Fails if the device is still at work though it was waited for: the time would be that of queueing.

    Only torch can ask from outside; without it nothing is checked.
    """
    if torch is None:
        return
    start = time.perf_counter()
    torch.cuda.synchronize()
    if time.perf_counter() - start > 0.1 * max(block, BLOCK_SECONDS):
        raise SystemExit("the device still works after synchronize_outputs(): the times are not its own")


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()  # the first call starts CUDA
    return torch


torch = _torch()


def measure(network: Network, batch: int, device: str, rounds: int) -> Row:
    """All modes of a network at one batch size, in turns."""
    row, feed = Row(network.name, network.bits, batch), network.feed(batch)
    with tempfile.TemporaryDirectory() as cache:
        subjects = {mode: Subject(network, device, mode, cache, feed) for mode in MODES}
        row.profile_seconds = subjects["on"].first_seconds
        row.difference = network.difference(feed, subjects["cached"].output)
        for mode, subject in subjects.items():
            if not np.array_equal(subject.output, subjects["cached"].output):
                raise SystemExit(f"{network.name}, batch {batch}: {MODES[mode]} gives another result")
            row.queued[mode] = []
        walls = max(20, min(500, subjects["cached"].runs) // rounds)
        for _ in range(rounds):
            for mode, subject in subjects.items():
                row.queued[mode].append(subject.queued() * 1e6)
                if mode == "cached":  # in the same state of the GPU's clocks as what they are compared with
                    row.walls += subject.walls(walls)
    return row


def opening(network: Network, device: str) -> list[str | int | float]:
    """Time to open the converted model, and one that is compiled; the device is up already."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled.onnx"
        lowbit.compile(network.path, compiled, device=device)
        times = []
        for path in (network.path, compiled):
            spent = []
            for _ in range(5):
                start = time.perf_counter()
                lowbit.session(path, device=device)
                spent.append((time.perf_counter() - start) * 1e3)
            times.append(float(np.median(spent)))
        return [network.name, network.bits, *times, compiled.stat().st_size / 1e6]


def times_table(network: str, rows: list[Row]) -> Table:
    """Ours beside the recorded peers."""
    columns = ["batch", "us", "without tuning us", "run + wait us", *(f"{name}* us" for name in SHOWN)]
    table = Table(network, ["bits", *columns, "times as fast as ONNX Runtime CUDA int8*"])
    for row in rows:
        peers = [row.peer(name) for name in SHOWN]
        cells: list[str | int | float] = [row.bits, row.batch]
        cells += [row.median("cached"), row.median("off"), row.wall]
        cells += ["-" if peer is None else peer for peer in peers]
        table.rows.append([*cells, "-" if peers[0] is None else peers[0] / row.median("cached")])
    return table


def tuning_table(rows: list[Row]) -> Table:
    """With and without profile runs, with and without a CUDA graph."""
    columns = ["tuned us", "estimated us", "estimated / tuned", "profile run s", "without graph us"]
    table = Table("tuning", ["network", "bits", "batch", *columns])
    for row in rows:
        tuned, estimated = row.median("cached"), row.median("off")
        times = [tuned, estimated, estimated / tuned, row.profile_seconds, row.median("no graph")]
        table.rows.append([row.network, row.bits, row.batch, *times])
    return table


def facts_of(device: str) -> dict[str, str]:
    """The GPU and its driver, for the results' heading."""
    hardware = next(each for each in lowbit.devices() if each.name == device)
    return {"device": hardware.description, "driver": _driver()}


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return "none"
    found = re.search(r"\d{3,}\.\d+(\.\d+)*", text)
    return found[0] if found else "unknown"


def source_of(network: str, bits: str) -> Path:
    """The QDQ model of a network with a symbolic batch, in the work folder."""
    path = WORK / f"{network}_{bits}_batch.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(build(network, int(bits[1]), int(bits[3]), batch="N"), path)
    return path


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of lowbit.models; empty: none")
    parser.add_argument("--bits", default="w8a8", help="pairs of bits, such as w8a8,w4a8 (default: w8a8)")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help="also this model")
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of 50 ms a session (default: 15)")
    parser.add_argument("--no-opening", action="store_true", help="leave out the times to open a session")
    parser.add_argument("--name", default="cuda_networks", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    device = canonical(options.device)
    pairs = itertools.product(filter(None, options.networks.split(",")), options.bits.split(","))
    sources = [(name, bits, source_of(name, bits)) for name, bits in pairs]
    sources += [(name, "-", Path(path)) for name, path in (text.split("=", 1) for text in options.model)]

    rows: list[Row] = []
    opened = Table("opening a session", ["network", "bits", "converted ms", "compiled ms", "compiled MB"])
    for name, bits, source in sources:
        network = Network(name, bits, source)
        for batch in map(int, options.batches.split(",")):
            rows.append(measure(network, batch, device, options.rounds))
            print(times_table(name, rows[-1:]).markdown(), flush=True)
        if not options.no_opening:
            opened.rows.append(opening(network, device))
    ratios = [row.median("off") / row.median("cached") for row in rows]
    notes = [
        "224x224, seeded weights, InferenceSession with inputs and outputs on the device. us: device "
        f"time, many runs queued and waited for once, median of {options.rounds} rounds; run + wait: median "
        "of run_with_iobinding.",
        "The sessions with and without tuning take turns; their outputs are equal in every element.",
        f"Largest difference to the CPU's outputs: {max(row.difference for row in rows):.3g} of the largest "
        f"output ({COMPARED} images of each batch).",
        f"Estimated over tuned choices, geometric mean: {float(np.exp(np.mean(np.log(ratios)))):.3g}.",
        "run + wait less device time: at most "
        f"{max(row.wall - row.median('cached') for row in rows):.3g} us.",
        f"*: at 8 bits; not measured in this run. {' '.join(RECORDED.split())}",
        f"onnxruntime {ort.__version__}, the CPU package.",
    ]
    groups = itertools.groupby(rows, lambda row: row.network)
    tables = [times_table(name, list(group)) for name, group in groups]
    tables += [tuning_table(rows), *([opened] if opened.rows else [])]
    write(options.name, "Whole networks on a GPU", tables, notes, [row.raw() for row in rows],
          folder=options.out, machine=facts_of(device), commit=options.commit)  # fmt: skip


if __name__ == "__main__":
    main()
