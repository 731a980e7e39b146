"""Outputs that cannot be written, conversions that are stopped: nothing half-written, the input untouched."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from lowbit.cli import cli as lowbit_command
from lowbit.measure.tune import cache_path, keep
from lowbit.proto.atomic import temporary_folder, write_atomically

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


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _make_device(path: Path) -> None:
    """A node like /dev/null, in a temporary folder."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes")


def _make_link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


SPECIAL = (_make_fifo, _make_socket, _make_device, _make_link_to_a_fifo)


@pytest.fixture(params=SPECIAL, ids=lambda make: make.__name__.removeprefix("_make_"))
def special(request, tmp_path) -> Path:
    """Something that is no file, under the name of a file."""
    path = tmp_path / "special" / "out.onnx"
    path.parent.mkdir()
    request.param(path)
    return path


def test_what_is_no_file_is_never_replaced(source, special) -> None:
    """By no function that writes, whatever --overwrite says, at once and without waiting for a reader."""
    before = special.lstat()
    converted = lowbit.convert(source).model
    for attempt in (
        lambda: write_atomically(special, lambda path: path.write_bytes(b"x"), overwrite=True),
        lambda: lowbit.convert(source, special, overwrite=True),
        lambda: lowbit.convert(source, special),
        lambda: lowbit.export(converted, special, to="qdq", overwrite=True),
        lambda: lowbit.compile(converted, special, device="cpu-ep", overwrite=True),
        lambda: lowbit.export_mobile(converted, special, overwrite=True),
    ):
        with pytest.raises(lowbit.OutputError) as caught:
            attempt()
        assert_one_clear_error(str(caught.value), "pipe|socket|device|is a file|is a link")
    for arguments in (
        ("run", source, "--random", "-o", special, "--overwrite"),
        ("inspect", source, "--report", special, "--overwrite"),
        ("convert", source, "-o", special.with_name("fine.onnx"), "--report", special, "--overwrite"),
    ):
        result = CliRunner().invoke(lowbit_command, [str(argument) for argument in arguments])
        assert result.exit_code == 2, result.output
        assert_one_clear_error(result.output, "pipe|socket|device")
    after = special.lstat()
    assert (after.st_ino, after.st_mode, after.st_rdev) == (before.st_ino, before.st_mode, before.st_rdev)
    assert not [path for path in special.parent.iterdir() if path.name.startswith(".")]


def test_measured_choices_are_not_kept_in_what_is_no_file(source, special, monkeypatch) -> None:
    """Neither read, which would wait for a writer, nor replaced; a session does without them."""
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(special.parent))
    cache = special.rename(cache_path())
    before = cache.lstat()
    converted = lowbit.convert(source).model
    with pytest.raises(lowbit.OutputError, match=r"(pipe|socket|device), .*LOWBIT_CACHE_DIR"):
        lowbit.tune(converted)
    with pytest.raises(lowbit.OutputError, match=r"pipe|socket|device"):
        keep({("key", 1): "kernel"})
    lowbit.session(converted)
    assert cache.lstat().st_mode == before.st_mode


def test_what_appears_meanwhile_is_not_replaced(tmp_path) -> None:
    target = tmp_path / "out.onnx"

    def write(path: Path) -> None:
        path.write_bytes(b"x")
        os.mkfifo(target)

    with pytest.raises(lowbit.OutputError, match="is a pipe"):
        write_atomically(target, write, overwrite=True)
    assert target.is_fifo()


def test_a_link_is_followed(source, tmp_path) -> None:
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    real.write_text("old")
    link.symlink_to("real.onnx")
    lowbit.convert(source, link, overwrite=True)
    assert link.is_symlink()
    onnx.load(real)
    link.unlink()
    link.symlink_to(source)
    with pytest.raises(lowbit.OutputError, match="this is the input"):
        lowbit.convert(source, link, overwrite=True)


def test_other_threads_keep_their_umask(source, tmp_path, monkeypatch) -> None:
    """Files get the modes that the process gives to new ones; its umask is never touched for that."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask of the whole process was set"))
        lowbit.convert(source, tmp_path / "out.onnx")
        lowbit.compile(source, tmp_path / "compiled.onnx", device="cpu-ep", external=True)
        folder = lowbit.export_mobile(tmp_path / "out.onnx", tmp_path / "mobile").folder
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.onnx")}
        modes |= {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert set(modes.values()) == {0o640}, modes
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    finally:
        monkeypatch.undo()
        os.umask(before)


KILLED = """
import os, signal, sys, lowbit, lowbit.deploy.compile, lowbit.deploy.mobile
module, name = sys.argv[1:3]
setattr(sys.modules[module], name, lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL))
if module == "lowbit.deploy.compile":
    lowbit.compile(*sys.argv[3:5], device="cpu-ep")
else:
    lowbit.export_mobile(*sys.argv[3:5])
"""


@pytest.mark.parametrize(
    ("module", "moment"), [("lowbit.deploy.compile", "_check"), ("lowbit.deploy.mobile", "_verified")]
)
def test_what_a_killed_process_leaves_goes_with_the_next_run(source, tmp_path, module, moment) -> None:
    lowbit.convert(source, tmp_path / "model.onnx")
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = [module, moment, tmp_path / "model.onnx", folder / "made.onnx"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = folder.iterdir()
    assert any(left.iterdir()), "it was killed in the middle"
    with temporary_folder(folder / "other") as working:
        lowbit.convert(source, folder / "next.onnx")
        assert sorted(path.name for path in folder.iterdir()) == sorted([working.name, "next.onnx"])


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
    """A limit on the size of files fails the write in the middle, as a full disk does.

    The process is not counted by `make coverage`, whose own files would be cut short too.
    """
    resource = pytest.importorskip("resource", reason="needs POSIX resource limits")
    uncounted = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    target = tmp_path / "full" / "out.onnx"
    target.parent.mkdir()
    before = source.read_bytes()
    done = cli(
        "convert",
        source,
        "-o",
        target,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        env=uncounted | {"LLVM_PROFILE_FILE": os.devnull},
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
        assert "    main()\n" not in told, told  # earlier, Python itself is starting
