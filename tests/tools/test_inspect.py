"""What inspect says about models, as data, as a table and as a page."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import lowbit
import numpy as np
import onnx
import pytest
from lowbit.inspection.inspect import Candidate, InspectReport, NodeInfo, Refused, inspect, operand_bits
from lowbit.inspection.report_html import render, short, si, size
from lowbit.measure import tune as tuner
from lowbit.proto.report import group_reasons
from lowbit.proto.tensors import StoredWeights, read_tensors, standard_macs
from onnx import TensorProto, helper, numpy_helper

from tests.dialects.graphs import CASES, qonnx
from tests.support import require_native
from tests.tools.conftest import qdq_conv
from tests.tools.pages import HOSTILE, assert_needs_nothing_else
from tests.tools.test_cli import run, run_json

DOCS = Path(__file__).resolve().parents[2] / "docs" / "inspect.md"

# The contract of `lowbit inspect --format json`. Fields may be added here; none may go.
REPORT_FIELDS = {
    "schema", "kind", "bytes", "model", "isa", "threads", "converted_bytes", "inputs", "outputs", "assumed",
    "nodes", "warnings", "totals", "device", "regions", "reasons", "remark", "advice",
}  # fmt: skip
NODE_FIELDS = {
    "name", "op_type", "dialect", "lowbit_op", "x", "w", "y", "epilogue", "input_shape", "output_shape",
    "macs", "bit_ops", "weight_bytes", "source_weight_bytes", "packed_bytes", "workspace_bytes", "kernel",
    "tuned", "candidates", "refused", "action", "into", "reason", "runs_on", "left",
}  # fmt: skip
TOTALS_FIELDS = {
    "nodes", "ops", "actions", "dialects", "kernels", "macs", "float_macs", "bit_ops", "weight_bytes",
    "source_weight_bytes", "tuned", "runs_on",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_measured_choices(monkeypatch, tmp_path_factory):
    """Whatever this user tuned stays out of the tests."""
    require_native()
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("LOWBIT_TUNE", raising=False)


def rename(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """Gives one node another name."""
    next(node for node in model.graph.node if node.name == old).name = new
    return model


# ---- as data


def test_a_reason_may_hold_any_sign():
    """A dim without a name is a question mark, which stands for no number."""
    reasons = ["its dim is ?", "its dim is 5", "its dim is 6"]
    groups = group_reasons([(f"n{i}", "Add", reason) for i, reason in enumerate(reasons)])
    assert [(group.reason, group.nodes) for group in groups] == [
        ("its dim is ..", ["n1", "n2"]),
        ("its dim is ?", ["n0"]),
    ]


def test_reasons_stand_once_with_their_nodes():
    groups = group_reasons([
        ("a", "Conv", "its scale 0.5 has the shape [3, 1]"),
        ("b", "Relu", "'x' is not quantized"),
        ("c", "Conv", "its scale -1.5e-3 has the shape [3, 1]"),
        ("d", "Conv", "its scale 2 has the shape [64]"),
        ("e", "Relu", "'x' is not quantized"),
        *((f"q{i}", "QuantizeLinear", "it stands at the edge") for i in range(9)),
    ])  # fmt: skip
    assert [(group.reason, group.ops, group.nodes) for group in groups] == [
        ("its scale .. has the shape [..]", {"Conv": 3}, ["a", "c", "d"]),
        ("'x' is not quantized", {"Relu": 2}, ["b", "e"]),
        ("it stands at the edge", {"QuantizeLinear": 9}, [f"q{i}" for i in range(9)]),
    ]


def test_reasons_are_counted_in_the_table_and_on_the_page(tmp_path):
    """One row for many nodes; -v has them all, and the page names them where it is opened."""
    model = many_kept()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    kept = [node["name"] for node in run_json("inspect", path)["nodes"] if node["action"] == "kept"]
    assert len(kept) == 20
    for command in (["inspect", path], ["convert", path, "-o", tmp_path / "o.onnx", "--overwrite"]):
        counted = run(*command).stdout
        assert re.search(r"^\s*20 +20 Sin ", counted, re.MULTILINE), counted
        assert len(counted.splitlines()) < 30
        told = run(*command, "-v").stdout
        assert all(name in told for name in kept)
    page = render(inspect(model))
    section = page[page.index("Why nodes stay") : page.index('<section aria-label="Nodes">')]
    assert "20 Sin" in section
    assert all(name in section for name in kept)


def many_kept() -> onnx.ModelProto:
    """A quantized convolution with a tail of nodes that lowbit has no form of."""
    model = qdq_conv()
    names = ["y", *(f"sin_{i}" for i in range(20))]
    model.graph.node.extend(helper.make_node("Sin", [x], [y], y) for x, y in pairwise(names))
    model.graph.output[0].name = names[-1]
    return model


def test_the_schema_is_the_documented_one(source, converted):
    text = DOCS.read_text(encoding="utf-8")
    for path in (source, converted):
        report = run_json("inspect", path)
        assert set(report) == REPORT_FIELDS
        assert report["schema"] == 1
        assert set(report["totals"]) == TOTALS_FIELDS
        for node in report["nodes"]:
            assert set(node) == NODE_FIELDS
            assert all(set(each) == {"kernel", "reason"} for each in node["refused"])
            assert all(set(each) == {"kernel", "cycles"} for each in node["candidates"])
    for name in REPORT_FIELDS | NODE_FIELDS | TOTALS_FIELDS:
        assert f"`{name}`" in text, f"docs/inspect.md does not explain {name}"


def test_work_and_weights_of_a_convolution():
    report = inspect(qdq_conv())
    conv = next(node for node in report.nodes if node.op_type == "Conv")
    assert (conv.x, conv.w, conv.y) == ("u8", "s8", "u8")
    assert conv.codes == "u8 * s8 -> u8"
    assert conv.lowbit_op == conv.becomes == "LowBitConv"
    assert conv.dialect == "QDQ"
    assert conv.macs == 8 * 8 * 4 * 27
    assert conv.bit_ops == conv.macs * 64
    assert conv.weight_bytes == conv.source_weight_bytes == 4 * 27
    assert conv.packed_bytes >= conv.weight_bytes
    assert conv.refused
    assert all(each.kernel and each.reason for each in conv.refused)
    assert report.totals["dialects"] == {"QDQ": len([n for n in report.nodes if n.action != "absorbed"])}


def test_absorbed_nodes_count_nothing_twice(source, converted):
    before, after = inspect(source), inspect(converted)
    for node in before.nodes:
        if node.action == "absorbed":
            assert node.macs is node.kernel is node.weight_bytes is None
            assert node.becomes == (f"part of {node.into}" if node.into else "absorbed")
    for key in ("macs", "bit_ops", "weight_bytes", "kernels", "float_macs"):
        assert before.totals[key] == after.totals[key], key
    assert {node.dialect for node in after.nodes} == {"lowbit"}
    made = {node.name: node for node in after.nodes}
    for node in before.nodes:
        if node.action == "converted":
            assert made[node.into].output_shape == node.output_shape


def test_bits_reach_ops_that_do_not_name_them():
    path = Path(__file__).resolve().parents[2] / "models" / "digits" / "digits_w4a4.onnx"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    pool = next(node for node in inspect(path).nodes if node.op_type == "MaxPool")
    assert pool.codes == "u4 -> u4"


def test_what_the_conversion_adds_is_listed():
    transpose = inspect(float_and_low_bit())
    assert all(node.kernel is None for node in transpose.nodes if node.action == "added")
    assert {node.action for node in transpose.nodes} >= {"converted", "kept"}


def float_and_low_bit() -> onnx.ModelProto:
    """A quantized convolution, then one in float."""
    model = qdq_conv()
    weights = np.ones((2, 4, 1, 1), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "float_w"))
    model.graph.node.append(helper.make_node("Conv", ["y", "float_w"], ["z"], "float_conv"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 2, 8, 8]))
    return model


def test_a_float_convolution_shows_its_work_and_the_reason():
    report = inspect(float_and_low_bit())
    conv = next(node for node in report.nodes if node.name == "float_conv")
    assert conv.action == "kept"
    assert conv.reason
    assert (conv.x, conv.w, conv.y) == ("f32", "f32", "f32")
    assert conv.macs == report.totals["float_macs"] == 2 * 8 * 8 * 4
    assert conv.bit_ops is None
    assert conv.weight_bytes == conv.source_weight_bytes == 4 * 8


def test_typical_sizes_stand_in_for_symbolic_ones(tmp_path):
    model = qdq_conv(dynamic=True)
    report = inspect(model)
    conv = next(node for node in report.nodes if node.op_type == "Conv")
    assert report.assumed == {"x": [1, 3, 224, 224]}
    assert conv.macs == 224 * 224 * 4 * 27
    assert conv.kernel
    assert any("--shape x=" in text for text in report.warnings)

    sized = inspect(model, shapes={"x": [2, 3, 8, 8]})
    assert sized.assumed == {}
    assert sized.warnings == []
    assert next(n.macs for n in sized.nodes if n.op_type == "Conv") == 2 * 8 * 8 * 4 * 27


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ("y=1,3,8,8", "the inputs are x"),
        ("x=1,3,8", "does not fit"),
        ("x=1,7,8,8", "does not fit"),
        ("x=1,3,8,8,1", "does not fit"),
    ],
)
def test_shapes_that_the_model_cannot_have(shape, complaint, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(qdq_conv(dynamic=True), path)
    error = run("inspect", path, "--shape", shape, code=2).stderr
    assert complaint in error
    assert "defect" not in error


@pytest.mark.parametrize("size", [10**7, 2 * 10**9])
def test_shapes_that_no_machine_has_room_for(size):
    report = inspect(qdq_conv(dynamic=True), shapes={"x": [1, 3, size, size]})
    conv = next(node for node in report.nodes if node.op_type == "Conv")
    assert conv.kernel is None
    assert "too large" in conv.reason
    assert_needs_nothing_else(render(report))


@pytest.mark.parametrize(
    ("graph", "dialect"),
    [
        (CASES["exporters.brevitas_w4a4"], "QCDQ"),
        (CASES["qoperator.residual_block"], "QOperator"),
        (qonnx.CASES["between_max_pool"], "QONNX"),
        (qonnx.CASES["float_images"], "QONNX"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_frontend(graph, dialect):
    report = inspect(graph.build().model)
    assert next(iter(report.totals["dialects"])) == dialect
    assert all(node.dialect for node in report.nodes if node.action == "converted")
    assert all(node.reason for node in report.nodes if node.action == "kept")
    assert_needs_nothing_else(render(report))


def test_a_stated_input_quantizer_converts_the_first_layer(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(qonnx.CASES["float_images"].build().model, path)
    assert run_json("inspect", path)["totals"]["float_macs"] > 0
    assert (
        run_json("inspect", path, "--input-quant", "scale=1/255,bits=8,unsigned")["totals"]["float_macs"] == 0
    )


@pytest.mark.parametrize(
    ("op", "x", "w", "y", "attrs", "macs"),
    [
        ("Conv", [1, 4, 5, 5], [6, 2, 3, 3], [1, 6, 5, 5], {"group": 2, "pads": [1] * 4}, 6 * 25 * 2 * 9),
        ("ConvTranspose", [1, 4, 5, 5], [4, 6, 3, 3], [1, 6, 7, 7], {}, 4 * 25 * 6 * 9),
        ("Gemm", [2, 7], [3, 7], [2, 3], {"transB": 1}, 2 * 3 * 7),
        ("Gemm", [2, 7], [7, 3], [2, 3], {}, 2 * 3 * 7),
        ("MatMul", [5, 2, 7], [7, 3], [5, 2, 3], {}, 5 * 2 * 3 * 7),
        ("Relu", [2, 7], [], [2, 7], {}, None),
    ],
)
def test_macs_of_standard_ops(op, x, w, y, attrs, macs):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    weights = [numpy_helper.from_array(np.zeros(w, np.float32), "w")] if w else []
    node = helper.make_node(op, ["x", "w"] if w else ["x"], ["y"], **attrs)
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs, weights))
    assert standard_macs(node, read_tensors(model, {})) == macs
    assert StoredWeights(model).bytes_of(node) == (4 * int(np.prod(w)) if w else None)


def test_stored_weights_are_found_behind_quantizers():
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros((8, 4), np.int8))),
        helper.make_node("Transpose", ["c"], ["t"]),
        helper.make_node("DequantizeLinear", ["t", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("MatMul", ["y", "x"], ["z"]),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    weights = StoredWeights(model)
    assert weights.bytes_of(nodes[3]) == 32
    assert weights.bytes_of(nodes[4]) is None


@pytest.mark.parametrize(
    ("operand", "bits"),
    [("u8", 8), ("s4", 4), ("b1", 1), ("f32", None), ("u8+u8", None), ("bf16", None), (None, None)],
)
def test_bits_of_operands(operand, bits):
    assert operand_bits(operand) == bits


# ---- as text


def test_the_table_tells_dialect_and_bit_operations(source, converted):
    text = run("inspect", source).stdout
    assert "QDQ" in text
    assert "bit operations" in text
    assert "LowBitConv" in text
    more = run("inspect", source, "-v").stdout
    assert "part of" in more
    assert "cannot run them" in more
    assert "QDQ" not in run("inspect", converted).stdout


# ---- as a page


def test_the_page_shows_every_node_and_needs_nothing_else(source, converted, tmp_path):
    for path in (source, converted):
        target = tmp_path / f"{path.stem}.html"
        run("inspect", path, "--report", target)
        text = target.read_text(encoding="utf-8")
        page = assert_needs_nothing_else(text)
        report = inspect(path)
        bodies = [attrs for tag, attrs in page.tags if tag == "tbody" and "data-outcome" in attrs]
        assert len(bodies) == len(report.nodes)
        shown = page.text_of("td", "code")
        for node in report.nodes:
            assert short(node.name) in shown
            assert node.kernel is None or node.kernel in shown
        bands = [attrs for tag, attrs in page.tags if attrs.get("class") == "band"]
        assert len(bands) == len([node for node in report.nodes if node.macs is not None])


def test_names_are_text_whatever_they_say(tmp_path):
    model = rename(float_and_low_bit(), "conv", HOSTILE)
    rename(model, "float_conv", HOSTILE + "2")
    model.graph.name = HOSTILE
    for node in model.graph.node:
        node.input[:] = [HOSTILE if name == "x" else name for name in node.input]
    model.graph.input[0].name = HOSTILE
    text = render(inspect(model))
    page = assert_needs_nothing_else(text)
    assert HOSTILE in page.text_of("h1")
    assert HOSTILE in page.text_of("td", "dd", "code")
    assert any(HOSTILE in (attrs.get("aria-label") or "") for _, attrs in page.tags)
    assert "49" not in page.text_of("h1")

    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    output, target = tmp_path / "o.onnx", tmp_path / "r.html"
    run("convert", path, "-o", output, "--report", target)
    assert_needs_nothing_else(target.read_text(encoding="utf-8"))


def test_every_text_of_a_report_is_escaped():
    """Each string field in turn holds markup; the page's tags stay the same."""

    def tags(report: InspectReport) -> list[str]:
        return [tag for tag, _ in assert_needs_nothing_else(render(report)).tags]

    def full(**changes) -> InspectReport:
        node = NodeInfo(
            name="n", op_type="Conv", dialect="QDQ", lowbit_op="LowBitConv", x="u8", w="s4", y="u8",
            epilogue="tail", input_shape=[1, "N"], output_shape=[1, "M"], macs=10, bit_ops=320,
            weight_bytes=5, kernel="k", tuned=True, candidates=[Candidate("k", 5.0)],
            refused=[Refused("r", "why")], action="converted", into="lb", reason="because",
        )  # fmt: skip
        report = InspectReport(
            "source", 100, model="m", isa="scalar", threads=2, converted_bytes=50, inputs=["x"],
            outputs=["y"], assumed={"x": [1]}, nodes=[node], warnings=["careful"],
        )  # fmt: skip
        for name, value in changes.items():
            setattr(node if hasattr(node, name) else report, name, value)
        return report

    expected = tags(full())
    strings = [
        "name",
        "op_type",
        "dialect",
        "lowbit_op",
        "y",
        "epilogue",
        "kernel",
        "into",
        "reason",
        "model",
        "isa",
    ]
    for name in strings:
        changes = {name: HOSTILE}
        if name == "kernel":
            changes["candidates"] = [Candidate(HOSTILE, 5.0)]
        assert tags(full(**changes)) == expected, name
    for name in ("inputs", "outputs", "warnings"):
        assert tags(full(**{name: [HOSTILE]})) == expected, name
    for name in ("input_shape", "output_shape"):
        assert tags(full(**{name: [1, HOSTILE]})) == expected, name
    assert tags(full(refused=[Refused(HOSTILE, HOSTILE)])) == expected


