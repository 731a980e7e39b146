"""examples/ray_batch.py on a local cluster: whatever is killed in the middle, every image has one result."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import lowbit
import numpy as np
import pytest

pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'lowbit[cluster]'")
parquet = pytest.importorskip("pyarrow.parquet")
from PIL import Image  # noqa: E402

from .conftest import EXAMPLES  # noqa: E402

sys.path.insert(0, str(EXAMPLES))
import ray_batch  # noqa: E402

SHARDS, IMAGES = 40, 50
SECONDS = 600.0
"""After which what is waited for does not come any more, on the slowest machine."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thousand small images in shards, a file among them that is no image, and a shard that is torn."""
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    for shard in range(SHARDS):
        with zipfile.ZipFile(folder / f"{shard:03}.zip", "w") as archive:
            for number in range(IMAGES):
                data = io.BytesIO()
                pixels = random.integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).resize((40, 36)).save(data, "png")
                archive.writestr(f"image_{number:03}.png", data.getvalue())
    with zipfile.ZipFile(folder / "000.zip", "a") as archive:
        archive.writestr("image_999.png", b"no image")
    (folder / "torn.zip").write_bytes((folder / "001.zip").read_bytes()[:1000])
    return folder


@pytest.fixture(scope="module")
def expected(shards: Path, converted: Path) -> dict[str, list[dict[str, object]]]:
    """What a plain session says, one image at a time."""
    session = lowbit.session(converted)
    rows: dict[str, list[dict[str, object]]] = {}
    for shard in sorted(shards.glob("[0-9]*.zip")):
        rows[shard.stem] = []
        with zipfile.ZipFile(shard) as archive:
            for name in sorted(archive.namelist()):
                try:
                    image = Image.open(archive.open(name))
                except OSError:
                    rows[shard.stem].append({"name": name, "class": None, "score": None})
                    continue
                (scores,) = session.run(None, {"input": ray_batch.preprocessed(image, 32, 32)[None]})[0]
                best = int(scores.argmax())
                rows[shard.stem].append({"name": name, "class": best, "score": float(scores[best])})
    return rows


def start(converted: Path, shards: Path, results: Path, cluster: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "ray_batch.py"), str(converted), str(shards), str(results)]
    command += ["--workers", "2", "--batch", "8", "--address", cluster]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(what: Callable[[], object], run: subprocess.Popen[str]) -> None:
    """Waits for something that happens while a run goes on."""
    end = time.monotonic() + SECONDS
    while not what():
        assert run.poll() is None, f"the run ended too early:\n{run.communicate()[0]}"
        assert time.monotonic() < end
        time.sleep(0.002)


def workers() -> list[int]:
    """The processes that classify, as Ray names them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if words.startswith("ray::") and "ShardWorker" in words:
            found.append(int(folder.name))
    return found


def results_of(folder: Path) -> dict[str, list[dict[str, object]]]:
    """All rows by shard, without the errors; a file that is unfinished would fail here."""
    files = sorted(folder.iterdir())
    assert [file.suffix for file in files] == [".parquet"] * len(files)
    tables = {file.stem: parquet.read_table(file, columns=["name", "class", "score"]) for file in files}
    return {name: table.to_pylist() for name, table in tables.items()}


def ended(run: subprocess.Popen[str]) -> str:
    """What a run printed that did all it could: it says which shard is none, and that it failed for it."""
    printed = run.communicate(timeout=SECONDS)[0]
    assert run.returncode == 1, printed
    assert "torn.zip: BadZipFile: File is not a zip file" in printed
    assert "1 shards could not be read" in printed
    return printed


def test_a_killed_worker_changes_nothing(
    converted: Path, shards: Path, expected: dict[str, object], cluster: str, tmp_path: Path
) -> None:
    (tmp_path / ".000.parquet.0").write_bytes(b"what a worker leaves that dies while it writes")
    with start(converted, shards, tmp_path, cluster) as run:
        wait_for(lambda: len(list(tmp_path.glob("*.parquet"))) >= 2, run)
        os.kill(workers()[0], signal.SIGKILL)
        assert len(list(tmp_path.glob("*.parquet"))) < SHARDS
        printed = ended(run)
    assert f"{SHARDS * IMAGES + 1} images classified" in printed
    assert results_of(tmp_path) == expected
    (unread,) = [row for row in parquet.read_table(tmp_path / "000.parquet").to_pylist() if row["error"]]
    assert unread["name"] == "image_999.png"
    assert unread["error"].startswith("UnidentifiedImageError")


def test_a_killed_run_goes_on(
    converted: Path, shards: Path, expected: dict[str, object], cluster: str, tmp_path: Path
) -> None:
    with start(converted, shards, tmp_path, cluster) as run:
        wait_for(lambda: len(list(tmp_path.glob("*.parquet"))) >= 2, run)
        run.kill()
    end = time.monotonic() + SECONDS
    while workers():  # Ray ends those of a run that is gone
        assert time.monotonic() < end
        time.sleep(0.01)
    done = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.parquet")}
    assert 2 <= len(done) < SHARDS
    with start(converted, shards, tmp_path, cluster) as run:
        printed = ended(run)
    assert f"{SHARDS + 1 - len(done)} shards to do" in printed
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in done} == done
    assert results_of(tmp_path) == expected
