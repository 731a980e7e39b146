"""Node-local verification: what it accepts, what it explains, what it does not."""

from __future__ import annotations

import json

import lowbit
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit import ops
from lowbit.errors import ModelError
from lowbit.ops import ties
from lowbit.proto.provenance import KEY
from lowbit.schemas import signatures
from onnx import helper, numpy_helper

from tests.converter.graphs import image, output
from tests.dialects.graphs import CASES
from tests.dialects.graphs.builder import Built, Graph
from tests.dialects.graphs.qonnx import CASES as QONNX_CASES
from tests.numerics import random_nodes
from tests.support import require_native
from tests.tools.conftest import qdq_conv

require_native()

ROUNDING_OPS = [
    op
    for op in ops.DEFINITIONS
    if op not in ("LowBitLookup", "LowBitMaxPool", "LowBitDepthToSpace", "LowBitThreshold", "LowBitImage")
]  # the others only move codes


@pytest.mark.parametrize("name", CASES)
def test_every_dialect_verifies(name):
    built = CASES[name].build(0)
    result = lowbit.convert(built.model, verify=False, all_regions=True)
    if not any(node.domain == ops.DOMAIN for node in result.model.graph.node):
        pytest.skip("nothing of it becomes a lowbit node")
    report = lowbit.verify(result.model, built.model, data=built.feed(0, **built.sizes[0]))
    bad = [(n.op_type, n.name, n.wrong, n.unexplained, n.note) for n in report.nodes if not n.ok]
    assert report.ok, bad
    runs = not any("not compared" in note for note in report.notes)
    assert report.total("equal") > 0 or not runs, "something was compared"


@pytest.mark.parametrize("op_type", ROUNDING_OPS)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_definition_lies_at_the_real_number(op_type, seed):
    """float64 rounded once gives the definition's code, but for ties within the stated bound."""
    node = random_nodes.make(op_type, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        chain = ops.chain(node.op_type, node.attrs, node.inputs)
    y = ops.evaluate(node.op_type, node.attrs, node.inputs)
    if node.attrs.get("mode") == "nearest":
        assert chain is None
        return
    if isinstance(chain, ties.Count):  # such nodes count ties, they do not round
        given = dict(zip(signatures()[op_type].inputs, node.inputs, strict=False))
        base, direction = given["threshold_base"], given["threshold_dir"].reshape(-1, 1)
        unreal = np.isnan(chain.ties)  # out of reach, or reached by everything
        always = unreal & (direction * given["thresholds"].astype(np.int64) < 0)
        with np.errstate(invalid="ignore"):
            passed = direction * chain.value[..., None] >= direction * chain.ties
        assert np.array_equal(y, base + (passed | always).sum(axis=-1)), node
        return
    assert np.broadcast_shapes(chain.value.shape, y.shape) == y.shape
    if chain.step is None:
        finite = np.isfinite(y)
        off = np.abs(y.astype(np.float64) - chain.value)[finite]
        assert (off <= np.broadcast_to(chain.error, y.shape)[finite]).all(), node
        return
    low, high = _clip_range(node)
    zero = _zero_point(node)
    exact = np.clip(np.rint(np.nan_to_num(chain.value / chain.step, nan=-np.inf)) + zero, low, high)
    differs = y != exact
    assert chain.explains(y, exact)[differs].all(), node


@pytest.mark.parametrize(
    "op_type",
    ["LowBitConv", "LowBitAdd", "LowBitConcat", "LowBitAveragePool", "LowBitResize", "LowBitSoftmax"],
)
def test_a_step_away_from_a_tie_is_not_explained(op_type, seeds):
    """One step more than the definition says is refused, except for the few results that lie at a tie."""
    elements = explained = 0
    for seed in seeds(20):
        rng = np.random.default_rng(seed)
        epilogue = {"epilogue": "requantize"} if op_type == "LowBitConv" else {}
        node = random_nodes.make(op_type, rng, **epilogue)
        chain = ops.chain(node.op_type, node.attrs, node.inputs)
        y = ops.evaluate(node.op_type, node.attrs, node.inputs)
        if chain is None or chain.step is None:
            continue
        steps = np.broadcast_to(chain.value / chain.step, y.shape)
        clear = np.abs(steps - np.floor(steps) - 0.5) > 0.1
        clear &= np.broadcast_to(chain.error / chain.step <= 0.1, y.shape)  # steep cubic weights add up more
        shifted = y.astype(np.int64) + 1
        elements += int(clear.sum())
        explained += int((chain.explains(shifted, y) & clear).sum())
        assert not chain.explains(y.astype(np.int64) + 2, y).any()
    assert elements > 500
    assert explained == 0


def _clip_range(node):
    low, high = random_nodes.code_range(node.attrs.get("y_bits", 8), node.attrs.get("y_encoding", "unsigned"))
    return (node.attrs.get("y_min") or [low])[0], (node.attrs.get("y_max") or [high])[0]


def _zero_point(node):
    index = signatures()[node.op_type].inputs.index("y_zero_point")
    return node.inputs[index].astype(np.int64)


# ---- the record


def converted_pair():
    source = qdq_conv()
    return lowbit.convert(source).model, source


def edited(model: onnx.ModelProto, edit) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in copy.metadata_props:
        if entry.key == KEY:
            entry.value = edit(entry.value)
    return copy


def test_every_activation_has_its_place():
    model, source = converted_pair()
    (value,) = [entry.value for entry in model.metadata_props if entry.key == KEY]
    record = json.loads(value)
    assert record["version"] == 1
    there = {name for node in source.graph.node for name in node.output}
    made = {name for node in model.graph.node for name in node.output}
    assert set(record["values"]) <= made
    assert {entry["source"] for entry in record["values"].values()} <= there
    assert set(record["nodes"]) <= {node.name for node in model.graph.node}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-5], "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: '{"version": 1}', "damaged"),
        (lambda text: '{"values": {"a": {"source": "nowhere"}}}', "not made from this original"),
        (lambda text: '{"values": {"a": {"perm": 3}}}', "damaged"),
    ],
)
def test_a_damaged_record_is_one_clear_error(edit, message):
    model, source = converted_pair()
    with pytest.raises(ModelError, match=message):
        lowbit.verify(edited(model, edit), source)


