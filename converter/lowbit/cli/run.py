"""``lowbit run``: a model once, converted or not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lowbit.cli.common import (
    MODEL,
    Out,
    device_option,
    model_argument,
    overwrite_option,
    seed_option,
    shape_option,
    subcommand,
    threads_option,
)
from lowbit.errors import LowBitError, RefusedError

if TYPE_CHECKING:
    import onnx


@subcommand("run")
@model_argument
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy | FILE.npz",
              help="Input tensors; may be repeated. A model with one input needs no NAME.")  # fmt: skip
@click.option("--random", is_flag=True, help="Random inputs.")
@click.option("-o", "--output", type=MODEL, help="Write the outputs to an .npz file.")
@overwrite_option
@shape_option
@seed_option
@threads_option
@device_option("cpu")
def command(
    out: Out,
    model: Path,
    inputs: tuple[str, ...],
    random: bool,
    output: Path | None,
    overwrite: bool,
    shapes: tuple[str, ...],
    seed: int,
    threads: int | None,
    device: str,
) -> None:
    """Run MODEL once and summarize its outputs.

    On another device than the CPU a quantized MODEL that was not converted yet is converted in memory.
    """
    from lowbit.proto.atomic import check_writable, write_atomically
    from lowbit.proto.feeds import parse_shapes, random_feeds
    from lowbit.proto.model_file import load_proto
    from lowbit.sessions.session import run_session, runnable, session

    if bool(inputs) == random:
        raise click.UsageError("give either --input or --random")
    if output is not None:
        check_writable(output, overwrite=overwrite, inputs=(model,))
    proto = load_proto(model, external_data=False)
    feeds = random_feeds(proto, seed, parse_shapes(shapes)) if random else _feeds(inputs, proto)
    ready = runnable(model, proto, device)
    if ready is not model:
        out.note(f"{model}: ONNX Runtime does not load its quantizers; they run written in standard ops")
    try:
        opened = session(ready, device=device, threads=threads)
    except RefusedError as error:
        raise _told_apart(error, model, proto) from error
    results = run_session(opened, feeds)
    if output is not None:
        write_atomically(output, lambda path: _save(path, results), overwrite=overwrite)

    summaries = [_summary(name, np.asarray(value)) for name, value in results.items()]
    if out.as_json:
        out.json({"model": str(model), "output": output and str(output), "outputs": summaries})
        return
    out.table(
        ["output", "dtype", "shape", "min>", "max>", "mean>", "top-1>"],
        [(s["name"], s["dtype"], str(s["shape"]), *map(_number, (s["min"], s["max"], s["mean"])), s["top1"])
         for s in summaries],
    )  # fmt: skip
    if output is not None:
        out.note(f"written: {output}")


def _told_apart(error: RefusedError, path: Path, model: onnx.ModelProto) -> LowBitError:
    """The refusal of a converted model, with what its original says where that lies beside it."""
    from lowbit.proto.provenance import other_source, source_file
    from lowbit.sessions.session import told_apart

    name = source_file(model)
    if name is None:
        return error
    original = path.parent / name
    if original.is_file() and not other_source(model, original):
        return told_apart(error, str(path), original)
    return LowBitError(
        f"{error}; it was converted from {name}: `lowbit run` of that file tells whether that is refused, too"
    )


def _feeds(inputs: tuple[str, ...], proto: onnx.ModelProto) -> dict[str, Any]:
    from lowbit.proto.feeds import load_samples, model_inputs

    names = list(model_inputs(proto))
    feeds: dict[str, Any] = {}
    for text in inputs:
        name, separator, file = text.partition("=")
        if not separator or os.path.exists(text):
            feeds.update(load_samples(text, proto))
        elif name not in names:
            raise LowBitError(f"--input {name}: the model's inputs are {', '.join(names)}")
        else:
            feeds[name] = _load(file)
    missing = [name for name in names if name not in feeds]
    if missing:
        raise LowBitError(f"no value for input {', '.join(missing)}; give --input {missing[0]}=FILE.npy")
    return feeds


def _load(file: str) -> Any:
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        if len(loaded.files) != 1:
            raise LowBitError(f"{file}: expected one array, found {', '.join(loaded.files) or 'none'}")
        return loaded[loaded.files[0]]
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, LowBitError):
            raise
        raise LowBitError(f"{file}: expected an .npy or .npz file: {error}") from error


def _save(path: Path, results: dict[str, Any]) -> None:
    with path.open("wb") as file:  # by handle: savez would append .npz to the temporary name
        np.savez(file, **results)


def _summary(name: str, value: Any) -> dict[str, Any]:
    numeric = value.size > 0 and np.issubdtype(value.dtype, np.number)
    classes = numeric and value.ndim == 2 and value.shape[1] > 1
    top1 = [int(i) for i in value.argmax(axis=1)] if classes else None
    return {
        "name": name,
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "min": float(value.min()) if numeric else None,
        "max": float(value.max()) if numeric else None,
        "mean": float(value.mean()) if numeric else None,
        "top1": top1[0] if top1 is not None and len(top1) == 1 else top1,
    }


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"
