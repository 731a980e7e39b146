"""What commands are given by mistake: one sentence says what was expected, and nothing is written."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.deploy.operators import forms_of
from lowbit.errors import LowBitError, OutputError
from lowbit.proto.atomic import write_atomically
from lowbit.proto.feeds import random_feeds
from lowbit.proto.images import load_feeds, load_vector
from lowbit.proto.preprocess import make_preprocess, rest_of, spec_for
from lowbit.proto.user_function import load_function
from onnx import TensorProto, helper

from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run, save


def value(name: str = "x", kind: int = TensorProto.FLOAT, dims: object = (1, 3, 4, 4)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def takes(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    """A model that passes its first input on."""
    output = onnx.ValueInfoProto()
    output.CopyFrom(inputs[0])
    output.name = "y"
    node = helper.make_node("Identity", [inputs[0].name], ["y"])
    graph = helper.make_graph([node], "takes", list(inputs), [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- files to write


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(("make", "message"), [(Path.mkdir, "is a folder"), (pipe, "is a pipe|is a FIFO")])
def test_what_is_no_file_is_not_replaced(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    make(output)
    before = output.stat()
    with pytest.raises(OutputError, match=message):
        lowbit.convert(qdq_conv(), output, overwrite=True)
    assert output.stat().st_mode == before.st_mode
    assert list(tmp_path.iterdir()) == [output]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of memory cards: files are written there too, and are replaced only where asked."""

    def refuse(*_: object) -> None:
        raise OSError("links are not known here")

    monkeypatch.setattr(os, "link", refuse)
    output = tmp_path / "out.txt"
    write_atomically(output, lambda path: path.write_text("first"), overwrite=False)
    with pytest.raises(OutputError, match="exists"):
        write_atomically(output, lambda path: path.write_text("second"), overwrite=False)
    assert output.read_text() == "first"
    write_atomically(output, lambda path: path.write_text("third"), overwrite=True)
    assert output.read_text() == "third"
    assert list(tmp_path.iterdir()) == [output]


# ---- data


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def images(count: int) -> np.ndarray:
    return np.zeros((count, 3, 4, 4), np.float32)


def of_version_3(path: Path) -> Path:
    np.save(path, images(2))
    data = bytearray(path.read_bytes())
    data[6] = 3
    path.write_bytes(data)
    return path


def broken_zip(path: Path) -> Path:
    path.write_bytes(b"PK\3\4 and no more")
    return path


def empty_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no image")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: of_version_3(folder / "x.npy"), r"version 3\.0 of the \.npy format"),
        (lambda folder: broken_zip(folder / "x.zip"), "expected a zip of images"),
        (lambda folder: empty_zip(folder / "x.zip"), "expected images"),
        (lambda folder: f"{empty_zip(folder / 'x.zip')}:member", "chooses an array of an .npz"),
        (lambda folder: folder / "missing.npy", "no such file"),
        (
            lambda folder: npz(
                folder / "x.npz", x=np.zeros((2, 3, 4, 4), "f"), z=np.zeros((3, 3, 4, 4), "f")
            ),
            "2.*3|3.*2",
        ),
    ],
)
def test_data_that_cannot_be_read(make: Callable[[Path], str | Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(LowBitError, match=message):
        list(load_feeds(make(tmp_path), {"x": value(), "z": value("z")}))


def test_an_array_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, images(2))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(LowBitError, match="is the file whole"):
        list(load_feeds(path, {"x": value()}))


def test_a_long_header_of_an_array_is_read(tmp_path: Path) -> None:
    """Version 2 of the format, which numpy writes where a header has more than 64 KiB."""
    array = np.arange(2 * 48, dtype=np.float32).reshape(2, 3, 4, 4)
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, array, version=(2, 0))
    feeds = list(load_feeds(tmp_path / "x.npy", {"x": value()}))
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in feeds]), array)


def test_inputs_that_an_image_cannot_be_made_for() -> None:
    two = {"a": value("a"), "b": value("b")}
    with pytest.raises(LowBitError, match=r"the model has 2 \(a, b\)"):
        make_preprocess("imagenet", two)
    with pytest.raises(LowBitError, match="holds no numbers"):
        make_preprocess("raw", {"x": value(kind=TensorProto.STRING)})


