"""Compiled models: regions with packed weights and measured choices, ready to load (EPContext).

Such a file opens without conversion, packing or tuning, on the kind of device that it was compiled for and
with the release of lowbit that wrote it; anything else is refused with both sides named. Keep the converted
model: it is the one that runs everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from lowbit.errors import LowBitError, ModelError, OutputError, raise_if_out_of_memory
from lowbit.library import require_onnxruntime
from lowbit.proto.atomic import check_writable, temporary_folder, write_atomically
from lowbit.proto.feeds import as_proto, random_feeds
from lowbit.sessions.devices import canonical, has_own_memory, runs_as_it_is
from lowbit.sessions.session import for_device, one_line, prepare, run_session, session, source_of

if TYPE_CHECKING:
    from lowbit.proto.feeds import Feeds, Model

TOLERANCE = 1e-6
"""Largest difference of float results behind the integer nodes, of the largest result."""


@dataclass
class CompileReport:
    """What :func:`compile` wrote.

    Attributes:
        output: the compiled model.
        device: what it was compiled for.
        files: the files it consists of, the model last.
        bytes: of all of them.
        regions: compiled regions.
        left: names of the nodes that stay with ONNX Runtime.
        load_ms: time to open it.
        compared: outputs were compared with the uncompiled model's on random inputs.
    """

    output: str
    device: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    regions: int = 0
    left: list[str] = field(default_factory=list)
    load_ms: float = 0.0
    compared: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return asdict(self)


def compile(
    model: Model,
    output: str | os.PathLike[str],
    *,
    device: str = "cuda",
    external: bool = False,
    batches: Sequence[int] = (),
    shapes: Mapping[str, list[int]] | None = None,
    provider_options: Mapping[str, str | int | bool] | None = None,
    overwrite: bool = False,
) -> CompileReport:
    """Compiles a model for a device, into a file that loads without conversion and tuning.

    The measured choices that the device's cache holds go into the file. The result appears at ``output`` only
    after it was opened on the device and gave what the model gives.

    Args:
        model: a converted model, or one that is converted in memory.
        output: where to write the compiled model.
        device: "cuda", "cuda:1" ... or "cpu-ep".
        external: write the compiled data into a file beside the model instead of into it.
        batches: batch sizes to tune for first, as :func:`lowbit.tune` does.
        shapes: sizes of inputs with symbolic dims, for tuning and for the comparison.
        provider_options: options of the execution provider.
        overwrite: replace ``output`` if it exists.

    Raises:
        ModelError: if the model cannot be read, holds nothing to compile, or the result differs.
        OutputError: if the output cannot be written.
        LowBitError: for a device that cannot be used.
    """
    place, target = canonical(device), Path(output)
    if runs_as_it_is(place):
        raise LowBitError(
            f"device '{place}' runs custom ops too, for which nothing is compiled; give 'cuda' or 'cpu-ep'"
        )
    inputs = (Path(model),) if isinstance(model, (str, os.PathLike)) else ()
    check_writable(target, overwrite=overwrite, inputs=inputs)
    if not target.suffix:  # ONNX Runtime takes it for a folder
        raise OutputError(f"{target}: give a name with an ending, such as {target.name}.onnx")
    ready = for_device(model)
    _refuse_compiled(as_proto(ready))
    if batches:
        _measure(ready, place, batches, shapes, provider_options)
    try:
        # Compiled data is named after the model and found beside it, so the whole appears under its final
        # name in a folder of its own, from which it moves.
        with temporary_folder(target) as folder:
            written = folder / target.name
            _compile(ready, written, place, external, provider_options)
            report = _check(ready, written, place, shapes or {}, provider_options)
            report.output, report.files = str(target), _move_all(written, target, overwrite=overwrite)
            return report
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from error


def _refuse_compiled(proto: onnx.ModelProto) -> None:
    if any(node.op_type == "EPContext" for node in proto.graph.node):
        raise ModelError("the model is compiled already; compile the one that it was made from")


def _measure(
    model: Model, device: str, batches: Sequence[int], shapes: Mapping[str, list[int]] | None,
    provider_options: Mapping[str, str | int | bool] | None,
) -> None:  # fmt: skip
    """Tunes into the cache that is read when the model is compiled."""
    from lowbit.measure.device_tune import tune_device
    from lowbit.measure.tune import tune

    folder = (provider_options or {}).get("cache_dir")
    if folder is not None and has_own_memory(device):
        tune_device(model, device, cache=str(folder), batches=batches, shapes=shapes)
    else:
        tune(model, device=device, batches=batches, shapes=shapes)


def _compile(
    model: Any, written: Path, device: str, external: bool,
    provider_options: Mapping[str, str | int | bool] | None,
) -> None:  # fmt: skip
    onnxruntime = require_onnxruntime()
    options = onnxruntime.SessionOptions()
    prepare(options, device, provider_options)
    source, name = source_of(model)
    try:
        compiler = onnxruntime.ModelCompiler(
            options, source, embed_compiled_data_into_model=not external,
            flags=onnxruntime.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
        )  # fmt: skip
        compiler.compile_to_file(str(written))
    except Exception as error:  # ONNX Runtime's classes share no base below Exception
        raise_if_out_of_memory(error)
        raise ModelError(f"{name}: cannot be compiled for device '{device}': {one_line(error)}") from error


def _check(
    model: Any, written: Path, device: str, shapes: Mapping[str, list[int]],
    provider_options: Mapping[str, str | int | bool] | None,
) -> CompileReport:  # fmt: skip
    """Opens what was written and compares it with the model."""
    proto = onnx.load(written, load_external_data=False)
    report = CompileReport(str(written), device)
    for node in proto.graph.node:
        if node.op_type == "EPContext":
            report.regions += 1
        else:
            report.left.append(node.name or f"{node.op_type} of {node.output[0]}")
    report.bytes = sum(path.stat().st_size for path in written.parent.iterdir())
    start = time.perf_counter()
    opened = session(written, device=device, provider_options=provider_options)
    report.load_ms = (time.perf_counter() - start) * 1e3
    try:
        feed = random_feeds(proto, shapes=shapes)
    except LowBitError:  # sizes that nobody gave: it opened, which has to do
        return report
    expected = run_session(session(model, device=device, provider_options=provider_options), feed)
    _compare(expected, run_session(opened, feed))
    report.compared = True
    return report


def _compare(expected: Feeds, got: Feeds) -> None:
    for name, value in expected.items():
        floats = np.issubdtype(value.dtype, np.floating)
        scale = float(np.abs(value).max(initial=0.0)) if floats else 0.0
        if got[name].shape != value.shape or not np.allclose(
            got[name], value, rtol=0, atol=TOLERANCE * scale, equal_nan=True
        ):
            raise ModelError(
                f"the compiled model's output '{name}' differs from the model's; this is a defect of lowbit"
            )


def _move_all(written: Path, target: Path, *, overwrite: bool) -> list[str]:
    """Moves the files of a folder to where the model shall be, the model last, and returns their paths."""
    others = sorted(path for path in written.parent.iterdir() if path != written)
    moved = []
    for path in (*others, written):
        final = target.with_name(path.name)
        check_writable(final, overwrite=overwrite)
        write_atomically(final, partial(_move, path), overwrite=overwrite)
        moved.append(str(final))
    return moved


def _move(path: Path, temporary: Path) -> None:
    path.replace(temporary)
