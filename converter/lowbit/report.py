"""What became of every node of the input model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import onnx

Action = Literal["converted", "absorbed", "kept"]


@dataclass
class NodeReport:
    """One node of the input model.

    Attributes:
        name: its name in the input model.
        op_type: its operator, with the domain in front unless it is ONNX's own.
        action: ``converted`` (became a lowbit node), ``absorbed`` (its effect is part of another node) or
            ``kept`` (runs in ONNX Runtime as before).
        into: the node of the output model that computes it now; None for kept nodes.
        reason: why a node was kept; None otherwise.
        details: facts worth showing, such as the bit widths.
    """

    name: str
    op_type: str
    action: Action = "absorbed"
    into: str | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The result of a conversion in words.

    Attributes:
        nodes: one entry per node of the input model.
        warnings: what the user should know beyond that.
        islands: the kept nodes that speak about quantized tensors and could have become lowbit nodes.
    """

    nodes: list[NodeReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    islands: list[NodeReport] = field(default_factory=list)

    @property
    def converted(self) -> list[NodeReport]:
        """The nodes that became lowbit nodes."""
        return [node for node in self.nodes if node.action == "converted"]

    @property
    def kept(self) -> list[NodeReport]:
        """The nodes that stay with ONNX Runtime, each with its reason."""
        return [node for node in self.nodes if node.action == "kept"]

    def warn(self, message: str) -> None:
        """Adds a warning once."""
        if message not in self.warnings:
            self.warnings.append(message)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {"nodes": [asdict(node) for node in self.nodes], "warnings": list(self.warnings)}


@dataclass(frozen=True)
class Result:
    """What :func:`lowbit.convert` returns.

    Attributes:
        model: the converted model.
        report: what became of every node.
        output: the file it was written to, if any.
    """

    model: onnx.ModelProto
    report: Report
    output: Path | None = None
