"""The page that ``lowbit inspect --report`` writes: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowbit.inspection.advice import FLOAT_RATIO
from lowbit.inspection.chart import (
    BITS_TITLE,
    LOWER_BASE,
    LOWER_HEIGHT,
    Band,
    Bar,
    Chart,
    Tick,
    bit_bars,
    bit_ticks,
    ceiling,
    column_width,
    lower_title,
)
from lowbit.inspection.inspect import InspectReport, NodeInfo, operand_bits, refusals_by_reason
from lowbit.inspection.page import render_page, short, si, size
from lowbit.proto.tensors import shape_text

_OUTCOMES = {"converted": "lowbit", "kept": "stays", "absorbed": "absorbed", "added": "added"}

_UNKNOWN_HEIGHT = 5  # of a bar for a cost that nobody knows


@dataclass(frozen=True)
class Metric:
    """A measure of cost that the chart can show."""

    key: str
    title: str
    text: Callable[[float], str]
    value: Callable[[NodeInfo], float | None]


@dataclass(frozen=True)
class Row:
    """One node of the table."""

    index: int
    node: NodeInfo
    outcome: str
    search: str
    refusals: list[tuple[str, list[str]]]


def render(report: InspectReport) -> str:
    """The page, as text of one HTML document."""
    rows = [_row(index, node) for index, node in enumerate(report.nodes)]
    drawn = [row for row in rows if row.node.macs is not None]
    metrics = _metrics(drawn)
    return render_page(
        "report.html.j2",
        report=report,
        totals=report.totals,
        rows=rows,
        outcomes=list(dict.fromkeys(row.outcome for row in rows)),
        chart=draw(drawn, metrics) if drawn else None,
        metrics=metrics,
        kernels=_kernels(report),
        has_cycles=any(node.cycles is not None for node in report.nodes),
        float_ratio=FLOAT_RATIO,
    )


METRICS = (
    Metric("cycles", "estimated cycles", lambda value: f"{si(value)} cycles", lambda node: node.cycles),
    Metric("macs", "multiply-adds", lambda value: f"{si(value)} MACs", lambda node: node.macs),
    Metric("bitops", "bit operations", lambda value: f"{si(value)} bit-ops", lambda node: node.bit_ops),
    Metric(
        "weights", "weight bytes", lambda value: f"{size(value)} of weights", lambda node: node.weight_bytes
    ),
)


def _metrics(rows: Sequence[Row]) -> list[Metric]:
    """The metrics that are known of any node; what is known of all nodes comes first."""
    metrics = [metric for metric in METRICS if any(metric.value(row.node) is not None for row in rows)]
    return sorted(metrics, key=lambda metric: any(metric.value(row.node) is None for row in rows))


def draw(rows: Sequence[Row], metrics: Sequence[Metric]) -> Chart:
    """Places nodes, which multiply, along the x axis."""
    width = column_width(len(rows))
    tops = {metric.key: ceiling(max(metric.value(row.node) or 0 for row in rows)) for metric in metrics}
    sums = {metric.key: sum(metric.value(row.node) or 0 for row in rows) for metric in metrics}
    bands = []
    for i, row in enumerate(rows):
        x = i * width
        operands = [(kind, operand_bits(operand)) for kind, operand in (("x", row.node.x), ("w", row.node.w))]
        costs = [_cost_bar(row, metric, x, width, tops[metric.key]) for metric in metrics]
        bands.append(Band(row.index, x, _tip(row, metrics, sums), [*bit_bars(operands, x, width), *costs]))
    ticks = bit_ticks(bands)
    for metric in metrics:
        for share in (0, 0.5, 1):
            label = _tick(share * tops[metric.key])
            ticks.append(Tick(LOWER_BASE - share * LOWER_HEIGHT, label, metric.key))
    titles = [BITS_TITLE, *(lower_title(metric.title, metric.key) for metric in metrics)]
    return Chart(bands, width, ticks, titles)


def _cost_bar(row: Row, metric: Metric, x: float, width: float, top: float) -> Bar:
    value = metric.value(row.node)
    height = _UNKNOWN_HEIGHT if value is None else value / top * LOWER_HEIGHT
    hatched = " stays" if value is None or row.outcome == "stays" else ""
    return Bar(x + 0.1 * width, LOWER_BASE - height, 0.78 * width, height, f"cost m m-{metric.key}{hatched}")


def _tick(value: float) -> str:
    """A number on an axis, without zeros behind its point."""
    number, _, prefix = si(value).partition(" ")
    return f"{float(number):g} {prefix}".rstrip()


def _tip(row: Row, metrics: Sequence[Metric], sums: dict[str, float]) -> str:
    node = row.node
    lines = [
        short(node.name),
        node.op_type if node.action != "converted" else f"{node.op_type} → {node.becomes}",
    ]
    lines += [text for text in (node.codes, shape_text(node.output_shape)) if text]
    for metric in metrics:
        value = metric.value(node)
        if value is not None:
            lines.append(f"{metric.text(value)} ({value / max(sums[metric.key], 1):.1%})")
    lines += [text for text in (node.kernel, node.runs_on, node.why) if text]
    return "\n".join(lines)


def _row(index: int, node: NodeInfo) -> Row:
    outcome = _OUTCOMES.get(node.action or "", "lowbit" if node.lowbit_op else "stays")
    words = (node.name, node.op_type, node.lowbit_op, node.dialect, node.codes, node.kernel, node.why,
             node.into)  # fmt: skip
    return Row(index, node, outcome, " ".join(filter(None, words)).lower(), refusals_by_reason(node))


def _kernels(report: InspectReport) -> list[tuple[str, int, int]]:
    """Kernel, nodes, multiply-adds; the one that does most first."""
    sums: dict[str, tuple[int, int]] = {}
    for node in report.nodes:
        if node.kernel is not None:
            count, macs = sums.get(node.kernel, (0, 0))
            sums[node.kernel] = count + 1, macs + (node.macs or 0)
    return sorted(((name, *each) for name, each in sums.items()), key=lambda row: (-row[2], -row[1], row[0]))
