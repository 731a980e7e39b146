"""What this machine and this installation can do: the facts behind ``lowbit sys``."""

from __future__ import annotations

import glob
import os
import platform
from importlib import metadata
from typing import Any

import lowbit
from lowbit.errors import LowBitError


def sysinfo() -> dict[str, Any]:
    """Versions, the library, the instruction sets and the kernels, as plain data.

    Returns:
        A dict of JSON values; ``library`` and ``kernels`` hold an error text and an empty list where the
        native part is not built.
    """
    return {
        "versions": {
            "lowbit": lowbit.__version__,
            "onnxruntime": _version("onnxruntime"),
            "onnx": _version("onnx"),
            "onnx-ir": _version("onnx-ir"),
            "numpy": _version("numpy"),
            "onnxruntime-extensions": _version("onnxruntime-extensions"),
            "python": platform.python_version(),
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpu": _gpus(),
        },
        **_native(),
    }


def _native() -> dict[str, Any]:
    from lowbit.session import get_library_path

    cap = os.environ.get("LOWBIT_ISA")
    try:
        from lowbit import _native

        return {
            "library": {"path": get_library_path(), "api": _api()},
            "isa": {"machine": _native.isa_levels(), "used": _native.default_isa(), "cap": cap},
            "kernels": _native.kernel_table(),
        }
    except (ImportError, LowBitError) as error:
        return {
            "library": {"path": None, "api": None, "error": str(error)},
            "isa": {"machine": [], "used": None, "cap": cap},
            "kernels": [],
        }


def _api() -> dict[str, int | None]:
    """The C API that the library requires, and what this ONNX Runtime offers (release 1.N offers API N)."""
    try:
        offered = int(metadata.version("onnxruntime").split(".")[1])
    except (metadata.PackageNotFoundError, IndexError, ValueError):
        offered = None
    return {"required": 24, "offered": offered}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _gpus() -> list[str]:
    """Display controllers by PCI vendor. Nothing here uses them yet; the list only says what is there."""
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
