"""Compiled models (EPContext), through the execution provider's CPU device."""

from __future__ import annotations

import re
import shutil
import types

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.deploy import compile as compiler
from lowbit.errors import LowBitError, ModelError, OutputError
from lowbit.measure import device_tune
from lowbit.proto.feeds import random_feeds
from lowbit.sessions import absent_gpu
from onnx import TensorProto, helper

from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run, run_json
from tests.tools.test_device_commands import outputs, with_erf_behind

OLD = tuple(int(n) for n in ort.__version__.split(".")[:2]) < (1, 26)


@pytest.mark.parametrize("external", [False, True])
def test_a_compiled_model_computes_the_same(source, converted, tmp_path, external):
    output = tmp_path / "compiled.onnx"
    report = lowbit.compile(source, output, device="cpu-ep", external=external)
    assert report.compared
    assert report.regions == 1
    assert not report.left
    assert sorted(report.files) == sorted(str(path) for path in tmp_path.iterdir())
    assert len(report.files) == 1 + external
    written = onnx.load(output)
    (node,) = written.graph.node
    assert node.op_type == "EPContext"
    # In one file it is outside of the node, whose attributes ONNX Runtime copies at every step to a session.
    assert [tensor.name for tensor in written.graph.initializer] == ([] if external else [node.input[-1]])
    feed = random_feeds(onnx.load(source))
    np.testing.assert_array_equal(outputs(output, "cpu-ep", feed)[0], outputs(converted, "cpu-ops", feed)[0])


def test_compiled_data_is_found_from_another_folder(converted, tmp_path, monkeypatch):
    folder = tmp_path / "deep"
    folder.mkdir()
    lowbit.compile(converted, folder / "compiled.onnx", device="cpu-ep", external=True)
    moved = tmp_path / "moved"
    folder.rename(moved)
    monkeypatch.chdir(moved)
    feed = random_feeds(onnx.load(converted))
    for path in ("compiled.onnx", moved / "compiled.onnx"):
        np.testing.assert_array_equal(
            outputs(path, "cpu-ep", feed)[0], outputs(converted, "cpu-ops", feed)[0]
        )
    next(path for path in moved.iterdir() if path.name != "compiled.onnx").unlink()
    with pytest.raises(ModelError, match=r"compiled\.onnx"):
        lowbit.session(moved / "compiled.onnx", device="cpu-ep")


@pytest.mark.skipif(OLD, reason="onnxruntime writes weightless models from 1.26 on")
def test_weights_stay_in_the_model(converted, source, tmp_path):
    model = tmp_path / "models" / "model.onnx"
    model.parent.mkdir()
    shutil.copy(converted, model)
    output = tmp_path / "compiled.onnx"
    report = lowbit.compile(model, output, device="cpu-ep", weightless=True)
    assert report.compared
    assert report.weights == ["models/model.onnx"]
    assert report.files == [str(output)]
    outside = [t for t in onnx.load(output, load_external_data=False).graph.initializer if t.external_data]
    assert {entry.value for t in outside for entry in t.external_data if entry.key == "location"} == {
        "models/model.onnx"
    }
    kept = onnx.load(output)  # with what it names read in
    whole = {t.name: t.raw_data for t in onnx.load(converted).graph.initializer}
    assert all(t.raw_data == whole[t.name] for t in kept.graph.initializer if len(t.raw_data) >= 128)
    feed = random_feeds(onnx.load(source))
    np.testing.assert_array_equal(outputs(output, "cpu-ep", feed)[0], outputs(converted, "cpu-ops", feed)[0])

    changed = bytearray(model.read_bytes())
    changed[int(next(e.value for e in outside[0].external_data if e.key == "offset"))] ^= 1
    model.write_bytes(changed)
    with pytest.raises(ModelError, match=r"the weights '.*' are not those .*compile the model again"):
        lowbit.session(output, device="cpu-ep")
    model.unlink()
    with pytest.raises(ModelError, match=r"models/model\.onnx"):
        lowbit.session(output, device="cpu-ep")


