"""Inline: run all ranks in this process.

    one rank in all      submit runs the call at once, in the caller's thread: breakpoint() works
    several ranks        one thread per rank

Loop of a rank's thread
    consumes      calls submitted to its place, in submission order
    waits for     references in its arguments, made by calls submitted earlier
    unblocked by  those calls; every wait ends at the deadline
    produces      the values of its references
    shuts down    healthy: ``close`` after its last call. A failed call raises its error in the reader
                  and aborts the collective of its world; the thread continues. Killed or replaced: the
                  references fail at once, the running call goes on to its end, its result is refused, and
                  the thread ends
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.backend import (
    Backend,
    Place,
    Pool,
    RankCall,
    RankLost,
    Replacement,
    Site,
    devices_of,
)
from rillflow.workers.collectives import Ranks, SingleRank, Stranded, ThreadGroup, ThreadRanks


class InlineBackend(Backend):
    """Backend that runs calls in this process.

    Args:
        deadline_s: longest wait of a rank for an argument.
        load_s: see Backend.
    """

    def __init__(self, deadline_s: float = 3600.0, *, load_s: float = 0.0) -> None:
        super().__init__(deadline_s, load_s=load_s)
        self._sites: dict[Place, Site] = {}
        self._ranks: dict[Place, _InlineRank] = {}
        self._refused = 0

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self.devices = devices_of(pools, device)
        for world in dict.fromkeys(self._worlds[place] for place in found):
            self._join(world, has_threads=len(found) > 1)

    def _join(self, world: Sequence[Place], *, has_threads: bool) -> None:
        """Start the ranks of a world."""
        group = ThreadGroup(len(world), self._collective_s) if len(world) > 1 else None
        for index, place in enumerate(world):
            ranks: Ranks = SingleRank() if group is None else ThreadRanks(group, index)
            size = self.pools[place.pool]
            site = Site(place=place, ranks=ranks, pool_size=size, fetch=self._fetch)
            self._sites[place] = site
            self._ranks[place] = _InlineRank(site, group, has_thread=has_threads)

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        self.traffic.calls += 1
        whole = self._ranks[place].submit(work, arguments)
        if results == 1:
            return (whole,)
        return tuple(_Part(whole, index) for index in range(results))

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """See Backend."""
        whole = {each.whole if isinstance(each, _Part) else each for each in references}
        done, late = wait(whole, timeout=deadline_s, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()
        if late:
            raise TimeoutError
        return [reference.result() for reference in references]

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        return bool(reference.done())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """See Backend."""
        whole = {each.whole if isinstance(each, _Part) else each for each in references}
        return bool(wait(whole, timeout=deadline_s, return_when=FIRST_COMPLETED).done)

    def _connect_again(self, pools: Collection[str], deadline_s: float) -> None:
        """See Backend."""
        there = [rank for place, rank in self._ranks.items() if place.pool in pools and not rank.is_lost]
        idle = [rank.submit(_nothing, ()) for rank in there]
        if not wait(idle, timeout=deadline_s).not_done:
            for group in {rank.group for rank in there if rank.group is not None}:
                group.mend()

    def abandon(self) -> float:
        """See Backend."""
        self.recent.clear()
        for rank in self._ranks.values():
            rank.drop(Stranded("was abandoned", why="the run was stopped"))
        return super().abandon()

    def kill(self, place: Place) -> None:
        """End a rank as if its process had died; for tests of recovery.

        Its pending and later calls raise RankLost, and the collectives of its world break.
        """
        self._ranks[place].end(RankLost("was killed", why="the test asked for it"), self._refuse)

    def replace(self, places: Collection[Place]) -> Replacement:
        """See Backend; the new ranks are ready at once."""
        ended = self._all_of(places)
        self.recent.clear()  # their errors have been dealt with
        for place in ended:
            self._ranks[place].end(RankLost("was replaced", why="a new one has its place"), self._refuse)
        has_threads = len(self._ranks) > 1
        for world in dict.fromkeys(self._worlds[place] for place in ended):
            self._join(world, has_threads=has_threads)
        for place in ended:
            self.epochs[place] += 1
        done = Future[None]()
        done.set_result(None)
        return Replacement(ended, done)

    def close(self) -> None:
        """See Backend; waits for running calls."""
        for rank in self._ranks.values():
            rank.close(wait=False)
        for rank in self._ranks.values():
            rank.close(wait=True)
        self.pools.clear()
        self._ranks.clear()
        self._sites.clear()

    @property
    def refused(self) -> int:
        """See Backend: results of calls that were running when their rank was lost."""
        return self._refused

    def _refuse(self) -> None:
        self._refused += 1

    def _fetch(self, references: Sequence[Any], fields: Any = None) -> list[Any]:
        del fields  # all fields are present
        try:
            return self.read_all(references, self._deadline_s)
        except RankLost as lost:
            raise Stranded(lost.of("the rank of an argument"), why=lost.why, fix=lost.fix) from None
        except TimeoutError:
            raise ClusterError(
                f"an argument was not ready after {self._deadline_s:g} s",
                why="the call that returns it is still running or waiting",
            ) from None


class _InlineRank:
    """One rank: its site, its thread if it has one, and its calls that have not ended."""

    def __init__(self, site: Site, group: ThreadGroup | None, *, has_thread: bool) -> None:
        self.group = group
        """The collectives of its world; None if it is alone."""
        self._site = site
        name = f"{site.place.pool}-{site.place.rank}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name) if has_thread else None
        self._pending = set[Future[Any]]()
        self._running: Future[Any] | None = None
        self._lost: RankLost | None = None
        self._refuse: Callable[[], None] = _nothing
        self._lock = threading.Lock()

    @property
    def is_lost(self) -> bool:
        """Whether it was killed or replaced."""
        return self._lost is not None

    def submit(self, work: RankCall, arguments: tuple[Any, ...]) -> Future[Any]:
        """Run a call after those before it."""
        made = Future[Any]()
        with self._lock:
            if self._lost is not None:
                made.set_exception(self._lost)
                return made
            if self._thread is not None:
                self._pending.add(made)
                self._thread.submit(self._run, made, work, arguments)
        if self._thread is None:
            try:
                made.set_result(work(self._site, *arguments))
            except RankLost as lost:  # nobody else reads the result
                raise lost.death(self._site.place) from None
        return made

    def end(self, lost: RankLost, refuse: Callable[[], None]) -> None:
        """Fail all calls that have not ended, and all later ones; a second call has no effect."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost, self._refuse = lost, refuse
            pending, self._pending = self._pending, set()
        for each in pending:
            each.set_exception(lost)
        if self.group is not None:
            self.group.abort()
        if self._thread is None:
            self._site.stack.close()
        else:
            self._thread.submit(self._site.stack.close)
            self._thread.shutdown(wait=False)

    def drop(self, reason: Stranded) -> None:
        """Fail all calls that have not begun."""
        with self._lock:
            waiting = self._pending - {self._running}
            self._pending -= waiting
        for each in waiting:
            each.set_exception(reason)

    def close(self, *, wait: bool) -> None:
        """Close its resources after its running call; see ThreadPoolExecutor.shutdown for ``wait``."""
        if self.group is not None:
            self.group.abort()
        if self._thread is not None:
            self._thread.shutdown(wait=wait, cancel_futures=not self.is_lost)
        if wait and not self.is_lost:
            self._site.stack.close()

    def _run(self, made: Future[Any], work: RankCall, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if made not in self._pending:
                return
            self._running = made
        try:
            self._settle(made, work(self._site, *arguments), None)
        except BaseException as error:  # noqa: BLE001  the reader of the result raises it
            if self.group is not None:  # else the others would wait for this rank
                self.group.abort()
            self._settle(made, None, error)

    def _settle(self, made: Future[Any], value: Any, error: BaseException | None) -> None:
        """Set a call's result, unless the rank was lost meanwhile."""
        with self._lock:
            is_late = made not in self._pending
            self._pending.discard(made)
        if is_late:
            self._refuse()
        elif error is not None:
            made.set_exception(error)
        else:
            made.set_result(value)


def _nothing(*_: Any) -> None:
    """Do nothing."""


class _Part:
    """One element of the tuple that a call returns."""

    def __init__(self, whole: Future[Any], index: int) -> None:
        self.whole = whole
        self._index = index

    def result(self, timeout: float | None = None) -> Any:
        """Return the element once the call has finished."""
        return self.whole.result(timeout)[self._index]

    def done(self) -> bool:
        """Return whether the call has finished or failed."""
        return self.whole.done()
