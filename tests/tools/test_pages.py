"""The pages of inspect and quantize in a headless browser; the latter's texts and pictures without one."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from lowbit.errors import LowBitError, OutputError
from lowbit.inspection.inspect import inspect
from lowbit.inspection.quantize_html import clipped_share, rebinned, render
from lowbit.inspection.quantize_plots import write_plots
from lowbit.inspection.report_html import render as render_inspect
from lowbit.quantizer.report import (
    Decision,
    Histogram,
    LayerRecord,
    QuantizeReport,
    StepRecord,
    TensorRecord,
)

from tests.support import require_native
from tests.tools.conftest import DIGITS
from tests.tools.pages import HOSTILE, Browser, assert_needs_nothing_else, find_browser

LAYERS = 20


def quantize_report(layers: int = LAYERS) -> QuantizeReport:
    """As of a network of convolutions, every third tensor signed, the last layer the worst."""
    rng = np.random.default_rng(0)
    report = QuantizeReport("w4a4", 40, 10, config={"bits": "w4a4", "rules": {"depthwise": True}})
    for i in range(layers):
        values = rng.standard_normal(5000) * (1 + i)
        if i % 3:
            values = np.maximum(values, 0)
        counts, edges = np.histogram(values, 500)
        seen = float(values.min()), float(values.max())
        report.tensors.append(
            TensorRecord(
                f"t{i}", 4, i % 3 == 0, i % 4 == 1, "mse", 0.8 * seen[0], 0.8 * seen[1], *seen, 0.1, 0,
                float(30 - i), "default", [f"t{i - 1}"] if i % 5 == 4 else [],
                Histogram(float(edges[0]), float(edges[-1]), counts.tolist()),
            )
        )  # fmt: skip
        report.layers.append(
            LayerRecord(
                f"conv{i}", "Conv", [8, 8, 3, 3], 4, 8 if i == 0 else 4, None if i == layers - 1 else 4,
                f"t{i}", f"t{i + 1}", "default", "descent" if i % 2 else "gptq", 0.05, 20.0, 33.0 - i,
                None if i == 3 else 35.0 - i, 30.0 - i, 28.5 - i, 0.01, 0.02, 0.0, 2304, 288, 1.5,
            )
        )  # fmt: skip
        report.decisions.append(Decision("default", f"conv{i}", "weights at 4 bits"))
    report.steps = [StepRecord("fold", 3, 1e-7), StepRecord("gemm", 1, 2e-4, False, "off by 2e-4")]
    report.kept_float = {"softmax": "it is behind the last layers"}
    report.outputs = {"logits": 11.5, "same": None}
    report.warnings = ["few images"]
    report.seconds = {"ranges": 2.5, "rounding": 100.0}
    report.peak_bytes, report.converted = 10**9, True
    return report


# ---- without a browser


def test_the_page_of_a_quantization_shows_everything_and_needs_nothing_else():
    text = render(quantize_report(), "net.onnx")
    page = assert_needs_nothing_else(text)
    assert "net.onnx" in page.text_of("h1")
    rows = [attrs["id"] for tag, attrs in page.tags if attrs.get("class") == "node lowbit"]
    assert rows == [f"node-{i}" for i in reversed(range(LAYERS))], "the worst first"
    assert len([attrs for _, attrs in page.tags if attrs.get("class") == "band"]) == LAYERS
    cells, cards = page.text_of("td", "dd", "code", "dt"), page.text_of("p")
    for shown in (
        "11.0 dB",
        "+1.5 dB",
        "288 B",
        "gptq",
        "0.02",
        "weights at 4 bits",
        "off by 2e-4",
        "t7",
        "rules.depthwise",
    ):
        assert shown in cells, shown
    for shown in ("11.5 dB", "exact", "5.76 kB", "8.0 times", "1.00 GB"):
        assert shown in cards, shown
    # One histogram per tensor, and those of its own tensors at each layer; the last writes none.
    assert [tag for tag, _ in page.tags].count("figure") == LAYERS + 2 * LAYERS - 1
    lines = [attrs for tag, attrs in page.tags if tag == "polyline"]
    assert [attrs["class"] for attrs in lines].count("alone") == 2, "a gap where a value is not known"


def test_names_of_a_quantization_are_text_whatever_they_say():
    def tags(report: QuantizeReport) -> list[str]:
        return [tag for tag, _ in assert_needs_nothing_else(render(report, HOSTILE)).tags]

    expected = tags(quantize_report(4))
    plain = quantize_report(4)
    for record in (plain.layers[1], plain.tensors[1], plain.steps[1], plain.decisions[1]):
        for field in dataclasses.fields(record):
            if isinstance(getattr(record, field.name), str) and field.name not in ("input", "output"):
                report = quantize_report(4)
                for kind in ("layers", "tensors", "steps", "decisions"):
                    if record in getattr(plain, kind):
                        setattr(getattr(report, kind)[1], field.name, HOSTILE)
                render(report, HOSTILE)
                found = assert_needs_nothing_else(render(report, HOSTILE))
                assert "img" not in [tag for tag, _ in found.tags], field.name
    hostile = quantize_report(4)
    hostile.warnings, hostile.bits = [HOSTILE], HOSTILE
    hostile.kept_float = {HOSTILE: HOSTILE}
    hostile.seconds, hostile.outputs, hostile.config = {HOSTILE: 102.5}, {HOSTILE: 1.0, "b": 2.0}, {
        "bits": HOSTILE, HOSTILE: {"a": 1},
    }  # fmt: skip
    assert tags(hostile).count("script") == expected.count("script") == 1


def test_pages_of_odd_quantizations():
    """Nothing at all; a constant tensor; nothing measured; errors larger than signals."""
    assert_needs_nothing_else(render(QuantizeReport("w8a8")))
    report = quantize_report(3)
    report.tensors[0] = dataclasses.replace(
        report.tensors[0], low=0.0, high=0.0, seen_low=2.0, seen_high=2.0, sqnr=None,
        histogram=Histogram(2.0, 2.0, [7]),
    )  # fmt: skip
    report.tensors[1] = dataclasses.replace(report.tensors[1], histogram=Histogram(0.0, 1.0, [0, 0]))
    report.tensors[2] = dataclasses.replace(report.tensors[2], histogram=None)
    for layer, value in zip(report.layers, (None, -12.0, 1e-9), strict=True):
        layer.sqnr_accumulated = layer.sqnr_output = layer.sqnr_weights = layer.sqnr_input = value
    assert_needs_nothing_else(render(report))


def test_histograms_keep_their_values():
    histogram = Histogram(0.0, 10.0, list(range(500)))
    assert sum(rebinned(histogram, 64)) == sum(histogram.counts)
    assert rebinned(Histogram(0.0, 1.0, [1, 2, 3]), 6) == [0, 1, 0, 2, 0, 3]
    tensor = dataclasses.replace(
        quantize_report(1).tensors[0],
        low=0.0,
        high=5.0,
        histogram=Histogram(0.0, 10.0, [9, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
    )
    assert clipped_share(tensor) == 0.1


def test_plots_are_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    report = quantize_report(9)
    report.tensors[0].name = "a $ sign"
    first = write_plots(report, tmp_path / "new")
    assert [file.name for file in first] == ["layers.png", "ranges.png"]
    for file in first:
        width, height = image.open(file).size
        assert width > 500
        assert height > 300
    with pytest.raises(OutputError, match="exists already"):
        write_plots(report, tmp_path / "new")
    before = first[0].read_bytes()
    write_plots(report, tmp_path / "new", overwrite=True)
    assert first[0].read_bytes() == before, "the same report gives the same file"
    assert write_plots(QuantizeReport("w8a8"), tmp_path / "none") == []


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LowBitError, match=r"pip install 'lowbit\[quantize\]'"):
        write_plots(quantize_report(2), tmp_path)


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Browser:
    return find_browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A page of inspect and one of quantize."""
    require_native()
    home = tmp_path_factory.mktemp("pages")
    texts = {
        "inspect": render_inspect(inspect(DIGITS / "digits_w8a8.onnx")),
        "quantize": render(quantize_report(), "net.onnx"),
    }
    for name, text in texts.items():
        (home / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: home / f"{name}.html" for name in texts}