def test_a_value_without_a_place_is_checked_against_its_definition_only():
    """And never counted as equal to the original: its input is computed here, from what has a place."""
    model, source = converted_pair()
    conv = next(node for node in model.graph.node if node.op_type == "LowBitConv")

    def forget(text):
        record = json.loads(text)
        del record["values"][conv.output[0]]
        return json.dumps(record)

    report = lowbit.verify(edited(model, forget), source)
    check = next(node for node in report.nodes if node.op_type == "LowBitConv")
    assert check.ok
    assert check.elements > 0
    assert check.equal == 0
    assert "nothing of the original" in check.note
    assert report.ok
    assert next(node for node in report.nodes if node.op_type == "LowBitDequantize").equal > 0


def test_a_wrong_place_is_found():
    """Codes compared with another value's codes: nearly all elements are unexplained."""
    model, source = converted_pair()

    def swap(text):
        record = json.loads(text)
        for entry in record["values"].values():
            entry["perm"] = [0, 3, 2, 1]
        return json.dumps(record)

    assert not lowbit.verify(edited(model, swap), source).ok


def test_saturated_weights_are_exact_on_every_machine():
    """Full-range codes and weights: without x64quantprecision ONNX Runtime saturates on AVX2."""
    source = qdq_conv()
    for init in source.graph.initializer:
        if init.name == "w":
            init.CopyFrom(numpy_helper.from_array(np.full((4, 3, 3, 3), 127, np.int8), "w"))
    data = {"x": np.full((3, 3, 8, 8), 100, np.float32)}
    report = lowbit.verify(lowbit.convert(source).model, source, data=data)
    assert report.ok
    assert report.samples == 3
    assert report.total("near_tie") == 0


