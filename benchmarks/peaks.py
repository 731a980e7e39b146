"""The most that one core of this machine can do, measured: what every kernel's speed is a fraction of.

python benchmarks/peaks.py          compiles peaks.cc and prints its loops
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from results import WORK

SOURCE = Path(__file__).with_name("peaks.cc")


@dataclass(frozen=True)
class Peak:
    """One loop: `vpopcntq_zmm` counts 1-bit products, `vpshufb_*` looked-up bytes, the others products."""

    ghz: float
    per_second: float

    @property
    def per_cycle(self) -> float:
        """Operations of a cycle."""
        return self.per_second / self.ghz / 1e9


def measure() -> dict[str, Peak]:
    """Runs the loops on the CPUs of this process (pin it first). Raises where there is no compiler."""
    WORK.mkdir(parents=True, exist_ok=True)
    program = WORK / "peaks"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-O2", "-std=c++20", str(SOURCE), "-o", str(program)], check=True)
    text = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    peaks = {}
    for line in text.splitlines():
        name, ghz, per_second = line.split()
        peaks[name] = Peak(float(ghz), float(per_second))
    return peaks


if __name__ == "__main__":
    for name, peak in measure().items():
        print(
            f"{name:16} {peak.per_second / 1e9:8.1f} G/s {peak.per_cycle:7.1f} a cycle at {peak.ghz:.2f} GHz"
        )
