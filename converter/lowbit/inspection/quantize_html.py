"""The page that ``lowbit quantize --report`` writes: where the error comes from, and what was decided."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.inspection.chart import (
    BITS_TITLE,
    LOWER_BASE,
    LOWER_HEIGHT,
    LOWER_TOP,
    Band,
    Chart,
    Line,
    Tick,
    bit_bars,
    bit_ticks,
    ceiling,
    column_width,
    lower_title,
)
from lowbit.inspection.page import render_page, short, size
from lowbit.proto.report import ReasonGroup, group_reasons
from lowbit.quantizer.report import Decision, Histogram, LayerRecord, QuantizeReport, TensorRecord
from lowbit.quantizer.rounding.problem import code_bounds

BINS = 64
"""Bars of a histogram on the page; a report has many more."""

_PLOT_WIDTH, _PLOT_HEIGHT = 260, 70  # of a histogram, in pixels

_MOST_TICKS = 5  # above zero, on the axis of the chart

_NAMES = re.compile(r"'[^']*'")

_OPEN = 12  # histograms that are shown at once


@dataclass(frozen=True)
class Curve:
    """One line of the chart."""

    kind: str
    title: str
    value: Callable[[LayerRecord], float | None]


CURVES = (
    Curve("accumulated", "output, everything before it quantized", lambda layer: layer.sqnr_accumulated),
    Curve("alone", "output, the layer alone quantized", lambda layer: layer.sqnr_output),
    Curve("weights", "weights", lambda layer: layer.sqnr_weights),
    Curve("input", "input", lambda layer: layer.sqnr_input),
)


@dataclass(frozen=True)
class HistogramPlot:
    """A histogram as SVG has it: a path of bars, the chosen range over them, labels below.

    Attributes:
        path: the outline of the bars; their heights are logarithms of counts.
        low: where the chosen range begins, in pixels.
        high: where it ends.
        zero: where zero lies; None outside of the plot.
        labels: position, text-anchor and text of each number below.
        clipped: the share of the values that lie outside of the range.
    """

    path: str
    low: float
    high: float
    zero: float | None
    labels: list[tuple[float, str, str]]
    clipped: float
    width: int = _PLOT_WIDTH
    height: int = _PLOT_HEIGHT


@dataclass(frozen=True)
class TensorRow:
    """One quantizer of an activation."""

    tensor: TensorRecord
    plot: HistogramPlot | None


@dataclass(frozen=True)
class LayerRow:
    """One layer of the table."""

    index: int
    layer: LayerRecord
    codes: str
    gained: float | None
    tensors: list[TensorRow]
    search: str
    weights: HistogramPlot | None = None


@dataclass(frozen=True)
class RoundingRow:
    """What a rounding method gained over rounding to nearest, over its layers."""

    method: str
    layers: int
    mean: float | None
    least: float | None
    most: float | None
    seconds: float


@dataclass(frozen=True)
class RuleRow:
    """One decision of a rule, with everything that it was taken for."""

    rule: str
    decision: str
    targets: list[str]


def render(report: QuantizeReport, model: str = "model") -> str:
    """The page, as text of one HTML document.

    Args:
        report: of a quantization.
        model: what to call the model.
    """
    tensors = {tensor.name: TensorRow(tensor, _plot(tensor)) for tensor in report.tensors}
    rows = [_row(index, layer, tensors) for index, layer in enumerate(report.layers)]
    shown = [curve for curve in CURVES if any(curve.value(layer) is not None for layer in report.layers)]
    by_sqnr = sorted(tensors.values(), key=lambda row: _or_infinite(row.tensor.sqnr))
    return render_page(
        "quantize.html.j2",
        report=report,
        model=model,
        rows=sorted(rows, key=lambda row: _or_infinite(row.layer.sqnr_accumulated)),
        worst=report.worst_layers[0] if report.worst_layers else None,
        float_bytes=sum(layer.float_bytes for layer in report.layers),
        code_bytes=sum(layer.bytes for layer in report.layers),
        bit_counts=_bit_counts(report.layers),
        chart=draw(rows, shown) if rows else None,
        curves=shown,
        roundings=_roundings(report.layers),
        rules=_rules(report),
        kept=_kept(report),
        tensors=by_sqnr[:_OPEN],
        more_tensors=by_sqnr[_OPEN:],
        config=_flat(report.config),
    )


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def draw(rows: Sequence[LayerRow], curves: Sequence[Curve]) -> Chart:
    """Bits and SQNR along the network; what is below 0 dB stands at the bottom."""
    width = column_width(len(rows))
    values = [value for row in rows for curve in curves if (value := curve.value(row.layer)) is not None]
    top = ceiling(max([value for value in values if math.isfinite(value)], default=1.0))
    bands = []
    for i, row in enumerate(rows):
        operands = [("x", row.layer.input_bits), ("w", row.layer.weight_bits)]
        bars = list(bit_bars(operands, i * width, width))
        bands.append(Band(row.index, i * width, _tip(row, curves), bars))
    ticks = bit_ticks(bands)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * _MOST_TICKS >= top)
    ticks += [
        Tick(LOWER_BASE - each / top * LOWER_HEIGHT, str(each)) for each in range(0, int(top) + 1, step)
    ]
    lines = [Line(curve.kind, part) for curve in curves for part in _points(rows, curve, width, top)]
    return Chart(bands, width, ticks, [BITS_TITLE, lower_title("SQNR in dB")], lines)


def _points(rows: Sequence[LayerRow], curve: Curve, width: float, top: float) -> Iterator[str]:
    """The polylines of a curve; where a value is not known it has a gap."""
    part: list[str] = []
    for i, row in enumerate(rows):
        value = curve.value(row.layer)
        if value is None:
            if part:
                yield " ".join(part)
            part = []
            continue
        share = min(max(value / top, 0.0), 1.0)
        # A short stroke at each layer, so that one between two gaps shows, too.
        y = f"{LOWER_BASE - share * (LOWER_BASE - LOWER_TOP):.1f}"
        part += [f"{(i + 0.35) * width:.1f},{y}", f"{(i + 0.65) * width:.1f},{y}"]
    if part:
        yield " ".join(part)


def _tip(row: LayerRow, curves: Sequence[Curve]) -> str:
    layer = row.layer
    lines = [short(layer.node), f"{layer.op_type}  {row.codes}", f"{size(layer.bytes)} of weights"]
    for curve in curves:
        value = curve.value(layer)
        if value is not None:
            lines.append(f"{value:.1f} dB {curve.title}")
    return "\n".join(lines)


def _row(index: int, layer: LayerRecord, tensors: dict[str, TensorRow]) -> LayerRow:
    read = tensors.get(layer.input)
    signed = {True: "s", False: "u", None: "x"}[None if read is None else read.tensor.signed]
    output = "" if layer.output_bits is None else f" \u2192 {layer.output_bits}"
    gained = None
    if layer.sqnr_accumulated is not None and layer.sqnr_nearest is not None:
        gained = layer.sqnr_accumulated - layer.sqnr_nearest
    words = (layer.node, layer.op_type, layer.input, layer.output, layer.rule, layer.rounding)
    return LayerRow(
        index,
        layer,
        f"{signed}{layer.input_bits} \u00d7 s{layer.weight_bits}{output}",
        gained,
        [tensors[name] for name in dict.fromkeys((layer.input, layer.output)) if name in tensors],
        " ".join(words).lower(),
        weight_plot(layer),
    )


def _bit_counts(layers: Sequence[LayerRecord]) -> list[tuple[str, int]]:
    """How many layers have which bits of weights and input, most first."""
    counts: dict[str, int] = {}
    for layer in layers:
        key = f"w{layer.weight_bits}a{layer.input_bits}"
        counts[key] = counts.get(key, 0) + 1
    return sorted(counts.items(), key=lambda each: -each[1])


def _roundings(layers: Sequence[LayerRecord]) -> list[RoundingRow]:
    rows = []
    for method in dict.fromkeys(layer.rounding for layer in layers):
        own = [layer for layer in layers if layer.rounding == method]
        gains = [
            layer.sqnr_accumulated - layer.sqnr_nearest
            for layer in own
            if layer.sqnr_accumulated is not None and layer.sqnr_nearest is not None
        ]
        rows.append(
            RoundingRow(
                method or "none",
                len(own),
                sum(gains) / len(gains) if gains else None,
                min(gains, default=None),
                max(gains, default=None),
                sum(layer.seconds for layer in own),
            )
        )
    return rows


def _rules(report: QuantizeReport) -> list[RuleRow]:
    """Decisions that differ only in a name that they mention are one."""
    grouped: dict[tuple[str, str], list[Decision]] = {}
    for decision in report.decisions:
        words = _NAMES.sub("'..'", decision.decision)
        grouped.setdefault((decision.rule, words), []).append(decision)
    rows = []
    for (rule, words), own in grouped.items():
        texts = {decision.decision for decision in own}
        targets = list(dict.fromkeys(decision.target for decision in own))
        rows.append(RuleRow(rule, texts.pop() if len(texts) == 1 else words, targets))
    order = list(dict.fromkeys(row.rule for row in rows))
    return sorted(rows, key=lambda row: (order.index(row.rule), -len(row.targets)))


def _kept(report: QuantizeReport) -> list[ReasonGroup]:
    return group_reasons((node, "", reason) for node, reason in report.kept_float.items())


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A configuration as lines of key and value."""
    lines: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            lines += _flat(value, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", str(value)))
    return lines


# ---- histograms


def rebinned(histogram: Histogram, bins: int) -> list[int]:
    """The counts in fewer, equal bins: each old bin counts where its middle lies."""
    counts = [0] * bins
    for i, count in enumerate(histogram.counts):
        counts[int((i + 0.5) * bins / len(histogram.counts))] += count
    return counts


def clipped_share(tensor: TensorRecord) -> float:
    """The share of the calibration values that lie outside of the chosen range, by whole bins."""
    return 0.0 if tensor.histogram is None else _outside(tensor.histogram, tensor.low, tensor.high)


def _outside(histogram: Histogram, low: float, high: float) -> float:
    if not sum(histogram.counts):
        return 0.0
    width = (histogram.high - histogram.low) / len(histogram.counts)
    middles = (histogram.low + (i + 0.5) * width for i in range(len(histogram.counts)))
    outside = sum(
        count
        for count, middle in zip(histogram.counts, middles, strict=True)
        if not low - width / 2 <= middle <= high + width / 2
    )
    return outside / sum(histogram.counts)


def weight_plot(layer: LayerRecord) -> HistogramPlot | None:
    """A layer's weights in units of their scales; the range is what the codes and their roundings cover."""
    low, high = code_bounds(layer.weight_bits)
    return _draw(layer.histogram, low - 0.5, high + 0.5)


def _plot(tensor: TensorRecord) -> HistogramPlot | None:
    return _draw(tensor.histogram, tensor.low, tensor.high)


def _draw(histogram: Histogram | None, low: float, high: float) -> HistogramPlot | None:
    if histogram is None or not sum(histogram.counts):
        return None
    left, right = min(histogram.low, low), max(histogram.high, high)
    if not right > left:  # a constant tensor
        left, right = left - 0.5, right + 0.5

    def place(value: float) -> float:
        return round((value - left) / (right - left) * _PLOT_WIDTH, 1)

    counts = rebinned(histogram, BINS)
    top = math.log1p(max(counts))
    step = (histogram.high - histogram.low) / BINS
    path = [f"M{place(histogram.low)} {_PLOT_HEIGHT}"]
    for i, count in enumerate(counts):
        y = round(_PLOT_HEIGHT * (1 - 0.95 * math.log1p(count) / top), 1)
        path.append(f"V{y}H{place(histogram.low + (i + 1) * step)}")
    path.append(f"V{_PLOT_HEIGHT}Z")
    labels = [(0.0, "start", f"{left:.4g}"), (float(_PLOT_WIDTH), "end", f"{right:.4g}")]
    zero = place(0.0) if left < 0 < right else None
    if zero is not None and 40 < zero < _PLOT_WIDTH - 40:
        labels.append((zero, "middle", "0"))
    return HistogramPlot("".join(path), place(low), place(high), zero, labels, _outside(histogram, low, high))
