"""The README's table, its picture and the index of results say what the results files say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tools import result_pages
from tools.result_pages import RESULTS, THEMES, Claim


def test_the_table_has_eight_rows_and_a_loss_of_each_kind() -> None:
    rows = result_pages.claims().splitlines()
    assert len(rows) == 2 + 8
    text = "\n".join(rows)
    for loss in ("OpenVINO", "stock", "ncnn", "slower than w8a8"):
        assert loss in text.partition("where it loses")[2]


@pytest.mark.parametrize(
    ("lowbit", "peer", "fewer", "losses"),
    [
        (0.5, 0.6, {}, "-"),
        (0.5, 0.4, {}, "peer"),
        (1.1, 1.2, {}, "stock"),
        (0.5, 0.501, {"w4a4": 0.499}, "-"),
        (0.5, 0.6, {"w4a4": 0.6, "w2a2": 0.4}, "w4a4 slower than w8a8"),
        (1.1, 0.4, {"w4a4": 1.2, "w2a2": 1.3}, "peer; stock; w4a4, w2a2 slower than w8a8"),
    ],
)
def test_a_row_says_what_it_loses(lowbit: float, peer: float, fewer: dict[str, float], losses: str) -> None:
    claim = Claim("here", "int8", lowbit, {"peer": peer}, fewer)
    assert claim.loses() == losses
    cells = claim.row()
    least = min(lowbit, peer, *fewer.values())
    assert [cell for cell in cells if "**" in cell] == [cell for cell in cells if f"**{least:.2f}**" in cell]


def test_ratios_are_those_of_the_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("onnxruntime w8a8", 1, 10.0), ("lowbit w8a8", 1, 8.0), ("lowbit w2a2", 1, 5.0)]
    rows += [("openvino w8a8, layers only", 1, 9.0), ("onnxruntime w8a8", 2, 7.0)]
    raw = [{"name": name, "threads": threads, "median_ms": ms} for name, threads, ms in rows]
    (tmp_path / "one.json").write_text(json.dumps({"raw": {"net": raw}}))
    monkeypatch.setattr(result_pages, "RESULTS", tmp_path)
    claim = result_pages.cpu_claim("here", "one", "net")
    assert (claim.lowbit, claim.peers, claim.fewer) == (0.8, {"OpenVINO int8": 0.9}, {"w2a2": 0.5})


@pytest.mark.parametrize("name", THEMES)
def test_the_picture_is_well_formed_and_fits(name: str) -> None:
    svg = xml.etree.ElementTree.fromstring(result_pages.chart(THEMES[name]))
    width = float(svg.attrib["viewBox"].split()[2])
    bars = [each for each in svg if each.tag.endswith("rect")]
    assert len(bars) == sum(len(panel.bars) for panel in result_pages.panels())
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) < width - 60 for bar in bars)


def test_the_index_names_every_results_file_once() -> None:
    linked = re.findall(r"^### .*\((\w+\.md)\)$", result_pages.index(), flags=re.MULTILINE)
    pages = {path.name for path in RESULTS.glob("*.md")} - {"index.md"}
    assert sorted(linked) == sorted(pages)


def test_speed_ups_are_averaged_over_the_layers_that_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(result_pages.__file__).parent))
    from tools import paper_pages

    assert paper_pages.winners([2.0, 1.0, 0.5, 1.5]) == "2 of 4, 1.75"
    assert paper_pages.winners([0.5]) == "0 of 1"
    assert paper_pages.stated("figure 7", "2") == "17 of 19, 1.60"
    assert [len(paper_pages.gpu_rows(batch)) for batch in (1, 16)] == [19, 19]
