"""Sessions: a plain ``onnxruntime.InferenceSession`` that knows the ``ai.lowbit`` ops, on any device."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowBitError, ModelError, RefusedError, raise_if_out_of_memory
from lowbit.library import register, require_onnxruntime
from lowbit.sessions.devices import canonical, ep_device, has_own_memory, runs_as_it_is

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx
    import onnxruntime

    from lowbit.proto.report import Result

_PLACED = "lowbit.device"
"""The session entry that says which device SessionOptions hold: they cannot be asked. The execution provider
reads it, too: on "cpu" it keeps quiet about models that were not converted."""

_AGAINST_REGIONS = ("ep.context_enable", "session.disable_cpu_ep_fallback", "session.disable_quant_qdq")
"""Session entries which, set to "1", ask for what the execution provider does not give on the CPU."""

DATA_FOLDER = "session.model_external_initializers_file_folder_path"
"""The session entry that tells ONNX Runtime where the external data of a model in memory lie."""


def session(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Result,
    *,
    device: str = "cpu",
    threads: int | None = None,
    sess_options: onnxruntime.SessionOptions | None = None,
    provider_options: Mapping[str, str | int | bool] | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a model in ONNX Runtime with the ``ai.lowbit`` ops.

    On the CPU lowbit nodes run in one of two ways, which compute the same numbers from the same file: as
    custom ops of their own, or in whole regions that the execution provider compiles. "cpu" takes regions,
    which are faster, wherever nothing stands against them (docs/execution-provider.md tells what does);
    ``session.get_providers()`` tells which it took. "cpu-ops" and "cpu-ep" insist on one of the two.

    On "cpu" and "cpu-ops" a model that was not converted runs as it is, in stock ONNX Runtime. On every other
    device one whose quantizers are not lowbit's yet is converted in memory first; nothing else can run there.

    Args:
        model: a path, the bytes of a model, a ModelProto, or the result of :func:`lowbit.convert`. Only a
            path lets ONNX Runtime find external data, and the files beside a compiled model; a model in
            memory with external data is refused unless ``sess_options`` name their folder
            (``session.model_external_initializers_file_folder_path``).
        device: "cpu", "cpu-ops", "cpu-ep"; "cuda" or "cuda:1" for an NVIDIA GPU. :func:`lowbit.devices` tells
            what there is.
        threads: intra-op threads of this session; None leaves what ``sess_options`` says.
        sess_options: your own options. They keep every setting. What lasts is that the custom ops, or the
            device, are added to them, once, however many sessions they serve.
        provider_options: options of the execution provider, see docs/execution-provider.md; none on "cpu" and
            "cpu-ops".

    Returns:
        A plain ``onnxruntime.InferenceSession``.

    Raises:
        ModelError: if the file is missing, cannot be converted, or ONNX Runtime refuses the model (then a
            RefusedError, which tells the refusal of a conversion from that of the model itself).
        LowBitError: for a device that cannot be used, with the reason; for a thread count below 1.
    """
    onnxruntime = require_onnxruntime()
    place = canonical(device)
    if threads is not None and threads < 1:
        raise LowBitError(f"threads must be at least 1, got {threads}")

    options = onnxruntime.SessionOptions() if sess_options is None else sess_options
    if sess_options is None and threads is not None:
        # Kernels are measured for a number of threads, which ONNX Runtime does not tell its nodes.
        options.add_session_config_entry("lowbit.threads", str(threads))
    before = options.intra_op_num_threads
    try:
        if threads is not None:
            options.intra_op_num_threads = threads
        prepare(options, place, provider_options, model)
        own = has_own_memory(place)
        floats = own and as_text(provider_options).get("float_regions") == "1"
        ready = model if runs_as_it_is(place) else for_device(model, everything=own, floats=floats)
        try:
            return open_session(ready, options, place)
        except RefusedError as error:
            if ready is model:
                raise
            raise told_apart(error, source_of(model)[1], model) from error
    finally:
        options.intra_op_num_threads = before


