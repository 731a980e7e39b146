"""Every test in this folder needs an NVIDIA GPU (marker `gpu`) and is skipped with the reason without one."""

from __future__ import annotations

from pathlib import Path

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
