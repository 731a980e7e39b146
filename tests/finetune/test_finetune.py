"""`lowbit finetune`: what it reads, what it trains, what it writes, what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from lowbit.cli import cli
from lowbit.errors import LowBitError
from lowbit.finetuner.network import Network, read_network
from lowbit.finetuner.report import FinetuneResult
from lowbit.frontends.load import load_model
from lowbit.quantizer.data import Spool
from lowbit.quantizer.prepare import prepare
from onnx import numpy_helper

from tests.quantize.networks import images, inverted, random_network, residual, tokens
from tests.support import stock_run

Array = npt.NDArray[Any]

COUNT = 20
STEPS = 6


@pytest.fixture(name="torch")
def need_torch() -> Any:
    """PyTorch; skips with the reason where it is not installed, before anything is quantized."""
    return pytest.importorskip("torch", reason="PyTorch is not installed; pip install 'lowbit[torch]'")


needs_torch = pytest.mark.usefixtures("torch")


def quantized(model: onnx.ModelProto, bits: str = "w2a4", **more: Any) -> onnx.ModelProto:
    return lowbit.quantize(model, images(COUNT), bits=bits, threads=1, rounding="gptq", **more).model


def cleaned(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    source = load_model(model)
    return ir.to_proto(prepare(source, Spool(source.proto, images(2), folder), 1)[0])


def read(model: onnx.ModelProto, folder: Path, bits: str = "w2a4") -> Network:
    return read_network(quantized(model, bits), cleaned(model, folder))


def tune(model: onnx.ModelProto, given: onnx.ModelProto, **more: Any) -> FinetuneResult:
    return lowbit.finetune(model, given, images(COUNT), steps=more.pop("steps", STEPS), threads=1, **more)


def values(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


# What it reads --------------------------------------------------------------------------------------------


def test_blocks_end_where_one_value_goes_on(tmp_path: Path) -> None:
    network = read(residual(), tmp_path)
    blocks = network.blocks()
    assert [len(block.layers) for block in blocks] == [3, 3, 1]
    assert all(len(block.outputs) == 1 for block in blocks)
    assert [step for block in blocks for step in block.steps] == network.steps
    assert blocks[-1].outputs == tuple(network.targets)
    assert {layer.bits for layer in network.layers.values()} == {2, 8}


def test_codes_that_are_moved_stay_on_one_grid(tmp_path: Path) -> None:
    network = read(residual(), tmp_path)
    flat = next(step for step in network.steps if step.op_type == "Flatten")
    around = [step for step in network.steps if step.grid >= 0 and flat.outputs[0] in step.inputs]
    source = next(step for step in network.steps if flat.inputs[0] in step.outputs)
    assert [step.grid for step in around] == [source.grid]


def test_models_that_do_not_belong_together(tmp_path: Path) -> None:
    given = quantized(residual())
    with pytest.raises(LowBitError, match=r"does not match: it has no "):
        read_network(given, cleaned(inverted(), tmp_path))
    with pytest.raises(LowBitError, match="no layer whose weights are codes"):
        read_network(residual(), residual())


def test_a_product_of_tokens_has_its_bias_in_an_add(tmp_path: Path) -> None:
    network = read(tokens(), tmp_path, "w8a8")
    (layer,) = (layer for layer in network.layers.values() if layer.bias and "MatMul" in layer.node)
    assert layer.bias_codes.shape == (12,)


def test_quantized_models_of_other_forms(tmp_path: Path) -> None:
    """What `lowbit quantize` does not write: each is refused by the name of the node."""
    given, exact = quantized(residual(), "w8a8"), cleaned(residual(), tmp_path)

    def refuses(edit: Callable[[onnx.ModelProto], None], message: str) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(given)
        edit(model)
        with pytest.raises(LowBitError, match=message):
            read_network(model, exact)

    def zero_points(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name.endswith("weight.zero_point"):
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1, tensor.name))

    def other_weights(model: onnx.ModelProto) -> None:
        named = (t for t in model.graph.initializer if t.name.endswith("weight.codes"))
        tensor = next(tensor for tensor in named if len(tensor.dims) > 2)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[..., :1], tensor.name))

    refuses(zero_points, "its weights have zero points, expected none")
    refuses(other_weights, r"has weights of the shape \[.*, 1\], in the float model")


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LowBitError, match=r"pip install 'lowbit\[torch\]'"):
        lowbit.finetune(residual(), residual(), images(2))


# What it computes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_networks_compute_what_onnxruntime_does(seed: int, tmp_path: Path, torch: Any) -> None:
    from lowbit.finetuner.engine import Engine

    model = random_network(seed)
    exact = cleaned(model, tmp_path)
    given = quantized(model, ("w8a8", "w4a4")[seed % 2])
    engine = Engine(read_network(given, exact), "cpu")
    x = images(3, seed=9)
    for source, is_exact in ((exact, True), (given, False)):
        wanted = onnx.ModelProto()
        wanted.CopyFrom(source)
        del wanted.graph.output[:]
        targets = engine.network.targets
        wanted.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in targets)
        with torch.no_grad():
            feed = {name: torch.from_numpy(x) for name in engine.network.inputs}
            made = engine.run(engine.network.steps, feed, targets, exact=is_exact)
        for name, expected in zip(targets, stock_run(wanted, {"x": x}, optimize=False), strict=True):
            error = np.abs(made[name].numpy() - expected)
            # A tie that rounds the other way may be a code further on; it must stay rare.
            assert np.mean(error) <= (1e-5 if is_exact else 1e-2) * np.abs(expected).max()


# What it writes -------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("mode", ["blocks", "distill"])
def test_the_same_nodes_with_better_values(mode: str) -> None:
    model = residual()
    given = quantized(model, "w2a2")
    steps = 300 if mode == "distill" else 30  # what quantize leaves takes that long to win
    result = tune(model, given, mode=mode, steps=steps, convert_to=True)
    report = result.report
    assert report.again == (steps // 2 if report.kept and mode == "distill" else 0)
    assert (report.images, report.held_out) == (16, 4)
    assert report.kept or mode == "blocks"  # which 16 images teach little
    assert report.kept == (report.after < report.before)
    assert report.kept == (result.model.SerializeToString() != given.SerializeToString())
    assert [n.op_type for n in result.model.graph.node] == [n.op_type for n in given.graph.node]
    assert [(t.name, t.data_type, t.dims) for t in result.model.graph.initializer] == [
        (t.name, t.data_type, t.dims) for t in given.graph.initializer
    ]
    assert report.converted
    x = images(3, seed=8)
    ours = lowbit.session(result.converted, threads=1).run(None, {"x": x})[0]
    stock = stock_run(result.model, {"x": x})[0]
    assert np.abs(stock - ours).max() <= 0.05 * np.abs(stock).max()


@needs_torch
def test_biases_stay_on_the_grid_of_the_sum() -> None:
    model = residual()
    made = tune(model, quantized(model, "w2a2"), mode="distill", steps=30).model
    found = values(made)
    makers = {node.output[0]: node for node in made.graph.node}
    checked = 0
    for node in made.graph.node:
        if node.op_type in ("Conv", "Gemm") and len(node.input) > 2:
            x, w, bias = (found[makers[name].input[1]] for name in node.input[:3])
            assert x.shape == ()
            assert np.array_equal(bias, np.broadcast_to((x * w).astype(np.float32), bias.shape))
            checked += 1
    assert checked == 7


def test_what_is_written_computes_what_was_trained(tmp_path: Path, torch: Any) -> None:
    from lowbit.finetuner.emit import write_back
    from lowbit.finetuner.engine import Engine

    model = residual()
    engine = Engine(read(model, tmp_path, "w2a2"), "cpu")
    network, generator = engine.network, torch.Generator().manual_seed(0)
    for name, tensor in engine.state(network.layers, range(len(network.grids))).items():
        size = 3.0 if name.startswith("shift") else 0.2  # biases lie on a grid as coarse as their weights
        tensor += size * torch.randn(tensor.shape, generator=generator)
    engine.clamp(network.layers, range(len(network.grids)))
    x = images(3, seed=9)
    with torch.no_grad():
        feed = {name: torch.from_numpy(x) for name in network.inputs}
        made = engine.run(network.steps, feed, network.targets)
    written = write_back(engine)
    del written.graph.output[:]
    written.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in network.targets)
    for name, expected in zip(network.targets, stock_run(written, {"x": x}, optimize=False), strict=True):
        assert np.mean(np.abs(made[name].numpy() - expected)) <= 1e-2 * np.abs(expected).max()


@needs_torch
def test_the_same_arguments_give_the_same_bytes() -> None:
    model = residual()
    given = quantized(model)
    first, again, other = (tune(model, given, seed=seed).model.SerializeToString() for seed in (1, 1, 2))
    assert first == again != other


@needs_torch
@pytest.mark.parametrize("mode", ["blocks", "distill"])
def test_a_run_that_was_stopped_goes_on(mode: str, tmp_path: Path) -> None:
    model = residual()
    given = quantized(model)
    seen: list[int] = []

    def stop(done: int, total: int, text: str) -> None:
        seen.append(done)
        if done > total * 2 // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(model, given, mode=mode, steps=30, state=tmp_path / "s", progress=stop)
    assert list((tmp_path / "s").rglob("*.npz"))
    resumed: list[int] = []
    result = tune(model, given, mode=mode, steps=30, state=tmp_path / "s",
                  progress=lambda done, total, text: resumed.append(done))  # fmt: skip
    assert len(resumed) < len(seen)
    assert not (tmp_path / "s").exists()
    whole = tune(model, given, mode=mode, steps=30)
    assert result.model.SerializeToString() == whole.model.SerializeToString()


@needs_torch
def test_it_is_never_worse_than_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.finetuner.judge import Judge

    monkeypatch.setattr(Judge, "error", lambda self, model: 1.0)
    model = residual()
    given = quantized(model)
    result = tune(model, given)
    assert not result.report.kept
    assert result.model.SerializeToString() == given.SerializeToString()
    assert "did not get better" in result.report.warnings[0]
    assert "1 by distill, 1 by blocks" in result.report.warnings[0]


@needs_torch
def test_weights_below_a_byte_and_images_as_bytes() -> None:
    model = residual()
    given = quantized(model, sub_byte=True)
    made = tune(model, given, steps=20).model
    types = {t.name: t.data_type for t in given.graph.initializer}
    assert onnx.TensorProto.INT2 in types.values()
    assert {t.name: t.data_type for t in made.graph.initializer} == types
    raw = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 16, 16)).astype(np.float32)
    given = lowbit.quantize(model, raw, bits="w4a4", io="uint8", threads=1, rounding="gptq").model
    result = lowbit.finetune(model, given, raw, steps=STEPS, threads=1)
    assert result.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


# What it refuses ------------------------------------------------------------------------------------------


@needs_torch
def test_bad_input() -> None:
    model = residual()
    given = quantized(model)
    for arguments, options, message in (
        ((given, given, images(4)), {}, "quantized already"),
        ((model, model, images(4)), {}, "is not quantized"),
        ((model, given, images(1)), {}, "cannot both train and judge"),
        ((model, given, []), {}, "the calibration data are empty"),
        ((residual(7), given, images(4)), {}, "its weights of"),
        ((model, given, images(4)), {"mode": "both"}, "mode: expected distill or blocks"),
        ((model, given, images(4)), {"steps": 0}, "steps: expected"),
        ((model, given, images(4)), {"rate": 1.5}, "rate: expected"),
        ((model, given, images(4)), {"device": "abacus"}, "device: expected"),
    ):
        with pytest.raises(LowBitError, match=message):
            lowbit.finetune(*arguments, **options)


# The command ----------------------------------------------------------------------------------------------


@needs_torch
def test_the_command(tmp_path: Path) -> None:
    model, given = tmp_path / "m.onnx", tmp_path / "q.onnx"
    onnx.save(residual(), model)
    onnx.save(quantized(residual(), "w2a2"), given)
    np.savez(tmp_path / "calib.npz", x=images(COUNT))

    def run(*more: object, code: int = 0) -> str:
        arguments = ["finetune", model, given, "--calib", tmp_path / "calib.npz", "--threads", 1]
        more = ("--steps", 30, *more)
        done = CliRunner().invoke(cli, [str(word) for word in (*arguments, *more)])
        assert done.exit_code == code, done.output
        return done.stdout if code == 0 else done.output

    page = tmp_path / "f.html"
    text = run("-o", tmp_path / "f.onnx", "--convert", tmp_path / "l.onnx", "--report", page,
               "--format", "json")  # fmt: skip
    report = json.loads(text)["report"]
    assert report["mode"] in ("distill", "blocks")
    assert report["after"] <= report["before"]
    assert "<html" in page.read_text(encoding="utf-8")
    assert lowbit.session(tmp_path / "l.onnx").run(None, {"x": images(2)})[0].shape == (2, 5)
    assert not list(tmp_path.glob(".*"))
    report = json.loads(run("-o", tmp_path / "b.onnx", "--blocks", "--format", "json"))["report"]
    assert [len(block["layers"]) for block in report["blocks"]] == [3, 3, 1]
    assert "held-out" in run("-o", tmp_path / "d.onnx", "--blocks", "-v")
    assert "the input, which is never overwritten" in run("-o", given, "--overwrite", code=2)
    assert "random values teach nothing" in run("-o", tmp_path / "r.onnx", "--calib", "random", code=2)
