"""``lowbit export``: a lowbit model becomes a QONNX or a QDQ model, or what a mobile app ships."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.common import Out, megabytes, model_argument, overwrite_option, shape_option, subcommand

if TYPE_CHECKING:
    from lowbit.deploy.mobile import MobileExport
    from lowbit.exporters.export import ExportResult


@subcommand("export")
@model_argument
@click.option("--to", type=click.Choice(["qonnx", "qdq", "mobile"]), required=True, help="What to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to write the exported model; with mobile, a folder.",
)
@click.option("--sub-byte", is_flag=True, help="With qdq: int4 and int2 weights (opsets 21 and 25).")
@shape_option
@overwrite_option
def command(
    out: Out, model: Path, to: str, output: Path, sub_byte: bool, shapes: tuple[str, ...], overwrite: bool
) -> None:
    """Write a lowbit MODEL for other tools.

    Every element stays. QDQ, which any ONNX Runtime runs, cannot count thresholds; QONNX can, but has no
    words for a Softmax or a computing Resize of codes. A model that the target cannot say is refused
    (exit code 3), with its nodes. Mobile is a folder for apps with a minimal build of ONNX Runtime: the
    model as .ort files, the ops that it needs, and the commands that build both libraries.
    """
    if to == "mobile":
        if sub_byte:
            raise click.UsageError("--sub-byte is for --to qdq; an .ort file has no such elements")
        _mobile(out, model, output, shapes, overwrite=overwrite)
        return
    if shapes:
        raise click.UsageError("--shape is for --to mobile, which runs the model")
    from lowbit.exporters.export import export
    from lowbit.proto.model_file import stored_bytes

    with out.status(f"exporting {model.name}"):
        result = export(model, output, to=to, sub_byte=sub_byte, overwrite=overwrite)
    summary = {
        "model": str(model),
        "output": str(output),
        "bytes_before": stored_bytes(model),
        "bytes_after": stored_bytes(output),
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


def _mobile(out: Out, model: Path, folder: Path, shapes: tuple[str, ...], *, overwrite: bool) -> None:
    from lowbit.deploy.mobile import export_mobile
    from lowbit.proto.feeds import parse_shapes

    with out.status(f"exporting {model.name}"):
        export = export_mobile(model, folder, shapes=parse_shapes(shapes), overwrite=overwrite)
    if out.as_json:
        out.json(export.to_dict())
    else:
        _print_mobile(out, export)


def _print_mobile(out: Out, export: MobileExport) -> None:
    out.facts(
        [
            ("written", f"{export.folder}, all of {export.elements:,} output elements equal to the model's"),
            ("ops", ", ".join(f"{n} {op}" for op, n in export.operators.items())),
            *(("input", f"{v.name}: {v.type} {v.shape}") for v in export.inputs),
            *(("output", f"{v.name}: {v.type} {v.shape}") for v in export.outputs),
        ]
    )
    rows = [(file.name, file.style or "", file.bytes, file.sha256[:16]) for file in export.files]
    out.table(["file", "style", "bytes>", "sha256"], rows)
    out.note(f"{export.folder / 'BUILD.md'} says how ONNX Runtime and lowbit are built for it")
