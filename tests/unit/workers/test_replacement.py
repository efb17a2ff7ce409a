"""Ranks that are killed and replaced, as threads: lost results, continued calls, and state of a new rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rillflow.errors import ClusterError
from rillflow.placement.mesh import Mesh
from rillflow.records.batch import Batch, row_ids
from rillflow.records.row import RowId
from rillflow.workers.backend import Place, Pool, RankDied, RankLost, Site
from rillflow.workers.collectives import Stranded
from rillflow.workers.endpoint import endpoint, endpoints_of
from rillflow.workers.group import Group
from rillflow.workers.inline import InlineBackend
from rillflow.workers.restarts import RestartBudget
from rillflow.workers.transfer import DP

WAIT_S = 20.0
BATCH = Batch(ids=row_ids([RowId(0, index, 0) for index in range(4)]), fields={"x": torch.arange(4.0)})
POOLS = [
    Pool(name="main", size=1),
    Pool(name="answers", size=4, world=2),
    Pool(name="scores", size=2, world=1),
]


class Counter:
    """Counts its calls."""

    def __init__(self, site: Site) -> None:
        self.site, self.calls = site, 0

    @endpoint(DP, writes=("calls",))
    def count(self, batch: Batch) -> Batch:
        self.calls += 1
        return Batch(ids=batch.ids, fields={"calls": torch.full((len(batch),), self.calls)})


@pytest.fixture
def backend() -> Iterator[InlineBackend]:
    made = InlineBackend(WAIT_S)
    made.open(POOLS)
    yield made
    made.close()


def total(site: Site, number: float) -> float:
    """Return the sum over the rank's world."""
    tensor = torch.tensor([number])
    site.ranks.sum_([tensor])
    return float(tensor)


def sums(backend: InlineBackend, places: list[Place]) -> list[float]:
    made = [backend.submit(place, total, float(place.rank))[0] for place in places]
    found: list[float] = backend.read_all(made, WAIT_S)
    return found


def answers(*ranks: int) -> list[Place]:
    return [Place("answers", rank) for rank in ranks]


def test_the_death_of_a_rank_names_its_node_only_if_that_is_another_machine() -> None:
    lost, place = RankLost("has died", why="killed", fix="look"), Place("main", 1)
    here, there = lost.death(place), lost.death(place, "10.0.0.9")
    assert (here.what, here.place) == ("rank 1 of pool 'main' has died", place)
    assert there.what == "rank 1 of pool 'main' on node 10.0.0.9 has died"
    assert (there.why, there.fix, there.pool) == ("killed", "look", "main")


def test_collectives_are_those_of_a_world(backend: InlineBackend) -> None:
    assert sums(backend, answers(0, 1, 2, 3)) == [1.0, 1.0, 5.0, 5.0]
    assert sums(backend, [Place("scores", 0), Place("scores", 1)]) == [0.0, 1.0]
    assert backend.world_of(Place("answers", 2)) == tuple(answers(2, 3))
    assert backend.world_of(Place("main", 0)) == (Place("main", 0),)


@pytest.mark.parametrize("world", [3, 8, -1])
def test_worlds_that_do_not_divide_a_pool_are_refused(world: int) -> None:
    with pytest.raises(ClusterError, match=f"pool 'a' of 4 has worlds of {world} ranks"):
        InlineBackend().open([Pool(name="a", size=4, world=world)])


def test_a_killed_rank_loses_its_calls_and_its_world_and_nothing_else(backend: InlineBackend) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(site: Site) -> str:
        begun.set()
        go_on.wait(WAIT_S)
        return "late"

    (before,) = backend.submit(Place("answers", 0), total, 0.0)
    (peer,) = backend.submit(Place("answers", 1), total, 0.0)
    assert backend.read_all([before, peer], WAIT_S) == [0.0, 0.0]
    (running,), (waiting,) = (backend.submit(Place("answers", 0), work) for _ in range(2))
    (stranded,) = backend.submit(Place("answers", 1), total, 1.0)
    begun.wait(WAIT_S)
    backend.kill(Place("answers", 0))
    backend.kill(Place("answers", 0))
    (later,) = backend.submit(Place("answers", 0), work)
    for each in (running, waiting, later):
        assert backend.is_ready(each)
        with pytest.raises(RankLost, match="was killed"):
            backend.read_all([each], 0.0)
    with pytest.raises(Stranded):
        backend.read_all([stranded], WAIT_S)
    assert backend.read_all([before], 0.0) == [0.0], "what was complete stays readable"
    assert sums(backend, answers(2, 3)) == [5.0, 5.0]
    go_on.set()


