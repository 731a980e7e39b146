"""``lowbit quantize``: a float model to few bits, from a few unlabeled images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.calibration import (
    calibration_feeds,
    calibration_options,
    quantizing_options,
    settings_of,
)
from lowbit.cli.common import (
    MODEL,
    Out,
    megabytes,
    model_argument,
    overwrite_option,
    plots_option,
    report_option,
    subcommand,
    threads_option,
    write_report,
    written_model,
)

if TYPE_CHECKING:
    import onnx

    from lowbit.quantizer.report import QuantizeReport

_METHODS = ("mse", "minmax", "percentile", "entropy")
_ROUNDINGS = ("auto", "nearest", "gptq", "descent", "adaround")


@subcommand("quantize")
@model_argument
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the quantized model.")
@click.option("--bits", metavar="wNaM", help="Bits of weights and activations, 1 to 8 each, such as w4a8.")
@calibration_options
@click.option("--calibration-method", type=click.Choice(_METHODS), help="How activation ranges are chosen.")
@click.option("--method", type=click.Choice(_ROUNDINGS), help="How weights are rounded.")
@click.option("--per-channel/--per-tensor", default=None, help="Weight scales (default: per channel).")
@click.option("--first-last", type=click.IntRange(1, 8), help="Bits of first and last layers (default: 8).")
@click.option("--uniform", is_flag=True, default=None, help="The asked for bits everywhere, no exceptions.")
@click.option("--disable-rule", "disable_rules", multiple=True, metavar="RULE",
              help="Turn off a rule of docs/quantize.md; may be repeated.")  # fmt: skip
@click.option("--nodes-to-exclude", multiple=True, metavar="REGEX", help="Nodes that stay float.")
@click.option("--nodes-to-quantize", multiple=True, metavar="REGEX", help="The only layers to quantize.")
@click.option("--op-types-to-quantize", multiple=True, metavar="OP", help="The only ops to quantize.")
@click.option("--sub-byte", is_flag=True, default=None, help="int4 and int2 weights (opsets 21 and 25).")
@click.option("--io", type=click.Choice(["float32", "uint8"]),
              help="uint8: the model is fed raw images and does --preprocess's arithmetic.")  # fmt: skip
@quantizing_options
@threads_option
@report_option
@plots_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    output: Path,
    calib: str,
    preprocess: str | None,
    samples: int | None,
    method: str | None,
    config_file: Path | None,
    lowbit_file: Path | None,
    cache: Path | None,
    threads: int | None,
    seed: int,
    shapes: tuple[str, ...],
    report_file: Path | None,
    plots_folder: Path | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Quantize a float32 MODEL to 1 to 8 bits, without training or labels.

    40 to 100 images are enough. The result is a QDQ model that any ONNX Runtime runs, QCDQ below 8 bits, and
    converts to lowbit whole (exit code 3 if not). The settings that made it are written beside it (.yaml). A
    run that was interrupted goes on where it stopped when the same command is given again.
    """
    from lowbit.inspection.quantize_html import render
    from lowbit.inspection.quantize_plots import check_plots, write_plots
    from lowbit.proto.atomic import check_writable
    from lowbit.proto.feeds import as_proto
    from lowbit.quantizer.embed import embed
    from lowbit.quantizer.quantize import quantize

    if report_file is not None:
        check_writable(report_file, overwrite=overwrite, inputs=(model,))
    if plots_folder is not None:
        check_plots(plots_folder, overwrite=overwrite)
    settings = settings_of(config_file, **options, rounding=method, seed=seed or None)
    source: Path | onnx.ModelProto = model
    rest = preprocess
    if preprocess is not None and settings.get("io") == "uint8":
        check_writable(output, overwrite=overwrite, inputs=(model,))
        source, rest = embed(as_proto(model), preprocess)
    with out.steps("quantizing") as tell:
        result = quantize(
            source,
            calibration_feeds(as_proto(model), calib, rest, samples, seed, shapes),
            output,
            config=settings,
            convert_to=False if lowbit_file is None else lowbit_file,
            threads=threads,
            cache=cache,
            state=output.parent / f".{output.name}.lowbit-state",
            progress=tell,
            overwrite=overwrite,
        )
    summary = written_model(model, output, result.report)
    if report_file is not None:
        write_report(report_file, summary, lambda: render(result.report, model.name), overwrite=overwrite)
    if plots_folder is not None:
        write_plots(result.report, plots_folder, overwrite=overwrite)
    if out.as_json:
        out.json(summary)
    else:
        _print(out, summary, result.report)
        if rest != preprocess:
            out.note(f"the model is fed raw pixels: --preprocess {rest}")


def _print(out: Out, summary: dict[str, Any], report: QuantizeReport) -> None:
    widths = Counter(f"w{layer.weight_bits}a{layer.input_bits}" for layer in report.layers)
    before, after = summary["bytes_before"], summary["bytes_after"]
    weights = sum(layer.float_bytes for layer in report.layers), sum(layer.bytes for layer in report.layers)
    sqnr = ", ".join(
        f"{name} {value:.1f} dB" for name, value in list(report.outputs.items())[:4] if value is not None
    )
    out.facts(
        [
            ("layers", f"{len(report.layers)}  ({', '.join(f'{n} {w}' for w, n in widths.most_common())})"),
            ("float", f"{len(report.kept_float)} nodes" if report.kept_float else None),
            ("images", report.images),
            ("SQNR", sqnr or None),
            ("weights", f"{megabytes(weights[0])} -> {megabytes(weights[1])}"),
            ("size", f"{megabytes(before)} -> {megabytes(after)} ({after / max(before, 1):.0%})"),
            ("written", summary["output"]),
        ]
    )
    if out.verbosity > 0:
        rows = [
            (r.node, r.op_type, f"w{r.weight_bits}a{r.input_bits}", r.rounding, _db(r.sqnr_weights),
             _db(r.sqnr_input), _db(r.sqnr_accumulated))
            for r in report.layers
        ]  # fmt: skip
        out.table(["node", "op", "bits", "rounding", "weights dB>", "input dB>", "output dB>"], rows)
        out.table(["node", "why it stays float"], list(report.kept_float.items()))
    for warning in report.warnings:
        out.note(f"warning: {warning}")


def _db(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
