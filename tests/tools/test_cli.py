"""The command line: what it prints, what it returns, and that errors are one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import lowbit
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lowbit.cli import COMMANDS, cli
from lowbit.errors import RefusedError
from lowbit.inspection import inspect as inspecting
from lowbit.sessions import session as sessions
from onnx import TensorProto, helper, numpy_helper

from tests.support import stock_may_saturate
from tests.tools.conftest import qdq_conv


def run(*arguments: object, code: int = 0):
    """Runs a command in this process and checks its exit code."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.exit_code}: {result.output}\n{result.exception!r}"
    return result


def run_json(*arguments: object, code: int = 0):
    """The one JSON document on stdout."""
    return json.loads(run(*arguments, "--format", "json", code=code).stdout)


def save(model: onnx.ModelProto, path) -> str:
    onnx.save(model, path)
    return str(path)


# ---- what the commands say


def test_help_names_every_command():
    text = run("--help").stdout
    assert all(f"  {name} " in text for name in COMMANDS)
    for name in COMMANDS:
        help_text = run(name, "--help").stdout
        for option in ("--format [table|json]", "-q, --quiet", "-v, --verbose"):
            assert option in help_text, name
    assert lowbit.__version__ in run("--version").stdout


def test_python_m_lowbit_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "lowbit", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: lowbit")


def test_sys_tells_versions_and_instruction_sets():
    info = run_json("sys")
    assert info["versions"]["onnxruntime"]
    assert info["library"]["path"] == lowbit.get_library_path()
    assert info["library"]["api"]["offered"] >= info["library"]["api"]["required"] == 24
    assert info["isa"]["used"] in info["isa"]["machine"]
    assert {"name", "op", "algorithm", "isa", "x_bits_max", "w_bits_max", "note"} <= set(info["kernels"][0])
    text = run("sys").stdout
    assert info["isa"]["used"] in text
    assert info["kernels"][0]["name"] in run("sys", "-v").stdout


def test_convert_reports_every_node(source, tmp_path):
    output = tmp_path / "out.onnx"
    summary = run_json("convert", source, "-o", output)
    assert summary["bytes_after"] == output.stat().st_size
    nodes = summary["report"]["nodes"]
    assert len(nodes) == len(onnx.load(source).graph.node)
    assert {"name", "op_type", "action", "into", "reason", "details"} <= set(nodes[0])
    assert {node["action"] for node in nodes} <= {"converted", "absorbed", "kept"}
    assert all(node["reason"] for node in nodes if node["action"] == "kept")
    onnx.checker.check_model(onnx.load(output))

    text = run("convert", source, "-o", output, "--overwrite").stdout
    assert "converted" in text
    assert "size" in text


def test_a_float_model_is_told_so_in_one_sentence(tmp_path):
    """What to do, instead of a reason for each node; nothing is wrong with the file either."""
    model = save(float_model(), tmp_path / "float.onnx")
    output = tmp_path / "out.onnx"
    printed = run("convert", model, "-o", output).stdout
    assert printed.startswith(f"{model}: nothing in this model is quantized")
    assert "quantize_static" in printed
    assert len(printed.splitlines()) == 3, "with the size and the file"
    report = run_json("convert", model, "-o", output, "--overwrite")["report"]
    assert "nothing in this model is quantized" in report["remark"]
    shown = run("inspect", model).stdout
    assert shown.count("quantize_static") == 1
    assert "its weights are not quantized" not in shown
    assert "its weights are not quantized" in run("inspect", model, "-v").stdout
    (refusal,) = run("convert", model, "-o", tmp_path / "strict.onnx", "--strict", code=3).stderr.splitlines()
    assert "nothing in this model is quantized" in refusal
    assert not (tmp_path / "strict.onnx").exists()


