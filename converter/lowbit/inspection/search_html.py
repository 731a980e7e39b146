"""The page that ``lowbit search --report`` writes: the Pareto front, and what each width costs and does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.inspection.page import render_page, size
from lowbit.searcher.report import Point, SearchReport

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _MARGIN = 780, 320, 64, 36, 24, 12  # pixels
_LEAST = 1e-9
"""Divergence at which the logarithmic axis begins at the latest."""


@dataclass(frozen=True)
class Dot:
    """A candidate of the plot."""

    x: float
    y: float
    radius: int
    kind: str
    tip: str


@dataclass(frozen=True)
class Plot:
    """The plot of the front as SVG has it: the dots, the line through the front, and the axes' labels."""

    dots: list[Dot]
    front: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT


def render(report: SearchReport, model: str = "model") -> str:
    """The page, as text of one HTML document.

    Args:
        report: of a search.
        model: what to call the model.
    """
    shown = [point for point in report.points if point.front or point.chosen]
    return render_page(
        "search.html.j2",
        report=report,
        model=model,
        chosen=report.chosen,
        plot=draw(report),
        front=[(point, counts(point)) for point in shown],
        widths=sorted({bits for group in report.groups if not group.rule for bits in group.harm}),
    )


def counts(point: Point) -> str:
    """How many groups have which bits: ``12 x 2, 3 x 4``."""
    found: dict[int, int] = {}
    for bits in point.widths.values():
        found[bits] = found.get(bits, 0) + 1
    return ", ".join(f"{count} \u00d7 {bits}" for bits, count in sorted(found.items()))


def draw(report: SearchReport) -> Plot:
    """Divergence, logarithmic, over cost."""
    xs = [point.cost for point in report.points]
    ys = [_level(point) for point in report.points]
    left, right = min(xs), max(xs)
    bottom, top = math.floor(min(ys)), max(math.ceil(max(ys)), math.floor(min(ys)) + 1)

    def x(value: float) -> float:
        share = (value - left) / (right - left) if right > left else 0.5
        return round(_LEFT + _MARGIN + share * (_WIDTH - _LEFT - _RIGHT - _MARGIN), 1)

    def y(level: float) -> float:
        share = (level - bottom) / (top - bottom)
        return round(_MARGIN + (1 - share) * (_HEIGHT - _MARGIN - _BOTTOM), 1)

    dots = [
        Dot(x(p.cost), y(_level(p)), 7 if p.chosen else 4, "w" if p.chosen or p.front else "cost",
            _tip(p, report))
        for p in sorted(report.points, key=lambda point: point.chosen)
    ]  # fmt: skip
    line = " ".join(f"{x(p.cost)},{y(_level(p))}" for p in report.front)
    x_ticks = [(x(value), _cost(value, report)) for value in _steps(left, right)]
    y_ticks = [(y(level), f"{10.0**level:g}") for level in range(bottom, top + 1)]
    return Plot(dots, line, x_ticks, y_ticks)


def _level(point: Point) -> float:
    return math.log10(max(point.divergence, _LEAST))


def _steps(left: float, right: float) -> Sequence[float]:
    return [left + (right - left) * i / 4 for i in range(5)] if right > left else [left]


def _cost(value: float, report: SearchReport) -> str:
    return size(value) if report.unit == "bytes" else f"{value:.3g} ms"


def _tip(point: Point, report: SearchReport) -> str:
    cost = _cost(point.cost, report)
    return f"{cost}, divergence {point.divergence:.3g}, drop {point.drop:.1%}: {counts(point)}"
