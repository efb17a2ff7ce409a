"""Search for a fused schedule: random paces, list schedules to and fro, moves on the critical path.

paces of both pipelines ─> targets ─> list_schedule, to and fro ─> moves on the best ones ─> FusedSchedule
      ^ near the eight best ones, or new                                  │
      └───────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from rillflow_parts.fusion.scheduling.listing import Pace, drawn_pace, in_turn, list_schedule, near, targets
from rillflow_parts.fusion.scheduling.moves import Orders, improve
from rillflow_parts.fusion.scheduling.problem import FusedProblem, FusedSchedule, lower_bound
from rillflow_parts.fusion.scheduling.work import FusedWork

BUDGET = 20_000
"""Schedules that a search times before it gives up; most problems need a few hundred."""
ROUNDS = 4
"""Pairs of paces that a search follows before its first moves."""
_ELITE, _MOVED = 8, 4
"""Paces that are varied, and the rank from which a schedule is worth moves."""
_PASSES, _PATIENCE = 4, 200
"""List schedules, and moves, without a gain before the next pace."""
_PATIENT = 0.1
"""Largest share of the budget for moves without a gain: a small budget is better spent on paces."""
_SHAKEN = 0.05
"""Share of rounds that shake the best schedule although their list schedules came to an end."""
_RENEWED = 2_000
"""Schedules without a gain before the search forgets its paces."""


class _Search:
    """State of one search."""

    def __init__(self, problem: FusedProblem, seed: int) -> None:
        self.works = FusedWork(problem), FusedWork(problem.reversed_in_time())
        self.bound_s = lower_bound(problem)
        self.left, self.renewed_at, self.draw = 0, -_RENEWED, Random(seed)
        self.patience = _PATIENCE
        self.elite: list[tuple[float, tuple[Pace, Pace]]] = []
        self.turns = [0] * problem.ascending.micro_batches + [1] * problem.descending.micro_batches
        self.best = Orders(self.works[0], in_turn(self.works[0], self.turns))
        self._move(Orders(self.works[0], in_turn(self.works[0], self.turns[::-1])))

    @property
    def is_at_bound(self) -> bool:
        return self.best.latency_s <= self.bound_s * (1 + 1e-9)

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.is_at_bound

    def list_schedules(self, rounds: int) -> FusedSchedule:
        """Follow pairs of paces without moves."""
        for _ in range(rounds):
            if not self.is_at_bound:
                self.round()
        return self.works[0].schedule(self.best.starts)

    def run(self, budget: int, begin: FusedSchedule | None) -> FusedSchedule:
        """Search until the bound is reached or the budget is spent, what was spent before included."""
        self.left += budget
        self.patience = max(1, min(_PATIENCE, int(_PATIENT * budget)))
        self.renewed_at = self.left - _RENEWED
        for turns in (self.turns, self.turns[::-1]):
            self._move(Orders(self.works[0], in_turn(self.works[0], turns)))
        if begin is not None:
            starts = self.works[0].starts(begin)
            is_within = max(begin.peak_bytes) <= self.works[0].problem.memory_bytes * (1 + 1e-9)
            if is_within and begin.latency_s < self.best.latency_s:
                self.best = Orders(self.works[0], self.works[0].orders(starts))
            if not self.is_over:
                self._follow(starts)
        while not self.is_over:
            self.round()
        return self.works[0].schedule(self.best.starts)

    def round(self) -> None:
        """Follow a pair of paces; with budget left, improve the result by moves."""
        paces = self._paces()
        slack = self.draw.random() ** 2 * (self.best.latency_s - self.bound_s)
        found = self._follow(targets(self.works[0], paces, self.bound_s + slack))
        if found is None or self.draw.random() < _SHAKEN:
            self._shake()
        if found is not None:
            if not self.elite or found < self.elite[0][0]:
                self.renewed_at = self.left - _RENEWED
            self.elite = sorted([*self.elite, (found, paces)], key=lambda each: each[0])[:_ELITE]
        if self.left < self.renewed_at:
            self.elite, self.renewed_at = [], self.left - _RENEWED

    def _shake(self) -> None:
        """Improve the best schedule after some random swaps, or new orders of random turns.

        Both matter where memory is so scarce that list schedules end in waiting.
        """
        self.left -= 1
        orders: Orders | None
        if self.draw.random() < 0.5:
            orders = self.best.shaken(self.draw, self.draw.randint(1, 8))
        else:
            turns = self.draw.sample(self.turns, len(self.turns))
            orders = Orders(self.works[0], in_turn(self.works[0], turns))
        if orders is not None:
            self._move(orders)

    def _paces(self) -> tuple[Pace, Pace]:
        if self.elite and self.draw.random() < 0.6:
            one, two = self.draw.choice(self.elite)[1]
            return near(one, self.draw), near(two, self.draw)
        return drawn_pace(self.draw), drawn_pace(self.draw)

    def _follow(self, wanted: Sequence[float]) -> float | None:
        """Return the latency that targets lead to, by list schedules and moves; None if they lead nowhere."""
        starts = self._to_and_fro(wanted)
        if starts is None:
            return None
        orders = Orders(self.works[0], self.works[0].orders(starts))
        if len(self.elite) < _MOVED or orders.latency_s <= self.elite[_MOVED - 1][0]:
            self._move(orders)
        elif orders.latency_s < self.best.latency_s:
            self.best = orders
        return orders.latency_s

    def _move(self, orders: Orders) -> None:
        """Improve orders by moves, and keep them if they are the best."""
        if not self.is_over:
            patience = min(self.patience, self.left)
            self.left -= improve(orders, bound_s=self.bound_s, draw=self.draw, patience=patience)
        if orders.latency_s < self.best.latency_s:
            self.best = orders

    def _to_and_fro(self, wanted: Sequence[float]) -> list[float] | None:
        """Return the shortest of the list schedules, made forwards and backwards in turn."""
        best: list[float] | None = None
        best_s, stale, way, reserve = float("inf"), 0, 0, False
        shaken = 0.5 * self.works[0].seconds[0] if self.draw.random() < 0.25 else 0.0
        while stale < _PASSES:
            work = self.works[way]
            starts = list_schedule(work, wanted, reserve=reserve)
            self.left -= 1
            if starts is None:
                if reserve:
                    break
                reserve = True
                continue
            latency_s = max(map(float.__add__, starts, work.seconds))
            turned = work.reversed_in_time(starts)
            stale += 1
            if latency_s < best_s:
                best, best_s, stale = turned if way else starts, latency_s, 0
            if best_s <= self.bound_s * (1 + 1e-9):
                break
            wanted, way = [one + self.draw.uniform(-shaken, shaken) for one in turned], 1 - way
        return best


def schedule(
    problem: FusedProblem, *, budget: int = BUDGET, seed: int = 0, begin: FusedSchedule | None = None
) -> FusedSchedule:
    """Return the shortest schedule found within the memory cap.

    The result is at worst one pipeline after the other. It depends on the arguments alone.

    Args:
        problem: two pipelines and the memory cap.
        budget: schedules to time at most, up to a search's last round of moves.
        seed: of the random draws.
        begin: schedule of the same pipelines whose order is tried first; it may exceed the cap.
    """
    search = _Search(problem, seed)
    search.list_schedules(ROUNDS)
    return search.run(budget, begin)


def quick_schedule(problem: FusedProblem, *, rounds: int = ROUNDS, seed: int = 0) -> FusedSchedule:
    """Return the shortest of a few list schedules, without moves: for comparing many problems.

    Args:
        problem: two pipelines and the memory cap.
        rounds: pairs of paces to follow, up to some dozen list schedules each.
        seed: of the random draws.
    """
    return _Search(problem, seed).list_schedules(rounds)
