"""``lowbit inspect``: a model node by node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.cli.common import Out, megabytes, model_argument, shape_option, subcommand

if TYPE_CHECKING:
    from lowbit.inspect import InspectReport, NodeInfo


@subcommand("inspect")
@model_argument
@shape_option
@click.option("--isa", default=None, help="Choose kernels as for this instruction set (see `lowbit sys`).")
def command(out: Out, model: Path, shapes: tuple[str, ...], isa: str | None) -> None:
    """Show every node of MODEL: operands, sizes, kernel.

    A model that is not converted yet is converted in memory; every node then shows what it becomes, or why it
    would stay with ONNX Runtime.
    """
    from lowbit.feeds import parse_shapes
    from lowbit.inspect import inspect

    with out.status(f"inspecting {model.name}"):
        report = inspect(model, shapes=parse_shapes(shapes), isa=isa)
    if out.as_json:
        out.json(report.to_dict())
        return
    out.facts(
        [
            ("model", f"{model} ({megabytes(report.bytes)})"),
            (
                "kind",
                "converted by lowbit" if report.kind == "lowbit" else "not converted yet (dry conversion)",
            ),
            ("inputs", "; ".join(report.inputs)),
            ("outputs", "; ".join(report.outputs)),
        ]
    )
    nodes = report.nodes
    if report.kind == "source" and out.verbosity <= 0:  # Q, DQ and the like say nothing on their own
        nodes = [node for node in nodes if node.action != "absorbed"]
    columns = [
        "node",
        "op",
        "becomes",
        "codes",
        "epilogue",
        "input",
        "output",
        "M MACs>",
        "kB>",
        "kernel",
        "why",
    ]
    narrow = ("input", "kB>", "epilogue", "M MACs>", "output", "becomes")
    out.table(columns, [_row(node) for node in nodes], optional=narrow)
    _print_totals(out, report)


def _row(node: NodeInfo) -> tuple[object, ...]:
    from lowbit.inspect import shape_text

    becomes = None if node.action is None else "lowbit" if node.action == "converted" else node.action
    read = " * ".join(filter(None, (node.x, node.w)))
    codes = " -> ".join(filter(None, (read, node.y)))
    epilogue = None if node.epilogue == "requantize" else node.epilogue  # the ordinary one
    shapes = [None if shape is None else shape_text(shape) for shape in (node.input_shape, node.output_shape)]
    macs = None if node.macs is None else f"{node.macs / 1e6:,.2f}"
    weights = None if node.weight_bytes is None else f"{node.weight_bytes / 1e3:,.1f}"
    return (
        node.name,
        node.op_type,
        becomes,
        codes,
        epilogue,
        *shapes,
        macs,
        weights,
        node.kernel,
        node.reason,
    )


def _print_totals(out: Out, report: InspectReport) -> None:
    totals = report.totals
    out.facts(
        [
            ("ops", ", ".join(f"{count} {op}" for op, count in totals["ops"].items())),
            ("nodes", ", ".join(f"{count} {action}" for action, count in totals["actions"].items()) or None),
            ("multiply-adds", f"{totals['macs'] / 1e6:,.1f} million"),
            ("packed weights", megabytes(totals["weight_bytes"])),
        ]
    )
    for warning in report.warnings:
        out.note(f"warning: {warning}")
