"""Option converted_model: a model as its exporter wrote it, which another file runs in the place of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.ep.conftest import EP
from tests.ep.graphs import Chain, chain, images
from tests.ep.test_sessions import within
from tests.support import lowbit_session

DEVICES = ["cpu", "fake:0"]
OTHER = "LpNormalization"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of two regions with a float node between, and model.lowbit.onnx beside it."""
    path = tmp_path / "model.onnx"
    onnx.save(chain("conv", OTHER, "conv", converted=False), path)
    lowbit.convert(path, tmp_path / "model.lowbit.onnx")
    return path


def beside(source: Path) -> Path:
    return source.with_name("model.lowbit.onnx")


def opened(devices, source: Path, device: str = "cpu", converted: Path | None = None) -> ort.InferenceSession:
    options = {"converted_model": str(converted or beside(source))}
    return devices.session(source, device, options=options)


@pytest.mark.parametrize("device", DEVICES)
def test_the_converted_file_runs(devices, source: Path, device: str, capfd, monkeypatch) -> None:
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    session = opened(devices, source, device)
    assert session.get_providers()[0] == EP
    alone = lowbit_session(beside(source))
    capfd.readouterr()
    for shape in [(1, 3, 5, 5), (4, 3, 6, 7), (2, 3, 5, 5)]:
        x = {"x": images(*shape)}
        np.testing.assert_array_equal(session.run(None, x)[0], alone.run(None, x)[0])
    assert capfd.readouterr().err.count('"lowbit": "region"') == 2 * 3, "two regions, three shapes"


@pytest.mark.parametrize("device", DEVICES)
def test_no_node_is_left_to_the_cpu_around_it(devices, source: Path, device: str) -> None:
    """The session around has one node; the one inside has its own say about the CPU, as its options ask."""
    options = {"converted_model": str(beside(source))}
    strict = {"session.disable_cpu_ep_fallback": "1"}
    with pytest.raises(Exception, match=r"model\.lowbit\.onnx.*fallback"):
        devices.session(source, device, options=options, entries=strict)


@pytest.mark.parametrize("device", DEVICES)
def test_several_inputs_outputs_and_tensors_that_pass_through(devices, tmp_path: Path, device: str) -> None:
    graph = Chain()
    first = graph.conv("x")
    model = graph.model([first, graph.conv(graph.node(OTHER, [first])), "x"], converted=False)
    del model.graph.output[2]
    path, converted = tmp_path / "model.onnx", tmp_path / "model.lowbit.onnx"
    onnx.save(model, path)
    lowbit.convert(path, converted)
    x = {"x": images(2, 3, 4, 5)}
    expected = lowbit_session(converted).run(None, x)
    session = opened(devices, path, device)
    for ours, alone in zip(session.run(None, x), expected, strict=True):
        np.testing.assert_array_equal(ours, alone)
    np.testing.assert_array_equal(session.run([first], x)[0], expected[0])


def test_subgraphs_go_with_the_model(devices, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(within("If", chain("conv", "conv", converted=False)), path)
    lowbit.convert(path, beside(path))
    x = {"x": images(1, 3, 5, 5), "condition": np.array(True)}
    session = opened(devices, path)
    np.testing.assert_array_equal(session.run(None, x)[0], lowbit_session(beside(path)).run(None, x)[0])


def renamed(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["image" if name == "x" else name for name in node.input]
    model.graph.input[0].name = "image"


def of_fixed_size(model: onnx.ModelProto) -> None:
    """With 4 channels where there were 3, which nothing but the interface shows."""
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    model.graph.output[0].CopyFrom(model.graph.input[0])
    model.graph.output[0].name = "y"
    model.graph.node.append(onnx.helper.make_node("Neg", ["x"], ["y"]))


def without_hash(model: onnx.ModelProto) -> None:
    kept = [entry for entry in model.metadata_props if entry.key != "lowbit.source_sha256"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, r"its input 0 is 'image' of .*, the model's is 'x' of ONNX element type 1 and shape"),
        (of_fixed_size, r"its input 0 is 'x' .* \[-1, 4, -1, -1\], the model's is 'x' .* \[-1, 3, -1, -1\]"),
        (without_hash, "its metadata hold no 'lowbit.source_sha256', so it is no file that `lowbit convert`"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    devices, source: Path, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = onnx.load(beside(source))
    change(model)
    onnx.save(model, beside(source))
    with pytest.raises(Exception, match=rf"option 'converted_model' is .*model\.lowbit\.onnx: {message}"):
        opened(devices, source)


def test_a_model_that_has_changed_since_is_refused(devices, source: Path) -> None:
    model = onnx.load(source)
    model.doc_string = "edited"
    onnx.save(model, source)
    told = r"made of a model whose SHA-256 is [0-9a-f]{64}, that of .*model\.onnx is [0-9a-f]{64}; convert"
    with pytest.raises(Exception, match=told):
        opened(devices, source)


@pytest.mark.parametrize("size", [1 << 13, *((1 << 13) + n for n in (1, 55, 56, 63)), 1 << 20, (1 << 20) + 1])
def test_the_hash_is_that_of_the_whole_file(devices, source: Path, size: int) -> None:
    """Around the lengths at which SHA-256 adds a block, and those at which the file is read on."""
    model = onnx.load(source)
    model.doc_string = "x" * (size - model.ByteSize() - 10)
    model.doc_string += "x" * (size - model.ByteSize())
    onnx.save(model, source)
    assert source.stat().st_size == size
    lowbit.convert(source, beside(source), overwrite=True)
    opened(devices, source)


def test_what_cannot_be_compared_is_refused(devices, source: Path, tmp_path: Path) -> None:
    options = {"converted_model": str(beside(source))}
    with pytest.raises(Exception, match=r"given its model from memory.*; open the model by its path"):
        devices.session(onnx.load(source), "cpu", options=options)
    with pytest.raises(Exception, match=r"(?s)option 'converted_model' is .*missing\.onnx: "):
        opened(devices, source, converted=tmp_path / "missing.onnx")
    with pytest.raises(Exception, match=r"the model is converted already: it holds node .*; leave the opt"):
        opened(devices, beside(source))
    with pytest.raises(Exception, match="is to write a compiled model; compile the converted file instead"):
        devices.session(source, "cpu", options=options, entries={"ep.context_enable": "1"})


def test_an_input_that_nobody_reads_is_refused(devices, source: Path) -> None:
    model = onnx.load(source)
    model.graph.input.append(onnx.helper.make_tensor_value_info("unread", onnx.TensorProto.FLOAT, [1]))
    onnx.save(model, source)
    lowbit.convert(source, beside(source), overwrite=True)
    with pytest.raises(
        Exception, match="its input 'unread' is not handed on by ONNX Runtime: no node of the model reads it"
    ):
        opened(devices, source)


def test_the_log_tells_of_the_command_and_the_option(devices, source: Path, capfd) -> None:
    options = devices.options("cpu")
    options.log_severity_level = 2
    ort.InferenceSession(source, options)
    log = capfd.readouterr().err
    assert f"Convert it with `lowbit convert {source} -o OUT`; then open OUT, or name it in" in log
    assert "option 'converted_model'" in log
