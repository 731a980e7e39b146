"""Every pair of bits: is the kernel that is chosen the fastest one, and how far is it from what is possible?

python benchmarks/pairs.py                                        all 64 pairs on the layers of ResNet-50
python benchmarks/pairs.py --pairs w1a2,w2a2 --networks cnv,mlp
python benchmarks/pairs.py --isa avx2

Kernels run alone, without a session around them, and take turns with our own 8-bit kernel on the same layer:
the yardstick that low bits must not fall behind. The second table compares the cost functions, by which a
kernel is chosen, with what was measured; run this after a kernel has changed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import peaks
from layers import LAYERS, Layer, Pair, Problem
from lowbit import _native
from lowbit.measure.bench import pinned
from results import Table, write

ALL_PAIRS = [f"w{w}a{a}" for w in range(1, 9) for a in range(1, 9)]
YARDSTICK = "w8a8"
FARTHEST_ESTIMATE = 8.0
"""Kernels estimated to be so many times slower than the best are not measured."""


@dataclass
class Measured:
    """A layer at a pair of bits. Kernels in the order of their estimates, the chosen one first."""

    pair: str
    network: str
    layer: str
    macs: int
    yardstick: float  # microseconds of the 8-bit kernel
    microseconds: dict[str, float]
    estimates: dict[str, float]  # cycles

    @property
    def chosen(self) -> str:
        """The kernel that a session takes."""
        return next(iter(self.estimates))

    @property
    def loss(self) -> float:
        """Time of the chosen kernel over that of the fastest."""
        return self.microseconds[self.chosen] / min(self.microseconds.values())


def measure(network: str, layer: Layer, pair: Pair, isa: str, rounds: int, everything: bool) -> Measured:
    """Lets the kernels of a layer and the yardstick take turns."""
    runners = [_runner(Problem.seeded(layer, Pair.parse(YARDSTICK)), None)]
    attributes, inputs = _node(Problem.seeded(layer, pair))
    candidates = _native.plan("LowBitConv", attributes, inputs, isa=isa)["candidates"]
    limit = candidates[0]["cycles"] * (np.inf if everything else FARTHEST_ESTIMATE)
    estimates = {
        each["kernel"]: each["cycles"]
        for each in candidates
        if each["cycles"] <= limit and "reference" not in each["kernel"]
    }
    runners += [("LowBitConv", attributes, inputs, kernel) for kernel in estimates]
    # The lower quartile: turns of a layer are so short that one interruption may hit most of them.
    seconds = np.percentile(_native.race(runners, isa=isa, rounds=rounds, turn_seconds=3e-4), 25, axis=1)
    times = dict(zip(estimates, (float(each) * 1e6 for each in seconds[1:]), strict=True))
    return Measured(pair.text, network, layer.name, layer.macs, float(seconds[0]) * 1e6, times, estimates)


def _node(problem: Problem) -> tuple[dict[str, Any], list[Any]]:
    attributes, constants = problem.lowbit_node()
    return attributes, [problem.x, *constants.values()]


def _runner(problem: Problem, kernel: str | None) -> tuple[str, dict[str, Any], list[Any], str | None]:
    return ("LowBitConv", *_node(problem), kernel)


def bound(pair: Pair, isa: str, found: dict[str, peaks.Peak]) -> float:
    """Most products a second of a pair that the loops of peaks.py allow: one-bit products or 8-bit ones."""
    wide = "zmm" if isa.startswith("avx512") else "ymm"
    multiply = {"zmm": "vpdpbusd_zmm", "ymm": "vpmaddubsw_ymm"}[wide]
    most = found[multiply].per_second if multiply in found else 0.0
    if isa == "avx512popcnt" and "vpopcntq_zmm" in found:
        most = max(most, found["vpopcntq_zmm"].per_second / (pair.w_bits * pair.x_bits))
    shuffle = f"vpshufb_{wide}"
    if shuffle in found and pair.w_bits <= 2 and pair.x_bits <= 6:
        # A look-up of four activations' sum with one-bit weights is four products; the sum fits a byte.
        most = max(most, found[shuffle].per_second * 4 / pair.w_bits)
    return most


def mean(values: list[float]) -> float:
    """Geometric."""
    return float(np.exp(np.mean(np.log(values))))


def summary(network: str, measured: list[Measured], isa: str, found: dict[str, peaks.Peak]) -> Table:
    """A row per pair."""
    columns = ["pair", "times as fast as w8a8", "chosen over fastest", "worst layer", "share of the bound"]
    out = Table(network, [*columns, "kernels"])
    by_pair: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        by_pair[each.pair].append(each)
    for pair, rows in by_pair.items():
        speed = bound(Pair.parse(pair), isa, found)
        kernels = Counter(each.chosen for each in rows).most_common()
        out.rows.append(
            [
                pair,
                mean([each.yardstick / each.microseconds[each.chosen] for each in rows]),
                mean([each.loss for each in rows]),
                max(each.loss for each in rows),
                mean([each.macs / speed * 1e6 / each.microseconds[each.chosen] for each in rows]),
                ", ".join(f"{count} {kernel}" for kernel, count in kernels),
            ]
        )
    return out


def estimates(measured: list[Measured], ghz: float) -> Table:
    """A row per kernel: estimated over measured cycles."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for each in measured:
        for kernel, cycles in each.estimates.items():
            ratios[kernel].append(cycles / (each.microseconds[kernel] * ghz * 1e3))
    rows: list[list[str | int | float]] = [
        [kernel, len(values), mean(values), min(values), max(values)] for kernel, values in ratios.items()
    ]
    return Table(
        "Estimated over measured cycles", ["kernel", "measured", "geometric mean", "least", "most"], rows
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = json.loads(LAYERS.read_text(encoding="utf-8"))["networks"]
    parser.add_argument("--networks", default="resnet50_v1", help=f"of {', '.join(networks)}")
    parser.add_argument("--pairs", default=",".join(ALL_PAIRS), help="default: all 64")
    parser.add_argument("--isa", default=_native.default_isa(), help="default: %(default)s")
    parser.add_argument("--core", type=int, default=0, help="core to pin to (default: 0)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of 0.3 ms per kernel (default: 7)")
    parser.add_argument("--everything", action="store_true", help="also kernels with hopeless estimates")
    parser.add_argument("--name", help="name of the results file (default: pairs_<isa>)")
    options = parser.parse_args()
    pairs = [Pair.parse(text) for text in options.pairs.split(",")]
    tables, every = [], []
    with pinned([options.core]):
        found = peaks.measure()
        for network in options.networks.split(","):
            measured = [
                measure(network, Layer(*row), pair, options.isa, options.rounds, options.everything)
                for pair in pairs
                for row in networks[network]
            ]
            tables.append(summary(network, measured, options.isa, found))
            every += measured
    ghz = next(iter(found.values())).ghz
    tables.append(estimates(every, ghz))
    notes = [
        f"Kernels for {options.isa}, one thread pinned to core {options.core}, batch 1, channels-last codes.",
        "times as fast as w8a8: as our own 8-bit kernel in the same turns; geometric means over the layers.",
        "share of the bound: time at the peak of the fastest applicable loop over measured time; peaks: "
        + ", ".join(f"{name} {peak.per_second / 1e9:.0f} G/s" for name, peak in found.items())
        + f" at {ghz:.2f} GHz.",
    ]
    raw = {"peaks": {name: asdict(peak) for name, peak in found.items()},
           "measured": [asdict(each) for each in every]}  # fmt: skip
    write(options.name or f"pairs_{options.isa}", "All pairs of bits", tables, notes, raw)


if __name__ == "__main__":
    main()
