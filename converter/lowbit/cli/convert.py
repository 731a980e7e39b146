"""``lowbit convert``: a quantized model becomes a lowbit model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from lowbit.cli.common import (
    MODEL,
    Out,
    input_quant_option,
    megabytes,
    model_argument,
    overwrite_option,
    print_reasons,
    report_option,
    subcommand,
    write_report,
    written_model,
)

if TYPE_CHECKING:
    from lowbit.proto.report import Report


@subcommand("convert")
@model_argument
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the converted model.")
@click.option("--strict", is_flag=True, help="Refuse (exit code 3) unless every quantized node converts.")
@click.option("--round-bias", is_flag=True, help="Round float biases to int32; the report lists them.")
@click.option("--ap", is_flag=True, help="Write APConv and APGemm everywhere, not only for 1-bit operands.")
@click.option("--all", "all_regions", is_flag=True, help="Convert also what gains nothing on a CPU.")
@click.option("--keep-float16", is_flag=True, help="Leave what MODEL computes in float16 as it is.")
@input_quant_option
@click.option(
    "--preprocess",
    metavar="SPEC",
    help="Take pictures of any size, uint8 [N, H, W, 3], and prepare them: raw, imagenet or KEY=VALUE,..",
)
@report_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    output: Path,
    strict: bool,
    round_bias: bool,
    ap: bool,
    all_regions: bool,
    keep_float16: bool,
    input_quant: tuple[str, ...],
    preprocess: str | None,
    report_file: Path | None,
    overwrite: bool,
) -> None:
    """Convert a quantized MODEL to a lowbit model.

    Numbers never change: what cannot be computed exactly stays as it is, and its reason is told (with -v that
    of every node). But what MODEL computes in float16 around its quantizers is computed in float32, nearer to
    what its codes mean, unless --keep-float16 is given. Where nothing can be converted, or nothing is
    quantized, the command says so and writes the model as it was (exit code 0; --strict refuses with 3).
    """
    from lowbit.conversion.convert import convert
    from lowbit.proto.atomic import check_writable

    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(model,))
    with out.status(f"converting {model.name}"):
        result = convert(
            model,
            output,
            strict=strict,
            round_bias=round_bias,
            ap=ap,
            all_regions=all_regions,
            input_quant=input_quant,
            keep_float16=keep_float16,
            preprocess=preprocess,
            overwrite=overwrite,
        )
    summary = written_model(model, output, result.report)
    if out.as_json:
        out.json(summary)
    else:
        _print(out, summary, result.report)
    if report_file is not None:
        from lowbit.inspection.inspect import describe_conversion
        from lowbit.inspection.report_html import render

        write_report(
            report_file, summary, lambda: render(describe_conversion(model, result)), overwrite=overwrite
        )


def _print(out: Out, summary: dict[str, Any], report: Report) -> None:
    before, after = summary["bytes_before"], summary["bytes_after"]
    by_action: dict[str, Counter[str]] = {"converted": Counter(), "absorbed": Counter(), "kept": Counter()}
    for node in report.nodes:
        by_action[node.action][node.op_type] += 1
    if report.remark or not report.converted:
        why = report.remark or "nothing was converted; the output is the model as it was"
        out.print(escape(f"{summary['model']}: {why}"))
    counted = [
        (action, f"{counts.total()}  ({', '.join(f'{n} {op}' for op, n in counts.most_common())})")
        for action, counts in by_action.items()
        if counts and not report.remark
    ]
    out.facts(
        [
            *counted,
            ("size", f"{megabytes(before)} -> {megabytes(after)} ({after / max(before, 1):.0%})"),
            ("written", summary["output"]),
        ]
    )
    if out.verbosity > 0:
        rows = [(node.name, node.op_type, node.reason) for node in report.kept]
        out.table(["node", "op", "why it stays with ONNX Runtime"], rows)
    elif not report.remark and report.kept:
        print_reasons(out, report.reasons)
    for warning in report.warnings:
        out.note(f"warning: {warning}")