def test_a_world_is_replaced_whole_in_a_new_epoch(backend: InlineBackend) -> None:
    group = Group("counter", endpoints_of(Counter), mesh=Mesh.of(dp=4), pool="answers", backend=backend)
    group.start(Counter)
    assert group.call("count", BATCH).read(WAIT_S).dense("calls").tolist() == [1, 1, 1, 1]
    backend.kill(Place("answers", 3))
    with pytest.raises(RankDied, match="rank 3 of pool 'answers' was killed") as caught:
        group.call("count", BATCH).read(WAIT_S)
    assert caught.value.place == Place("answers", 3) and caught.value.pool == "answers"
    replacement = backend.replace([Place("answers", 3)])
    assert replacement.places == tuple(answers(2, 3)) and replacement.is_ready
    replacement.read(WAIT_S)
    assert [backend.epochs[place] for place in answers(0, 1, 2, 3)] == [0, 0, 1, 1]
    assert sums(backend, answers(0, 1, 2, 3)) == [1.0, 1.0, 5.0, 5.0]
    with pytest.raises(ClusterError, match=r"there is no counter on rank [23] of pool 'answers'"):
        group.call("count", BATCH).read(WAIT_S)
    made = group.begin_restart([2, 3], Counter)
    made.read(WAIT_S)
    assert made.is_ready
    assert group.call("count", BATCH).read(WAIT_S).dense("calls").tolist() == [4, 4, 1, 1]


def test_the_error_of_a_role_that_cannot_be_made_again_is_raised(backend: InlineBackend) -> None:
    def no_weights(site: Site) -> None:
        raise OSError(f"no weights on {site.place}")

    group = Group("counter", endpoints_of(Counter), mesh=Mesh.of(dp=2), pool="scores", backend=backend)
    group.start(Counter)
    backend.replace([Place("scores", 1)]).read(WAIT_S)
    with pytest.raises(ClusterError, match=r"OSError in making counter on rank 1 .*: no weights on rank 1"):
        group.restart([1], no_weights, WAIT_S)


def test_a_result_of_an_old_epoch_is_refused_and_counted(backend: InlineBackend) -> None:
    """The thread of a replaced rank cannot be ended; its result is ignored."""
    begun, go_on, ended = (threading.Event() for _ in range(3))

    def slow(site: Site) -> str:
        begun.set()
        go_on.wait(WAIT_S)
        site.stack.callback(ended.set)
        return "old"

    place = Place("scores", 0)
    (old,) = backend.submit(place, slow)
    begun.wait(WAIT_S)
    backend.replace([place])
    (new,) = backend.submit(place, lambda _: "new")
    assert backend.read_all([new], WAIT_S) == ["new"]
    assert backend.refused == 0
    go_on.set()
    assert ended.wait(WAIT_S), "what the old rank had open is closed after its last call"
    assert backend.refused == 1
    with pytest.raises(RankLost, match="was replaced"):
        backend.read_all([old], 0.0)


def test_a_rank_alone_runs_in_the_callers_thread_after_a_replacement_too() -> None:
    backend, place = InlineBackend(), Place("main", 0)
    backend.open(POOLS[:1])
    closed = list[int]()
    backend.submit(place, lambda site: site.stack.callback(closed.append, 1))
    backend.kill(place)
    assert closed == [1]
    with pytest.raises(RankLost, match="was killed"):
        backend.read_all(backend.submit(place, lambda _: None), 0.0)
    backend.replace([place]).read(0.0)
    (made,) = backend.submit(place, lambda _: threading.current_thread())
    assert backend.read_all([made], 0.0) == [threading.main_thread()]
    backend.close()


def test_a_rank_that_does_not_exist_is_not_replaced(backend: InlineBackend) -> None:
    with pytest.raises(ClusterError, match="there is no rank 7 of pool 'main'"):
        backend.replace([Place("main", 7)])


def test_a_failed_pool_is_mended_while_a_rank_of_it_is_dead(backend: InlineBackend) -> None:
    def fail(site: Site) -> Any:
        raise ValueError(site.place)

    backend.kill(Place("answers", 0))
    with pytest.raises(ValueError):
        backend.read_all(backend.submit(Place("answers", 2), fail), WAIT_S)
    backend.mend(["answers"], WAIT_S)
    assert sums(backend, answers(2, 3)) == [5.0, 5.0]


def test_a_role_may_take_longer_to_make_than_a_call() -> None:
    """The ranks of a world load at different speeds, and meet in a collective afterwards."""

    def load(site: Site) -> float:
        time.sleep(0.5 * site.place.rank)
        return total(site, 1.0)

    backend = InlineBackend(0.1, load_s=WAIT_S)
    backend.open([Pool(name="main", size=2)])
    group = Group("counter", endpoints_of(Counter), mesh=Mesh.of(dp=2), pool="main", backend=backend)
    group.start(load, WAIT_S)
    backend.close()


def lost(number: int, rank: int = 0) -> RankDied:
    return RankDied(f"loss {number}", place=Place("answers", rank))


@pytest.mark.parametrize("most", [0, 2])
def test_the_first_cause_is_raised_when_the_budget_of_a_rank_is_used_up(most: int) -> None:
    budget = RestartBudget(most)
    for number in range(most):
        budget.spend(lost(number))
        budget.spend(lost(number, rank=1))
    with pytest.raises(RankDied, match="loss 0") as caught:
        budget.spend(lost(most))
    times = f"rank 0 of pool 'answers' was lost {most + 1} times; the last: loss {most}"
    assert caught.value.__notes__ == [times]


def test_a_success_gives_a_rank_its_budget_again() -> None:
    budget = RestartBudget(1)
    for number in range(5):
        budget.spend(lost(number))
        budget.succeeded(Place("answers", 0))
    budget.spend(lost(5))
    with pytest.raises(RankDied, match="loss 5"):
        budget.spend(lost(6))
