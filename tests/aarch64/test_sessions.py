"""Real networks in sessions of the aarch64 onnxruntime, with lowbit's wheel for it: the numbers of x86-64.

They are converted here and run there, under an emulator; a small one is converted there, too. Every code and
every float that a lowbit node hands to anything else is compared bit for bit; what float operators of ONNX
Runtime make of them, to the last bits of a float. LOWBIT_AARCH64_WHEELS names their folder
(`make wheel-aarch64`); `make test FULL=1` builds them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.conftest import FULL
from tests.dialects.test_shared_models import evaluation_set
from tests.dialects.test_shared_qonnx import preprocessed
from tests.support import require_native
from tools import aarch64_python

require_native()
import lowbit  # noqa: E402
from lowbit.ops import DOMAIN  # noqa: E402
from lowbit.proto.feeds import random_feeds  # noqa: E402

PYTHON = aarch64_python.__file__
ISA = {"cortex-a53": "neon", "cortex-a76": "dotprod", "max,sve=off,sme=off": "i8mm"}
CPUS = [cpu for cpu, isa in ISA.items() if FULL or isa != "dotprod"]
MODELS = [
    "qdq/mobilenetv2_1.0_224_w8a8_qat",
    "qdq/resnet20_cifar10_w8a8u_ortptq",
    "qdq/resnet20_cifar10_w4a8_ortptq",
    "qonnx/cnv_w1a1_cifar10",
]
DEVICES = ["cpu-ops", "cpu-ep"]
SMALL = Path(__file__).resolve().parents[2] / "models/digits/digits_w8a8.onnx"

WHEELS = sorted(Path(os.environ.get("LOWBIT_AARCH64_WHEELS", os.devnull)).glob("*_aarch64.whl"))
pytestmark = pytest.mark.skipif(
    not WHEELS, reason="LOWBIT_AARCH64_WHEELS names no wheels (`make wheel-aarch64`); `make test FULL=1` does"
)


def expose_integers(model: onnx.ModelProto) -> list[str]:
    """Makes outputs of what lowbit nodes hand to others; returns their names, the model's own included."""
    outputs = [value.name for value in model.graph.output]
    made = [name for node in model.graph.node if node.domain == DOMAIN for name in node.output if name]
    read = {name for node in model.graph.node if node.domain != DOMAIN for name in node.input}
    integers = [name for name in made if name in read or name in outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in integers if name not in outputs)
    return integers


def images(shared: Path, name: str, shape: list[int | str]) -> np.ndarray:
    """Photos of a model's evaluation set, as many as its batch holds or a few."""
    count = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else 2
    if name.startswith("cnv"):
        return preprocessed(name, np.load(shared / "ref" / f"{name}.npz")["x_uint8"][:count])
    return evaluation_set(shared, name, count)[0]


@dataclass(frozen=True)
class Network:
    """A converted network, what it is fed and what it gives here."""

    path: Path
    feeds: Path
    integers: list[str]
    expected: Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def networks(shared_models: Path, tmp_path_factory) -> dict[str, Network]:
    """Every model, converted and run on this machine."""
    folder, made = tmp_path_factory.mktemp("networks"), {}
    for source in MODELS:
        name = Path(source).name
        model = lowbit.convert(shared_models / f"{source}.onnx").model
        integers = expose_integers(model)
        path, feeds = folder / f"{name}.onnx", folder / f"{name}.npz"
        onnx.save(model, path)
        session = lowbit.session(path, threads=2)
        given = session.get_inputs()[0]
        feed = {given.name: images(shared_models, name, given.shape)}
        np.savez(feeds, **feed)
        names = [value.name for value in session.get_outputs()]
        made[source] = Network(path, feeds, integers, dict(zip(names, session.run(None, feed), strict=True)))
    return made


@pytest.fixture(scope="module")
def python() -> str:
    """Python for ARM with onnxruntime and the wheel; its script runs it."""
    done = subprocess.run([sys.executable, PYTHON, "setup", *WHEELS], text=True, stderr=subprocess.PIPE)
    if done.returncode == aarch64_python.CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return PYTHON


