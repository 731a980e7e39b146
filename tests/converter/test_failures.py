"""What fails in a conversion stays as it was, and the rest converts: rules, kernels, ONNX Runtime itself."""

from __future__ import annotations

from typing import Any

import lowbit
import lowbit.ops
import numpy as np
import onnx
import pytest
from lowbit.conversion import attempts, check, convert
from lowbit.conversion.attempts import STRICT_CHECKS
from lowbit.errors import CheckError, OptimizerError
from lowbit.graph.reasons import StepError, has_to_stay
from lowbit.rewrites import conv as conv_rule
from lowbit.rewrites.apply import attach_report
from onnx import helper

from tests.converter.graphs import Converted, conv, converted, image, output
from tests.dialects.graphs.builder import Graph
from tests.hostile.random_sources import random_source
from tests.support import lowbit_session

FAILING = 7
"""Output channels of the convolution that fails."""


def three_convolutions(g: Graph) -> None:
    y, yq = conv(g, *image(g))
    y, yq = conv(g, g.qdq(y, yq), yq, out=FAILING, channels=5, kernel=1)
    y, yq = conv(g, g.qdq(y, yq), yq, out=3, channels=FAILING, kernel=1)
    output(g, g.qdq(y, yq), 2, 3, 4, 4)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(STRICT_CHECKS)
    return monkeypatch


def converts_the_rest(happened: str) -> Converted:
    """The convolution that fails stays, for a reason and with a warning; the others convert; all is equal."""
    result = converted(three_convolutions)
    convolutions = [node.name for node in result.built.model.graph.node if node.op_type == "Conv"]
    assert result.ops["LowBitConv"] == 2, result.ops
    (entry,) = (node for node in result.result.report.kept if node.op_type == "Conv")
    assert entry.name == convolutions[1]
    assert happened in entry.reason
    (warning,) = (w for w in result.result.report.warnings if "stays as it was" in w)
    assert convolutions[1] in warning
    assert happened in warning
    assert warning.endswith("please report this")
    result.assert_equal()
    return result


def break_emit(monkeypatch: pytest.MonkeyPatch, fault) -> None:
    emit = conv_rule.ConvRegion.emit

    def broken(region: Any, lowering: Any) -> Any:
        value = emit(region, lowering)
        if region.product.weights.rows == FAILING:
            fault(value.producer())
        return value

    monkeypatch.setattr(conv_rule.ConvRegion, "emit", broken)


def test_a_rule_that_raises(lenient) -> None:
    read = conv_rule.read_window

    def broken(node: Any, kernel: Any, spatial: Any) -> Any:
        if node.outputs[0].shape[1] == FAILING:
            raise IndexError("pop from empty list")
        return read(node, kernel, spatial)

    lenient.setattr(conv_rule, "read_window", broken)
    converts_the_rest("IndexError: pop from empty list")


def test_a_region_that_cannot_be_written(lenient) -> None:
    def fault(_: Any) -> None:
        raise KeyError("x")

    break_emit(lenient, fault)
    converts_the_rest("KeyError: 'x'")


def test_a_node_that_differs_from_its_definition(lenient) -> None:
    evaluate = lowbit.ops.evaluate

    def other(op_type: str, attributes: Any, inputs: Any) -> Any:
        y = evaluate(op_type, attributes, inputs)
        return y ^ 1 if attributes.get("out_channels") == FAILING else y

    lenient.setattr(lowbit.ops, "evaluate", other)
    converts_the_rest("elements differ from the definition of the op on random codes")


def test_a_node_that_onnx_runtime_refuses(lenient) -> None:
    def fault(node: Any) -> None:
        node.op_type = "LowBitNothing"

    lenient.setattr(check, "check_nodes", lambda *_: None)
    break_emit(lenient, fault)
    converts_the_rest("ONNX Runtime refuses the converted model")


def test_a_failure_that_names_no_node_is_searched_for(lenient) -> None:
    name = convert.name_uniquely

    def broken(graph: Any, taken: Any) -> None:
        sizes = [node.attributes["out_channels"].value for node in graph if node.op_type == "LowBitConv"]
        if FAILING in sizes:
            raise RuntimeError("something is wrong")
        name(graph, taken)

    lenient.setattr(convert, "name_uniquely", broken)
    result = converted(three_convolutions)
    assert result.ops["LowBitConv"] == 2
    assert any("RuntimeError: something is wrong" in w for w in result.result.report.warnings)
    result.assert_equal()


def test_a_failure_far_from_the_node_that_is_named(lenient) -> None:
    """The circle of nodes that stay grows until the cause is in it."""
    holds = check.check_converted

    def broken(proto: onnx.ModelProto, *others: Any) -> None:
        nodes = list(proto.graph.node)
        if any(a.name == "out_channels" and a.i == FAILING for node in nodes for a in node.attribute):
            raise CheckError("it is somewhere here", [[n for n in nodes if "Conv" in n.op_type][-1].name])
        holds(proto, *others)

    lenient.setattr(check, "check_converted", broken)
    result = converted(three_convolutions)
    assert result.ops["LowBitConv"] == 1
    assert any("nodes around it" in w for w in result.result.report.warnings)
    result.assert_equal()


