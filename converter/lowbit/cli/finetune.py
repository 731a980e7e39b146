"""``lowbit finetune``: a quantized model trained, without labels, to do what its float model does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.calibration import cache_option, calibration_feeds, convert_option, samples_option
from lowbit.cli.common import (
    MODEL,
    Out,
    overwrite_option,
    preprocess_option,
    report_option,
    subcommand,
    threads_option,
    write_report,
    written_model,
)

if TYPE_CHECKING:
    from lowbit.finetuner.report import FinetuneReport


@subcommand("finetune")
@click.argument("float_model", metavar="FLOAT", type=MODEL)
@click.argument("model", metavar="QUANTIZED", type=MODEL)
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the result.")
@click.option(
    "--calib", required=True, metavar="DIR|FILE",
    help="Images without labels: a folder or .zip, an .npz or .npy.",
)  # fmt: skip
@preprocess_option
@samples_option
@click.option("--distill", "mode", flag_value="distill", help="The whole network at once.")
@click.option(
    "--blocks",
    "mode",
    flag_value="blocks",
    help="Block by block, in less memory (default: --distill, then this if that does not help).",
)
@click.option(
    "--steps", type=click.IntRange(min=1),
    help="Of the whole network (default: 500; 2000 from 400 images on), or of each block (200).",
)  # fmt: skip
@click.option("--lr", "rate", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.004,
              show_default=True, help="How far a code may move in a step.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is drawn at random.")
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE",
              help="What PyTorch computes on: cpu, cuda or cuda:N.")  # fmt: skip
@convert_option
@cache_option
@threads_option
@report_option
@overwrite_option
def command(
    out: Out,
    float_model: Path,
    model: Path,
    output: Path,
    calib: str,
    preprocess: str | None,
    samples: int | None,
    lowbit_file: Path | None,
    report_file: Path | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Train the codes, scales and biases of a QUANTIZED model to do what its FLOAT model does.

    QUANTIZED is what `lowbit quantize` made of FLOAT; no labels are needed. Every fifth image does not train,
    but judges: what does not get better stays as it was. Needs PyTorch: pip install 'lowbit[torch]'. A run
    that was interrupted goes on where it stopped when the same command is given again.
    """
    from lowbit.finetuner.extra import require_torch
    from lowbit.finetuner.finetune import finetune
    from lowbit.inspection.finetune_html import render
    from lowbit.proto.atomic import check_writable
    from lowbit.proto.feeds import as_proto

    require_torch(options["device"])
    if calib == "random":
        raise click.UsageError("--calib random: random values teach nothing; give images")
    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(float_model, model))
    with out.steps("fine-tuning") as tell:
        result = finetune(
            float_model,
            model,
            calibration_feeds(as_proto(float_model), calib, preprocess, samples, 0, ()),
            output,
            convert_to=False if lowbit_file is None else lowbit_file,
            state=output.parent / f".{output.name}.lowbit-state",
            progress=tell,
            overwrite=overwrite,
            **options,
        )
    summary = {"float_model": str(float_model), **written_model(model, output, result.report)}
    if report_file is not None:
        write_report(report_file, summary, lambda: render(result.report, model.name), overwrite=overwrite)
    if out.as_json:
        out.json(summary)
    else:
        _print(out, result.report, output)


def _print(out: Out, report: FinetuneReport, output: Path) -> None:
    kept = sum(block.kept for block in report.blocks)
    out.facts(
        [
            ("mode", f"{report.mode}, {report.steps} steps{' a block' if report.blocks else ''}"),
            ("images", f"{report.images} train, {report.held_out} judge"),
            ("all images", f"train for {report.again} more steps" if report.again else None),
            ("blocks", f"{kept} of {len(report.blocks)} better" if report.blocks else None),
            ("error", f"{report.before:.4g} -> {report.after:.4g} on held-out images"),
            ("written", output),
        ]
    )
    if out.verbosity > 0:
        rows = [
            (", ".join(block.layers), f"{block.before:.4g}", f"{block.after:.4g}", f"{block.seconds:.0f}")
            for block in report.blocks
        ]
        out.table(["block", "error before>", "after>", "s>"], rows)
        layers = [(r.node, r.op_type, r.bits, f"{r.changed:.1%}", f"{r.growth:.3f}") for r in report.layers]
        out.table(["node", "op", "bits>", "codes changed>", "scales times>"], layers)
    for warning in report.warnings:
        out.note(f"warning: {warning}")
