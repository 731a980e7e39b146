"""Finds documentation that has drifted from the repository, where a machine can; exit 1 and a line for each.

| what | must |
| --- | --- |
| README.md | have at most 120 lines, and no measured figure outside of a generated block |
| a link in a page | lead to a file, and to a heading of it |
| a file named in a page (as code) or in a comment | exist, under its path or the end of it |
| a command in a page: make, lowbit, python and a script, pytest and a path | exist, with these options |
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
README_LINES = 120
ENDINGS = "cc|h|cu|cuh|inc|py|sh|md|json|toml|yml|cmake|map"
FILE = re.compile(rf"(?<![\w./<>*{{}}$~:%-])((?:[\w.-]+/)*[\w-][\w.-]*\.(?:{ENDINGS}))(?![\w*<>{{/-]|\.\w)")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
MEASURED = re.compile(r"(?<![\w.])(?:\d+\.)?\d+ ?(?:times|ms|us|%|MB)(?!\w)|(?<![\w.])0?\.\d{2}(?!\d)")
# Names of files that a user, a build or another project has, and this repository has not.
ELSEWHERE = {
    "labels.json",  # a user's right answers, and functions
    "file.py",
    "BUILD.md",  # what `lowbit export-mobile` writes
    "manifest.json",
    "armcost.py",  # the tool that benchmarks/arm_layers.py calls
    "lowbit_selection.h",  # what a minimal build writes
    "PLAN.json",  # an argument of tests/aarch64
    "pyconfig.h",  # Python's, Linux's, ONNX Runtime's, Brevitas'
    "hwcap.h",
    "onnxruntime_c_api.h",
    "onnxruntime_cxx_api.h",
    "qdq_quantizer.py",
    "ContribOperators.md",
    "qcdq.py",
}


class Repository:
    """The files that git knows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            text=True,
            capture_output=True,
        )
        self.files = sorted(line for line in listed.stdout.splitlines() if (root / line).is_file())

    @cached_property
    def suffixes(self) -> set[str]:
        """Every file under every end of its path, down to its name alone."""
        parts = (file.split("/") for file in self.files)
        return {"/".join(each[start:]) for each in parts for start in range(len(each))}

    def text(self, file: str) -> str:
        """What a file says."""
        return (self.root / file).read_text(encoding="utf-8")

    def pages(self) -> list[str]:
        """Markdown pages written by hand or generated, but for results: a record may name what is gone."""
        return [file for file in self.files if file.endswith(".md") and "/results/" not in file]


