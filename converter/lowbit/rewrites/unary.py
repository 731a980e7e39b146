"""What ops on one quantized tensor have in common: pools, affine steps, requantization."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from lowbit.lowering.lowering import Lowering
from lowbit.lowering.stored import Order, Stored, channels_last
from lowbit.rewrites.clipped import Clipped
from lowbit.rewrites.operands import Activation
from lowbit.rewrites.rule import Region


@dataclass
class UnaryRegion(Region):
    """One quantized tensor, one op, one rounding; subclasses name the op and its geometry."""

    x: Activation
    clipped: Clipped
    nodes: Sequence[ir.Node]

    op_type = ""

    @property
    def core(self) -> ir.Node:  # type: ignore[override]
        """The op."""
        return self.clipped.core

    @property
    def codes(self) -> list[ir.Value]:
        """The operand."""
        return [self.x.codes]

    @abstractmethod
    def geometry(self) -> dict[str, Any]:
        """The op's own attributes."""

    def extra_inputs(self) -> dict[str, Any]:
        """The op's own inputs."""
        return {}

    def read_x(self, lowering: Lowering) -> Stored:
        """The operand, channels last unless a subclass knows better."""
        return lowering.channels_last(self.x.codes)

    def output_order(self, lowering: Lowering, x: Stored) -> Order:
        """How the output is stored: like x."""
        return x.order if len(x.order) == lowering.rank(self.clipped.result) else channels_last(len(x.order))

    def emit(self, lowering: Lowering) -> ir.Value:
        """Writes the node."""
        x = self.read_x(lowering)
        output, attributes = self.clipped.output(lowering)
        order = self.output_order(lowering, x)
        value = lowering.node(
            self.op_type,
            {
                "x": x.value,
                "x_scale": self.x.grid.scale,
                "x_zero_point": lowering.zero_point(x, self.x.grid),
                **self.extra_inputs(),
                **(output.inputs if output else {}),
            },
            {"x_encoding": x.encoding, **self.geometry(), **attributes},
            self.clipped.result,
            output.dtype if output else ir.DataType.FLOAT,
            order,
            origins=self.nodes,
        )
        self.clipped.define(lowering, value, output, order)
        return value
