"""What this machine and this installation can do: the facts behind ``lowbit sys``."""

from __future__ import annotations

import glob
import os
import platform
from importlib import metadata
from typing import Any

from lowbit import __version__
from lowbit.errors import LowBitError
from lowbit.library import get_library_path, require_onnxruntime
from lowbit.sessions.devices import cpu_name, devices, offered_api, required_api


def sysinfo() -> dict[str, Any]:
    """Versions, the library, the devices, the instruction sets and the kernels, as plain data.

    Returns:
        A dict of JSON values; ``library`` and ``kernels`` hold an error text and an empty list where the
        native part is not built.
    """
    return {
        "versions": {
            "lowbit": __version__,
            "onnxruntime": _onnxruntime(),
            "onnx": _version("onnx"),
            "onnx-ir": _version("onnx-ir"),
            "numpy": _version("numpy"),
            "onnxruntime-extensions": _version("onnxruntime-extensions"),
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": _gpus(),
        },
        "devices": [device.to_dict() for device in devices()],
        **_native(),
    }


def _native() -> dict[str, Any]:
    cap = os.environ.get("LOWBIT_ISA")
    try:
        from lowbit import _native

        return {
            "library": {
                "path": get_library_path(),
                "api": {"required": required_api(), "offered": offered_api()},
            },
            "isa": {"machine": _native.isa_levels(), "used": _native.default_isa(), "cap": cap},
            "kernels": _native.kernel_table(),
        }
    except (ImportError, LowBitError) as error:
        return {
            "library": {"path": None, "api": None, "error": str(error)},
            "isa": {"machine": [], "used": None, "cap": cap},
            "kernels": [],
        }


def _onnxruntime() -> str | None:
    """The version of the module, with its distributions unless it comes from the plain one alone."""
    try:
        version = str(require_onnxruntime().__version__)
    except LowBitError:
        return None
    names = sorted(set(metadata.packages_distributions().get("onnxruntime", ())))
    return version if names == ["onnxruntime"] else f"{version} ({', '.join(names)})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Display controllers by PCI vendor: what is in the machine, whether or not a driver makes it usable."""
    vendors = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
    found = []
    for path in sorted(glob.glob("/sys/bus/pci/devices/*/class")):
        try:
            with open(path, encoding="ascii") as file:
                if not file.read().startswith(("0x0300", "0x0302")):
                    continue
            with open(os.path.join(os.path.dirname(path), "vendor"), encoding="ascii") as file:
                vendor = file.read().strip()
        except OSError:
            continue
        found.append(vendors.get(vendor, vendor))
    return found
