"""``lowbit verify``: does a converted model compute what its original says?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.cli.common import (
    CHECK_FAILED,
    MODEL,
    Out,
    device_option,
    model_argument,
    seed_option,
    shape_option,
    subcommand,
    threads_option,
)

if TYPE_CHECKING:
    from lowbit.checking.verify import VerifyReport


@subcommand("verify")
@model_argument
@click.option("--against", type=MODEL, required=True, help="The model that MODEL was converted from.")
@click.option("--data", type=click.Path(path_type=Path, dir_okay=False),
              help="Samples: an .npz with one array per input, samples along the first dim.")  # fmt: skip
@click.option(
    "-n", "--samples", type=click.IntRange(min=1), help="How many samples (default: all, or 2 random)."
)
@seed_option
@shape_option
@threads_option
@device_option("cpu")
def command(
    out: Out,
    model: Path,
    against: Path,
    data: Path | None,
    samples: int | None,
    seed: int,
    shapes: tuple[str, ...],
    threads: int | None,
    device: str,
) -> None:
    """Check a converted MODEL against its original.

    Each lowbit node is fed what stock ONNX Runtime computes at that place of the original. Its result must
    equal the node's definition in every element, and the original's result too, except one step at a rounding
    tie. Whole-model agreement is shown beside it. With --device MODEL runs there, and must equal the same
    definitions. Exit code 1: something is wrong or unexplained.
    """
    from lowbit.checking.verify import verify
    from lowbit.proto.feeds import parse_shapes

    with out.progress("verifying") as progress:
        report = verify(model, against, data=data, samples=samples, seed=seed, shapes=parse_shapes(shapes),
                        threads=threads, device=device, progress=progress)  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
    else:
        _print(out, report)
    if not report.ok:
        sys.exit(CHECK_FAILED)


def _print(out: Out, report: VerifyReport) -> None:
    shown = report.nodes if out.verbosity > 0 else [n for n in report.nodes if not n.ok or n.near_tie]
    shown = [*shown, *(n for n in (report.float16.nodes if report.float16 else ()) if not n.ok)]
    columns = [
        "node",
        "op",
        "compared with",
        "elements>",
        "wrong>",
        "equal>",
        "near tie>",
        "unexplained>",
        "note",
    ]
    if shown:
        rows = [(n.name, n.op_type, n.source, n.elements, n.wrong, n.equal, n.near_tie, n.unexplained, n.note)
                for n in shown]  # fmt: skip
        out.table(columns, rows, optional=("compared with", "elements>", "equal>"))
    out.facts(
        [
            ("nodes", f"{len(report.nodes)}, on {report.samples} samples, each fed the original's own codes"),
            ("definition", f"{report.total('wrong'):,} of {report.total('elements'):,} elements differ"),
        ]
    )
    _print_original(out, report, "original", "float rounding (codes: one step at a tie)")
    if report.float16 is not None:
        _print_original(out, report.float16, "in float16", "its rounding (codes: at a tie)")
    for note in (*report.notes, *(report.float16.notes if report.float16 else ())):
        out.note(f"note: {note}")
    out.print("[green]verified[/green]" if report.ok else "[red]failed[/red]: see the nodes above")


def _print_original(out: Out, report: VerifyReport, name: str, rounding: str) -> None:
    equal, near, unexplained = map(report.total, ("equal", "near_tie", "unexplained"))
    compared = equal + near + unexplained
    text = (
        f"{equal:,} of {compared:,} elements equal, {near:,} within {rounding}, {unexplained:,} unexplained"
    )
    whole = f"{report.codes_equal:,} of {report.codes:,} inner codes equal" if report.codes else None
    out.facts([(name, text if compared else "nothing to compare with"), ("whole model", whole)])
    for output in report.outputs:
        text = (
            f"{output.equal:,} of {output.elements:,} equal, largest difference {output.max_difference:.3g}"
        )
        if output.top1_equal is not None:
            text += f"; same top-1 for {output.top1_equal} of {output.samples} samples"
            text += f" (changed: {', '.join(map(str, output.changed))})" if output.changed else ""
        out.facts([(f"  {output.name}", text)])
