"""Outcome: the result of scoring one row: a score, an abstention, a timeout or an error, never a silent 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """The four possible results of a reward function for a row."""

    SCORE = "score"
    ABSTAIN = "abstain"
    TIMEOUT = "timeout"
    ERROR = "error"


RETURNED = "returned"
"""Column with an agent's return value."""
FAILED = "agent failed"
"""Column for a row whose agent did not return: its outcome and the reason."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The outcome of one row.

    Example:
        Score(outcome=Outcome.SCORE, value=1.0)
    """

    outcome: Outcome
    """One of the four outcomes."""
    value: float | None = None
    """The score, finite also in float32; None for every other outcome."""
    message: str = ""
    """Reason of a failure, a few thousand characters at most; for a score, why the row was scored alone, or
    an agent's return value as JSON."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Score of each function, if several are summed."""
