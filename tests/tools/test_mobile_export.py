"""``lowbit export --to mobile``: a folder that is whole, is described, and computes what the model does."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from lowbit.deploy import mobile
from lowbit.deploy.operators import forms_of
from lowbit.deploy.ort_file import _narrow_tensors
from lowbit.proto.feeds import random_feeds
from onnx import TensorProto, helper, numpy_helper

from tests.support import lowbit_library, require_native
from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run, run_json, save

require_native()

DIGITS = Path(__file__).resolve().parents[2] / "models" / "digits"


@pytest.fixture(scope="module")
def exported(converted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mobile") / "digits"
    return folder, mobile.export_mobile(converted, folder)


def open_ort(path: Path, *, replay: bool) -> ort.InferenceSession:
    """As an app opens it: the library, the format by name, the file's bytes."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(lowbit_library())
    options.add_session_config_entry("session.load_model_format", "ORT")
    if replay:
        options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    return ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---- what the folder holds


@pytest.mark.parametrize("bits", ["w8a8", "w4a4", "w2a2", "w1a2"])
@pytest.mark.parametrize("style", ["fixed", "runtime"])
def test_both_files_compute_what_the_model_computes(bits, style, tmp_path):
    source = tmp_path / "model.onnx"
    lowbit.convert(DIGITS / f"digits_{bits}.onnx", source)
    export = mobile.export_mobile(source, tmp_path / "app")
    (file,) = [file for file in export.files if file.style == style]
    feed = random_feeds(onnx.load(source), 3, {"input": [5, 1, 8, 8]})
    expected = lowbit.session(source).run(None, feed)
    for replay in (False, True):
        got = open_ort(tmp_path / "app" / file.name, replay=replay).run(None, feed)
        assert all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))


def test_the_manifest_says_what_is_there(exported, converted):
    folder, export = exported
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == export.manifest()
    listed = {file["name"]: file for file in manifest["files"]}
    assert {path.name for path in folder.iterdir()} == {*listed, "manifest.json"}
    for name, file in listed.items():
        data = (folder / name).read_bytes()
        assert file["bytes"] == len(data)
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    assert {file.get("style") for file in manifest["files"]} == {"fixed", "runtime", None}
    model = onnx.load(converted)
    assert manifest["inputs"] == [{"name": "input", "type": "float", "shape": ["N", 1, 8, 8]}]
    assert manifest["source"]["sha256"] == hashlib.sha256(Path(converted).read_bytes()).hexdigest()
    lowbit_nodes = [node.op_type for node in model.graph.node if node.domain == "ai.lowbit"]
    assert sum(manifest["operators"].values()) == len(lowbit_nodes)
    assert manifest["verified_elements"] == 10


def test_metadata_of_the_user_survives_in_the_ort_file(converted, tmp_path):
    model = onnx.load(converted)
    helper.set_model_props(model, {**{e.key: e.value for e in model.metadata_props}, "labels": "0..9"})
    mobile.export_mobile(model, tmp_path / "app")
    (path,) = (p for p in (tmp_path / "app").glob("*.ort") if "runtime" not in p.name)
    kept = open_ort(path, replay=False).get_modelmeta().custom_metadata_map
    assert kept["labels"] == "0..9"
    assert "lowbit.provenance" not in kept


def test_onnxruntime_reads_the_operators_config(exported):
    from onnxruntime.tools.reduced_build_config_parser import parse_config

    folder, export = exported
    needed, _ = parse_config(str(folder / "required_operators.config"), enable_type_reduction=True)
    assert needed["ai.lowbit"][1] == set(export.operators)


def test_what_stays_with_onnxruntime_is_in_the_config_with_its_types(tmp_path):
    from onnxruntime.tools.reduced_build_config_parser import parse_config

    model = qdq_conv()
    model.graph.node.append(helper.make_node("Softmax", ["y"], ["p"], "softmax", axis=1))
    model.graph.output[0].name = "p"
    lowbit.convert(model, tmp_path / "model.onnx")
    mobile.export_mobile(tmp_path / "model.onnx", tmp_path / "app")
    config = tmp_path / "app" / "required_operators.config"
    assert 'Softmax{"inputs": {"0": ["float"]}}' in config.read_text()
    needed, types = parse_config(str(config), enable_type_reduction=True)
    assert "Softmax" in {op for ops in needed["ai.onnx"].values() for op in ops}
    assert any("Softmax" in line for line in types.get_cpp_entries())


