"""``lowbit compile``: a model with packed weights and measured choices for one kind of device."""

from __future__ import annotations

from pathlib import Path

import click

from lowbit.cli.common import (
    MODEL,
    Out,
    batch_option,
    device_option,
    megabytes,
    model_argument,
    overwrite_option,
    parse_batches,
    parse_options,
    provider_option,
    shape_option,
    subcommand,
)


@subcommand("compile")
@model_argument
@click.option("-o", "--output", type=MODEL, required=True, help="Where to write the compiled model.")
@device_option("cuda")
@click.option(
    "--target", metavar="SM", help="In the place of --device, a GPU that need not be there, such as sm_90."
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="With --target: the folder of the choices that `lowbit tune` measured on such a GPU.",
)
@click.option(
    "--tuned-on", metavar="NAME", help="With --cache: how the name of that GPU begins, if there are several."
)
@click.option("--external", is_flag=True, help="Put the compiled data into a file beside the model.")
@click.option(
    "--weightless", is_flag=True, help="Leave weights in MODEL, in the folder of the output or below."
)
@provider_option
@batch_option
@shape_option
@overwrite_option
def command(
    out: Out,
    model: Path,
    output: Path,
    device: str,
    target: str | None,
    cache: Path | None,
    tuned_on: str | None,
    external: bool,
    weightless: bool,
    provider_options: tuple[str, ...],
    batch: str,
    shapes: tuple[str, ...],
    overwrite: bool,
) -> None:
    """Compile MODEL for a device, into a file that loads without conversion and tuning.

    The compiled model (EPContext) holds packed weights and the measured choices of the device's cache;
    --batch measures first. It is opened and compared with MODEL before it appears. It runs on that kind of
    device with this release of lowbit and is refused elsewhere, so keep MODEL.

    With --target nothing needs a GPU: the result is read back, and compared where one is.
    """
    from lowbit.deploy.compile import compile
    from lowbit.proto.feeds import parse_shapes

    batches = parse_batches(batch)
    with out.status(f"compiling {model.name}"):
        report = compile(model, output, device=device, target=target, cache=cache, tuned_on=tuned_on,
                         external=external, weightless=weightless, batches=batches,
                         shapes=parse_shapes(shapes), provider_options=parse_options(provider_options),
                         overwrite=overwrite)  # fmt: skip
    if out.as_json:
        out.json(report.to_dict())
        return
    left = f"{len(report.left)}: {', '.join(report.left[:6])}{' ..' if len(report.left) > 6 else ''}"
    out.facts(
        [
            ("device", report.device),
            ("regions", report.regions),
            ("left to ONNX Runtime", left if report.left else None),
            ("size", megabytes(report.bytes)),
            ("opens in", f"{report.load_ms:.1f} ms"),
            ("outputs", "as the model's on random inputs" if report.compared else
             "not compared: there is no such GPU here" if target else
             "not compared: sizes are symbolic; give --shape"),
            ("written", ", ".join(report.files)),
            ("weights stay in", ", ".join(report.weights) or None),
        ]
    )  # fmt: skip
