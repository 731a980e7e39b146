"""Installs the built wheels beside distributions of ONNX Runtime, each in a fresh environment, and uses them.

    environments.py [--wheels dist] DISTRIBUTION...     onnxruntime onnxruntime-gpu none ...
    environments.py --check DISTRIBUTION                the check alone, in the environment that runs this

An environment gets the distribution first and the wheels then, as a user's does who has one; no file of the
former may differ afterwards. The check converts and runs a model as the README says, on custom ops and on the
execution provider; with `none` it wants one clear error from each command that needs ONNX Runtime.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path("models", "digits", "digits_w8a8.onnx")


def run(*words: str | Path) -> str:
    """What a command prints; raises when it fails."""
    done = subprocess.run(list(map(str, words)), text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def onnxruntimes() -> list[metadata.Distribution]:
    """The distributions that bring the module onnxruntime."""
    names = metadata.packages_distributions().get("onnxruntime", ())
    return [metadata.distribution(name) for name in sorted(set(names))]


def hashes() -> dict[str, str]:
    """Every file of those distributions, by its name."""
    files = [path for each in onnxruntimes() for path in each.files or () if path.suffix != ".pyc"]
    return {str(path): hashlib.sha256(Path(path.locate()).read_bytes()).hexdigest() for path in files}


def check_use() -> str:
    """Converts and runs, as the README does; returns what it saw."""
    import lowbit
    import numpy as np
    import onnxruntime

    (distribution,) = onnxruntimes()
    feeds = {"input": np.random.default_rng(0).random((3, 1, 8, 8), np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder, "model.lowbit.onnx")
        report = lowbit.convert(ROOT / MODEL, converted).report
        outputs = {
            device: lowbit.session(converted, device=device).run(None, feeds)[0]
            for device in ("cpu-ops", "cpu-ep")
        }
    stock = onnxruntime.InferenceSession(str(ROOT / MODEL), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(outputs["cpu-ep"], outputs["cpu-ops"])
    np.testing.assert_array_equal(outputs["cpu-ops"].argmax(1), stock.run(None, feeds)[0].argmax(1))
    shown = json.loads(run(sys.executable, "-m", "lowbit", "sys", "--format", "json"))
    assert shown["versions"]["onnxruntime"].startswith(onnxruntime.__version__)
    seen = f"converted ({len(report.kept)} kept), ran, custom ops and provider equal"
    return f"{distribution.name} {onnxruntime.__version__}: {seen}"


def check_none() -> str:
    """Wants the one error that says what to install, from whatever needs ONNX Runtime; returns it."""
    import ctypes

    import onnxruntime_ep_lowbit

    assert not onnxruntimes(), "this environment has an ONNX Runtime"
    ctypes.CDLL(onnxruntime_ep_lowbit.get_library_path())
    run(sys.executable, "-m", "lowbit", "sys")
    lines: set[str] = set()
    for words in (("convert", ROOT / MODEL, "-o", "never.onnx"), ("run", ROOT / MODEL, "--random")):
        command = [sys.executable, "-m", "lowbit", *map(str, words)]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        assert done.returncode == 2, done
        lines.add(done.stderr.strip())
    (line,) = lines
    assert "pip install 'lowbit[onnxruntime]'" in line
    assert "onnxruntime-gpu" in line
    return line


def try_environment(distribution: str, wheels: Sequence[Path]) -> None:
    """A fresh environment with one distribution, or none, and the wheels; raises where anything fails."""
    with tempfile.TemporaryDirectory(prefix="lowbit-environment-") as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder, "bin", "python")
        install = (python, "-m", "pip", "install", "--quiet", "--retries", "5")
        listing = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        listing += "from tests.packaging.environments import hashes; import json; print(json.dumps(hashes()))"
        if distribution != "none":
            run(*install, distribution)
        before = json.loads(run(python, "-c", listing))
        run(*install, *wheels)
        after = json.loads(run(python, "-c", listing))
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        assert not changed, f"{distribution}: changed by installing lowbit: {', '.join(changed)}"
        shown = run(python, __file__, "--check", distribution).strip()
        print(f"{distribution}: {len(before)} files as before; {shown}", flush=True)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="no environment: the one that runs this")
    parser.add_argument("distributions", nargs="+")
    options = parser.parse_args()
    for distribution in options.distributions:
        if options.check:
            print(check_none() if distribution == "none" else check_use())
        else:
            try_environment(distribution, sorted(options.wheels.glob(f"*_{platform.machine()}.whl")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
