"""Pages of reports: what a parser finds in them, and what a browser makes of them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

HOSTILE = "</script><script>alert(1)</script><img onerror=x>\"'&amp;{{7*7}}"

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.stack == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "wbr", "br", "img", "link"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack, tag
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def text_of(self, *tags: str) -> str:
        return "".join(data for tag, data in self.texts if tag in tags)


def assert_needs_nothing_else(text: str):
    """No reference to anything outside of the page, and no script but its own."""
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attrs.items():
            assert name not in ("src", "href", "srcset", "style", "action"), (tag, name)
            assert not name.startswith("on"), (tag, name)
            assert "url(" not in (value or ""), (tag, value)
    assert [tag for tag, _ in page.tags].count("script") == 1
    style, script = page.text_of("style"), page.text_of("script")
    for content in (style, script):
        assert not re.search(r"https?:|//\w|@import|import\(|fetch\(|XMLHttp", content)
    assert set(re.findall(r"url\(([^)]*)\)", style)) <= {"#hatch"}
    policy = next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")
    for content in (style, script):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    return page


class Browser:
    """A headless browser, a process for each look at a page."""

    def __init__(self, program: str, home: Path) -> None:
        self.program, self.home = program, home

    def run(self, page: Path, *options: str) -> str:
        """Loads a page with further options; what it prints. Whatever the page complains about fails."""
        command = [
            self.program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={self.home / 'profile'}",
            *options, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not complaints
        return done.stdout

    def ask(self, page: Path, script: str, *options: str):
        """What a script in the page returns, once the page's own has run.

        The script is put into a copy of the page without the policy that would forbid it.
        """
        text = re.sub(
            r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8")
        )
        asking = f"document.title = JSON.stringify((() => {{ {script} }})())"
        copy = self.home / f"asked-{page.name}"
        copy.write_text(text.replace("</body>", f"<script>{asking}</script></body>"), encoding="utf-8")
        dom = self.run(copy, "--dump-dom", *options)
        return json.loads(html.unescape(dom[dom.index("<title>") + 7 : dom.index("</title>")]))

    def picture(self, page: Path, target: Path, *, dark: bool):
        """A screenshot in one of the two color schemes, as a Pillow image."""
        image = pytest.importorskip("PIL.Image")
        self.run(page, f"--screenshot={target}", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
        return image.open(target)


def find_browser(home: Path) -> Browser:
    """The browser of this machine; skips where there is none."""
    for name in BROWSERS:
        program = shutil.which(name)
        if program is not None:
            return Browser(program, home)
    pytest.skip(f"no browser on PATH: one of {', '.join(BROWSERS)}")
