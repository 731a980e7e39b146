"""Images a second: one session on every GPU, all fed from one queue, from host memory and from the GPUs' own.

python benchmarks/gpu_throughput.py                              ResNet-50 w8a8 on every GPU that is there
python benchmarks/gpu_throughput.py --device cuda:1 --loads 64:2,64:3
python benchmarks/gpu_throughput.py --device cpu-ep --network resnet18 --loads 1:2 --rounds 1 --seconds 0.1
                                                                 does everything still run?

A load is a batch size and the number of threads of each GPU, such as 128:4. A thread takes the next request
from the queue, runs it on the session of its GPU, waits for the outputs and comes again.

- host: `session.run`, images in host memory, outputs in numpy arrays. Where torch is installed the images lie
  in pinned memory, which GPUs read without the CPU. While the images of one thread are copied, the kernels of
  another run: a load of one thread shows what that is worth.
- device: `run_with_iobinding`. Every GPU holds the images of all requests; every thread has its own outputs.

Each GPU alone and all together take turns; together they get as many times the requests, so that every block
takes equally long. Kernels are tuned once, on the first GPU. Its outputs are compared with the CPU's; after
every block the last outputs of every thread must equal them in every element. What was measured is kept in
--state and not measured again for the same commit.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import lowbit
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from gpu_networks import MODES, Network, facts_of, source_of, torch
from gpu_rows import State
from lowbit.sessions.binding import memory_of
from results import RESULTS, WORK, Cell, Table, commit_here, write

Array = npt.NDArray[Any]

HOST, DEVICE = "host", "device"
ALL = "all"
REQUESTS = 4
"""Different batches of images that the queue asks for in turn."""

ASKED = 0.975
"""Of what every GPU does alone, the share that it should do beside the others: 1.95 times one with two."""

NEAR = 1e-6
"""Most that outputs may differ from the CPU's, of the largest: float nodes may end on other bits."""


def run_options() -> ort.RunOptions:
    """Without the look-up for graphs of ONNX Runtime's own (lowbit.sessions.binding), which takes 20 us."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


@dataclass(frozen=True)
class Load:
    """What a queue is asked for, and how many threads of each GPU answer."""

    batch: int
    threads: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """From its short form: batch size, colon, threads."""
        batch, _, threads = text.partition(":")
        if not (batch.isdecimal() and threads.isdecimal() and int(batch) and int(threads)):
            raise SystemExit(f"--loads: expected BATCH:THREADS such as 128:4, got {text!r}")
        return cls(int(batch), int(threads))


class Requests:
    """Batches of images, each of the first one's in another order, and what they give."""

    def __init__(self, network: Network, batch: int) -> None:
        self.input = network.input
        self._feed = network.feed(batch)
        turned = [np.roll(self._feed[self.input], turn, axis=0) for turn in range(REQUESTS)]
        self.images = [_pinned(images) for images in turned]
        self._expected: list[Array] = []

    def judge(self, network: Network, first: Array) -> float:
        """Takes the first one's output as what is right; returns how far it is from the CPU's."""
        self._expected = [np.roll(first, turn, axis=0) for turn in range(REQUESTS)]
        difference = network.difference(self._feed, first)
        if not difference <= NEAR:
            raise SystemExit(f"{network.name}, batch {len(first)}: {difference:.3g} from the CPU's outputs")
        return difference

    def check(self, workers: Sequence[Worker], where: str) -> None:
        """Fails if an output of the last block differs."""
        for worker in workers:
            for index, output in worker.take().items():
                if not np.array_equal(output, self._expected[index]):
                    raise SystemExit(f"{where}: request {index} has other outputs than on the first GPU")


def _pinned(value: Array) -> Array:
    if torch is None:
        return value
    pinned: Array = torch.from_numpy(value).pin_memory().numpy()
    return pinned


class Worker(Protocol):
    """What a thread does with a request."""

    def run(self, index: int) -> None:
        """Runs it, and waits for its outputs."""

    def take(self) -> dict[int, Array]:
        """The last outputs of every request since this was called last."""


class FromHost:
    """Arrays in, arrays out."""

    def __init__(self, session: ort.InferenceSession, requests: Requests) -> None:
        self._session, self._options = session, run_options()
        self._feeds = [{requests.input: images} for images in requests.images]
        self._names = [session.get_outputs()[0].name]
        self._outputs: dict[int, Array] = {}

    def run(self, index: int) -> None:
        """Copies in, runs, copies out."""
        self._outputs[index] = self._session.run(self._names, self._feeds[index], self._options)[0]

    def take(self) -> dict[int, Array]:
        """The last outputs."""
        taken, self._outputs = self._outputs, {}
        return taken


