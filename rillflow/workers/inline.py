"""Inline: run all ranks in this process.

    one rank in all      submit runs the call at once, in the caller's thread: breakpoint() works
    several ranks        one thread per rank

Loop of a rank's thread
    consumes      calls submitted to its place, in submission order
    waits for     references in its arguments, made by calls submitted earlier
    unblocked by  those calls; every wait ends at the deadline
    produces      the values of its references
    shuts down    healthy: ``close`` after its last call. A failed call raises its error in the reader
                  and aborts the collective of its group; the thread continues
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from rillflow.errors import ClusterError
from rillflow.workers.backend import Backend, Place, Pool, RankCall, Site, devices_of
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks


class InlineBackend(Backend):
    """Backend that runs calls in this process.

    Args:
        deadline_s: longest wait of a rank for another one.
    """

    def __init__(self, deadline_s: float = 3600.0) -> None:
        super().__init__(deadline_s)
        self._sites: dict[Place, Site] = {}
        self._threads: dict[Place, ThreadPoolExecutor] = {}
        self._groups: dict[str, ThreadGroup] = {}

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self.devices = devices_of(pools, device)
        for pool in pools:
            if pool.size > 1:
                self._groups[pool.name] = ThreadGroup(pool.size, self._deadline_s)
        for place in found:
            group = self._groups.get(place.pool)
            ranks: Ranks = SingleRank() if group is None else ThreadRanks(group, place.rank)
            self._sites[place] = Site(place=place, ranks=ranks, fetch=self._fetch)
            if len(found) > 1:
                name = f"{place.pool}-{place.rank}"
                self._threads[place] = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        self.traffic.calls += 1
        whole: Future[Any]
        if place in self._threads:
            whole = self._threads[place].submit(self._run, place, work, arguments)
        else:
            whole = Future()
            whole.set_result(work(self._sites[place], *arguments))
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

    def mend(self, pools: Collection[str], deadline_s: float) -> None:
        """See Backend."""
        idle = [thread.submit(int) for place, thread in self._threads.items() if place.pool in pools]
        if not wait(idle, timeout=deadline_s).not_done:
            for pool in self._groups.keys() & pools:
                self._groups[pool].mend()

    def close(self) -> None:
        """See Backend; waits for running calls."""
        for group in self._groups.values():
            group.abort()
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        for site in self._sites.values():
            site.stack.close()
        self.pools.clear()
        self._threads.clear()
        self._groups.clear()
        self._sites.clear()

    def _fetch(self, references: Sequence[Any], fields: Any = None) -> list[Any]:
        del fields  # all fields are present
        try:
            return self.read_all(references, self._deadline_s)
        except TimeoutError:
            raise ClusterError(
                f"an argument was not ready after {self._deadline_s:g} s",
                why="the call that returns it is still running or waiting",
            ) from None

    def _run(self, place: Place, work: RankCall, arguments: tuple[Any, ...]) -> Any:
        try:
            return work(self._sites[place], *arguments)
        except BaseException:
            group = self._groups.get(place.pool)
            if group is not None:  # else the others would wait for this rank
                group.abort()
            raise


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
