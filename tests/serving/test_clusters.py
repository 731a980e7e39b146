"""--cluster of the commands, on a real Ray cluster: the numbers and files are those of one process."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lowbit.cluster import Cluster
from lowbit.errors import LowBitError

from .conftest import ROOT

SEARCH = """
import sys
import lowbit
from tests.quantize.test_search import QUICK, SIZE, images, short
lowbit.search(short(), images(), sys.argv[1], target=SIZE, cluster=sys.argv[2] or None, **QUICK)
"""

JOINED = """
import sys
from lowbit.cluster import Cluster
joined = Cluster(sys.argv[1], 2)
print(list(joined.each(pow, [2])), "ray" in sys.modules)
joined.close()
"""


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, text=True, capture_output=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 300 images, five parts for workers, and labels of chance."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    x = random.normal(size=(300, 3, 32, 32)).astype(np.float32)
    np.savez(folder / "data.npz", input=x, y=random.integers(0, 10, 300))
    return folder


def test_eval(cluster: str, quantized: Path, converted: Path, data: Path) -> None:
    command = ["-m", "lowbit", "eval", str(converted), "--against", str(quantized), "--data", "data.npz"]
    command += ["--labels", "data.npz:y", "--batch", "7", "--threads", "1", "--format", "json", "-q"]
    alone, spread = (python(*command, *more, folder=data) for more in ([], ["--cluster", cluster]))
    assert alone.returncode == 0, alone.stderr
    assert spread.returncode == 0, spread.stderr
    assert json.loads(spread.stdout) == json.loads(alone.stdout)
    assert json.loads(alone.stdout)["samples"] == 300


def test_an_error_of_a_worker_is_one_line(cluster: str, converted: Path, data: Path) -> None:
    (data / "mine.py").write_text("def odd(outputs):\n    raise ValueError('no number')\n")
    command = ["-m", "lowbit", "eval", str(converted), "--data", "data.npz:input", "--metric", "mine.py:odd"]
    shown = python(*command, "--cluster", cluster, folder=data)
    assert shown.returncode == 2
    assert re.search(r"^lowbit: .*--metric .*odd failed: .*no number", shown.stderr, re.MULTILINE)
    assert "Traceback" not in shown.stderr


def test_search(cluster: str, tmp_path: Path) -> None:
    for name, address in {"alone.onnx": "", "spread.onnx": cluster}.items():
        shown = python("-c", SEARCH, str(tmp_path / name), address)
        assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "spread.onnx").read_bytes() == (tmp_path / "alone.onnx").read_bytes()


def test_ray_stays_in_a_process_of_its_own(cluster: str) -> None:
    """Leaving a cluster frees what a thread of Ray's may still lock: that is no process of the caller's."""
    shown = python("-c", JOINED, cluster)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[(0, 4)] False\n"


def test_a_process_that_dies_is_an_error(cluster: str) -> None:
    joined = Cluster(cluster, 2)
    (process,) = multiprocessing.active_children()
    process.kill()
    with pytest.raises(LowBitError, match="--cluster: the process that had joined the cluster ended with -9"):
        list(joined.each(pow, [2]))
    joined.close()
