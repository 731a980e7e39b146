"""Compiled models (EPContext) give equal results without packing and tuning; foreign ones are refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from tests.gpu.support import assert_equal, gpu_options, gpu_session
from tests.hostile.context_mutants import Region
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
from lowbit.measure.device_tune import tune_device  # noqa: E402
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


def test_weights_may_stay_outside(case, tmp_path: Path) -> None:
    path, image, expected = case
    compiled = tmp_path / "compiled.onnx"
    compiler = ort.ModelCompiler(
        gpu_options({}, {"ep.enable_weightless_ep_context_nodes": "1"}), str(path),
        embed_compiled_data_into_model=True,
    )  # fmt: skip
    compiler.compile_to_file(str(compiled))
    assert_equal(gpu_session(compiled).run(None, {"input": image}), expected, "weightless")


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


@pytest.mark.parametrize("tuned", [False, True])
def test_without_a_gpu_the_same_is_compiled(case, tmp_path: Path, tuned: bool) -> None:
    """What `lowbit compile --target` writes is what this GPU compiles, its measured choices included."""
    path, image, expected = case
    cache = tmp_path / "cache"
    if tuned:
        tune_device(path, "cuda:0", cache=str(cache), batches=(1,))
    architecture = re.search(r"sm_\d+", next(d for d in lowbit.devices() if d.name == "cuda:0").description)
    assert architecture is not None
    options = {"cache_dir": str(cache)} if tuned else {"tuning": "off"}
    here, there = tmp_path / "here.onnx", tmp_path / "there.onnx"
    lowbit.compile(path, here, device="cuda", provider_options=options)
    lowbit.compile(
        path, there, target=architecture[0], cache=cache if tuned else None,
        provider_options=None if tuned else options,
    )  # fmt: skip
    assert here.read_bytes() == there.read_bytes()
    assert_equal(gpu_session(there).run(None, {"input": image}), expected, "compiled without a GPU")


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


def test_a_pair_of_volumes_in_a_region_said_to_be_of_the_gpu(tmp_path: Path) -> None:
    """No partitioning has seen it; two convolutions that would be fused are refused like one."""
    kinds = {"x_bits": 8, "w_bits": 8, "y_bits": 8, "in_channels": 16, "out_channels": 16}
    window = {"kernel_shape": [2, 2, 2], "domain": "ai.lowbit"}
    rng = np.random.default_rng(0)
    constants = {
        "scale": np.float32(0.01),
        "zero": np.int32(0),
        "w": rng.integers(0, 256, 16 * 16 * 8).astype(np.uint8),
    }
    product = ["scale", "zero", "scale", "zero", "", "scale", "zero"]
    shortcut = helper.make_node("LowBitConv", ["x", "w", *product], ["r"], "r", **kinds, **window)
    residual = ["", "", "", "", "", "", "r", "scale", "zero", "scale", "zero"]
    adding = helper.make_node("LowBitConv", ["x", "w", *product, *residual], ["y"], "y", **kinds, **window)
    graph = helper.make_graph(
        [shortcut, adding],
        "volumes",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, 4, 4, 4, 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, [1, 3, 3, 3, 16])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.lowbit", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    lowbit.compile(model, tmp_path / "cpu.onnx", device="cpu-ep")
    volumes = onnx.load(tmp_path / "cpu.onnx")
    del model.graph.node[1:], model.graph.output[:]
    flat = onnx.load_from_string(model.SerializeToString())
    attributes = {a.name: a for a in flat.graph.node[0].attribute}
    attributes["kernel_shape"].ints[:] = [2, 4]
    del flat.graph.input[0].type.tensor_type.shape.dim[1]
    flat.graph.output.append(helper.make_tensor_value_info("r", onnx.TensorProto.UINT8, None))
    (tmp_path / "flat.onnx").write_bytes(flat.SerializeToString())
    compile_model(tmp_path / "flat.onnx", tmp_path / "gpu.onnx")
    here = Region.of(context_bytes(onnx.load(tmp_path / "gpu.onnx")).s).fingerprint
    changed = context_bytes(volumes)
    changed.s = Region.of(changed.s).said_to_be_of(here).blob()
    with pytest.raises(Exception, match="3-D convolutions have no kernel for GPUs"):
        gpu_session(volumes)
