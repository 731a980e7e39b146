"""The pages that become a site: links hold there, and a reader's browser fetches nothing from elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import build_site


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_site, "ROOT", tmp_path)
    for name, folder in (("SITE", ""), ("PAGES", "pages"), ("HTML", "html")):
        monkeypatch.setattr(build_site, name, tmp_path / "build" / "site" / folder)
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples" / "app").mkdir(parents=True)
    (tmp_path / "examples" / "app" / "main.cc").write_text("int main() {}\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n")
    (tmp_path / "docs" / "index.md").write_text("[app](../examples/app), [it](../examples/app/main.cc)\n")
    (tmp_path / "README.md").write_text("[docs](docs/index.md#top) [far](https://example.org)\n")
    return tmp_path


def test_pages_keep_their_folders_and_linked_files_come_along(repository: Path) -> None:
    build_site.collect()
    pages = repository / "build" / "site" / "pages"
    assert (pages / "README.md").read_text() == (repository / "README.md").read_text()
    assert (pages / "examples" / "app" / "main.cc").exists()
    assert "(../examples/app/index.md)" in (pages / "docs" / "index.md").read_text()
    assert "[main.cc](main.cc)" in (pages / "examples" / "app" / "index.md").read_text()


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("a.html", '<link rel="stylesheet" href="https://fonts.example.org/x.css">', True),
        ("a.html", '<script src="//cdn.example.org/x.js"></script>', True),
        ("a.css", "@import url(https://example.org/x.css);", True),
        ("a.css", "a { background: url('https://example.org/x.png') }", True),
        ("a.html", '<a href="https://example.org">a link to follow</a><script src="x.js"></script>', False),
        ("a.css", "a { background: url(data:image/png;base64,x) }", False),
    ],
)
def test_what_a_browser_would_fetch_is_found(repository: Path, file: str, text: str, found: bool) -> None:
    html = repository / "build" / "site" / "html"
    html.mkdir(parents=True)
    (html / file).write_text(text)
    assert bool(build_site.fetched()) == found


@pytest.mark.parametrize("link", ["", "[x](nowhere.md)", "[x](index.md#nowhere)"])
def test_a_link_that_leads_nowhere_fails(repository: Path, link: str) -> None:
    pytest.importorskip("material")
    (repository / "docs" / "index.md").write_text(f"# Pages\n\n[start](../README.md) {link}\n")
    (repository / "README.md").write_text("# Start\n\n[docs](docs/index.md)\n")
    settings = (Path(build_site.__file__).parents[1] / "mkdocs.yml").read_text()
    head = settings.partition("\nnav:")[0]
    nav = "nav: [README.md, docs/index.md, CONTRIBUTING.md]\nnot_in_nav: /examples/*\n"
    (repository / "mkdocs.yml").write_text(f"{head}\n{nav}")
    shutil.rmtree(repository / "examples")
    assert (build_site.main() != 0) == bool(link)
