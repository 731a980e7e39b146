"""What became of every node of the input model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
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


NOT_QUANTIZED = (
    "nothing in this model is quantized, so that there is nothing to convert; quantize it first, with ONNX "
    "Runtime's quantizer (onnxruntime.quantization.quantize_static) or by training it with Brevitas"
)
"""What a float model is told."""

_PARTICULARS = re.compile(r"'[^']*'|\[[^]]*\]|(?<![\w.])-?\d[\w.+-]*")
"""What differs between the reasons of two nodes that stay for the same one: names, shapes and numbers."""


_EDGES = {"QuantizeLinear", "DequantizeLinear"}
"""What stays because its neighbours do."""


@dataclass(frozen=True)
class ReasonGroup:
    """Nodes that stay for one reason.

    Attributes:
        reason: the reason; names and numbers in which the nodes' own reasons differ are two dots.
        ops: op -> how many nodes, most first.
        nodes: their names, in the order of the model.
    """

    reason: str
    ops: dict[str, int]
    nodes: list[str]

    @property
    def counted(self) -> str:
        """The ops in words, the most frequent ones: ``7 Relu, 2 Add``."""
        named = [f"{count} {op}" for op, count in self.ops.items()]
        return ", ".join(named[:3]) + (f" and {len(named) - 3} other ops" if len(named) > 3 else "")


def group_reasons(reasons: Iterable[tuple[str, str, str]]) -> list[ReasonGroup]:
    """Groups (name of a node, op, reason) by reason, the largest group first, quantizers alone last."""
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for entry in reasons:
        groups.setdefault(tuple(_PARTICULARS.split(entry[2])), []).append(entry)
    made = [
        ReasonGroup(
            _common_words([reason for _, _, reason in entries]),
            dict(Counter(op for _, op, _ in entries).most_common()),
            [name for name, _, _ in entries],
        )
        for entries in groups.values()
    ]
    return sorted(made, key=lambda group: (set(group.ops) <= _EDGES, -len(group.nodes)))


def _common_words(reasons: list[str]) -> str:
    """One reason for all, with two dots for the names and numbers in which they differ."""
    found = [_PARTICULARS.findall(reason) for reason in reasons]
    words = iter(
        [texts[0] if len(set(texts)) == 1 else _blank(texts[0]) for texts in zip(*found, strict=True)]
    )
    return _PARTICULARS.sub(lambda _: next(words), reasons[0])


def _blank(text: str) -> str:
    return {"'": "'..'", "[": "[..]"}.get(text[0], "..")


@dataclass
class Report:
    """The result of a conversion in words.

    Attributes:
        nodes: one entry per node of the input model.
        warnings: what the user should know beyond that.
        islands: the kept nodes that speak about quantized tensors and could have become lowbit nodes.
        quantized: whether the input model holds any quantized tensor.
        lowbit: whether it holds nodes of lowbit, which an earlier conversion made.
    """

    nodes: list[NodeReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    islands: list[NodeReport] = field(default_factory=list)
    quantized: bool = True
    lowbit: bool = False

    @property
    def remark(self) -> str | None:
        """One sentence where there was nothing to convert; None for any other model."""
        if self.converted:
            return None
        if self.lowbit:
            return "lowbit converted this model already; there was nothing left to convert"
        return None if self.quantized else NOT_QUANTIZED

    @property
    def reasons(self) -> list[ReasonGroup]:
        """Why nodes were kept, the reason of most nodes first."""
        return group_reasons((node.name, node.op_type, node.reason) for node in self.kept if node.reason)

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
        return {
            "nodes": [asdict(node) for node in self.nodes],
            "reasons": [asdict(group) for group in self.reasons],
            "warnings": list(self.warnings),
            "remark": self.remark,
        }


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
