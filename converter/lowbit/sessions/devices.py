"""The library, its execution provider, and the devices that it offers on this machine.

| device | what runs there |
| --- | --- |
| cpu | the faster of the next two |
| cpu-ep | the execution provider on the CPU: whole regions compiled into one node |
| cpu-ops | every lowbit node as an operator of its own on ONNX Runtime's CPU provider |
| cuda:0 | the execution provider on the first NVIDIA GPU; ``cuda`` is short for it |
"""

from __future__ import annotations

import platform
import re
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowbit.errors import LowBitError
from lowbit.library import get_ep_name, get_library_path, require_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

_NAME = re.compile(r"cpu|cpu-ep|cpu-ops|cuda|[a-z]+:(0|[1-9]\d{0,3})")
_OPENING = re.compile(r"^(lowbit: )?(no \w+ device can be used: )?")
_STATUS = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (lowbit: )?")
_lock = threading.Lock()

SPELLINGS = "'cpu', 'cpu-ep', 'cpu-ops', 'cuda' or 'cuda:N'"

_HOST = ("cpu", "cpu-ep", "cpu-ops")

_TARGET = "target:"

_TARGETS_SUFFIX = ".targets"
"""A registration under a name that ends so offers GPUs that are not there, for which models are compiled."""

_CPU_SUFFIX = ".cpu"
"""A registration under a name that ends so offers the CPU alone, and looks for no GPU."""


@dataclass(frozen=True)
class Device:
    """What ``device=`` of :func:`lowbit.session` takes.

    Attributes:
        name: "cpu", "cpu-ops", "cpu-ep", "cuda:0", "cuda:1" ...; "cuda" where no GPU can be used.
        description: the hardware.
        reason: why it cannot be used; None where it can.
    """

    name: str
    description: str
    reason: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Plain data for ``--format json``."""
        return asdict(self)


def canonical(device: str) -> str:
    """A device name in its full form: "cuda" is "cuda:0".

    Raises:
        LowBitError: for anything that is no name of a device.
    """
    found = _NAME.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise _no_name(device)
    return "cuda:0" if device == "cuda" else device


def _no_name(device: object) -> LowBitError:
    return LowBitError(
        f"device must be {SPELLINGS} with the number of a GPU, got {device!r}; `lowbit sys` lists the "
        "devices of this machine"
    )


def has_own_memory(device: str) -> bool:
    """Whether a device, by its name in full, is a GPU."""
    return device not in _HOST


def runs_as_it_is(device: str) -> bool:
    """Whether a device, by its name in full, runs a model that was not converted without converting it."""
    return device in ("cpu", "cpu-ops")


def cpu_name() -> str:
    """What the system calls the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def devices() -> list[Device]:
    """Every device, those that cannot be used with the reason. Registers the execution provider.

    Never raises for what a machine lacks: no ONNX Runtime, or one without plugin execution providers, shows
    as a reason.
    """
    try:
        require_onnxruntime()
    except LowBitError as error:
        cpus = [Device(name, cpu_name(), str(error)) for name in ("cpu", "cpu-ops", "cpu-ep")]
        return [*cpus, Device("cuda", "NVIDIA GPU", str(error))]
    found = [Device("cpu", cpu_name()), Device("cpu-ops", cpu_name())]
    try:
        offered = ep_devices()
    except LowBitError as error:
        return [*found, Device("cpu-ep", cpu_name(), str(error)), Device("cuda", "NVIDIA GPU", str(error))]
    for name, each in offered.items():
        found.append(Device(name, each.ep_metadata.get("description") or cpu_name()))
    reason = _why_no_gpu(offered)
    if reason is not None:
        found.append(Device("cuda", "NVIDIA GPU", reason))
    return found


def ep_devices() -> dict[str, onnxruntime.OrtEpDevice]:
    """What the execution provider offers, by name: "cpu-ep", "cuda:0" ...

    Raises:
        LowBitError: if it cannot be registered.
    """
    register_ep()
    return {_name(each): each for each in _offered() if not _is_alone(each)}


def ep_device(device: str) -> onnxruntime.OrtEpDevice:
    """The device of this canonical name as ONNX Runtime knows it.

    Looks for GPUs only where it is one: that starts CUDA.

    Raises:
        LowBitError: if it cannot be used, with the reason.
    """
    if device == "cpu-ep":
        register_ep(gpus=False)
        offered = {_name(each): each for each in _offered()}
    else:
        offered = ep_devices()
    if device in offered:
        return offered[device]
    kinds = {"cuda", *(name.partition(":")[0] for name in offered if has_own_memory(name))}
    if has_own_memory(device) and device.partition(":")[0] not in kinds:
        raise _no_name(device)
    usable = ", ".join(name for name in offered if has_own_memory(name))
    reason = _why_no_gpu(offered)
    there = f"there is {usable}" if usable else "no GPU can be used"
    raise LowBitError(f"device '{device}': {there}{f': {reason}' if reason else ''}")


