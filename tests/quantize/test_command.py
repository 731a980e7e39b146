"""`lowbit quantize` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from lowbit.cli import cli
from lowbit.quantizer import quantize as module

from tests.quantize.networks import images, residual
from tests.support import session_options


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, ["quantize", *map(str, arguments)])
    assert result.exit_code == code, f"{result.exit_code}: {result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", x=images(8))
    return tmp_path / "m.onnx"


def test_what_it_writes_and_says(model: Path, tmp_path: Path) -> None:
    output, lowbit_file, page = tmp_path / "q.onnx", tmp_path / "l.onnx", tmp_path / "q.html"
    done = run(model, "-o", output, "--bits", "w4a8", "--calib", tmp_path / "calib.npz", "--threads", 1,
               "--convert", lowbit_file, "--report", page, "--format", "json")  # fmt: skip
    summary = json.loads(done.stdout)
    report = summary["report"]
    assert report["images"] == 8
    assert report["converted"]
    assert [layer["weight_bits"] for layer in report["layers"]] == [8, 4, 4, 4, 4, 4, 8]
    assert summary["bytes_after"] == output.stat().st_size
    assert "<html" in page.read_text(encoding="utf-8")
    x = images(2)
    assert lowbit.session(lowbit_file).run(None, {"x": x})[0].shape == (2, 5)
    settings = json.loads((tmp_path / "q.yaml").read_text(encoding="utf-8"))
    assert settings["bits"] == "w4a8"
    assert not list(tmp_path.glob(".*"))
    again = tmp_path / "again.onnx"
    run(
        model, "-o", again, "--calib", tmp_path / "calib.npz", "--threads", 1, "--config", tmp_path / "q.yaml"
    )
    assert again.read_bytes() == output.read_bytes()


def test_a_table_of_layers(model: Path, tmp_path: Path) -> None:
    text = run(model, "-o", tmp_path / "q.onnx", "--bits", "w2a8", "--calib", "random", "-n", 3, "-v").output
    assert "7  (2 w8a8, 5 w2a8)" in text or "7  (5 w2a8, 2 w8a8)" in text
    assert "lowbit has no integer form of Softmax" in text


def test_settings_in_yaml(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML reads the file; pip install 'lowbit[quantize]'")
    (tmp_path / "c.yaml").write_text("bits: w4a4\noverrides:\n  'Conv.*': {weight_bits: 6}\n")
    done = run(model, "-o", tmp_path / "q.onnx", "--config", tmp_path / "c.yaml", "--calib",
               tmp_path / "calib.npz", "--uniform", "--format", "json")  # fmt: skip
    report = json.loads(done.stdout)["report"]
    assert {layer["weight_bits"] for layer in report["layers"] if layer["op_type"] == "Conv"} == {6}
    assert report["config"]["uniform"]


def test_a_run_that_was_stopped_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "q.onnx"
    arguments = (model, "-o", output, "--bits", "w4a4", "--calib", tmp_path / "calib.npz", "--threads", 1)
    save = module.Run._save_state

    def stop(self: Any, name: str, *what: Any) -> None:
        save(self, name, *what)
        if len(list(tmp_path.rglob(".q.onnx.lowbit-state/*/*.npz"))) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "_save_state", stop)
        assert run(*arguments, code=1).exception is not None
    assert not output.exists()
    run(*arguments)
    resumed = output.read_bytes()
    run(*arguments, "--overwrite")
    assert output.read_bytes() == resumed


def test_preprocessing_becomes_part_of_the_model(model: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8)
    np.savez(tmp_path / "pixels.npz", x=pixels)
    spec = "scale=1/64,mean=2;1.9;1.8,std=0.5;0.6;0.7"
    done = run(model, "-o", tmp_path / "q.onnx", "--bits", "w8a8", "--calib", tmp_path / "pixels.npz", "--io",
               "uint8", "--preprocess", spec, "--convert", tmp_path / "l.onnx", "--threads", 1)  # fmt: skip
    assert "the model is fed raw pixels: --preprocess raw,layout=nchw,order=rgb" in done.stderr
    fed = {"x": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))}
    ours = lowbit.session(tmp_path / "l.onnx").run(None, fed)[0]
    mean, std = (np.array(each, np.float32).reshape(3, 1, 1) for each in ((2, 1.9, 1.8), (0.5, 0.6, 0.7)))
    x = (fed["x"].astype(np.float32) / 64 - mean) / std
    exact = ort.InferenceSession(tmp_path / "m.onnx", session_options()).run(None, {"x": x})[0]
    assert np.abs(exact - ours).max() < 0.05
    again = run(model, "-o", tmp_path / "f.onnx", "--calib", tmp_path / "pixels.npz", "--io", "uint8",
                "--preprocess", "tests.quantize.networks:images", code=2)  # fmt: skip
    assert "a function cannot become part of the model" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calib", "nothing.npz"), "nothing.npz"),
        (("--calib", "random", "--bits", "4"), "expected w<1..8>a<1..8>"),
        (("--calib", "random", "--disable-rule", "x"), "disable_rules: expected one of"),
        (("--calib", "random", "--nodes-to-exclude", ".*"), "nothing to quantize"),
        (("--calib", "random", "--config", "nothing.yaml"), "nothing.yaml: cannot be read"),
    ],
)
def test_errors_are_one_line(model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(model, "-o", tmp_path / "q.onnx", *arguments, code=2)
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "q.onnx").exists()
