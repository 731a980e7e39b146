"""The network that is served, a Ray cluster, and where the examples are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lowbit
import onnx
import pytest
from lowbit.models import build

from tests.support import require_native

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small QDQ classifier with seeded weights: float32 [N, 3, 32, 32] in, [N, 10] out."""
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    onnx.save(build("mobilenetv2", 8, 8, image=32, batch="N", classes=10), path)
    return path


@pytest.fixture(scope="session")
def converted(quantized: Path) -> Path:
    """The same, converted."""
    require_native()
    path = quantized.with_name("model.lowbit.onnx")
    lowbit.convert(quantized, path)
    return path


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this machine with room for two workers."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lowbit[cluster]'")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # not behind whatever else the machine does
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
