"""The network that is served, and where the examples are."""

from __future__ import annotations

from pathlib import Path

import lowbit
import onnx
import pytest
from lowbit.models import build

from tests.support import require_native

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