def test_forms_say_what_kernels_must_compute(exported):
    folder, _ = exported
    line = next(
        line
        for line in (folder / "required_operators.config").read_text().splitlines()
        if line.startswith("ai.lowbit;")
    )
    forms = json.loads(line[line.index("LowBitConv{") + len("LowBitConv") : line.index("}") + 1])["forms"]
    assert "u8 s8 3x3 stride 1x1 requantize" in forms
    assert "u8 s8 3x3 stride 1x1 depthwise requantize" in forms
    assert any(form.endswith("residual") for form in forms)


def test_forms_of_binary_nodes_and_of_subgraphs():
    def gemm(**attributes):
        return helper.make_node(
            "APGemm", ["x", "w", "s", "z", "s", "z"], ["y"], domain="ai.lowbit", **attributes
        )

    bipolar = gemm(x_bits=1, x_encoding="bipolar", w_bits=1, w_encoding="bipolar", epilogue="float")
    inner = helper.make_graph([gemm(x_bits=2, w_bits=3, w_encoding="signed")], "then", [], [])
    branch = helper.make_node("If", ["c"], ["r"], then_branch=inner, else_branch=inner)
    model = helper.make_model(helper.make_graph([bipolar, branch], "g", [], []))
    assert forms_of(model) == {"APGemm": ["b1 b1 1 stride 1 float", "u2 s3 1 stride 1 requantize"]}


def test_the_commands_name_the_files(exported):
    folder, _ = exported
    text = (folder / "BUILD.md").read_text()
    for expected in (
        "--minimal_build custom_ops",
        "--include_ops_by_config /path/to/required_operators.config",
        "--enable_reduced_operator_type_support",
        "--disable_ml_ops",
        "LOWBIT_OPS_CONFIG",
    ):
        assert expected in text
    assert "digits_lowbit.ort" in text


def test_logging_stays_as_it_was(converted, tmp_path, capfd):
    before = list(logging.getLogger().handlers), logging.getLogger().level, logging.root.manager.disable
    mobile.export_mobile(converted, tmp_path / "app")
    assert (
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        logging.root.manager.disable,
    ) == before
    assert capfd.readouterr() == ("", "")


# ---- the command


def test_the_command_says_what_it_wrote(converted, tmp_path):
    summary = run_json("export", converted, "--to", "mobile", "-o", tmp_path / "app")
    assert summary["verified_elements"] == 10
    result = run("export", converted, "--to", "mobile", "-o", tmp_path / "app", "--overwrite")
    assert "digits_lowbit.with_runtime_opt.ort" in result.stdout
    assert "required_operators.config" in result.stdout


def test_sizes_of_symbolic_dims_are_asked_for(tmp_path):
    lowbit.convert(qdq_conv(dynamic=True), tmp_path / "model.onnx")
    arguments = ("export", tmp_path / "model.onnx", "--to", "mobile", "-o", tmp_path / "app")
    assert "--shape x=" in run(*arguments, code=2).stderr
    assert "the model's inputs are x" in run(*arguments, "--shape", "z=1,3,8,8", code=2).stderr
    assert not (tmp_path / "app").exists()
    run(*arguments, "--shape", "x=1,3,8,8")


# ---- what is refused, and that nothing is left behind


def test_only_lowbit_models(source, tmp_path):
    result = run("export", source, "--to", "mobile", "-o", tmp_path / "app", code=2)
    assert "lowbit convert" in result.stderr
    run("export", source, "--to", "mobile", "--sub-byte", "-o", tmp_path / "app", code=2)
    assert list(tmp_path.iterdir()) == []


