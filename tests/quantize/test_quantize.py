"""`lowbit.quantize` as a whole: what it decides, what it writes, what it refuses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from lowbit.errors import LowBitError, ModelError, OutputError
from lowbit.quantizer.report import QuantizeReport
from onnxruntime.quantization import CalibrationDataReader

from tests.quantize.networks import Builder, images, inverted, random_network, residual
from tests.support import session_options

Array = npt.NDArray[Any]


def quantize(model: onnx.ModelProto, data: Any = None, **more: Any) -> Any:
    more.setdefault("bits", "w4a4")
    return lowbit.quantize(model, images() if data is None else data, threads=1, **more)


@functools.cache
def plain() -> Any:
    """What most tests of a result look at, quantized once; none of them may change it."""
    return quantize(residual(), convert_to=True)


def run(model: onnx.ModelProto, x: Array, *, optimize: bool = True) -> Array:
    options = session_options(optimize=True)
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def decided(report: QuantizeReport, rule: str) -> set[str]:
    return {decision.target for decision in report.decisions if decision.rule == rule}


def sqnr(exact: Array, other: Array) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - other).sum()))


# What it makes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(9))
def test_random_networks_quantize_load_and_convert(seed: int) -> None:
    model = random_network(seed)
    bits = ("w8a8", "w4a4", "w2a3")[seed % 3]
    result = quantize(model, images(6), bits=bits, uniform=seed == 7, convert_to=True)
    assert result.report.converted
    x = images(3, seed=8)
    stock = run(result.model, x)
    ours = lowbit.session(result.converted, threads=1).run(None, {"x": x})[0]
    assert np.abs(stock - ours).max() <= 0.05 * np.abs(stock).max()
    assert all(result.report.outputs.values())


def test_error_feedback_beats_rounding_to_nearest() -> None:
    for model in (residual(),):
        x = images(40, seed=77)
        exact = run(model, x)
        centre = exact.mean(axis=0)
        made = {
            name: quantize(model, images(30), bits="w3a8", disable_rules=rules, rounding=rounding)
            for name, rounding, rules in (
                ("all", "auto", ()),
                ("nearest", "nearest", ("bias", "feedback")),
            )
        }
        quality = {name: sqnr(exact - centre, run(r.model, x) - centre) for name, r in made.items()}
        assert quality["all"] > quality["nearest"] + 3


@pytest.mark.parametrize("rounding", ["nearest", "gptq", "descent", "adaround", "auto"])
def test_every_way_of_rounding(rounding: str) -> None:
    report = quantize(residual(), rounding=rounding, bits="w3a8").report
    assert {layer.rounding for layer in report.layers} == {"descent" if rounding == "auto" else rounding}
    assert all(layer.error is not None and layer.error < 0.2 for layer in report.layers)


@pytest.mark.parametrize("method", ["mse", "minmax", "percentile", "entropy"])
def test_every_way_to_choose_ranges(method: str) -> None:
    report = quantize(residual(), calibration_method=method).report
    assert {tensor.method for tensor in report.tensors} == {method}
    for tensor in report.tensors:
        assert tensor.high <= max(tensor.seen_high, -tensor.seen_low) * 1.01
    if method == "minmax":
        assert all(tensor.high >= tensor.seen_high * 0.99 for tensor in report.tensors)


def test_one_scale_for_all_weights_of_a_layer() -> None:
    result = quantize(residual(), per_channel=False, bits="w8a8")
    scales = {t.name: list(t.dims) for t in result.model.graph.initializer if t.name.endswith("weight.scale")}
    assert scales
    assert all(dims == [] for dims in scales.values())


def test_activation_scales_are_scalars() -> None:
    model = plain().model
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".scale") and ".weight" not in tensor.name and ".bias" not in tensor.name:
            assert list(tensor.dims) == []


def test_small_weight_tensors() -> None:
    result = quantize(residual(), bits="w4a8", sub_byte=True)
    kinds = {t.data_type for t in result.model.graph.initializer}
    assert onnx.TensorProto.INT4 in kinds
    assert result.report.converted
    x = images(3)
    plain = quantize(residual(), bits="w4a8")
    assert np.allclose(run(result.model, x, optimize=False), run(plain.model, x, optimize=False), atol=1e-5)


def test_raw_images_in() -> None:
    b = Builder(3, ("N", 16, 16, 3))
    x = b.node("Transpose", ["x"], 3, perm=[0, 3, 1, 2])
    x = b.node("Mul", [b.node("Sub", [x, b.random(3, 1, 1)]), b.constant(np.array(1 / 64, np.float32))])
    model = b.model(b.head(b.node("Relu", [b.conv(b.node("Relu", [b.conv(x, 8)]), 8)])))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3))
    floats = quantize(model, pixels.astype(np.float32), bits="w8a8")
    bytes_in = quantize(model, pixels.astype(np.float32), bits="w8a8", io="uint8", convert_to=True)
    assert bytes_in.model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    exact = run(model, pixels.astype(np.float32))
    ours = lowbit.session(bytes_in.converted, threads=1).run(None, {"x": pixels.astype(np.uint8)})[0]
    assert sqnr(exact, ours) > 30
    assert sqnr(exact, run(floats.model, pixels.astype(np.float32))) > 30
    with pytest.raises(LowBitError, match=r"io uint8: input 'x' is fed .*expected raw pixels"):
        quantize(model, pixels.astype(np.float32) / 255, io="uint8")


# Rules ----------------------------------------------------------------------------------------------------


def test_rules_of_a_residual_network() -> None:
    report = plain().report
    assert decided(report, "residual") == {"t6", "t11", "t12"}
    assert "first layer: weights at 8 bits" in {d.decision for d in report.decisions if d.rule == "ends"}
    assert [layer.weight_bits for layer in report.layers] == [8, 4, 4, 4, 4, 4, 8]
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert tensors["t11"].bits == 8  # a bare convolution beside the one that is fused
    assert "t12" not in tensors
    assert all(t.zero_point == 0 for t in tensors.values() if t.bits < 8)
    assert list(report.kept_float.values()) == ["lowbit has no integer form of Softmax"]


def test_rules_of_inverted_bottlenecks() -> None:
    report = quantize(inverted()).report
    depthwise = [layer for layer in report.layers if layer.shape[1:] == [1, 3, 3]]
    assert depthwise
    assert all(layer.weight_bits == 8 for layer in depthwise)
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert all(tensors[layer.input].per_channel for layer in depthwise if tensors[layer.input].bits == 4)
    assert any(tensors[layer.input].per_channel for layer in depthwise)
    assert all(t.bits == 8 for t in tensors.values() if t.signed)


def test_uniform_means_every_tensor() -> None:
    report = quantize(inverted(), uniform=True).report
    assert {layer.weight_bits for layer in report.layers} == {4}
    assert {tensor.bits for tensor in report.tensors} == {4}


@pytest.mark.parametrize("rule", ["residual", "depthwise", "trunk", "ends", "pool", "unsigned", "channels"])
def test_a_rule_can_be_turned_off(rule: str) -> None:
    report = quantize(inverted(), disable_rules=(rule,)).report
    assert not decided(report, rule)


@pytest.mark.parametrize(("factor", "shared"), [(2.0, True), (20.0, False)])
def test_operands_of_a_concat_share_a_grid_of_like_ranges(factor: float, shared: bool) -> None:
    b = Builder(1)
    x = b.node("Relu", [b.conv("x", 8)])
    weak = b.node("Relu", [b.conv(x, 4)])
    strong = b.node("Relu", [b.conv(x, 4)])
    for tensor in b.tensors[-2:]:
        array = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    joined = b.node("Concat", [weak, strong], 8, axis=1)
    report = quantize(b.model(b.head(b.node("Relu", [b.conv(joined, 8)])))).report
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert (set(tensors[joined].shares) == {weak, strong}) == shared


def test_overrides_and_exclusions() -> None:
    model = residual()
    names = [layer.node for layer in plain().report.layers]
    report = quantize(
        model,
        overrides={names[1]: {"weight_bits": 6, "rounding": "gptq"}, ".*": {"input_bits": 8}},
        nodes_to_exclude=(names[3],),
    ).report
    layers = {layer.node: layer for layer in report.layers}
    assert layers[names[1]].weight_bits == 6
    assert layers[names[1]].rounding == "gptq"
    assert {layer.input_bits for layer in layers.values()} == {8}
    assert names[3] not in layers
    assert "nodes_to_exclude" in report.kept_float[names[3]]
    only = quantize(model, nodes_to_quantize=(names[2],)).report
    assert [layer.node for layer in only.layers] == [names[2]]


# The same again -------------------------------------------------------------------------------------------


def test_same_bytes_again_and_from_the_written_configuration(tmp_path: Path) -> None:
    first = quantize(residual(), output=tmp_path / "a.onnx")
    written = json.loads((tmp_path / "a.yaml").read_text())
    lowbit.quantize(residual(), images(), tmp_path / "b.onnx", config=written, threads=1)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert json.loads(json.dumps(first.report.to_dict(), allow_nan=False)) == first.report.to_dict()


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    state = tmp_path / "state"
    whole = quantize(residual(), output=tmp_path / "whole.onnx")

    def interrupt(done: int, total: int, text: str) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(residual(), output=tmp_path / "again.onnx", state=state, progress=interrupt)
    assert not (tmp_path / "again.onnx").exists()
    saved = list(state.rglob("*.npz"))
    assert len(saved) >= 3
    saved[0].write_bytes(b"damaged")
    steps: list[int] = []
    again = quantize(
        residual(), output=tmp_path / "again.onnx", state=state, progress=lambda done, *_: steps.append(done)
    )
    assert len(steps) < len(whole.report.layers)
    assert (tmp_path / "whole.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert again.report.layers[2].node == whole.report.layers[2].node
    assert not state.exists()


def test_files_on_the_way_do_not_change_the_result() -> None:
    kept = quantize(inverted())
    none = quantize(inverted(), cache_bytes=0)
    assert kept.model.SerializeToString() == none.model.SerializeToString()


# Data -----------------------------------------------------------------------------------------------------


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, array: Array) -> None:
        self._rows: Iterator[Array] = iter(array)

    def get_next(self) -> dict[str, Array] | None:
        row = next(self._rows, None)
        return None if row is None else {"x": row[None]}


def test_all_forms_of_data_give_one_model() -> None:
    x = images(6)
    forms: list[Any] = [
        [x[:4], x[4:]],
        iter([{"x": x[i : i + 1]} for i in range(6)]),
        _Reader(x),
        (row for row in x),
        {"x": x},
    ]
    model = _with_weights(lambda array: array)
    expected = quantize(model, x).report
    for form in forms:
        report = quantize(model, form).report
        assert report.images == 6
        for ours, theirs in zip(report.layers, expected.layers, strict=True):
            assert ours.error == pytest.approx(theirs.error, rel=0.3)


def test_a_fixed_batch_and_a_ragged_last_one() -> None:
    b = Builder(2, (4, 3, 16, 16))
    model = b.model(b.head(b.node("Relu", [b.conv("x", 8)])))
    report = quantize(model, images(6)).report
    assert any("repeated 2 times" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty"),
        (np.zeros((0, 3, 16, 16), np.float32), "empty"),
        (np.zeros((2, 4, 16, 16), np.float32), r"has the shape \[2, 4, 16, 16\], the model reads"),
        (np.full((2, 3, 16, 16), np.nan, np.float32), "NaN or infinity"),
        ([{"y": np.zeros((1, 3, 16, 16), np.float32)}], "expected arrays for x, found y"),
        ([np.array([["a"]])], "expected float32"),
        ("images", "calibration data are str"),
        (7, "calibration data are int"),
    ],
)
def test_unusable_data(data: Any, message: str) -> None:
    with pytest.raises(LowBitError, match=message):
        quantize(residual(), data)


def test_one_image_is_enough_to_run() -> None:
    report = quantize(residual(), images(1)).report
    assert report.converted
    assert any("more images would help" in warning for warning in report.warnings)


def _with_weights(change: Any, index: int = 2) -> onnx.ModelProto:
    """Two convolutions, one tensor of which is changed."""
    b = Builder(4)
    model = b.model(b.head(b.node("Relu", [b.conv(b.node("Relu", [b.conv("x", 8)]), 8)])))
    tensor = model.graph.initializer[index]
    array = np.array(onnx.numpy_helper.to_array(tensor))
    tensor.CopyFrom(onnx.numpy_helper.from_array(change(array).astype(np.float32), tensor.name))
    return model


def test_weights_of_every_kind() -> None:
    def row(array: Array) -> Array:
        array[3] = 0
        return array

    for change in (lambda a: a * 0, row, lambda a: a * 1e-12, lambda a: a * 1e6):
        result = quantize(_with_weights(change))
        assert result.report.converted
        assert np.all(np.isfinite(run(result.model, images(2))))


def test_inputs_that_hardly_differ_from_their_mean() -> None:
    x = np.float32(5000) + images(3) * np.float32(0.01)
    result = quantize(residual(), x)
    assert np.all(np.isfinite(run(result.model, x)))


def test_a_relu_that_is_always_0() -> None:
    result = quantize(_with_weights(lambda a: a * 0 - 100, index=1))
    assert any("is always 0" in warning for warning in result.report.warnings)


def test_one_huge_value_is_told_and_percentiles_leave_it_out() -> None:
    x = images(20)
    clean = quantize(residual(), x, bits="w8a4").report
    x[0, 0, 0, 0] = 1e4
    report = quantize(residual(), x, bits="w8a4").report
    assert any("a few images may decide its range" in warning for warning in report.warnings)
    report = quantize(residual(), x, bits="w8a4", calibration_method="percentile", percentile=99.0).report
    # Behind the global pool there is one value per image and channel: no percentile leaves that out.
    for ours, theirs in list(zip(report.tensors, clean.tensors, strict=True))[:4]:
        assert ours.scale < 3 * theirs.scale


def test_activations_that_are_no_numbers() -> None:
    b = Builder(5)
    x = b.node("Relu", [b.conv("x", 8)])
    model = b.model(b.head(b.conv(b.node("Reciprocal", [x]), 8)))
    with pytest.raises(ModelError, match="is NaN or infinite for a calibration image"):
        quantize(model)


# Refusals -------------------------------------------------------------------------------------------------


def test_a_quantized_model_is_refused() -> None:
    made = plain()
    with pytest.raises(LowBitError, match=r"is quantized already.*lowbit convert"):
        quantize(made.model)
    with pytest.raises(LowBitError, match="made by lowbit"):
        quantize(made.converted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": "w9a8"}, "expected w<1..8>a<1..8>"),
        ({"calibration_method": "max"}, "calibration_method: expected one of mse"),
        ({"rounding": "best"}, "rounding: expected one of"),
        ({"disable_rules": ("rule",)}, "disable_rules: expected one of"),
        ({"overrides": {"(": {"weight_bits": 4}}}, "is no regular expression"),
        ({"overrides": {"a": {"weight_bits": 9}}}, "weight_bits must be 1 to 8"),
        ({"overrides": {"a": {"size": 9}}}, "expected weight_bits, input_bits or rounding"),
        ({"speed": 1}, "unknown entry 'speed'"),
        ({"uniform": 3}, "must be true or false"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LowBitError, match=message):
        quantize(residual(), **options)


def test_a_model_without_layers() -> None:
    b = Builder(6)
    with pytest.raises(LowBitError, match="nothing to quantize"):
        quantize(b.model(b.node("Flatten", [b.node("Relu", ["x"])])))


def test_outputs_are_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "q.onnx"
    output.write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists already"):
        quantize(residual(), output=output)

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OutputError, match="No space left"):
            quantize(residual(), output=output, overwrite=True)
    assert output.read_bytes() == b"mine"
