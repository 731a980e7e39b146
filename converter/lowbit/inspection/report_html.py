"""The page that ``lowbit inspect --report`` writes: one HTML file that needs nothing else.

Names of nodes, tensors and files come from whoever made the model, so the template engine escapes all of
them, and the page's content security policy lets no script run but its own, which it names by hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
from markupsafe import Markup

from lowbit.inspection.advice import FLOAT_RATIO
from lowbit.inspection.inspect import InspectReport, NodeInfo, operand_bits, refusals_by_reason
from lowbit.proto.tensors import shape_text
from lowbit.text import printable

_OUTCOMES = {"converted": "lowbit", "kept": "stays", "absorbed": "absorbed", "added": "added"}

# The chart's geometry, in pixels.
_CHART_WIDTH = 1150  # of bands that fill the page
_BAND = (10, 72)  # narrowest and widest
_BIT_LANE = 15
_LANES = 9  # 1 to 8 bits, floats on top
_COST_HEIGHT = 150
_TOP, _GAP, _BOTTOM = 16, 34, 8

_BITS_BASE = _TOP + _LANES * _BIT_LANE
_COST_BASE = _BITS_BASE + _GAP + _COST_HEIGHT
_UNKNOWN_HEIGHT = 5  # of a bar for a cost that nobody knows

_NAME_LENGTH = 64
"""Longest name that is shown in full where there is little room."""


@dataclass(frozen=True)
class Metric:
    """A measure of cost that the chart can show."""

    key: str
    title: str
    text: Callable[[float], str]
    value: Callable[[NodeInfo], float | None]


@dataclass(frozen=True)
class Bar:
    """A rectangle of the chart."""

    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True)
class Band:
    """One node of the chart: a column of bars."""

    row: int
    x: float
    tip: str
    bars: list[Bar]


@dataclass(frozen=True)
class Tick:
    """A horizontal line of the chart, with its label; ``key`` is the metric that it belongs to, if to one."""

    y: float
    label: str
    key: str = ""


@dataclass(frozen=True)
class Chart:
    """Bits and cost along the network."""

    width: float
    height: float
    band: float
    bands: list[Band]
    ticks: list[Tick]
    metrics: list[Metric]
    bits_title: float
    cost_title: float
    has_floats: bool


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
    style, script = _asset("report.css"), _asset("report.js")
    rows = [_row(index, node) for index, node in enumerate(report.nodes)]
    return _template().render(
        report=report,
        totals=report.totals,
        rows=rows,
        outcomes=list(dict.fromkeys(row.outcome for row in rows)),
        chart=draw(rows),
        kernels=_kernels(report),
        has_cycles=any(node.cycles is not None for node in report.nodes),
        version=_version(),
        float_ratio=FLOAT_RATIO,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _finalize(value: object) -> object:
    """What a name holds appears, as in a terminal; nothing in it turns the text around it."""
    return printable(value, keep="\n") if type(value) is str else value


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowbit", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.filters.update(
        si=si,
        size=size,
        short=short,
        dims=lambda shape: "\u00d7".join("?" if dim is None else str(dim) for dim in shape) or "scalar",
        percent=lambda share: f"{share:.1%}",
        capitalize_first=lambda text: text[:1].upper() + text[1:],
    )
    return environment.get_template("report.html.j2")


def si(value: float | None, digits: int = 3) -> str:
    """A number with some digits and a unit prefix: ``2.12 M``."""
    if value is None:
        return ""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * (1 - 0.5 * 10**-digits):
            scaled = value / factor
            decimals = max(0, digits - 1 - int(math.log10(max(scaled, 1))))
            return f"{scaled:.{decimals}f} {prefix}"
    return f"{value:.0f}"


def size(value: float | None) -> str:
    """A number of bytes in units of 1000."""
    text = si(value)
    return text and (f"{text}B" if text[-1].isalpha() else f"{text} B")


def short(name: str) -> str:
    """A name's two ends: exporters that join the names of what they fused tell those apart by them."""
    half = _NAME_LENGTH // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[:half]}\u2026{name[-half:]}"


