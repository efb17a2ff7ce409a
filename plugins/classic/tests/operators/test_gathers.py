"""A backend whose calls run in the order that a test chooses, one at a time, in this process.

submit ─> mailbox of the place ── chosen by the test, at every wait or look ──> the call runs ─> log
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import ClusterError, GraphError
from rillflow.workers.backend import Backend, Place, Pool, RankCall, RankLost, Replacement, Site
from rillflow.workers.collectives import SingleRank
from rillflow_classic.operators.context import NotReady, Operator, PlanContext
from rillflow_classic.operators.iterators import concurrently, from_workers, queue
from rillflow_classic.worker_set import WorkerSet


class ChosenOrder(Backend):
    """Runs the first call of a mailbox when the test's choice names its place.

    Args:
        choose: ``choose(n)`` returns a number from 0 to n - 1. It picks a place with waiting calls, and
            whether a waiting call runs before a look at another one.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        super().__init__()
        self._choose = choose
        self.mail: dict[Place, deque[tuple[Future[Any], RankCall, tuple[Any, ...]]]] = {}
        self.sites: dict[Place, Site] = {}
        self.lost: set[Place] = set()
        self.hanging: set[Place] = set()

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        for place in found:
            self.mail[place] = deque()
            self.sites[place] = Site(
                place=place, ranks=SingleRank(), pool_size=self.pools[place.pool], fetch=list
            )

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        made = Future[Any]()
        if place in self.lost:
            made.set_exception(RankLost("has died", why="the test ended it"))
        else:
            self.mail[place].append((made, work, arguments))
        return (made,)

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        while not all(each.done() for each in references):
            self.run_one()
        return [each.result() for each in references]

    def is_ready(self, reference: Any) -> bool:
        can_run = any(mail and not self.hangs(place) for place, mail in self.mail.items())
        if not reference.done() and can_run and self._choose(2):
            self.run_one()
        return bool(reference.done())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        while not any(each.done() for each in references):
            self.run_one()
        return True

    def run_one(self) -> None:
        """Run the first call of the mailbox that the test chooses."""
        waiting = [place for place, mail in self.mail.items() if mail and not self.hangs(place)]
        assert waiting, "something waits for a call that nobody made"
        place = waiting[self._choose(len(waiting))]
        made, work, arguments = self.mail[place].popleft()
        try:
            made.set_result(work(self.sites[place], *arguments))
        except Exception as error:  # noqa: BLE001  the reader of the result raises it
            made.set_exception(error)

    def kill(self, place: Place) -> None:
        """End a place: its waiting and later calls raise RankLost."""
        self.lost.add(place)
        while self.mail[place]:
            self.mail[place].popleft()[0].set_exception(RankLost("has died", why="the test ended it"))

    @property
    def refused(self) -> int:
        return 0

    def replace(self, places: Collection[Place]) -> Replacement:
        raise NotImplementedError

    def close(self) -> None:
        self.pools.clear()

    def hangs(self, place: Place) -> bool:
        """Return whether the first call of a mailbox never ends."""
        return place in self.hanging and self.mail[place][0][1].__name__ == "_next"

    def waiting(self, name: str) -> int:
        """Return the number of calls of a function that have not run."""
        return sum(work.__name__ == name for mail in self.mail.values() for _, work, _ in mail)


class Player:
    """A worker whose items say which weights made them."""

    def __init__(self, index: int) -> None:
        self.index, self.played, self.version = index, 0, 0

    def play(self) -> tuple[int, int, int]:
        """Return the worker, the number of its item, and the version of its weights."""
        self.played += 1
        return self.index, self.played - 1, self.version

    def load(self, version: int) -> None:
        self.version = version


def players(
    count: int, choose: Callable[[int], int] = lambda n: n - 1
) -> tuple[ChosenOrder, WorkerSet[Player]]:
    backend = ChosenOrder(choose)
    backend.open([Pool(name="players", size=count)])
    return backend, WorkerSet(backend, "players", Player)