def test_a_measured_choice_is_told(monkeypatch, tmp_path):
    """Another kernel than the cheapest by its estimate was measured to be the fastest."""
    path = tmp_path / "m.onnx"
    lowbit.convert(qdq_conv(dynamic=True), path)
    before = next(node for node in inspect(path).nodes if node.macs)
    assert before.tuned is False
    assert before.kernel == before.candidates[0].kernel
    if len(before.candidates) == 1:
        pytest.skip(f"{inspect(path).isa} leaves no choice")

    monkeypatch.setattr(
        tuner, "_measure", lambda problem, report: tuner._Winner(problem.kernels[-1], 2.0, {})
    )
    tuner.tune(path, threads=3)
    after = next(node for node in inspect(path, threads=3).nodes if node.macs)
    assert after.tuned is True
    assert after.kernel != before.kernel
    assert after.cycles > before.cycles
    assert inspect(path, threads=3).totals["tuned"] == 1
    assert f"{after.kernel} (tuned)" in run("inspect", path, "--threads", "3").stdout


def test_costs_and_tuned_choices_are_shown_where_there_are_any(source):
    report = inspect(source)
    for node in report.nodes:
        node.candidates, node.tuned = [], None
    assert 'id="metric-cycles"' not in render(report)
    conv = next(node for node in report.nodes if node.kernel and node.macs)
    conv.candidates = [Candidate("rival", 90.0), Candidate(conv.kernel, 120.0)]
    conv.tuned = True
    text = render(report)
    page = assert_needs_nothing_else(text)
    assert 'id="metric-cycles"' in text
    assert "rival" in page.text_of("code")
    assert "measured as the fastest" in page.text_of("dd")
    assert conv.cycles == 120.0


