"""A prepared float model as plain data in a folder, and what is measured of it: a group, or a candidate.

Other processes and machines open the folder and do the measuring. What is rounded lies in files of a second
folder, the state, named by all that it depends on: the codes of a layer by its own width and those of all in
front of it, so that a candidate rounds only what stands behind its first change.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from lowbit.conversion.convert import convert
from lowbit.quantizer.config import Config
from lowbit.quantizer.data import FEW, Spool
from lowbit.quantizer.emit import LayerCodes, Ranged, emit
from lowbit.quantizer.quantize import CACHE_BYTES, Run, silent
from lowbit.quantizer.ranges import Statistics, choose_grids
from lowbit.quantizer.report import LayerRecord, QuantizeReport
from lowbit.quantizer.runner import Graph, Tensors
from lowbit.quantizer.sites import Plan
from lowbit.searcher.groups import Group, Widths, overrides_of, weight_bytes, widest
from lowbit.searcher.loss import Array, classes, compare

_FILE = "network.pkl"


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes:
        widths: the bits of all groups, or of the one that is alone.
        what: ``alone``: that group, all else in float; ``candidate``: judged on images that its rounding did
            not see; ``final``: as :func:`lowbit.quantize` makes it from all images.
    """

    widths: tuple[tuple[str, int], ...]
    what: str = "candidate"

    def key(self) -> str:
        """A name for files."""
        return hashlib.sha256(json.dumps([self.widths, self.what]).encode()).hexdigest()[:24]


