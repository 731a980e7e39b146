"""What every benchmark writes: a JSON and a Markdown file that say where, when and how they were measured."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lowbit.inspection.sysinfo import sysinfo

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "benchmarks"
"""Where benchmarks put the models that they build."""

Cell = str | int | float


@dataclass
class Table:
    """A table of a results file."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table as Markdown; floats with three significant digits."""
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def write(
    name: str,
    title: str,
    tables: Sequence[Table],
    notes: Sequence[str],
    raw: Any,
    *,
    folder: Path = RESULTS,
    machine: Mapping[str, Cell] | None = None,
    versions: Mapping[str, str] | None = None,
    commit: str | None = None,
) -> None:
    """Writes results/<name>.json and .md, and prints the latter.

    Args:
        name: File name without suffix.
        title: Heading.
        tables: What a reader wants to see.
        notes: Sentences under the heading: what was compared, what was checked.
        raw: Everything that was measured, JSON values.
        folder: Where the files go.
        machine: More facts about it, such as its GPU; or others, where this machine is not what counts.
        versions: Of what was measured beside lowbit; None: the packages of this Python.
        commit: What was measured; None: git knows.
    """
    facts = sysinfo()
    if versions is None:
        found = {**facts["versions"], **{package: _version(package) for package in ("openvino", "torch")}}
    else:
        found = {"lowbit": facts["versions"]["lowbit"], **versions}
    document = {
        "title": title,
        "machine": {**facts["machine"], "isa": facts["isa"]["used"], **(machine or {})},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {package: version for package, version in found.items() if version},
        "command": _command(),
        "commit": commit or commit_here(),
        "notes": list(notes),
        "tables": [_rounded(asdict(table)) for table in tables],
        "raw": _rounded(raw),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = _markdown(document, tables)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def _command() -> str:
    """What was called, less the options that do not change what is measured."""
    words, left_out = (
        iter(sys.argv[1:]),
        ("--out", "--commit", "--cost-tool", "--setup", "--bench", "--state"),
    )
    kept = []
    for word in words:
        if word in left_out:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in left_out)):
            kept.append(word)
    module = sys.modules["__main__"].__spec__  # of `python -m`
    called = [os.path.relpath(sys.argv[0], ROOT)] if module is None else ["-m", module.name]
    return shlex.join(["python", *called, *kept])


def _rounded(value: Any) -> Any:
    """JSON values with floats to five significant digits: more is noise."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _markdown(document: dict[str, Any], tables: Sequence[Table]) -> str:
    machine, versions = document["machine"], document["versions"]
    device = f"{machine['device']}, driver {machine['driver']}; " if "device" in machine else ""
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    lines = [
        f"# {document['title']}",
        "",
        f"{device}{machine['cpu']}, {cores}, {machine['system']}, {machine['isa']}; "
        + ", ".join(f"{package} {version}" for package, version in versions.items()),
        "",
        f"{document['date']}, commit {document['commit']}: `{document['command']}`",
        "",
        *[f"- {note}" for note in document["notes"]],
        "",
    ]
    return "\n".join(lines) + "\n" + "\n".join(table.markdown() for table in tables)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_here() -> str:
    """The commit that was measured, with a + where a file that matters to speed differs from it."""
    watched = ["custom_ops", "ep", "converter", "models"]
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return f"{head}+" if _git("status", "--porcelain", "--untracked-files=no", "--", *watched) else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
