"""What happens around a conversion: verification, atomic output, report, options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import lowbit
import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from lowbit.conversion.check import check_converted
from lowbit.proto.atomic import write_atomically
from lowbit.proto.model_file import load_nodes
from onnx import helper, numpy_helper

from tests.converter.graphs import conv, converted, image, output
from tests.dialects.graphs import CASES
from tests.dialects.graphs.builder import Graph
from tests.support import interface, lowbit_session


def small(g: Graph) -> None:
    y, yq = conv(g, *image(g))
    output(g, g.qdq(y, yq), 2, 5, 4, 4)


def test_verification_notices_a_node_that_cannot_work() -> None:
    model = converted(small).result.model
    (node,) = (n for n in model.graph.node if n.op_type == "LowBitConv")
    (weights,) = (t for t in model.graph.initializer if t.name == node.input[1])
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights)[:-1], weights.name))
    with pytest.raises(lowbit.ModelError, match="LowBitConv 'node_Conv"):
        check_converted(model)


@pytest.mark.parametrize(
    "name", ["ort_quantizer.u8_activations_s8_weights", "qoperator.conv_codes_in_and_out"]
)
def test_nodes_are_read_without_what_lies_beside_them(tmp_path, name: str) -> None:
    model = CASES[name].build(1).model
    onnx.save(model, tmp_path / "model.onnx")
    assert load_nodes(tmp_path / "model.onnx").graph.node == model.graph.node


def test_a_file_that_ends_early_is_refused(tmp_path) -> None:
    data = converted(small).result.model.SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(0, len(data) - 1, 37):
        path.write_bytes(data[:length])
        with contextlib.suppress(ValueError, DecodeError):
            load_nodes(path)
        with pytest.raises(lowbit.ModelError):
            lowbit.session(path, device="cpu-ep")


def test_nothing_is_left_when_writing_fails(tmp_path) -> None:
    def full_disk(path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def interrupted(path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(lowbit.OutputError, match="No space left"):
        write_atomically(tmp_path / "o.onnx", full_disk, overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "o.onnx", interrupted, overwrite=False)
    assert not list(tmp_path.iterdir())


def test_output_is_never_the_input_nor_replaced_unasked(tmp_path) -> None:
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(converted(small).built.model, source)
    with pytest.raises(lowbit.OutputError, match="never overwritten"):
        lowbit.convert(source, source, overwrite=True)
    lowbit.convert(source, target)
    with pytest.raises(lowbit.OutputError, match="exists already"):
        lowbit.convert(source, target)
    lowbit.convert(source, target, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


def test_report_says_what_became_of_every_node() -> None:
    report = converted(small).result.report
    by_type = {(n.op_type, n.action) for n in report.nodes}
    assert ("Conv", "converted") in by_type
    assert ("DequantizeLinear", "absorbed") in by_type
    (entry,) = (n for n in report.nodes if n.op_type == "Conv")
    assert entry.into == entry.name
    assert report.to_dict()["nodes"][0].keys() == {"name", "op_type", "action", "into", "reason", "details"}


@pytest.mark.parametrize(
    "name",
    [
        "ort_quantizer.u8_activations_s8_weights",
        "ort_quantizer.codes_are_an_output_too",
        "qoperator.conv_codes_in_and_out",
    ],
)  # fmt: skip
def test_an_output_that_is_listed_twice(name: str) -> None:
    """The interface stays, in names and order, whatever the output becomes."""
    model = CASES[name].build(1).model
    model.graph.output.extend([*model.graph.output, model.graph.output[0]])
    result = lowbit.convert(model)
    assert result.report.converted
    assert interface(result.model) == interface(model)
    names = [value.name for value in lowbit_session(result.model).get_outputs()]
    assert names == [value.name for value in model.graph.output]


def test_strict_accepts_a_model_that_converts_whole() -> None:
    converted(small, strict=True)


def test_ap_names_the_ops_after_the_papers() -> None:
    def build(g: Graph) -> None:
        x, xq = image(g)
        wq = g.weight_quant(5)
        values = g.codes((5, 4, 3, 3))
        weight = g.weight(np.where(values < 0, -1, 1) if bipolar else values, wq)
        output(g, g.qdq(g.node("Conv", [x, weight]), g.after(xq, wq, 4)), 2, 5, 4, 4)

    bipolar = True
    result = converted(build)
    result.assert_equal()
    assert result.attributes("APConv")["w_encoding"] == "bipolar"
    assert result.attributes("APConv")["w_bits"] == 1
    bipolar = False
    assert converted(build, ap=True).attributes("APConv")["w_encoding"] == "signed"


def test_subgraphs_see_the_values_they_capture() -> None:
    def build(g: Graph) -> None:
        y, yq = conv(g, *image(g))
        y = g.qdq(y, yq)
        inner = onnx.helper.make_graph(
            [onnx.helper.make_node("Neg", [y], ["negated"])],
            "then",
            [],
            [onnx.helper.make_tensor_value_info("negated", onnx.TensorProto.FLOAT, (2, 5, 4, 4))],
        )
        other = onnx.helper.make_graph(
            [onnx.helper.make_node("Abs", [y], ["positive"])],
            "else",
            [],
            [onnx.helper.make_tensor_value_info("positive", onnx.TensorProto.FLOAT, (2, 5, 4, 4))],
        )
        condition = g.const(np.asarray(True))
        output(g, g.node("If", [condition], then_branch=inner, else_branch=other), 2, 5, 4, 4)

    result = converted(build)
    assert result.ops["LowBitConv"] == 1
    assert "subgraph" in result.reason("If")
    (y,) = lowbit_session(result.result.model).run(None, result.built.feed())
    assert np.all(np.isfinite(y))


def _file(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    """A Conv of constants, changed."""
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 2, 4, 4]) for n in "xy")
    weights = numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w")
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], "conv")], "g", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 3), "uses opset 3; lowbit reads"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 0), "'x' has no element type"),
        (lambda m: setattr(m.graph.initializer[0], "data_type", 99), "'w' has the unknown type 99"),
        (lambda m: setattr(m.graph.initializer[0], "data_type", 0), "initializer 'w' has no element type"),
        (lambda m: m.graph.initializer[0].dims.__setitem__(0, -2), r"has the shape \[-2, 2, 1, 1\]"),
        (lambda m: m.graph.initializer[0].dims.__setitem__(0, 3), "needs 24 bytes, the file has 16"),
        (lambda m: m.graph.node[0].input.__setitem__(1, ""), r"\(conv\)'s input 1|'conv' lacks its input"),
        (lambda m: m.graph.node[0].input.__setitem__(1, "v"), "reads 'v', which nothing computes|'v'"),
    ],
)
def test_files_that_contradict_themselves(change: Callable[[onnx.ModelProto], object], why: str) -> None:
    with pytest.raises(lowbit.ModelError, match=why):
        lowbit.convert(_file(change))
