"""Ranking: the records of a search, the best plans and why every other placement loses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rillflow.planner.evaluate import Evaluation
from rillflow.planner.plan import Plan


class Cause(StrEnum):
    """What a placement loses by."""

    MEMORY = "memory"
    """It does not fit."""
    TRANSFER = "transfer"
    """Rows or weights on their way between its pools."""
    TAIL = "tail"
    """Replicas that have run dry while the longest rows end."""
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
class Effort:
    """How much the search may look at before it is a heuristic, and what is asked of it."""

    kept: int = 10
    """Plans that are ranked."""
    allocations: int = 200_000
    """Of one placement, at once; of more those with the least bounds are kept, and the ranking says so."""
    solved: int = 5_000
    """Allocations of one placement that are solved exactly; where more could be best, the ranking says so."""
    explains: bool = True
    """Whether every placement but the best is asked why it loses."""
    first: int = 512
    """Allocations looked at first, to have a plan to beat."""


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
    """What it is behind the best by; none of the best itself, or where nobody asked."""
    why: str = ""
    """The same in words and numbers."""


@dataclass(frozen=True, kw_only=True)
class Loser:
    """A placement that is not among the best."""

    pools: tuple[tuple[str, ...], ...]
    """Names of the units of each pool."""
    freshness: int
    """How many versions old a trained token may be."""
    bound: float
    """No plan with this placement has a lower value; infinite where none fits."""
    found: Ranked | None
    """The best of it that was looked at; none where none fits, or nobody asked why."""
    cause: Cause | None
    """What it loses by."""
    why: str
    """The same in words and numbers."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the search did."""

    placements: int
    """Set partitions times freshness bounds."""
    bounded: int
    """Placements cut by their bound before any plan of them was solved."""
    allocations: int
    """Allocations whose bound did not cut them."""
    solved: int
    """Allocations solved exactly."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search."""

    best: tuple[Ranked, ...]
    """The best plan of each of the best placements, best first."""
    losers: tuple[Loser, ...]
    """Every other placement, by ascending bound."""
    counts: Counts
    """What the search did."""
    is_exact: bool
    """Whether nothing was left out for being too much."""
    bound: float
    """No plan at all has a lower value; that of the best where the search is exact."""