def without_code(text: str) -> str:
    """A page without its fenced and indented code and without inline code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def code_of(text: str) -> str:
    """The code of a page, a piece a line."""
    pieces = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    pieces += re.findall(r"^ {4}(.*)$", rest, flags=re.MULTILINE)
    return "\n".join([*pieces, *(piece.replace("\n", " ") for piece in re.findall(r"`([^`]+)`", rest))])


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    out: set[str] = set()
    headings = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ (.*)$", headings, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        number = 1
        while (numbered := slug if number == 1 else f"{slug}-{number - 1}") in out:
            number += 1
        out.add(numbered)
    return out


def check_readme(repository: Repository) -> Iterator[str]:
    """The budget of lines, and figures that nothing generates."""
    text = repository.text("README.md")
    count = len(text.splitlines())
    if count > README_LINES:
        yield f"README.md: {count} lines; at most {README_LINES}: move something into docs/"
    blocks = re.sub(
        r"<!-- begin .*?<!-- end .*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL
    )
    for number, line in enumerate(blocks.splitlines(), 1):
        found = MEASURED.search(line)
        if found:
            yield f"README.md:{number}: '{found[0]}' is typed by hand; tools/result_pages.py writes figures"


def check_links(repository: Repository) -> Iterator[str]:
    """Every link of every page leads to a file, and to a heading in it."""
    anchors = {}
    for page in [file for file in repository.files if file.endswith(".md")]:
        for target, anchor in LINK.findall(without_code(repository.text(page))):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = ((repository.root / page).parent / target).resolve() if target else repository.root / page
            if not path.exists():
                yield f"{page}: the link to {target} leads nowhere"
            elif anchor and path.suffix == ".md":
                if path not in anchors:
                    anchors[path] = slugs(path.read_text(encoding="utf-8"))
                if anchor not in anchors[path]:
                    yield f"{page}: {target or 'the page itself'} has no heading #{anchor}"


def comments(file: str, text: str) -> Iterator[tuple[int, str]]:
    """The comments of a source file, with their lines; in Python docstrings, too."""
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or (
                token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
            ):
                yield token.start[0], token.string
    else:
        slashes = file.endswith((".cc", ".h", ".cu", ".cuh", ".inc"))
        pattern = r"(?<![:\"'])//(.*)$" if slashes else r"(?:^|\s)#(.*)$"
        for number, line in enumerate(text.splitlines(), 1):
            found = re.search(pattern, line)
            if found:
                yield number, found[1]


def named_files(repository: Repository, where: str, file: str, text: str) -> Iterator[str]:
    """A line for every file that `text` names and the repository lacks."""
    for name in dict.fromkeys(FILE.findall(text)):
        known = name in repository.suffixes or name.removeprefix("./") in repository.suffixes
        beside = ((repository.root / file).parent / name).exists()
        elsewhere = name.split("/")[-1] in ELSEWHERE or name.startswith(("build/", "dist/"))
        if not (known or beside or elsewhere):
            yield f"{where}: there is no {name}"


def check_files(repository: Repository) -> Iterator[str]:
    """Files that pages name as code, and that comments name."""
    for page in repository.pages():
        yield from named_files(repository, page, page, code_of(repository.text(page)))
    sources = re.compile(r"\.(?:cc|h|cu|cuh|inc|py|sh|cmake|txt|toml)$|^Makefile$")
    for file in repository.files:
        if sources.search(file):
            for line, text in comments(file, repository.text(file)):
                yield from named_files(repository, f"{file}:{line}", file, text)


def check_commands(repository: Repository, cli: click.Group) -> Iterator[str]:
    """Commands in the code of pages."""
    targets = set(re.findall(r"^([\w-]+):(?!=)", repository.text("Makefile"), flags=re.MULTILINE))
    context = click.Context(cli)
    shared = options_of(cli)
    for page in repository.pages():
        code = code_of(repository.text(page))
        for target in re.findall(r"(?:^|[ (])make ([a-z][\w-]*)", code, flags=re.MULTILINE):
            if target not in targets:
                yield f"{page}: make has no target {target}"
        for name, rest in re.findall(r"(?:^|[ (])lowbit ([a-z]\w*)([^\n|#;&]*)", code, flags=re.MULTILINE):
            command = cli.get_command(context, name)
            if command is None:
                yield f"{page}: lowbit has no command {name}"
                continue
            for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest):
                if option not in options_of(command) | shared:
                    yield f"{page}: lowbit {name} has no option {option}"
        for script, rest in re.findall(r"python(?:3)? ([\w./-]+\.py)([^\n|#;&]*)", code):
            places = (script, f"{Path(page).parent}/{script}")
            path = next((each for each in places if each in repository.files), None)
            if path is None:
                continue  # Whether the file exists is asked elsewhere.
            for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest):
                if option != "--help" and f'"{option}"' not in repository.text(path):
                    yield f"{page}: {script} has no option {option}"
        for path in re.findall(r"pytest (?:-\S+ )*(tests/[\w./-]+)", code):
            if not (repository.root / path).exists():
                yield f"{page}: pytest {path}: there is no such path"


def options_of(command: click.Command) -> set[str]:
    """The long options of a command."""
    words = (word for each in command.params for word in (*each.opts, *each.secondary_opts))
    return {"--help", *words}


def findings(root: Path, cli: click.Group) -> Iterable[str]:
    """Everything that has drifted."""
    repository = Repository(root)
    yield from check_readme(repository)
    yield from check_links(repository)
    yield from check_files(repository)
    yield from check_commands(repository, cli)


def main() -> int:
    """Entry point; returns the exit status."""
    from lowbit.cli import cli

    found = list(findings(ROOT, cli))
    print("\n".join(found) if found else "no drift found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
