"""Ranking: the records of a search, the best plans and what each is behind the best by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rillflow.planner.evaluate import Evaluation
from rillflow.planner.plan import Plan


class Cause(StrEnum):
    """What a placement is behind by."""

    TRANSFER = "transfer"
    """Rows or weights on their way between its pools."""
    IDLE = "idle"
    """Devices that wait for other pools."""
    SLOWER = "slower stages"
    """Stages that take longer on what they are given."""
    TURNS = "turns"
    """Stages one after another that the best plan runs side by side."""
    DEVICES = "devices"
    """More devices, or dearer ones, than what they gain is worth."""
    TIE = "tie"
    """Nothing: it is as good, and only the order of equal plans puts it behind."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One placement at its best."""

    plan: Plan
    """What to launch."""
    evaluation: Evaluation
    """What it costs."""
    value: float
    """The objective's; the less the better."""
    cause: Cause | None = None
    """What it is behind the best by; none of the best itself."""
    why: str = ""
    """The same in words and numbers."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search."""

    best: tuple[Ranked, ...]
    """The best plan found of each of the best placements, best first."""
    placements: int
    """Set partitions times freshness bounds that were looked at."""
    nowhere: int
    """Of those looked at one by one, the ones that fit on no allocation."""
