"""tools/check_docs.py finds each kind of drift, and this repository has none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest

from tests.support import require_native
from tools import check_docs

PAGE = "# A page\n\n## A `part` of it, [linked](src/a.cc)\n\n"


@click.group()
@click.option("--quiet", is_flag=True)
def cli() -> None:
    pass


@cli.command()
@click.option("--device")
def run() -> None:
    pass


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "Makefile").write_text("demo: # see src/a.cc\n\techo\n")
    (tmp_path / "src" / "a.cc").write_text("// It belongs to src/a.cc.\n")
    (tmp_path / "src" / "b.py").write_text('"""See a.cc."""\nNAME = "--fast"  # and src/b.py\n')
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n" * 200, "at most 120"),
        ("It takes 10.3 ms.\n", "typed by hand"),
        ("It takes .42 of that.\n", "typed by hand"),
        ("<!-- begin x -->\nIt takes 10.3 ms.\n<!-- end x -->\n", ""),
        ("[x](src/a.cc) [y](https://example.org/z.md) [z](#a-part-of-it-linked)\n", ""),
        ("[x](src/c.cc)\n", "leads nowhere"),
        ("[x](#nothing)\n", "no heading #nothing"),
        ("`[x](src/c.py)` is how a link is written\n", "there is no src/c.py"),
        ("`src/a.cc`, `a.cc`, `build/x/y.cc`, `out/*.py`, `NAME.py.txt`\n", ""),
        ("`src/gone.cc`\n", "there is no src/gone.cc"),
        ("`gone.cc`\n", "there is no gone.cc"),
        ("    make demo\n", ""),
        ("    make nothing\n", "no target nothing"),
        ("`lowbit run x --device cuda --quiet`\n", ""),
        ("`lowbit walk`\n", "no command walk"),
        ("`lowbit run x --slow`\n", "lowbit run has no option --slow"),
        ("    python src/b.py --fast | tail --lines 3\n", ""),
        ("    python src/b.py --slow\n", "b.py has no option --slow"),
        ("    pytest -q tests\n    pytest tests/\n", ""),
        ("    pytest -q tests/gone\n", "pytest tests/gone"),
    ],
)
def test_drift_in_a_page(repository: Path, text: str, complaint: str) -> None:
    (repository / "README.md").write_text(PAGE + text)
    found = list(check_docs.findings(repository, cli))
    assert [line for line in found if complaint in line] if complaint else not found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("src/a.cc", "// As in gone.h.\n"),
        ("src/a.h", 'int x;  // kernels/gone.cc\nconst char* kUrl = "https://example.org/not.h";\n'),
        ("src/b.py", "x = 1  # as in gone.py\n"),
        ("src/b.py", '"""As in gone.py."""\n'),
        ("src/run.sh", "# calls gone.py\n"),
        ("CMakeLists.txt", "# gone.cmake\n"),
    ],
)
def test_drift_in_a_comment(repository: Path, file: str, text: str) -> None:
    (repository / file).write_text(text)
    (found,) = check_docs.findings(repository, cli)
    assert "there is no" in found
    assert "gone" in found


def test_strings_are_no_comments(repository: Path) -> None:
    (repository / "src" / "b.py").write_text('NAME = "gone.py --fast"\n')
    assert not list(check_docs.findings(repository, cli))


def test_this_repository_has_no_drift() -> None:
    require_native()
    if not (check_docs.ROOT / ".git").exists():
        pytest.skip("not a clone")
    from lowbit.cli import cli as lowbit_command

    assert not list(check_docs.findings(check_docs.ROOT, lowbit_command))
