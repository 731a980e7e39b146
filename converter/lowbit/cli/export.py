"""``lowbit export``: a lowbit model becomes a QONNX or a QDQ model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.common import MODEL, Out, megabytes, model_argument, overwrite_option, subcommand

if TYPE_CHECKING:
    from lowbit.export import ExportResult


@subcommand("export")
@model_argument
@click.option("--to", type=click.Choice(["qonnx", "qdq"]), required=True, help="The dialect to write.")
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the exported model.")
@click.option("--sub-byte", is_flag=True, help="With qdq: int4 and int2 weights (opsets 21 and 25).")
@overwrite_option
def command(out: Out, model: Path, to: str, output: Path, sub_byte: bool, overwrite: bool) -> None:
    """Write a lowbit MODEL for other tools.

    Every element stays. QONNX can say every node; QDQ, which any ONNX Runtime runs, cannot count thresholds:
    such a model is refused (exit code 3), with its nodes.
    """
    from lowbit.export import export

    with out.status(f"exporting {model.name}"):
        result = export(model, output, to=to, sub_byte=sub_byte, overwrite=overwrite)
    summary = {
        "model": str(model),
        "output": str(output),
        "bytes_before": model.stat().st_size,
        "bytes_after": output.stat().st_size,
        **result.to_dict(),
    }
    if out.as_json:
        out.json(summary)
    else:
        _print(out, summary, result)


def _print(out: Out, summary: dict[str, Any], result: ExportResult) -> None:
    forms: Counter[str] = Counter()
    for node in result.nodes:
        forms.update(node.form)
    before, after = summary["bytes_before"], summary["bytes_after"]
    out.facts(
        [
            ("exported", f"{len(result.nodes)} lowbit nodes to {result.target}"),
            ("as", ", ".join(f"{n} {op}" for op, n in forms.most_common())),
            ("size", f"{megabytes(before)} -> {megabytes(after)} ({after / max(before, 1):.0%})"),
            ("written", summary["output"]),
        ]
    )
    if out.verbosity > 0:
        rows = [
            (node.name, node.op_type, ", ".join(f"{n} {op}" if n > 1 else op for op, n in node.form.items()))
            for node in result.nodes
        ]
        out.table(["node", "op", "as"], rows)
