"""Serves a model with NVIDIA Triton: dynamic batches, HTTP and gRPC, health, metrics.

python examples/serve_triton.py model.lowbit.onnx --threads 2
curl localhost:8000/v2/models/model/ready; curl localhost:8002/metrics
kill -HUP PID        # takes over a new file of the same name; no request is lost
kill PID             # answers what it has accepted, then ends

The model has a free first dim; one that was not converted runs as stock ONNX Runtime runs it. Needs `pip
install nvidia-pytriton`, which brings the server. What it refuses, and what to set: docs/serving.md.
"""

import argparse
import os
import queue
import signal
import sysconfig
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import onnxruntime as ort
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import QueuePolicy
from pytriton.triton import Triton, TritonConfig


def tensors(values: list[ort.NodeArg]) -> list[Tensor]:
    """Inputs or outputs as Triton declares them, without the batch; a free dim is -1.

    Raises:
        lowbit.ModelError: for one without a free first dim.
    """
    for value in values:
        if not value.shape or isinstance(value.shape[0], int):
            raise lowbit.ModelError(f"'{value.name}' has the shape {value.shape}; export a free first dim")
    names = {"float": "float32", "double": "float64"}
    return [
        Tensor(
            name=value.name,
            dtype=np.dtype(names.get(kind := value.type[len("tensor(") : -1], kind)).type,
            shape=[dim if isinstance(dim, int) else -1 for dim in value.shape[1:]],
        )
        for value in values
    ]


class Served:
    """A session that another one can replace while requests run; theirs lives until they are answered."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self._path, self._settings = path, settings
        self._session = self._opened()
        self.inputs = tensors(self._session.get_inputs())
        self.outputs = tensors(self._session.get_outputs())

    def _opened(self) -> ort.InferenceSession:
        return lowbit.session(self._path, **self._settings)

    @batch
    def infer(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Runs a batch that Triton made of the requests that were waiting."""
        session = self._session
        results = session.run(None, inputs)
        return dict(zip((output.name for output in self.outputs), results, strict=True))

    def reload(self) -> None:
        """Opens the file anew and, when it is ready, answers with it what comes from then on.

        Raises:
            lowbit.LowBitError: if it cannot be opened or has another interface; the old session goes on.
        """
        session = self._opened()
        found = tensors(session.get_inputs()), tensors(session.get_outputs())
        if found != (self.inputs, self.outputs):
            raise lowbit.ModelError(f"{self._path}: expected {self.inputs} to {self.outputs}, found {found}")
        self._session = session


def find_libpython() -> None:
    """Lets Triton's Python backend load this interpreter's libpython, not the one that the system has.

    It links libpython by name, and does not start with another patch release than its standard library's.
    """
    places = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, places))


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", help="of the model in requests (default: the file's, up to its first dot)")
    parser.add_argument("--device", default="cpu", help="cpu, cpu-ops, cuda ... (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of the session (default: 1)")
    parser.add_argument("--instances", type=int, default=1, help="batches at a time (default: 1)")
    parser.add_argument("--max-batch", type=int, default=16, help="(default: 16)")
    parser.add_argument("--delay-us", type=int, default=500, help="waits so long for more (default: 500)")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that may wait (default: 256)")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on; 0.0.0.0: all (default: this one)")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    options = parser.parse_args()

    served = Served(options.model, device=options.device, threads=options.threads)
    find_libpython()
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.put(number))
    config = TritonConfig(
        http_address=options.host,
        http_port=options.http_port,
        grpc_address=options.host,
        grpc_port=options.grpc_port,
        metrics_address=options.host,
        metrics_port=options.metrics_port,
        exit_timeout_secs=10,
    )
    batcher = DynamicBatcher(
        max_queue_delay_microseconds=options.delay_us,
        default_queue_policy=QueuePolicy(max_queue_size=options.max_queue),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=options.name or options.model.name.partition(".")[0],
            infer_func=[served.infer] * options.instances,
            inputs=served.inputs,
            outputs=served.outputs,
            config=ModelConfig(max_batch_size=options.max_batch, batcher=batcher),
            strict=True,
        )
        triton.run()
        print(f"serving {options.model}, process {os.getpid()}", flush=True)
        while triton.is_alive():
            try:
                number = received.get(timeout=1)
            except queue.Empty:
                continue
            if number != signal.SIGHUP:
                break
            try:
                served.reload()
                print(f"reloaded {options.model}", flush=True)
            except lowbit.LowBitError as error:
                print(f"not reloaded: {error}", flush=True)


if __name__ == "__main__":
    main()
