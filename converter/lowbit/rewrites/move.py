"""What ops that move codes have in common: they run on the stored tensor, with their axes rewritten."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from lowbit.graph.constants import is_known
from lowbit.graph.normal_form import NormalForm, is_op, rank_of
from lowbit.graph.opsets import has_code_kernel
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Stored
from lowbit.rewrites.rule import Context, Region


@dataclass
class MoveRegion(Region):
    """One op on codes; subclasses say what it does to the stored tensor.

    Attributes:
        core: the op.
        unread: whether no lowbit node reads its outputs.
    """

    core: ir.Node
    unread: bool

    @property
    def nodes(self) -> Sequence[ir.Node]:  # type: ignore[override]
        """The op alone."""
        return [self.core]

    @property
    def passive(self) -> bool:
        """Codes that no lowbit node reads are no reason to make them."""
        return self.unread

    @property
    def source(self) -> ir.Value:
        """The codes that are moved."""
        value = self.core.inputs[0]
        assert value is not None
        return value

    @property
    def codes(self) -> list[ir.Value]:
        """The codes that are moved."""
        return [self.source]

    @property
    def reals(self) -> list[ir.Value]:
        """What something else computes and says how they are moved: a new shape, where to cut."""
        return [value for value in self.core.inputs[1:] if value is not None and not is_known(value)]

    def emit(self, lowering: Lowering) -> ir.Value | None:
        """Moves the stored tensor; codes that no lowbit node makes or reads stay with the node as it is.

        That is, where ONNX Runtime has such a node for their type.
        """
        code_range = lowering.form.code_range(self.source)
        assert code_range is not None, "a move of codes"
        runs = has_code_kernel(lowering.graph, self.core, code_range.dtype)
        if self.unread and runs and lowering.is_original(self.source):
            lowering.keep(self.core)
            return None
        return self.move(lowering)

    @abstractmethod
    def move(self, lowering: Lowering) -> ir.Value | None:
        """Writes what is needed and defines how the outputs are stored."""


@dataclass
class SpatialMoveRegion(MoveRegion):
    """A lowbit op on images of codes, channels last; to it the codes of a bipolar tensor are like any others.

    Attributes:
        op_type: the op.
        geometry: its attributes besides the encoding.
    """

    op_type: str
    geometry: dict[str, Any]

    def move(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        output = self.core.outputs[0]
        stored = lowering.channels_last(self.source, bipolar=True)
        value = lowering.node(
            self.op_type,
            {"x": stored.value},
            {"x_encoding": stored.byte_encoding, **self.geometry},
            output,
            stored_type(stored),
            stored.order,
            origins=self.nodes,
        )
        lowering.define_codes(output, replace(stored, value=value))
        return value


_KEEPS_RANK = (
    "MaxPool", "Resize", "DepthToSpace", "SpaceToDepth", "Transpose", "Pad", "Slice", "Split", "Tile",
)  # fmt: skip


def stored_type(stored: Stored) -> ir.DataType:
    """Element type of a stored tensor."""
    return ir.DataType.INT8 if stored.signed else ir.DataType.UINT8


def moves_codes(context: Context, sink: ir.Node, op_type: str) -> bool | Refusal | None:
    """Whether a node is an op on codes.

    Returns:
        None if it is something else; a refusal if its codes cannot be followed; else whether no lowbit node
        reads its outputs.
    """
    if not is_op(sink, op_type) or not holds_codes(context.form, sink.inputs[0]):
        return None
    rank = None if sink.inputs[0] is None else rank_of(sink.inputs[0])
    if rank is None or rank_of(sink.outputs[0]) is None:
        return Refusal("the rank of its codes is unknown")
    if op_type in _KEEPS_RANK and rank_of(sink.outputs[0]) != rank:
        return Refusal(f"it is declared to make rank {rank_of(sink.outputs[0])} of rank {rank}")
    return not any(output in context.wanted for output in sink.outputs)


def holds_codes(form: NormalForm, value: ir.Value | None) -> bool:
    """Whether a value is a tensor of codes, not of real numbers."""
    return value is not None and form.code_range(value) is not None
