"""``lowbit.evaluate``: a model on data, sample by sample, alone or beside another one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
from lowbit.sessions.devices import canonical, runs_as_it_is
from lowbit.sessions.session import is_ready, run_session, runnable, session

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]

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

    def note(self, text: str) -> None:
        """Adds a note once."""
        if text not in self.notes:
            self.notes.append(text)

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
        progress: called with (samples done, samples in all).

    Returns:
        One result per metric.

    Raises:
        LowBitError: if data, labels or metrics are not usable, or do not fit each other.
        ModelError: if a model cannot be read or run.
    """
    report = EvalReport()
    subjects = [_Subject(model, device, threads, report)]
    if against is not None:
        subjects.append(_Subject(against, device, threads, report, convert=False))
    for subject in subjects:
        subject.open_data(data, preprocess, samples)
    names = subjects[0].samples.names
    report.samples = len(names)
    right = None if labels is None else labels_of(labels, subjects[0].samples)
    metrics, beside = _metrics(metric, labels=right is not None, against=against is not None)
    if any(each.name in (TOP1, TOP5) for each in metrics) and right is not None:
        right = class_labels(right, names, label_offset)
    _check_output(output_name, subjects)

    rows: dict[tuple[str, str], list[Any]] = {}
    for done, outputs in enumerate(_in_step(subjects, batch), 1):
        case = Case(
            names[done - 1],
            outputs[0],
            None if right is None else right[done - 1],
            outputs[1] if against is not None else None,
            output_name,
        )
        _look_for_oddities(case, report, label_offset)
        if done == 1:
            metrics += [each for each in beside if _applies(each, case)]
        for each in metrics:
            _add(rows, each, "model", case)
            if against is not None and not each.paired:
                other = Case(case.name, outputs[1], case.label, None, output_name)
                _add(rows, each, "against", other)
        if progress is not None:
            progress(done, len(names))
    for (name, who), values in rows.items():
        if len(values) != len(names):
            raise LowBitError(
                f"--metric: expected a value '{name}' for each of the {len(names)} samples, found "
                f"{len(values)}; a function must return the same names every time"
            )
        if who == "model":
            report.metrics.append(summarize(name, values, rows.get((name, "against")), names))
    return report


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


def _add(rows: dict[tuple[str, str], list[Any]], metric: Metric, who: str, case: Case) -> None:
    for name, value in metric(case).items():
        rows.setdefault((name, who), []).append(value)


def _look_for_oddities(case: Case, report: EvalReport, offset: int) -> None:
    for who, outputs in (("the model", case.outputs), ("the model to compare with", case.reference or {})):
        for name, value in outputs.items():
            if np.issubdtype(value.dtype, np.floating) and not np.all(np.isfinite(value)):
                report.note(f"output '{name}' of {who} holds NaN or infinite values, first for {case.name}")
    first = next(iter(case.outputs.values()))
    if case.label is not None and first.size == _BACKGROUND and not offset:
        report.note(
            f"the model has {_BACKGROUND} classes: if its first one is the background, labels from 0 to 999 "
            "need --label-offset 1"
        )


def _check_output(name: str | None, subjects: Sequence[_Subject]) -> None:
    known = list(dict.fromkeys(output for subject in subjects for output in subject.outputs))
    if name is not None and name not in known:
        raise LowBitError(f"--output-name: the outputs are {', '.join(known)}, got '{name}'")


class _Subject:
    """A model that is evaluated, and its data."""

    samples: Samples

    def __init__(
        self, model: Model, device: str, threads: int | None, report: EvalReport, *, convert: bool = True
    ) -> None:
        proto, self._label = _read(model)
        place = canonical(device)
        self._device = place if convert or is_ready(proto) else "cpu"
        self._model, self._threads, self._report = runnable(model, proto, self._device), threads, report
        if self._model is not model:
            report.note(f"{self._label}: ONNX Runtime does not load its quantizers; they run in standard ops")
        self.inputs = model_inputs(proto)
        self.outputs = [value.name for value in proto.graph.output]
        self._session: onnxruntime.InferenceSession | None = None
        self._optimized = True

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
            self._report.note(f"{self._label}: runs without ONNX Runtime's optimizer alone, because: {error}")
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


def _in_step(subjects: Sequence[_Subject], batch: int | None) -> Iterator[tuple[Outputs, ...]]:
    """The outputs of all models, sample by sample; data are read once where all take the same feeds."""
    first = subjects[0]
    if all(subject.takes_the_same(first) for subject in subjects):
        for fed in first.samples.batches(batch):
            yield from zip(*(subject.run(fed) for subject in subjects), strict=True)
    else:
        yield from zip(*(_alone(subject, batch) for subject in subjects), strict=True)


def _alone(subject: _Subject, batch: int | None) -> Iterator[Outputs]:
    for fed in subject.samples.batches(batch):
        yield from subject.run(fed)
