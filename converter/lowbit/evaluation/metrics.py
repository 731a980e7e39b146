"""What can be measured on one sample, and how the numbers of many become one with an interval."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lowbit.errors import LowBitError
from lowbit.evaluation.statistics import (
    AGRESTI_MIN,
    BOOTSTRAP,
    WILSON,
    bootstrap,
    mcnemar,
    paired_difference,
    wilson,
)
from lowbit.proto.user_function import is_function, load_function

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
"""A model's outputs for one sample, without the batch dim."""

TOP1, TOP5, COSINE, SQNR, AGREEMENT = "top1", "top5", "cosine", "sqnr", "agreement"
METRICS = (TOP1, TOP5, COSINE, SQNR, AGREEMENT)


@dataclass(frozen=True)
class Case:
    """One sample, as metrics see it.

    Attributes:
        name: what to call it.
        outputs: of the model.
        label: the right answer; None where there are no labels.
        reference: the outputs of the model to compare with; None without one.
        chosen: the output that is meant where one is asked for; None: the first.
    """

    name: str
    outputs: Outputs
    label: Any = None
    reference: Outputs | None = None
    chosen: str | None = None

    def scores(self, outputs: Outputs) -> Array:
        """The class scores [classes] among outputs.

        Raises:
            LowBitError: if the output holds anything else.
        """
        name, value = self._one(outputs)
        if value.size < 2 or max(value.shape) != value.size:
            raise LowBitError(
                f"{self.name}: expected class scores in output '{name}', found {list(value.shape)} a sample; "
                "choose another one with --output-name, or give --metric module:function"
            )
        return value.reshape(-1)

    def _one(self, outputs: Outputs) -> tuple[str, Array]:
        # Two models may call it differently: then the first one of the second is meant.
        name = self.chosen if self.chosen in outputs else next(iter(outputs))
        return name, outputs[name]

    def pairs(self) -> list[tuple[Array, Array]]:
        """The outputs of both models in float64: the chosen one, or all that both have."""
        assert self.reference is not None
        if self.chosen is not None or not set(self.outputs) & set(self.reference):
            pairs = [(self._one(self.outputs), self._one(self.reference))]
        else:
            pairs = [((name, value), (name, self.reference[name]))
                     for name, value in self.outputs.items() if name in self.reference]  # fmt: skip
        for (name, ours), (_, theirs) in pairs:
            if ours.dtype.kind != theirs.dtype.kind:
                raise LowBitError(
                    f"{self.name}: output '{name}' is {ours.dtype}, and {theirs.dtype} in the model to "
                    "compare with: codes and real numbers have no common scale; choose another one with "
                    "--output-name"
                )
            if ours.size != theirs.size:
                raise LowBitError(
                    f"{self.name}: output '{name}' holds {list(ours.shape)} a sample, {list(theirs.shape)} "
                    "in the model to compare with; choose one with --output-name"
                )
        return [(ours.reshape(-1).astype(np.float64), theirs.reshape(-1).astype(np.float64))
                for (_, ours), (_, theirs) in pairs]  # fmt: skip


Row = dict[str, "bool | float | tuple[float, ...]"]
"""What one metric says of one sample: a number for each name under which it reports."""


class Metric(Protocol):
    """A measure of one sample."""

    @property
    def name(self) -> str:
        """By what it was asked for."""

    @property
    def needs_labels(self) -> bool:
        """Whether it needs the right answers."""

    @property
    def paired(self) -> bool:
        """Whether it compares with another model."""

    def __call__(self, case: Case) -> Row:
        """Measures one sample."""


@dataclass(frozen=True)
class _TopK:
    name: str
    k: int
    needs_labels: bool = True
    paired: bool = False

    def __call__(self, case: Case) -> Row:
        scores = case.scores(case.outputs)
        if not 0 <= case.label < len(scores):
            raise LowBitError(
                f"{case.name}: expected a label from 0 to {len(scores) - 1}, as many classes has the model, "
                f"found {case.label}; --label-offset shifts all labels"
            )
        # Of equal scores the first one counts as the higher, as in argmax.
        mine = scores[case.label]
        above = np.count_nonzero(scores > mine) + np.count_nonzero(scores[: case.label] == mine)
        return {self.name: bool(above < self.k and not np.isnan(mine))}


@dataclass(frozen=True)
class _Agreement:
    name: str = AGREEMENT
    needs_labels: bool = False
    paired: bool = True

    def __call__(self, case: Case) -> Row:
        assert case.reference is not None
        ours, theirs = case.scores(case.outputs), case.scores(case.reference)
        return {self.name: bool(ours.argmax() == theirs.argmax())}


@dataclass(frozen=True)
class _Cosine:
    name: str = COSINE
    needs_labels: bool = False
    paired: bool = True

    def __call__(self, case: Case) -> Row:
        ours, theirs = (np.concatenate(each) for each in zip(*case.pairs(), strict=True))
        norms = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
        return {self.name: float(ours @ theirs) / norms if norms else float(np.array_equal(ours, theirs))}


@dataclass(frozen=True)
class _Sqnr:
    """Signal and noise of a sample; their ratio over all samples is what is reported."""

    name: str = SQNR
    needs_labels: bool = False
    paired: bool = True

    def __call__(self, case: Case) -> Row:
        pairs = case.pairs()
        signal = sum(float(theirs @ theirs) for _, theirs in pairs)
        noise = sum(float((theirs - ours) @ (theirs - ours)) for ours, theirs in pairs)
        return {self.name: (signal, noise)}


