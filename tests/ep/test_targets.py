"""``lowbit compile --target``: models compiled for a GPU that is not there, by the real liblowbit_cuda.

Processes of their own load it: LOWBIT_TARGETS_LIBRARY names one, wherever it was built (CI's step CUDA does).
tests/gpu/test_context.py compares what comes of it with what a GPU compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.ep.test_context import KEEPS_WEIGHTS
from tests.support import require_native

native = require_native()
import lowbit  # noqa: E402
from lowbit.measure import tune  # noqa: E402

LIBRARY = os.environ.get("LOWBIT_TARGETS_LIBRARY", "")
SOURCE = Path(__file__).resolve().parents[2] / "models/digits/digits_w8a8.onnx"
TARGET = "sm_90"
pytestmark = pytest.mark.skipif(not LIBRARY, reason="LOWBIT_TARGETS_LIBRARY names no liblowbit_cuda")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LOWBIT_CUDA_LIBRARY": LIBRARY}
    return subprocess.run([sys.executable, *map(str, words)], text=True, capture_output=True, env=env)


def compiled(output: Path, *more: str | Path, target: str = TARGET) -> bytes:
    """The region of the compiled model; fails with what was said."""
    done = run("-m", "lowbit", "compile", SOURCE, "-o", output, "--target", target, "--overwrite", *more)
    assert done.returncode == 0, done.stderr
    assert "not compared: there is no such GPU here" in done.stdout
    graph = onnx.load(output).graph
    assert [node.op_type for node in graph.node] == ["EPContext"]
    return graph.initializer[0].raw_data


def refusal(output: Path, *more: str | Path, target: str = TARGET) -> str:
    done = run("-m", "lowbit", "compile", SOURCE, "-o", output, "--target", target, *more)
    assert done.returncode == 2, done.stdout
    assert not output.exists()
    return done.stderr


def hashed(text: str) -> str:
    """FNV-1a, as core/tune_file.h names files and checks them."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def write_cache(folder: Path, machine: str, build: str, keys: list[str]) -> None:
    """A file of measured choices."""
    body = "".join(f"1\t{key}\tsome_kernel\n" for key in sorted(keys))
    header = f"lowbit tune cache 1\nmachine {machine}\nbuild {build}\n"
    text = f"{header}entries {len(keys)}, checksum {hashed(body)}\n{body}"
    (folder / f"tune-{hashed(header)}.txt").write_text(text)


def build_of(region: bytes) -> str:
    """The build that the fingerprint names."""
    text = region[region.index(b"cuda sm_90, ") + len(b"cuda sm_90, ") :]
    return text[: text.index(b"kernels ") + len(b"kernels ") + 16].decode()


def test_one_model_is_one_file(tmp_path: Path) -> None:
    region = compiled(tmp_path / "one.onnx")
    assert f"cuda {TARGET}, lowbit {lowbit.__version__}".encode() in region
    assert compiled(tmp_path / "two.onnx") == region


@pytest.mark.skipif(not KEEPS_WEIGHTS, reason="onnxruntime writes weightless models from 1.26 on")
def test_weights_may_stay_in_the_model(tmp_path: Path) -> None:
    """What was written is read back: the weights are packed for the GPU from the model's own file."""
    model, output = tmp_path / "model.onnx", tmp_path / "compiled.onnx"
    onnx.save(lowbit.convert(SOURCE).model, model)
    done = run("-m", "lowbit", "compile", model, "-o", output, "--target", TARGET, "--weightless")
    assert done.returncode == 0, done.stderr
    tensors = onnx.load(output, load_external_data=False).graph.initializer
    assert {e.value for t in tensors for e in t.external_data if e.key == "location"} == {"model.onnx"}


def test_nothing_runs_on_it(tmp_path: Path) -> None:
    """A session opens, which reads all that was packed, and a run says why it cannot be."""
    path = tmp_path / "compiled.onnx"
    compiled(path)
    script = f"""
import numpy, onnxruntime
from lowbit.sessions.absent_gpu import AbsentGpu
options = onnxruntime.SessionOptions()
AbsentGpu.find({TARGET!r}, None, None).prepare(options, None)
session = onnxruntime.InferenceSession({str(path)!r}, options)
session.run(None, {{"input": numpy.zeros((1, 1, 8, 8), numpy.float32)}})
"""
    done = run("-c", script)
    assert done.returncode == 1
    assert "models are compiled for sm_90 here, none can run: there is no such GPU" in done.stderr


def test_choices_that_were_measured_on_such_a_gpu_go_along(tmp_path: Path) -> None:
    """Those that concern the model's nodes, of one GPU and this build; the others stay."""
    output, cache = tmp_path / "compiled.onnx", tmp_path / "cache"
    cache.mkdir()
    build = build_of(compiled(output))
    report = tune.TuneReport("", native.default_isa(), 1)
    problems = tune.problems_of(lowbit.convert(SOURCE).model, {}, report)
    # The first convolution reads an image, whose channels GPUs fill up.
    node = next(p.key for p in problems if "conv i32 " in p.key).partition(" shape=")[0] + " shape="
    ours, foreign = node + "n7 8x8", node.replace("conv i", "conv i9") + "n7 8x8"
    h200, h100 = (f"NVIDIA {name}, {TARGET}, 132 multiprocessors, driver 1.2" for name in ("H200", "H100"))
    write_cache(cache, h200, build, [ours, foreign])
    write_cache(cache, h100.replace(TARGET, "sm_80"), build, [ours])
    write_cache(cache, h100, "lowbit 0.0.1, kernels 0000000000000000", [ours])
    region = compiled(output, "--cache", cache)
    assert f"{ours}\tsome_kernel\n".encode() in region
    assert foreign.encode() not in region

    write_cache(cache, h100, build, [foreign])
    output.unlink()
    said = refusal(output, "--cache", cache)
    assert "expected measurements on one GPU of sm_90" in said
    assert h200 in said
    assert h100 in said
    assert ours.encode() in compiled(output, "--cache", cache, "--tuned-on", "NVIDIA H200")
    assert ours.encode() not in compiled(output, "--cache", cache, "--tuned-on", "NVIDIA H100")


def test_what_does_not_go_together_is_said(tmp_path: Path) -> None:
    output = tmp_path / "never.onnx"
    assert "expected one that liblowbit_cuda has code for: sm_90" in refusal(output, target="sm_61")
    assert "there are none" in refusal(output, "--cache", tmp_path)
    assert "give that, too" in refusal(output, "--tuned-on", "NVIDIA H200")
    assert "which takes a GPU; leave them out" in refusal(output, "--batch", "1,8")
