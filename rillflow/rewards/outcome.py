"""Outcome: the result of scoring one row: a score, an abstention, a timeout or an error, never a silent 0.

    entry of the function ── verdict_of ──> verdict: JSON between processes ── is_verdict ──> Score

Standard library only.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rillflow.rewards.logged import Sums

VERDICT_CHARACTERS = 1000
"""Longest text about one row."""
VALUE_CHARACTERS = 200
"""Longest text about one value."""

_LARGEST_FLOAT32 = 3.4028234663852886e38

Verdict = float | str | dict[str, str] | None
"""A score, an error message, ``{"late": message}``, or None for an abstention."""


class Outcome(StrEnum):
    """The four possible results of a reward function for a row."""

    SCORE = "score"
    ABSTAIN = "abstain"
    TIMEOUT = "timeout"
    ERROR = "error"


FAILURES = (Outcome.ERROR, Outcome.TIMEOUT)
"""Outcomes of a function that failed on a row."""
RETURNED = "returned"
"""Column with an agent's return value."""
FAILED = "agent failed"
"""Column for a row whose agent did not return: its outcome and the reason."""
LOGGED = "agent metrics"
"""Column with the metrics of a row by name, each a total and a count, that its agent or environment logged.
Reward functions do not see it."""


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
    logged: Sums = field(default_factory=dict)
    """Metrics that the call logged, if the row is its first."""


def verdict_of(value: Any) -> Verdict:
    """Return a finite float32 number, None, or what is wrong with the value.

    An exception in place of a score is the row's error, a TimeoutError its timeout, as
    ``asyncio.gather(..., return_exceptions=True)`` returns them.
    """
    if value is None:
        return None
    if isinstance(value, Exception):
        text = f"{type(value).__name__}: {value}"[:VERDICT_CHARACTERS]
        return {"late": text} if isinstance(value, TimeoutError) else text
    if isinstance(value, str | bytes | bytearray):
        return f"the score is {shown_value(value)}, not a number"
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        return f"the score is {shown_value(value)}, not a number: {str(error)[:VALUE_CHARACTERS]}"
    if not math.isfinite(number):
        return f"the score is {number}, not a finite number"
    if abs(number) > _LARGEST_FLOAT32:
        return f"the score is {number}, outside the range of float32"
    return number


def shown_value(value: Any) -> str:
    return f"{reprlib.repr(value)[:VALUE_CHARACTERS]} ({type(value).__name__})"


def is_verdict(value: object) -> bool:
    """Return whether a value from another process is a score, a short enough sentence or an abstention."""
    if isinstance(value, str):
        return len(value) <= VERDICT_CHARACTERS
    return value is None or (isinstance(value, float) and verdict_of(value) == value)
