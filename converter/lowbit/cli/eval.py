"""``lowbit eval``: how well a model does its task, alone or beside another one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.cli.common import (
    MODEL,
    Out,
    device_option,
    model_argument,
    preprocess_option,
    subcommand,
    threads_option,
)

if TYPE_CHECKING:
    from lowbit.evaluation.evaluate import EvalReport
    from lowbit.evaluation.metrics import Estimate, MetricResult

_SHOWN = 20  # changed samples


@subcommand("eval")
@model_argument
@click.option(
    "--data",
    required=True,
    metavar="DIR|FILE",
    help="Samples: a folder or .zip of images, an .npz or .npy; FILE.npz:NAME names an array.",
)
@click.option(
    "--labels",
    metavar="FILE",
    help="Right answers: .json, .csv, .txt, .npy or FILE.npz:NAME; 'folders': a class a folder.",
)
@preprocess_option
@click.option("--metric", "metrics", multiple=True, metavar="NAME",
              help="top1, top5, cosine, sqnr, agreement or module:function; may be repeated.")  # fmt: skip
@click.option("--against", type=MODEL, help="A model to compare with, usually the float one.")
@click.option("--label-offset", type=int, default=0, show_default=True, help="Added to every label.")
@click.option("--output-name", help="The output to measure (default: the first; all for cosine and sqnr).")
@click.option("-n", "--samples", type=click.IntRange(min=1),
              help="Use so many samples, evenly spread over the data (default: all).")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), metavar="N",
              help="Samples a run, for a model with a symbolic batch (default: 1).")  # fmt: skip
@threads_option
@device_option("cpu")
@click.option("--cluster", metavar="ADDRESS", help="A Ray cluster that runs parts of the data, or 'local'.")
def command(
    out: Out,
    model: Path,
    data: str,
    labels: str | None,
    preprocess: str | None,
    metrics: tuple[str, ...],
    against: Path | None,
    label_offset: int,
    output_name: str | None,
    samples: int | None,
    batch: int | None,
    threads: int | None,
    device: str,
    cluster: str | None,
) -> None:
    """Measure MODEL on data, with intervals that say how much is chance.

    With --against both models see the same samples; their difference is measured sample by sample, and
    agreement and SQNR stand beside top-1.
    """
    from lowbit.evaluation.evaluate import evaluate

    with out.progress("evaluating") as progress:
        report = evaluate(model, data, labels=labels, preprocess=preprocess, metric=metrics, against=against,
                          label_offset=label_offset, output_name=output_name, samples=samples, batch=batch,
                          threads=threads, device=device, cluster=cluster, progress=progress)  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
        return
    _print(out, report)


def _print(out: Out, report: EvalReport) -> None:
    rows = [
        (result.name, _value(result, result.model), _interval(result, result.model), _total(result),
         _value(result, result.against), _interval(result, result.against),
         _value(result, result.difference, signed=True), _interval(result, result.difference, signed=True),
         None if result.p_value is None else f"{result.p_value:.2g}")
        for result in report.metrics
    ]  # fmt: skip
    out.table(
        ["metric", "model>", "95 % interval", "total>", "against>", "95 % interval", "difference>",
         "95 % interval", "p>"],
        rows, f"{report.samples:,} samples", optional=("total>",),
    )  # fmt: skip
    for result in report.metrics:
        if result.gained is not None:
            out.print(f"{result.name}: {result.gained} samples gained, {result.lost} lost")
            if out.verbosity > 0 and result.changed:
                more = len(result.changed) - _SHOWN
                out.print(
                    "  " + "\n  ".join(result.changed[:_SHOWN]) + (f"\n  and {more} more" if more > 0 else "")
                )
    methods = dict.fromkeys(
        each.method for r in report.metrics for each in (r.model, r.difference) if each is not None
    )
    exact = "; p: McNemar's exact test" if any(r.p_value is not None for r in report.metrics) else ""
    out.note(f"intervals: {', '.join(methods)}{exact}")
    for note in report.notes:
        out.note(f"note: {note}")


def _value(result: MetricResult, estimate: Estimate | None, *, signed: bool = False) -> str | None:
    return None if estimate is None else _number(result, estimate.value, signed)


def _interval(result: MetricResult, estimate: Estimate | None, *, signed: bool = False) -> str | None:
    if estimate is None or math.isnan(estimate.low):
        return None
    return f"{_number(result, estimate.low, signed)} .. {_number(result, estimate.high, signed)}"


def _number(result: MetricResult, value: float, signed: bool) -> str:
    sign = "+" if signed else ""
    if result.unit == "share":  # a difference of two shares is in percentage points
        return f"{100 * value:{sign}.2f} {'pt' if signed else '%'}"
    if result.unit == "dB":
        return "exact" if value == math.inf else f"{value:.2f} dB"
    return f"{value:{sign}.6g}"


def _total(result: MetricResult) -> str | None:
    return None if result.total is None else f"{result.total:g}"