@pytest.mark.parametrize("name", ["inspect", "quantize"])
def test_the_page_runs_in_a_browser_under_its_own_policy(browser, pages, name):
    """Its script has run where every row opens by a button, and nothing was complained about."""
    dom = browser.run(pages[name], "--dump-dom")
    assert re.search(rf"{LAYERS} of {LAYERS} layers" if name == "quantize" else r"\d+ of \d+ nodes", dom)
    assert 'aria-expanded="false"' in dom


def test_a_reader_finds_filters_sorts_and_opens(browser, pages):
    found = browser.ask(
        pages["quantize"],
        r"""
        const first = () => document.querySelector("tbody.node:not([hidden])").id;
        const head = (key) => document.querySelector(`th[data-key=${key}]`);
        const seen = { start: first(), sorted: head("accumulated").getAttribute("aria-sort"),
                       select: document.getElementById("sort").value };
        head("accumulated").querySelector("button").click();
        seen.reversed = first();
        head("gained").querySelector("button").click();
        seen.gained = head("gained").getAttribute("aria-sort");
        const filter = document.getElementById("filter");
        filter.value = "conv1 gptq";
        filter.dispatchEvent(new Event("input"));
        seen.filtered = document.getElementById("count").textContent;
        document.querySelectorAll(".band")[3].dispatchEvent(new MouseEvent("click"));
        const marked = document.querySelector(".marked");
        seen.opened = [marked.id, marked.querySelector(".detail").hidden, filter.value];
        const plot = marked.querySelector(".histogram svg").getBoundingClientRect();
        seen.plot = plot.width > 200 && plot.height > 40;
        document.querySelectorAll(".band")[3].focus();
        seen.tip = document.getElementById("tip").textContent.split("\n")[0];
        seen.wide = document.documentElement.scrollWidth - innerWidth;
        return seen;
        """,
        "--window-size=1300,900",
    )
    assert found == {
        "start": f"node-{LAYERS - 1}",
        "sorted": "ascending",
        "select": "4",
        "reversed": "node-0",
        "gained": "descending",
        "filtered": f"5 of {LAYERS} layers",
        "opened": ["node-3", False, ""],
        "plot": True,
        "tip": "conv3",
        "wide": 0,
    }


@pytest.mark.parametrize("name", ["inspect", "quantize"])
def test_the_page_fits_a_phone(browser, pages, name):
    wide = browser.ask(
        pages[name], "return document.documentElement.scrollWidth - innerWidth", "--window-size=500,900"
    )
    assert wide <= 0


@pytest.mark.parametrize("name", ["inspect", "quantize"])
def test_the_page_is_light_or_dark_as_the_system_says(browser, pages, name, tmp_path):
    corners = {}
    for dark in (False, True):
        picture = browser.picture(pages[name], tmp_path / f"{dark}.png", dark=dark).convert("L")
        corners[dark] = picture.getpixel((2, 2))
        low, high = picture.getextrema()
        assert high - low > 150, "there is something to read"
    assert corners[False] > 200
    assert corners[True] < 60
