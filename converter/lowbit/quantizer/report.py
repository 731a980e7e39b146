"""What ``lowbit.quantize`` did, as plain data: per layer, per tensor, per step and per rule.

Every number is a float, an int or None (never NaN or infinite), so that :meth:`QuantizeReport.to_dict` is
JSON. SQNR is ``10 log10(sum(x^2) / sum((x - x^)^2))`` in decibels, over all calibration images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


@dataclass
class Histogram:
    """How the values of a tensor are distributed over equal bins, and the range that was chosen.

    Attributes:
        low: left end of the first bin.
        high: right end of the last one.
        counts: values in each bin.
    """

    low: float
    high: float
    counts: list[int]


@dataclass
class TensorRecord:
    """One quantizer of an activation.

    Attributes:
        name: the tensor in the float model.
        bits: of its codes.
        signed: whether its codes are.
        per_channel: whether it has one scale per channel.
        method: how the range was chosen: minmax, percentile, entropy or mse.
        low: the smallest real number that a code stands for; of the widest channel.
        high: the largest one.
        seen_low: the smallest value in the calibration data.
        seen_high: the largest one.
        scale: the scale, or the largest one.
        zero_point: the zero point.
        sqnr: of the tensor rounded to its own grid, nothing in front of it being quantized.
        rule: the placement rule that decided its bits.
        shares: the tensors with the same grid, itself left out.
        histogram: of the calibration data.
    """

    name: str
    bits: int
    signed: bool
    per_channel: bool
    method: str
    low: float
    high: float
    seen_low: float
    seen_high: float
    scale: float
    zero_point: int
    sqnr: float | None
    rule: str
    shares: list[str] = field(default_factory=list)
    histogram: Histogram | None = None


@dataclass
class LayerRecord:
    """One convolution or matrix product.

    Attributes:
        node: its name in the float model.
        op_type: its operator.
        shape: of its weights, as the model stores them.
        weight_bits: of its weights.
        input_bits: of its input.
        output_bits: of the tensor that its result is rounded to; None where it stays float.
        input: the tensor that it reads.
        output: the tensor that it writes, before any activation function behind it.
        rule: the placement rule that decided the bits of its weights.
        rounding: the rounding method that gave the codes.
        ridge: what was added to the diagonal of its Gram matrix, as a part of the diagonal's mean.
        sqnr_weights: of its weights alone.
        sqnr_input: of its input, everything in front of it being quantized.
        sqnr_output: of its output where it alone is quantized, its input being exact.
        sqnr_accumulated: of its output, everything up to it being quantized.
        sqnr_nearest: the same with its weights rounded to nearest: what rounding gained.
        error: relative error of its output on the images that rounding used, ``10^(-sqnr_accumulated / 10)``.
        held_out_error: the same on images that rounding did not use; None where there were too few.
        neglected: the part of its Gram matrix, by squared norm, that was left out because it went in blocks.
        float_bytes: of its weights in the float model.
        bytes: of its codes, packed.
        seconds: that it took.
        histogram: of its float weights in units of their rows' scales, those far outside of the codes at the
            ends; None where the layer was not rounded.
    """

    node: str
    op_type: str
    shape: list[int]
    weight_bits: int
    input_bits: int
    output_bits: int | None
    input: str
    output: str
    rule: str
    rounding: str = ""
    ridge: float = 0.0
    sqnr_weights: float | None = None
    sqnr_input: float | None = None
    sqnr_output: float | None = None
    sqnr_accumulated: float | None = None
    sqnr_nearest: float | None = None
    error: float | None = None
    held_out_error: float | None = None
    neglected: float = 0.0
    float_bytes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    histogram: Histogram | None = None


@dataclass
class StepRecord:
    """One clean-up pass over the float model.

    Attributes:
        name: the pass.
        changes: how many nodes it changed.
        error: largest difference of an output, relative to the largest output; None where it changed nothing.
        kept: whether its result was kept.
        note: why not.
        seconds: that it took.
    """

    name: str
    changes: int
    error: float | None = None
    kept: bool = True
    note: str = ""
    seconds: float = 0.0


@dataclass
class Decision:
    """One decision of one placement rule.

    Attributes:
        rule: its name, by which ``disable_rules`` turns it off.
        target: the node or tensor that it is about.
        decision: what was decided, in words.
    """

    rule: str
    target: str
    decision: str


@dataclass
class QuantizeReport:
    """Everything that is known about a quantization.

    Attributes:
        bits: the asked for widths, such as ``w4a8``.
        images: samples of the calibration data, along the first dim.
        batches: in how many feeds they came.
        config: the effective configuration, which gives the same model again.
        steps: the clean-up passes, in order.
        decisions: what each placement rule decided.
        layers: the layers, in the order of the graph.
        tensors: the quantizers of activations, in the order of the graph.
        kept_float: node -> why it stays float.
        outputs: output -> SQNR of the quantized model against the float one, over the calibration images.
        warnings: what the user should know beyond that.
        seconds: per stage of the run.
        peak_bytes: largest resident memory of the process.
        converted: whether ``lowbit.convert`` took the result under ``strict``.
    """

    bits: str
    images: int = 0
    batches: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    kept_float: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, float | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    converted: bool = False

    @property
    def worst_layers(self) -> Sequence[LayerRecord]:
        """The layers by their accumulated SQNR, the lowest first."""
        known = [layer for layer in self.layers if layer.sqnr_accumulated is not None]
        return sorted(known, key=lambda layer: layer.sqnr_accumulated or 0.0)

    def warn(self, message: str) -> None:
        """Adds a warning once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json`` and the page of the report."""
        return asdict(self)


@dataclass(frozen=True)
class Result:
    """What :func:`lowbit.quantize` returns.

    Attributes:
        model: the quantized model, QDQ or QCDQ.
        report: what was done.
        output: the file it was written to, if any.
        converted: the lowbit model, where it was asked for.
    """

    model: onnx.ModelProto
    report: QuantizeReport
    output: Path | None = None
    converted: onnx.ModelProto | None = None
