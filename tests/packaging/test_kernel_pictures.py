"""The pictures of GPU kernels in docs/kernels.md: every row has one, and no text runs out of it."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tools import kernel_pictures
from tools.kernel_pictures import CHARACTER, FAMILIES, FONT, MARGIN, WIDTH, Bar, Cell, Family, Group, Lane

PICTURES = kernel_pictures.pictures()
SVG = "{http://www.w3.org/2000/svg}"


def test_every_row_has_a_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(kernel_pictures.__file__).parent))
    docs = importlib.import_module("generate_docs")
    rows = {row.name for folder in ("conv", "fused") for row in docs.cuda_rows(folder)}
    assert rows - set(FAMILIES) == {"mma"}  # have that of wgmma
    assert not set(FAMILIES) - rows


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_runs_out(name):
    svg = xml.etree.ElementTree.fromstring(PICTURES[name])
    height = float(svg.get("viewBox", "").split()[3])
    for rect in svg.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(each, "")) for each in ("x", "y", "width", "height"))
        assert min(x, y) >= 0, rect.attrib
        assert x + w <= WIDTH, rect.attrib
        assert y + h <= height, rect.attrib
    for text in svg.iter(f"{SVG}text"):
        width = len(text.text or "") * CHARACTER * FONT
        x = float(text.get("x", "")) - (width / 2 if text.get("text-anchor") == "middle" else 0)
        assert x + width <= WIDTH or text.get("text-anchor") == "middle", text.text
        assert float(text.get("y", "")) <= height - MARGIN / 2
    assert PICTURES[name].count("prefers-color-scheme:dark") == 1


def test_a_text_that_does_not_fit_is_an_error():
    family = Family("title", "", "memory", [Group("", [Cell("cell", "pixels")])], [])
    fits = Family(**{**vars(family), "lanes": [Lane("lane", [Bar(0, 1, "codes", "short")])]})
    assert "short" in kernel_pictures.draw(fits)
    long = [Bar(0, 1, "codes", "too long a text"), Bar(1, 9, "codes")]
    with pytest.raises(ValueError, match="'too long a text' does not fit"):
        kernel_pictures.draw(Family(**{**vars(family), "lanes": [Lane("lane", long)]}))
