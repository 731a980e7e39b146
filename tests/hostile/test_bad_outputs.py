"""Outputs that cannot be written, conversions that are stopped: nothing half-written, the input untouched."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest

from tests.dialects.graphs import CASES
from tests.hostile.test_bad_models import assert_one_clear_error, cli
from tests.support import require_native

lowbit = pytest.importorskip("lowbit")


@pytest.fixture
def source(tmp_path) -> Path:
    require_native()
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(CASES["ort_quantizer.residual_with_downsample"].build(1).model.SerializeToString())
    return path


def _refused(source: Path, target: Path, *needed: str, command: bool = False) -> None:
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    listing = sorted(p.name for p in source.parent.iterdir())
    with pytest.raises(lowbit.OutputError) as caught:
        lowbit.convert(source, target)
    assert_one_clear_error(str(caught.value), *needed)
    if command:
        done = cli("convert", source, "-o", target)
        assert done.returncode > 0
        assert_one_clear_error(done.stderr, *needed)
    assert hashlib.sha256(source.read_bytes()).hexdigest() == before
    assert sorted(p.name for p in source.parent.iterdir()) == listing


def test_folder_does_not_exist(source, tmp_path) -> None:
    _refused(source, tmp_path / "nowhere" / "out.onnx", "nowhere", command=True)
    assert not (tmp_path / "nowhere").exists()


def test_parent_is_a_file(source) -> None:
    _refused(source, source / "out.onnx", "out.onnx")


def test_output_is_a_folder(source, tmp_path) -> None:
    (tmp_path / "out.onnx").mkdir()
    _refused(source, tmp_path / "out.onnx", "out.onnx", "folder|directory")
    assert not any((tmp_path / "out.onnx").iterdir())


def test_output_is_the_input(source) -> None:
    _refused(source, source, "input")
    link = source.parent / "link.onnx"
    link.hardlink_to(source)
    _refused(source, link, "input|exists")


def test_output_exists(source, tmp_path) -> None:
    target = tmp_path / "out.onnx"
    target.write_text("precious")
    _refused(source, target, "exists", "overwrite", command=True)
    assert target.read_text() == "precious"
    done = cli("convert", source, "-o", target, "--overwrite")
    assert done.returncode == 0, done.stderr
    onnx.load(target)


def test_folder_without_permission(source) -> None:
    """/proc takes no files, not even from root."""
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc on this system")
    _refused(source, Path("/proc/out.onnx"), "out.onnx", command=True)


def test_read_only_folder(source, tmp_path) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        pytest.skip("root may write anywhere; /proc stands for it in the test above")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    _refused(source, folder / "out.onnx", "permission|write")


def test_disk_full(source, tmp_path) -> None:
    """A limit on the size of files fails the write in the middle, as a full disk does."""
    resource = pytest.importorskip("resource", reason="needs POSIX resource limits")
    target = tmp_path / "full" / "out.onnx"
    target.parent.mkdir()
    before = source.read_bytes()
    done = cli(
        "convert",
        source,
        "-o",
        target,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.returncode > 0, done
    assert_one_clear_error(done.stderr, "out.onnx|full")
    assert not any(target.parent.iterdir())
    assert source.read_bytes() == before


@pytest.mark.parametrize("moment", ["fsync", "link", "serialize"])
def test_stopped_at_a_given_moment(source, tmp_path, monkeypatch, moment: str) -> None:
    """Ctrl-C where it hurts most: while the file is being written, and just before it is moved into place."""
    target = tmp_path / "stopped" / "out.onnx"
    target.parent.mkdir()

    def stop(*_args, **_options):
        raise KeyboardInterrupt

    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", stop)
    elif moment == "link":
        for name in ("link", "replace", "rename"):
            monkeypatch.setattr(os, name, stop)
    else:
        import onnxruntime

        monkeypatch.setattr(onnxruntime, "InferenceSession", stop)  # the verification of the written file
    with pytest.raises(KeyboardInterrupt):
        lowbit.convert(source, target)
    monkeypatch.undo()
    assert not any(target.parent.iterdir())
    assert onnx.load(source).graph.node


@pytest.mark.parametrize("delay", [0.3, 0.6, 0.9, 1.2, 1.6])
def test_interrupt_from_the_keyboard(source, tmp_path, delay: float) -> None:
    """SIGINT to the command at some moment: it ends soon, quietly, and leaves all or nothing."""
    target = tmp_path / "stopped" / "out.onnx"
    target.parent.mkdir()
    before = source.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "lowbit", "convert", str(source), "-o", str(target)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert source.read_bytes() == before
    if target.exists():
        onnx.checker.check_model(onnx.load(target), full_check=False)
        assert [p.name for p in target.parent.iterdir()] == [target.name]
    else:
        assert not any(target.parent.iterdir())
        assert process.returncode != 0
        if delay > 0.5:  # earlier, the interpreter itself may still be starting
            assert "Traceback" not in told, told