def as_text(provider_options: Mapping[str, str | int | bool] | None) -> dict[str, str]:
    """Options as the execution provider takes them."""
    return {
        key: str(int(value)) if isinstance(value, bool) else str(value)
        for key, value in (provider_options or {}).items()
    }


def prepare(
    options: onnxruntime.SessionOptions,
    device: str,
    provider_options: Mapping[str, str | int | bool] | None,
    model: Any = None,
) -> None:
    """Registers the device or, for "cpu-ops", the custom ops alone; for "cpu" what serves ``model`` better.

    The execution provider brings the custom ops with it.

    Args:
        options: what the device is added to.
        device: its name in full.
        provider_options: options of the execution provider.
        model: what will be opened, as :func:`session` takes it; None: nothing that holds lowbit nodes.

    Raises:
        LowBitError: if the device cannot be used, or the options hold another one already.
    """
    given = as_text(provider_options)
    if runs_as_it_is(device) and given:
        raise LowBitError(
            f"provider_options ({', '.join(given)}) are for the execution provider; device '{device}' runs "
            "custom ops too, which take none; give device 'cpu-ep'"
        )
    wanted = f"{device} {sorted(given.items())}" if given else device
    held = _entry(options, _PLACED)
    if held not in (None, wanted):
        raise LowBitError(
            f"these SessionOptions are set up for device {held} already, got {wanted}; make new ones for it"
        )
    if held is not None:
        return
    if device == "cpu-ops" or (device == "cpu" and not _takes_regions(options, model)):
        register(options)
    else:
        options.add_provider_for_devices([ep_device("cpu-ep" if device == "cpu" else device)], given)
        if device == "cpu":
            # ONNX Runtime warns of every node that stays with a CPU which nobody named.
            options.add_provider("CPUExecutionProvider", {})
        options.add_session_config_entry(_PLACED, wanted)


def _takes_regions(options: onnxruntime.SessionOptions, model: Any) -> bool:
    """Whether "cpu" means the execution provider for a session, rather than custom ops.

    What its user asked for in the options comes first: with the execution provider ONNX Runtime's profiler
    does not tell the times of nodes, no optimized model can be written, a wish for compiled models would be
    granted, and one for no node on the CPU would be taken for one for no node outside of the regions.
    Providers of the user's own, and custom ops that are registered already, stay alone.
    """
    if (
        options.enable_profiling
        or options.optimized_model_filepath
        or options.has_providers()
        or _entry(options, "lowbit.registered") is not None
        or any(_entry(options, key) == "1" for key in _AGAINST_REGIONS)
        or not _mentions_lowbit(model)
    ):
        return False
    try:
        ep_device("cpu-ep")
    except LowBitError:  # an ONNX Runtime that has no plugin execution providers
        return False
    return True


def _mentions_lowbit(model: Any) -> bool:
    """Whether the name of lowbit's domain is in a model, which is known before it is parsed.

    In a file the nodes come before the weights, so that not much of it is read. ONNX Runtime's own format is
    for custom ops.
    """
    from lowbit.schemas import DOMAIN

    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        if path.endswith(".ort") or not os.path.isfile(path) or os.path.getsize(path) == 0:
            return False
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return data.find(DOMAIN.encode()) >= 0
    if isinstance(model, (bytes, bytearray)):
        return DOMAIN.encode() in model
    proto = getattr(model, "model", model)
    return hasattr(proto, "graph") and is_ready(proto)


