"""The commands on a GPU, which the fake device of tests/ep stands in for.

Not in the process of the tests: which library stands for the GPU is settled when the provider is registered.
One other process runs most commands, for it takes longer to start one than to run them; what is about the
environment, or about what one process leaves to the next, starts its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from lowbit.proto.feeds import random_feeds

from tests.ep.conftest import fake_library
from tests.tools.conftest import qdq_conv
from tests.tools.test_cli import save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "LOWBIT_CUDA_LIBRARY": str(fake_library()), "LOWBIT_CACHE_DIR": cache}


Done = subprocess.CompletedProcess[str]

# Answers one JSON line with another. Whatever else writes to the standard output goes to the standard error.
SERVER = """
import json, os, sys, traceback
from click.testing import CliRunner
from lowbit.cli import cli
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    done = CliRunner().invoke(cli, json.loads(line))
    wrong = [] if isinstance(done.exception, SystemExit) or done.exc_info is None else done.exc_info
    errors = done.stderr + "".join(traceback.format_exception(*wrong) if done.exception and wrong else [])
    print(json.dumps([done.exit_code, done.stdout, errors]), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def server(environment) -> Iterator[subprocess.Popen[str]]:
    """The process that runs most commands; it ends well after all of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    yield process
    process.communicate()
    assert process.returncode == 0


def run(where: dict[str, str] | subprocess.Popen[str], *arguments: object, code: int = 0) -> Done:
    """Runs a command in a process of its own, which has that environment, or in the server."""
    words = [str(argument) for argument in arguments]
    if isinstance(where, dict):
        command = [sys.executable, "-m", "lowbit", *words]
        done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    else:
        assert where.stdin is not None
        assert where.stdout is not None
        where.stdin.write(json.dumps(words) + "\n")
        where.stdin.flush()
        answer = where.stdout.readline()
        assert answer, f"the process died of {words}"
        done = subprocess.CompletedProcess(words, *json.loads(answer))
    assert done.returncode == code, done.stderr
    return done


def run_json(where: dict[str, str] | subprocess.Popen[str], *arguments: object):
    return json.loads(run(where, *arguments, "--format", "json").stdout)


def test_devices_are_listed_with_the_gpus(environment):
    devices = {each["name"]: each for each in run_json(environment, "sys")["devices"]}
    assert devices["fake:1"]["description"] == "fake device 1"
    assert devices["fake:1"]["reason"] is None
    text = run(environment, "run", "model.onnx", "--random", "--device", "fake:7", code=2).stderr
    assert "no such file" in text


def test_a_gpu_runs_verifies_and_places(server, source, converted):
    expected = run_json(server, "run", converted, "--random")["outputs"]
    assert run_json(server, "run", source, "--random", "--device", "fake:0")["outputs"] == expected
    report = run_json(server, "verify", converted, "--against", source, "--device", "fake:1")
    assert report["ok"]
    placed = run_json(server, "inspect", converted, "--device", "fake:1")
    assert set(placed["totals"]["runs_on"]) == {"fake:1"}
    assert all(node["kernel"] and not node["candidates"] for node in placed["nodes"])
    text = run(server, "run", converted, "--random", "--device", "fake:7", code=2).stderr
    assert "device 'fake:7': there is fake:0, fake:1" in text


def test_bench_binds_on_the_gpu_and_tells_its_own_time(server, source, converted):
    report = run_json(server, "bench", converted, "--against", source, "--device", "fake:0", "--rounds", 1)
    assert report["model"]["device"] == "fake:0"
    assert report["model"]["queued_ms"] > 0
    assert report["against"]["device"] == "cpu"
    assert report["against"]["queued_ms"] is None
    assert "device time" in run(server, "bench", converted, "--device", "fake:0", "--rounds", 1).stdout


def test_tune_takes_batches(server, environment, tmp_path):
    model = save(qdq_conv(dynamic=True), tmp_path / "model.onnx")
    report = run_json(server, "tune", model, "--device", "fake:0", "--batch", "1,3", "--shape", "x=1,3,9,7")
    assert [shape["inputs"] for shape in report["shapes"]] == [{"x": [1, 3, 9, 7]}, {"x": [3, 3, 9, 7]}]
    assert all(shape["tuned_us"] > 0 for shape in report["shapes"])
    assert report["cache"] == environment["LOWBIT_CACHE_DIR"]
    table = run(server, "tune", model, "--device", "fake:0", "--shape", "x=1,3,9,7")
    assert "x 1x3x9x7" in table.stdout
    assert "fake device 0" in table.stderr
    text = run(server, "tune", model, "--device", "fake:0", "--threads", 2, code=2).stderr
    assert "a GPU is tuned without them" in text


def test_tune_measures_nothing_where_nothing_runs_on_the_gpu(server, converted, tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "model.onnx")
    compiled = tmp_path / "compiled.onnx"
    run(server, "compile", converted, "-o", compiled, "--device", "fake:0")
    for path in (model, compiled):
        text = run(server, "tune", path, "--device", "fake:0", code=2).stderr
        assert "holds no lowbit node, so there is nothing to measure" in text


def test_tune_says_where_choices_cannot_be_kept(environment, converted, tmp_path):
    tune = ("tune", converted, "--device", "fake:0")
    assert "LOWBIT_TUNE is off" in run({**environment, "LOWBIT_TUNE": "off"}, *tune, code=2).stderr
    (tmp_path / "file").write_text("")
    text = run({**environment, "LOWBIT_CACHE_DIR": str(tmp_path / "file")}, *tune, code=2).stderr
    assert f"{tmp_path / 'file'}: cannot be created" in text
    assert "set LOWBIT_CACHE_DIR" in text


def test_a_compiled_model_is_for_its_device(environment, converted, tmp_path):
    output = tmp_path / "compiled.onnx"
    report = run_json(environment, "compile", converted, "-o", output, "--device", "fake:0", "--external")
    assert report["compared"]
    assert len(report["files"]) == 2
    feed = tmp_path / "feed.npz"
    np.savez(feed, **random_feeds(onnx.load(converted)))
    expected = run_json(environment, "run", converted, "--input", feed)["outputs"]
    assert run_json(environment, "run", output, "--input", feed, "--device", "fake:1")["outputs"] == expected
    text = run(environment, "run", output, "--random", "--device", "cpu-ep", code=2).stderr
    assert "was compiled for 'fake device" in text
    assert "compile it again" in text


def test_kernels_are_left_out_in_turns(environment, tmp_path):
    """gpu_rows.py goes on where an earlier run stopped."""
    source = save(qdq_conv(), tmp_path / "model.onnx")
    model = onnx.load(source)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    save(model, source)
    command = [sys.executable, str(ROOT / "benchmarks/gpu_rows.py"), "--device", "fake:0", "--rounds", "2"]
    command += ["--networks", "", "--model", f"conv={source}", "--batches", "1,2", "--commit", "none"]
    command += ["--out", str(tmp_path), "--state", str(tmp_path / "state.json")]

    def rows(*more: str) -> dict:
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "gpu_rows.json").read_text())

    stopped = rows("--without", "halo", "--seconds", "0")
    assert stopped["raw"] == {}
    assert "2 pairs of network and batch size are left" in stopped["notes"][-1]
    first = rows("--without", "halo")
    # The fake device has one kernel: its plan does not change.
    assert first["tables"][0]["rows"][1] == ["halo", "0 of 2", "-", "-", "not chosen"]
    more = rows("--without", "halo,team")
    for place, found in more["raw"].items():
        assert list(found["names"]) == ["nothing", "halo", "team"]
        assert found["names"]["nothing"] == first["raw"][place]["names"]["nothing"]
        assert len(found["names"]["nothing"]["rounds"]) == 2


def test_two_gpus_are_fed_from_one_queue(environment, tmp_path):
    """gpu_throughput.py, briefly: both devices alone and together, then only what was not measured yet."""
    model = qdq_conv(dynamic=True)
    for value in (*model.graph.input, *model.graph.output):
        for dim in list(value.type.tensor_type.shape.dim)[2:]:
            dim.dim_value = 8
    source = save(model, tmp_path / "model.onnx")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_throughput.py"), "--model", f"conv={source}"]
    command += ["--rounds", "2", "--seconds", "0.02", "--commit", "none", "--out", str(tmp_path)]

    def rows(device: str, loads: str) -> dict:
        state = str(tmp_path / f"{device}.json")
        more = ["--device", device, "--loads", loads, "--state", state]
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "gpu_throughput.json").read_text())

    first = rows("fake", "3:1")
    assert first["machine"]["device"] == "fake device 0 and fake device 1"
    more = rows("fake", "3:1,2:3")
    assert [row[:3] for row in more["tables"][0]["rows"]] == [
        [batch, threads, place] for batch, threads in ((3, 1), (2, 3)) for place in ("host", "device")
    ]
    for place, found in first["raw"].items():
        assert list(found["names"]) == ["fake:0", "fake:1", "all"]
        assert more["raw"][place] == found
    alone = rows("fake:1", "2:2")
    assert alone["machine"]["device"] == "fake device 1"
    assert "one GPU" in alone["notes"][-1]
    assert [row[4:8] for row in alone["tables"][0]["rows"]] == [["-"] * 4] * 2


def test_the_benchmarks_run(environment, tmp_path):
    """Briefly; what they measure here means nothing."""
    for script, more in (
        ("gpu_layers.py", ["--only", "2048->512"]),
        ("gpu_bits.py", ["--only", "2048->512"]),
        ("gpu_networks.py", ["--networks", "", "--model", f"conv={tmp_path / 'model.onnx'}"]),
    ):
        model = qdq_conv(dynamic=True)
        for value in (*model.graph.input, *model.graph.output):
            for dim in list(value.type.tensor_type.shape.dim)[2:]:
                dim.dim_value = 8
        save(model, tmp_path / "model.onnx")
        command = [sys.executable, str(ROOT / "benchmarks" / script), "--device", "fake:0", "--rounds", "1"]
        command += ["--batches", "1", "--out", str(tmp_path), "--commit", "none", "--name", script, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / f"{script}.json").read_text())
        assert result["machine"]["device"] == "fake device 0"
        assert "--out" not in result["command"]
        assert result["tables"][0]["rows"]