orders = st.randoms(use_true_random=False).map(lambda random: lambda count: random.randrange(count))
counts = st.integers(1, 4)


@settings(deadline=None)
@given(count=counts, choose=orders)
def test_no_worker_runs_between_two_rounds_and_messages_precede_the_next_round(
    count: int, choose: Callable[[int], int]
) -> None:
    backend, workers = players(count, choose)
    for version, batch in enumerate(islice(from_workers(workers, "play").batch_across_workers(), 5)):
        assert batch == [(worker, version, version) for worker in range(count)]
        assert backend.waiting("_next") == 0, "a source runs while its last item is handled"
        workers.call_all("load", version + 1)


@settings(deadline=None)
@given(count=counts, choose=orders, when=st.integers(0, 20))
def test_gather_sync_has_the_same_barrier_between_rounds(
    count: int, choose: Callable[[int], int], when: int
) -> None:
    """A message sent at any item, to every worker, is seen by exactly the items of later rounds."""
    backend, workers = players(count, choose)
    for place, (worker, played, version) in enumerate(
        islice(from_workers(workers, "play").gather_sync(), 24)
    ):
        assert (played, worker) == divmod(place, count)
        assert version == (played > when // count)
        assert backend.waiting("_next") == 0
        if place == when:
            workers.call_all("load", 1)


@settings(deadline=None)
@given(count=counts, choose=orders, num_async=st.integers(1, 4))
def test_gather_async_calls_a_worker_again_after_its_item_was_handled(
    count: int, choose: Callable[[int], int], num_async: int
) -> None:
    """The source of item m loads version m + 1; its item m then lags by at most num_async - 1 items."""
    backend, workers = players(count, choose)
    handled = Counter[int]()
    plan = from_workers(workers, "play").gather_async(num_async).zip_with_source()
    for source, (worker, played, version) in islice(plan, 30):
        assert source.index == worker
        assert played == handled[worker], "items of one worker come in its order"
        assert played - (num_async - 1) <= version <= played
        assert backend.waiting("_next") <= num_async * count - 1, "the source of this item is not called yet"
        handled[worker] += 1
        source.call("load", handled[worker])


def test_the_lag_of_gather_async_reaches_its_bound() -> None:
    """Otherwise the test above could pass with fewer calls in flight than were asked for."""
    for num_async in (1, 2, 4):
        _, workers = players(1)
        lags = []
        for source, (_, played, version) in islice(
            from_workers(workers, "play").gather_async(num_async).zip_with_source(), 10
        ):
            lags.append(played - version)
            source.call("load", played + 1)
        assert max(lags) == num_async - 1


@settings(deadline=None)
@given(count=st.integers(2, 4), choose=orders)
def test_gather_async_returns_a_finished_item_although_others_still_run(
    count: int, choose: Callable[[int], int]
) -> None:
    """All items come from one worker, if the calls of the others never end."""
    backend, workers = players(count, choose)
    backend.hanging = {Place("players", rank) for rank in range(count - 1)}
    items = list(islice(from_workers(workers, "play").gather_async(), 6))
    assert items == [(count - 1, number, 0) for number in range(6)]


def test_transforms_before_a_gather_run_on_the_source_and_later_ones_here() -> None:
    _, workers = players(2)

    def placed(context: PlanContext) -> Callable[[Any], Any]:
        where = None if context.worker is None else context.worker.index
        return lambda item: (*item, where)

    note = Operator(label="note", begin=placed)
    plan = from_workers(workers, "play").for_each(note).gather_sync().for_each(note)
    assert list(islice(plan, 2)) == [(0, 0, 0, 0, None), (1, 0, 0, 1, None)]


def test_transforms_of_a_worker_keep_their_state_between_calls() -> None:
    _, workers = players(2)
    plan = from_workers(workers, "play").filter(lambda item: item[1] % 2 == 1).batch(2).gather_sync()
    assert list(islice(plan, 2)) == [[(0, 1, 0), (0, 3, 0)], [(1, 1, 0), (1, 3, 0)]]


def test_nothing_starts_before_a_plan_is_iterated_and_nothing_stays_after_it() -> None:
    backend, workers = players(2)
    plan = from_workers(workers, "play").for_each(lambda item: item).gather_async(2)
    plan.check()
    plan.graph("mine")
    assert not any(backend.mail.values()) and all(len(site.objects) == 1 for site in backend.sites.values())
    items = iter(plan)
    next(items)
    items.close()
    while any(backend.mail.values()):
        backend.run_one()
    assert all(set(site.objects) == {"players"} for site in backend.sites.values())


def test_two_iterators_of_the_same_workers_go_on_independently() -> None:
    _, workers = players(2)
    one, other = (iter(from_workers(workers, "play").batch_across_workers()) for _ in range(2))
    assert [next(one), next(other), next(one)] == [[(0, n, 0), (1, n, 0)] for n in range(3)]


@pytest.mark.parametrize("gather", ["gather_sync", "gather_async", "batch_across_workers"])
def test_a_lost_worker_is_left_out_and_the_others_go_on(gather: str) -> None:
    backend, workers = players(3)
    context = PlanContext()
    items = getattr(from_workers(workers, "play"), gather)().run(context)
    for _ in range(3):
        next(items)
    backend.kill(Place("players", 1))
    later = [next(items) for _ in range(6)]
    if gather == "batch_across_workers":
        assert {tuple(worker for worker, *_ in batch) for batch in later} == {(0, 2)}
    elif gather == "gather_sync":
        assert {worker for worker, *_ in later} == {0, 2}
    assert context.metrics["actor/lost/sum"].value == 1
    assert context.notes == ["worker 1 of players is left out: has died\n  why: the test ended it"]


@pytest.mark.parametrize("gather", ["gather_sync", "gather_async", "batch_across_workers"])
def test_a_plan_without_any_worker_left_ends_with_an_error(gather: str) -> None:
    backend, workers = players(2)
    items = iter(getattr(from_workers(workers, "play"), gather)())
    next(items)
    for rank in range(2):
        backend.kill(Place("players", rank))
    with pytest.raises(ClusterError, match="no worker of 'players' is left; there were 2"):
        for _ in range(4):
            next(items)


def test_an_error_in_a_worker_reaches_the_reader() -> None:
    _, workers = players(2)
    plan = from_workers(workers, "play").for_each(lambda item: item[3]).gather_async()
    with pytest.raises(IndexError):
        next(iter(plan))


def test_a_worker_without_an_item_is_asked_again() -> None:
    _, workers = players(2)

    def odd(player: Player) -> Any:
        found = player.play()
        return found if found[1] % 2 else NotReady()

    for gather in ("gather_sync", "gather_async"):
        items = islice(getattr(from_workers(workers, odd), gather)(), 6)
        assert all(played % 2 for _, played, _ in items)


@settings(deadline=None)
@given(choose=orders)
def test_items_know_their_source_behind_a_queue_and_beside_other_flows(choose: Callable[[int], int]) -> None:
    _, workers = players(3, choose)
    put, taken = queue(2)
    flow = from_workers(workers, "play").gather_async(2).for_each(put)
    behind = taken.for_each(lambda item: [item, item]).flatten().zip_with_source()
    beside = from_workers(workers, "play").gather_async().zip_with_source()
    plan = concurrently([flow, behind, beside], "async", output_indexes=[1, 2])
    assert all(source.index == worker for source, (worker, *_) in islice(plan, 40))


def noted(item: Any) -> Any:
    return item


def test_a_parallel_iterator_is_not_iterated() -> None:
    _, workers = players(2)
    parallel = from_workers(workers, "play").for_each(noted)
    for use in (parallel.check, lambda: iter(parallel), lambda: concurrently([parallel])):
        with pytest.raises(GraphError, match="the items of noted are on players"):
            use()


def test_a_queue_is_not_filled_on_workers() -> None:
    _, workers = players(2)
    with pytest.raises(GraphError, match="enqueue 4 runs on players"):
        from_workers(workers, "play").for_each(queue(4)[0])