def open_session(
    model: Any, options: onnxruntime.SessionOptions, device: str = "cpu", *, without: Sequence[str] = ()
) -> onnxruntime.InferenceSession:
    """``onnxruntime.InferenceSession`` whose errors are one ModelError; ``options`` hold the device.

    ``without`` names optimizers of ONNX Runtime that are not to run.
    """
    onnxruntime = require_onnxruntime()
    source, name = source_of(model)
    if isinstance(source, bytes) and not _entry(options, DATA_FOLDER):
        _require_own_data(source, name)
    # Without providers ONNX Runtime takes those of the options. It would answer a failure of theirs by
    # running everything on the CPU, with a line on stdout.
    alone = runs_as_it_is(device) and _entry(options, _PLACED) is None
    where: dict[str, Any] = {"providers": ["CPUExecutionProvider"]} if alone else {"enable_fallback": 0}
    if without:
        where["disabled_optimizers"] = list(without)
    try:
        return onnxruntime.InferenceSession(source, options, **where)
    except Exception as error:
        if not _from_onnxruntime(error):
            raise
        raise_if_out_of_memory(error)
        text = one_line(error)
        if runs_as_it_is(device) and "EPContext" in text:
            raise ModelError(
                f"{name}: it is compiled for an execution provider; open it with the device that it was "
                "compiled for (such as 'cuda'), or open the model that it was made from"
            ) from error
        raise RefusedError(f"{name}: ONNX Runtime refuses it: {text}", text) from error


def runnable(model: Any, proto: onnx.ModelProto, device: str) -> Any:
    """A model as ONNX Runtime can load it: one whose quantizers it does not know, in standard ops.

    Args:
        model: a path, a ModelProto or a Result.
        proto: the model itself, without external data where it is a path.
        device: in full; one that needs converted models needs nothing else.

    Returns:
        ``model`` as it was given, wherever that will do.
    """
    from lowbit.frontends.standard_ops import needs_standard_form, standard_form
    from lowbit.proto.feeds import as_proto

    return standard_form(as_proto(model)) if runs_as_it_is(device) and needs_standard_form(proto) else model


def told_apart(error: RefusedError, converted: str, original: Any) -> ModelError:
    """The refusal of a converted model, with whether ONNX Runtime refuses its original as well.

    Args:
        error: the refusal.
        converted: how to call the converted model.
        original: what it was made from: whatever :func:`session` takes.
    """
    message = f"{converted}: ONNX Runtime refuses the converted model: {error.reason}"
    reason = refusal_of(original)
    if reason is not None:
        return ModelError(f"{message}; it refuses the original, too: {reason}")
    return ModelError(
        f"{message}; it loads the original, so that the conversion is at fault: convert it again with this "
        "lowbit, and report it if that does not help"
    )


def refusal_of(model: Any) -> str | None:
    """Why ONNX Runtime does not load a model, in stock form where it knows no other; None if it does."""
    onnxruntime = require_onnxruntime()

    from lowbit.frontends.standard_ops import needs_standard_form, standard_form
    from lowbit.proto.feeds import as_proto

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    prepare(options, "cpu", None)
    try:
        foreign = _read(model)
        if foreign is not None and needs_standard_form(foreign):
            model = standard_form(as_proto(model))
        open_session(model, options)
    except RefusedError as error:
        return error.reason
    except LowBitError as error:
        return str(error)
    return None


def _require_own_data(data: bytes, name: str) -> None:
    """Refuses a model in memory with external data, which ONNX Runtime looks for in the current folder."""
    if b"location" not in data:  # the key by which a tensor names its file: mostly there is nothing to parse
        return
    proto = _parsed(data)
    if proto is not None:
        from lowbit.proto.model_file import require_own_data

        require_own_data(proto, name)


def for_device(model: Any, *, everything: bool = True, floats: bool = False) -> Any:
    """What the execution provider can run of a model: converted in memory unless that was done already.

    A model that holds lowbit nodes, or is compiled, is returned as it was given, so that a path stays a path.

    Args:
        model: the model.
        everything: whether what gains nothing on a CPU is converted, too.
        floats: whether the device runs what is not quantized, too: otherwise a model of which it would run
            nothing gets a warning.

    Raises:
        ModelError: if it cannot be read or converted.
    """
    if hasattr(model, "report") or _is_ready_file(model):  # the former: a Result of lowbit.convert
        return model
    proto = _read(model)
    if proto is None or is_ready(proto):
        return model
    from lowbit.frontends.dialects import dialects_of

    if not dialects_of(proto):
        if not floats:
            _stays("nothing in this model is quantized")
        return model
    from lowbit.conversion.convert import convert

    given = Path(model) if isinstance(model, (str, os.PathLike)) else proto
    result = convert(given, all_regions=everything)
    if not is_ready(result.model) and not floats:
        left = (*result.report.islands, *result.report.kept)
        why = next((f": {node.reason}" for node in left if node.reason), "")
        _stays(f"nothing in this model could be converted{why}")
    return result


