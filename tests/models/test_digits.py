"""Shipped digits models: small, valid, as accurate as recorded, in stock ONNX Runtime and in lowbit."""

from __future__ import annotations

import json

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.models.digits import BIT_PAIRS, accuracy, held_out, model_path, stock_session
from onnx import numpy_helper

from tests.support import require_native

RECORDED = json.loads(model_path("w8a8").with_name("accuracy.json").read_text(encoding="utf-8"))

LEAST_ACCURACY = {"w8a8": 0.98, "w4a4": 0.975, "w2a2": 0.94, "w1a2": 0.94}


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    pytest.importorskip("sklearn", reason="scikit-learn, which holds the images, is not installed")
    return held_out()


@pytest.mark.parametrize("bits", BIT_PAIRS)
def test_file_is_small_and_says_its_widths(bits):
    path = model_path(bits)
    assert path.stat().st_size < 300_000
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {node.output[0]: node for node in model.graph.node}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers) == 7
    names = onnx.TensorProto.DataType.Name
    for layer in layers:
        weight = values[producers[layer.input[1]].input[0]]
        codes = numpy_helper.to_array(weight).astype(int)
        if bits == "w1a2":
            assert set(np.unique(codes)) == {-1, 1}
        else:
            assert names(weight.data_type) == f"INT{bits[1]}"
        zero_point = values[producers[layer.input[0]].input[2]]
        assert names(zero_point.data_type) == f"UINT{bits[3]}"


@pytest.mark.parametrize("bits", BIT_PAIRS)
def test_accuracy_in_stock_onnxruntime(bits, samples):
    session, mode = stock_session(model_path(bits))
    got = accuracy(session, *samples)
    assert got >= LEAST_ACCURACY[bits]
    assert mode == RECORDED[bits]["onnxruntime_mode"]
    # Another machine may round a near-tie the other way; one image is 1/450.
    assert got == pytest.approx(RECORDED[bits]["onnxruntime"], abs=2.5 / 450)


@pytest.mark.parametrize("bits", BIT_PAIRS)
def test_accuracy_in_lowbit(bits, samples):
    require_native()
    result = lowbit.convert(model_path(bits), strict=True)
    assert not {"Conv", "Gemm", "MatMul"} & {node.op_type for node in result.model.graph.node}
    got = accuracy(lowbit.session(result), *samples)
    assert got == pytest.approx(RECORDED[bits]["onnxruntime"], abs=2.5 / 450)


def test_batch_is_free(samples):
    session, _ = stock_session(model_path("w8a8"))
    images = samples[0]
    whole = session.run(None, {"input": images[:5]})[0]
    single = np.concatenate([session.run(None, {"input": images[i : i + 1]})[0] for i in range(5)])
    np.testing.assert_array_equal(whole, single)
