"""Compiled models: regions with packed weights and measured choices, ready to load (EPContext).

Such a file opens without conversion, packing or tuning, on the kind of device that it was compiled for and
with the release of lowbit that wrote it; anything else is refused with both sides named. Keep the converted
model: it is the one that runs everywhere. A weightless one leaves the weights there, and packs them as it
opens.
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

from lowbit.deploy.weights import WeightsInPlace
from lowbit.errors import LowBitError, ModelError, OutputError, raise_if_out_of_memory
from lowbit.library import require_onnxruntime
from lowbit.proto.atomic import check_writable, temporary_folder, write_atomically
from lowbit.proto.feeds import as_proto, random_feeds
from lowbit.proto.model_file import load_proto, nodes_of, save_model
from lowbit.sessions.absent_gpu import AbsentGpu
from lowbit.sessions.devices import canonical, has_own_memory, runs_as_it_is
from lowbit.sessions.session import (
    DATA_FOLDER,
    as_text,
    for_device,
    one_line,
    prepare,
    run_session,
    session,
    source_of,
)

if TYPE_CHECKING:
    import onnxruntime

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
        load_ms: time to open it; on a target, which runs nothing, without the GPU's part.
        compared: outputs were compared with the uncompiled model's on random inputs.
        weights: of a weightless model the files that its weights are read from, relative to its folder.
    """

    output: str
    device: str
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    regions: int = 0
    left: list[str] = field(default_factory=list)
    load_ms: float = 0.0
    compared: bool = False
    weights: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return asdict(self)


