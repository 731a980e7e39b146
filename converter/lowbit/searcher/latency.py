"""What widths cost in time on this device, measured.

On the CPU every node of a converted model is a node of the session, so ONNX Runtime's profiler tells the time
of each layer inside its network, where its caches are as they will be. A few networks, one for each pair of
widths, then give every layer's time at every pair; their runs take turns, so that what disturbs the machine
disturbs all of them. An execution provider runs whole regions as one node: there each group and width gets a
network of its own, which differs from the widest one in that group, and the difference is what it costs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lowbit.conversion.convert import convert
from lowbit.measure.bench import Subject, take_turns
from lowbit.searcher.groups import Widths, widest
from lowbit.searcher.network import Network
from lowbit.searcher.solve import LayerCost, Pair
from lowbit.sessions.devices import runs_as_it_is

LEAST_GAIN = 1.02
"""A width must be this much faster than a wider one to be offered: less is noise (as in ``lowbit.tune``)."""

_ROUNDS = 12
_PROFILED_RUNS = 10  # of each network in a round
_AT_ONCE = 8  # networks that take turns with the widest one, where there is one for each layer and pair


@dataclass
class Times:
    """Milliseconds, medians.

    Attributes:
        device: where they were measured.
        threads: of the sessions.
        layers: layer -> bits of its weights and input -> its time, or what it adds to the network's.
        networks: bits of all weights and activations that have a choice -> the whole network's time.
    """

    device: str
    threads: int
    layers: dict[str, dict[Pair, float]] = field(default_factory=dict)
    networks: dict[Pair, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`of` takes."""

        def plain(times: dict[Pair, float]) -> list[list[float]]:
            return [[*pair, ms] for pair, ms in times.items()]

        return {
            "device": self.device,
            "threads": self.threads,
            "layers": {name: plain(times) for name, times in self.layers.items()},
            "networks": plain(self.networks),
        }

    @classmethod
    def of(cls, given: dict[str, Any]) -> Times:
        """Times from plain data."""

        def times(rows: list[list[float]]) -> dict[Pair, float]:
            return {(int(w), int(a)): ms for w, a, ms in rows}

        layers = {name: times(rows) for name, rows in given["layers"].items()}
        return cls(given["device"], given["threads"], layers, times(given["networks"]))


def pair_of(network: Network, widths: Widths, layer: str) -> Pair:
    """The bits of a layer's weights and input."""
    plan = network.plan_for(widths)
    return plan.layers[layer].bits, plan.grid(plan.layers[layer].x).bits


def measure_times(
    network: Network,
    state: Path,
    device: str,
    threads: int,
    progress: Callable[[int, int, str], None],
) -> Times:
    """Measures networks of every pair of widths that is to choose from."""
    weights, inputs = (
        sorted({bits for group in network.groups if bool(group.tensors) == are_inputs and not group.rule
                for bits in group.widths}) or [8]
        for are_inputs in (False, True)
    )  # fmt: skip
    pairs = [(w, a) for w in weights for a in inputs]
    top = pairs[-1]
    uniform = {pair: _at(network, *pair) for pair in pairs}
    times = Times(device, threads)
    with tempfile.TemporaryDirectory(prefix="lowbit-") as name:
        folder = Path(name)
        subjects = {
            pair: _subject(
                network.uniform(widths, state), folder / f"w{pair[0]}a{pair[1]}.onnx", device, threads
            )
            for pair, widths in uniform.items()
        }
        progress(0, 1, f"measuring {len(pairs)} networks on {device}")
        runs = [subject.bound_run() for subject in subjects.values()]
        for pair, seconds in zip(subjects, take_turns(runs, _ROUNDS), strict=True):
            times.networks[pair] = float(np.median(seconds)) * 1e3
        del runs
        if runs_as_it_is(device):
            for pair, nodes in zip(subjects, _profile(list(subjects.values()), folder), strict=True):
                plan = network.plan_for(uniform[pair])
                for layer in plan.layers.values():
                    key = (layer.bits, plan.grid(layer.x).bits)
                    # A node that the converter renamed or left float counts as part of the rest.
                    times.layers.setdefault(layer.node, {})[key] = nodes.get(layer.node, 0.0)
        else:
            _measure_changes(network, state, folder, subjects[top], top, times, progress)
    progress(1, 1, "measured")
    return times


def _at(network: Network, w: int, a: int) -> Widths:
    """Every group that has a choice at the given bits."""
    return {
        group.name: group.widths[-1] if group.rule else a if group.tensors else w for group in network.groups
    }


def _subject(model: onnx.ModelProto, path: Path, device: str, threads: int) -> Subject:
    path.write_bytes(convert(model, verify=False).model.SerializeToString())
    return Subject.read(str(path), threads, 0, None, device)


