"""ONNX Runtime's int8 convolution, one thread: `python onnxruntime_peer.py MODEL...`, a region for each.

The models take and give channels-last codes around a quantized convolution (benchmarks/layers.py writes
them). A run checks that the optimizer left nothing but one QLinearConv, so that no layout change is counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from region import region


def open_session(model: str) -> ort.InferenceSession:
    """Raises where more than a QLinearConv is left of the model."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    if ops != ["QLinearConv"]:
        raise RuntimeError(f"ONNX Runtime does not run {model} as one QLinearConv: {ops}")
    return session


def main() -> None:
    """Entry point."""
    for index, model in enumerate(sys.argv[1:]):
        session = open_session(model)
        random = np.random.default_rng(1)
        binding = session.io_binding()
        binding.bind_cpu_input("x", random.integers(0, 256, session.get_inputs()[0].shape, np.uint8))
        y = np.zeros(session.get_outputs()[0].shape, np.uint8)
        binding.bind_output("y", "cpu", 0, np.uint8, y.shape, y.ctypes.data)
        for _ in range(2):  # the second run has all buffers
            session.run_with_iobinding(binding)
        with region(index):
            session.run_with_iobinding(binding)
        print(json.dumps({"codes_in_output": len(np.unique(y))}), flush=True)


if __name__ == "__main__":
    main()