def compile(
    model: Model,
    output: str | os.PathLike[str],
    *,
    device: str = "cuda",
    target: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    tuned_on: str | None = None,
    external: bool = False,
    weightless: bool = False,
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
        target: in the place of ``device`` the architecture of a GPU that need not be there, such as "sm_90".
            What comes of it is read back, but compared with nothing: it runs where there is such a GPU.
        cache: with ``target``, the folder of measured choices that ``lowbit tune`` wrote beside such a GPU;
            without it the cost model decides.
        tuned_on: with ``cache``, how the name of that GPU begins, where the folder has several.
        external: write the compiled data into a file beside the model instead of into it.
        weightless: leave weights in the file of ``model``, which must stay as it is where it is, in the
            folder of ``output`` or below; needs onnxruntime 1.26.
        batches: batch sizes to tune for first, as :func:`lowbit.tune` does.
        shapes: sizes of inputs with symbolic dims, for tuning and for the comparison.
        provider_options: options of the execution provider.
        overwrite: replace ``output`` if it exists.

    Raises:
        ModelError: if the model cannot be read, holds nothing to compile, or the result differs.
        OutputError: if the output cannot be written.
        LowBitError: for a device or a target that cannot be used, or arguments that do not go together.
    """
    place, path = canonical(device), Path(output)
    if runs_as_it_is(place):
        raise LowBitError(
            f"device '{place}' runs custom ops too, for which nothing is compiled; give 'cuda' or 'cpu-ep'"
        )
    absent = None if target is None else AbsentGpu.find(target, cache, tuned_on)
    if absent is None and (cache is not None or tuned_on is not None):
        raise LowBitError(
            "cache and tuned_on go with target; give a device's cache as an option of the provider"
        )
    if absent is not None and (batches or shapes):
        raise LowBitError(
            "batches and shapes are there to measure and to compare, which takes a GPU; leave them out"
        )
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    check_writable(path, overwrite=overwrite, inputs=() if source is None else (source,))
    if not path.suffix:  # ONNX Runtime takes it for a folder
        raise OutputError(f"{path}: give a name with an ending, such as {path.name}.onnx")
    if weightless and (source is None or external):
        raise LowBitError(
            "weightless leaves weights in the model's file: give a path as the model, and leave external out"
        )
    floats = as_text(provider_options).get("float_regions") == "1"
    ready = for_device(model, floats=floats and (absent is not None or has_own_memory(place)))
    _refuse_compiled(as_proto(ready))
    if batches:
        _measure(ready, place, batches, shapes, provider_options)

    in_place = WeightsInPlace(source, path) if weightless and source is not None else None

    def options() -> onnxruntime.SessionOptions:
        made = require_onnxruntime().SessionOptions()
        if absent is None:
            prepare(made, place, provider_options)
        else:
            absent.prepare(made, provider_options)
        return made

    try:
        # Compiled data is named after the model and found beside it, so the whole appears under its final
        # name in a folder of its own, from which it moves.
        with temporary_folder(path) as folder:
            written = folder / path.name
            _compile(ready, written, target or place, external, in_place, options())
            if absent is None:
                report = _check(ready, written, in_place, place, shapes or {}, provider_options)
            else:
                report = _read_back(written, in_place, absent.name, options())
            report.weights = [] if in_place is None else sorted(in_place.files)
            report.output, report.files = str(path), _move_all(written, path, overwrite=overwrite)
            return report
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


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
    model: Any, written: Path, device: str, external: bool, in_place: WeightsInPlace | None,
    options: onnxruntime.SessionOptions,
) -> None:  # fmt: skip
    onnxruntime = require_onnxruntime()
    source, name = source_of(model)
    if in_place is not None:
        options.add_session_config_entry("ep.enable_weightless_ep_context_nodes", "1")
    try:
        compiler = onnxruntime.ModelCompiler(
            options, source, embed_compiled_data_into_model=not external,
            flags=onnxruntime.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
            get_initializer_location_func=None if in_place is None else in_place.locate,
        )  # fmt: skip
        compiler.compile_to_file(str(written))
    except Exception as error:  # ONNX Runtime's classes share no base below Exception
        raise_if_out_of_memory(error)
        raise ModelError(f"{name}: cannot be compiled for device '{device}': {one_line(error)}") from error
    if in_place is not None:
        in_place.check_some()
    model = load_proto(written, external_data=False)
    changed = _keep_one_of_each(model)
    if in_place is None and not external:
        _move_into_initializers(model)
        changed = True
    if changed:
        save_model(model, written, "compiled")


def _keep_one_of_each(model: onnx.ModelProto) -> bool:
    """Drops what ONNX Runtime before 1.31 refuses: of a subgraph it writes every initializer twice.

    Returns:
        Whether there was any.
    """
    found = False
    for node in nodes_of(model):
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                once = {tensor.name: tensor for tensor in graph.initializer}
                if len(once) < len(graph.initializer):
                    found = True
                    kept = [*once.values()]
                    del graph.initializer[:]
                    graph.initializer.extend(kept)
    return found


def _move_into_initializers(model: onnx.ModelProto) -> None:
    """Moves compiled regions from the nodes of a model's graph into initializers that those read.

    On the way to a session ONNX Runtime copies the attributes of a node five times, and an initializer once.
    """
    for node in model.graph.node:
        if node.op_type != "EPContext":
            continue
        held = next(attribute for attribute in node.attribute if attribute.name == "ep_cache_context")
        name = f"{node.name}.ep_cache_context"
        model.graph.initializer.add(
            name=name, data_type=onnx.TensorProto.UINT8, dims=[len(held.s)], raw_data=held.s
        )
        held.s = b""
        node.input.append(name)


def _at_its_place(
    written: Path, in_place: WeightsInPlace | None, options: onnxruntime.SessionOptions
) -> Path | bytes:
    """What opens with these options as the compiled model will where it is moved to."""
    if in_place is None:
        return written
    options.add_session_config_entry(DATA_FOLDER, str(in_place.folder))
    return written.read_bytes()


def _check(
    model: Any, written: Path, in_place: WeightsInPlace | None, device: str,
    shapes: Mapping[str, list[int]], provider_options: Mapping[str, str | int | bool] | None,
) -> CompileReport:  # fmt: skip
    """Opens what was written and compares it with the model."""
    proto = onnx.load(written, load_external_data=False)
    report = _report(written, proto, device)
    options = require_onnxruntime().SessionOptions()
    compiled = _at_its_place(written, in_place, options)
    start = time.perf_counter()
    opened = session(compiled, device=device, sess_options=options, provider_options=provider_options)
    report.load_ms = (time.perf_counter() - start) * 1e3
    try:
        feed = random_feeds(proto, shapes=shapes)
    except LowBitError:  # sizes that nobody gave: it opened, which has to do
        return report
    expected = run_session(session(model, device=device, provider_options=provider_options), feed)
    _compare(expected, run_session(opened, feed))
    report.compared = True
    return report


def _read_back(
    written: Path, in_place: WeightsInPlace | None, target: str, options: onnxruntime.SessionOptions
) -> CompileReport:
    """Opens what was written on the stand-in of a GPU, which reads all of it and runs nothing."""
    report = _report(written, onnx.load(written, load_external_data=False), target)
    compiled = _at_its_place(written, in_place, options)
    start = time.perf_counter()
    try:
        require_onnxruntime().InferenceSession(compiled, options)
    except Exception as error:  # ONNX Runtime's classes share no base below Exception
        raise_if_out_of_memory(error)
        raise ModelError(
            f"the compiled model cannot be read back ({one_line(error)}); this is a defect of lowbit"
        ) from error
    report.load_ms = (time.perf_counter() - start) * 1e3
    return report


def _report(written: Path, proto: onnx.ModelProto, device: str) -> CompileReport:
    """What the compiled model tells of itself."""
    report = CompileReport(str(written), device)
    for node in proto.graph.node:
        if node.op_type == "EPContext":
            report.regions += 1
        else:
            report.left.append(node.name or f"{node.op_type} of {node.output[0]}")
    report.bytes = sum(path.stat().st_size for path in written.parent.iterdir())
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
