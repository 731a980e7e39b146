"""ONNX Runtime's profiler shows the kernels of a region with times of its own (onnxruntime 1.25 or newer)."""

from __future__ import annotations

import json
from pathlib import Path

import lowbit
import numpy as np
import onnxruntime as ort

from tests.gpu.support import assert_equal
from tests.support import lowbit_session


def test_a_profiled_session_shows_every_kernel_and_computes_the_same(model, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = lowbit.session(model, device="cuda", sess_options=options)
    feed = {model.graph.input[0].name: np.random.default_rng(0).normal(0, 1, (2, 3, 32, 32))}
    feed = {name: value.astype(np.float32) for name, value in feed.items()}
    expected = lowbit_session(model).run(None, feed)
    for _ in range(2):
        assert_equal(session.run(None, feed), expected, "profiled")
    events = json.loads(Path(session.end_profiling()).read_text())
    kernels = [e["args"] for e in events if e["cat"] == "Kernel" and e["args"].get("kernel")]
    assert all(int(kernel["duration_ns"]) > 0 for kernel in kernels)
    told = {name for kernel in kernels for name in kernel["nodes"].split(", ")}
    convs = {node.name for node in model.graph.node if node.op_type == "LowBitConv"}
    assert convs <= told
