"""What `lowbit quantize` and `lowbit search` leave as it is, or refuse: each with its own reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.errors import LowBitError
from lowbit.quantizer.config import Config, read_config
from lowbit.quantizer.data import Spool
from onnx import TensorProto, helper

from tests.quantize.networks import Builder, images, tokens
from tests.support import lowbit_session, stock_run


def branches() -> onnx.ModelProto:
    """Branches behind a convolution, each with one node that does not quantize."""
    b = Builder(1)
    x = b.node("Relu", [b.conv("x", 8)])
    flat = b.node("Flatten", [b.node("GlobalAveragePool", [x])])
    scaled = b.node("Gemm", [flat, b.random(8, 5), b.random(5)], 5, alpha=0.5)
    fed = b.node("Gemm", [flat, b.random(8, 5), scaled], 5)
    grouped = b.node("ConvTranspose", [x, b.random(8, 3, 2, 2)], 6, group=2, kernel_shape=[2, 2])
    rows = b.node("MatMul", [b.node("Reshape", [x, b.constant(np.array([0, 8, -1]))]), b.random(1, 256, 4)])
    joined = b.node("Concat", [x, b.random(1, 8, 16, 16)], axis=0)
    largest = b.node("MaxPool", [x], kernel_shape=[2, 2])
    b.nodes[-1].output.append("places")
    places = b.node("Cast", ["places"], 8, to=TensorProto.FLOAT)
    last = b.node("ReduceMean", [b.conv(b.node("LRN", [b.conv(x, 8)], size=3), 5)], axes=[2, 3])
    others = (grouped, rows, joined, largest, places)
    return b.model(fed, *(b.node("ReduceMean", [each], axes=[-1]) for each in others), last)


def test_each_node_that_stays_says_why() -> None:
    report = lowbit.quantize(branches(), images(), bits="w4a8", threads=1).report
    reasons = {re.sub(r"\d+$", "", node): reason for node, reason in report.kept_float.items()}
    assert reasons["ConvTranspose"] == "a grouped ConvTranspose has no axis for scales per output channel"
    assert reasons["MatMul"] == "its weights have rank 3, expected a matrix"
    assert reasons["Concat"] == "one of its operands is constant"
    assert reasons["MaxPool"] == "it also returns the indices of the maxima"
    assert reasons["LRN"] == "lowbit has no integer form of LRN"
    assert {report.kept_float[name] for name in report.kept_float if name.startswith("Gemm")} == {
        "its alpha or beta is not 1",
        "its bias is not one constant per output channel",
    }


def test_a_bias_behind_a_product_becomes_part_of_it() -> None:
    result = lowbit.quantize(tokens(), images(), bits="w8a8", threads=1, convert_to=True)
    assert not any(name.startswith("Add") for name in result.report.kept_float), result.report.kept_float
    feed = {"x": images(4, seed=9)}
    exact = stock_run(tokens(), feed)[0]
    given = stock_run(result.model, feed)[0]
    assert np.square(exact - given).mean() < 1e-3 * np.square(exact).mean()
    np.testing.assert_allclose(lowbit_session(result.converted).run(None, feed)[0], given, atol=1e-2)


def with_branches() -> onnx.ModelProto:
    """Both branches of an If read a tensor that is quantized; names that would be made are there already."""
    b = Builder(3)
    x = b.node("Relu", [b.conv("x", 8)])
    y = b.conv(x, 6)
    b.nodes[0].name, b.nodes[-1].name = "", f"Conv_{b.nodes[0].output[0]}"
    b.tensors[0].name = b.nodes[0].input[1] = f"{b.nodes[-1].name}.weight.codes"
    condition = b.node("Greater", [b.node("ReduceSum", ["x"], keepdims=0), b.constant(np.float32(0))])
    arms = {}
    for name, op in (("then", "Neg"), ("else", "Abs")):
        made = helper.make_empty_tensor_value_info(f"{name}.y")
        arms[f"{name}_branch"] = helper.make_graph([helper.make_node(op, [x], [made.name])], name, [], [made])
    chosen = b.node("If", [condition], 8, **arms)
    joined = b.node("Concat", [b.node("GlobalAveragePool", [value]) for value in (y, chosen)], 14, axis=1)
    model = b.model(b.head(b.conv(joined, 8, 1, pads=[0] * 4)))
    model.metadata_props.add(key="author", value="somebody")
    return model


def test_branches_read_what_is_quantized() -> None:
    source = with_branches()
    made = lowbit.quantize(source, images(), bits="w8a8", threads=1).model
    assert {entry.key: entry.value for entry in made.metadata_props}["author"] == "somebody"
    for seed in range(2):
        feed = {"x": images(1, seed=seed) * (1 if seed else -1)}
        exact, given = stock_run(source, feed)[0], stock_run(made, feed)[0]
        assert np.square(exact - given).mean() < 1e-2 * np.square(exact).mean()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first_last": 9}, "first_last: expected 1 to 8 bits, got 9"),
        ({"percentile": 50}, "percentile: expected more than 50 and at most 100, got 50"),
        ({"ridge": -1.0}, "ridge: expected 0 to 1000"),
        ({"sweeps": -1}, "sweeps: expected 0 or more"),
        ({"sweeps": "many"}, "config: sweeps must be a number, got 'many'"),
        ({"bits": 4}, "config: bits must be a text, got 4"),
        ({"nodes_to_exclude": "conv"}, "config: nodes_to_exclude must be a list, got 'conv'"),
        ({"overrides": {"conv": 4}}, "config: overrides must map patterns to settings"),
    ],
)
def test_settings_that_mean_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LowBitError, match=message):
        Config.of(given)


@pytest.mark.parametrize(("text", "message"), [("- a\n- b", "expected entries"), ("a: [", "config.yaml: ")])
def test_files_of_settings_that_mean_nothing(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(LowBitError, match=message):
        read_config(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"minimize": "energy"}, "minimize: expected latency or size, got 'energy'"),
        ({"bits": (0, 4)}, "bits: expected one or more of 1 to 8"),
        ({"activation_bits": ()}, "activation_bits: expected one or more of 1 to 8"),
    ],
)
def test_a_search_for_nothing(more: dict[str, Any], message: str) -> None:
    with pytest.raises(LowBitError, match=message):
        lowbit.search(tokens(), images(), target="size=1KB", threads=1, **more)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"x": np.zeros((0, 3, 16, 16), np.float32)}], "is empty"),
        ([{"y": images(2)}], "y"),
        ([{"x": images(2), "y": images(2)}], "y"),
    ],
)
def test_data_that_do_not_fit(data: Any, message: str) -> None:
    with pytest.raises(LowBitError, match=message):
        lowbit.quantize(tokens(), data, bits="w8a8", threads=1)


def of_two_inputs() -> onnx.ModelProto:
    """An image-like input and one of integers, whose first dims have nothing to do with one another."""
    inputs = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 2]),
        helper.make_tensor_value_info("b", TensorProto.INT64, ["m", 3]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])]
    return helper.make_model(
        helper.make_graph([helper.make_node("Neg", ["a"], ["y"])], "two", inputs, outputs)
    )


def test_feeds_of_several_inputs(tmp_path: Path) -> None:
    a, b = np.ones((4, 2)), np.ones((2, 3), np.int32)
    spool = Spool(of_two_inputs(), [(a, b)], tmp_path)
    feed = spool.feed(0)
    assert (feed["a"].shape, feed["a"].dtype) == ((4, 2), np.float32)
    assert (feed["b"].shape, feed["b"].dtype) == ((2, 3), np.int64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((4, 2)), r"the model has 2 inputs \(a, b\); give a dict"),
        ([np.ones((4, 2))], r"the model has 2 inputs \(a, b\); give a dict"),
        ({"a": np.ones((4, 2))}, "have arrays for a, the model reads a, b"),
        ([{"a": np.ones((4, 2)), "b": np.ones((2, 3))}], "'b' is float64, the model reads int64"),
    ],
)
def test_feeds_that_do_not_fit_several_inputs(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(LowBitError, match=message):
        Spool(of_two_inputs(), data, tmp_path)


def odd_layers() -> onnx.ModelProto:
    """Branches behind a convolution whose layers are written in ways that have no integer form."""
    b = Builder(7)
    x = b.node("Relu", [b.conv("x", 8)])
    flat = b.node("Flatten", [b.node("GlobalAveragePool", [x])])
    turned = b.node("Gemm", [b.node("Transpose", [flat], perm=[1, 0]), b.random(8, 5)], 5, transA=1)
    ends = [b.constant(np.array([at])) for at in (1, 3)]
    moved = b.node("Reshape", [b.random(16, 8), b.node("Slice", [b.node("Shape", [x]), *ends])], 16)
    odd = b.node("Conv", [x, b.constant(np.full((4, 8, 1, 1), np.inf, np.float32))], 4, kernel_shape=[1, 1])
    bounded = b.node("Relu", [b.node("Clip", [odd, *(b.constant(np.float32(v)) for v in (0, 6))])])
    means = [b.node("ReduceMean", [each], axes=[2, 3]) for each in (bounded, b.conv(x, 5))]
    return b.model(turned, moved, *means)


def test_layers_that_stay_say_why() -> None:
    report = lowbit.quantize(odd_layers(), images(), bits="w4a8", threads=1).report
    reasons = {re.sub(r"\d+$", "", node): reason for node, reason in report.kept_float.items()}
    assert reasons["Gemm"] == "transA=1: its activation is transposed"
    assert reasons["Conv"] == "its weights hold NaN or infinity"
    assert reasons["Reshape"] == "it moves constants"
