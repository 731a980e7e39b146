"""Files that are not what they claim: one clear error each, nothing written, the input untouched."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.dialects.graphs import CASES
from tests.support import all_nodes, require_native

lowbit = pytest.importorskip("lowbit")


@pytest.fixture
def model() -> onnx.ModelProto:
    require_native()
    return CASES["ort_quantizer.u8_activations_s8_weights"].build(1).model


def cli(*arguments: object, **options) -> subprocess.CompletedProcess:
    """`python -m lowbit ...` in a process of its own."""
    command = [sys.executable, "-m", "lowbit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def assert_one_clear_error(message: str, *needed: str) -> None:
    """Mentions everything needed, in a few lines, without Python's innards."""
    assert "Traceback" not in message
    assert len(message) < 2000, message
    for pattern in needed:
        assert re.search(pattern, message, re.IGNORECASE), f"{pattern!r} is not in: {message}"


def refuse(source: Path, *needed: str, command: bool = False) -> None:
    """The function (and the command) refuses `source`, says why, writes nothing and leaves it as it was."""
    before = source.read_bytes() if source.is_file() else None
    others = sorted(p.name for p in source.parent.iterdir()) if source.parent.is_dir() else None
    target = source.parent / "out.onnx"
    with pytest.raises(lowbit.LowBitError) as caught:
        lowbit.convert(source, target)
    assert_one_clear_error(str(caught.value), *needed)
    if command:
        done = cli("convert", source, "-o", target)
        assert done.returncode not in (0, 3), done
        assert done.returncode > 0, f"killed by a signal: {done}"
        assert_one_clear_error(done.stderr, *needed)
    if others is not None:
        assert sorted(p.name for p in source.parent.iterdir()) == others, "something was left behind"
    if before is not None:
        assert source.read_bytes() == before


# -- files that are no model


def test_missing_file(tmp_path) -> None:
    refuse(tmp_path / "nothing.onnx", "nothing.onnx", "not exist|no such|not found|missing", command=True)


def test_folder_instead_of_a_file(tmp_path) -> None:
    (tmp_path / "model.onnx").mkdir()
    refuse(tmp_path / "model.onnx", "model.onnx")


def test_empty_file(tmp_path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    refuse(tmp_path / "model.onnx", "model.onnx", "empty|not an? onnx|no graph|truncated", command=True)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(200),
        b"#!/bin/sh\necho this is no model\n" * 20,
        b"\x1c\x00\x00\x00ORTM" + bytes(200),
        b"\xff" * 500,
        b"\x00" * 500,
        b'{"graph": {"node": []}}',
    ],
    ids=["png", "text", "ort-format", "ones", "zeros", "json"],
)
def test_wrong_magic(tmp_path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    refuse(tmp_path / "model.onnx", "model.onnx")


def test_zip_archive(tmp_path, model) -> None:
    with zipfile.ZipFile(tmp_path / "model.onnx", "w") as archive:
        archive.writestr("model.onnx", model.SerializeToString())
    refuse(tmp_path / "model.onnx", "model.onnx")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_truncated_file(tmp_path, model, share: float) -> None:
    raw = model.SerializeToString()
    (tmp_path / "model.onnx").write_bytes(raw[: int(len(raw) * share)])
    refuse(tmp_path / "model.onnx", "model.onnx", command=share == 0.5)


def test_model_without_a_graph(tmp_path) -> None:
    empty = onnx.ModelProto(ir_version=8)
    (tmp_path / "model.onnx").write_bytes(empty.SerializeToString())
    refuse(tmp_path / "model.onnx", "model.onnx")


# -- models that ONNX does not allow


def _save(tmp_path: Path, model: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _node(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.op_type == op)


def _initializer(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def _weight(model: onnx.ModelProto) -> TensorProto:
    return next(t for t in model.graph.initializer if len(t.dims) == 4)


def test_unknown_operator(tmp_path, model) -> None:
    _node(model, "Conv").op_type = "Convolve"
    refuse(_save(tmp_path, model), "Convolve", command=True)


def test_unknown_opset(tmp_path, model) -> None:
    model.opset_import[0].version = 999
    refuse(_save(tmp_path, model), "999", command=True)


def test_no_opset_at_all(tmp_path, model) -> None:
    del model.opset_import[:]
    refuse(_save(tmp_path, model), "opset")


def test_operator_of_an_unknown_domain_stays(model) -> None:
    """Somebody else's custom operator is no error: it is left alone with a reason, the rest is converted."""
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    graph = model.graph
    graph.node.append(
        helper.make_node("Sharpen", [graph.output[0].name], ["sharp"], "sharpen", domain="com.example")
    )
    graph.output.append(helper.make_tensor_value_info("sharp", TensorProto.FLOAT, [None] * 4))
    result = lowbit.convert(model)
    kept = next(n for n in result.report.kept if n.name == "sharpen")
    assert kept.reason
    assert not any(n.op_type == "Conv" for n in result.model.graph.node)


def test_weight_shorter_than_its_shape(tmp_path, model) -> None:
    tensor = _weight(model)
    tensor.raw_data = tensor.raw_data[:-7]
    refuse(_save(tmp_path, model), re.escape(tensor.name))


def test_shape_whose_product_overflows(tmp_path, model) -> None:
    tensor = _weight(model)
    tensor.dims[:] = [2**31, 2**31, 4, 4]
    refuse(_save(tmp_path, model), re.escape(tensor.name))


def test_negative_dimension(tmp_path, model) -> None:
    tensor = _weight(model)
    tensor.dims[0] = -tensor.dims[0]
    refuse(_save(tmp_path, model), re.escape(tensor.name))


def test_node_reads_a_tensor_nobody_makes(tmp_path, model) -> None:
    _node(model, "Conv").input[0] = "nowhere"
    refuse(_save(tmp_path, model), "nowhere")


def test_cycle(tmp_path, model) -> None:
    nodes = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    nodes[0].input[0] = nodes[1].output[0]
    refuse(_save(tmp_path, model))


def test_two_nodes_make_one_tensor(tmp_path, model) -> None:
    model.graph.node.append(model.graph.node[0])
    refuse(_save(tmp_path, model))


# -- quantization that means nothing: refused, or left alone with a reason that names it


def _refuse_or_leave(model: onnx.ModelProto, pattern: str) -> None:
    """No silent acceptance: an error, or a node left in float, whose text matches."""
    try:
        result = lowbit.convert(model)
    except lowbit.LowBitError as error:
        assert_one_clear_error(str(error), pattern)
        return
    assert any(n.op_type == "Conv" for n in all_nodes(result.model.graph)), "converted in silence"
    told = [n.reason for n in result.report.kept if n.reason]
    assert any(re.search(pattern, reason, re.IGNORECASE) for reason in told), told


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["activation", "weight", "output"])
def test_bad_scale(model, which: str, value: float) -> None:
    conv = _node(model, "Conv")
    producers = {o: n for n in model.graph.node for o in n.output}
    consumer = next(n for n in model.graph.node if conv.output[0] in n.input)
    node = {"activation": producers[conv.input[0]], "weight": producers[conv.input[1]], "output": consumer}[
        which
    ]
    tensor = _initializer(model, node.input[1])
    scale = numpy_helper.to_array(tensor).copy()
    scale.reshape(-1)[-1] = value
    tensor.CopyFrom(numpy_helper.from_array(scale, tensor.name))
    _refuse_or_leave(model, "scale")


def test_zero_point_of_another_type(model) -> None:
    conv = _node(model, "Conv")
    dq = next(n for n in model.graph.node if n.output[0] == conv.input[0])
    # A tensor of its own: QuantizeLinear shares the other, and changed there as well it would be consistent.
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(5, np.int8), "other_zero_point"))
    dq.input[2] = "other_zero_point"
    _refuse_or_leave(model, r"zero.?point|type")