def test_pages_of_odd_models():
    """Nothing to plot, nothing known, nothing at all."""
    assert_needs_nothing_else(render(InspectReport("lowbit", 0)))
    unknown = NodeInfo("n", "Conv", action="kept", reason="why")
    assert_needs_nothing_else(render(InspectReport("source", 1, nodes=[unknown])))
    zero = dataclasses.replace(unknown, macs=0, bit_ops=0, x="u8", w="s8", output_shape=[])
    assert_needs_nothing_else(render(InspectReport("source", 1, nodes=[zero])))


def test_reports_are_written_whole_and_replace_nothing_unasked(source, tmp_path):
    target = tmp_path / "r.html"
    target.write_text("precious")
    assert "--overwrite" in run("inspect", source, "--report", target, code=2).stderr
    assert target.read_text() == "precious"
    run("inspect", source, "--report", target, "--overwrite")
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    run("inspect", source, "--report", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == run_json("inspect", source)
    assert "never overwritten" in run("inspect", source, "--report", source, "--overwrite", code=2).stderr


def test_convert_writes_the_same_page(source, tmp_path):
    run("convert", source, "-o", tmp_path / "o.onnx", "--report", tmp_path / "convert.html")
    run("inspect", source, "--report", tmp_path / "inspect.html")
    assert (tmp_path / "convert.html").read_text() == (tmp_path / "inspect.html").read_text()


def test_python_describes_results_and_protos(source):
    model = onnx.load(source)
    result = lowbit.convert(model)
    assert lowbit.inspect(result).kind == "lowbit"
    assert lowbit.inspect(model).kind == "source"
    assert lowbit.inspect(model).model == model.graph.name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1.00 k"), (12345, "12.3 k"), (999499, "999 k"), (999600, "1.00 M"),
        (2.12e9, "2.12 G"), (5e15, "5000 T"), (None, ""),
    ],
)  # fmt: skip
def test_numbers_with_unit_prefixes(value, text):
    assert si(value) == text


def test_sizes_and_short_names():
    assert (size(12), size(1200), size(None)) == ("12 B", "1.20 kB", "")
    assert short("x" * 64) == "x" * 64
    assert short("a" * 50 + "b" * 50) == "a" * 32 + "…" + "b" * 32
