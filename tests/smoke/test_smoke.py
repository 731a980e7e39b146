"""A few whole conversions, run in whatever onnxruntime is installed.

`make test FULL=1` repeats this folder with the oldest and the newest supported onnxruntime, and in a fresh
environment that has only the wheel.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.dialects.graphs import CASES
from tests.ep.graphs import chain
from tests.support import FLOAT_MATMULS, all_nodes, lowbit_session, require_native, session_options, stock_run

require_native()
import lowbit  # noqa: E402
from lowbit.sessions.binding import bind, queued_seconds  # noqa: E402

STOCK_EQUAL = sorted(name for name, case in CASES.items() if case.stock_equal)


def version_tuple(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def test_onnxruntime_is_supported() -> None:
    assert version_tuple(onnxruntime.__version__) >= (1, require_native().required_api)


@pytest.mark.parametrize("name", STOCK_EQUAL)
def test_converted_equals_stock(name: str) -> None:
    built = CASES[name].build(0)
    converted = lowbit.convert(built.model).model
    assert not [node.name for node in all_nodes(converted.graph) if node.op_type in FLOAT_MATMULS]
    feeds = built.feed(1, **built.sizes[0])
    outputs = lowbit_session(converted).run(None, feeds)
    try:
        expected = stock_run(built.model, feeds)
    except Exception as error:  # ONNX Runtime's exception classes share no base below Exception
        pytest.skip(f"stock onnxruntime {onnxruntime.__version__} cannot run it: {str(error)[:120]}")
    for ours, stock in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(ours, stock)


def test_library_registered_by_hand(tmp_path) -> None:
    built = CASES[STOCK_EQUAL[0]].build(0)
    path = tmp_path / "model.lowbit.onnx"
    lowbit.convert(built.model, path)
    options = session_options()
    options.register_custom_ops_library(lowbit.get_library_path())
    by_hand = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = built.feed(2, **built.sizes[0])
    for ours, other in zip(by_hand.run(None, feeds), lowbit.session(path).run(None, feeds), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_the_execution_provider_runs_and_compiles(tmp_path) -> None:
    """Registration, regions, IO binding and compiled models, through the device that every machine has."""
    assert {device.name: device.reason for device in lowbit.devices()}["cpu-ep"] is None
    built = CASES[STOCK_EQUAL[0]].build(0)
    feeds = built.feed(2, **built.sizes[0])
    expected = lowbit_session(lowbit.convert(built.model).model).run(None, feeds)
    compiled = tmp_path / "compiled.onnx"
    lowbit.compile(built.model, compiled, device="cpu-ep")
    for model in (built.model, compiled):
        session = lowbit.session(model, device="cpu-ep")
        for ours, other in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_array_equal(ours, other)
        binding = bind(session, feeds, "cpu-ep")
        assert queued_seconds(session, binding, 2) > 0
        for ours, other in zip(binding.get_outputs(), expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), other)


def test_a_compiled_model_opens_whose_subgraph_has_constants(tmp_path) -> None:
    """Releases of ONNX Runtime before 1.31 write them twice, into a file that they refuse then."""
    model, kind = chain("conv"), onnx.TensorProto
    y = model.graph.output[0].name
    ends = [onnx.helper.make_tensor_value_info(n, t, s) for n, t, s in (
        ("i", kind.INT64, []), ("go", kind.BOOL, []), ("sum", kind.FLOAT, None),
        ("on", kind.BOOL, []), ("more", kind.FLOAT, None))]  # fmt: skip
    nodes = [onnx.helper.make_node("Mul", ["sum", "half"], ["more"]),
             onnx.helper.make_node("Identity", ["go"], ["on"])]  # fmt: skip
    half = onnx.numpy_helper.from_array(np.full(1, 0.5, np.float32), "half")
    body = onnx.helper.make_graph(nodes, "body", ends[:3], ends[3:], [half])
    model.graph.node.append(onnx.helper.make_node("Loop", ["times", "", y], ["z"], "loop", body=body))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(3), "times"))
    model.graph.output[0].name = "z"
    compiled = tmp_path / "compiled.onnx"
    lowbit.compile(model, compiled, device="cpu-ep", shapes={"x": [1, 3, 5, 6]})
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 3, 5, 6)).astype(np.float32)}
    for ours, other in zip(
        lowbit.session(compiled, device="cpu-ep").run(None, feeds),
        lowbit_session(model).run(None, feeds), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(ours, other)
