"""``lowbit.evaluate``: a model on data, sample by sample, alone or beside another one."""

from __future__ import annotations

import math
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowbit.cluster import Cluster
from lowbit.errors import LowBitError, ModelError
from lowbit.evaluation.labels import Labels, class_labels, labels_of
from lowbit.evaluation.metrics import (
    AGREEMENT,
    SQNR,
    TOP1,
    TOP5,
    Case,
    Metric,
    MetricResult,
    Outputs,
    make_metric,
    summarize,
)
from lowbit.library import require_onnxruntime
from lowbit.proto.feeds import Model, as_proto, model_inputs
from lowbit.proto.images import Batch, Samples
from lowbit.proto.model_file import load_proto
from lowbit.sessions.devices import canonical, has_own_memory, runs_as_it_is
from lowbit.sessions.session import is_ready, run_session, runnable, session

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
_Rows = dict[tuple[str, str], list[Any]]

_PART = 64
"""Samples that a worker of a cluster gets at a time, or a little more: whole batches of them."""

_BACKGROUND = 1001
"""Classes of an ImageNet network that counts the background as its first one."""


@dataclass
class EvalReport:
    """What :func:`evaluate` measured.

    Attributes:
        samples: how many.
        metrics: the results, those asked for first.
        notes: what the user should know beyond that.
    """

    samples: int = 0
    metrics: list[MetricResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> MetricResult:
        """The result of a metric by its name."""
        for result in self.metrics:
            if result.name == name:
                return result
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``; null stands for what is not finite (the SQNR of equals)."""
        metrics = [_finite({**asdict(result), "changed": list(result.changed)}) for result in self.metrics]
        return {"samples": self.samples, "metrics": metrics, "notes": list(self.notes)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluate(
    model: Model,
    data: str | os.PathLike[str] | Mapping[str, Array],
    *,
    labels: Labels | None = None,
    preprocess: str | None = None,
    metric: str | Sequence[str] = (),
    against: Model | None = None,
    label_offset: int = 0,
    output_name: str | None = None,
    samples: int | None = None,
    batch: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    cluster: str | None = None,
    progress: Progress | None = None,
) -> EvalReport:
    """Measures how well a model does its task, and how sure that is.

    Samples are read, run and measured one batch at a time; memory does not grow with the data. Every number
    has a 95 % interval: Wilson's of a proportion, a bootstrap over samples (2000 resamples, seeded) of a mean
    or an SQNR. With ``against`` both models see the same samples, and the difference is measured sample by
    sample: Agresti and Min's interval and McNemar's exact test of proportions, a bootstrap of means.

    Args:
        model: a path, a ModelProto or a Result, converted or not.
        data: a folder or zip of images, an .npz or .npy, or arrays by input, samples along the first dim.
        labels: the right answers: a .json, .csv, .txt, .npy or .npz, "folders", or what a file would hold.
        preprocess: how an image becomes an input, see docs/evaluate.md; None feeds arrays as they are.
        metric: one or several of "top1", "top5", "agreement" (same best class as ``against``), "cosine"
            (of the outputs and those of ``against``), "sqnr" (of the outputs against those of ``against``, in
            dB over all samples), or "module:function", a function of one sample's ``outputs`` and, where it
            has such parameters, ``label``, ``reference`` (the outputs of ``against``) and ``name``. When
            empty: top-1 with labels, and with ``against`` agreement and SQNR, which also stand beside top-1
            and top-5 where those were asked for.
        against: the model to compare with, usually the float one. On another device than "cpu" it runs there
            too if it was converted, and on the CPU otherwise.
        label_offset: added to every label, such as 1 for a network that counts a background class first.
        output_name: the output that holds class scores; the first one otherwise. Cosine and SQNR compare all
            outputs otherwise.
        samples: use this many, evenly spread over the data.
        batch: samples a run, for models with a symbolic batch; 1 when absent.
        threads: intra-op threads of the sessions.
        device: where ``model`` runs, see :func:`lowbit.session`.
        cluster: the address of a Ray cluster whose machines run parts of the samples, or "local". They see
            the current folder, and all files named here, under the same paths. The numbers are the same.
        progress: called with (samples done, samples in all).

    Returns:
        One result per metric.

    Raises:
        LowBitError: if data, labels or metrics are not usable, or do not fit each other.
        ModelError: if a model cannot be read or run.
    """
    settings = _Settings(model, data, labels, preprocess, metric, against, label_offset, output_name, samples,
                         batch, threads, device)  # fmt: skip
    evaluation = _Evaluation(settings)
    names = evaluation.names
    if cluster is None:
        parts = [evaluation.measure(0, len(names), progress)]
    else:
        parts = _measure_on(cluster, evaluation, progress)
    rows, notes = _Rows(), dict[str, str]()
    for part in parts:
        for key, values in part.rows.items():
            rows.setdefault(key, []).extend(values)
        for about, note in part.notes.items():
            notes.setdefault(about, note)
    report = EvalReport(samples=len(names), notes=list(notes.values()))
    for (name, who), values in rows.items():
        if len(values) != len(names):
            raise LowBitError(
                f"--metric: expected a value '{name}' for each of the {len(names)} samples, found "
                f"{len(values)}; a function must return the same names every time"
            )
        if who == "model":
            report.metrics.append(summarize(name, values, rows.get((name, "against")), names))
    return report


@dataclass(frozen=True)
class _Settings:
    """The arguments of :func:`evaluate` that say what is measured, as a worker of a cluster is sent them."""

    model: Model
    data: str | os.PathLike[str] | Mapping[str, Array]
    labels: Labels | None
    preprocess: str | None
    metric: str | Sequence[str]
    against: Model | None
    label_offset: int
    output_name: str | None
    samples: int | None
    batch: int | None
    threads: int | None
    device: str


@dataclass
class _Part:
    """What some of the samples came to.

    Attributes:
        rows: a value for each sample by metric and by who was measured, "model" or "against".
        notes: what the user should know, by what it is about: the first that is said of it counts.
    """

    rows: _Rows
    notes: dict[str, str]


class _Evaluation:
    """Models and data that were opened, and metrics that fit them.

    Attributes:
        names: what to call each sample.
        batch: samples a run.
    """

    def __init__(self, settings: _Settings) -> None:
        self.settings, self._notes = settings, dict[str, str]()
        against = settings.against
        self._subjects = [_Subject(settings.model, settings.device, settings.threads, self._notes)]
        if against is not None:
            other = _Subject(against, settings.device, settings.threads, self._notes, convert=False)
            self._subjects.append(other)
        for subject in self._subjects:
            subject.open_data(settings.data, settings.preprocess, settings.samples)
        samples = self._subjects[0].samples
        self.names, self.batch = samples.names, samples.fixed_batch() or settings.batch or 1
        self._labels = None if settings.labels is None else labels_of(settings.labels, samples)
        given = {"labels": self._labels is not None, "against": against is not None}
        self._metrics, self._beside = _metrics(settings.metric, **given)
        if any(each.name in (TOP1, TOP5) for each in self._metrics) and self._labels is not None:
            self._labels = class_labels(self._labels, self.names, settings.label_offset)
        _check_output(settings.output_name, self._subjects)

    def measure(self, start: int, stop: int, progress: Progress | None = None) -> _Part:
        """Runs and measures the samples from ``start`` to ``stop``."""
        rows, notes, metrics = _Rows(), dict[str, str](), list(self._metrics)
        output_name = self.settings.output_name
        samples = [subject.samples.part(start, stop) for subject in self._subjects]
        for done, outputs in enumerate(_in_step(self._subjects, samples, self.settings.batch), start + 1):
            case = Case(
                self.names[done - 1],
                outputs[0],
                None if self._labels is None else self._labels[done - 1],
                outputs[1] if len(outputs) > 1 else None,
                output_name,
            )
            _look_for_oddities(case, notes, self.settings.label_offset)
            if done == start + 1:
                metrics += [each for each in self._beside if _applies(each, case)]
            for each in metrics:
                _add(rows, each, "model", case)
                if len(outputs) > 1 and not each.paired:
                    other = Case(case.name, outputs[1], case.label, None, output_name)
                    _add(rows, each, "against", other)
            if progress is not None:
                progress(done, len(self.names))
        return _Part(rows, self._notes | notes)


def _measure_on(address: str, evaluation: _Evaluation, progress: Progress | None) -> list[_Part]:
    """The same on a cluster: parts of whole batches, in the order of the samples."""
    settings, count = evaluation.settings, len(evaluation.names)
    threads = settings.threads or 1
    size = evaluation.batch * math.ceil(_PART / evaluation.batch)
    parts = [(start, min(start + size, count)) for start in range(0, count, size)]
    sent = _Sent(uuid.uuid4().hex, os.getcwd(), replace(settings, threads=threads))
    gpus = 1 if has_own_memory(canonical(settings.device)) else 0
    cluster = Cluster(address, sent, cores=threads, gpus=gpus)
    measured: dict[int, _Part] = {}
    try:
        for i, part in cluster.each(_measure_part, parts):
            measured[i] = part
            if progress is not None:
                progress(sum(parts[done][1] - parts[done][0] for done in measured), count)
    finally:
        cluster.close()
    return [measured[i] for i in range(len(parts))]


@dataclass(frozen=True)
class _Sent:
    """What the workers of a cluster are sent: which evaluation it is, its current folder, its settings."""

    name: str
    folder: str
    settings: _Settings


_opened: dict[str, _Evaluation] = {}
"""What a worker has opened, by its name; one at a time."""


def _measure_part(sent: _Sent, part: tuple[int, int]) -> _Part:
    """What a worker does with a part: it opens models and data once."""
    if sent.name not in _opened:
        _opened.clear()
        try:
            os.chdir(sent.folder)
        except OSError as error:
            raise LowBitError(
                f"--cluster: the machine {platform.node()} does not see {sent.folder}, the folder that the "
                "evaluation was started in; share it, and all files that it names, under the same paths"
            ) from error
        _opened[sent.name] = _Evaluation(sent.settings)
    return _opened[sent.name].measure(*part)


def _metrics(given: str | Sequence[str], *, labels: bool, against: bool) -> tuple[list[Metric], list[Metric]]:
    """The metrics that were asked for, and those that stand beside them where the outputs allow it."""
    wanted = [given] if isinstance(given, str) else list(given)
    beside: list[str] = []
    if not wanted:
        wanted = [TOP1] if labels else [SQNR] if against else []
        beside = [AGREEMENT]
    if against and {TOP1, TOP5} & set(wanted):
        beside = [AGREEMENT, SQNR]
    if not wanted:
        raise LowBitError(
            "nothing to measure by: give labels (--labels), a model to compare with (--against), or --metric "
            "module:function"
        )
    metrics = [make_metric(name) for name in dict.fromkeys(wanted)]
    for each in metrics:
        if each.needs_labels and not labels:
            raise LowBitError(f"--metric {each.name} needs the right answers; give --labels FILE")
        if each.paired and not against:
            raise LowBitError(f"--metric {each.name} compares with a model; give --against MODEL")
    return metrics, [make_metric(name) for name in beside if against and name not in wanted]


def _applies(metric: Metric, case: Case) -> bool:
    """Whether a metric that nobody asked for can be had from outputs like these."""
    if metric.name == AGREEMENT and len(case.outputs) > 1 and case.chosen is None:
        return False  # a detector: which class is best of its first output says nothing
    try:
        metric(case)
    except LowBitError:
        return False
    return True


def _add(rows: _Rows, metric: Metric, who: str, case: Case) -> None:
    for name, value in metric(case).items():
        rows.setdefault((name, who), []).append(value)


def _look_for_oddities(case: Case, notes: dict[str, str], offset: int) -> None:
    for who, outputs in (("the model", case.outputs), ("the model to compare with", case.reference or {})):
        for name, value in outputs.items():
            if np.issubdtype(value.dtype, np.floating) and not np.all(np.isfinite(value)):
                notes.setdefault(
                    f"finite {who} {name}",
                    f"output '{name}' of {who} holds NaN or infinite values, first for {case.name}",
                )
    first = next(iter(case.outputs.values()))
    if case.label is not None and first.size == _BACKGROUND and not offset:
        notes.setdefault(
            "background",
            f"the model has {_BACKGROUND} classes: if its first one is the background, labels from 0 to 999 "
            "need --label-offset 1",
        )


def _check_output(name: str | None, subjects: Sequence[_Subject]) -> None:
    known = list(dict.fromkeys(output for subject in subjects for output in subject.outputs))
    if name is not None and name not in known:
        raise LowBitError(f"--output-name: the outputs are {', '.join(known)}, got '{name}'")


class _Subject:
    """A model that is evaluated, and its data."""

    samples: Samples

    def __init__(
        self, model: Model, device: str, threads: int | None, notes: dict[str, str], *, convert: bool = True
    ) -> None:
        proto, self._label = _read(model)
        place = canonical(device)
        self._device = place if convert or is_ready(proto) else "cpu"
        self._model, self._threads, self._notes = runnable(model, proto, self._device), threads, notes
        if self._model is not model:
            self._note("ONNX Runtime does not load its quantizers; they run in standard ops")
        self.inputs = model_inputs(proto)
        self.outputs = [value.name for value in proto.graph.output]
        self._session: onnxruntime.InferenceSession | None = None
        self._optimized = True

    def _note(self, text: str) -> None:
        self._notes.setdefault(f"{self._label}: {text}", f"{self._label}: {text}")

    def open_data(
        self, data: str | os.PathLike[str] | Mapping[str, Array], preprocess: str | None, limit: int | None
    ) -> None:
        """Opens the data for this model's inputs."""
        self.samples = Samples(data, self.inputs, preprocess, limit=limit)

    def takes_the_same(self, other: _Subject) -> bool:
        """Whether both models take the very same feeds."""
        return {name: value.type for name, value in self.inputs.items()} == {
            name: value.type for name, value in other.inputs.items()
        }

    def run(self, batch: Batch) -> Iterator[Outputs]:
        """The outputs for each sample of a batch that is data."""
        values = self._values(batch)
        size = len(next(iter(batch.values())))
        for name, value in values.items():
            if not isinstance(value, np.ndarray):
                raise LowBitError(f"{self._label}: output '{name}' is no tensor, which cannot be evaluated")
            if size > 1 and (value.ndim == 0 or len(value) != size):
                raise LowBitError(
                    f"{self._label}: output '{name}' has the shape {list(value.shape)} for a batch of "
                    f"{size}, which cannot be told apart by sample; use a batch of 1 (--batch 1)"
                )
        for i in range(batch.count):
            yield {name: value[i] if value.ndim and len(value) == size else value
                   for name, value in values.items()}  # fmt: skip

    def _values(self, batch: Batch) -> dict[str, Array]:
        try:
            if self._session is None:
                self._session = self._open()
            return run_session(self._session, batch)
        except ModelError as error:
            # Some quantized models run only as they are written: the optimizer fuses what no kernel takes.
            if not self._optimized or not runs_as_it_is(self._device):
                raise
            self._optimized = False
            try:
                self._session = self._open()
                values = run_session(self._session, batch)
            except ModelError:
                raise error from None
            self._note(f"runs without ONNX Runtime's optimizer alone, because: {error}")
            return values

    def _open(self) -> onnxruntime.InferenceSession:
        ort = require_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        if not self._optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return session(self._model, device=self._device, threads=self._threads, sess_options=options)


def _read(model: Model) -> tuple[onnx.ModelProto, str]:
    """The model, without external data where it is a path, and how to call it."""
    if isinstance(model, (str, os.PathLike)):
        return load_proto(model, external_data=False), os.fspath(model)
    proto = as_proto(model)
    return proto, proto.graph.name or "the model"


def _in_step(
    subjects: Sequence[_Subject], samples: Sequence[Samples], batch: int | None
) -> Iterator[tuple[Outputs, ...]]:
    """The outputs of all models, sample by sample; data are read once where all take the same feeds.

    ``samples`` are the data of each model.
    """
    if all(subject.takes_the_same(subjects[0]) for subject in subjects):
        for fed in samples[0].batches(batch):
            yield from zip(*(subject.run(fed) for subject in subjects), strict=True)
    else:
        yield from zip(*(_alone(*each, batch) for each in zip(subjects, samples, strict=True)), strict=True)


def _alone(subject: _Subject, samples: Samples, batch: int | None) -> Iterator[Outputs]:
    for fed in samples.batches(batch):
        yield from subject.run(fed)
