"""A model behind NVIDIA Triton, as clients see it: latency and throughput by how many ask at once.

python benchmarks/serving.py                                 mobilenetv2, 1 to 64 clients
python benchmarks/serving.py --networks resnet50 --devices cuda --instances 2

lowbit on each device, and stock ONNX Runtime of the same QDQ model, each behind a server of its own
(examples/serve_triton.py) with the same batcher. All servers are up and take turns, so what disturbs the
machine disturbs all. Clients ask over gRPC for one image at a time and ask again as soon as they are
answered; before anything is measured the answers to batches of every size, which are planned then, are
compared with a plain session's. Needs a Python with
nvidia-pytriton, such as build/triton/bin/python (`tools/run_tests.py --full --only Triton` makes it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from gpu_networks import facts_of
from lowbit.inspection.sysinfo import sysinfo
from lowbit.models.calibration import images
from lowbit.sessions.devices import canonical, has_own_memory
from networks import STOCK, built, converted
from results import RESULTS, ROOT, WORK, Table, write
from tritonclient.grpc import InferenceServerClient, InferInput

EXAMPLE = ROOT / "examples" / "serve_triton.py"
NAME = "served"


def asked(batch: np.ndarray) -> list[InferInput]:
    """The inputs of a request for some images."""
    given = InferInput("input", batch.shape, "FP32")
    given.set_data_from_numpy(batch)
    return [given]


@dataclass(frozen=True)
class Server:
    """A running server: the process that started it, and where it answers gRPC."""

    process: int
    address: str

    def processor_seconds(self) -> float:
        """What it has used of processors since it was started, with all processes that it started."""
        waiting, used = [self.process], 0
        while waiting:
            folder = Path(f"/proc/{waiting.pop()}")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])  # in user mode, and in the system
            for file in folder.glob("task/*/children"):
                waiting += map(int, file.read_text().split())
        return used / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(path: Path, device: str, port: int, options: argparse.Namespace) -> Iterator[Server]:
    """A server for a model; it ends with the block."""
    command = [sys.executable, str(EXAMPLE), str(path), "--name", NAME, "--device", device]
    ports = {"--http-port": port, "--grpc-port": port + 1, "--metrics-port": port + 2}
    settings = {"--threads": options.threads, "--instances": options.instances, **ports}
    settings |= {"--max-batch": options.max_batch, "--delay-us": options.delay_us}
    command += [str(word) for pair in settings.items() for word in pair]
    log = WORK / f"server_{port}.log"
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            while "\nserving " not in "\n" + log.read_text():
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {log}")
                time.sleep(0.1)
            yield Server(process.pid, f"127.0.0.1:{port + 1}")
        finally:
            process.terminate()


def check(address: str, path: Path, device: str, samples: np.ndarray) -> None:
    """Raises where the server answers a batch otherwise than a session of the same file and device."""
    expected = lowbit.session(path, device=device).run(None, {"input": samples})[0]
    with InferenceServerClient(address) as client:
        for count in range(1, len(samples) + 1):
            answer = client.infer(NAME, asked(samples[:count])).as_numpy("logits")
            np.testing.assert_allclose(answer, expected[:count], rtol=1e-5, atol=1e-5)


async def load(address: str, clients: int, seconds: float, samples: np.ndarray) -> tuple[list[float], int]:
    """The seconds of each request that a number of clients make in some time; how many are answered in it."""
    requests = [asked(image[None]) for image in samples]
    latencies: list[float] = []
    in_time = 0
    end = time.perf_counter() + seconds

    async def ask(client: tritonclient.grpc.aio.InferenceServerClient, number: int) -> None:
        nonlocal in_time
        while (start := time.perf_counter()) < end:
            await client.infer(NAME, requests[number % len(requests)])
            answered = time.perf_counter()
            latencies.append(answered - start)
            in_time += answered <= end

    async with tritonclient.grpc.aio.InferenceServerClient(address) as client:
        await asyncio.gather(*(ask(client, number) for number in range(clients)))
    return latencies, in_time


def measure(network: str, options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Latency and throughput of every way to serve a network, for each number of clients."""
    stock = built(network, "w8a8", batch="N")
    ready = converted(stock)
    ways = {STOCK: (stock, "cpu")}
    ways |= {f"lowbit w8a8, {device}": (ready, device) for device in options.devices.split(",")}
    samples = images(options.max_batch, 224, seed=3)
    raw: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(path, device, 18100 + 10 * i, options))
            for i, (name, (path, device)) in enumerate(ways.items())
        }
        for name, (path, device) in ways.items():
            check(servers[name].address, path, device, samples)
        figures = ("p50 ms", "p99 ms", "images/s", "server ms")
        table = Table(network, ["clients", "model", *figures])
        for clients in map(int, options.clients.split(",")):
            latencies: dict[str, list[float]] = {name: [] for name in ways}
            in_time = dict.fromkeys(ways, 0)
            used = dict.fromkeys(ways, 0.0)
            for _ in range(options.rounds):
                for name, server in servers.items():
                    before = server.processor_seconds()
                    taken, count = asyncio.run(load(server.address, clients, options.seconds, samples))
                    latencies[name] += taken
                    in_time[name] += count
                    used[name] += server.processor_seconds() - before
            for name, taken in latencies.items():
                row = [1e3 * float(np.percentile(taken, share)) for share in (50, 99)]
                row += [in_time[name] / (options.rounds * options.seconds), 1e3 * used[name] / len(taken)]
                measured = dict(zip(figures, row, strict=True))
                raw.setdefault(name, {})[clients] = {"requests": len(taken), **measured}
                table.rows.append([clients, name, *row])
                print(table.rows[-1], flush=True)
    return table, raw


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="mobilenetv2", help="default: mobilenetv2")
    parser.add_argument("--devices", default="cpu,cpu-ops", help="of lowbit (default: cpu,cpu-ops)")
    parser.add_argument("--clients", default="1,2,4,8,16,32,64", help="default: 1,2,4,8,16,32,64")
    parser.add_argument("--threads", type=int, default=1, help="of a session (default: 1)")
    parser.add_argument("--instances", type=int, default=1, help="batches at a time (default: 1)")
    parser.add_argument("--max-batch", type=int, default=16, help="default: 16")
    parser.add_argument("--delay-us", type=int, default=500, help="of the batcher (default: 500)")
    parser.add_argument("--seconds", type=float, default=3, help="of load in a turn (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="turns (default: 2)")
    parser.add_argument("--name", default="serving", help="name of the results file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="what was measured, where there is no git")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    tables, raw = [], {}
    for network in options.networks.split(","):
        table, raw[network] = measure(network, options)
        tables.append(table)
    cores = len(os.sched_getaffinity(0))
    notes = [
        "One image of 224x224x3 float32 a request, over gRPC, each client asking again once it is answered; "
        f"Triton {options.max_batch} images a batch at most, {options.delay_us} us of waiting for more; a "
        f"session of {options.threads} thread(s), {options.instances} batch(es) at a time.",
        f"Servers and clients share {cores} core(s), and a client's work (600 kB to write and read for each "
        "request) is in every figure; the servers of all columns are up and take turns of "
        f"{options.seconds:g} s, {options.rounds} for each cell.",
        "server ms: processor time of the server's processes, per image, which other work on the machine "
        "changes least.",
        f"The system's load was {load_before:.1f} before the run and {os.getloadavg()[0]:.1f} after it; the "
        "latter counts the run itself.",
        "Every server's answers, to batches of every size, were compared with a plain session's first.",
    ]
    gpus = [place for place in map(canonical, options.devices.split(",")) if has_own_memory(place)]
    packages = ("nvidia-pytriton", "tritonclient")
    versions = {**sysinfo()["versions"], **{package: metadata.version(package) for package in packages}}
    write(
        options.name, "Behind Triton", tables, notes, raw, folder=options.out, versions=versions,
        machine=facts_of(gpus[0]) if gpus else None, commit=options.commit,
    )  # fmt: skip


if __name__ == "__main__":
    main()