@dataclass
class Network:
    """What candidates are made from.

    Attributes:
        proto: the cleaned float model.
        plan: where quantizers sit.
        statistics: the values of its tensors.
        config: of the quantizer, without the widths that are searched.
        spool: calibration images.
        groups: what has a width.
        threads: of ONNX Runtime's sessions.
        judges: images that judge instead of the calibration images; None without any.
        labels: of those, int64.
        exact: the float model's outputs over what judges; empty until :meth:`measure_exact`.
        exact_top1: its share of right answers; None without labels.
    """

    proto: onnx.ModelProto
    plan: Plan
    statistics: Statistics
    config: Config
    spool: Spool
    groups: list[Group]
    threads: int | None
    judges: Spool | None = None
    labels: Array | None = None
    exact: list[Array] = dataclasses.field(default_factory=list)
    exact_top1: float | None = None

    def save(self, folder: Path) -> None:
        """Writes everything but the images, which lie in the folder already."""
        (folder / _FILE).write_bytes(
            pickle.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        )

    @classmethod
    def load(cls, folder: Path) -> Network:
        """What :meth:`save` wrote.

        A pickle may run code: the folder is a temporary one that this run made, never what a caller names.
        """
        made = cls(**pickle.loads((folder / _FILE).read_bytes()))
        made.spool.folder = folder / "feeds"
        if made.judges is not None:
            made.judges.folder = folder / "judges"
        return made

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Weights by layer."""
        return {name: layer.weight.size for name, layer in self.plan.layers.items()}

    @functools.cached_property
    def model(self) -> ir.Model:
        """The float model with links between its nodes."""
        return ir.from_proto(self.proto)

    @functools.cached_property
    def in_front(self) -> dict[str, list[str]]:
        """The layers that each layer's input, and what it makes up for, come from."""
        graph, found = Graph(self.proto), {}
        for name, layer in self.plan.layers.items():
            nodes, _ = graph.behind([value for value in (layer.x, layer.residual) if value], ())
            found[name] = [node.name for node in nodes if node.name in self.plan.layers]
        return found

    def plan_for(self, widths: Widths) -> Plan:
        """The plan with the widths of groups; others keep theirs."""
        plan = replace(
            self.plan,
            layers={name: replace(layer) for name, layer in self.plan.layers.items()},
            sites={name: replace(site) for name, site in self.plan.sites.items()},
        )
        for group in self.groups:
            bits = widths.get(group.name)
            if bits is None or group.rule:
                continue
            for name in group.layers:
                if group.tensors:
                    plan.grid(plan.layers[name].x).bits = bits
                else:
                    plan.layers[name].bits = bits
        return plan

    def grids_for(self, plan: Plan) -> dict[str, Ranged]:
        """The grids of a plan; they depend on the widths of activations alone."""
        key = tuple(plan.grid(name).bits for name in plan.sites)
        known: dict[Any, dict[str, Ranged]] = self.__dict__.setdefault("_grids", {})
        if key not in known:
            known[key] = choose_grids(plan, self.statistics, self.config)[0]
        return known[key]

    @functools.cached_property
    def judged(self) -> list[tuple[int | None, Spool]]:
        """Which half of the calibration images to round on, None for all of them, and what judges then.

        Two bits fit the images that they were rounded on: of 40 candidates for ResNet-8 the divergence there
        had a rank correlation of .62 with that on 2000 other images, the divergence on the other half .90.
        """
        if self.judges is not None:
            return [(None, self.judges)]
        if self.spool.samples < FEW:
            return [(None, self.spool)]
        return [(0, self.spool.half(1)), (1, self.spool.half(0))]

    def measure_exact(self, folder: Path) -> None:
        """Computes the float model's outputs."""
        self.exact = self._outputs([self.proto] * len(self.judged), folder)
        self.exact_top1 = self._top1(self.exact)

    def _outputs(self, models: Sequence[onnx.ModelProto], folder: Path) -> list[Array]:
        """Outputs over what judges, one model for each entry of :attr:`judged`."""
        names = [value.name for value in self.proto.graph.output]
        runs = [
            run
            for model, (_, spool) in zip(models, self.judged, strict=True)
            for run in Tensors(spool, folder / "outputs", 0, self.threads).run(Graph(model), names)
        ]
        return [np.concatenate([np.atleast_1d(run[name]) for run in runs]) for name in names]

    def _top1(self, outputs: Sequence[Array]) -> float | None:
        if self.labels is None:
            return None
        scores = next(s for s in map(classes, outputs) if s is not None)
        return float((scores.argmax(axis=1)[: len(self.labels)] == self.labels).mean())

    def measure(self, task: Task, state: Path) -> dict[str, Any]:
        """The loss of one group alone, the loss and the bytes of a candidate, or those of the final model."""
        widths = dict(task.widths)
        with tempfile.TemporaryDirectory(prefix="lowbit-") as name:
            folder = Path(name)
            if task.what == "final":
                made = Trial(self, widths, folder, state).make()[1]
                digest = hashlib.sha256(made.SerializeToString(deterministic=True)).hexdigest()
                return {"bytes": _converted_bytes(made), "sha256": digest}
            if task.what == "alone":
                alone = self._alone(widths, folder, state)
                return compare(self.exact, self._outputs([alone] * len(self.judged), folder)).to_dict()
            pairs = [
                Trial(self, widths, folder / f"half{i}", state, half).make()
                for i, (half, _) in enumerate(self.judged)
            ]
            outputs = self._outputs([fed for fed, _ in pairs], folder)
            loss = replace(compare(self.exact, outputs), top1=self._top1(outputs))
            return {
                **loss.to_dict(),
                "weight_bytes": weight_bytes(self.groups, self.sizes, widths),
                "bytes": _converted_bytes(pairs[0][1]),
            }

    def _alone(self, widths: Widths, folder: Path, state: Path) -> onnx.ModelProto:
        group = next(group for group in self.groups if group.name in widths)
        plan = self.plan_for(widths)
        grids = self.grids_for(plan)
        kept = {name: site for name, site in plan.sites.items() if name in group.tensors}
        codes = {}
        if not group.tensors:
            layer = group.layers[0]
            codes[layer] = Alone(self, folder, state).codes(layer, widths[group.name])
        return emit(self.proto, replace(plan, sites=kept), grids, codes)[0]

    def uniform(self, widths: Widths, state: Path) -> onnx.ModelProto:
        """A model of some widths from the codes that layers have alone: right in form and speed."""
        plan = self.plan_for(widths)
        with tempfile.TemporaryDirectory(prefix="lowbit-") as name:
            alone = Alone(self, Path(name), state)
            codes = {name: alone.codes(name, layer.bits) for name, layer in plan.layers.items()}
        return emit(self.proto, plan, self.grids_for(plan), codes)[0]