def test_elements_below_8_bits_are_refused_by_name(converted, tmp_path):
    model = onnx.load(converted)
    narrow = helper.make_tensor("table", TensorProto.INT4, [4], [1, -2, 3, -4])
    scale = numpy_helper.from_array(np.float32(0.5), "table_scale")
    model.graph.initializer.extend([narrow, scale])
    model.graph.node.append(
        helper.make_node("DequantizeLinear", ["table", "table_scale"], ["values"], "dequantize_table")
    )
    model.graph.output.append(helper.make_tensor_value_info("values", TensorProto.FLOAT, [4]))
    next(entry for entry in model.opset_import if entry.domain == "").version = 21
    model.ir_version = 10
    result = run(
        "export", save(model, tmp_path / "narrow.onnx"), "--to", "mobile", "-o", tmp_path / "app", code=3
    )
    assert "INT4 'table', read by DequantizeLinear 'dequantize_table'" in result.stderr
    assert not (tmp_path / "app").exists()


def test_narrow_elements_are_found_wherever_they_are():
    """In attributes, in subgraphs, and as what a node computes."""
    narrow = helper.make_tensor("narrow", TensorProto.INT4, [2], [1, 2])
    inner = helper.make_graph(
        [helper.make_node("Cast", ["narrow"], ["z"], to=TensorProto.FLOAT)], "then", [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])], [narrow],
    )  # fmt: skip
    nodes = [
        helper.make_node("Constant", [], ["c"], "constant", value=narrow),
        helper.make_node("Cast", ["x"], ["q"], "cast", to=TensorProto.INT4),
        helper.make_node("If", ["b"], ["y"], "branch", then_branch=inner, else_branch=inner),
    ]
    values = {
        name: helper.make_tensor_value_info(name, kind, [2])
        for name, kind in {"x": TensorProto.FLOAT, "q": TensorProto.INT4, "s": TensorProto.STRING}.items()
    }
    values["b"] = helper.make_tensor_value_info("b", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [values["x"], values["b"], values["s"]], [values["q"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    told = list(_narrow_tensors(ir.from_proto(model)))
    assert any("attribute 'value' of Constant 'constant'" in text for text in told)
    assert any("'narrow' in a subgraph of If 'branch'" in text for text in told)
    assert any("output 'q' of Cast 'cast'" in text for text in told)


def test_converted_models_hold_no_narrow_elements(tmp_path):
    for path in DIGITS.glob("*.onnx"):
        model = lowbit.convert(path).model
        types = {tensor.data_type for tensor in model.graph.initializer}
        assert not types & {TensorProto.INT4, TensorProto.UINT4}, path.name


def test_a_difference_is_an_error_and_leaves_nothing(converted, tmp_path, monkeypatch):
    true_run = mobile.run_session
    calls = []

    def wrong(opened, feed):
        calls.append(opened)
        return {name: value + (len(calls) == 3) for name, value in true_run(opened, feed).items()}

    monkeypatch.setattr(mobile, "run_session", wrong)
    with pytest.raises(lowbit.ModelError, match="10 of 10 elements of the output 'logits' differ"):
        mobile.export_mobile(converted, tmp_path / "app")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_earlier_export(converted, tmp_path, monkeypatch):
    folder = tmp_path / "app"
    mobile.export_mobile(converted, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mobile, "operators_config", full_disk)
    with pytest.raises(lowbit.OutputError, match="No space left"):
        mobile.export_mobile(converted, folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert leftovers(tmp_path) == []


def test_folders_of_others_are_left_alone(converted, tmp_path):
    def refused(folder, **arguments):
        with pytest.raises(lowbit.OutputError) as error:
            mobile.export_mobile(converted, folder, **arguments)
        return str(error.value)

    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(tmp_path / "file", overwrite=True)
    assert "does not exist" in refused(tmp_path / "none" / "app")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.jpg").write_bytes(b"1")
    assert "photo.jpg" in refused(tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    mobile.export_mobile(converted, tmp_path / "empty")
    assert "--overwrite" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    assert "notes.txt" in refused(tmp_path / "empty", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert "link" in refused(tmp_path / "link", overwrite=True)
