"""Moves: orders of tasks on devices, timed, and improved along the critical path.

    orders ─ retime ─> earliest start and remaining way of every task ─> critical pairs
       ^                                                                     │ swap the pair whose estimate is
       └─────────────────────────────────────────────────────────────────────┘ least and which is not tabu

Only a swap of two neighbouring critical tasks of a device can shorten a schedule, and such a swap never makes
devices wait in a circle (van Laarhoven et al., 1992). The estimate of a swap is that of Taillard (1994): it
times the two tasks alone. Memory is a condition of a swap: what the device holds between both tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from rillflow_parts.fusion.scheduling.work import NONE, FusedWork


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """Two neighbouring critical tasks of a device."""

    device: int
    place: int
    estimate_s: float


class Orders:
    """Orders of the tasks on every device, with their times."""

    def __init__(self, work: FusedWork, orders: Sequence[Sequence[int]]) -> None:
        self.work = work
        self.orders = [list(order) for order in orders]
        self.retime()

    def retime(self) -> None:
        """Compute ``starts``, the longest way from every start to the end, and the latency.

        Raises:
            ValueError: the orders make devices wait in a circle.
        """
        work, count = self.work, self.work.count
        self.left, self.right = [NONE] * count, [NONE] * count
        for order in self.orders:
            for one, following in pairwise(order):
                self.right[one], self.left[following] = following, one
        before, after, left, right = work.before, work.after, self.left, self.right
        seconds, lag = work.seconds, work.lag
        waits = [(before[task] != NONE) + (left[task] != NONE) for task in range(count)]
        open_ = [task for task in range(count) if not waits[task]]
        starts, sequence = [0.0] * count, []
        while open_:
            task = open_.pop()
            sequence.append(task)
            end = starts[task] + seconds[task]
            for following, arrives in ((after[task], True), (right[task], False)):
                if following != NONE:
                    ready = end + lag[following] if arrives else end
                    if ready > starts[following]:
                        starts[following] = ready
                    waits[following] -= 1
                    if not waits[following]:
                        open_.append(following)
        if len(sequence) < count:
            raise ValueError(f"{count - len(sequence)} tasks wait for each other in a circle")
        remaining = [0.0] * count
        for task in reversed(sequence):
            following, beside = after[task], right[task]
            way = remaining[following] + lag[following] if following != NONE else 0.0
            if beside != NONE and remaining[beside] > way:
                way = remaining[beside]
            remaining[task] = way + seconds[task]
        self.starts, self.remaining = starts, remaining
        self.latency_s = max(map(float.__add__, starts, remaining))

    def swaps(self) -> list[_Swap]:
        """Return the swaps of critical neighbours that the memory cap allows."""
        found = []
        work, starts, remaining = self.work, self.starts, self.remaining
        rounding = 1e-9 * self.latency_s
        least, cap = self.latency_s - rounding, work.problem.memory_bytes * (1 + 1e-9)
        for device, order in enumerate(self.orders):
            held = 0.0
            critical = [starts[task] + remaining[task] >= least for task in order]
            for place in range(len(order) - 1):
                one, two = order[place], order[place + 1]
                if (
                    critical[place]
                    and critical[place + 1]
                    and self._may_swap(one, two)
                    and held + work.bytes[two] <= cap
                    and starts[one] + work.seconds[one] >= starts[two] - rounding
                ):
                    found.append(_Swap(device=device, place=place, estimate_s=self._estimate_s(one, two)))
                held += work.bytes[one]
        return found

    def _estimate_s(self, one: int, two: int) -> float:
        """Return the longest way through two neighbours after their swap, if nothing else changes."""
        begin = max(self._end_s(self.left[one]), self._arrival_s(two))
        then = max(begin + self.work.seconds[two], self._arrival_s(one))
        last = max(self._way_s(self.right[two]), self._onward_s(one)) + self.work.seconds[one]
        whole = max(last, self._onward_s(two)) + self.work.seconds[two]
        return max(begin + whole, then + last)

    def _end_s(self, task: int) -> float:
        return 0.0 if task == NONE else self.starts[task] + self.work.seconds[task]

    def _way_s(self, task: int) -> float:
        return 0.0 if task == NONE else self.remaining[task]

    def _arrival_s(self, task: int) -> float:
        return self._end_s(self.work.before[task]) + self.work.lag[task]

    def _onward_s(self, task: int) -> float:
        following = self.work.after[task]
        return 0.0 if following == NONE else self.remaining[following] + self.work.lag[following]

    def shaken(self, draw: Random, swaps: int) -> Orders | None:
        """Return a copy with random swaps of neighbours, critical or not; None if devices would then wait in
        a circle. Such swaps open ways on which memory bars every critical one.
        """
        orders = [list(order) for order in self.orders]
        cap = self.work.problem.memory_bytes * (1 + 1e-9)
        for _ in range(swaps):
            order = draw.choice(orders)
            place = draw.randrange(len(order) - 1)
            one, two = order[place : place + 2]
            held = sum(self.work.bytes[task] for task in order[:place])
            if self._may_swap(one, two) and held + self.work.bytes[two] <= cap:
                order[place : place + 2] = two, one
        try:
            return Orders(self.work, orders)
        except ValueError:
            return None

    def _may_swap(self, one: int, two: int) -> bool:
        """Return whether two neighbours are neither of one micro-batch nor of one kind."""
        alike = abs(one - two) == 1 and self.work.bytes[one] == self.work.bytes[two]
        return self.work.after[one] != two and not alike

    def swap(self, device: int, place: int) -> None:
        """Swap two neighbours, and retime."""
        order = self.orders[device]
        order[place], order[place + 1] = order[place + 1], order[place]
        self.retime()


def improve(orders: Orders, *, bound_s: float, draw: Random, patience: int) -> int:
    """Shorten a schedule by tabu search; leave the best orders in place and return the number of moves.

    Args:
        orders: the schedule; its memory must be within the cap.
        bound_s: latency at which nothing is left to gain.
        draw: source of ties and of the moves for which a swap stays forbidden.
        patience: moves without a gain before the search ends.
    """
    best_s, best = orders.latency_s, [list(order) for order in orders.orders]
    forbidden: dict[tuple[int, int], int] = {}
    moves = stale = 0
    while stale < patience and best_s > bound_s * (1 + 1e-9):
        moves, stale = moves + 1, stale + 1
        allowed = []
        for swap in orders.swaps():
            one, two = orders.orders[swap.device][swap.place : swap.place + 2]
            if forbidden.get((one, two), 0) <= moves or swap.estimate_s < best_s:
                allowed.append((swap.estimate_s, draw.random(), swap))
        if not allowed:
            if not forbidden:
                break
            forbidden.clear()
            continue
        _, _, swap = min(allowed, key=lambda each: each[:2])
        one, two = orders.orders[swap.device][swap.place : swap.place + 2]
        forbidden[two, one] = moves + draw.randint(8, 20)
        orders.swap(swap.device, swap.place)
        if orders.latency_s < best_s * (1 - 1e-12):
            best_s, best, stale = orders.latency_s, [list(order) for order in orders.orders], 0
    orders.orders = best
    orders.retime()
    return moves
