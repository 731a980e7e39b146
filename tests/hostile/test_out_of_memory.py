"""No memory left: said as what it is, not as a defect, a damaged file or a refusal; nothing is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.errors import is_out_of_memory
from lowbit.sessions.session import open_session, run_session
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import SANITIZED
from tests.support import require_native
from tests.tools.conftest import qdq_conv

pytest.importorskip("resource", reason="needs POSIX resource limits")
pytestmark = pytest.mark.skipif(SANITIZED, reason="a sanitizer's own memory counts, and it ends the process")

# What a conversion needs once is loaded and used before the limit, which is then about the model alone.
LIMITED = """
import resource, sys
import lowbit, lowbit.cli.convert, lowbit.inspection.inspect, lowbit.inspection.report_html
from lowbit.cli import cli
small, megabytes, *arguments = sys.argv[1:]
lowbit.convert(small)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + int(megabytes) * 2**20,) * 2)
cli(arguments)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and one with 19 MB of weights."""
    require_native()
    if not Path("/proc/self/statm").exists():
        pytest.skip("/proc tells how much memory a process has")
    folder = tmp_path_factory.mktemp("memory")
    small, large = folder / "small.onnx", folder / "large.onnx"
    model = qdq_conv()
    onnx.save(model, small)
    codes = np.resize(np.arange(-128, 128).astype(np.int8), (2048, 1024, 3, 3))
    (weights,) = (t for t in model.graph.initializer if t.name == "w")
    weights.CopyFrom(numpy_helper.from_array(codes, "w"))
    for value, channels in ((model.graph.input[0], 1024), (model.graph.output[0], 2048)):
        value.type.tensor_type.shape.dim[1].dim_value = channels
    onnx.save(model, large)
    return small, large


@pytest.mark.parametrize("megabytes", [35, 70])
def test_convert_says_so(models, tmp_path, megabytes: int) -> None:
    """Where the file is parsed, and where it is worked on."""
    small, large = map(str, models)
    words = ["convert", large, "-o", str(tmp_path / "out.onnx")]
    command = [sys.executable, "-c", LIMITED, small, str(megabytes), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done
    assert done.stderr.startswith("lowbit: out of memory"), done.stderr
    assert not any(tmp_path.iterdir())


def test_what_onnxruntime_says_is_told_apart_from_a_refusal(monkeypatch) -> None:
    """A buffer that no machine has, and a session that finds none."""
    x = helper.make_tensor_value_info("x", TensorProto.INT64, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("ConstantOfShape", ["x"], ["y"], "fill")
    model = helper.make_model(
        helper.make_graph([node], "fill", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    opened = open_session(model, options)
    with pytest.raises(MemoryError):
        run_session(opened, {"x": np.array([2**22, 2**22], np.int64)})

    def fails(*_given: object, **_more: object) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc")

    monkeypatch.setattr(ort, "InferenceSession", fails)
    with pytest.raises(MemoryError, match="bad_alloc"):
        open_session(model, options)


def test_other_errors_are_not_about_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("node 'memory' has no input"))