class _OfUser:
    """A user's function of one sample.

    It is called with those of ``outputs``, ``label``, ``reference`` and ``name`` that it has parameters for,
    and returns a bool (reported as a share), a number (reported as a mean and a total), or a dict of them.
    """

    def __init__(self, text: str) -> None:
        self.name = text
        self._function: Callable[..., Any] = load_function(text, "--metric")
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise LowBitError(f"--metric {text}: its parameters cannot be told: {error}") from error
        self._takes = [key for key in ("outputs", "label", "reference", "name") if key in parameters]
        unknown = [key for key, each in parameters.items()
                   if key not in self._takes and each.default is each.empty
                   and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]  # fmt: skip
        if "outputs" not in self._takes or unknown:
            raise LowBitError(
                f"--metric {text}: expected a function of outputs and, as it needs them, label, reference "
                f"and name, found ({', '.join(parameters)})"
            )
        self.needs_labels, self.paired = "label" in self._takes, "reference" in self._takes

    def __call__(self, case: Case) -> Row:
        given = {key: getattr(case, key) for key in self._takes}
        try:
            made = self._function(**given)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise LowBitError(f"{case.name}: --metric {self.name} failed: {what}") from error
        row = made if isinstance(made, Mapping) else {self.name.rpartition(":")[2]: made}
        for key, value in row.items():
            if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
                raise LowBitError(
                    f"{case.name}: --metric {self.name}: expected a bool, a number or a dict of them, "
                    f"returned {key}: {type(value).__name__}"
                )
        return {
            str(key): bool(value) if isinstance(value, (bool, np.bool_)) else float(value)
            for key, value in row.items()
        }


def make_metric(name: str) -> Metric:
    """The metric that a word of :data:`METRICS` or ``module:function`` names.

    Raises:
        LowBitError: for anything else.
    """
    if is_function(name):
        return _OfUser(name)
    built_in: dict[str, Metric] = {
        TOP1: _TopK(TOP1, 1), TOP5: _TopK(TOP5, 5), COSINE: _Cosine(), SQNR: _Sqnr(), AGREEMENT: _Agreement(),
    }  # fmt: skip
    if name not in built_in:
        raise LowBitError(f"--metric: '{name}' is unknown; expected {', '.join(METRICS)}, or module:function")
    return built_in[name]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval.

    Attributes:
        value: the number.
        low: lower end of the interval.
        high: upper end.
        method: how the interval was made: "Wilson", "Agresti-Min" or "bootstrap".
    """

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class MetricResult:
    """What a metric says over all samples.

    Attributes:
        name: of the metric, or of one of the numbers that a user's function returns.
        unit: "share" of the samples, "mean" of their numbers, or "dB".
        samples: how many.
        model: of the model.
        total: the sum over the samples; None for dB.
        against: of the model to compare with, where the metric is not itself a comparison.
        difference: ``model`` minus ``against``, sample by sample.
        gained: samples that the model has right and the other wrong, where that is what is measured.
        lost: the other way round.
        p_value: of McNemar's exact test.
        changed: names of the samples that were gained or lost.
    """

    name: str
    unit: str
    samples: int
    model: Estimate
    total: float | None = None
    against: Estimate | None = None
    difference: Estimate | None = None
    gained: int | None = None
    lost: int | None = None
    p_value: float | None = None
    changed: Sequence[str] = ()


def summarize(
    name: str, values: Sequence[Any], against: Sequence[Any] | None, names: Sequence[str]
) -> MetricResult:
    """One result from the numbers of all samples.

    Args:
        name: what to report them under.
        values: per sample: a bool, a number, or (signal, noise).
        against: the same of the model to compare with, where there is one and the metric does not compare.
        names: of the samples.
    """
    count = len(values)
    if isinstance(values[0], tuple):
        both = np.asarray(values, np.float64)
        low, high = bootstrap(both, _decibels)
        return MetricResult(
            name, "dB", count, Estimate(float(_decibels(both.mean(0)[None])[0]), low, high, BOOTSTRAP)
        )
    if all(isinstance(value, bool) for value in (*values, *(against or ()))):
        return _proportion(name, values, against, names)
    ours = np.asarray(values, np.float64)
    theirs = None if against is None else np.asarray(against, np.float64)
    return MetricResult(
        name,
        "mean",
        count,
        _mean(ours),
        float(ours.sum()),
        None if theirs is None else _mean(theirs),
        None if theirs is None else _mean(ours - theirs),
    )


def _proportion(
    name: str, values: Sequence[bool], against: Sequence[bool] | None, names: Sequence[str]
) -> MetricResult:
    count, hits = len(values), sum(values)
    model = Estimate(hits / count, *wilson(hits, count), WILSON)
    if against is None:
        return MetricResult(name, "share", count, model, float(hits))
    theirs = sum(against)
    gained = sum(ours and not other for ours, other in zip(values, against, strict=True))
    lost = sum(other and not ours for ours, other in zip(values, against, strict=True))
    return MetricResult(
        name,
        "share",
        count,
        model,
        float(hits),
        Estimate(theirs / count, *wilson(theirs, count), WILSON),
        Estimate((gained - lost) / count, *paired_difference(gained, lost, count), AGRESTI_MIN),
        gained,
        lost,
        mcnemar(gained, lost),
        [each for each, ours, other in zip(names, values, against, strict=True) if ours != other],
    )


def _mean(values: Array) -> Estimate:
    low, high = bootstrap(values[:, None], lambda means: means[:, 0])
    return Estimate(float(values.mean()), low, high, BOOTSTRAP)


def _decibels(means: Array) -> Array:
    """SQNR of mean signals and noises [n, 2]; infinite without noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = 10 * np.log10(means[:, 0] / means[:, 1])
    return np.where(means[:, 1] == 0, math.inf, ratio)
