"""Every graph of every dialect: converted, run in ONNX Runtime, equal in every element to what it means."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from tests.dialects import oracle
from tests.dialects.graphs import CASES, Built, Case
from tests.support import FLOAT_MATMULS, all_nodes, interface, lowbit_session, require_native, stock_run

lowbit = pytest.importorskip("lowbit")


# What may stand between lowbit nodes: operators that move codes. Q and DQ stand around float nodes that stay.
_MOVES = {
    "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad", "Gather",
    "DepthToSpace", "Tile", "Expand", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "Identity", "Cast",
    "Constant", "QuantizeLinear", "DequantizeLinear",
}  # fmt: skip


def _expected(case: Case, built: Built, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    if case.left and case.loads_in_stock:
        return stock_run(built.model, feeds, optimize=False)
    return oracle.run(built.model, feeds)


def _assert_same(case: Case, ours: np.ndarray, expected: np.ndarray, note: str) -> None:
    assert ours.shape == expected.shape, note
    assert ours.dtype == expected.dtype, note
    if case.left:
        # A float product that stayed rounds its sum in ONNX Runtime's order: codes behind may flip at ties.
        reach = float(np.max(np.abs(expected.astype(np.float64)), initial=0.0))
        near = np.isclose(ours.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-5 * reach)
        assert near.mean() >= 0.9, f"{note}: {(~near).sum()} of {near.size} elements differ"
    elif case.float_tail:
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-30, err_msg=note)
    else:
        different = int((ours != expected).sum())
        assert not different, f"{note}: {different} of {ours.size} elements differ"


def _assert_report_names_every_node(model: onnx.ModelProto, report) -> None:
    """Each node of the input appears once, and what stayed says why."""
    expected = sorted(n.name for n in model.graph.node if n.op_type != "Constant")
    told = sorted(n.name for n in report.nodes if n.op_type != "Constant")
    assert told == expected
    assert all(n.reason for n in report.kept)
    assert all(n.reason is None or n.action == "kept" for n in report.nodes)


@pytest.mark.parametrize("name", CASES)
def test_conversion_is_exact(name: str) -> None:
    require_native()
    case = CASES[name]
    for seed in range(3):  # the flavours of scales
        built = case.build(seed)
        source = built.model.SerializeToString(deterministic=True)
        result = lowbit.convert(built.model, all_regions=seed == 1, keep_float16=True)
        assert built.model.SerializeToString(deterministic=True) == source, "the input model was changed"
        assert interface(result.model) == interface(built.model)
        _assert_report_names_every_node(built.model, result.report)

        left = {node.op_type for node in all_nodes(result.model.graph) if node.op_type in FLOAT_MATMULS}
        reasons = "; ".join(f"{n.op_type} {n.name}: {n.reason}" for n in result.report.kept)
        assert left == set(case.left), f"seed {seed}: {reasons}"
        for pattern in case.left.values():
            assert re.search(pattern, reasons), reasons

        if not case.left:
            standard = {node.op_type for node in result.model.graph.node if node.domain != "ai.lowbit"}
            assert standard - _MOVES == set(case.stays), reasons

        session = lowbit_session(result.model)
        for k, sizes in enumerate(built.sizes):
            feeds = built.feed(k, **sizes)
            ours = session.run(None, feeds)
            for output, a, b in zip(
                built.model.graph.output, ours, _expected(case, built, feeds), strict=True
            ):
                _assert_same(case, a, b, f"seed {seed}, sizes {sizes}, output {output.name}")


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.left])
def test_strict_refuses_what_stays(name: str) -> None:
    built = CASES[name].build(1)
    with pytest.raises(lowbit.UnsupportedError) as caught:
        lowbit.convert(built.model, strict=True, keep_float16=True)
    assert re.search(next(iter(CASES[name].left.values())), str(caught.value))


def test_round_bias_is_reported(seeds) -> None:
    """--round-bias puts a float bias onto the integer grid, and says how far it moved."""
    for seed in seeds(3):
        built = CASES["ort_quantizer.float_bias"].build(seed)
        result = lowbit.convert(built.model, round_bias=True)
        told = str(result.report.to_dict())
        assert re.search("(?i)bias", told)
        assert re.search("(?i)round", told)
        exact, rounded = (
            lowbit_session(r.model).run(None, built.feed())[0] for r in (lowbit.convert(built.model), result)
        )
        step = float(np.min(np.diff(np.unique(exact))))
        assert np.max(np.abs(exact - rounded)) <= 2.5 * step


def test_external_data(tmp_path) -> None:
    """Weights in a file beside the model; the output does not lean on it."""
    built = CASES["ort_quantizer.u8_activations_s8_weights"].build(2)
    expected = oracle.run(built.model, built.feed())
    source = tmp_path / "in" / "model.onnx"
    source.parent.mkdir()
    copy = onnx.ModelProto()
    copy.CopyFrom(built.model)
    onnx.save(copy, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    target = tmp_path / "out.onnx"
    lowbit.convert(source, target)
    (tmp_path / "in" / "weights.bin").unlink()
    source.unlink()
    for a, b in zip(lowbit_session(target).run(None, built.feed()), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_metadata_survives() -> None:
    built = CASES["ort_quantizer.no_bias"].build(0)
    onnx.helper.set_model_props(built.model, {"author": "somebody", "labels": "cat,dog"})
    props = {p.key: p.value for p in lowbit.convert(built.model).model.metadata_props}
    assert props["author"] == "somebody"
    assert props["labels"] == "cat,dog"
    assert any("lowbit" in key for key in props), "the converter's version and the source's hash"


def test_weights_are_packed_at_their_width() -> None:
    """2-bit weights take a quarter of a byte each, whatever type held them."""
    sizes = {}
    for name in ("w_s8_a_u4", "w_s4_a_u4", "w_s2_a_u4"):
        model = lowbit.convert(CASES[f"narrow_types.{name}"].build(1).model).model
        sizes[name] = sum(len(t.raw_data) for t in model.graph.initializer if len(t.raw_data) > 60)
    assert sizes["w_s2_a_u4"] < sizes["w_s4_a_u4"] < sizes["w_s8_a_u4"]


def test_converting_twice_changes_nothing() -> None:
    """A converted model is a valid input: nothing is left to do."""
    built = CASES["constructs.conv_flatten_gemm"].build(1)
    once = lowbit.convert(built.model)
    twice = lowbit.convert(once.model)
    feeds = built.feed(**built.sizes[0])
    for a, b in zip(
        lowbit_session(once.model).run(None, feeds), lowbit_session(twice.model).run(None, feeds), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_conversion_is_deterministic() -> None:
    for name in ("constructs.dense_block", "constructs.between_concat", "exporters.tf2onnx_classifier"):
        model = CASES[name].build(1).model
        first, second = (lowbit.convert(model).model.SerializeToString(deterministic=True) for _ in range(2))
        assert first == second
