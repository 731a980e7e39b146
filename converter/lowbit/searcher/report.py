"""What ``lowbit.search`` measured and chose, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

    from lowbit.quantizer.report import QuantizeReport


@dataclass
class GroupRecord:
    """One decision.

    Attributes:
        name: of the group.
        layers: the layers whose weights or inputs it is.
        tensors: the tensors of activations that it is.
        rule: the rule of placement that decided, where the search did not.
        harm: bits -> divergence of the output with this group alone at these bits, in nats.
        cost: bits -> bytes of its weights or, where time was measured, milliseconds of its layers.
        bits: that were chosen.
    """

    name: str
    layers: list[str]
    tensors: list[str]
    rule: str
    harm: dict[int, float]
    cost: dict[int, float]
    bits: int = 0


@dataclass
class Point:
    """One candidate that was quantized and measured as a whole.

    Attributes:
        widths: bits of every group.
        cost: bytes of the converted file, or milliseconds as predicted from measured layers.
        weight_bytes: of its packed weights.
        bytes: of the converted file.
        divergence: of its outputs from the float model's, see :class:`lowbit.searcher.loss.Loss`.
        drop: loss of top-1 with labels; else the share of samples whose best class changed, or divergence.
        front: whether no other candidate is better in cost and divergence.
        chosen: whether it is the result.
    """

    widths: dict[str, int]
    cost: float
    weight_bytes: int
    bytes: int
    divergence: float
    drop: float
    front: bool = False
    chosen: bool = False


@dataclass
class SearchReport:
    """Everything that is known about a search.

    Attributes:
        target: as it was asked for.
        unit: of costs: bytes or ms.
        drop_of: what a drop is: top1, agreement or error.
        images: calibration samples.
        judges: other samples, which judged; 0: each half of the calibration samples judged what the other one
            rounded, and all of less than ten judged themselves.
        device: where time was measured; empty where it was not.
        threads: of the sessions.
        groups: all decisions.
        points: the candidates, the cheapest first.
        not_offered: widths that are no faster here, with what was measured.
        latency_ms: of the result, measured whole; None where time was not measured.
        evaluated: candidates that were quantized as a whole in this run; others came from the state.
        warnings: what the user should know beyond that.
        seconds: per stage.
    """

    target: str
    unit: str
    drop_of: str
    images: int = 0
    judges: int = 0
    device: str = ""
    threads: int | None = None
    groups: list[GroupRecord] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)
    latency_ms: float | None = None
    evaluated: int = 0
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> Point:
        """The candidate that is the result."""
        return next(point for point in self.points if point.chosen)

    @property
    def front(self) -> list[Point]:
        """The candidates that no other one beats in cost and divergence, the cheapest first."""
        return [point for point in self.points if point.front]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return asdict(self)


@dataclass(frozen=True)
class SearchResult:
    """What :func:`lowbit.search` returns.

    Attributes:
        model: the quantized model, QDQ or QCDQ.
        report: what was measured and chosen.
        quantization: the report of its quantization.
        output: the file it was written to, if any.
        converted: the lowbit model.
    """

    model: onnx.ModelProto
    report: SearchReport
    quantization: QuantizeReport
    output: Path | None
    converted: onnx.ModelProto | None
