"""Sessions and commands on the execution provider, through its CPU device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from lowbit.checking import verify
from lowbit.errors import LowBitError, ModelError
from lowbit.proto.feeds import random_feeds
from lowbit.sessions.binding import bind, queued_seconds
from lowbit.sessions.devices import ep_devices
from lowbit.sessions.placement import place
from onnx import helper

from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import run, run_json, save

EP = "LowBitExecutionProvider"


def outputs(model, device: str, feed, **more):
    return lowbit.session(model, device=device, **more).run(None, feed)


def with_erf_behind() -> onnx.ModelProto:
    """A converted convolution with a node behind it that the execution provider does not know."""
    model = lowbit.convert(qdq_conv()).model
    model.graph.output[0].name = "z"
    model.graph.node.append(helper.make_node("Erf", ["y"], ["z"], "erf"))
    return model


# ---- sessions


def test_regions_compute_what_the_custom_ops_compute(source, converted):
    feed = random_feeds(onnx.load(source))
    expected = outputs(converted, "cpu-ops", feed)
    for form in (source, converted, converted.read_bytes(), onnx.load(converted), lowbit.convert(source)):
        for got, value in zip(outputs(form, "cpu-ep", feed), expected, strict=True):
            np.testing.assert_array_equal(got, value)


def test_the_provider_runs_it_and_threads_are_taken(converted):
    opened = lowbit.session(converted, device="cpu-ep", threads=2)
    assert opened.get_providers()[0] == EP
    assert opened.get_session_options().intra_op_num_threads == 2


def test_external_data_beside_a_path_is_found(converted, tmp_path):
    path, raw = tmp_path / "external.onnx", tmp_path / "raw.onnx"
    for model, target in ((onnx.load(converted), path), (qdq_conv(), raw)):
        onnx.save(model, target, save_as_external_data=True, location=f"{target.stem}.bin", size_threshold=16)
    feed = random_feeds(onnx.load(converted))
    np.testing.assert_array_equal(outputs(path, "cpu-ep", feed)[0], outputs(converted, "cpu-ops", feed)[0])
    feed = random_feeds(qdq_conv())
    np.testing.assert_array_equal(
        outputs(raw, "cpu-ep", feed)[0], outputs(lowbit.convert(qdq_conv()), "cpu-ops", feed)[0]
    )


def test_one_set_of_options_serves_many_sessions(converted):
    options, feed = ort.SessionOptions(), random_feeds(onnx.load(converted))
    for _ in range(3):
        outputs(converted, "cpu-ep", feed, sess_options=options)
    with pytest.raises(LowBitError, match="set up for device cpu-ep"):
        lowbit.session(converted, device="cpu-ep", sess_options=options, provider_options={"reference": True})


def test_wrong_options_are_named(converted):
    with pytest.raises(ModelError, match=r"option 'tunning' is unknown; there are device_id, tuning"):
        lowbit.session(converted, device="cpu-ep", provider_options={"tunning": "on"})
    with pytest.raises(ModelError, match=r"option 'tuning' is 'maybe', expected off, cached, on"):
        lowbit.session(converted, device="cpu-ep", provider_options={"tuning": "maybe"})


def test_the_documented_steps_without_the_package_work(converted, tmp_path):
    """The second example of docs/execution-provider.md, on the CPU's device."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "execution-provider.md").read_text()
    code = page.split("## Without the Python package")[1].split("```python\n")[1].split("```")[0]
    model = tmp_path / "model.lowbit.onnx"
    shutil.copy(converted, model)
    code = code.replace('"cuda:0"', '"cpu"').replace('"model.lowbit.onnx"', repr(str(model)))
    program = tmp_path / "example.py"
    program.write_text(code + "\nprint(session.get_providers())\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert EP in done.stdout, done.stderr


# ---- binding


def test_bound_runs_compute_the_same(converted):
    feed = random_feeds(onnx.load(converted))
    opened = lowbit.session(converted, device="cpu-ep")
    binding = bind(opened, feed, "cpu-ep")
    assert queued_seconds(opened, binding, 3) > 0
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), opened.run(None, feed)[0])


# ---- placement


