"""The charts of a quantization as PNG files, for slides and papers."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from lowbit.errors import LowBitError
from lowbit.inspection.page import short
from lowbit.inspection.quantize_html import BINS, CURVES, clipped_share, rebinned
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.quantizer.report import QuantizeReport, TensorRecord

LAYERS, RANGES = "layers.png", "ranges.png"

_DPI = 150
_COLUMNS = 4
_MOST = 40
"""Histograms of one file, the worst tensors first."""

_COLORS = {"accumulated": "#2c7a6b", "alone": "#a3326b", "weights": "#0b62b8", "input": "#c25700"}
"""Those of the page."""


def write_plots(report: QuantizeReport, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Writes what the page of a quantization shows as PNG files: bits and error per layer, and ranges.

    Args:
        report: of a quantization.
        folder: where to write; it is made if it does not exist.
        overwrite: replace files that exist.

    Returns:
        The files: layers.png, and ranges.png where the report holds histograms.

    Raises:
        OutputError: if a file cannot be written.
        LowBitError: without matplotlib.
    """
    figure = _figure_class()
    plots = {LAYERS: _layers(figure, report)} if report.layers else {}
    drawn = [each for each in report.tensors if each.histogram is not None and any(each.histogram.counts)]
    tensors = sorted(drawn, key=lambda tensor: math.inf if tensor.sqnr is None else tensor.sqnr)
    if tensors:
        plots[RANGES] = _ranges(figure, tensors[:_MOST])
    folder.mkdir(parents=True, exist_ok=True)
    for name in plots:
        check_writable(folder / name, overwrite=overwrite)
    for name, plot in plots.items():
        write_atomically(folder / name, functools.partial(_save, plot), overwrite=overwrite)
    return [folder / name for name in plots]


def _save(plot: Any, path: Path) -> None:
    plot.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})


def _figure_class() -> Any:
    try:
        # Figures alone: pyplot would choose a window system and keep every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LowBitError(
            "plots as PNG need matplotlib, which is not installed; pip install 'lowbit[quantize]'"
        ) from error
    return Figure


def _layers(figure: Any, report: QuantizeReport) -> Any:
    layers = report.layers
    plot = figure(figsize=(min(max(6.0, 0.22 * len(layers)), 24.0), 5.5), layout="constrained")
    bits, errors = plot.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    places = range(len(layers))
    bits.bar([i - 0.2 for i in places], [layer.input_bits for layer in layers], 0.4, label="input",
             color=_COLORS["input"])  # fmt: skip
    bits.bar([i + 0.2 for i in places], [layer.weight_bits for layer in layers], 0.4, label="weights",
             color=_COLORS["weights"])  # fmt: skip
    bits.set(
        ylabel="bits", yticks=(0, 2, 4, 6, 8), title=f"{report.bits}, {report.images} calibration samples"
    )
    bits.set_ylim(0, 11)  # room for the legend
    bits.legend(loc="upper right", fontsize="small", ncols=2)
    for curve in CURVES:
        values = [curve.value(layer) for layer in layers]
        if any(value is not None for value in values):
            known = [math.nan if value is None else value for value in values]
            errors.plot(places, known, ".-", color=_COLORS[curve.kind], label=curve.title)
    errors.set(ylabel="SQNR in dB", xlabel="layer, in the order of the network")
    errors.grid(axis="y", alpha=0.4)
    errors.legend(fontsize="small")
    return plot


def _ranges(figure: Any, tensors: list[TensorRecord]) -> Any:
    rows = math.ceil(len(tensors) / _COLUMNS)
    plot = figure(figsize=(14, 1.9 * rows), layout="constrained")
    for place, tensor in enumerate(tensors, 1):
        histogram = tensor.histogram
        assert histogram is not None
        axes = plot.add_subplot(rows, _COLUMNS, place)
        step = (histogram.high - histogram.low) / BINS
        edges = [histogram.low + i * step for i in range(BINS + 1)]
        axes.stairs(rebinned(histogram, BINS), edges, fill=True, color=_COLORS["weights"])
        axes.axvspan(tensor.low, tensor.high, color=_COLORS["accumulated"], alpha=0.16, zorder=0)
        axes.set_yscale("symlog")
        axes.yaxis.set_visible(False)
        axes.tick_params(labelsize="x-small")
        kind = f"{'s' if tensor.signed else 'u'}{tensor.bits}"
        noise = "" if tensor.sqnr is None else f", {tensor.sqnr:.1f} dB"
        # A dollar sign would begin a formula.
        name = short(tensor.name).replace("$", r"\$")
        axes.set_title(f"{name}\n{kind}{noise}, {clipped_share(tensor):.2%} outside", fontsize="x-small")
    return plot