def float_model() -> onnx.ModelProto:
    """Five convolutions, each behind a Relu."""
    nodes = []
    for i in range(5):
        nodes.append(helper.make_node("Relu", [f"x{i}"], [f"r{i}"], f"relu{i}"))
        nodes.append(helper.make_node("Conv", [f"r{i}", "w"], [f"x{i + 1}"], f"conv{i}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 4, 4]) for name in ("x0", "x5")]
    weights = numpy_helper.from_array(np.ones((3, 3, 1, 1), np.float32), "w")
    graph = helper.make_graph(nodes, "float", ends[:1], ends[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_converted_model_is_told_so(converted, tmp_path):
    output = tmp_path / "again.onnx"
    printed = run("convert", converted, "-o", output, "--strict").stdout
    assert printed.startswith(f"{converted}: lowbit converted this model already")
    assert len(printed.splitlines()) == 3
    assert list(onnx.load(output).graph.node) == list(onnx.load(converted).graph.node)


def test_a_quantized_model_without_a_converted_node_is_told_so(tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "m.onnx")
    printed = run("convert", model, "-o", tmp_path / "out.onnx").stdout
    assert "nothing was converted" in printed
    assert "its weights are not constant" in printed


def test_sizes_count_external_data(source, tmp_path):
    model = tmp_path / "model.onnx"
    proto = onnx.load(source)
    onnx.save(proto, model, save_as_external_data=True, location="model.data", size_threshold=0)
    size = model.stat().st_size + (tmp_path / "model.data").stat().st_size
    assert size > 1.5 * model.stat().st_size
    output = tmp_path / "out.onnx"
    assert run_json("convert", model, "-o", output)["bytes_before"] == size
    assert run_json("inspect", model)["bytes"] == size


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_convert_writes_a_report_file(source, tmp_path, suffix):
    report = tmp_path / f"report{suffix}"
    run("convert", source, "-o", tmp_path / "out.onnx", "--report", report)
    text = report.read_text(encoding="utf-8")
    assert "Conv" in text
    if suffix == ".json":
        assert json.loads(text)["report"]["nodes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out.onnx", report.name])


def test_inspect_shows_operands_and_kernels(converted, source):
    report = run_json("inspect", converted)
    assert report["kind"] == "lowbit"
    convs = [node for node in report["nodes"] if node["op_type"] == "LowBitConv"]
    assert convs
    for node in convs:
        assert node["kernel"]
        assert node["macs"] > 0
        assert node["weight_bytes"] > 0
        assert node["x"] in ("u4", "u8", "s8")
        assert node["w"] in ("s4", "s8")
    assert report["totals"]["macs"] == sum(node["macs"] or 0 for node in report["nodes"])
    assert "LowBitConv" in run("inspect", converted).stdout

    dry = run_json("inspect", source)
    assert dry["kind"] == "source"
    assert {node["action"] for node in dry["nodes"]} >= {"converted", "absorbed"}
    assert dry["totals"]["macs"] == report["totals"]["macs"]
    assert "dry conversion" in run("inspect", source).stdout


def test_inspect_says_why_a_node_would_stay(tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "m.onnx")
    conv = next(node for node in run_json("inspect", model)["nodes"] if node["op_type"] == "Conv")
    assert conv["action"] == "kept"
    assert conv["reason"]
    assert conv["reason"] in run("inspect", model).stdout


def test_inspect_takes_the_sizes_of_dynamic_inputs(tmp_path):
    output = tmp_path / "out.onnx"
    run("convert", save(qdq_conv(dynamic=True), tmp_path / "m.onnx"), "-o", output)
    assert "--shape" in run("inspect", output).stderr
    sized = run_json("inspect", output, "--shape", "x=1,3,8,8")
    conv = next(n for n in sized["nodes"] if n["op_type"] == "LowBitConv")
    assert conv["kernel"]
    assert conv["macs"] == 8 * 8 * 4 * 27


def test_run_random_and_from_files(converted, source, tmp_path):
    first = run_json("run", converted, "--random", "--seed", "3")["outputs"]
    stock = run_json("run", source, "--random", "--seed", "3")["outputs"]
    if stock_may_saturate():
        facts = ("name", "dtype", "shape")
        assert [[each[fact] for fact in facts] for each in first] == [
            [each[fact] for fact in facts] for each in stock
        ]
    else:
        assert first == stock
    assert {"name", "dtype", "shape", "min", "max", "mean", "top1"} == set(first[0])

    name = onnx.load(converted).graph.input[0].name
    from lowbit.proto.feeds import random_feeds

    feed = random_feeds(onnx.load(converted), seed=3)
    np.save(tmp_path / "x.npy", feed[name])
    np.savez(tmp_path / "x.npz", **feed)
    output = tmp_path / "y.npz"
    for given in (f"{name}={tmp_path / 'x.npy'}", tmp_path / "x.npy", tmp_path / "x.npz"):
        report = run_json("run", converted, "--input", given, "-o", output, "--overwrite")
        assert report["outputs"] == first
    with np.load(output) as saved:
        expected = lowbit.session(converted).run(None, feed)
        np.testing.assert_array_equal(saved[saved.files[0]], expected[0])
    assert "top-1" in run("run", converted, "--random").stdout


def test_verify_accepts_what_convert_wrote(converted, source):
    report = run_json("verify", converted, "--against", source, "-n", "3")
    assert report["ok"] is True
    assert report["samples"] == 3
    totals = report["totals"]
    assert totals["elements"] > 0
    assert totals["wrong"] == totals["unexplained"] == 0
    assert {
        "name",
        "op_type",
        "source",
        "runs",
        "elements",
        "wrong",
        "equal",
        "near_tie",
        "unexplained",
        "note",
        "ok",
    } == set(report["nodes"][0])
    assert "verified" in run("verify", converted, "--against", source, "-n", "1").stdout
    assert "LowBitConv" in run("verify", converted, "--against", source, "-n", "1", "-v").stdout


def test_verify_takes_samples_from_a_file(converted, source, tmp_path):
    name = onnx.load(converted).graph.input[0].name
    from lowbit.proto.feeds import random_feeds

    feeds = [random_feeds(onnx.load(converted), seed=seed)[name] for seed in range(4)]
    np.savez(tmp_path / "data.npz", **{name: np.concatenate(feeds)})
    data = tmp_path / "data.npz"
    assert run_json("verify", converted, "--against", source, "--data", data)["samples"] == 4
    assert run_json("verify", converted, "--against", source, "--data", data, "-n", "2")["samples"] == 2


def test_verify_finds_a_tampered_weight(converted, source, tmp_path):
    """One changed scale makes a node disagree with its original everywhere it matters: exit code 1."""
    model = onnx.load(converted)
    conv = [node for node in model.graph.node if node.op_type == "LowBitConv"][1]
    for init in model.graph.initializer:
        if init.name == conv.input[2]:
            init.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(init) * np.float32(1.5), init.name))
    changed = save(model, tmp_path / "changed.onnx")
    report = run_json("verify", changed, "--against", source, code=1)
    assert report["ok"] is False
    bad = [node for node in report["nodes"] if node["unexplained"]]
    assert conv.name in [node["name"] for node in bad]
    assert all(node["wrong"] == 0 for node in report["nodes"]), "the kernels still compute what the file says"
    assert "failed" in run("verify", changed, "--against", source, code=1).stdout


def test_bench_compares_two_models(converted, source):
    report = run_json("bench", converted, "--against", source, "--rounds", "1", "--profile")
    assert {"model", "against", "ratios", "threads", "rounds", "pinned"} == set(report)
    assert set(report["ratios"]) == {"time", "size", "load", "memory"}
    for timing in (report["model"], report["against"]):
        assert timing["p10_ms"] <= timing["median_ms"] <= timing["p90_ms"]
        assert timing["load_ms"] > 0
        assert timing["peak_memory_bytes"] > 1_000_000
        assert timing["nodes"]
        assert {"name", "op_type", "mean_ms"} == set(timing["nodes"][0])
    assert any(node["op_type"] == "LowBitConv" for node in report["model"]["nodes"])


def test_bench_profiles_the_kernels_of_regions(converted):
    """ONNX Runtime asks for them since 1.25; before, a region is one node."""
    report = run_json("bench", converted, "--rounds", "1", "--profile", "--device", "cpu-ep")
    model = onnx.load(converted)
    convs = {node.name for node in model.graph.node if node.op_type == "LowBitConv"}
    nodes = report["model"]["nodes"]
    assert convs <= {name for node in nodes for name in node["name"].split(", ")}
    assert not [node for node in nodes if node["op_type"].startswith("LowBit")], "kernels, not ops"
    assert all(node["mean_ms"] > 0 for node in nodes)


def test_bench_of_one_model_prints_a_table(converted):
    text = run("bench", converted, "--rounds", "1", "--threads", "2").stdout
    assert "median time" in text
    assert "peak memory" in text


@pytest.mark.parametrize("dims", [[1], ["a", "b", "c"], [1, 5]])
def test_bench_of_a_model_that_states_a_wrong_shape_of_its_output(dims, tmp_path):
    """ONNX Runtime runs it, but not a second time into the same memory; nor can it infer the right shape."""
    model = qdq_conv()
    graph, real = model.graph, model.graph.output[0].name
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Greater", ["largest", "least"], ["yes"]),
        helper.make_node("Cast", ["yes"], ["one"], to=TensorProto.INT64),
        helper.make_node("Add", ["one", "ones"], ["count"]),
        helper.make_node("Slice", ["shape", "zeros", "count"], ["first"]),  # the first two
        helper.make_node("Reshape", [real, "first"], ["flat"]),
    ]
    graph.node.extend(nodes)
    constants = {"least": np.float32(-1e9), "ones": [1], "zeros": [0], "shape": [1, -1, 1]}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items())
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("flat", TensorProto.FLOAT, dims))
    source, converted = tmp_path / "source.onnx", tmp_path / "converted.onnx"
    onnx.save(model, source)
    lowbit.convert(source, converted)
    report = run_json("bench", converted, "--against", source, "--rounds", "1", "--profile")
    assert report["ratios"]["time"] > 0
    run("verify", converted, "--against", source, "-n", "1")


