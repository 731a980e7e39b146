"""``lowbit tune``: measured kernel choices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.cli.common import (
    MODEL,
    Out,
    batch_option,
    device_option,
    parse_batches,
    shape_option,
    subcommand,
    threads_option,
)

if TYPE_CHECKING:
    from lowbit.measure.device_tune import DeviceTuneReport
    from lowbit.measure.tune import TuneReport


@subcommand("tune")
@click.argument("model", type=MODEL, required=False)
@click.option("--clear", is_flag=True, help="Forget all measured choices first. Without MODEL: and stop.")
@threads_option
@device_option("cpu")
@batch_option
@shape_option
def command(
    out: Out,
    model: Path | None,
    clear: bool,
    threads: int | None,
    device: str,
    batch: str,
    shapes: tuple[str, ...],
) -> None:
    """Measure the kernels of MODEL's nodes and keep the fastest for all later sessions.

    A session takes a kernel by estimated cost. This command lets the candidates of every convolution and
    matrix product take turns at the model's shapes, and writes which one won to the user's cache folder (or
    LOWBIT_CACHE_DIR). Results do not change. LOWBIT_TUNE=off makes sessions ignore the file.

    With --device cuda the execution provider measures the tile configurations of its kernels, in one run for
    each batch size.
    """
    from lowbit.measure.tune import TuneReport, tune
    from lowbit.measure.tune import clear as clear_files
    from lowbit.proto.feeds import parse_shapes

    batches = parse_batches(batch)
    if model is None and not clear:
        raise click.UsageError("give a MODEL, or --clear")
    removed = clear_files() if clear else []
    if clear:
        out.note(f"removed {', '.join(map(str, removed)) or 'nothing: there were no measured choices'}")
    if model is None:
        if out.as_json:
            out.json({"removed": [str(path) for path in removed]})
        return
    with out.progress("measuring") as progress:
        report = tune(model, shapes=parse_shapes(shapes), threads=threads, device=device, batches=batches,
                      progress=progress)  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
    elif isinstance(report, TuneReport):
        _print(out, report)
    else:
        _print_device(out, report)


def _print_device(out: Out, report: DeviceTuneReport) -> None:
    rows = [
        (
            ", ".join(f"{name} {'x'.join(map(str, size))}" for name, size in shape.inputs.items()),
            f"{shape.seconds:.1f}",
            f"{shape.estimated_us:.1f}",
            f"{shape.tuned_us:.1f}",
            f"{shape.gain:.2f}x",
        )
        for shape in report.shapes
    ]
    out.table(["inputs", "measured in s>", "us before>", "us after>", "gain>"], rows)
    out.note(f"device times on {report.device}, {report.description}. Kept in {report.cache}")


def _print(out: Out, report: TuneReport) -> None:
    rows = []
    for node in report.nodes:
        changed = node.tuned != node.routed
        routed, tuned = (node.microseconds.get(name or "") for name in (node.routed, node.tuned))
        rows.append(
            (
                node.name,
                node.op_type,
                node.routed,
                None if routed is None else f"{routed:.3g}",
                node.tuned if changed else None,
                f"{tuned:.3g}" if changed and tuned is not None else None,
                f"{node.gain:.2f}x" if changed else None,
                node.reason,
            )
        )
    columns = ["node", "op", "estimated choice", "us>", "measured choice", "us >", "gain>", "why not"]
    out.table(columns, rows, optional=("op",))
    for warning in report.warnings:
        out.note(f"warning: {warning}")
    out.note(
        f"{report.problems} different problems, {report.threads} thread(s), {report.isa}; "
        f"{report.changed} of {len(report.nodes)} nodes get another kernel. Kept in {report.cache}"
    )