def _stays(why: str) -> None:
    warnings.warn(f"{why}; it runs on the CPU as ONNX Runtime runs it", RuntimeWarning, stacklevel=4)


def is_ready(proto: onnx.ModelProto) -> bool:
    """Whether a model holds lowbit nodes, or regions that were compiled from them, subgraphs included."""
    return _holds_lowbit(proto.graph)


def _is_ready_file(model: Any) -> bool:
    """Whether a model is a file that is ready, as far as its nodes tell."""
    from google.protobuf.message import DecodeError

    from lowbit.proto.model_file import load_nodes

    if not isinstance(model, (str, os.PathLike)) or not os.path.isfile(model):
        return False
    try:
        return is_ready(load_nodes(model))
    except (OSError, ValueError, DecodeError):  # whoever reads all of it says why
        return False


def _holds_lowbit(graph: onnx.GraphProto) -> bool:
    from lowbit.schemas import DOMAIN

    return any(
        node.domain == DOMAIN
        or node.op_type == "EPContext"
        or any(_holds_lowbit(attribute.g) for attribute in node.attribute if attribute.HasField("g"))
        for node in graph.node
    )


def _read(model: Any) -> onnx.ModelProto | None:
    """The model without its external data; None for what is no ONNX file, which ONNX Runtime shall judge."""
    if isinstance(model, (str, os.PathLike)):
        from lowbit.proto.model_file import load_proto

        return None if os.fspath(model).endswith(".ort") else load_proto(model, external_data=False)
    if not isinstance(model, (bytes, bytearray)):
        return model if hasattr(model, "graph") else None
    return _parsed(bytes(model))


def _parsed(data: bytes) -> onnx.ModelProto | None:
    import onnx

    try:
        return onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's DecodeError, which differs between its implementations
        raise_if_out_of_memory(error)
        return None


def run_session(
    opened: onnxruntime.InferenceSession, feed: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """All outputs by name, and ONNX Runtime's errors (a wrong dtype, rank or size) as one ModelError."""
    names = [str(value.name) for value in opened.get_outputs()]
    try:
        return dict(zip(names, opened.run(names, dict(feed)), strict=True))
    except Exception as error:
        if not _from_onnxruntime(error):
            raise
        raise_if_out_of_memory(error)
        raise ModelError(f"ONNX Runtime does not run it: {one_line(error)}") from error


def _from_onnxruntime(error: Exception) -> bool:
    """Whether ONNX Runtime raised it: its classes share no base below Exception, and some are builtins."""
    return type(error).__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, ValueError))


def source_of(model: Any) -> tuple[str | bytes, str]:
    """What InferenceSession takes, and how to call it in messages."""
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        if not os.path.isfile(path):
            raise ModelError(f"{path}: no such file")
        return path, path
    if isinstance(model, (bytes, bytearray)):
        return bytes(model), "the model"
    proto = getattr(model, "model", model)  # a Result holds its ModelProto in .model
    if not hasattr(proto, "SerializeToString"):
        raise LowBitError(
            f"model must be a path, bytes, a ModelProto or a Result, got {type(model).__name__}"
        )
    name = proto.graph.name or "the model"
    try:
        return proto.SerializeToString(), name
    except ValueError as error:  # 2 GB
        raise ModelError(f"{name}: too large to be opened from memory: {one_line(error)}") from error


def _entry(options: onnxruntime.SessionOptions, key: str) -> str | None:
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # there is none
        return None


def one_line(error: Exception) -> str:
    """The message of an error, as part of a sentence."""
    return " ".join(str(error).split())
