"""OpenVINO as a peer: the same QDQ file, int8 kernels, the same number of threads.

`python benchmarks/openvino_peer.py FILE THREADS` compiles and runs a model once and prints what a results
file wants to know as JSON: load time, peak memory, and which kernels its layers got. It is a process of its
own because OpenVINO may crash on a model (2026.4 does on a DenseNet whose Concats are quantized).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS = ("Convolution", "GroupConvolution", "FullyConnected", "MatMul")


def available() -> bool:
    """Whether OpenVINO is installed."""
    try:
        import openvino  # noqa: F401
    except ImportError:
        return False
    return True


def _compile(path: Path, threads: int, streams: int = 1, shape: Sequence[int] = ()) -> Any:
    """Compiles a model; ``shape`` fixes the sizes of its input."""
    import openvino

    core = openvino.Core()
    # The latency hint is OpenVINO's setting for one request at a time. Its float layers keep float32:
    # bfloat16, its default on this kind of machine, would compute something else than ONNX Runtime and lowbit
    # do.
    settings = {
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(threads),
        "ENABLE_CPU_PINNING": "NO",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    model = core.read_model(path)
    if shape:
        model.reshape(list(shape))
    return core.compile_model(model, "CPU", settings)


def open_run(path: Path, sample: npt.NDArray[np.float32], threads: int) -> Callable[[], None]:
    """A function that runs the model once on `sample`, bound beforehand."""
    return open_runs(path, sample, threads, 1)[0]


def open_runs(
    path: Path, sample: npt.NDArray[np.float32], threads: int, streams: int
) -> list[Callable[[], None]]:
    """Such functions that may be called at once, one for each stream, `threads` in all."""
    import openvino

    compiled = _compile(path, threads, streams, sample.shape)
    requests = [compiled.create_infer_request() for _ in range(streams)]
    for request in requests:
        request.set_input_tensor(openvino.Tensor(sample, shared_memory=True))

    def run(request: Any, _sample: object) -> None:
        request.start_async()
        request.wait()

    # OpenVINO does not keep the array alive whose memory it shares.
    return [functools.partial(run, request, sample) for request in requests]


def _kernels(compiled: Any) -> dict[str, int]:
    """Primitive -> number of convolutions and fully connected layers that got it."""
    counts: Counter[str] = Counter()
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        if str(info["layerType"].astype(str)) in LAYERS:
            counts[str(info["primitiveType"].astype(str))] += 1
    return dict(counts)


def probe(path: Path, threads: int) -> dict[str, Any] | None:
    """Load time (ms), peak memory (bytes) and kernels of a fresh process; None when it fails or crashes."""
    command = [sys.executable, __file__, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def _peak_memory() -> int:
    """VmHWM of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """Runs in the fresh process; see the module."""
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    import openvino  # noqa: F401  # its import is not part of the load time, as ONNX Runtime's is not

    start = time.perf_counter()
    compiled = _compile(path, threads)
    load_ms = (time.perf_counter() - start) * 1e3
    shape = [1 if dim.is_dynamic else dim.get_length() for dim in compiled.input(0).get_partial_shape()]
    compiled.create_infer_request().infer([np.zeros(shape, np.float32)])
    print(json.dumps({"load_ms": load_ms, "peak": _peak_memory(), "kernels": _kernels(compiled)}))


if __name__ == "__main__":
    main()