def test_placement_tells_regions_and_reasons(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(with_erf_behind(), path)
    found = place(str(path), "cpu-ep")
    assert len(found.regions) == 1
    assert "conv" in " ".join(found.taken)
    assert "erf" in found.reasons
    assert "erf" in found.elsewhere
    assert found.kernels.keys() == found.taken
    report = lowbit.inspect(path, device="cpu-ep")
    assert report.device == "cpu-ep"
    assert report.regions == 1
    where = {node.name: (node.runs_on, node.left) for node in report.nodes}
    assert where["erf"] == ("cpu", found.reasons["erf"])
    assert report.totals["runs_on"] == {"cpu-ep": len(found.taken), "cpu": 1}
    assert "erf" in run("inspect", path, "--device", "cpu-ep").stdout


HOSTILE_NAME = 'a "b"\\ (c): d, from e\n{"lowbit": "left", ü 𝄞'


def printed_objects(err):
    """What lowbit prints as JSON, beside warnings of ONNX Runtime."""
    lines = [line for line in err.splitlines() if line.startswith('{"lowbit": ')]
    assert all(line.isascii() for line in lines)
    return [json.loads(line) for line in lines]


def printed_plans(model, device, feed, monkeypatch, capfd):
    """Text and JSON of what a session with one run prints."""
    told = []
    for form in ("1", "json"):
        monkeypatch.setenv("LOWBIT_PRINT_PLAN", form)
        capfd.readouterr()
        outputs(model, device, feed)
        told.append(capfd.readouterr().err)
    return told[0], printed_objects(told[1])


def test_plans_are_printed_as_json_too(tmp_path, monkeypatch, capfd):
    model = with_erf_behind()
    for node in model.graph.node:
        node.name = HOSTILE_NAME + node.name
    feed = random_feeds(model)
    text, told = printed_plans(model, "cpu-ep", feed, monkeypatch, capfd)
    *left, region = told
    assert [(each["lowbit"], each["name"], each["op"]) for each in left] == [
        ("left", HOSTILE_NAME + "erf", "Erf")
    ]
    assert region["lowbit"] == "region"
    assert f"region of {len(region['steps'])} steps, workspace {region['workspace_bytes']} bytes" in text
    for step in region["steps"]:
        assert f": {step['kernel']}, from {' '.join(step['from'])} to {step['to']}\n" in text
    lowbit_nodes = [node for node in model.graph.node if node.domain == "ai.lowbit"]
    assert {name for step in region["steps"] for name in step["nodes"]} == {n.name for n in lowbit_nodes}

    text, told = printed_plans(model, "cpu-ops", feed, monkeypatch, capfd)
    assert [(each["lowbit"], each["name"], each["op"]) for each in told] == [
        ("node", node.name, node.op_type) for node in lowbit_nodes
    ]
    for each in told:
        assert (
            f"'{each['name']}' ({each['op']}): {each['kernel']}, x {each['x']}, "
            f"packed {each['packed_bytes']} bytes, workspace {each['workspace_bytes']} bytes a thread\n"
        ) in text

    onnx.save(model, tmp_path / "model.onnx")
    found = place(str(tmp_path / "model.onnx"), "cpu-ep")
    assert found.reasons.keys() == {HOSTILE_NAME + "erf"}
    assert found.kernels.keys() == found.taken


@pytest.mark.parametrize("form", ["", "0"])
def test_no_plan_is_printed_unasked(form, monkeypatch, capfd):
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", form)
    model = with_erf_behind()
    outputs(model, "cpu-ep", random_feeds(model))
    assert "lowbit" not in capfd.readouterr().err


def test_names_that_are_no_utf8_are_printed_as_json(monkeypatch, capfd):
    model = with_erf_behind()
    model.graph.node[-1].name = "erf!!!!!"
    data = model.SerializeToString().replace(b"erf!!!!!", b"erf\xff\xc0\xaf\xed\xa0")
    monkeypatch.setenv("LOWBIT_PRINT_PLAN", "json")
    lowbit.session(data, device="cpu-ep")
    left = [told for told in printed_objects(capfd.readouterr().err) if told["lowbit"] == "left"]
    assert [told["name"] for told in left] == ["erf" + "\ufffd" * 5]


def test_placement_of_an_unconverted_model(source):
    report = lowbit.inspect(source, device="cpu-ep")
    assert report.kind == "source"
    for node in report.nodes:
        assert (node.runs_on == "cpu-ep") == (node.action == "converted"), node.name
    assert lowbit.inspect(source, device="cpu").totals["runs_on"].keys() == {"cpu"}


def test_a_model_that_does_not_open_is_one_error(tmp_path):
    path = tmp_path / "model.onnx"
    model = lowbit.convert(qdq_conv()).model
    for node in model.graph.node:
        if node.op_type == "LowBitConv":
            del node.input[2:]
    onnx.save(model, path)
    with pytest.raises(ModelError, match="does not open on device 'cpu-ep'"):
        place(str(path), "cpu-ep")


# ---- commands


def test_run_takes_a_device(source, tmp_path):
    files = [tmp_path / f"{device}.npz" for device in ("cpu", "cpu-ep")]
    converted = tmp_path / "converted.onnx"
    lowbit.convert(source, converted)
    run("run", converted, "--random", "-o", files[0])
    run("run", source, "--random", "--device", "cpu-ep", "-o", files[1])
    first, second = (np.load(file) for file in files)
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])


