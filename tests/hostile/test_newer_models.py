"""Models that say more than this release knows: what may be ignored is, on every device; else refused."""

from __future__ import annotations

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.proto.feeds import random_feeds
from onnx import helper, numpy_helper

from tests.dialects.graphs import CASES
from tests.support import interface, lowbit_library, require_native, session_options


@pytest.fixture(scope="module")
def source() -> onnx.ModelProto:
    require_native()
    return CASES["ort_quantizer.u8_activations_s8_weights"].build(1).model


@pytest.fixture
def converted(source) -> onnx.ModelProto:
    return lowbit.convert(source).model


def with_attribute(model: onnx.ModelProto, name: str, value: object) -> onnx.ModelProto:
    for node in model.graph.node:
        if node.domain == "ai.lowbit":
            node.attribute.append(helper.make_attribute(name, value))
    return model


def set_version(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    for entry in model.opset_import:
        if entry.domain == "ai.lowbit":
            entry.version = version
    return model


@pytest.mark.parametrize("value", ["soon", [1.5], numpy_helper.from_array(np.zeros(3, np.float32))])
def test_attributes_that_change_nothing_are_ignored(source, converted, tmp_path, monkeypatch, value) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    feed = random_feeds(source)
    (expected,) = lowbit.session(converted).run(None, feed)
    model = with_attribute(converted, "hint", value)
    for device in ("cpu", "cpu-ops", "cpu-ep"):
        (got,) = lowbit.session(model, device=device).run(None, feed)
        np.testing.assert_array_equal(got, expected)
        assert lowbit.verify(model, source, device=device, samples=1).ok
    nodes = lowbit.inspect(model, device="cpu-ep").nodes
    assert {node.runs_on for node in nodes} == {"cpu-ep"}, [node.left for node in nodes]
    lowbit.convert(model)
    lowbit.export(model, to="qdq")
    lowbit.compile(model, tmp_path / "compiled.onnx", device="cpu-ep")


@pytest.mark.parametrize("device", ["cpu-ops", "cpu-ep"])
def test_a_node_that_needs_a_newer_lowbit_is_refused(source, converted, device: str) -> None:
    model = with_attribute(converted, "needs_version", 2)
    for use in (
        lambda: lowbit.session(model, device=device),
        lambda: lowbit.verify(model, source, device=device),
        lambda: lowbit.inspect(model, device=device),
        lambda: lowbit.convert(model),
    ):
        with pytest.raises(lowbit.LowBitError, match=r"needs version 2 .*update lowbit"):
            use()


@pytest.mark.parametrize("version", [2, 999, 1001])
def test_newer_versions_of_the_domain_are_refused(source, converted, version: int) -> None:
    for use in (lowbit.convert, lowbit.inspect, lambda model: lowbit.verify(model, source)):
        with pytest.raises(lowbit.ModelError, match=rf"version {version} of ai.lowbit.*update lowbit"):
            use(set_version(converted, version))


def saved_by_onnxruntime(model: onnx.ModelProto, path) -> onnx.ModelProto:
    options = session_options(optimize=False)
    options.optimized_model_filepath = str(path)
    options.register_custom_ops_library(lowbit_library())
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def test_what_onnxruntime_saves_beside_lowbit_converts(source, tmp_path) -> None:
    """It writes the domains of the process into every model, lowbit's in the version that it gives all."""
    model = saved_by_onnxruntime(source, tmp_path / "saved.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}["ai.lowbit"] == 1000
    result = lowbit.convert(tmp_path / "saved.onnx", tmp_path / "out.onnx", strict=True)
    assert interface(result.model) == interface(source)
    assert {e.domain: e.version for e in result.model.opset_import}["ai.lowbit"] == 1
    assert lowbit.verify(tmp_path / "out.onnx", tmp_path / "saved.onnx", samples=1).ok


def test_lowbit_nodes_in_the_version_of_onnxruntime(source, converted, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    feed = random_feeds(source)
    (expected,) = lowbit.session(converted).run(None, feed)
    path = tmp_path / "model.onnx"
    onnx.save(set_version(converted, 1000), path)
    for device in ("cpu", "cpu-ops", "cpu-ep"):
        for form in (path, onnx.load(path)):
            np.testing.assert_array_equal(lowbit.session(form, device=device).run(None, feed)[0], expected)
            assert lowbit.verify(form, source, device=device, samples=1).ok
            lowbit.inspect(form, device=device)
    lowbit.tune(path)
    lowbit.export(path, to="qonnx")
    lowbit.export_mobile(path, tmp_path / "mobile")
    lowbit.compile(path, tmp_path / "compiled.onnx", device="cpu-ep")