@dataclass(frozen=True)
class There:
    """What came back from an emulated CPU: facts, and the outputs of each job."""

    facts: dict[str, Any]
    converted: Path
    outputs: dict[tuple[str, str], Mapping[str, np.ndarray]]
    regions: dict[tuple[str, str], list[int]]


@pytest.fixture(scope="module")
def there(python: str, networks: dict[str, Network], tmp_path_factory) -> dict[str, There]:
    """Every model on every device of every CPU; the CPUs are emulated side by side."""
    jobs = [(source, device) for source in MODELS for device in DEVICES]
    running = {}
    for cpu in CPUS:
        folder = tmp_path_factory.mktemp(ISA[cpu])
        plan = [
            {
                "model": str(networks[source].path),
                "device": device,
                "feeds": str(networks[source].feeds),
                "outputs": str(folder / f"{number}.npz"),
            }
            for number, (source, device) in enumerate(jobs)
        ]
        feeds = folder / "small.npz"
        np.savez(feeds, **random_feeds(onnx.load(SMALL)))
        small = {"source": str(SMALL), "model": str(folder / "small.onnx"), "device": "cpu"}
        plan.append(small | {"feeds": str(feeds), "outputs": str(folder / "small_outputs.npz")})
        (folder / "plan.json").write_text(json.dumps(plan))
        program = Path(__file__).with_name("run_models.py")
        words = [sys.executable, python, "run", "--cpu", cpu, program, folder / "plan.json"]
        process = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        running[cpu] = process, plan
    found = {}
    for cpu, (process, plan) in running.items():
        shown, errors = process.communicate()
        assert process.returncode == 0, f"{cpu}: {errors}"
        facts = json.loads(shown.splitlines()[-1])
        *ready, small = plan
        outputs = {job: np.load(entry["outputs"]) for job, entry in zip(jobs, ready, strict=True)}
        regions = dict(zip(jobs, facts["regions"][:-1], strict=True))
        found[cpu] = There(facts, Path(small["model"]), outputs, regions)
    return found


@pytest.mark.parametrize("cpu", CPUS)
def test_the_wheel_is_what_runs(cpu: str, there) -> None:
    import onnxruntime

    facts = there[cpu].facts
    assert facts["machine"] == "aarch64"
    assert facts["onnxruntime"] == onnxruntime.__version__
    assert facts["version"] == lowbit.__version__
    assert facts["isa"] == ISA[cpu]
    installed = aarch64_python.LOWBIT.resolve()
    assert Path(facts["package"]).resolve() == installed / "lowbit"
    assert Path(facts["library"]).resolve() == installed / "onnxruntime_ep_lowbit" / "liblowbit.so"


@pytest.mark.parametrize("cpu", CPUS)
def test_converts_and_runs_as_here(cpu: str, there, tmp_path: Path) -> None:
    """The README's five lines: the same file, the same numbers."""
    converted, here = there[cpu].converted, tmp_path / "small.onnx"
    lowbit.convert(SMALL, here)
    assert converted.read_bytes() == here.read_bytes()
    session = lowbit.session(here)
    expected = session.run(None, dict(np.load(converted.with_name("small.npz"))))
    outputs = np.load(converted.with_name("small_outputs.npz"))
    for value, array in zip(session.get_outputs(), expected, strict=True):
        np.testing.assert_allclose(outputs[value.name], array, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", MODELS)
@pytest.mark.parametrize("cpu", CPUS)
def test_equals_x86(cpu: str, source: str, device: str, networks, there) -> None:
    network, outputs = networks[source], there[cpu].outputs[source, device]
    assert set(outputs) == set(network.expected)
    assert network.integers
    for name, expected in network.expected.items():
        if name in network.integers:
            np.testing.assert_array_equal(outputs[name], expected, err_msg=name)
        else:
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-6, atol=0, err_msg=name)
    lowbit_nodes = sum(node.domain == DOMAIN for node in onnx.load(network.path).graph.node)
    inside = sum(there[cpu].regions[source, device])
    assert inside >= lowbit_nodes if device == "cpu-ep" else inside == 0
