"""The packages of converter/lowbit/ import each other in the order of the table in docs/design.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "converter" / "lowbit"
EVERYBODYS = {"_native", "__version__"}
"""Names of the package itself that every module may import."""


def layers() -> list[list[str]]:
    """The first column of the table, row by row."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.split("| Package | What lives there |")[1].split("\n\n")[0]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and name below lowbit of every import of it, wherever in a module it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "lowbit":
                yield node.lineno, rest.split(".")[0]


def misplaced(module: str, source: str, rank: dict[str, int]) -> list[str]:
    """The imports of a module that do not point to its own layer or one above it in the table."""
    own = rank[module.split("/")[0].removesuffix(".py")]
    return [
        f"{module}:{line} imports {name or 'the whole package'}"
        for line, name in imports(source)
        if name not in EVERYBODYS and rank.get(name, len(rank)) > own
    ]


RANK = {name: rank for rank, names in enumerate(layers()) for name in names}
MODULES = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py"))


def test_the_table_names_every_package() -> None:
    found = {module.split("/")[0].removesuffix(".py") for module in MODULES}
    assert found - {"__init__", "__main__"} == set(RANK)


@pytest.mark.parametrize("package", RANK)
def test_nothing_imports_upward(package: str) -> None:
    modules = [m for m in MODULES if m.split("/")[0].removesuffix(".py") == package]
    assert not [
        text
        for module in modules
        for text in misplaced(module, (SOURCES / module).read_text(encoding="utf-8"), RANK)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from lowbit.cli import common",
        "import lowbit.sessions.session",
        "def late():\n    from lowbit import conversion",
        "if TYPE_CHECKING:\n    from lowbit.rewrites.rule import Rule",
        "import lowbit",
        "from lowbit import session",
    ],
)
def test_an_import_upward_is_found(source: str) -> None:
    assert misplaced("graph/shapes.py", source, RANK)
    assert not misplaced("graph/shapes.py", "from lowbit.ops.windows import Windows", RANK)
