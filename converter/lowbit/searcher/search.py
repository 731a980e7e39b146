"""``lowbit.search``: the order of the steps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from lowbit import __version__
from lowbit.errors import LowBitError
from lowbit.evaluation.labels import Labels, class_labels, labels_of
from lowbit.proto.atomic import check_writable, write_atomically
from lowbit.proto.feeds import model_inputs
from lowbit.proto.images import Samples
from lowbit.quantizer.config import Config
from lowbit.quantizer.data import Data, Spool
from lowbit.quantizer.quantize import CACHE_BYTES, Run, quantize, silent, timed
from lowbit.searcher.executor import Executor, Here, OnCluster, Pool
from lowbit.searcher.groups import Widths, groups_of, overrides_of, weight_bytes
from lowbit.searcher.latency import Times, measure_model, measure_times, offered, predicted
from lowbit.searcher.loss import classes
from lowbit.searcher.network import Alone, Network, Task
from lowbit.searcher.report import GroupRecord, Point, SearchReport, SearchResult
from lowbit.searcher.solve import LayerCost, choose, total_cost
from lowbit.searcher.target import Drop, Target
from lowbit.sessions.devices import canonical

Progress = Callable[[int, int, str], None]
"""Called with things done, things in all, and what they are."""

_BATCH = 6
"""Candidates that are proposed together: the same whatever number of jobs measures them."""

_IDLE = 2
"""Batches in a row that bring nothing better, after which the search ends."""

_LUCK, _SAMPLING, _ALONE = 0.04, 0.8, 0.15
"""How far a measured divergence may be off, as a part of it: by the luck of one rounding, and by judging on
few images, divided by the root of their number; and how far the harm of groups alone may be.

