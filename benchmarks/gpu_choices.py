"""What the cost model's choices of GPU kernels cost a network, one by one: for those who fit the model.

python benchmarks/gpu_choices.py --networks resnet50 --batches 1,16
python benchmarks/gpu_choices.py --networks "" --model mine=model_qdq.onnx

A network runs untuned, and tuned with LOWBIT_TUNE_LOG (docs/tuning.md): the tuner times many configurations
of each convolution, in rows of equals and in the network. Printed are the choices that cost most:

- lost us: how much longer a run takes with the cost model's choice than with the fastest one, all others as
  the tuner left them. Differences below a third of a percent of the run may be chance.
- alone us: of one launch in a row of equals.

The logs stay in --logs; they hold every measured time. A process measures a convolution once: networks with
the same layers are better run one by one. Chains, two convolutions as one launch, are in the logs alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gpu_networks import Network, Subject, source_of
from lowbit.sessions.devices import canonical
from results import WORK, Table

CLEARLY = 0.997
"""As the tuner has it: by so much a configuration must be faster than what is in use, twice."""

LOG = "LOWBIT_TUNE_LOG"


@dataclass(frozen=True)
class Choice:
    """The cost model's configuration beside the fastest, for one convolution or two with one output."""

    what: str
    chosen: str
    fastest: str
    chosen_alone: float
    fastest_alone: float
    lost: float

    def row(self) -> list[str | int | float]:
        """Cells of the table."""
        return [self.lost, self.what, self.chosen, self.chosen_alone, self.fastest, self.fastest_alone]


def read(lines: Iterable[str]) -> list[Choice]:
    """The choices of a log whose cost was measured, the costliest first."""
    alone: dict[str, dict[str, float]] = {}
    chosen: dict[str, str] = {}
    trials: list[tuple[str, str, float]] = []
    for line in lines:
        kind, what, config, time = line.rstrip("\n").split("\t")
        if kind == "region":
            trials.append((what, config, float(time)))
            continue
        alone.setdefault(what, {})[config] = float(time)
        if kind == "chosen":
            chosen[what] = config
    found = []
    in_use = {what: next(iter(times)) for what, times in alone.items()}
    for what, times in _differences(trials, in_use).items():
        config = chosen.get(what, "")
        if config not in times:
            continue
        fastest = min(times, key=times.__getitem__)
        found.append(
            Choice(what, config, fastest, alone[what][config], alone[what].get(fastest, np.nan),
                   times[config] - times[fastest])
        )  # fmt: skip
    return sorted(found, key=lambda choice: -choice.lost)


def _differences(trials: list[tuple[str, str, float]], in_use: dict[str, str]) -> dict[str, dict[str, float]]:
    """Differences of the region's time, between configurations of a convolution and the first one in use.

    `in_use`: the first ones. What the tuner did is done again: it goes on with what is clearly faster.
    """
    differences: dict[str, dict[str, float]] = {}
    gained: dict[str, float] = {}
    best, at = np.inf, 0
    while at < len(trials):
        what, config, time = trials[at]
        at += 1
        if not what:  # no trial: what the next ones are compared with
            best = time
            continue
        times = differences.setdefault(what, {in_use[what]: 0.0} if what in in_use else {})
        faster = time < CLEARLY * best
        if faster and at < len(trials) and trials[at][:2] == (what, config):
            time = max(time, trials[at][2])
            at += 1
        times[config] = gained.get(what, 0.0) + time - best
        if faster and time < CLEARLY * best:
            gained[what] = times[config]
            best = time
    return differences


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", default="resnet50", help="of lowbit.models; empty: none")
    parser.add_argument("--bits", default="w8a8")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help="also this model")
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--rows", type=int, default=10, help="costliest choices to print (default: 10)")
    parser.add_argument("--logs", type=Path, default=WORK / "choices", help="folder of the logs")
    options = parser.parse_args()
    device = canonical(options.device)
    sources = [(name, source_of(name, options.bits)) for name in filter(None, options.networks.split(","))]
    sources += [(name, Path(path)) for name, path in (text.split("=", 1) for text in options.model)]
    options.logs.mkdir(parents=True, exist_ok=True)
    for name, source in sources:
        network = Network(name, options.bits, source)
        for batch in map(int, options.batches.split(",")):
            log = options.logs / f"{name}_{batch}.log"
            log.unlink(missing_ok=True)
            feed = network.feed(batch)
            with tempfile.TemporaryDirectory() as cache:
                untuned = Subject(network, device, "off", cache, feed)
                os.environ[LOG] = str(log)
                tuned = Subject(network, device, "on", cache, feed)
                del os.environ[LOG]
            times = np.array([[subject.queued() for subject in (untuned, tuned)] for _ in range(5)])
            slow, fast = np.median(times, axis=0) * 1e6
            print(f"{name}, batch {batch}: {slow:.4g} us untuned, {fast:.4g} us tuned, {slow / fast:.3f}\n")
            columns = ["lost us", "what", "chosen", "alone us", "fastest", "alone us"]
            table = Table(f"{name}, batch {batch}", columns)
            if log.exists():
                table.rows += [choice.row() for choice in read(log.read_text().splitlines())[: options.rows]]
            print(table.markdown(), flush=True)


if __name__ == "__main__":
    main()
