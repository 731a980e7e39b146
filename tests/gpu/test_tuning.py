"""Measured choices: kept between processes, checked before they count, never able to change a number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.dialects.graphs import qonnx as qonnx_graphs
from tests.gpu.support import assert_equal, gpu_session, in_new_process
from tests.support import lowbit_session, require_native

require_native()
import lowbit  # noqa: E402
from lowbit.models import build  # noqa: E402


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    model = lowbit.convert(build("resnet18", 8, 8, image=32, classes=10)).model
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    path.write_bytes(model.SerializeToString())
    image = np.random.default_rng(0).normal(0, 1, (1, 3, 32, 32)).astype(np.float32)
    return path, image, lowbit_session(model).run(None, {"input": image})


def run(path: Path, image: np.ndarray, folder: Path, tuning: str):
    session = gpu_session(path, {"tuning": tuning, "cache_dir": str(folder)})
    return session.run(None, {"input": image})


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_measured_choices_are_kept(case, tmp_path: Path) -> None:
    path, image, expected = case
    assert_equal(run(path, image, tmp_path, "cached"), expected, "no cache")
    assert not files(tmp_path), "only tuning=on measures"
    assert_equal(run(path, image, tmp_path, "on"), expected, "measuring")
    (file,) = files(tmp_path)
    text = file.read_text()
    assert text.startswith("lowbit tune cache 1\nmachine NVIDIA ")
    entries = [line.split("\t") for line in text.splitlines()[4:]]
    assert len(entries) > 5
    assert all(threads == "1" and "shape=1x" in key and kernel for threads, key, kernel in entries)
    assert_equal(run(path, image, tmp_path, "on"), expected, "measured before")
    assert_equal(run(path, image, tmp_path, "cached"), expected, "cached")
    assert file.read_text() == text


def run_in_new_process(path: Path, image: np.ndarray, folder: Path) -> dict:
    np.save(folder.parent / "image.npy", image)
    return in_new_process(
        f"""
import numpy as np
from tests.gpu.support import gpu_session
session = gpu_session({str(path)!r}, {{"tuning": "cached", "cache_dir": {str(folder)!r}}})
y = session.run(None, {{"input": np.load({str(folder.parent / "image.npy")!r})}})
found["y"] = [v.tolist() for v in y]
"""
    )


@pytest.mark.parametrize("damage", ["cut", "bit", "other_machine", "other_build", "empty", "binary"])
def test_damaged_and_foreign_caches_are_ignored_with_a_warning(case, tmp_path: Path, damage: str) -> None:
    path, image, expected = case
    folder = tmp_path / "cache"
    folder.mkdir()
    run(path, image, folder, "on")
    (file,) = files(folder)
    good = file.read_bytes()
    bad = {
        "cut": good[: len(good) * 2 // 3],
        "bit": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
        "other_machine": good.replace(b"machine NVIDIA", b"machine ACME"),
        "other_build": good.replace(b"kernels ", b"kernels f"),
        "empty": b"",
        "binary": bytes(range(256)) * 20,
    }[damage]
    file.write_bytes(bad)
    found = run_in_new_process(path, image, folder)
    assert_equal([np.array(v, np.float32) for v in found["y"]], expected, damage)
    assert "measured kernel choices are ignored" in found["stderr"]
    assert file.read_bytes() == bad, "a session never touches what it did not measure"


def test_choices_that_name_no_kernel_cost_nothing(case, tmp_path: Path) -> None:
    """A cache in order, but its kernels are none of the nodes'."""
    path, image, expected = case
    run(path, image, tmp_path, "on")
    (file,) = files(tmp_path)
    head, body = file.read_text().split("entries ")
    lines = [line.rsplit("\t", 1)[0] + "\tno_such_kernel" for line in body.splitlines()[1:]]
    text = "".join(line + "\n" for line in lines)
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    file.write_text(f"{head}entries {len(lines)}, checksum {value:016x}\n{text}")
    found = run_in_new_process(path, image, tmp_path)
    assert_equal([np.array(v, np.float32) for v in found["y"]], expected, "unknown kernels")
    assert "ignored" not in found["stderr"]


def test_a_folder_that_cannot_be_written_is_no_error(case) -> None:
    path, image, expected = case
    assert_equal(run(path, image, Path("/proc/no/such/folder"), "on"), expected, "no folder")


def test_planes_between_steps_are_measured_against_bytes(tmp_path: Path) -> None:
    """A region of few bits is tuned in both layouts; the one that was faster is kept, and found again."""
    sign = qonnx_graphs.Quant(np.float32(1), bits=0)
    graph = qonnx_graphs.QonnxGraph("planes", 5)
    value = graph.quant(graph.input(["N", 128, "H", "W"], name="x"), sign)
    for _ in range(3):
        weights = graph.weights((128, 128, 3, 3), sign)
        value = graph.quant(graph.node("Conv", [value, weights], pads=[1] * 4), sign)
    graph.output(value, ["N", 128, None, None])
    path, folder = tmp_path / "planes.lowbit.onnx", tmp_path / "cache"
    lowbit.convert(graph.proto(), path)
    code = f"""
import numpy as np, onnx
from tests.gpu.support import assert_equal, gpu_session
from tests.support import lowbit_session
feeds = {{"x": np.random.default_rng(0).normal(0, 1, (2, 128, 5, 6)).astype(np.float32)}}
expected = lowbit_session(onnx.load({str(path)!r})).run(None, feeds)
for tuning in ("on", "cached"):
    session = gpu_session({str(path)!r}, {{"tuning": tuning, "cache_dir": {str(folder)!r}}})
    assert_equal(session.run(None, feeds), expected, tuning)
"""
    # Without kernels of bytes no estimate is against planes.
    left_out = "halo,windows,wgmma,mma,team,vector"
    environment = {"LOWBIT_PRINT_PLAN": "json", "LOWBIT_CUDA_WITHOUT": left_out, "LOWBIT_TUNE": ""}
    found = in_new_process(code, environment)
    (file,) = files(folder)
    entries = [line.split("\t") for line in file.read_text().splitlines()[4:]]
    (chosen,) = [kernel for _, key, kernel in entries if key.startswith("planes, ")]
    assert chosen in ("planes", "bytes", "most planes")
    lines = [json.loads(line) for line in found["stderr"].splitlines() if line.startswith("{")]
    plans = [line["steps"] for line in lines if line["lowbit"] == "region"]
    assert len(plans) == 2
    for steps in plans:
        assert any("plane" in step["to"] for step in steps) == (chosen != "bytes"), steps
