"""onnxruntime-extensions in the same session: its pre-processing before a network, the whole converted."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support import require_native, session_options

require_native()
extensions = pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")
images = pytest.importorskip("PIL.Image", reason="pillow is not installed")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "image_to_class.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("image_to_class", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    from lowbit.models import build

    return build("resnet18", 8, 8, image=64, classes=10)


def photo(kind: str = "JPEG") -> bytes:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (6, 8, 3)).astype(np.uint8)
    image = images.fromarray(coarse).resize((160, 120))
    encoded = io.BytesIO()
    image.save(encoded, kind)
    return encoded.getvalue()


def test_the_whole_pipeline_converts_and_agrees_with_stock(example, network):
    whole = example.with_preprocessing(network)
    result = lowbit.convert(whole)
    assert any(node.op_type == "LowBitConv" for node in result.model.graph.node)
    assert any(node.op_type == "DecodeImage" for node in result.model.graph.node)
    assert not any(node.op_type == "Conv" for node in result.model.graph.node)

    stock = session_options()
    stock.register_custom_ops_library(extensions.get_library_path())
    original = ort.InferenceSession(whole.SerializeToString(), stock, providers=["CPUExecutionProvider"])
    for kind in ("JPEG", "PNG"):
        expected = example.classify(original, photo(kind))
        got = example.classify(example.open_session(result.model), photo(kind))
        assert got.argmax() == expected.argmax()
        np.testing.assert_allclose(got, expected, atol=0.02)


@pytest.mark.parametrize("order", ["extensions first", "lowbit first"])
def test_the_libraries_register_in_any_order(example, network, order):
    model = lowbit.convert(example.with_preprocessing(network)).model
    options = ort.SessionOptions()
    if order == "extensions first":
        options.register_custom_ops_library(extensions.get_library_path())
        session = lowbit.session(model, sess_options=options)
    else:
        options.register_custom_ops_library(lowbit.get_library_path())
        options.register_custom_ops_library(extensions.get_library_path())
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert example.classify(session, photo()).shape == (10,)


def test_bytes_that_are_no_image_are_refused(example):
    with pytest.raises(ValueError, match="neither JPEG nor PNG"):
        example.classify(None, b"GIF89a")


def test_the_example_runs(network, tmp_path):
    onnx.save(network, tmp_path / "network.onnx")
    (tmp_path / "photo.jpg").write_bytes(photo())
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "network.onnx"), str(tmp_path / "photo.jpg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("class ") == 5
