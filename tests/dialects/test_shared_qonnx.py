"""Real QONNX networks against their recorded outputs. They need the evaluation models (LOWBIT_SHARED)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conftest import FULL
from tests.dialects import qonnx_oracle
from tests.support import FLOAT_MATMULS, interface, lowbit_session

lowbit = pytest.importorskip("lowbit")

CLASSIFIERS = ["cnv_w1a1_cifar10", "tfc_1w1a", "tfc_1w2a"]
ESPCN = "espcn_subpixel_w4a4"
PIXELS = "scale=1/255,bits=8,unsigned"
_IMAGES = 1000 if FULL else 60


def preprocessed(model: str, pixels: np.ndarray) -> np.ndarray:
    """Images as a model's provenance says that it reads them: float32, channels first."""
    x = pixels.astype(np.float32) / np.float32(255)
    if model.startswith("cnv"):
        x = x * np.float32(2) - np.float32(1)
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


class Network:
    """A model as it was, as it was converted, and what was recorded of it."""

    def __init__(self, folder: Path, name: str, **options):
        path = folder / "qonnx" / f"{name}.onnx"
        self.name = name
        self.model = onnx.load(path)
        self.result = lowbit.convert(path, **options)
        self.recorded = np.load(folder / "ref" / f"{name}.npz")
        self.session = lowbit_session(self.result.model)

    def run(self, pixels: np.ndarray) -> np.ndarray:
        """The converted model's output for images of bytes."""
        input_name = self.session.get_inputs()[0].name
        x = preprocessed(self.name, pixels)
        return np.concatenate([self.session.run(None, {input_name: image[None]})[0] for image in x])


@pytest.fixture(scope="module")
def network(shared_models):
    """A network by name and conversion options, each converted once."""
    cache: dict[tuple, Network] = {}

    def get(name: str, **options) -> Network:
        key = (name, *sorted(options.items()))
        if key not in cache:
            cache[key] = Network(shared_models, name, **options)
        return cache[key]

    return get


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_equal_their_recorded_outputs(name: str, network) -> None:
    net = network(name)
    np.testing.assert_array_equal(net.run(net.recorded["x_uint8"]), net.recorded["y"])


def test_cnv_equals_the_hardware(network) -> None:
    """The outputs of an FPGA, as the authors of the network recorded them."""
    net = network("cnv_w1a1_cifar10")
    np.testing.assert_array_equal(net.run(net.recorded["hw_golden_x_uint8"]), net.recorded["hw_golden_y"])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_top_1_is_the_recorded_one(name: str, network, shared_models) -> None:
    """The same answer for every image of the evaluation set, hence the accuracy of the manifest."""
    net = network(name)
    data = np.load(
        shared_models / "data" / ("cifar10_test_1000.npz" if "cnv" in name else "mnist_t10k_1000.npz")
    )
    answers = net.run(data["x"][:_IMAGES]).argmax(1)
    np.testing.assert_array_equal(answers, net.recorded["pred"][:_IMAGES])
    if FULL:
        entries = json.loads((shared_models / "manifest.json").read_text())
        entry = next(e for e in entries if e["file"] == f"qonnx/{name}.onnx")
        assert round(float(np.mean(answers == data["y"])), 4) == entry["accuracy_reference"]


@pytest.mark.parametrize("options", [{}, {"input_quant": PIXELS}], ids=["float pixels", "input-quant"])
def test_espcn_differs_at_ties_only(options, network) -> None:
    """At most one step of the last quantizer, and only where the exact chain lies halfway between two."""
    net = network(ESPCN, **options)
    ours = net.run(net.recorded["x_uint8"])
    last = net.model.graph.node[-1]
    scale = next(t for t in net.model.graph.initializer if t.name == last.input[1])
    step = onnx.numpy_helper.to_array(scale)
    chain, exact = [], []
    for image in preprocessed(ESPCN, net.recorded["x_uint8"]):
        oracle = qonnx_oracle.QonnxOracle(net.model)
        exact.append(oracle.run({net.model.graph.input[0].name: image[None]})[last.output[0]])
        chain.append(oracle.values[last.input[0]].array / step)
    np.testing.assert_array_equal(ours, np.concatenate(exact))

    codes, recorded = np.rint(ours / step), np.rint(net.recorded["y"] / step)
    different = codes != recorded
    assert np.abs(codes - recorded).max() <= 1
    # ONNX Runtime rounded its float sums: 288 terms of at most 15 * 127 quanta, each within 2^-24 of itself.
    distance = np.abs(np.abs(np.concatenate(chain) - np.floor(np.concatenate(chain))) - 0.5)
    assert np.all(distance[different] <= 1e-4)
    assert different.mean() < 1e-4


@pytest.mark.parametrize("name", [*CLASSIFIERS, ESPCN])
def test_no_float_product_is_left(name: str, network) -> None:
    net = network(name)
    left = [node for node in net.result.model.graph.node if node.op_type in FLOAT_MATMULS]
    assert interface(net.result.model) == interface(net.model)
    if name == ESPCN:
        (first,) = left
        assert first.op_type == "Conv"
        (kept,) = (entry for entry in net.result.report.kept if entry.op_type == "Conv")
        assert "--input-quant" in kept.reason
        stated = network(name, input_quant=PIXELS).result.model
        assert not any(node.op_type in FLOAT_MATMULS for node in stated.graph.node)
    else:
        assert not left
