"""What the benchmarks stand on: the layers are the networks', and both sides compute the same codes."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import lowbit
import onnx
import pytest
from lowbit.models import build
from onnx import helper

from tests.support import require_native, stock_may_saturate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NETWORKS = json.loads((BENCHMARKS / "layers.json").read_text(encoding="utf-8"))["networks"]


@pytest.fixture
def layers(monkeypatch):
    require_native()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("layers")


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenetv2", "densenet121"])
def test_layers_are_those_of_the_network(name):
    model = onnx.shape_inference.infer_shapes(build(name))
    dims = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.graph.value_info, *model.graph.input]
    }
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    counts: Counter[tuple[int, ...]] = Counter()
    for node in model.graph.node:
        if node.op_type == "Conv":
            window = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            shape = (*dims[node.input[0]][1:], weights[node.input[1]][0])
            square = (window["kernel_shape"][0], window["strides"][0], window["pads"][0])
            counts[(*shape, *square, window["group"])] += 1
    assert counts == {tuple(row[:-1]): row[-1] for row in NETWORKS[name]}


def test_sampled_layers_are_among_those_of_the_network():
    assert {tuple(row) for row in NETWORKS["densenet121_sampled"]} <= {
        tuple(row) for row in NETWORKS["densenet121"]
    }


@pytest.mark.parametrize("row", [NETWORKS["resnet50"][-1], NETWORKS["mobilenetv2"][-4]])
def test_both_sides_of_a_layer_give_the_same_codes(layers, row):
    problem = layers.Problem.seeded(layers.Layer(*row), layers.Pair.parse("w8a8"))
    stock = layers.stock_session(problem.stock_model(), 1).run(None, {"x": problem.x})[0]
    ours = lowbit.session(problem.lowbit_model(), threads=1).run(None, {"x": problem.x})[0]
    assert stock.std() > 10
    if stock_may_saturate():
        pytest.skip("stock's products of whole bytes saturate without VNNI")
    assert (ours == stock).all()