def test_verify_takes_a_device(source, converted):
    report = run_json("verify", converted, "--against", source, "--device", "cpu-ep")
    assert report["ok"]
    assert report["totals"]["wrong"] == 0


def test_bench_takes_a_device(source):
    report = run_json("bench", source, "--against", source, "--device", "cpu-ep", "--rounds", 1)
    assert [report[key]["device"] for key in ("model", "against")] == ["cpu-ep", "cpu"]
    assert report["model"]["queued_ms"] is None


def test_bench_of_a_model_beside_itself_converts_the_first_alone(source):
    report = lowbit.bench(str(source), str(source), device="cpu-ep", rounds=1)
    assert (report.model.device, report.against.device) == ("cpu-ep", "cpu")


def test_verify_tells_which_nodes_the_device_left(source, converted, monkeypatch):
    assert not lowbit.verify(converted, source, device="cpu-ep").notes
    real = verify.assignments

    def turned_around(opened):
        regions, elsewhere = real(opened)
        return [elsewhere], [name for region in regions for name in region]

    monkeypatch.setattr(verify, "assignments", turned_around)
    report = lowbit.verify(converted, source, device="cpu-ep")
    assert report.ok
    (note,) = report.notes
    assert note.startswith("11 of the 11 lowbit nodes run as custom ops on the CPU, not on 'cpu-ep'")


def test_what_stays_on_the_cpu_is_one_line(tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "model.onnx")
    text = run("run", model, "--random", "--device", "cpu-ep").stderr
    (line,) = (line for line in text.splitlines() if "it runs on the CPU" in line)
    assert line.startswith("warning: nothing in this model could be converted: its weights are not constant")
    assert "session(" not in text.replace("lowbit.session()", "")  # no line of source code


def test_a_missing_gpu_is_one_line_with_the_reason(converted, tmp_path, monkeypatch):
    # Neither this machine's GPUs nor the fake ones that other tests of this process have registered.
    there = ort.get_ep_devices
    ep_devices()
    monkeypatch.setattr(
        ort,
        "get_ep_devices",
        lambda: [each for each in there() if ":" not in each.ep_metadata.get("device", "")],
    )
    for command in (
        ["run", converted, "--random"],
        ["bench", converted],
        ["verify", converted, "--against", converted],
        ["tune", converted],
        ["inspect", converted],
        ["compile", converted, "-o", tmp_path / "compiled.onnx"],
    ):
        text = run(*command, "--device", "cuda", code=2).stderr
        assert text.startswith("lowbit: device 'cuda:0': no GPU can be used: "), command
        assert text.count("\n") == 1, command
    assert not list(tmp_path.iterdir())
    assert "cuda" in run("sys").stdout
    (row,) = (each for each in run_json("sys")["devices"] if each["name"] == "cuda")
    assert row["reason"]


def test_wrong_usage_is_refused(converted):
    assert "got 'gpu'" in run("run", converted, "--random", "--device", "gpu", code=2).stderr
    assert "--batch expects" in run("tune", converted, "--device", "cuda", "--batch", "1,x", code=2).stderr
    assert "batches are for GPUs" in run("tune", converted, "--batch", "4", code=2).stderr
