"""What came of scoring one row: a score, an abstention, a time-out or an error, never a silent 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """The four things a reward function can do with a row."""

    SCORE = "score"
    ABSTAIN = "abstain"
    TIMEOUT = "timeout"
    ERROR = "error"


RETURNED = "returned"
"""The column with what an agent returned."""
FAILED = "agent failed"
"""The column of a row whose agent did not return: its outcome, and what happened."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row's outcome.

    Example:
        Score(outcome=Outcome.SCORE, value=1.0)
    """

    outcome: Outcome
    """Which of the four."""
    value: float | None = None
    """The score, finite also in float32; None for every other outcome."""
    message: str = ""
    """What went wrong, a few thousand characters at most; on a score, why the row was scored alone, or what
    an agent returned, as JSON."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each function said, where several are summed."""
