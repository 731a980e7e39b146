"""benchmarks/gpu_forms.py: in which order it measures, and what it gives torch to compute."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.models import DETECTORS, build, save
from lowbit.models.calibration import images
from lowbit.proto.provenance import widens_float16
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_forms(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_forms")


def options(**given):
    return argparse.Namespace(**{"networks": None, "forms": None, "batches": None, "prepare": False} | given)


def test_what_must_be_measured_comes_first(gpu_forms):
    planned = list(gpu_forms.places(options()))
    must = planned[: len(gpu_forms.MUST)]
    assert [(name, forms, batch) for name, forms, batch in must if name == "resnet50"] == [
        ("resnet50", ["A", "B", "C", "D", "E"], batch) for batch in (1, 16, 128)
    ]
    others = {"mobilenetv3large", "efficientnetb0", *DETECTORS}
    assert {(name, batch) for name, _, batch in must} >= {(name, n) for name in others for n in (1, 16)}
    rest = {(name, batch) for name, _, batch in planned[len(must) :]}
    assert rest == {(name, batch) for name in gpu_forms.NETWORKS for batch in (1, 16, 128)}
    assert list(gpu_forms.places(options(prepare=True))) == must


def test_places_that_are_named_are_all_there_is(gpu_forms):
    named = options(networks="yolo11n", forms="A,C", batches="1,2")
    assert list(gpu_forms.places(named)) == [("yolo11n", ["A", "C"], 1), ("yolo11n", ["A", "C"], 2)]


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "mobilenetv3large", "efficientnetb0", "yolo11n"])
def test_torch_computes_the_network(gpu_forms, name):
    torch = pytest.importorskip("torch")
    model, x = build(name, image=64, batch="N"), images(2, 64, seed=1)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"input": x})[0]
    with torch.no_grad():
        got = gpu_forms.InTorch(model, torch, "cpu", torch.float32)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("layers_alone", [False, True])
def test_forms_e_and_f_leave_inputs_of_an_add_in_float(gpu_forms, layers_alone):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("a", "b", "y")]
    scale = numpy_helper.from_array(np.float32(0.1), "scale")
    nodes = [helper.make_node("Relu", [name], [f"{name}_made"]) for name in "ab"]
    for name in "ab":
        nodes.append(helper.make_node("QuantizeLinear", [f"{name}_made", "scale"], [f"{name}_codes"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_codes", "scale"], [f"{name}_read"]))
    nodes.append(helper.make_node("Add", ["a_read", "b_read"], ["y"]))
    model = helper.make_model(helper.make_graph(nodes, "add", values[:2], values[2:], [scale]))
    made = gpu_forms.with_float_branches(model, layers_alone=layers_alone)
    ops = [node.op_type for node in made.graph.node]
    assert list(made.graph.node[-1].input) == ["a_made", "b_made" if layers_alone else "b_read"]
    pair = [] if layers_alone else ["QuantizeLinear", "DequantizeLinear"]
    assert ops == ["Relu", "Relu", *pair, "Add"]


@pytest.mark.parametrize("form", ["F", "H"])
def test_shortcuts_of_forms_f_and_h_are_not_rounded_to_codes(gpu_forms, monkeypatch, tmp_path, form):
    """H says float16 where F says float32, which the conversion reads alike."""
    monkeypatch.setattr(gpu_forms, "WORK", tmp_path)
    monkeypatch.setattr(gpu_forms, "size_of", lambda network: 32)
    save(build("resnet18", image=32, batch="N"), tmp_path / "resnet18_float_batch.onnx")
    model = onnx.load(gpu_forms.converted("resnet18", form))
    ops = [node.op_type for node in model.graph.node]
    assert ops.count("Add") == 8
    assert "LowBitAdd" not in ops
    source = onnx.load(tmp_path / f"resnet18_form_{form}.onnx")
    assert widens_float16(model) == (form == "H")
    assert source.graph.output == model.graph.output