class FromDevice:
    """Bound tensors; the images are shared, the outputs this worker's own."""

    def __init__(
        self,
        session: ort.InferenceSession,
        name: str,
        images: Sequence[ort.OrtValue],
        device: str,
        like: Array,
    ) -> None:
        self._session, self._options = session, run_options()
        self._bindings, self._outputs = [], []
        self._ran: set[int] = set()
        for value in images:
            output = ort.OrtValue.ortvalue_from_numpy(np.full_like(like, np.nan), *memory_of(device))
            binding = session.io_binding()
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(session.get_outputs()[0].name, output)
            self._bindings.append(binding)
            self._outputs.append(output)

    def run(self, index: int) -> None:
        """Runs and waits."""
        self._session.run_with_iobinding(self._bindings[index], self._options)
        self._ran.add(index)

    def take(self) -> dict[int, Array]:
        """The last outputs, copied to the host."""
        ran, self._ran = self._ran, set()
        return {index: self._outputs[index].numpy() for index in ran}


def open_on(device: str, network: Network, mode: str, cache: str) -> ort.InferenceSession:
    """A session that leaves no node to the CPU."""
    whole = ort.SessionOptions()
    whole.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options = {**MODES[mode], "cache_dir": cache}
    return lowbit.session(network.path, device=device, sess_options=whole, provider_options=options)


def serve(workers: Sequence[Worker], count: int) -> float:
    """Seconds that workers, each in a thread of its own, take for so many requests from one queue."""
    queue: SimpleQueue[int | None] = SimpleQueue()
    for number in range(count):
        queue.put(number % REQUESTS)
    for _ in workers:
        queue.put(None)
    ready = threading.Barrier(len(workers) + 1)

    def work(worker: Worker) -> None:
        ready.wait()
        while (index := queue.get()) is not None:
            worker.run(index)

    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(work, worker) for worker in workers]
        ready.wait()
        start = time.perf_counter()
        for each in running:
            each.result()
        return time.perf_counter() - start