def test_a_tie_inside_a_table_is_explained():
    """Gelu as ONNX Runtime's quantizer writes it: erf + 1 on one grid is a tie for every code of erf."""
    grids = {"x": (0.08698178, 155), "erf": (2 / 255, 128), "one": (1 / 255, 0), "sum": (2 / 255, 0)}
    grids["y"] = (0.0693, 5)
    constants = {
        f"{name}_{kind}": value
        for name, (scale, zero) in grids.items()
        for kind, value in (("scale", np.float32(scale)), ("zero", np.uint8(zero)))
    }
    constants |= {"root": np.float32(2**0.5), "one": np.uint8(255)}

    def grid(name: str) -> list[str]:
        return [f"{name}_scale", f"{name}_zero"]

    def microsoft(op_type: str, inputs: list[str], output: str) -> onnx.NodeProto:
        return helper.make_node(op_type, inputs, [output], f"{output}_node", domain="com.microsoft")

    nodes = [
        helper.make_node("QuantizeLinear", ["x", *grid("x")], ["q"]),
        helper.make_node("DequantizeLinear", ["q", *grid("x")], ["real"]),
        helper.make_node("Div", ["real", "root"], ["divided"]),
        helper.make_node("Erf", ["divided"], ["erf"]),
        helper.make_node("QuantizeLinear", ["erf", *grid("erf")], ["erf_q"]),
        microsoft("QLinearAdd", ["erf_q", *grid("erf"), "one", *grid("one"), *grid("sum")], "sum_q"),
        microsoft("QLinearMul", ["q", *grid("x"), "sum_q", *grid("sum"), *grid("y")], "y_q"),
        helper.make_node("DequantizeLinear", ["y_q", *grid("y")], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "gelu",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 256])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 256])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    source = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    every_code = (np.arange(256, dtype=np.float32)[None] - 155) * constants["x_scale"]
    report = lowbit.verify(lowbit.convert(source, all_regions=True), source, data={"x": every_code})
    (table,) = (node for node in report.nodes if node.op_type == "LowBitLookup")
    assert table.near_tie > 0
    assert report.ok


@pytest.mark.parametrize("signed", [0, 1])
def test_no_code_is_demanded_of_what_is_no_number(signed):
    """0 / 0 in front of a Quant: stock casts NaN to an integer, which no standard defines."""
    constants = {"scale": np.float32(0.5), "zero": np.float32(0), "bits": np.float32(3)}
    domain = "qonnx.custom_op.general"

    def quant(source: str, output: str) -> onnx.NodeProto:
        attributes = {"signed": signed, "narrow": 0, "rounding_mode": "ROUND", "domain": domain}
        return helper.make_node("Quant", [source, "scale", "zero", "bits"], [output], output, **attributes)

    nodes = [
        helper.make_node("Div", ["x", "x"], ["ratio"]),
        quant("ratio", "q"),
        helper.make_node("MaxPool", ["q"], ["pooled"], kernel_shape=[1, 1]),
        quant("pooled", "y"),
    ]
    graph = helper.make_graph(
        nodes,
        "not_a_number",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 4, 4])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    source = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    x = np.where(np.arange(32) % 3 == 0, 0, 1).astype(np.float32).reshape(1, 2, 4, 4)
    report = lowbit.verify(lowbit.convert(source, all_regions=True), source, data={"x": x})
    quantizers = [node for node in report.nodes if node.op_type in ("LowBitQuantize", "LowBitThreshold")]
    assert quantizers
    assert all(node.ok for node in quantizers), quantizers


def test_a_node_that_onnx_runtime_runs_in_one_form_of_the_graph_alone():
    """A cubic Resize of uint8 has a kernel only where the optimizer put a Transpose in front of it.

    Conversion does so itself where the scales are constants; here they are fed.
    """
    rng = np.random.default_rng(0)
    constants = {
        "scale": np.float32(0.1),
        "zero": np.uint8(100),
        "w_scale": np.float32(0.02),
        "w_zero": np.int8(0),
        **{f"w{i}": rng.integers(-20, 20, (8, 8, 1, 1)).astype(np.int8) for i in range(2)},
    }

    def conv(x: str, y: str, i: int) -> onnx.NodeProto:
        inputs = [x, "scale", "zero", f"w{i}", "w_scale", "w_zero", "scale", "zero"]
        return helper.make_node("QLinearConv", inputs, [y], y)

    graph = helper.make_graph(
        [
            conv("x", "a", 0),
            helper.make_node("Resize", ["a", "", "scales"], ["b"], "b", mode="cubic"),
            conv("b", "y", 1),
        ],
        "cubic_resize_of_codes",
        [
            helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, 8, 6, 6]),
            helper.make_tensor_value_info("scales", onnx.TensorProto.FLOAT, [4]),
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, [1, 8, 12, 12])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = rng.integers(0, 256, (1, 8, 6, 6)).astype(np.uint8)
    feed = {"x": x, "scales": np.array([1, 1, 2, 2], np.float32)}
    result = lowbit.convert(model)
    report = lowbit.verify(result, model, data=feed)
    assert report.ok
    assert [(check.runs, check.wrong) for check in report.nodes] == [(1, 0), (1, 0)]