def test_inputs_that_no_random_values_are_made_for() -> None:
    with pytest.raises(LowBitError, match="'x' has no shape; give one with --shape"):
        random_feeds(takes(value(dims=None)))
    with pytest.raises(LowBitError, match="'x' holds no numbers"):
        random_feeds(takes(value(kind=TensorProto.STRING)))
    drawn = random_feeds(takes(value(kind=TensorProto.BOOL, dims=(1, 50))))["x"]
    assert set(drawn.reshape(-1).tolist()) == {False, True}


def test_first_dims_that_are_no_batch() -> None:
    inputs = {"a": value("a", dims=(2, 3)), "b": value("b", dims=(5, 3))}
    with pytest.raises(LowBitError, match="first dims of 2, 5, which are no batch"):
        list(load_feeds({"a": np.ones((10, 3), "f"), "b": np.ones((10, 3), "f")}, inputs))


def test_what_is_left_of_a_spec_whose_scaling_went_into_the_model() -> None:
    inputs = {"x": value(dims=(1, 3, 224, 224))}
    assert rest_of(spec_for("scale=0.5", inputs)) == "raw,layout=nchw,order=rgb"
    sized = "raw,resize=256,crop=224x224,interpolation=bilinear,layout=nchw,order=rgb"
    assert rest_of(spec_for("imagenet", inputs)) == sized


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("function", "expected module:function or file.py:function, got 'function'"),
        ("module:1st", "expected module:function or file.py:function"),
        ("/nowhere.py:function", "/nowhere.py: no such file"),
        ("json:nothing", "'json' has no function 'nothing'"),
        ("json:decoder", "'json' has a module, no function, 'decoder'"),
    ],
)
def test_functions_that_are_not_there(text: str, message: str) -> None:
    with pytest.raises(LowBitError, match=f"--metric: {message}"):
        load_function(text, "--metric")


def test_measurements_of_no_rounds() -> None:
    with pytest.raises(LowBitError, match="rounds must be at least 1, got 0"):
        lowbit.bench(qdq_conv(), rounds=0)


def test_labels_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(LowBitError, match="no such file"):
        load_vector(tmp_path / "labels.npy")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--input", "x={array}"], "no value for input w; give --input w=FILE.npy"),
        (["--input", "x={npz}"], "expected one array, found a, b"),
        (["--input", "x={text}"], r"expected an \.npy or \.npz file"),
        (["--input", "x={missing}"], r"missing\.npy"),
    ],
)
def test_values_that_run_cannot_read(given: list[str], message: str, tmp_path: Path) -> None:
    model = save(qdq_conv(weight_is_input=True), tmp_path / "m.onnx")
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "x.npy", np.zeros((1, 3, 8, 8), np.float32))
    files = {
        "array": tmp_path / "x.npy",
        "npz": npz(tmp_path / "two.npz", a=np.zeros(1), b=np.zeros(1)),
        "text": tmp_path / "text.npy",
        "missing": tmp_path / "missing.npy",
    }
    said = run("run", model, *(text.format(**files) for text in given), code=2).stderr
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said


# ---- models


def test_an_op_of_a_later_lowbit_is_told(converted: Path) -> None:
    model = onnx.load(converted)
    node = next(node for node in model.graph.node if node.domain == "ai.lowbit")
    node.op_type = "LowBitOfTomorrow"
    (entry,) = (each for each in lowbit.inspect(model).nodes if each.op_type == "LowBitOfTomorrow")
    assert entry.reason == "this version of lowbit knows no op LowBitOfTomorrow; update it"


@pytest.mark.parametrize(
    ("kernel", "strides", "pads", "image"),
    [
        ([1, 3, 3], [1, 2, 2], [0, 1, 1, 0, 1, 1], "3x3 stride 2x2"),
        ([3, 1, 1], [2, 1, 1], [1, 0, 0, 1, 0, 0], "3x1 stride 2x1"),
        ([3, 3, 3], [1, 1, 1], [1, 1, 1, 1, 1, 1], "3x3x3 stride 1x1x1"),
    ],
)
def test_the_form_of_a_window_over_volumes(
    kernel: list[int], strides: list[int], pads: list[int], image: str
) -> None:
    """Those of one plane, or of one pixel in each plane, run as windows over images."""
    node = helper.make_node(
        "LowBitConv", ["x", "w", "s", "z", "s", "z"], ["y"], domain="ai.lowbit",
        kernel_shape=kernel, strides=strides, pads=pads, in_channels=4, out_channels=4, epilogue="float",
    )  # fmt: skip
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert forms_of(model) == {"LowBitConv": [f"u8 u8 {image} float"]}
