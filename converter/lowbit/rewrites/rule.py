"""What a rewrite rule is.

A rule looks at one node, the *sink*, and answers whether a region of the graph that ends there is one integer
operation. It only reads the graph. The answer is a :class:`Region`, which knows what it reads and how to
write itself; a :class:`~lowbit.graph.reasons.Refusal` when the rule is about such nodes but cannot keep their
numbers; or None when it is about something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.graph.normal_form import NormalForm
from lowbit.graph.reasons import Refusal
from lowbit.lowering.lowering import Lowering


@dataclass(frozen=True)
class Context:
    """What every rule may ask.

    Attributes:
        form: the graph.
        round_bias: whether a bias off the accumulator's grid may be rounded onto it.
        wanted: the codes that regions found so far read. Sinks are visited back to front, so that the readers
            of a tensor are known before its maker.
        aside: cores of regions that are not to be converted, see :mod:`lowbit.rewrites.guard`.
    """

    form: NormalForm
    round_bias: bool
    wanted: set[ir.Value]
    aside: Set[ir.Node] = frozenset()


class Region(ABC):
    """Nodes that become one lowbit node."""

    core: ir.Node
    """The node that gives the region its name and its kind."""
    nodes: Sequence[ir.Node]
    """All nodes it covers, the core included."""

    @property
    @abstractmethod
    def codes(self) -> list[ir.Value]:
        """The tensors of codes that it reads."""

    @property
    def reals(self) -> list[ir.Value]:
        """The float tensors that it reads."""
        return []

    @property
    def passive(self) -> bool:
        """Whether it only hands codes on, so that it is no reason to make them."""
        return False

    @property
    def notes(self) -> list[str]:
        """What the user should know about it."""
        return []

    @abstractmethod
    def emit(self, lowering: Lowering) -> ir.Value | None:
        """Writes the node and defines how its output is stored.

        Returns:
            The new node's output; None if the region needs no node of its own.
        """


Rule = Callable[[Context, ir.Node], Region | Refusal | None]
