"""The documentation tells the truth where a machine can check it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import require_native

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "examples", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_generated_pages_are_current() -> None:
    require_native()
    command = [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"]
    checked = subprocess.run(command, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_reference_of_python_says_what_docstrings_say() -> None:
    require_native()
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from tools import api_reference
    finally:
        sys.path.remove(str(ROOT / "tools"))

    def shown(value: int) -> None:
        """Does it, see :func:`lowbit.convert`.

        Args:
            value: how much;
                at most ``3``.

        Raises:
            ValueError: else.
        """

    text = api_reference.document(shown)
    assert "see `lowbit.convert`." in text
    assert "| `value` | how much; at most `3`. |" in text
    assert "| `ValueError` | else. |" in text
    with pytest.raises(ValueError, match="has no docstring"):
        api_reference.document(lambda: None)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        waiting += [
            (page.parent / target).resolve()
            for target in LINK.findall(page.read_text())
            if "://" not in target
        ]
    pages = {page for name in ("docs", "benchmarks") for page in (ROOT / name).rglob("*.md")}
    assert not pages - seen