def test_where_nothing_holds_the_model_comes_back_as_it_was(lenient) -> None:
    def broken(graph: Any, taken: Any) -> None:
        raise RuntimeError("nothing works")

    lenient.setattr(convert, "name_uniquely", broken)
    result = converted(three_convolutions)
    assert [n.op_type for n in result.result.model.graph.node] == [
        n.op_type for n in result.built.model.graph.node
    ]
    assert result.result.model is not result.built.model
    assert {node.action for node in result.result.report.nodes} == {"kept"}
    assert "nothing was converted: RuntimeError: nothing works" in result.result.report.warnings[-1]


def test_attempts_are_bounded(lenient) -> None:
    """A defect at every node of fifty: in the end everything stays."""
    count = 0

    def broken(source: Any, model: Any, staying: Any, *others: Any) -> Any:
        nonlocal count
        count += 1
        attach_report(model.graph, staying)
        first = next(node for node in model.graph if not has_to_stay(node))
        raise StepError([first], RuntimeError("once more"))

    def chain(g: Graph) -> None:
        y, _ = image(g)
        for _ in range(50):
            y = g.node("Neg", [y])
        output(g, y, 2, 4, 6, 6)

    lenient.setattr(convert, "_convert_once", broken)
    result = converted(chain)
    assert count == attempts.MOST_ATTEMPTS
    assert "nothing was converted" in result.result.report.warnings[-1]


def test_strict_and_tests_hear_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(_: Any) -> None:
        raise KeyError("x")

    break_emit(monkeypatch, fault)
    with pytest.raises(KeyError):
        converted(three_convolutions)
    monkeypatch.delenv(STRICT_CHECKS)
    with pytest.raises(lowbit.UnsupportedError, match="strict: lowbit fails: KeyError: 'x'"):
        converted(three_convolutions, strict=True)


def test_a_model_that_onnx_runtime_refuses_anyway(lenient) -> None:
    """It has no kernel for a 4-bit Identity: no fault of the conversion, and said so."""

    def build(g: Graph) -> None:
        g.opset, g.ir_version = 21, 10
        x = g.q(g.input((2, 4, 6, 6)), g.act(0.3, "u4"))
        g.outputs.append(helper.make_tensor_value_info(g.node("Size", [x]), onnx.TensorProto.INT64, []))

    with pytest.raises(lowbit.ModelError, match=r"refuses the model, before and after conversion: .*Size"):
        converted(build)


def test_sizes_that_the_model_never_has_prove_nothing() -> None:
    """The check runs it with a batch of 1, which a Reshape to an even batch does not take."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input(("n", 4, 6, 6), step=float(quant.scale)), quant)
        y, yq = conv(g, x, quant)
        y = g.node("Reshape", [g.qdq(y, yq), g.ints([-1, 2, 5, 4, 4])])
        output(g, y, "m", 2, 5, 4, 4)

    assert converted(build).ops["LowBitConv"] == 1


def test_sizes_without_a_pixel_prove_nothing() -> None:
    """The images of a batch are its pixels: of one ONNX Runtime makes no element, and lowbit refuses it."""

    def build(g: Graph) -> None:
        quant = g.act(0.03)
        x = g.qdq(g.input(("n", 5, 2), step=float(quant.scale)), quant)
        y = g.qdq(g.node("Transpose", [x], perm=[2, 1, 0]), quant)
        output(g, g.qdq(g.node("AveragePool", [y], kernel_shape=[2]), quant), 2, 5, "m")

    assert converted(build).ops["LowBitAveragePool"] == 1


def test_what_onnxruntimes_optimizer_breaks_is_taken_back() -> None:
    """It fuses a GlobalAveragePool on grids per channel whose neighbours became ours, which then fails."""
    source = random_source(301573)
    result = lowbit.convert(source.model)
    assert any("ONNX Runtime's optimizer breaks" in warning for warning in result.report.warnings)
    lowbit_session(result.model).run(None, source.feeds[0])


def test_what_onnxruntimes_optimizer_hides_has_to_stay_hidden() -> None:
    """It drops the first of two Reshapes, of which one that does not fit may then run."""

    def reshapes(*between: onnx.NodeProto) -> onnx.ModelProto:
        shapes = {"other": [2, 7], "fitting": [3, 4]}
        nodes = [
            helper.make_node("Reshape", ["x", "other"], ["a"], name="hidden"),
            *between,
            helper.make_node("Reshape", [between[0].output[0] if between else "a", "fitting"], ["y"]),
        ]
        graph = helper.make_graph(
            nodes, "reshapes", [helper.make_tensor_value_info("x", 1, [12])],
            [helper.make_tensor_value_info("y", 1, [3, 4])],
            [onnx.numpy_helper.from_array(np.array(v, np.int64), name) for name, v in shapes.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)

    source, kept_apart = reshapes(), reshapes(helper.make_node("Relu", ["a"], ["b"], name="relu"))
    check.check_converted(source, source=source)
    with pytest.raises(OptimizerError, match="hidden"):
        check.check_converted(kept_apart, source=source)


def test_a_batch_that_the_model_binds() -> None:
    """One slope for each of three images; with a batch of 1 it depends on who reuses whose buffer."""

    def model(*, quantized: bool) -> onnx.ModelProto:
        g = Graph("slopes", 1)
        x = g.qdq(g.node("Unsqueeze", [g.input(("n", 8)), g.ints([0])]), g.act(0.03))
        y = g.node("PRelu", [x, g.floats([[-0.5], [0.5], [2.0]])])
        output(g, g.qdq(y, g.act(0.05)) if quantized else y, 1, "n", 8)
        return g.proto()

    check.check_converted(model(quantized=True), source=model(quantized=False))
