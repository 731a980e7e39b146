"""Builds the documentation as a site: build/site/html/index.html, with search.

The pages stay where a reader of the repository expects them. Here they, and the files that they link to, are
collected under build/site/pages in the same folders, so that every relative link holds; what stands in the
repository alone must not be linked, because mkdocs, which runs in strict mode, finds no page for it. Nothing
is fetched when a page is read: no fonts, no scripts from elsewhere, which is checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
PAGES, HTML = SITE / "pages", SITE / "html"
FOLDERS = ("docs", "benchmarks", "ep", "examples", "models", "tests")
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")
FETCHED = re.compile(
    r"<(?:link|script|img|source|iframe)\b[^>]*?(?:src|href|srcset)=\"(?:https?:)?//[^\"]*", re.I
)
IMPORTED = re.compile(r"@import\s*\S+|url\(\s*[\"']?(?:https?:)?//[^)]*")
STYLE = """/* Wide tables scroll by themselves, so that a phone shows the text at its width. */
.md-typeset table:not([class]) { font-size: .64rem; }
.md-typeset table:not([class]) th { min-width: 3rem; }
.md-typeset table:not([class]) td:first-child { min-width: 7rem; }
.md-grid { max-width: 72rem; }
"""


def sources() -> list[Path]:
    """The Markdown pages of the repository."""
    pages = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *pages]


def list_folder(folder: Path) -> str:
    """A page that stands for a linked folder: the files that it holds."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def collect() -> None:
    """Fills build/site/pages."""
    shutil.rmtree(SITE, ignore_errors=True)
    pages = sources()
    folders: set[Path] = set()
    files: set[Path] = set((ROOT / "docs").rglob("*.svg"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for _, target, _ in LINK.findall(text):
            linked = (page.parent / target).resolve()
            if linked.is_dir():
                folders.add(linked)
            elif linked.is_file() and linked.suffix != ".md":
                files.add(linked)

        def into_page(match: re.Match[str], page: Path = page) -> str:
            opening, target, closing = match.groups()
            linked = (page.parent / target).resolve()
            return f"{opening}{target.rstrip('/')}/index.md{closing}" if linked in folders else match[0]

        write(page, LINK.sub(into_page, text))
    for folder in folders:
        files |= {path for path in folder.iterdir() if path.is_file() and path.suffix != ".md"}
        if folder / "README.md" not in pages:
            write(folder / "index.md", list_folder(folder))
    for file in files:
        write(file, file.read_text(encoding="utf-8"))
    (PAGES / "site.css").write_text(STYLE, encoding="utf-8")


def write(path: Path, text: str) -> None:
    """One file of the repository, or of a folder of it, into the same place under build/site/pages."""
    target = PAGES / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def fetched() -> list[str]:
    """What a browser would fetch from elsewhere to show a page: `file: tag` for each."""
    found = []
    for path in sorted(HTML.rglob("*")):
        pattern = {".html": FETCHED, ".css": IMPORTED}.get(path.suffix)
        if pattern is not None:
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(HTML)}: {match[0]}" for match in pattern.finditer(text)]
    return found


def main() -> int:
    """Entry point; returns the exit status."""
    collect()
    # Not with --quiet: it drops the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's news about its successor
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status != 0:
        return status
    elsewhere = fetched()
    for line in elsewhere:
        print(f"fetched from elsewhere: {line}")
    print(f"{HTML.relative_to(ROOT)}/index.html")
    return 1 if elsewhere else 0


if __name__ == "__main__":
    sys.exit(main())