# ---- what goes wrong

LACKING = "missing external data"


def broken_models(folder, source):
    """Files that are not usable models, by name."""
    data = source.read_bytes()
    external = onnx.load(source)
    onnx.save(external, folder / "external.onnx", save_as_external_data=True, location="gone.bin",
              size_threshold=0)  # fmt: skip
    (folder / "gone.bin").unlink()
    files = {
        "truncated": data[: len(data) // 2],
        "not ONNX": b"\x89PNG\r\n\x1a\n" + bytes(500),
        "text": b"hello, this is not a model at all",
        "empty": b"",
    }
    for name, content in files.items():
        (folder / f"{name}.onnx").write_bytes(content)
    return {**{name: folder / f"{name}.onnx" for name in files}, LACKING: folder / "external.onnx"}


@pytest.mark.parametrize("kind", ["truncated", "not ONNX", "text", "empty", LACKING, "absent"])
@pytest.mark.parametrize("command", ["inspect", "convert", "run", "eval", "verify", "bench"])
def test_an_unusable_model_is_one_line_and_exit_code_2(command, kind, source, converted, tmp_path):
    model = {**broken_models(tmp_path, source), "absent": tmp_path / "absent.onnx"}[kind]
    arguments = {
        "inspect": [model],
        "convert": [model, "-o", tmp_path / "out.onnx"],
        "run": [model, "--random"],
        "eval": [model, "--data", source],
        "verify": [converted, "--against", model],
        "bench": [model],
    }[command]
    before = sorted(tmp_path.iterdir())
    result = run(command, *arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("lowbit: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "defect" not in result.stderr, result.stderr
    assert sorted(tmp_path.iterdir()) == before, "nothing was left behind"


def with_unknown_node(path, folder) -> str:
    """A copy of a model that ONNX Runtime refuses."""
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("NoSuchOp", [model.graph.input[0].name], ["nobody"], "odd"))
    return save(model, folder / f"refused_{path.name}")


@pytest.mark.parametrize("original_too", [False, True])
def test_a_refused_conversion_is_told_from_a_refused_original(source, converted, tmp_path, original_too):
    model = with_unknown_node(converted, tmp_path)
    original = with_unknown_node(source, tmp_path) if original_too else source
    (told,) = run("verify", model, "--against", original, code=2).stderr.splitlines()
    assert f"{model}: ONNX Runtime refuses the converted model: " in told
    assert ("it refuses the original, too: " if original_too else "it loads the original, so that") in told
    (told,) = run("bench", model, "--against", original, "--rounds", "1", code=2).stderr.splitlines()
    assert f"{model}: ONNX Runtime refuses it" in told
    assert (f"it refuses {original}, too: " if original_too else f"it loads {original}") in told


def test_run_asks_the_original_where_it_lies_beside_the_model(source, converted, tmp_path):
    model = with_unknown_node(converted, tmp_path)
    assert f"it was converted from {source.name}" in run("run", model, "--random", code=2).stderr
    beside = tmp_path / source.name
    beside.write_bytes(source.read_bytes())
    assert "it loads the original, so that" in run("run", model, "--random", code=2).stderr
    beside.write_bytes(b"another file")
    assert f"it was converted from {source.name}" in run("run", model, "--random", code=2).stderr
    refused = with_unknown_node(source, tmp_path)
    assert "the original" not in run("run", refused, "--random", code=2).stderr


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_a_device_that_refuses_a_conversion_in_memory(command, source, monkeypatch):
    """What is refused is not the file that the user gave, and the message says so."""

    def refuse(*_arguments, **_options):
        raise RefusedError("model: ONNX Runtime refuses it: no such luck", "no such luck")

    opened = sessions.open_session

    def refuse_the_device(model, options, device="cpu", **more):
        return refuse() if device != "cpu" else opened(model, options, device, **more)

    monkeypatch.setattr(sessions, "open_session", refuse_the_device)
    monkeypatch.setattr(inspecting, "placed", refuse)
    arguments = [source, "--random"] if command == "run" else [source]
    told = run(command, *arguments, "--device", "cpu-ep", code=2).stderr
    assert "ONNX Runtime refuses the converted model: no such luck; it loads the original" in told


def test_verbose_shows_the_traceback(tmp_path):
    result = run("inspect", tmp_path / "absent.onnx", "-v", code=2)
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("lowbit: ")


def test_an_input_is_never_overwritten(source, tmp_path):
    model = tmp_path / "m.onnx"
    model.write_bytes(source.read_bytes())
    assert "never overwritten" in run("convert", model, "-o", model, "--overwrite", code=2).stderr
    assert model.read_bytes() == source.read_bytes()


def test_an_existing_output_needs_overwrite(source, tmp_path):
    output = tmp_path / "out.onnx"
    output.write_bytes(b"precious")
    assert "--overwrite" in run("convert", source, "-o", output, code=2).stderr
    assert output.read_bytes() == b"precious"
    run("convert", source, "-o", output, "--overwrite")
    assert "--overwrite" in run("run", source, "--random", "-o", output, code=2).stderr


@pytest.mark.parametrize("folder", ["no/such/folder", "/proc"])
def test_an_unwritable_folder_is_named(source, tmp_path, folder):
    output = tmp_path / folder / f"{os.getpid()}.onnx"  # an absolute folder replaces tmp_path
    result = run("convert", source, "-o", output, code=2)
    assert str(output) in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_full_disk_leaves_nothing(source, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("a full disk needs the right to mount a small tmpfs")
    try:
        result = run("convert", source, "-o", disk / "out.onnx", code=2)
        assert "No space left" in result.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_write_that_fails_late_leaves_nothing(source, tmp_path, monkeypatch):
    """The same without the right to mount: the disk is full when the file is flushed."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in run("convert", source, "-o", tmp_path / "out.onnx", code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_strict_refuses_with_exit_code_3(tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "m.onnx")
    result = run("convert", model, "-o", tmp_path / "out.onnx", "--strict", code=3)
    assert "conv" in result.stderr
    assert not (tmp_path / "out.onnx").exists()
    run("convert", model, "-o", tmp_path / "out.onnx")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["convert", "m.onnx"],
        ["sys", "--format", "yaml"],
        ["verify", "m.onnx"],
        ["bench", "m.onnx", "--rounds", "0"],
        ["bench", "m.onnx", "--pin", "first"],
        ["run", "m.onnx"],
        ["run", "m.onnx", "--random", "--input", "x=y.npy"],
    ],
)
def test_a_wrong_call_is_exit_code_2_with_usage(arguments):
    assert "Usage:" in run(*arguments, code=2).output


def test_wrong_values_are_one_line(converted, source, tmp_path):
    np.save(tmp_path / "wrong.npy", np.zeros((1, 2), np.float32))
    np.savez(tmp_path / "names.npz", a=np.zeros(1), b=np.zeros(1))
    (tmp_path / "junk.npy").write_bytes(b"junk")
    calls = [
        ("run", converted, "--input", tmp_path / "wrong.npy"),
        ("run", converted, "--input", tmp_path / "names.npz"),
        ("run", converted, "--input", tmp_path / "junk.npy"),
        ("run", converted, "--input", "nobody=x.npy"),
        ("run", converted, "--random", "--shape", "x=0"),
        ("run", converted, "--random", "--shape", "x"),
        ("verify", converted, "--against", source, "--data", tmp_path / "wrong.npy"),
        ("verify", source, "--against", source),
        ("bench", converted, "--pin", "4096"),
        ("inspect", converted, "--isa", "mmx"),
    ]
    for call in calls:
        result = run(*call, code=0 if call[0] == "inspect" else 2)
        if result.exit_code:
            assert result.stderr.startswith("lowbit: "), call
            assert result.stderr.count("\n") == 1, (call, result.stderr)
            assert "defect" not in result.stderr, (call, result.stderr)


def test_a_model_verified_against_a_stranger_is_refused(converted, tmp_path):
    stranger = save(qdq_conv(), tmp_path / "m.onnx")
    assert "not made from this original" in run("verify", converted, "--against", stranger, code=2).stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, number, code):
    """Interrupted at the worst moment: the temporary file is complete, its rename still to come."""
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background shells ignore it
        "def fsync(descriptor):\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
        "os.fsync = fsync\n"
        "from lowbit.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "convert", str(source), "-o", str(tmp_path / "out.onnx")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    assert len(list(tmp_path.iterdir())) == 1, "the temporary file"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == f"lowbit: {'interrupted' if code == 130 else 'terminated'}\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_during_native_code_leaves_nothing(source, tmp_path):
    """The main thread never comes back to Python, as in a session that takes minutes to open."""
    program = (
        "import ctypes, os, signal, tempfile\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def fsync(descriptor):\n"
        "    global folder\n"
        f"    folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})\n"
        "    print('written', flush=True)\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    for _ in range(2):\n"
        "        ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "os.fsync = fsync\n"
        "from lowbit.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "convert", str(source), "-o", str(tmp_path / "out.onnx")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    assert len(list(tmp_path.iterdir())) == 2, "the temporary file and folder"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "lowbit: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_at_the_terminal_is_one_message(converted, tmp_path):
    """Ctrl-C reaches the processes that a command started, too."""
    program = (
        "import signal, subprocess\n"
        "from lowbit.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background shells ignore it
        "run = subprocess.run\n"
        "def tell(*arguments, **options):\n"
        "    print('started', flush=True)\n"
        "    return run(*arguments, **options)\n"
        "subprocess.run = tell\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "bench", str(converted), "--rounds", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "lowbit: interrupted\n"
    assert printed == ""
    left = [path.name for path in tmp_path.iterdir() if path.name != ".ses"]  # a file of ONNX Runtime's own
    assert left == []


@pytest.mark.parametrize("place", ["before", "after"])
def test_options_of_all_commands_stand_on_either_side(place, source, tmp_path):
    def call(*options: str, code: int = 0):
        command, *rest = ["inspect", source]
        return run(*options, command, *rest, code=code) if place == "before" else run(
            command, *rest, *options, code=code)  # fmt: skip

    assert json.loads(call("--format", "json").stdout)["kind"] == "source"
    assert "rather than" in call("-v").stdout
    assert run("--format", "json", "inspect", "--format", "table", source).stdout.startswith("model")
    source = tmp_path / "missing.onnx"
    assert "Traceback" in call("-v", code=2).stderr
    assert "Traceback" not in call("-q", code=2).stderr


def test_a_closed_pipe_is_no_error(converted):
    done = subprocess.run(
        f"{sys.executable} -m lowbit inspect {converted} | head -1",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("model")
    assert done.stderr == ""
