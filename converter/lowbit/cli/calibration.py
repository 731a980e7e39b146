"""What ``quantize``, ``search`` and ``finetune`` ask for alike: images, settings, where results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.cli.common import MODEL, preprocess_option, seed_option, shape_option

if TYPE_CHECKING:
    import onnx

    from lowbit.proto.feeds import Feeds

_RANDOM_SAMPLES = 32

samples_option = click.option(
    "-n", "--samples", type=click.IntRange(min=1), help="Use so many images (default: all)."
)
convert_option = click.option(
    "--convert", "lowbit_file", type=MODEL, metavar="FILE", help="Also write the lowbit model."
)
cache_option = click.option("--cache", type=MODEL, metavar="DIR", help="A folder for temporary files.")

_IMAGES = (
    click.option(
        "--calib",
        required=True,
        metavar="DIR|FILE|random",
        help="Images as eval --data takes them: a folder or .zip, an .npz or .npy; random shows speed only.",
    ),
    preprocess_option,
    samples_option,
    seed_option,
    shape_option,
)

_FILES = (
    click.option("--config", "config_file", type=MODEL, metavar="FILE.yaml",
                 help="Settings of quantize, overrides by node among them; options win."),
    convert_option,
    cache_option,
)  # fmt: skip


def _all_of(options: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


calibration_options = _all_of(_IMAGES)
"""What :func:`calibration_feeds` takes."""

quantizing_options = _all_of(_FILES)
"""``--config`` for :func:`settings_of`, ``--convert`` and ``--cache``."""


def calibration_feeds(
    model: onnx.ModelProto,
    calib: str,
    preprocess: str | None,
    samples: int | None,
    seed: int,
    shapes: tuple[str, ...],
) -> Iterator[Feeds]:
    """What ``--calib`` names, sample by sample."""
    from lowbit.proto.feeds import model_inputs, parse_shapes, random_feeds
    from lowbit.proto.images import load_feeds

    if calib == "random":
        count, sizes = samples or _RANDOM_SAMPLES, parse_shapes(shapes)
        yield from (random_feeds(model, seed + i, sizes) for i in range(count))
        return
    for batch in load_feeds(calib, model_inputs(model), preprocess, limit=samples):
        # Samples that fill up the last batch of a fixed size are no data.
        yield {name: array[: batch.count] for name, array in batch.items()}


def settings_of(config_file: Path | None, **given: Any) -> dict[str, Any]:
    """Entries of a configuration: those of a file, over which options that were given win."""
    from lowbit.quantizer.config import read_config

    settings = {} if config_file is None else read_config(config_file)
    return settings | {name: value for name, value in given.items() if value not in (None, ())}