@pytest.mark.skipif(OLD, reason="onnxruntime writes weightless models from 1.26 on")
def test_weights_stay_in_the_models_external_data(converted, tmp_path):
    model, output = tmp_path / "model.onnx", tmp_path / "compiled.onnx"
    onnx.save(onnx.load(converted), model, save_as_external_data=True, location="weights", size_threshold=128)
    report = run_json("compile", model, "-o", output, "--device", "cpu-ep", "--weightless")
    assert report["weights"] == ["weights"]
    feed = random_feeds(onnx.load(converted))
    np.testing.assert_array_equal(outputs(output, "cpu-ep", feed)[0], outputs(converted, "cpu-ops", feed)[0])


def test_weights_that_cannot_stay_say_why(converted, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(OutputError, match="write the compiled model beside it"):
        lowbit.compile(converted, elsewhere / "compiled.onnx", device="cpu-ep", weightless=True)
    with pytest.raises(LowBitError, match="give a path as the model, and leave external out"):
        lowbit.compile(onnx.load(converted), tmp_path / "compiled.onnx", device="cpu-ep", weightless=True)
    assert not list(elsewhere.iterdir())


def test_what_stays_with_onnxruntime_stays_in_a_compiled_model(tmp_path):
    report = lowbit.compile(with_erf_behind(), tmp_path / "compiled.onnx", device="cpu-ep")
    assert report.regions == 1
    assert report.left == ["erf"]


def test_batches_are_measured_into_the_cache_that_is_read(converted, tmp_path, monkeypatch):
    class MeasuredError(Exception):
        pass

    def tune_device(model, device, *, cache, batches, shapes):
        raise MeasuredError(device, cache, batches)

    monkeypatch.setattr(device_tune, "tune_device", tune_device)
    with pytest.raises(MeasuredError) as caught:
        lowbit.compile(
            converted, tmp_path / "compiled.onnx", batches=[4], provider_options={"cache_dir": "/elsewhere"}
        )
    assert caught.value.args == ("cuda:0", "/elsewhere", [4])


def test_the_command_compiles(converted, tmp_path):
    output = tmp_path / "compiled.onnx"
    assert "1" in run("compile", converted, "-o", output, "--device", "cpu-ep").stdout
    report = run_json("compile", converted, "-o", output, "--device", "cpu-ep", "--overwrite")
    assert report["output"] == str(output)
    assert report["regions"] == 1


def test_the_command_takes_options_of_the_provider(converted, tmp_path):
    command = ["compile", converted, "-o", tmp_path / "compiled.onnx", "--device", "cpu-ep"]
    run_json(*command, "--option", "reference=1", "--option", "tuning=off")
    assert "option 'speed' is unknown" in run(*command, "--overwrite", "--option", "speed=9", code=2).stderr
    assert "expects KEY=VALUE" in run(*command, "--overwrite", "--option", "speed", code=2).stderr


def test_commands_that_need_the_nodes_refuse_a_compiled_model(converted, source, tmp_path):
    output = tmp_path / "compiled.onnx"
    lowbit.compile(converted, output, device="cpu-ep")
    for command in (["convert", output, "-o", tmp_path / "x.onnx"], ["inspect", output], ["tune", output]):
        assert "use the model that it was made from" in run(*command, code=2).stderr
    told = run("run", output, "--random", "--device", "cpu-ops", code=2).stderr
    assert "'cuda'), or open the model that it was made from" in told
    with pytest.raises(ModelError, match="compiled for an execution provider; open it with the device"):
        lowbit.session(output, device="cpu-ops")
    assert run_json("verify", output, "--against", source, "--device", "cpu-ep")["ok"]
    assert run_json("bench", output, "--device", "cpu-ep", "--rounds", 1)["model"]["device"] == "cpu-ep"


def test_what_cannot_be_compiled_says_why(converted, tmp_path):
    output = tmp_path / "compiled.onnx"
    with pytest.raises(LowBitError, match="device 'cpu' runs custom ops"):
        lowbit.compile(converted, output, device="cpu")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "floats", [x], [y])
    floats = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with (
        pytest.warns(RuntimeWarning, match="nothing in this model is quantized"),
        pytest.raises(ModelError, match="floats: cannot be compiled for device 'cpu-ep'"),
    ):
        lowbit.compile(floats, output, device="cpu-ep")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OutputError, match=r"such as compiled\.onnx"):
        lowbit.compile(converted, tmp_path / "compiled", device="cpu-ep")
    lowbit.compile(converted, output, device="cpu-ep")
    with pytest.raises(OutputError, match="exists already"):
        lowbit.compile(converted, output, device="cpu-ep")
    with pytest.raises(ModelError, match="compiled already"):
        lowbit.compile(output, tmp_path / "again.onnx", device="cpu-ep")
    with pytest.raises(OutputError, match="is the input"):
        lowbit.compile(output, output, device="cpu-ep", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["compiled.onnx"]


def test_a_result_that_differs_is_not_written(converted, tmp_path, monkeypatch):
    original = compiler.run_session
    calls = []

    def second_is_wrong(opened, feed):
        values = original(opened, feed)
        calls.append(opened)
        return {name: value + (len(calls) == 2) for name, value in values.items()}

    monkeypatch.setattr(compiler, "run_session", second_is_wrong)
    with pytest.raises(ModelError, match="differs"):
        lowbit.compile(converted, tmp_path / "compiled.onnx", device="cpu-ep")
    assert not list(tmp_path.iterdir())


def test_the_gpu_of_a_target_is_the_one_that_was_measured(tmp_path, monkeypatch):
    """Without a device or its library: the provider offers an architecture, a folder holds measurements."""
    metadata = {"description": "code for NVIDIA GPUs; 7"}
    offered = {"sm_90": types.SimpleNamespace(ep_metadata=metadata)}
    monkeypatch.setattr(absent_gpu, "target_devices", lambda: offered)
    for i, name in enumerate(("H100", "H200")):
        (tmp_path / f"tune-{i}.txt").write_text(f"lowbit tune cache 1\nmachine {name}, sm_90, x\nbuild 7\n")
    (tmp_path / "tune-other.txt").write_text("lowbit tune cache 1\nmachine H100, sm_90, x\nbuild 6\n")
    find = absent_gpu.AbsentGpu.find
    assert find("sm_90", None, None).options == {}
    assert find("sm_90", tmp_path, "H200").options["tuned_on"] == "H200, sm_90, x"
    for arguments, message in (
        (("sm_10", None, None), "expected one that liblowbit_cuda has code for: sm_90"),
        (("sm_90", None, "H200"), "tuned_on names a GPU in the folder of cache"),
        (("sm_90", tmp_path, None), "there are those of H100, sm_90, x; H200, sm_90, x"),
        (("sm_90", tmp_path / "empty", "L4"), "whose name begins with 'L4' by 7, there are none"),
    ):
        with pytest.raises(LowBitError, match=re.escape(message)):
            find(*arguments)


def test_options_of_a_target_belong_together(tmp_path, monkeypatch):
    monkeypatch.setattr(absent_gpu, "target_devices", lambda: {"sm_90": None})
    with pytest.raises(LowBitError, match="cache and tuned_on go with target"):
        lowbit.compile(qdq_conv(), tmp_path / "c.onnx", device="cpu-ep", cache=tmp_path)
    with pytest.raises(LowBitError, match="batches and shapes are there to measure"):
        lowbit.compile(qdq_conv(), tmp_path / "c.onnx", target="sm_90", batches=(1,))
    assert not list(tmp_path.iterdir())
