"""``lowbit bench``: two models side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.cli.common import (
    MODEL,
    Out,
    device_option,
    megabytes,
    model_argument,
    seed_option,
    shape_option,
    subcommand,
)

if TYPE_CHECKING:
    from lowbit.measure.bench import BenchReport


@subcommand("bench")
@model_argument
@click.option("--against", type=MODEL, help="The model to compare with, usually the original.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True,
              help="Blocks of about 50 ms per model, taken in turns.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True,
              help="Intra-op threads of both sessions.")  # fmt: skip
@device_option("cpu")
@click.option("--pin", default="", metavar="CPU,..", help="Pin the process to these CPUs while measuring.")
@click.option(
    "--profile", is_flag=True, help="Also show times per node; on the execution provider, per kernel."
)
@shape_option
@seed_option
def command(
    out: Out,
    model: Path,
    against: Path | None,
    rounds: int,
    threads: int,
    device: str,
    pin: str,
    profile: bool,
    shapes: tuple[str, ...],
    seed: int,
) -> None:
    """Measure MODEL beside another model.

    Both sessions take turns in one process, in blocks of about 50 ms, so that whatever disturbs the machine
    disturbs both. With --device, MODEL runs there, converted in memory if need be; the other one runs there
    too if it is a lowbit model, and in stock ONNX Runtime on the CPU otherwise.
    """
    from lowbit.measure.bench import bench
    from lowbit.proto.feeds import parse_shapes

    try:
        cpus = [int(cpu) for cpu in pin.split(",") if cpu]
    except ValueError:
        raise click.UsageError(f"--pin expects CPU numbers such as 1 or 0,1, got '{pin}'") from None
    with out.progress("measuring") as progress:
        report = bench(model, against, rounds=rounds, threads=threads, pin=cpus, shapes=parse_shapes(shapes),
                       seed=seed, profile=profile, device=device, progress=progress)  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
    else:
        _print(out, report)


def _print(out: Out, report: BenchReport) -> None:
    models = [timing for timing in (report.model, report.against) if timing is not None]
    ratios = report.ratios
    rows = [
        ("median time", *(f"{t.median_ms:.3f} ms" for t in models), ratios.get("time")),
        ("p10 .. p90", *(f"{t.p10_ms:.3f} .. {t.p90_ms:.3f} ms" for t in models), None),
        ("device time", *(t.queued_ms and f"{t.queued_ms:.4f} ms" for t in models), None),
        ("device", *(t.device for t in models), None),
        ("runs", *(f"{t.runs:,}" for t in models), None),
        ("file size", *(megabytes(t.file_bytes) for t in models), ratios.get("size")),
        ("load time", *(f"{t.load_ms:.1f} ms" for t in models), ratios.get("load")),
        ("peak memory", *(megabytes(t.peak_memory_bytes) for t in models), ratios.get("memory")),
    ]
    short = [Path(timing.path).name for timing in models]
    labels = short if len(set(short)) == len(short) else [timing.path for timing in models]
    formatted = [(*row[:-1], None if row[-1] is None else f"{row[-1]:.3f}") for row in rows if any(row[1:])]
    out.table(["", *(f"{label}>" for label in labels), "ratio>"], formatted)
    pinned = f", pinned to CPU {', '.join(map(str, report.pinned))}" if report.pinned else ""
    out.note(
        f"{report.threads} thread(s){pinned}; {report.rounds} rounds in turns; load time and peak memory "
        "(VmHWM) from fresh processes"
    )
    for label, timing in zip(labels, models, strict=True):
        if timing.nodes:
            slowest = timing.nodes if out.verbosity > 0 else timing.nodes[:20]
            out.table(
                ["node", "op", "ms per run>"],
                [(node.name, node.op_type, f"{node.mean_ms:.4f}") for node in slowest],
                title=f"{label}: slowest of {len(timing.nodes)} nodes",
            )