Near the best choice that is more than what candidates differ by. The divergence that 100 images measured had
a rank correlation of .15 with that of the final models on 2000 other images (19 candidates for ResNet-8; 9
for ResNet-20: -.3), the sum of harm alone .5 (.3), and this fit .5. Squared errors of the logits and other
measures on those 100 images had .1 to .2, networks made from the codes that layers have alone -.4 (.4)."""

_TIGHTENED = 3
"""Times that a budget shrinks because the measured whole took more than the sum of its parts."""

_BISECTIONS = 4


def search(
    model: str | Path | onnx.ModelProto,
    data: Data,
    output: str | Path | None = None,
    *,
    target: str,
    bits: Sequence[int] = (2, 3, 4, 8),
    activation_bits: Sequence[int] = (8,),
    max_drop: str | float | None = None,
    minimize: str = "latency",
    judge: str | Path | Mapping[str, Any] | None = None,
    labels: Labels | None = None,
    label_offset: int = 0,
    preprocess: str | None = None,
    device: str = "cpu",
    threads: int | None = 1,
    jobs: int = 1,
    cluster: str | None = None,
    points: int = 6,
    tries: int = 36,
    state: str | Path | None = None,
    cache: str | Path | None = None,
    convert_to: str | Path | bool = False,
    progress: Progress | None = None,
    overwrite: bool = False,
    **options: Any,
) -> SearchResult:
    """Chooses how many bits each layer gets, from what each width costs and what it does to the outputs.

    Args:
        model: a file or a proto; float32.
        data: calibration images, as :func:`lowbit.quantize` takes them; no labels.
        output: where to write the quantized model; its configuration goes beside it, as ``.yaml``.
        target: ``latency=5ms`` on ``device``, ``size=2MB`` of the converted file, or ``drop=1%``.
        bits: widths of weights to choose from.
        activation_bits: widths of activations to choose from.
        max_drop: what may be lost at most: ``1%`` of all samples or, as ``1%rel``, of the float accuracy.
        minimize: latency or size: what the target ``drop`` makes small.
        judge: other images that judge candidates; None: each half of the calibration images judges what the
            other one rounded.
        labels: of ``judge``, see :func:`lowbit.evaluate`; they then decide what a drop is, else the float
            model does.
        label_offset: added to every label.
        preprocess: how an image of ``judge`` becomes an input.
        device: where time is measured.
        threads: of all sessions.
        jobs: processes that measure candidates; the result does not depend on it.
        cluster: the address of a Ray cluster that measures candidates; ``local`` starts one.
        points: candidates between the cheapest and the widest one that are measured for the Pareto front.
        tries: candidates at most that the revert loop measures.
        state: a folder for whatever was measured, from which another call goes on; None: nothing is kept.
        cache: a folder for temporary files; None: the system's.
        convert_to: also convert the result; a path: write it there.
        progress: called as it goes on.
        overwrite: replace ``output`` if it exists.
        options: entries of the configuration of :func:`lowbit.quantize`.

    Returns:
        The quantized model and the report. Layers that a rule of placement decides keep its width; turn the
        rule off (``disable_rules``) to search them, too.

    Raises:
        LowBitError: for options that mean nothing, without scipy, or if the target cannot be met; what is the
            nearest that can is named.
        ModelError: if the model cannot be read or run.
        UnsupportedError: if a quantized node does not convert.
        OutputError: if the output cannot be written.

    Sensitivities of single groups are those of HAWQ (Dong et al., 2019) in spirit, measured on the output as
    ZeroQ (Cai et al., 2020) does; the integer program is that of HAWQ-V3 (Yao et al., 2021).
    """
    wanted = Target.parse(target)
    limit = wanted.drop if max_drop is None else Drop.parse(max_drop)
    if minimize not in ("latency", "size"):
        raise LowBitError(f"minimize: expected latency or size, got '{minimize}'")
    widths = [sorted(set(each)) for each in (bits, activation_bits)]
    for name, each in zip(("bits", "activation_bits"), widths, strict=True):
        if not each or any(width not in range(1, 9) for width in each):
            raise LowBitError(f"{name}: expected one or more of 1 to 8, got {list(each)}")
    if labels is not None and judge is None:
        raise LowBitError("labels belong to images that judge: give both (--data and --labels), or no labels")
    config = Config.of({**options, "bits": f"w{widths[0][0]}a{widths[1][-1]}"})
    inputs = () if isinstance(model, onnx.ModelProto) else (Path(model),)
    for path in (output, convert_to):
        if isinstance(path, (str, Path)):
            check_writable(Path(path), overwrite=overwrite, inputs=inputs)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-", dir=cache)))
        run = Run(model, data, config, folder, threads, CACHE_BYTES, state, silent)
        statistics = run.open()
        groups = groups_of(run.proto, run.plan, *widths)
        network = Network(run.proto, run.plan, statistics, config, run.spool, groups, threads)
        if judge is not None:
            _add_judges(network, run, judge, labels, label_offset, preprocess, folder)
        network.measure_exact(folder)
        network.save(folder)
        kept = folder / "state" if state is None else Path(state) / _key(run, network)
        (kept / "measured").mkdir(parents=True, exist_ok=True)
        (kept / "codes").mkdir(exist_ok=True)
        # Workers open what lies in one folder: the images and the network, nothing else.
        shipped = folder / "shipped"
        shipped.mkdir()
        for name in ("feeds", "judges", "network.pkl"):
            if (folder / name).exists():
                shutil.move(folder / name, shipped / name)
        network.spool.folder = shipped / "feeds"
        network.__dict__.pop("judged", None)  # its spools lie in the old folder
        if network.judges is not None:
            network.judges.folder = shipped / "judges"
        made = _Search(network, wanted, limit, minimize, device, points, tries, kept, progress or silent)
        made.round_alone(folder)
        executor: Executor
        if cluster is not None:
            executor = OnCluster(shipped, kept, cluster)
        elif jobs > 1:
            executor = Pool(shipped, kept, jobs)
        else:
            executor = Here(network, kept)
        made.executor = executor
        try:
            chosen = made.run()
        finally:
            executor.close()
        final = {
            **config.to_dict(),
            "overrides": {**config.overrides, **overrides_of(groups, chosen)},
        }
        result = quantize(
            model, iter(network.spool), output, config=final, convert_to=convert_to or True, threads=threads,
            cache=cache, overwrite=overwrite,
        )  # fmt: skip
        if isinstance(convert_to, bool) and not convert_to:
            result = replace(result, converted=None)
        made.finish(result.model)
    return SearchResult(result.model, made.report, result.report, result.output, result.converted)


def _key(run: Run, network: Network) -> str:
    """What everything that is measured depends on, besides widths."""
    facts = [__version__, run.key]
    if network.judges is not None:
        facts.append(network.judges.digest)
    if network.labels is not None:
        facts.append(hashlib.sha256(network.labels.tobytes()).hexdigest())
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _add_judges(
    network: Network,
    run: Run,
    data: str | Path | Mapping[str, Any],
    labels: Labels | None,
    offset: int,
    preprocess: str | None,
    folder: Path,
) -> None:
    proto = run.proto
    samples = Samples(data, model_inputs(proto), preprocess)
    if labels is not None:
        network.labels = np.array(class_labels(labels_of(labels, samples), samples.names, offset), np.int64)
    (folder / "judges").mkdir()
    feeds = ({name: a[: batch.count] for name, a in batch.items()} for batch in samples.batches())
    network.judges = Spool(proto, feeds, folder / "judges")


class _Search:
    """One search."""

    executor: Executor

    def __init__(
        self,
        network: Network,
        target: Target,
        limit: Drop | None,
        minimize: str,
        device: str,
        points: int,
        tries: int,
        state: Path,
        progress: Progress,
    ) -> None:
        self.network, self.target, self.limit, self.state, self.progress = (
            network, target, limit, state, progress
        )  # fmt: skip
        self.points, self.tries = points, tries
        self.groups = network.groups
        self.timed = target.kind == "latency" or (target.kind == "drop" and minimize == "latency")
        self.device = canonical(device)
        has_classes = any(classes(output) is not None for output in network.exact)
        if network.labels is not None and not has_classes:
            raise LowBitError("labels: no output of the model holds class scores; search without labels")
        drop_of = "top1" if network.labels is not None else "agreement" if has_classes else "error"
        self.report = SearchReport(
            f"{target.kind}={target.show(target.value)}", "ms" if self.timed else "bytes", drop_of,
            network.spool.samples, 0 if network.judges is None else network.judges.samples,
            self.device if self.timed else "", network.threads,
        )  # fmt: skip
        self.known: dict[str, tuple[Widths, dict[str, Any]]] = {}
        self.alone: dict[str, dict[int, float]] = {}
        self.harm: dict[str, dict[int, float]] = {}
        self.costs: list[LayerCost] = []
        self.times: Times | None = None

    # What single groups do -------------------------------------------------------------------------------

    def round_alone(self, folder: Path) -> None:
        """The codes of every layer at every width, from one set of sums."""
        wanted = {group.layers[0]: group.widths for group in self.groups if not group.tensors}
        with timed(self.report.seconds, "round"):
            Alone(self.network, folder / "alone", self.state).round_all(wanted, self.progress)

    def run(self) -> Widths:
        """Everything between the codes and the choice."""
        with timed(self.report.seconds, "sensitivity"):
            self._measure_harm()
        with timed(self.report.seconds, "cost"):
            self._measure_costs()
        with timed(self.report.seconds, "candidates"):
            self._measure(self._ladder())
            chosen = self._meet_drop() if self.target.kind == "drop" else self._meet_budget()
            self.final = self._final(chosen)
        self._fill(chosen)
        return chosen

    def _measure_harm(self) -> None:
        single = [
            (group, width, Task(((group.name, width),), "alone"))
            for group in self.groups if len(group.widths) > 1 for width in group.widths
        ]  # fmt: skip
        found = self._results([task for *_, task in single], "sensitivity")
        for (group, width, _), result in zip(single, found, strict=True):
            self.harm.setdefault(group.name, {})[width] = float(result["divergence"])
        for group in self.groups:
            known = self.harm.setdefault(group.name, {group.widths[0]: 0.0})
            least = 0.0
            for width in reversed(group.widths):
                # More bits that measure worse are chance: the harm never grows with the width.
                least = known[width] = max(known[width], least)
            self.alone[group.name] = dict(known)

    def _measure_costs(self) -> None:
        network = self.network
        if not self.timed:
            for group in self.groups:
                if not group.tensors:
                    size = network.sizes[group.layers[0]]
                    by_width = {(width, 0): float(-(-size * width // 8)) for width in group.widths}
                    self.costs.append(LayerCost(group.name, None, by_width))
            return
        widths = json.dumps([[group.name, group.widths] for group in self.groups])
        short = hashlib.sha256(widths.encode()).hexdigest()[:12]
        path = self.state / "measured" / f"times-{self._where()}-{short}.json"
        stored = _read(path)
        if stored is None:
            self.times = measure_times(network, self.state, self.device, network.threads or 1, self.progress)
            _store(path, self.times.to_dict())
        else:
            self.times = Times.of(stored)
        self.costs, self.report.not_offered = offered(network, self.times)

    # Measuring -------------------------------------------------------------------------------------------

    def _results(self, tasks: Sequence[Task], what: str) -> list[dict[str, Any]]:
        """What tasks measure, from the state as far as it is there."""
        paths = [self.state / "measured" / f"{task.key()}.json" for task in tasks]
        found = [_read(path) for path in paths]
        left = [i for i, result in enumerate(found) if result is None]
        for done, (place, result) in enumerate(self.executor.run([tasks[i] for i in left]), 1):
            found[left[place]] = result
            _store(paths[left[place]], result)
            if what == "candidates":
                self.report.evaluated += 1
            self.progress(len(tasks) - len(left) + done, len(tasks), what)
        return [result for result in found if result is not None]

    def _measure(self, candidates: Sequence[Widths]) -> list[dict[str, Any]]:
        tasks = [Task(tuple(widths.items())) for widths in candidates]
        results = self._results(tasks, "candidates")
        for task, widths, result in zip(tasks, candidates, results, strict=True):
            self.known.setdefault(task.key(), (widths, result))
        return results

    def _final(self, widths: Widths) -> dict[str, Any]:
        """What is known of a candidate once all images round it."""
        return self._results([Task(tuple(widths.items()), "final")], "final model")[0]

    def _drop(self, result: Mapping[str, Any]) -> float:
        """What a candidate loses, in the sense of the limit."""
        exact = self.network.exact_top1
        if exact is not None:
            lost = exact - float(result["top1"])
            return lost / exact if self.limit is not None and self.limit.relative and exact else lost
        changed = result["disagreement"]
        return float(result["divergence"] if changed is None else changed)

    def _fits(self, result: Mapping[str, Any]) -> bool:
        return self.limit is None or self._drop(result) <= self.limit.value + 1e-12

    def _cost(self, widths: Widths) -> float:
        """Bytes of the weights, or milliseconds of the layers: what the integer program adds up."""
        return total_cost(self.costs, widths)

    # Choosing --------------------------------------------------------------------------------------------

    def _choose(
        self, budget: float, least: Mapping[str, int] | None = None, most: Mapping[str, int] | None = None
    ) -> Widths | None:
        return choose(self.groups, self.harm, self.costs, budget, least, most)

    def _ends(self) -> tuple[Widths, Widths]:
        """The cheapest candidate and the one that does least harm."""
        best = self._choose(math.inf)
        # Of choices that do equal harm the program takes the cheapest.
        flat = {group.name: dict.fromkeys(group.widths, 0.0) for group in self.groups}
        cheapest = choose(self.groups, flat, self.costs, math.inf)
        assert best is not None  # the widest pair of every layer is offered
        assert cheapest is not None
        return self._choose(self._cost(cheapest)) or cheapest, best

    def _ladder(self) -> list[Widths]:
        """Candidates from the cheapest to the widest one, budgets growing by equal factors."""
        cheapest, best = self._ends()
        low, high = self._cost(cheapest), self._cost(best)
        found = [cheapest]
        for i in range(1, max(1, self.points - 1)):
            shift = min(0.0, low) - 1e-9  # times on an accelerator are differences, which may be negative
            share = i / (self.points - 1)
            budget = (low - shift) ** (1 - share) * (high - shift) ** share + shift
            made = self._choose(budget)
            if made is not None and made not in found:
                found.append(made)
        return [*found, *([] if best in found else [best])]

    def _meet_budget(self) -> Widths:
        """The least harm within the budget: the integer program first, then measured changes of it."""
        budget = self._own_budget()
        for _ in range(_TIGHTENED + 1):
            start = self._choose(budget)
            if start is None:
                break
            chosen = self._refine(start, budget)
            excess = self._excess(chosen)
            if excess <= 0:
                result = self._measure([chosen])[0]
                if not self._fits(result):
                    raise LowBitError(
                        f"target: {self.report.target} is met with a drop of {100 * self._drop(result):.3g} "
                        f"% at best, more than {self.limit}; allow more of it, or more {self.target.kind}"
                    )
                return chosen
            budget = self._cost(chosen) - excess  # less than the choice took, or it would be made again
        cheapest, _ = self._ends()
        nearest = self._whole(cheapest)
        raise LowBitError(
            f"target: {self.report.target} cannot be met with weights of {self._offer()} bits; the "
            f"{'fastest' if self.timed else 'smallest'} candidate has {self.target.show(nearest)}"
            f"{''.join(f'; {reason}' for reason in self.report.not_offered)}"
        )

    def _offer(self) -> str:
        return ", ".join(str(b) for b in sorted({b for g in self.groups if not g.tensors for b in g.widths}))

    def _own_budget(self) -> float:
        """The target less what no choice changes."""
        cheapest, _ = self._ends()
        if self.times is not None:
            return self.target.value - (predicted(self.network, self.times, cheapest) - self._cost(cheapest))
        result = self._measure([cheapest])[0]
        return self.target.value - (float(result["bytes"]) - self._cost(cheapest))

    def _whole(self, widths: Widths) -> float:
        """What the target is about, of a whole candidate: bytes of its file, or measured milliseconds."""
        if self.times is None:
            return float(self._final(widths)["bytes"])
        path = self.state / "measured" / f"{Task(tuple(widths.items())).key()}-{self._where()}.json"
        stored = _read(path)
        if stored is None:
            made = self.network.uniform(widths, self.state)
            stored = {"ms": measure_model(self.network, made, self.state, self.times)}
            _store(path, stored)
        return float(stored["ms"])

    def _where(self) -> str:
        """What a time belongs to, as a part of a file's name."""
        return f"{self.device.replace(':', '-')}-{self.network.threads or 1}"

    def _excess(self, widths: Widths) -> float:
        return self._whole(widths) - self.target.value

    def _refine(self, start: Widths, budget: float) -> Widths:
        """The best candidate within a budget, from the integer program's choice on, as long as tries last.

        Harm adds up only nearly, and differs beside other narrow layers. So each group is tried a width
        wider, and a width narrower, with the best choice of all others for it; those that the sum of harm
        likes best come first. After each batch the harm is fitted to all that was measured so far, and the
        best candidate is the one with the least of it, not the one that measured best: that was lucky.
        """
        current, idle = start, 0
        self._fit_harm(self._measure([start])[0]["divergence"])
        while self.tries > 0 and idle < _IDLE:
            part = self._proposals(current, budget)[: min(_BATCH, self.tries)]
            if not part:
                break
            self.tries -= len(part)
            self._measure(part)
            self._fit_harm(self._measure([current])[0]["divergence"])
            fitting = (widths for widths, _ in self.known.values() if self._cost(widths) <= budget + 1e-6)
            best = min(fitting, key=self._summed)
            current, idle = best, idle + 1 if best == current else 0
        return current

    def _summed(self, widths: Widths) -> float:
        return sum(self.harm[name][width] for name, width in widths.items())

    def _fit_harm(self, scale: float) -> None:
        """Harm that explains the measured candidates and stays near that of groups alone.

        Least squares, ``sum_i w_i (d_i - sum_g h[g, b_gi])^2 / (n s)^2 + sum (h - h0)^2 / p^2``: d_i are the
        measured divergences, ``w_i`` is small for those far from the present one s, n is how far they may be
        off, and the prior h0 is the harm alone times one factor, with the deviation p.
        """
        if scale <= 0:
            return
        judges = self.network.judges or self.network.spool
        noise = math.hypot(_LUCK, _SAMPLING / math.sqrt(judges.samples))
        items = [(g.name, width) for g in self.groups if len(g.widths) > 1 for width in g.widths]
        place = {item: i for i, item in enumerate(items)}
        known = list(self.known.values())
        used = np.zeros((len(known), len(items)))
        for row, (widths, _) in zip(used, known, strict=True):
            for item in widths.items():
                if item in place:
                    row[place[item]] = 1.0
        alone = np.array([self.alone[name][width] for name, width in items])
        measured = np.array([float(result["divergence"]) for _, result in known])
        near = np.minimum(measured / scale, scale / np.maximum(measured, 1e-12)) ** 2
        summed = used @ alone
        factor = float((near * summed * measured).sum() / max((near * summed**2).sum(), 1e-300)) or 1.0
        prior = factor * alone
        deviation = _ALONE * (prior + 0.04 * scale)
        weighted = used * near[:, None] / (noise * scale) ** 2
        system = weighted.T @ used + np.diag(deviation**-2)
        fitted = prior + np.linalg.solve(system, weighted.T @ (measured - used @ prior))
        for group in self.groups:
            least = 0.0
            for width in reversed(group.widths) if len(group.widths) > 1 else ():
                least = self.harm[group.name][width] = max(float(fitted[place[group.name, width]]), least)

    def _proposals(self, current: Widths, budget: float) -> list[Widths]:
        """Candidates that were not measured yet, those of least summed harm first."""
        found: list[tuple[float, Widths]] = []
        for group in self.groups:
            at = group.widths.index(current[group.name])
            for other in (at + 1, at - 1):
                if not 0 <= other < len(group.widths):
                    continue
                bound = {group.name: group.widths[other]}
                made = self._choose(budget, bound, None) if other > at else self._choose(budget, None, bound)
                if made is None or Task(tuple(made.items())).key() in self.known:
                    continue
                if any(made == known for _, known in found):
                    continue
                found.append((self._summed(made), made))
        return [made for _, made in sorted(found, key=lambda each: each[0])]

    def _meet_drop(self) -> Widths:
        """The cheapest candidate within the drop: points of the front, between two of them, then reverts."""
        assert self.limit is not None
        tried = [*self.known.values()]
        fitting = [widths for widths, result in tried if self._fits(result)]
        if not fitting:
            best = min(self._drop(result) for _, result in tried)
            raise LowBitError(
                f"target: a drop of at most {self.limit} cannot be met with weights of {self._offer()} bits; "
                f"the best candidate has {100 * best:.3g} %; offer more bits, or give more calibration images"
            )
        chosen = min(fitting, key=self._cost)
        below = [w for w, result in tried if not self._fits(result) and self._cost(w) < self._cost(chosen)]
        failing = max(below, key=self._cost, default=None)
        for _ in range(_BISECTIONS):
            if failing is None:
                return chosen
            made = self._choose((self._cost(failing) + self._cost(chosen)) / 2)
            if made is None or made in (failing, chosen):
                break
            if self._fits(self._measure([made])[0]):
                chosen = made
            elif self._cost(made) > self._cost(failing):
                failing = made
            else:
                break
        return self._revert(failing, chosen) if failing is not None else chosen

    def _revert(self, failing: Widths, fitting: Widths) -> Widths:
        """Gives single groups of a candidate more bits until it fits, as long as it is the cheaper one."""
        current, left = failing, self.tries
        while left > 0:
            proposals = []
            for group in self.groups:
                at = group.widths.index(current[group.name])
                for width in group.widths[at + 1 : at + 2]:
                    made = {**current, group.name: width}
                    extra = self._cost(made) - self._cost(current)
                    if self._cost(made) < self._cost(fitting):
                        gain = self.harm[group.name][current[group.name]] - self.harm[group.name][width]
                        proposals.append((gain / max(extra, 1e-12), made))
            part = [made for _, made in sorted(proposals, key=lambda each: -each[0])[: min(_BATCH, left)]]
            if not part:
                return fitting
            left -= len(part)
            results = self._measure(part)
            order = sorted(
                range(len(part)), key=lambda i: (not self._fits(results[i]), results[i]["divergence"])
            )
            current = part[order[0]]
            if self._fits(results[order[0]]):
                return current
        return fitting

    # The report ------------------------------------------------------------------------------------------

    def _fill(self, chosen: Widths) -> None:
        report, network = self.report, self.network
        by_group = {cost.weights: cost for cost in self.costs}
        for group in self.groups:
            costs = dict[int, float]()
            if group.name in by_group:
                for (width, _), value in by_group[group.name].cost.items():
                    costs[width] = max(costs.get(width, value), value)
            report.groups.append(
                GroupRecord(group.name, list(group.layers), list(group.tensors), group.rule,
                            self.alone[group.name], costs, chosen[group.name])
            )  # fmt: skip
        for widths, result in self.known.values():
            size = int(self.final["bytes"] if widths == chosen else result["bytes"])
            cost = float(size) if self.times is None else predicted(network, self.times, widths)
            report.points.append(
                Point(widths, cost, weight_bytes(self.groups, network.sizes, widths), size,
                      float(result["divergence"]), self._drop(result), chosen=widths == chosen)
            )  # fmt: skip
        report.points.sort(key=lambda point: (point.cost, point.divergence))
        best = math.inf
        for point in report.points:
            point.front = point.divergence < best
            best = min(best, point.divergence)
        if self.times is not None:
            report.latency_ms = self._whole(chosen)

    def finish(self, model: onnx.ModelProto) -> None:
        """Compares the final model with the candidate that was measured."""
        digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
        if digest != self.final["sha256"]:
            self.report.warnings.append(
                "the final model is not the candidate that was measured, byte for byte: that was made on "
                "another machine, or the converter keeps other nodes in float; measure it with lowbit eval"
            )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # not there, or damaged: measured again
    return read if isinstance(read, dict) else None


def _store(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value)

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write, overwrite=True)
