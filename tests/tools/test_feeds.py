"""Random inputs exercise every code; samples from files are cut into batches."""

from __future__ import annotations

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.errors import LowBitError
from lowbit.proto.feeds import batches, load_samples, parse_shapes, random_feeds
from onnx import TensorProto, helper, numpy_helper

from tests.tools.conftest import qdq_conv


def quantized_input(zero: onnx.TensorProto, scale: float, clip: tuple[int, int] | None = None):
    """x [1, 1000] -> QuantizeLinear -> (Clip) -> DequantizeLinear."""
    initializers = [zero, numpy_helper.from_array(np.float32(scale), "s")]
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    if clip:
        dtype = numpy_helper.to_array(zero).dtype
        initializers += [
            numpy_helper.from_array(np.asarray(b, dtype), n) for b, n in zip(clip, "lh", strict=True)
        ]
        nodes.append(helper.make_node("Clip", ["q", "l", "h"], ["c"]))
    nodes.append(helper.make_node("DequantizeLinear", ["c" if clip else "q", "s", "z"], ["y"]))
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1000])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1000])], initializers,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("kind", "zero", "clip", "low", "high"),
    [
        (TensorProto.UINT8, 100, None, -50.0, 77.5),
        (TensorProto.INT8, 0, None, -64.0, 63.5),
        (TensorProto.UINT4, 5, None, -2.5, 5.0),
        (TensorProto.INT4, 0, None, -4.0, 3.5),
        (TensorProto.UINT8, 0, (0, 3), 0.0, 1.5),
    ],
)
def test_random_inputs_cover_the_codes(kind, zero, clip, low, high):
    model = quantized_input(helper.make_tensor("z", kind, [], [zero]), 0.5, clip)
    x = random_feeds(model, seed=1)["x"]
    assert x.dtype == np.float32
    assert low <= x.min() < low + (high - low) * 0.02
    assert high >= x.max() > high - (high - low) * 0.02


def test_a_converted_model_gets_the_same_random_inputs():
    source = qdq_conv()
    expected = random_feeds(source, seed=5)
    got = random_feeds(lowbit.convert(source).model, seed=5)
    np.testing.assert_array_equal(got["x"], expected["x"])


def test_symbolic_sizes_are_asked_for():
    model = qdq_conv(dynamic=True)
    with pytest.raises(
        LowBitError, match=r"input 'x' has the shape \[N, 3, H, W\]; give numbers with --shape x="
    ):
        random_feeds(model)
    assert random_feeds(model, shapes={"x": [2, 3, 5, 6]})["x"].shape == (2, 3, 5, 6)
    assert parse_shapes(("x=1,3,5,6", "y:0=7")) == {"x": [1, 3, 5, 6], "y:0": [7]}


def test_samples_are_cut_into_batches(tmp_path):
    model = qdq_conv()
    np.save(tmp_path / "x.npy", np.zeros((5, 3, 8, 8), np.float32))
    samples = load_samples(tmp_path / "x.npy", model)
    assert [feed["x"].shape for feed in batches(samples, model, 3)] == [(1, 3, 8, 8)] * 3
    assert len(list(batches(samples, model))) == 5
    with pytest.raises(LowBitError, match="rank 4"):
        list(batches({"x": np.zeros((3, 8, 8))}, model))
    with pytest.raises(LowBitError, match="less than one batch"):
        list(batches({"x": np.zeros((0, 3, 8, 8))}, model))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -0.5, 0.0, 3e38])
def test_a_scale_that_means_nothing_says_nothing_about_the_input(scale, tmp_path):
    """Such a quantizer stays; the model runs as ONNX Runtime runs it, on ordinary numbers."""
    model = qdq_conv()
    (tensor,) = (t for t in model.graph.initializer if t.name == "xs")
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(scale, np.float32), "xs"))
    assert np.all(np.isfinite(random_feeds(model)["x"]))
    onnx.save(model, tmp_path / "source.onnx")
    lowbit.convert(tmp_path / "source.onnx", tmp_path / "out.onnx")
    assert lowbit.verify(tmp_path / "out.onnx", tmp_path / "source.onnx", samples=1).ok
