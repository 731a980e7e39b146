"""The quantizer's parts against plain definitions of what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lowbit.errors import ModelError
from lowbit.frontends.load import load_model
from lowbit.quantizer.data import Spool
from lowbit.quantizer.gram import Moments, Unfold, from_rows, to_rows
from lowbit.quantizer.prepare import prepare
from lowbit.quantizer.ranges import ChannelValues, Values
from lowbit.quantizer.rounding.adaround import adaround
from lowbit.quantizer.rounding.descent import descent
from lowbit.quantizer.rounding.gptq import gptq
from lowbit.quantizer.rounding.layer import Rounded, round_layer
from lowbit.quantizer.rounding.nearest import nearest
from lowbit.quantizer.rounding.problem import Problem, first_scale, solve
from lowbit.quantizer.sites import Layer

from tests.quantize.networks import Builder, images, random_network
from tests.support import session_options

Array = npt.NDArray[Any]


# Ranges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high", "zero"), [(0, 15, 0), (-8, 7, 0), (0, 255, 100), (-2, 1, 0)])
def test_the_error_of_a_grid_from_a_histogram(low: int, high: int, zero: int) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal(40000), np.zeros(10000), [30, -40]]).astype(np.float32)
    if low == 0 and zero == 0:
        x = np.maximum(x, 0)
    values = Values()
    for part in np.array_split(x, 7):
        values.add("x", part)
    for scale in (0.02, 0.1, 0.7):
        codes = np.clip(np.rint(x / np.float32(scale)) + zero, low, high)
        expected = np.mean((x - (codes - zero) * scale) ** 2)
        found = values.error(np.array([scale]), np.array([zero]), low, high)[0]
        assert found == pytest.approx(expected, rel=0.03)
    assert values.power() == pytest.approx(np.mean(np.square(x, dtype=np.float64)), rel=0.01)
    assert (values.low, values.high) == (x.min(), x.max())
    assert sum(values.histogram().counts) == pytest.approx(x.size, rel=0.001)


def test_ranges_do_not_depend_on_how_the_data_are_cut() -> None:
    x = images(6)
    whole, parts = Values(), Values()
    whole.add("x", x)
    for row in x:
        parts.add("x", row)
    assert np.array_equal(whole.counts, parts.counts)
    assert whole.merged(parts).total == 2 * whole.total
    assert whole.quantile(0.1)[1] == pytest.approx(np.quantile(x, 0.9), rel=0.05)


def test_values_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ModelError, match="'x' is NaN or infinite"):
            Values().add("x", np.array([0, bad], np.float32))


def test_scales_per_channel() -> None:
    x = np.abs(images(8)) * np.array([0.01, 1, 50], np.float32)[:, None, None]
    values = ChannelValues(3)
    values.add(x)
    scales = values.scales(15)
    for c in range(3):
        tried = x[:, c].max() / 15 * np.linspace(0.2, 1, 100)
        errors = [np.mean((x[:, c] - s * np.clip(np.rint(x[:, c] / s), 0, 15)) ** 2) for s in tried]
        own = np.mean((x[:, c] - scales[c] * np.clip(np.rint(x[:, c] / scales[c]), 0, 15)) ** 2)
        assert own <= 1.1 * min(errors)


# Sums -----------------------------------------------------------------------------------------------------

_LAYERS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("Conv", (6, 4, 3, 3), (2, 4, 8, 7), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    ("Conv", (6, 2, 3, 2), (2, 4, 8, 7), {"group": 2, "dilations": [1, 2]}),
    ("Conv", (4, 1, 3, 3), (2, 4, 6, 6), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", (5, 4, 1, 1), (2, 4, 6, 6), {}),
    ("Conv", (5, 3, 4), (2, 3, 9), {"pads": [1, 2]}),
    ("Conv", (3, 2, 2, 2, 2), (2, 2, 4, 5, 4), {}),
    ("ConvTranspose", (4, 6, 3, 3), (2, 4, 5, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("ConvTranspose", (4, 3, 2, 3), (2, 4, 5, 4), {"strides": [2, 3], "output_padding": [1, 0]}),
    ("ConvTranspose", (4, 1, 3, 3), (2, 4, 5, 4), {"group": 4, "pads": [0, 1, 1, 0]}),
    ("Gemm", (5, 7), (3, 7), {"transB": 1}),
    ("Gemm", (7, 5), (3, 7), {}),
    ("MatMul", (7, 5), (2, 3, 7), {}),
]


@pytest.mark.parametrize("case", range(len(_LAYERS)))
def test_columns_times_rows_are_the_layer_itself(case: int) -> None:
    op, shape, size, attributes = _LAYERS[case]
    rng = np.random.default_rng(case)
    w = rng.standard_normal(shape).astype(np.float32)
    x = rng.standard_normal(size).astype(np.float32)
    node = onnx.helper.make_node(op, ["x", "w"], ["y"], "layer", **attributes)
    tensor = onnx.numpy_helper.from_array(w, "w")
    graph = onnx.helper.make_graph(
        [node], "g", [onnx.helper.make_tensor_value_info("x", 1, size)],
        [onnx.helper.make_tensor_value_info("y", 1, None)], [tensor],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    y = ort.InferenceSession(model.SerializeToString(), session_options()).run(None, {"x": x})[0]
    group = attributes.get("group", 1)
    transposed = bool(attributes.get("transB"))
    rows = shape[0] if op == "Conv" or transposed else shape[1] * group
    layer = Layer("layer", op, w, np.zeros(rows), "layer", "x", "y", rows, group, 4, "", False, transposed)
    assert np.array_equal(from_rows(layer, to_rows(layer, w)), w)
    unfold = Unfold(layer, next(iter(ir.from_proto(model).graph)))
    weights = to_rows(layer, w)
    columns = np.concatenate([part for (part,) in unfold.slabs(x)], axis=2)
    outputs = np.concatenate(list(unfold.outputs(y, x)), axis=2)
    assert np.allclose(weights @ columns, outputs, atol=1e-4)
    sums = Moments.empty(layer, unfold.columns, 0)
    sums.add(unfold, x, x, y, None)
    assert sums.count == outputs.shape[2]
    assert np.allclose(sums.gram[0], columns @ columns.transpose(0, 2, 1), rtol=1e-3, atol=1e-3)
    assert np.allclose(sums.cross, outputs @ columns.transpose(0, 2, 1), rtol=1e-3, atol=1e-3)


def test_blocks_of_a_large_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.quantizer.gram.LARGEST", 8)
    b = Builder(8, ("N", 3, 4, 4))
    flat = b.node("Flatten", [b.node("Relu", [b.conv("x", 4)])])
    model = b.model(b.node("Gemm", [flat, b.random(64, 6, scale=0.2), b.random(6)]))
    x = images(40, (3, 4, 4))
    result = lowbit.quantize(model, x, bits="w4a8", first_last=4, threads=1)
    assert 0 < result.report.layers[-1].neglected < 1
    assert any("blocks, which neglects" in warning for warning in result.report.warnings)
    assert result.report.layers[-1].error is not None
    exact = ort.InferenceSession(model.SerializeToString(), session_options()).run(None, {"x": x})[0]
    ours = ort.InferenceSession(result.model.SerializeToString(), session_options()).run(None, {"x": x})[0]
    assert np.abs(exact.mean(axis=0) - ours.mean(axis=0)).max() < 0.02 * exact.std()
    assert np.square(exact - ours).mean() < 0.05 * exact.var()


def test_images_are_mirrored_and_halved_together(tmp_path: Any) -> None:
    x = images(11)
    source = load_model(random_network(0)).proto
    spool = Spool(source, x, tmp_path, mirror=True)
    everything = np.concatenate([feed["x"] for feed in spool])
    assert np.array_equal(everything, np.concatenate([x, x[..., ::-1]]))
    assert spool.samples == 11
    assert np.array_equal(np.concatenate([feed["x"] for feed in spool.given()]), x)
    for which in (0, 1):
        half, own = spool.half(which), x[which::2]
        assert half.samples == len(own)
        assert np.array_equal(np.concatenate([f["x"] for f in half]), np.concatenate([own, own[..., ::-1]]))
        # An image and its mirror image judge together, or not at all.
        held = np.concatenate([half.held_out(i, len(half.feed(i)["x"])) for i in range(len(half))])
        assert np.array_equal(held[: len(own)], held[len(own) :])
        assert held.any()
    plain = Spool(source, np.concatenate([x] * 30), tmp_path, mirror=True)
    assert plain.samples == sum(len(feed["x"]) for feed in plain)  # so many that they are enough


def test_halves_of_a_fixed_batch_are_whole_feeds(tmp_path: Any) -> None:
    b = Builder(12, (2, 3, 16, 16))
    spool = Spool(b.model(b.head(b.conv("x", 4))), images(8), tmp_path)
    assert [feed["x"].shape[0] for feed in spool.half(1)] == [2, 2]
    assert np.array_equal(spool.half(1).feed(0)["x"], images(8)[2:4])


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 16, 12), 3), ((16, 12, 3), 2), ((7, 16, 12), None), ((3, 16), None)]
)
def test_what_is_mirrored_is_an_image(shape: tuple[int, ...], axis: int | None, tmp_path: Any) -> None:
    value = onnx.helper.make_tensor_value_info("x", 1, ["N", *shape])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value],
                                   [onnx.helper.make_tensor_value_info("y", 1, None)])  # fmt: skip
    x = images(10, shape)
    spool = Spool(onnx.helper.make_model(graph), x, tmp_path, mirror=True)
    feeds = [feed["x"] for feed in spool]
    assert len(feeds) == (1 if axis is None else 2)
    if axis is not None:
        assert np.array_equal(feeds[1], np.flip(x, axis))


# Rounding -------------------------------------------------------------------------------------------------


def problem(seed: int, *, groups: int = 2, rows: int = 3, columns: int = 6, bits: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups, columns, 50)) @ np.eye(50)
    x[:, 1:] += 0.9 * x[:, :-1]  # neighbours are alike
    w = rng.standard_normal((groups, rows, columns))
    gram = x @ x.transpose(0, 2, 1) / 50
    power = [np.einsum("gkk->g", gram) / columns]
    cross = w @ gram
    return solve(
        w, [gram], cross, [slice(0, columns)], power, bits, 0.01, per_channel=True, feedback=True
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_each_way_is_better_than_the_one_before(seed: int) -> None:
    p = problem(seed, rows=8, columns=40)
    plain, scale = nearest(p)
    start = first_scale(p)
    errors = [
        p.error(codes * scale[..., None]).sum()
        for codes, scale in ((plain, scale), (gptq(p, start), start), descent(p, 20))
    ]
    assert errors[0] > errors[1] > errors[2]
    relaxed, own = adaround(p, 300)
    assert p.error(relaxed * own[..., None]).sum() < errors[0]


def moments(x: Array, w: Array) -> Moments:
    """Sums of a matrix product over rows of x."""
    layer = Layer("l", "MatMul", w.T, np.zeros(len(w)), "l", "x", "y", len(w), 1, 4, "", False, False)
    node = ir.node("MatMul", [ir.Value(name="x"), ir.Value(name="w")], name="l")
    made = Moments.empty(layer, w.shape[1], 0)
    made.add(Unfold(layer, node), x, x, x @ w.T, None)
    return made


def test_rows_may_be_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((7, 12)).astype(np.float32), rng.standard_normal((90, 12)).astype(np.float32)

    def rounded() -> Rounded:
        fit, held = moments(x[:70], w), moments(x[70:], w)
        return round_layer(w[None].astype(float), fit, held, 3, method="auto", ridge=None, sweeps=5,
                           per_channel=True, feedback=True)  # fmt: skip

    whole = rounded()
    monkeypatch.setattr("lowbit.quantizer.rounding.layer._AT_ONCE", 24)
    parts = rounded()
    assert np.array_equal(whole.codes, parts.codes)
    assert np.allclose(whole.scale, parts.scale)
    assert parts.error == pytest.approx(whole.error)
    assert np.allclose(whole.mean, parts.mean)
    real = whole.codes * whole.scale[..., None]
    error = x @ (w - real[0]).T
    assert whole.error == pytest.approx((error.var(axis=0)).sum() / (x @ w.T).var(axis=0).sum(), rel=1e-3)
    assert whole.noise == pytest.approx(np.square(w - real[0]).sum(), rel=1e-5)


def test_the_method_is_the_one_that_held_out_columns_like(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((60, 8)).astype(np.float32)

    def spoilt(problem: Problem, sweeps: int) -> tuple[Array, Array]:
        codes, scale = nearest(problem)
        return -codes, scale

    monkeypatch.setattr("lowbit.quantizer.rounding.layer.descent", spoilt)
    made = round_layer(w[None].astype(float), moments(x[:45], w), moments(x[45:], w), 3, method="auto",
                       ridge=None, sweeps=5, per_channel=True, feedback=True)  # fmt: skip
    assert made.method in ("gptq", "nearest")
    assert made.error < 0.2


def test_descent_finds_what_no_single_code_improves() -> None:
    p = problem(1)
    codes, scale = descent(p, 50)
    best = p.error(codes * scale[..., None])
    for g, r, k in itertools.product(*map(range, codes.shape)):
        for code in range(p.low, p.high + 1):
            other = codes.copy()
            other[g, r, k] = code
            assert p.error(other * scale[..., None])[g, r] >= best[g, r] * (1 - 1e-3) - 1e-12


def test_descent_is_close_to_the_best_of_all_codes() -> None:
    p = problem(2, groups=1, rows=2, columns=4, bits=2)
    codes, scale = descent(p, 50)
    found = p.error(codes * scale[..., None])[0]
    for row in range(2):
        best = np.inf
        for tried in itertools.product(range(p.low, p.high + 1), repeat=4):
            q = codes.copy()
            q[0, row] = tried
            if any(tried):
                s = p.refit(q, scale)
                best = min(best, p.error(q * s[..., None])[0, row])
        assert found[row] <= 2.0 * best + 1e-9


def test_one_bit_has_two_codes() -> None:
    codes, scale = descent(problem(3, bits=1), 10)
    assert set(np.unique(codes)) == {-1, 1}
    assert np.all(scale > 0)


def test_scales_of_a_whole_layer() -> None:
    p = problem(4)
    p.per_channel = False
    assert np.unique(descent(p, 10)[1]).size == 1


# Clean-up -------------------------------------------------------------------------------------------------


def cleaned(model: onnx.ModelProto, x: Array, folder: Any) -> tuple[onnx.ModelProto, dict[str, int]]:
    source = load_model(model)
    made, steps = prepare(source, Spool(source.proto, x, folder), 1)
    assert all(step.kept for step in steps)
    assert all(step.error is None or step.error <= 1e-5 for step in steps)
    return ir.to_proto(made), {step.name: step.changes for step in steps}


def test_what_is_folded(tmp_path: Any) -> None:
    b = Builder(9)
    x = b.node("Relu", [b.batch_norm(b.conv("x", 8, bias=False))])
    x = b.node("Relu", [b.batch_norm(b.node("ConvTranspose", [x, b.random(8, 4, 2, 2, scale=0.3)], 4))])
    x = b.node("Identity", [b.node("Dropout", [x])])
    scaled = b.node("Mul", [b.conv(x, 6), b.random(6, 1, 1)])
    x = b.node("Add", [scaled, b.random(1, 6, 1, 1)])
    flat = b.node("Reshape", [b.node("GlobalAveragePool", [x]), b.constant(np.array([0, -1]))])
    gemm = b.node("Gemm", [flat, b.random(6, 5), b.random(5)])
    model = b.model(b.node("Mul", [gemm, b.random(5)]))
    made, changes = cleaned(model, images(2), tmp_path)
    left = [node.op_type for node in made.graph.node]
    assert left == ["Conv", "Relu", "ConvTranspose", "Relu", "Conv", "GlobalAveragePool", "Reshape", "Gemm"]
    assert changes["fold affine"] == 5
    assert changes["identities"] == 2


def flat(b: Builder) -> str:
    return b.node("Flatten", [b.node("GlobalAveragePool", ["x"])], 3)


def masked(b: Builder) -> str:
    """A Dropout of which somebody reads the mask."""
    y = b.node("Dropout", [b.conv("x", 4)])
    b.nodes[-1].output.append("mask")
    return b.node("Mul", [y, b.node("Cast", ["mask"], 4, to=1)])


UNFOLDED: dict[str, Callable[[Builder], str]] = {
    "Mul per pixel": lambda b: b.node("Mul", [b.conv("x", 4), b.random(1, 1, 16, 16)]),
    "Mul by infinity": lambda b: b.node("Mul", [b.conv("x", 4), b.constant(np.float32(np.inf))]),
    "Div by 0": lambda b: b.node("Div", [b.conv("x", 4), b.constant(np.zeros((4, 1, 1), np.float32))]),
    "Mul of a scaled product": lambda b: b.node(
        "Mul", [b.node("Gemm", [flat(b), b.random(3, 5), b.random(5)], alpha=0.5), b.random(5)]
    ),
    "Mul behind a bias that is computed": lambda b: b.node(
        "Mul", [b.node("Gemm", [flat(b), b.random(3, 3), flat(b)]), b.random(3)]
    ),
    "Mul behind a bias per image": lambda b: b.node(
        "Mul", [b.node("Gemm", [flat(b), b.random(3, 5), b.random(2, 5)]), b.random(5)]
    ),
    "Add of two layers": lambda b: b.node("Add", [b.conv("x", 4), b.conv("x", 4)]),
    "Dropout with a mask": masked,
}


@pytest.mark.parametrize("what", UNFOLDED)
def test_what_is_not_folded(what: str, tmp_path: Any) -> None:
    b = Builder(12)
    made, changes = cleaned(b.model(b.node("Neg", [UNFOLDED[what](b)])), images(2), tmp_path)
    assert what.split()[0] in [node.op_type for node in made.graph.node]
    assert changes["fold affine"] == 0


def test_matmul_and_add_become_gemm(tmp_path: Any) -> None:
    b = Builder(10)
    made, _ = cleaned(b.model(b.head("x")), images(2), tmp_path)
    assert [node.op_type for node in made.graph.node] == ["GlobalAveragePool", "Flatten", "Gemm"]


def test_shapes_that_are_computed_become_constants(tmp_path: Any) -> None:
    b = Builder(11, (1, 3, 16, 16))
    y = b.conv("x", 4)
    shape = b.node("Shape", [y])
    first = b.node("Gather", [shape, b.constant(np.array([0]))], 1, axis=0)
    target = b.node("Concat", [first, b.constant(np.array([-1]))], 1, axis=0)
    made, _ = cleaned(b.model(b.node("Reshape", [y, target])), images(1), tmp_path)
    assert [node.op_type for node in made.graph.node] == ["Conv", "Reshape"]


def test_a_pass_that_changes_numbers_is_undone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.quantizer import prepare as module

    def wrong(model: ir.Model, label: str) -> tuple[ir.Model, int]:
        for value in model.graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
                value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.001), name=value.name)
        return model, 1

    monkeypatch.setattr(module, "_PASSES", (("wrong", wrong), *module._PASSES))
    source = load_model(random_network(1))
    _, steps = prepare(source, Spool(source.proto, images(1), tmp_path), 1)
    assert [step.name for step in steps if not step.kept] == ["wrong"]
    assert "undone" in next(step.note for step in steps if step.name == "wrong")
