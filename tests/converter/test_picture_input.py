"""``convert --preprocess``: a model prepares pictures itself; its network reads the codes that eval feeds."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support import require_native
from tests.tools.conftest import DIGITS, qdq_conv

require_native()
import lowbit  # noqa: E402
from lowbit.errors import LowBitError, ModelError  # noqa: E402
from lowbit.proto.feeds import model_inputs  # noqa: E402
from lowbit.proto.preprocess import make_preprocess  # noqa: E402

NORMALIZED = "scale=1/255,mean=0.485;0.456;0.406,std=0.229;0.224;0.225"
SPECS = [
    "resize=8x8,scale=1/32",
    f"resize=10,crop=8,{NORMALIZED}",
    f"resize=11x9,crop=8,interpolation=bicubic,order=bgr,{NORMALIZED}",
    "letterbox=8,fill=114,scale=1/20,mean=3",
    "letterbox=8,place=corner,interpolation=nearest",
]
SIZES = [(8, 8), (30, 20), (9, 41), (64, 48)]


@pytest.mark.parametrize("device", ["cpu-ops", "cpu-ep"])
@pytest.mark.parametrize("spec", SPECS)
def test_gives_the_bits_of_prepared_images(spec: str, device: str) -> None:
    source = qdq_conv()
    pictures = lowbit.session(lowbit.convert(source, preprocess=spec), device=device)
    prepared = lowbit.session(lowbit.convert(source), device=device)
    prepare = make_preprocess(spec, model_inputs(source))
    rng = np.random.default_rng(0)
    for size in SIZES:
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        expected = prepared.run(None, {"x": prepare(image, "image")["x"][None]})[0]
        np.testing.assert_array_equal(pictures.run(None, {"x": image[None]})[0], expected, err_msg=str(size))


def test_the_new_input_is_stated_and_told() -> None:
    result = lowbit.convert(qdq_conv(dynamic=True), preprocess="resize=12,crop=8,scale=1/32")
    (entrance,) = result.model.graph.input
    tensor = entrance.type.tensor_type
    assert tensor.elem_type == TensorProto.UINT8
    dims = [dim.dim_value or dim.dim_param for dim in tensor.shape.dim]
    assert dims == ["N", "x_height", "x_width", 3]
    assert any("uint8 [N, height, width, 3]" in warning for warning in result.report.warnings)
    told = {entry.key: entry.value for entry in result.model.metadata_props}
    assert json.loads(told["lowbit.options"])["preprocess"] == "resize=12,crop=8,scale=1/32"
    assert [node.op_type for node in result.model.graph.node].count("LowBitImage") == 1
    read = {name for node in result.model.graph.node for name in node.input}
    assert {tensor.name for tensor in result.model.graph.initializer} <= read
    lowbit.convert(result.model)  # a second time there is nothing to do, and nothing fails


@pytest.mark.parametrize("channels", [1, 3])
def test_a_model_of_one_channel_takes_both_kinds_of_pictures(channels: int) -> None:
    source, spec = DIGITS / "digits_w8a8.onnx", "letterbox=8,fill=9,scale=1/16"
    prepare = make_preprocess(spec, model_inputs(onnx.load(source)))
    pictures, prepared = (
        lowbit.session(lowbit.convert(source, preprocess=spec)),
        lowbit.session(lowbit.convert(source)),
    )
    image = np.random.default_rng(2).integers(0, 256, (31, 20, channels), dtype=np.uint8)
    (name,) = [value.name for value in prepared.get_inputs()]
    expected = prepared.run(None, {name: prepare(image, "image")[name][None]})[0]
    np.testing.assert_array_equal(pictures.run(None, {name: image[None]})[0], expected)


def test_codes_that_the_model_takes_are_made_of_pixels() -> None:
    """An input of bytes, planes first, that only moves before it is read."""
    model = qdq_conv()
    del model.graph.node[0]
    model.graph.node[0].input[0] = "x"
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    prepare = make_preprocess("resize=8x8,order=bgr", model_inputs(model))
    pictures = lowbit.session(lowbit.convert(model, preprocess="resize=8x8,order=bgr"))
    image = np.random.default_rng(1).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    expected = lowbit.session(lowbit.convert(model)).run(None, {"x": prepare(image, "image")["x"][None]})[0]
    np.testing.assert_array_equal(pictures.run(None, {"x": image[None]})[0], expected)


def test_the_command_writes_the_same_model(tmp_path) -> None:
    from click.testing import CliRunner
    from lowbit.cli import cli

    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(qdq_conv(), source)
    arguments = ["convert", str(source), "-o", str(target), "--preprocess", "resize=8x8,scale=1/32"]
    run = CliRunner().invoke(cli, arguments)
    assert run.exit_code == 0, run.output
    expected = lowbit.convert(source, preprocess="resize=8x8,scale=1/32").model
    assert onnx.load(target).graph == expected.graph


def test_a_new_size_is_not_planned_for_the_network(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    result = lowbit.convert(qdq_conv(), preprocess="resize=8x8,scale=1/32")
    session = lowbit.session(result, device="cpu-ep")
    capfd.readouterr()
    for size in SIZES:
        session.run(None, {"x": np.zeros((1, *size, 3), np.uint8)})
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    planned = [[step["kernel"] for step in json.loads(line)["steps"]] for line in lines]
    of_pictures = [kernels for kernels in planned if any("image" in kernel for kernel in kernels)]
    assert all(len(kernels) == 1 for kernels in of_pictures)
    assert (len(of_pictures), len(planned)) == (len(SIZES), len(SIZES) + 1)


def float_network() -> onnx.ModelProto:
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 8, 8]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("model", "spec", "error", "message"),
    [
        (float_network(), "resize=8x8", ModelError, "a quantizer .* reads .* input 'x', found Relu 'relu'"),
        (qdq_conv(), "resize=9", LowBitError, "images of many sizes, input 'x' takes 8x8; add crop="),
        (qdq_conv(), "resize=9x8", LowBitError, "images of 9x8, input 'x' takes 8x8"),
        (qdq_conv(), "resize=7,crop=8", LowBitError, "crop= is larger than what resize= makes"),
        (qdq_conv(), "letterbox=8,crop=8", LowBitError, "leave out resize and crop"),
        (qdq_conv(), "fill=256", LowBitError, "fill expects a number from 0 to 255, got '256'"),
        (qdq_conv(), "prepare.py:images", LowBitError, "a function cannot become a node"),
        (qdq_conv(), "resize=8x8,order=gray", LowBitError, "make 1 channels, input 'x' takes 3"),
    ],
)
def test_what_cannot_be_is_one_clear_error(model, spec, error, message) -> None:
    with pytest.raises(error, match=message):
        lowbit.convert(model, preprocess=spec)


def test_pictures_smaller_than_the_crop_are_an_error_of_the_run() -> None:
    session = lowbit.session(lowbit.convert(qdq_conv(), preprocess="crop=8"))
    with pytest.raises(Exception, match="the crop of 8x8 is larger than the picture, which is 7x9; resize"):
        session.run(None, {"x": np.zeros((1, 7, 9, 3), np.uint8)})


def test_verify_says_what_to_compare_instead() -> None:
    source = qdq_conv()
    with pytest.raises(ModelError, match=r"takes pictures at its input 'x'; verify .* without --preprocess"):
        lowbit.verify(lowbit.convert(source, preprocess="resize=8x8"), source)