def test_an_error_of_several_steps_explains_as_many():
    """One element, whose mean it is: formulas that take it off at the end cancel numbers 1e5 steps large."""
    x, one = np.full((1, 1, 1), 4, np.uint8), np.ones(1, np.float32)
    inputs = [x, np.float32(0.25), np.int32(255), one, 0 * one, np.float32(2e-4), np.int32(128)]
    chain = ops.chain("LowBitNormalization", {"axis": 1}, inputs)
    assert chain is not None
    tie_count = float(np.max(chain.error / chain.step)) * 2
    assert tie_count > 2
    code = np.zeros((1, 1, 1), np.uint8)
    assert chain.explains(code + 2, code).all()
    assert not chain.explains(code + int(tie_count) + 2, code).any()


def test_a_quantizer_that_was_moved_is_compared_behind_the_move():
    g = Graph("moved", 1)
    x, quant = image(g)
    y = g.node("Resize", [x, "", g.floats([1, 1, 1.5, 1.5])], mode="linear")
    y = g.node("Transpose", [g.node("Reshape", [y, g.ints([2, 4, 81])])], perm=[0, 2, 1])
    output(g, g.qdq(y, quant), 2, 81, 4)
    built = Built(g.proto(), g.feeds, 1)
    result = lowbit.convert(built.model)
    report = lowbit.verify(result.model, built.model, data=built.feed())
    assert report.ok
    assert not [node.note for node in report.nodes if node.note]


@pytest.mark.parametrize("seed", [0, 56])
def test_a_quantizer_that_was_moved_above_depth_to_space_explains_its_ties(seed):
    """As in networks of super-resolution. Seed 56 has sums at ties, which stock rounds to the other side."""
    built = QONNX_CASES["subpixel"].build(seed)
    result = lowbit.convert(built.model)
    report = lowbit.verify(result.model, built.model, data=built.feed(seed, **built.sizes[0]))
    assert report.ok
    assert not [node.note for node in report.nodes if node.note]
    checks = {node.op_type: node for node in report.nodes}
    assert checks["LowBitDepthToSpace"].equal == checks["LowBitConv"].elements
    assert (checks["LowBitConv"].near_tie > 0) == (seed == 56)


def test_codes_that_the_original_has_flattened_are_compared_where_a_product_took_the_flatten_in():
    built = QONNX_CASES["flatten_before_the_quantizer"].build(8)  # a sum of the convolution lies at a tie
    result = lowbit.convert(built.model)
    report = lowbit.verify(result.model, built.model, data=built.feed(8, **built.sizes[0]))
    assert report.ok
    assert not [node.note for node in report.nodes if node.note]
    (conv,) = (node for node in report.nodes if node.op_type == "LowBitConv")
    assert conv.near_tie == 1
    assert conv.equal == conv.elements - 1


@pytest.mark.parametrize("name", ["between_relu_then_pool", "between_resize"])
def test_what_chooses_codes_that_were_rounded_at_ties_is_explained(name):
    """The quantizer of these was moved above what chooses: nothing of the original says what it read."""
    built = QONNX_CASES[name].build(8)
    result = lowbit.convert(built.model)
    data = built.feed(8, **built.sizes[0])
    report = lowbit.verify(result.model, built.model, data=data)
    assert report.ok
    (choosing,) = (n for n in report.nodes if n.op_type in ("LowBitMaxPool", "LowBitResize"))
    assert choosing.near_tie > 0

    (node,) = (n for n in result.model.graph.node if n.name == choosing.name)
    (weights,) = (
        t for t in result.model.graph.initializer if t.name == maker_of(result.model, node).input[2]
    )
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * 4, weights.name))
    assert not lowbit.verify(result.model, built.model, data=data).ok


def maker_of(model: onnx.ModelProto, node: onnx.NodeProto) -> onnx.NodeProto:
    """What computes a node's first input."""
    return next(each for each in model.graph.node if node.input[0] in each.output)
