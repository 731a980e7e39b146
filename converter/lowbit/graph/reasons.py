"""Why something does not apply, and at which node a step failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir

from lowbit.errors import LowBitError, raise_if_out_of_memory


@dataclass(frozen=True)
class Refusal:
    """The answer of a function that looked at a node and says no.

    Attributes:
        reason: what was expected and what was found, in one sentence that a user can act on.
    """

    reason: str


REASON = "lowbit.reason"
"""Key of a node's ``meta`` under which a frontend says why it left the node as it is."""

STAYS = "lowbit.stays"
"""Key of a node's ``meta`` that says why the node has to stay as it is: converting it has failed before."""


def has_to_stay(node: ir.Node) -> bool:
    """Whether no step may touch a node, since converting it has failed before."""
    return STAYS in node.meta


class StepError(Exception):
    """A step of the conversion failed for a reason that is no user's: a defect.

    Attributes:
        nodes: what it was working on; empty where that is unknown.
        error: what happened.
    """

    def __init__(self, nodes: Sequence[ir.Node], error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.nodes = tuple(nodes)
        self.error = error


@contextmanager
def working_on(*nodes: ir.Node) -> Iterator[None]:
    """Names the nodes that a step was working on when it failed."""
    try:
        yield
    except (LowBitError, StepError, MemoryError):
        raise
    except Exception as error:  # a defect may show as anything
        raise_if_out_of_memory(error)
        raise StepError(nodes, error) from error


def for_each(nodes: Iterable[ir.Node], step: Callable[[ir.Node], object]) -> None:
    """Takes a step at every node of a graph that does not have to stay.

    Args:
        nodes: the nodes as they are now; the step may change the graph.
        step: what is done.
    """
    for node in list(nodes):
        if not has_to_stay(node):
            with working_on(node):
                step(node)