def test_zero_points_of_another_count(model) -> None:
    conv = _node(model, "Conv")
    dq = next(n for n in model.graph.node if n.output[0] == conv.input[1])
    tensor = _initializer(model, dq.input[2])
    tensor.CopyFrom(numpy_helper.from_array(np.zeros(3, np.int8), tensor.name))
    _refuse_or_leave(model, r"zero.?point|shape|scale")


def test_scale_of_another_count(model) -> None:
    conv = _node(model, "Conv")
    dq = next(n for n in model.graph.node if n.output[0] == conv.input[1])
    tensor = _initializer(model, dq.input[1])
    tensor.CopyFrom(numpy_helper.from_array(np.full(3, 0.1, np.float32), tensor.name))
    _refuse_or_leave(model, r"scale|shape")


def test_clip_with_crossed_bounds() -> None:
    """A QCDQ Clip whose minimum lies above its maximum describes no bit width."""
    model = CASES["exporters.brevitas_w4a4"].build(1).model
    clip = next(n for n in model.graph.node if n.op_type == "Clip")
    clip.input[1], clip.input[2] = clip.input[2], clip.input[1]
    try:
        lowbit.convert(model)
    except lowbit.LowBitError as error:
        assert_one_clear_error(str(error))


def test_impossible_window(model) -> None:
    """A kernel larger than the padded image."""
    attribute = next(
        a for n in model.graph.node if n.op_type == "Conv" for a in n.attribute if a.name == "pads"
    )
    attribute.ints[:] = [-9, -9, -9, -9]
    try:
        lowbit.convert(model)
    except lowbit.LowBitError as error:
        assert_one_clear_error(str(error))


def test_native_messages_keep_their_numbers() -> None:
    """A message says what it got, though onnx brings a C++ library of its own into the process first."""
    require_native()
    script = """
import onnx
import lowbit._native as native
attributes = {"kernel_shape": [3, 3], "pads": [2**31 - 1] * 4, "in_channels": 3, "out_channels": 4}
try:
    native.infer_output("LowBitConv", attributes, [[1, 8, 8, 3]] + [None] * 19, [True] * 6 + [False] * 14)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert re.search(r"pads.* 2147483647, expected", done.stdout), done.stdout
