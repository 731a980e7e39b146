"""A process with one session, which tells how far it is: `python session.py MODEL DEVICE LIBRARY`.

DEVICE is `stock` (ONNX Runtime alone), `cpu` (lowbit's custom ops) or `cpu-ep` (its execution provider);
LIBRARY is liblowbit. Prints `ready` before the session, `open` after it was made, `ran` after a run, and
`trimmed` after the C library was asked to give back what is free; behind each it waits for a line, so that
whoever measures its memory can look. One thread, ONNX Runtime's own API.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import onnxruntime as ort


def stage(name: str) -> None:
    """Says how far it is, waits."""
    print(name, flush=True)
    sys.stdin.readline()


def main() -> None:
    """Entry point."""
    model, device, library = sys.argv[1:]
    feed = np.random.default_rng(3).random((1, 3, 224, 224), np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if device == "cpu":
        options.register_custom_ops_library(library)
    elif device == "cpu-ep":
        ort.register_execution_provider_library("lowbit", library)
        offered = [d for d in ort.get_ep_devices() if d.ep_name == "LowBitExecutionProvider"]
        options.add_provider_for_devices([d for d in offered if d.ep_metadata["device"] == "cpu"], {})
    stage("ready")
    providers = {} if device == "cpu-ep" else {"providers": ["CPUExecutionProvider"]}
    session = ort.InferenceSession(model, options, **providers)
    stage("open")
    session.run(None, {session.get_inputs()[0].name: feed})
    stage("ran")
    ctypes.CDLL(None).malloc_trim(0)
    stage("trimmed")


if __name__ == "__main__":
    main()