METRICS = (
    Metric("cycles", "estimated cycles", lambda value: f"{si(value)} cycles", lambda node: node.cycles),
    Metric("macs", "multiply-adds", lambda value: f"{si(value)} MACs", lambda node: node.macs),
    Metric("bitops", "bit operations", lambda value: f"{si(value)} bit-ops", lambda node: node.bit_ops),
    Metric(
        "weights", "weight bytes", lambda value: f"{size(value)} of weights", lambda node: node.weight_bytes
    ),
)


def draw(rows: Sequence[Row]) -> Chart | None:
    """Places the nodes that multiply along the x axis; None if there are none."""
    rows = [row for row in rows if row.node.macs is not None]
    if not rows:
        return None
    width = min(max(_CHART_WIDTH / len(rows), _BAND[0]), _BAND[1])
    metrics = [metric for metric in METRICS if any(metric.value(row.node) for row in rows)]
    # What is known of all nodes comes first.
    metrics.sort(key=lambda metric: any(metric.value(row.node) is None for row in rows))
    tops = {metric.key: _ceiling(max(metric.value(row.node) or 0 for row in rows)) for metric in metrics}
    sums = {metric.key: sum(metric.value(row.node) or 0 for row in rows) for metric in metrics}
    bands = []
    for i, row in enumerate(rows):
        x = i * width
        costs = [_cost_bar(row, metric, x, width, tops[metric.key]) for metric in metrics]
        bands.append(Band(row.index, x, _tip(row, metrics, sums), [*_bit_bars(row.node, x, width), *costs]))
    has_floats = any(bar.kind == "float" for band in bands for bar in band.bars)
    ticks = [Tick(_BITS_BASE - bits * _BIT_LANE, str(bits)) for bits in (0, 1, 2, 4, 6, 8)]
    ticks += [Tick(_BITS_BASE - _LANES * _BIT_LANE, "float")] if has_floats else []
    for metric in metrics:
        for share in (0, 0.5, 1):
            label = _tick(share * tops[metric.key])
            ticks.append(Tick(_COST_BASE - share * _COST_HEIGHT, label, metric.key))
    return Chart(
        width=round(width * len(rows), 2),
        height=_COST_BASE + _BOTTOM,
        band=width,
        bands=bands,
        ticks=ticks,
        metrics=metrics,
        bits_title=_TOP - 6,
        cost_title=_COST_BASE - _COST_HEIGHT - 6,
        has_floats=has_floats,
    )


def _bit_bars(node: NodeInfo, x: float, width: float) -> Iterator[Bar]:
    """The bits of activations and weights, side by side; floats reach above 8 bits."""
    for side, (kind, operand) in enumerate((("x", node.x), ("w", node.w))):
        bits = operand_bits(operand)
        height = _BIT_LANE * (_LANES if bits is None else min(bits, _LANES))
        left = x + (0.1 + 0.4 * side) * width
        yield Bar(left, _BITS_BASE - height, 0.38 * width, height, "float" if bits is None else kind)


def _cost_bar(row: Row, metric: Metric, x: float, width: float, top: float) -> Bar:
    value = metric.value(row.node)
    height = _UNKNOWN_HEIGHT if value is None else value / top * _COST_HEIGHT
    hatched = " stays" if value is None or row.outcome == "stays" else ""
    return Bar(x + 0.1 * width, _COST_BASE - height, 0.78 * width, height, f"cost m m-{metric.key}{hatched}")


def _ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten, for the top of an axis."""
    power = 10.0 ** math.floor(math.log10(max(value, 1)))
    return next((step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8) if step * power >= value), 10 * power)


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


def _asset(name: str) -> Markup:
    """A file of the package that goes into the page as it is."""
    return Markup((resources.files("lowbit") / "templates" / name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    """The word by which a content security policy allows a style or a script."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _version() -> str:
    from lowbit import __version__

    return str(__version__)