def measure(
    crews: Mapping[str, Sequence[Worker]], requests: Requests, load: Load, rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Images a second of every GPU alone, and of all; rounds in turns."""
    least = load.threads * REQUESTS
    slowest = 0.0
    for crew in crews.values():
        count, each = least, 0.0
        for _ in range(3):  # the first makes plans, graphs, and an instance for each thread
            each = serve(crew, count) / count
            count = max(least, round(seconds / 4 / each))
        slowest = max(slowest, each)
        requests.check(crew, "before measuring")
    count = max(least, round(seconds / slowest))
    groups: dict[str, Sequence[Worker]] = dict(crews)
    if len(crews) > 1:
        groups[ALL] = [worker for crew in crews.values() for worker in crew]
    found: dict[str, dict[str, list[float]]] = {name: {"rounds": []} for name in groups}
    for turn in range(rounds):
        for name, crew in list(groups.items())[:: 1 if turn % 2 == 0 else -1]:
            asked = count * (len(crews) if name == ALL else 1)
            found[name]["rounds"].append(asked * load.batch / serve(crew, asked))
            requests.check(crew, name)
    return found


def cells(place: dict[str, Any]) -> list[Cell]:
    """The cells of a load: one GPU, the mean of all that were alone, and all together."""
    rounds = {name: np.asarray(each["rounds"]) for name, each in place["names"].items()}
    together = rounds.pop(ALL, None)
    one = np.mean(list(rounds.values()), axis=0)
    out: list[Cell] = [place["batch"], place["threads"], place["from"], float(np.median(one))]
    if together is None:
        out += ["-", "-", "-", "-"]
    else:
        times = together / one
        out += [float(np.median(together)), f"{np.median(times):.3f}", f"{np.ptp(times) / 2:.3f}"]
        out.append(f"{ASKED * len(rounds):.2f}")
    return [*out, float(np.median(one)) * place["bytes"] / 1e9]


def table_of(title: str, places: Sequence[dict[str, Any]]) -> Table:
    """A row for each load."""
    columns = ["batch", "threads of a GPU", "images from", "one GPU, images/s", "all, images/s"]
    columns += ["times one", "off by", "asked", "images of one GPU, GB/s"]
    return Table(title, columns, [cells(place) for place in places])


def chosen(text: str) -> list[str]:
    """Names of devices: "cuda" stands for all of its kind."""
    offered = {each.name: each.reason for each in lowbit.devices()}
    found = []
    for word in text.split(","):
        usable = [name for name, reason in offered.items() if reason is None]
        fitting = [name for name in usable if word in (name, name.partition(":")[0])]
        if not fitting:
            raise SystemExit(
                f"device {word}: there is {', '.join(usable)}; {offered.get(word) or 'no other'}"
            )
        found += fitting
    return list(dict.fromkeys(found))


def facts_of_all(devices: Sequence[str]) -> dict[str, str]:
    """The GPUs and their driver."""
    facts = [facts_of(device) for device in devices]
    names = [each["device"] for each in facts]
    alike = len(names) > 1 and len(set(names)) == 1
    return {**facts[0], "device": f"{len(names)} x {names[0]}" if alike else " and ".join(names)}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda: all GPUs; or some, such as cuda:0,cuda:2")
    parser.add_argument("--network", default="resnet50", help="of lowbit.models (default: %(default)s)")
    parser.add_argument("--bits", default="w8a8", help="(default: %(default)s)")
    parser.add_argument("--model", metavar="NAME=FILE", help="this model instead")
    parser.add_argument("--loads", default="128:1,128:4,16:8", help="BATCH:THREADS (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of every group (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a block (default: 1)")
    parser.add_argument("--state", type=Path, default=WORK / "gpu_throughput.json", help="what was measured")
    parser.add_argument("--name", default="gpu_throughput", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    options = parser.parse_args()
    loads = [Load.parse(text) for text in options.loads.split(",")]
    devices = chosen(options.device)
    facts = facts_of_all(devices)
    commit = options.commit or commit_here()
    name, _, path = (options.model or f"{options.network}=").partition("=")
    network = Network(name, options.bits, Path(path) if path else source_of(name, options.bits))
    title = name if options.model else f"{name} {options.bits}"
    memory = "pinned" if torch is not None else "pageable (torch, which would pin it, is not installed)"
    state = State(options.state, {"commit": commit, **facts, "host memory": memory})
    keys = {
        (load, place): f"{title}, {load.batch}:{load.threads}, {place}"
        for load in loads
        for place in (HOST, DEVICE)
    }
    if len(devices) == 1:
        print(f"there is one device, {devices[0]}: nothing to compare it with", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        for batch in dict.fromkeys(load.batch for load in loads):
            missing = [each for each in keys if each[0].batch == batch and keys[each] not in state.places]
            if not missing:
                continue
            requests = Requests(network, batch)
            tuning = open_on(devices[0], network, "on", cache)
            first = tuning.run(None, {network.input: requests.images[0]})[0]
            del tuning
            difference = requests.judge(network, first)
            # A session keeps what it read of the cache, so those that run are opened now.
            sessions = {device: open_on(device, network, "cached", cache) for device in devices}
            there = {
                device: [
                    ort.OrtValue.ortvalue_from_numpy(each, *memory_of(device)) for each in requests.images
                ]
                for device in devices
            }
            for load, place in missing:
                crews = {
                    device: [
                        FromHost(session, requests)
                        if place == HOST
                        else FromDevice(session, requests.input, there[device], device, first)
                        for _ in range(load.threads)
                    ]
                    for device, session in sessions.items()
                }
                found = measure(crews, requests, load, options.rounds, options.seconds)
                key, size = keys[load, place], requests.images[0].nbytes // batch
                what = {"batch": batch, "threads": load.threads, "from": place, "bytes": size}
                state.add(key, {**what, "difference": difference, "names": found})
                print(table_of(title, [state.places[key]]).markdown(), flush=True)

    places = [state.places[key] for key in keys.values()]
    difference = max(place["difference"] for place in places)
    notes = [
        "One process, one session a GPU, one queue for all; a thread runs a request, waits for its outputs "
        f"and takes the next. Blocks of {options.seconds:g} s, each GPU alone and all in turns, median of "
        f"{options.rounds} rounds. One GPU: the mean of those that were alone; off by: half of the highest "
        "ratio less the lowest.",
        f"host: `session.run`, images in host memory that is {memory}, outputs in numpy arrays. device: "
        "`run_with_iobinding`, images and outputs on the GPU that runs.",
        f"Asked: {2 * ASKED:g} times one GPU with two.",
        f"Kernels tuned on the first GPU, whose outputs differ from the CPU's by at most {difference:.3g} of "
        "the largest. After every block the last outputs of all threads were equal to its in every element.",
    ]
    if len(devices) == 1:
        notes.append("There was one GPU: nothing is said about several.")
    write(options.name, "Images a second", [table_of(title, places)], notes, state.places,
          folder=options.out, machine=facts, commit=commit)  # fmt: skip


if __name__ == "__main__":
    main()
