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
