"""GPUs that are not there, for which models are compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.errors import LowBitError
from lowbit.sessions.devices import target_devices
from lowbit.sessions.session import as_text

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True)
class AbsentGpu:
    """A GPU of which the provider knows the architecture and, with a cache, what was measured on it.

    Attributes:
        name: the architecture, "sm_90".
        device: what stands for it in ONNX Runtime.
        options: of the provider, that name the measurements.
    """

    name: str
    device: onnxruntime.OrtEpDevice
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, name: str, cache: str | os.PathLike[str] | None, tuned_on: str | None) -> AbsentGpu:
        """The GPU of architecture ``name``; the other arguments are those of :func:`lowbit.compile`.

        Raises:
            LowBitError: if this build has no code for it, or not the measurements of one GPU are found.
        """
        offered = target_devices()
        if name not in offered:
            known = ", ".join(offered)
            raise LowBitError(f"target is {name!r}, expected one that liblowbit_cuda has code for: {known}")
        if cache is None:
            if tuned_on is not None:
                raise LowBitError("tuned_on names a GPU in the folder of cache; give that, too")
            return cls(name, offered[name])
        build = str(offered[name].ep_metadata["description"]).partition("; ")[2]
        machine = _machine(Path(cache), name, build, tuned_on or "")
        return cls(name, offered[name], {"cache_dir": str(cache), "tuned_on": machine})

    def prepare(
        self, options: onnxruntime.SessionOptions, provider_options: Mapping[str, str | int | bool] | None
    ) -> None:
        """Sets a session up for it, which can compile and open, but not run."""
        options.add_provider_for_devices([self.device], as_text(provider_options) | dict(self.options))


def _machine(cache: Path, target: str, build: str, beginning: str) -> str:
    """The GPU whose measurements by this build a folder holds, as their file names it."""
    found = []
    for path in sorted(cache.glob("tune-*.txt")):
        _, machine, by, *_ = [*path.read_text("utf-8", "replace").splitlines()[:3], "", "", ""]
        if f", {target}, " in machine and by == f"build {build}":
            found.append(machine.removeprefix("machine "))
    chosen = [machine for machine in found if machine.startswith(beginning)]
    if len(chosen) == 1:
        return chosen[0]
    of = f" whose name begins with {beginning!r}" if beginning else ""
    there = f"there are those of {'; '.join(found)}" if found else "there are none"
    raise LowBitError(
        f"{cache}: expected measurements on one GPU of {target}{of} by {build}, {there}; `lowbit tune "
        "--device cuda` with LOWBIT_CACHE_DIR makes them, tuned_on (--tuned-on) chooses among several"
    )
