"""Every test in this folder needs an NVIDIA GPU (marker `gpu`) and is skipped with the reason without one."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu() -> None:
    from tests.gpu.support import why_no_gpu

    reason = why_no_gpu()
    if reason:
        pytest.skip(f"no GPU: {reason}")


@pytest.fixture(scope="session")
def model() -> onnx.ModelProto:
    """A small network with every kind of step, its batch open: input [N, 3, 32, 32], ten logits."""
    import lowbit
    from lowbit.models import build

    return lowbit.convert(build("resnet18", 8, 8, image=32, batch="N", classes=10)).model
