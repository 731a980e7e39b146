"""Some file operations that fail; `python -m tests.faults.files` tries every one of them."""

from __future__ import annotations

import pytest

from tests.conftest import SANITIZED
from tests.faults.allocations import injector
from tests.faults.files import tried
from tests.support import require_native

pytestmark = [
    pytest.mark.skipif(injector() is None, reason="liblowbit_faults is not built (-DLOWBIT_TESTS=ON)"),
    pytest.mark.skipif(SANITIZED, reason="it is preloaded, and so is a sanitizer"),
]


def test_disks_that_are_full_or_broken_and_processes_that_are_killed() -> None:
    require_native()
    rows, failures = tried(["convert", "replace", "compile beside", "choices"], every=4)
    assert {row["fault"] for row in rows} == {"disk full", "read error", "killed"}
    assert not failures, failures
