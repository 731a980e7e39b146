"""The commands on a GPU, which the fake device of tests/ep stands in for.

A process of its own for each: which library stands for the GPU is settled when the provider is registered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def run(environment: dict[str, str], *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowbit", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def run_json(environment: dict[str, str], *arguments: object):
    return json.loads(run(environment, *arguments, "--format", "json").stdout)


def test_devices_are_listed_with_the_gpus(environment):
    devices = {each["name"]: each for each in run_json(environment, "sys")["devices"]}
    assert devices["fake:1"]["description"] == "fake device 1"
    assert devices["fake:1"]["reason"] is None
    text = run(environment, "run", "model.onnx", "--random", "--device", "fake:7", code=2).stderr
    assert "no such file" in text


def test_a_gpu_runs_verifies_and_places(environment, source, converted):
    expected = run_json(environment, "run", converted, "--random")["outputs"]
    assert run_json(environment, "run", source, "--random", "--device", "fake:0")["outputs"] == expected
    report = run_json(environment, "verify", converted, "--against", source, "--device", "fake:1")
    assert report["ok"]
    placed = run_json(environment, "inspect", converted, "--device", "fake:1")
    assert set(placed["totals"]["runs_on"]) == {"fake:1"}
    assert all(node["kernel"] and not node["candidates"] for node in placed["nodes"])
    text = run(environment, "run", converted, "--random", "--device", "fake:7", code=2).stderr
    assert "device 'fake:7': there is fake:0, fake:1" in text


def test_bench_binds_on_the_gpu_and_tells_its_own_time(environment, source, converted):
    report = run_json(
        environment, "bench", converted, "--against", source, "--device", "fake:0", "--rounds", 1
    )
    assert report["model"]["device"] == "fake:0"
    assert report["model"]["queued_ms"] > 0
    assert report["against"]["device"] == "cpu"
    assert report["against"]["queued_ms"] is None
    assert "device time" in run(environment, "bench", converted, "--device", "fake:0", "--rounds", 1).stdout


def test_tune_takes_batches(environment, tmp_path):
    model = save(qdq_conv(dynamic=True), tmp_path / "model.onnx")
    report = run_json(
        environment, "tune", model, "--device", "fake:0", "--batch", "1,3", "--shape", "x=1,3,9,7"
    )
    assert [shape["inputs"] for shape in report["shapes"]] == [{"x": [1, 3, 9, 7]}, {"x": [3, 3, 9, 7]}]
    assert all(shape["tuned_us"] > 0 for shape in report["shapes"])
    assert report["cache"] == environment["LOWBIT_CACHE_DIR"]
    table = run(environment, "tune", model, "--device", "fake:0", "--shape", "x=1,3,9,7")
    assert "x 1x3x9x7" in table.stdout
    assert "fake device 0" in table.stderr
    text = run(environment, "tune", model, "--device", "fake:0", "--threads", 2, code=2).stderr
    assert "a GPU is tuned without them" in text


def test_tune_measures_nothing_where_nothing_runs_on_the_gpu(environment, converted, tmp_path):
    model = save(qdq_conv(weight_is_input=True), tmp_path / "model.onnx")
    compiled = tmp_path / "compiled.onnx"
    run(environment, "compile", converted, "-o", compiled, "--device", "fake:0")
    for path in (model, compiled):
        text = run(environment, "tune", path, "--device", "fake:0", code=2).stderr
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


def test_the_benchmarks_run(environment, tmp_path):
    """Briefly; what they measure here means nothing."""
    for script, more in (
        ("gpu_layers.py", ["--only", "2048->512"]),
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