def _converted_bytes(model: onnx.ModelProto) -> int:
    return len(convert(model, verify=False).model.SerializeToString(deterministic=True))


class _Part(Run):
    """Those steps of a quantization that depend on widths."""

    def __init__(
        self, network: Network, widths: Widths, folder: Path, state: Path, half: int | None = None
    ) -> None:
        self.config = replace(
            network.config,
            overrides={**network.config.overrides, **overrides_of(network.groups, widths)},
        )
        self.folder, self.threads, self.progress = folder, network.threads, silent
        self.cache_bytes, self.report = CACHE_BYTES, QuantizeReport(network.config.bits)
        self.network, self.widths, self.state = network, widths, state
        self.half = half
        self.spool = network.spool if half is None else network.spool.half(half)
        self.proto, self.model = network.proto, network.model
        self.plan = network.plan_for(widths)
        self.grids = network.grids_for(self.plan)

    def _state_file(self, name: str) -> Path | None:
        text = json.dumps(self._depends_on(name), sort_keys=True)
        return self.state / "codes" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"

    def _depends_on(self, name: str) -> Any:
        raise NotImplementedError


class Trial(_Part):
    """One candidate, as :func:`lowbit.quantize` makes it from the same widths."""

    def _depends_on(self, name: str) -> Any:
        layers = self.plan.layers
        front = {other: layers[other].bits for other in self.network.in_front[name]}
        sites = [self.plan.grid(site).bits for site in self.plan.sites]
        return [name, layers[name].bits, front, sites, self.half]

    def make(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The quantized model as the calibration data feed it, and as :func:`lowbit.quantize` writes it."""
        codes = self._round_layers()
        return self._emit(codes)[0], self._emit(codes, final=True)[0]


class Alone(_Part):
    """Layers whose input comes from a network with float weights and activations of the most bits."""

    def __init__(self, network: Network, folder: Path, state: Path) -> None:
        super().__init__(network, widest(network.groups), folder, state)

    def _depends_on(self, name: str) -> Any:
        return ["alone", name, self.plan.layers[name].bits]

    def codes(self, name: str, bits: int) -> LayerCodes:
        """The codes of a layer that :meth:`round_all` rounded."""
        layer = self.plan.layers[name]
        before, layer.bits = layer.bits, bits
        stored = self._load_state(name)
        layer.bits = before
        if stored is None:
            raise RuntimeError(f"the codes of '{name}' at {bits} bits are missing from {self.state}")
        return stored[0]

    def round_all(self, widths: Mapping[str, Sequence[int]], progress: Any = silent) -> None:
        """Rounds every layer to each of its widths, from one set of sums, as far as that is not done yet."""
        left = {name: [b for b in wanted if not self._is_done(name, b)] for name, wanted in widths.items()}
        left = {name: wanted for name, wanted in left.items() if wanted}
        exact = Graph(self.proto)
        model, read = self._emit({})
        graph, nodes = Graph(model), {str(node.name): node for node in self.model.graph}
        limit = self.cache_bytes // 2
        floats = Tensors(self.spool, self.folder / "float", limit, self.threads)
        rounded = Tensors(self.spool, self.folder / "rounded", limit, self.threads)
        done: dict[str, Any] = {name: None for name in self.plan.layers if name not in left}
        while len(done) < len(self.plan.layers):
            # No layer waits for the codes of another one here; a stage is what memory holds.
            stage = self._stage(graph, read, done, rounded.known, wait=False)
            moments = self._gather(stage, exact, graph, read, floats, rounded, nodes)
            for layer in stage:
                sums = moments.pop(layer.node)
                for bits in left[layer.node]:
                    layer.bits = bits
                    made: tuple[LayerCodes, LayerRecord] = self._round_layer(layer, *copy.deepcopy(sums))
                    self._save_state(layer.node, *made)
                done[layer.node] = None
                progress(len(done), len(self.plan.layers), layer.node)

    def _is_done(self, name: str, bits: int) -> bool:
        try:
            self.codes(name, bits)
        except RuntimeError:
            return False
        return True