def _profile(subjects: Sequence[Subject], folder: Path) -> list[dict[str, float]]:
    """Milliseconds of every node: of its times in all runs the mean of the middle half."""
    sessions = [
        subject.open(profile_prefix=str(folder / f"profile{i}")) for i, subject in enumerate(subjects)
    ]
    for done in range(_ROUNDS):
        turn = list(zip(sessions, subjects, strict=True))
        for session, subject in turn if done % 2 == 0 else reversed(turn):
            for _ in range(_PROFILED_RUNS):
                session.run(None, subject.feed)
    found = []
    for session in sessions:
        durations: dict[str, list[float]] = {}
        for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                durations.setdefault(event["name"].removesuffix("_kernel_time"), []).append(event["dur"])
        found.append({name: _middle(values) / 1e3 for name, values in durations.items()})
    return found


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return float(np.mean(ordered[len(ordered) // 4 : max(1, -(-3 * len(ordered) // 4))]))


def _measure_changes(
    network: Network,
    state: Path,
    folder: Path,
    base: Subject,
    top: Pair,
    times: Times,
    progress: Callable[[int, int, str], None],
) -> None:
    """Networks that differ from the widest one in one group."""
    wide = widest(network.groups)
    changes = [(g, bits) for g in network.groups for bits in g.widths[:-1]]
    plan = network.plan_for(wide)
    for layer in plan.layers.values():
        times.layers[layer.node] = {(layer.bits, plan.grid(layer.x).bits): 0.0}
    for start in range(0, len(changes), _AT_ONCE):
        part = changes[start : start + _AT_ONCE]
        subjects = [
            _subject(network.uniform({**wide, g.name: bits}, state), folder / f"{i}.onnx", times.device,
                     times.threads)
            for i, (g, bits) in enumerate(part)
        ]  # fmt: skip
        measured = take_turns([base.bound_run(), *(s.bound_run() for s in subjects)], _ROUNDS)
        first = float(np.median(measured[0]))
        for (group, bits), seconds in zip(part, measured[1:], strict=True):
            added = (float(np.median(seconds)) - first) * 1e3 / len(group.layers)
            for name in group.layers:
                w, a = pair_of(network, wide, name)
                times.layers[name][(w, bits) if group.tensors else (bits, a)] = added
        progress(start + len(part), len(changes), f"measuring on {times.device}")
    # Weights and input of few bits together: what each saves is added up.
    for name, known in times.layers.items():
        w, a = pair_of(network, wide, name)
        for w2, a2 in [(w2, a2) for w2, x in list(known) if x == a for y, a2 in list(known) if y == w]:
            known.setdefault((w2, a2), known[w2, a] + known[w, a2])


def offered(network: Network, times: Times) -> tuple[list[LayerCost], list[str]]:
    """Costs of those pairs that are faster than every wider one, and why the others are not offered."""
    costs, refused = [], dict[Pair, list[str]]()
    groups = {(group.layers[0]): group.name for group in network.groups if not group.tensors}
    inputs = {name: group for group in network.groups for name in group.layers if group.tensors}
    for name, known in times.layers.items():
        total = times.networks[max(times.networks)] if not runs_as_it_is(times.device) else 0.0
        kept = {}
        for (w, a), ms in known.items():
            if any(ms + total > (t + total) / LEAST_GAIN for t in _wider(known, w, a)):
                refused.setdefault((w, a), []).append(name)
            else:
                kept[w, a] = ms
        group = inputs.get(name)
        if group is not None and len(group.widths) > 1:
            costs.append(LayerCost(groups[name], group.name, kept))
        else:
            costs.append(LayerCost(groups[name], None, {(w, 0): ms for (w, _), ms in kept.items()}))
    top = max(times.networks)
    reasons = []
    for (w, a), ms in sorted(times.networks.items()):
        names = refused.get((w, a), [])
        if names:
            count = sum((w, a) in each for each in times.layers.values())
            spent = sum(times.layers[n][w, a] for n in names)
            best = sum(min(_wider(times.layers[n], w, a)) for n in names)
            reasons.append(
                f"w{w}a{a} is not faster than more bits in {len(names)} of {count} layers on {times.device}, "
                f"{times.threads} thread(s), and is not offered there: {spent:.3g} ms in them together, "
                f"{best:.3g} ms at their fastest wider widths; the whole network takes {ms:.3g} ms with "
                f"w{w}a{a} and {times.networks[top]:.3g} ms with w{top[0]}a{top[1]}"
            )
    return costs, reasons


def _wider(known: dict[Pair, float], w: int, a: int) -> list[float]:
    """A layer's times at more bits of weights, of its input, or of both."""
    return [ms for (w2, a2), ms in known.items() if w2 >= w and a2 >= a and (w2, a2) != (w, a)]


def predicted(network: Network, times: Times, widths: Widths) -> float:
    """Milliseconds of a candidate: the widest network's, and what its layers differ from those there."""
    plan, wide = network.plan_for(widths), network.plan_for(widest(network.groups))
    total = times.networks[max(times.networks)]
    for name, known in times.layers.items():
        at = (plan.layers[name].bits, plan.grid(plan.layers[name].x).bits)
        top = (wide.layers[name].bits, wide.grid(wide.layers[name].x).bits)
        total += known[at] - known[top]
    return total


def measure_model(network: Network, model: onnx.ModelProto, state: Path, times: Times) -> float:
    """Milliseconds of a quantized model, in turns with the widest network, on whose time the others stand."""
    with tempfile.TemporaryDirectory(prefix="lowbit-") as name:
        folder = Path(name)
        wide = network.uniform(widest(network.groups), state)
        subjects = [_subject(m, folder / f"{i}.onnx", times.device, times.threads)
                    for i, m in enumerate((model, wide))]  # fmt: skip
        seconds = take_turns([subject.bound_run() for subject in subjects], _ROUNDS)
    ratio = float(np.median(seconds[0])) / float(np.median(seconds[1]))
    return ratio * times.networks[max(times.networks)]
