"""Compiled models (EPContext) give equal results without packing and tuning; foreign ones are refused."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.gpu.support import assert_equal, gpu_options, gpu_session
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
from lowbit.models import build  # noqa: E402


def compile_model(source: Path, target: Path, *, embed: bool = True, **options: str) -> None:
    compiler = ort.ModelCompiler(gpu_options(options), str(source), embed_compiled_data_into_model=embed)
    compiler.compile_to_file(str(target))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    model = lowbit.convert(build("resnet50", 8, 8, batch="N")).model
    folder = tmp_path_factory.mktemp("context")
    path = folder / "resnet50.onnx"
    path.write_bytes(model.SerializeToString())
    image = np.random.default_rng(0).normal(0, 1, (1, 3, 224, 224)).astype(np.float32)
    return path, image, lowbit_session(model, threads=8).run(None, {"input": image})


@pytest.mark.parametrize("embed", [True, False])
def test_compiled_models_equal_their_source(case, tmp_path: Path, embed: bool, capsys) -> None:
    path, image, expected = case
    start = time.perf_counter()
    assert_equal(gpu_session(path).run(None, {"input": image}), expected, "source")
    source_seconds = time.perf_counter() - start
    compiled = tmp_path / "compiled.onnx"
    compile_model(path, compiled, embed=embed)
    nodes = [node.op_type for node in onnx.load(compiled, load_external_data=False).graph.node]
    assert nodes == ["EPContext"]
    start = time.perf_counter()
    session = gpu_session(compiled)
    seconds = time.perf_counter() - start
    assert_equal(session.run(None, {"input": image}), expected, "compiled")
    with capsys.disabled():
        size = sum(file.stat().st_size for file in tmp_path.iterdir()) / 2**20
        print(
            f"\nResNet-50 loads in {1e3 * seconds:.0f} ms compiled ({size:.1f} MiB, embedded: {embed}), "
            f"its source in {1e3 * source_seconds:.0f} ms with one run"
        )


def context_bytes(model: onnx.ModelProto) -> onnx.AttributeProto:
    return next(a for a in model.graph.node[0].attribute if a.name == "ep_cache_context")


def test_foreign_and_damaged_contexts_are_refused(case, tmp_path: Path) -> None:
    path, _, _ = case
    compiled = tmp_path / "compiled.onnx"
    compile_model(path, compiled)
    good = onnx.load(compiled)
    data = context_bytes(good).s
    assert b"cuda sm_" in data
    foreign_gpu, other_build = data.replace(b"cuda sm_", b"cuda zz_"), data.replace(b"kernels ", b"kernelz ")
    cut, noise = data[: len(data) // 2], bytes(len(data))
    for bad in (foreign_gpu, other_build, cut, noise):
        model = onnx.ModelProto()
        model.CopyFrom(good)
        context_bytes(model).s = bad
        with pytest.raises(Exception, match="compile"):
            gpu_session(model)