def target_devices() -> dict[str, onnxruntime.OrtEpDevice]:
    """The GPUs that models can be compiled for without one, by their architecture: "sm_90" ...

    Raises:
        LowBitError: if liblowbit_cuda is not there, or ONNX Runtime does not take it.
    """
    onnxruntime = require_onnxruntime()
    _require_api(onnxruntime.__version__)
    with _lock:
        if not any(_is_target(each) for each in _all_offered()):
            try:
                onnxruntime.register_execution_provider_library(
                    get_ep_name() + _TARGETS_SUFFIX, get_library_path()
                )
            except Exception as error:  # ONNX Runtime's classes share no base below Exception
                said = " ".join(str(error).split())
                raise LowBitError(_STATUS.sub("", said)) from error
    offered = filter(_is_target, _all_offered())
    return {str(each.ep_metadata["device"]).removeprefix(_TARGET): each for each in offered}


def register_ep(*, gpus: bool = True) -> None:
    """Makes the execution provider known to ONNX Runtime; once per process, however often it is called.

    A process that wanted the CPU first and a GPU later has it twice, the CPU's alone and both: ONNX Runtime
    asks a library for its devices once, and one that is in use cannot be registered anew.

    Args:
        gpus: whether to look for GPUs too, which starts CUDA.

    Raises:
        LowBitError: if this ONNX Runtime has no plugin execution providers, or refuses the library.
    """
    onnxruntime, path = require_onnxruntime(), get_library_path()
    _require_api(onnxruntime.__version__)
    with _lock:
        # The program, or another package, may have registered the library under a name of its own.
        if any(not gpus or not _is_alone(each) for each in _offered()):
            return
        try:
            name = get_ep_name() + ("" if gpus else _CPU_SUFFIX)
            onnxruntime.register_execution_provider_library(name, path)
        except Exception as error:  # ONNX Runtime's classes share no base below Exception
            raise LowBitError(
                f"ONNX Runtime {onnxruntime.__version__} does not take the execution provider of {path}: "
                + " ".join(str(error).split())
            ) from error


def _offered() -> list[onnxruntime.OrtEpDevice]:
    """The provider's devices on which something can run, as far as ONNX Runtime knows them."""
    return [each for each in _all_offered() if not _is_target(each)]


def _is_target(offered: onnxruntime.OrtEpDevice) -> bool:
    return str(offered.ep_metadata["device"]).startswith(_TARGET)


def _all_offered() -> list[onnxruntime.OrtEpDevice]:
    onnxruntime = require_onnxruntime()
    return [
        each
        for each in onnxruntime.get_ep_devices()
        if each.ep_name == get_ep_name() and each.ep_metadata.get("device")
    ]


def _name(offered: onnxruntime.OrtEpDevice) -> str:
    name = str(offered.ep_metadata["device"])
    return "cpu-ep" if name == "cpu" else name


def _is_alone(offered: onnxruntime.OrtEpDevice) -> bool:
    """Whether a device is the CPU of a registration that looked for no GPU."""
    return bool(offered.ep_metadata.get("cpu_alone"))


def _require_api(version: str) -> None:
    api = offered_api(version)
    if api is not None and api < required_api():
        raise LowBitError(
            f"the execution provider needs onnxruntime 1.{required_api()} or newer, this is {version}; "
            "update it or use device 'cpu'"
        )


def offered_api(version: str | None = None) -> int | None:
    """The C API of an ONNX Runtime, by default of the one that is installed: release 1.N offers API N."""
    try:
        return int((version or require_onnxruntime().__version__).split(".")[1])
    except (LowBitError, IndexError, ValueError):
        return None


def required_api() -> int:
    """The C API that the library requires."""
    from lowbit import _native

    return _native.required_api


def _why_no_gpu(offered: dict[str, Any]) -> str | None:
    """Why a GPU, or one of several, cannot be used, as the library says; None where nothing is in the way."""
    told = [each.ep_metadata.get("cuda_unavailable") for each in offered.values()]
    reason = next((_OPENING.sub("", text) for text in told if text), None)
    if reason is None and not any(name.startswith("cuda:") for name in offered):
        return "the library gives no reason; set LOWBIT_CUDA_LIBRARY to the path of liblowbit_cuda"
    return reason
