"""``lowbit convert``: a quantized model becomes a lowbit model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from lowbit.cli.common import (
    MODEL,
    Out,
    input_quant_option,
    megabytes,
    model_argument,
    overwrite_option,
    report_option,
    subcommand,
    write_report,
)


@subcommand("convert")
@model_argument
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the converted model.")
@click.option("--strict", is_flag=True, help="Refuse (exit code 3) unless every quantized node converts.")
@click.option("--round-bias", is_flag=True, help="Round float biases to int32; the report lists them.")
@click.option("--ap", is_flag=True, help="Write APConv and APGemm everywhere, not only for 1-bit operands.")
@input_quant_option
@report_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    output: Path,
    strict: bool,
    round_bias: bool,
    ap: bool,
    input_quant: tuple[str, ...],
    report_file: Path | None,
    overwrite: bool,
) -> None:
    """Convert a quantized MODEL to a lowbit model.

    Numbers never change: what cannot be computed exactly stays as it is and is listed with its reason.
    """
    from lowbit.atomic import check_writable
    from lowbit.convert import convert
    from lowbit.inspect import describe_conversion
    from lowbit.report_html import render

    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(model,))
    with out.status(f"converting {model.name}"):
        result = convert(
            model,
            output,
            strict=strict,
            round_bias=round_bias,
            ap=ap,
            input_quant=input_quant,
            overwrite=overwrite,
        )
    summary = {
        "model": str(model),
        "output": str(output),
        "bytes_before": model.stat().st_size,
        "bytes_after": output.stat().st_size,
        "report": result.report.to_dict(),
    }
    if out.as_json:
        out.json(summary)
    else:
        _print(out, summary)
    if report_file is not None:
        write_report(
            report_file, summary, lambda: render(describe_conversion(model, result)), overwrite=overwrite
        )


def _print(out: Out, summary: dict[str, Any]) -> None:
    nodes = summary["report"]["nodes"]
    before, after = summary["bytes_before"], summary["bytes_after"]
    by_action: dict[str, Counter[str]] = {"converted": Counter(), "absorbed": Counter(), "kept": Counter()}
    for node in nodes:
        by_action[node["action"]][node["op_type"]] += 1
    out.facts(
        [
            *(
                (action, f"{counts.total()}  ({', '.join(f'{n} {op}' for op, n in counts.most_common())})")
                for action, counts in by_action.items()
                if counts
            ),
            ("size", f"{megabytes(before)} -> {megabytes(after)} ({after / max(before, 1):.0%})"),
            ("written", summary["output"]),
        ]
    )
    kept = [node for node in nodes if node["action"] == "kept"]
    if kept:
        rows = [(node["name"], node["op_type"], node["reason"]) for node in kept]
        out.table(["node", "op", "why it stays with ONNX Runtime"], rows)
    for warning in summary["report"]["warnings"]:
        out.note(f"warning: {warning}")
