"""A backend whose calls run in the order that a test chooses, one at a time, in this process.

submit ─> mailbox of the place ── chosen by the test, at every wait or look ──> the call runs ─> log
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from rillflow.workers.backend import Backend, Place, Pool, RankCall, RankLost, Replacement, Site
from rillflow.workers.collectives import SingleRank


class ChosenOrder(Backend):
    """Runs the first call of a mailbox when the test's choice names its place.

    Args:
        choose: ``choose(n)`` returns a number from 0 to n - 1; it picks a place with waiting calls, and whether
            a look at a call lets a waiting call run first.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        super().__init__()
        self._choose = choose
        self._mail: dict[Place, deque[tuple[Future[Any], RankCall, tuple[Any, ...]]]] = {}
        self._sites: dict[Place, Site] = {}
        self.lost: set[Place] = set()

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        for place in found:
            self._mail[place] = deque()
            self._sites[place] = Site(
                place=place, ranks=SingleRank(), pool_size=self.pools[place.pool], fetch=list
            )

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        made = Future[Any]()
        if place in self.lost:
            made.set_exception(RankLost("has died", why="the test ended it"))
        else:
            self._mail[place].append((made, work, arguments))
        return (made,)

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        while not all(each.done() for each in references):
            self.run_one()
        return [each.result() for each in references]

    def is_ready(self, reference: Any) -> bool:
        if not reference.done() and any(self._mail.values()) and self._choose(2):
            self.run_one()
        return bool(reference.done())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        while not any(each.done() for each in references):
            self.run_one()
        return True

    def run_one(self) -> None:
        """Run the first call of the mailbox that the test chooses."""
        waiting = [place for place, mail in self._mail.items() if mail]
        assert waiting, "something waits for a call that nobody made"
        place = waiting[self._choose(len(waiting))]
        made, work, arguments = self._mail[place].popleft()
        try:
            made.set_result(work(self._sites[place], *arguments))
        except Exception as error:  # the reader of the result raises it
            made.set_exception(error)

    def kill(self, place: Place) -> None:
        """End a place: its waiting and later calls raise RankLost."""
        self.lost.add(place)
        while self._mail[place]:
            self._mail[place].popleft()[0].set_exception(RankLost("has died", why="the test ended it"))

    @property
    def refused(self) -> int:
        return 0

    def replace(self, places: Collection[Place]) -> Replacement:
        raise NotImplementedError

    def close(self) -> None:
        self.pools.clear()
