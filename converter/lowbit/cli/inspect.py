"""``lowbit inspect``: a model node by node."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from lowbit.cli.common import (
    STAY,
    Out,
    device_option,
    input_quant_option,
    megabytes,
    model_argument,
    overwrite_option,
    print_reasons,
    report_option,
    shape_option,
    subcommand,
    threads_option,
    write_report,
)

if TYPE_CHECKING:
    from lowbit.inspection.inspect import InspectReport, NodeInfo


@subcommand("inspect")
@model_argument
@shape_option
@click.option("--isa", default=None, help="Choose kernels as for this instruction set (see `lowbit sys`).")
@threads_option
@device_option(None)
@input_quant_option
@report_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    shapes: tuple[str, ...],
    isa: str | None,
    threads: int | None,
    device: str | None,
    input_quant: tuple[str, ...],
    report_file: Path | None,
    overwrite: bool,
) -> None:
    """Show every node of MODEL: dialect, operands, work, kernel and the reasons.

    A model that is not converted yet is converted in memory; every node then shows what it becomes, or why it
    would stay with ONNX Runtime. With -v also the nodes that others absorb, the reason of every node that
    stays, and the kernels that were not chosen. The report in HTML is one page that needs nothing else: a
    plot of bits and cost along the network and a table of its nodes. With --device the model is opened there,
    and every node tells whether it runs there or why it stays with ONNX Runtime on the CPU.
    """
    from lowbit.inspection.inspect import inspect
    from lowbit.proto.atomic import check_writable
    from lowbit.proto.feeds import parse_shapes

    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(model,))
    with out.status(f"inspecting {model.name}"):
        report = inspect(
            model, shapes=parse_shapes(shapes), isa=isa, threads=threads, device=device,
            input_quant=input_quant,
        )  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
    else:
        _print(out, model, report)
    if report_file is not None:
        from lowbit.inspection.report_html import render

        write_report(report_file, report.to_dict(), lambda: render(report), overwrite=overwrite)


def _print(out: Out, model: Path, report: InspectReport) -> None:
    from lowbit.sessions.devices import has_own_memory

    source = report.kind == "source"
    on_gpu = report.device is not None and has_own_memory(report.device)
    dialects = [f"{name} ({count} nodes)" for name, count in report.totals["dialects"].items()]
    out.facts(
        [
            ("model", f"{model} ({megabytes(report.bytes)})"),
            ("kind", "not converted yet (dry conversion)" if source else "converted by lowbit"),
            ("dialect", ", ".join(dialects) or None if source else None),
            ("kernels for", report.device if on_gpu else report.isa),
            ("device", _device(report)),
            ("inputs", "; ".join(report.inputs)),
            ("outputs", "; ".join(report.outputs)),
        ]
    )
    if report.remark:
        out.print(escape(report.remark))
    nodes, reasons = report.nodes, report.reasons
    if out.verbosity <= 0:
        nodes = [node for node in nodes if _says_something(node)]
    columns = ["node", "op", "dialect", "becomes", "codes", "epilogue", "input", "output", "M MACs>",
               "M bit-ops>", "kB before>", "kB>", "kernel", "runs on", "why"]  # fmt: skip
    narrow = (
        "dialect",
        "input",
        "kB before>",
        "kB>",
        "epilogue",
        "M bit-ops>",
        "M MACs>",
        "output",
        "becomes",
    )
    rows = [_row(node, source) for node in nodes]
    if out.verbosity <= 0:  # reasons follow, each once
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    if rows:
        out.table(columns, rows, optional=narrow)
    if out.verbosity > 0:
        _print_choices(out, report)
    elif reasons and not report.remark:
        print_reasons(out, reasons, STAY if source else "why they stay, or no kernel is known")
    _print_totals(out, report)


def _says_something(node: NodeInfo) -> bool:
    """Whether a node has a row of its own: no absorbed one, nor one of which only its reason is known."""
    if node.action == "kept":
        return node.macs is not None or node.why is None
    return node.action != "absorbed"


def _row(node: NodeInfo, source: bool) -> tuple[object, ...]:
    from lowbit.proto.tensors import shape_text

    epilogue = None if node.epilogue == "requantize" else node.epilogue  # the ordinary one
    shapes = [None if shape is None else shape_text(shape) for shape in (node.input_shape, node.output_shape)]
    return (
        node.name,
        node.op_type,
        node.dialect if source else None,
        node.becomes,
        node.codes,
        epilogue,
        *shapes,
        _in_units(node.macs, 1e6, 2),
        _in_units(node.bit_ops, 1e6, 1),
        _in_units(node.source_weight_bytes, 1e3, 1),
        _in_units(node.weight_bytes, 1e3, 1),
        f"{node.kernel} (tuned)" if node.tuned else node.kernel,
        node.runs_on,
        node.why,
    )


def _device(report: InspectReport) -> str | None:
    if report.device is None:
        return None
    where = ", ".join(f"{count} nodes on {name}" for name, count in report.totals["runs_on"].items())
    regions = "" if report.regions is None else f"; {report.regions} region{'s'[: report.regions != 1]}"
    return f"{report.device}: {where or 'no node is known to run anywhere'}{regions}"


def _in_units(value: float | None, unit: float, digits: int) -> str | None:
    return None if value is None else f"{value / unit:,.{digits}f}"


def _print_choices(out: Out, report: InspectReport) -> None:
    """Why each kernel was chosen; nodes for which all was the same share a row."""

    def choice(node: NodeInfo) -> tuple[object, ...]:
        rivals = [each.kernel for each in node.candidates if each.kernel != node.kernel]
        return node.kernel, "measured" if node.tuned else "estimate", ", ".join(rivals), _refusals(node)

    nodes = [node for node in report.nodes if node.kernel and (node.refused or node.candidates)]
    rows = []
    for key, group in groupby(sorted(nodes, key=lambda node: [str(part) for part in choice(node)]), choice):
        names = [node.name for node in group]
        rows.append((names[0] if len(names) == 1 else f"{len(names)}, such as {names[0]}", *key))
    if rows:
        out.table(["nodes", "kernel", "chosen by", "rather than", "cannot run them"], rows)


def _refusals(node: NodeInfo) -> str:
    from lowbit.inspection.inspect import refusals_by_reason

    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in refusals_by_reason(node))


def _print_totals(out: Out, report: InspectReport) -> None:
    from lowbit.inspection.advice import FLOAT_RATIO

    totals = report.totals
    macs = f"{totals['macs'] / 1e6:,.1f} million"
    if totals["float_macs"]:
        macs += f", {totals['float_macs'] / 1e6:,.1f} million of them in float"
    weights = megabytes(totals["weight_bytes"])
    if totals["source_weight_bytes"] is not None:
        weights = f"{megabytes(totals['source_weight_bytes'])} -> {weights}"
    out.facts(
        [
            ("ops", _counted(totals["ops"].items())),
            ("nodes", _counted(totals["actions"].items()) or None),
            ("multiply-adds", macs),
            ("bit operations", f"{totals['bit_ops'] / 1e6:,.1f} million"),
            ("weights", weights),
        ]
    )
    if report.advice:
        out.print()
        out.print("[bold]advice[/bold] (each was tried on a copy with made-up scales)")
        for advice in report.advice:
            out.print(escape(f"- {advice.text}"))
        out.note(
            "advice: times are estimated from multiply-adds alone, one on 8-bit codes at "
            f"{FLOAT_RATIO} of a float one (measured on whole networks); real scales come from calibrating"
        )
    for warning in report.warnings:
        out.note(f"warning: {warning}")


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts)
