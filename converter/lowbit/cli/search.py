"""``lowbit search``: how many bits each layer gets, from what that costs and does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.calibration import (
    calibration_feeds,
    calibration_options,
    quantizing_options,
    settings_of,
)
from lowbit.cli.common import (
    MODEL,
    Out,
    device_option,
    megabytes,
    model_argument,
    overwrite_option,
    report_option,
    subcommand,
    write_report,
)

if TYPE_CHECKING:
    from lowbit.searcher.report import SearchReport


def _bits(ctx: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers such as 2,3,4,8, got '{text}'") from None


@subcommand("search")
@model_argument
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the quantized model.")
@click.option("--target", required=True, metavar="latency=5ms|size=2MB|drop=1%",
              help="Time on --device, bytes of the converted file, or accuracy lost.")  # fmt: skip
@click.option("--bits", default="2,3,4,8", show_default=True, callback=_bits, metavar="N,..",
              help="Bits of weights to choose from.")  # fmt: skip
@click.option("--activation-bits", default="8", show_default=True, callback=_bits, metavar="N,..",
              help="Bits of activations to choose from.")  # fmt: skip
@click.option("--max-drop", metavar="1%|1%rel",
              help="Accuracy that may be lost, in points or relative; more is an error.")  # fmt: skip
@click.option("--minimize", type=click.Choice(["latency", "size"]), default="latency", show_default=True,
              help="What --target drop makes small.")  # fmt: skip
@calibration_options
@click.option(
    "--data",
    "judge",
    metavar="DIR|FILE",
    help="Other images, which judge candidates (default: halves of the calibration images).",
)
@click.option("--labels", metavar="FILE", help="Their labels, as eval takes them: right answers count.")
@click.option("--label-offset", type=int, default=0, show_default=True, help="Added to every label.")
@device_option("cpu")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True,
              help="Intra-op threads of the sessions.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True,
              help="Processes that measure candidates.")  # fmt: skip
@click.option("--cluster", metavar="ADDRESS", help="A Ray cluster that measures candidates, or 'local'.")
@click.option("--points", type=click.IntRange(min=2), default=6, show_default=True,
              help="Candidates for the Pareto front.")  # fmt: skip
@click.option("--tries", type=click.IntRange(min=0), default=36, show_default=True,
              help="Candidates of the revert loop at most.")  # fmt: skip
@quantizing_options
@click.option("--state", type=MODEL, metavar="DIR",
              help="Keep what is measured there, for other targets (default: until the end).")  # fmt: skip
@report_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    output: Path,
    calib: str,
    preprocess: str | None,
    samples: int | None,
    judge: str | None,
    config_file: Path | None,
    lowbit_file: Path | None,
    state: Path | None,
    seed: int,
    shapes: tuple[str, ...],
    report_file: Path | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Give each layer of a float32 MODEL the bits that a target needs, and quantize it.

    What every width costs and does to the outputs is measured on unlabeled images. A width that is not faster
    on this device is not offered unless size is what counts. A search that was interrupted goes on where it
    stopped when the same command is given again.
    """
    import shutil

    from lowbit.inspection.search_html import render
    from lowbit.proto.atomic import check_writable
    from lowbit.proto.feeds import as_proto
    from lowbit.searcher.search import search

    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(model,))
    settings = settings_of(config_file, seed=seed or None)
    settings.pop("bits", None)  # the widths are what is searched
    folder = state or output.parent / f".{output.name}.lowbit-search"
    with out.steps("searching") as tell:
        result = search(
            model,
            calibration_feeds(as_proto(model), calib, preprocess, samples, seed, shapes),
            output,
            judge=judge,
            preprocess=preprocess,
            state=folder,
            convert_to=False if lowbit_file is None else lowbit_file,
            progress=tell,
            overwrite=overwrite,
            **options,
            **settings,
        )
    if state is None:
        shutil.rmtree(folder, ignore_errors=True)
    summary = {"model": str(model), "output": str(output), "report": result.report.to_dict()}
    if report_file is not None:
        write_report(report_file, summary, lambda: render(result.report, model.name), overwrite=overwrite)
    if out.as_json:
        out.json(summary)
    else:
        _print(out, result.report, output)


def _print(out: Out, report: SearchReport, output: Path) -> None:
    chosen, samples = report.chosen, report.judges or report.images
    out.facts(
        [
            ("target", report.target),
            ("measured", f"{report.latency_ms:.4g} ms, {report.threads} thread(s) on {report.device}"
             if report.latency_ms is not None else None),
            ("size", f"{megabytes(chosen.bytes)}, {megabytes(chosen.weight_bytes)} of them weights"),
            ("drop", f"{100 * chosen.drop:.3g} % ({report.drop_of}, {samples} samples)"),
            ("divergence", f"{chosen.divergence:.3g}"),
            ("written", output),
        ]
    )  # fmt: skip
    rows = [
        (f"{point.cost:.4g} ms" if report.unit == "ms" else megabytes(int(point.cost)),
         megabytes(point.weight_bytes), f"{point.divergence:.3g}", f"{100 * point.drop:.3g} %",
         _widths(point.widths), "chosen" if point.chosen else None)
        for point in report.points if point.front or point.chosen
    ]  # fmt: skip
    columns = ["cost>", "weights>", "divergence>", "drop>", "groups of so many bits", ""]
    out.table(columns, rows, "Pareto front")
    shown = [group for group in report.groups if len(group.harm) > 1 or out.verbosity > 0]
    out.table(
        ["bits>", "group", "why not searched"],
        [(group.bits, group.name, group.rule or None) for group in shown],
    )
    for reason in report.not_offered:
        out.note(f"note: {reason}")
    for warning in report.warnings:
        out.note(f"warning: {warning}")


def _widths(widths: dict[str, int]) -> str:
    counts: dict[int, int] = {}
    for bits in widths.values():
        counts[bits] = counts.get(bits, 0) + 1
    return ", ".join(f"{count} x {bits}" for bits, count in sorted(counts.items()))
