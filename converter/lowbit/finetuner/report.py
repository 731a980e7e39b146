"""What ``lowbit.finetune`` did, as plain data: per block, per layer, and what it gained on held-out images.

Every number is a float, an int or None, so that :meth:`FinetuneReport.to_dict` is JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


@dataclass
class BlockRecord:
    """One block of a fine-tuning by blocks.

    Attributes:
        layers: the nodes of its layers.
        before: squared error of its outputs on held-out images, relative to their power.
        after: the same when it was trained.
        kept: whether it was kept: only where the error fell, and that of the outputs did not rise in the end.
        seconds: that it took.
    """

    layers: list[str]
    before: float
    after: float
    kept: bool
    seconds: float


@dataclass
class LayerRecord:
    """What changed in one layer.

    Attributes:
        node: its name.
        op_type: its operator.
        bits: of its weights, as far as its codes tell.
        changed: the part of its codes that changed.
        growth: of its weights' scales, the geometric mean.
    """

    node: str
    op_type: str
    bits: int
    changed: float
    growth: float


@dataclass
class FinetuneReport:
    """Everything that is known about a fine-tuning.

    Attributes:
        mode: blocks or distill.
        images: samples that trained.
        held_out: samples that judged.
        steps: of each block, or of the whole network.
        again: steps by all images behind those, after which nothing is held out any more.
        rate: of a code, per step.
        seed: of what is drawn at random.
        device: where it was computed.
        before: error of the outputs on changed held-out images before: squared, relative to the float
            outputs' power, and of scores of classes the divergence of their probabilities besides.
        after: the same, as ONNX Runtime computes it, of what those that are held out have not trained.
        kept: whether the result differs from what was given: only where that error fell.
        blocks: the blocks, in order; none for distill.
        layers: the layers, in order.
        warnings: what the user should know beyond that.
        seconds: per stage.
        peak_bytes: largest resident memory of the process.
        converted: whether ``lowbit.convert`` took the result whole.
    """

    mode: str
    images: int = 0
    held_out: int = 0
    steps: int = 0
    again: int = 0
    rate: float = 0.0
    seed: int = 0
    device: str = "cpu"
    before: float = 0.0
    after: float = 0.0
    kept: bool = False
    blocks: list[BlockRecord] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    converted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return asdict(self)


@dataclass(frozen=True)
class FinetuneResult:
    """What :func:`lowbit.finetune` returns.

    Attributes:
        model: the quantized model, of the same nodes as the one that was given.
        report: what was done.
        output: the file it was written to, if any.
        converted: the lowbit model, where it was asked for.
    """

    model: onnx.ModelProto
    report: FinetuneReport
    output: Path | None = None
    converted: onnx.ModelProto | None = None
