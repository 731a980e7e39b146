"""Why something does not apply."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """The answer of a function that looked at a node and says no.

    Attributes:
        reason: what was expected and what was found, in one sentence that a user can act on.
    """

    reason: str


REASON = "lowbit.reason"
"""Key of a node's ``meta`` under which a frontend says why it left the node as it is."""
