"""What the caller wants: ``latency=5ms``, ``size=2MB``, ``drop=1%``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowbit.errors import LowBitError

_UNITS = {
    "latency": {"s": 1e3, "ms": 1.0, "us": 1e-3},
    "size": {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20},
}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class Drop:
    """How much accuracy may be lost.

    Attributes:
        value: a share: of all samples or, if relative, of the float model's own accuracy.
        relative: which of them.
    """

    value: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str | float) -> Drop:
        """``1%`` or ``0.01`` of all samples, ``1%rel`` of the float model's accuracy."""
        found = re.fullmatch(rf"{_NUMBER}(%?)(rel)?", str(text).strip())
        value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
        if found is None or value > 1:
            raise LowBitError(f"drop: expected a share such as 1%, 0.01 or 1%rel, got '{text}'")
        return cls(value, found[3] is not None)

    def __str__(self) -> str:
        """As :meth:`parse` reads it."""
        return f"{100 * self.value:g}%{'rel' if self.relative else ''}"


@dataclass(frozen=True)
class Target:
    """What is to be reached.

    Attributes:
        kind: latency, size or drop.
        value: milliseconds, bytes of the converted file, or a share.
        drop: of the kind drop.
    """

    kind: str
    value: float
    drop: Drop | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads a target.

        Raises:
            LowBitError: for anything else than the three forms.
        """
        kind, _, rest = text.partition("=")
        if kind == "drop" and rest:
            drop = Drop.parse(rest)
            return cls(kind, drop.value, drop)
        units = _UNITS.get(kind, {})
        found = re.fullmatch(rf"{_NUMBER}\s*({'|'.join(units)})", rest.strip()) if units else None
        if found is None or float(found[1]) <= 0:
            raise LowBitError(f"target: expected latency=5ms, size=2MB or drop=1%, got '{text}'")
        return cls(kind, float(found[1]) * units[found[2]])

    def show(self, value: float) -> str:
        """A value of this kind with its unit."""
        if self.kind == "latency":
            return f"{value:.4g} ms"
        return f"{value / 1e3:.4g} kB" if self.kind == "size" else f"{100 * value:.3g} %"
