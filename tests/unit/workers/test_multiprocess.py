"""What backends of processes share: joining, replacing and closing, with processes that are only records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

import pytest

from rillflow.errors import ClusterError
from rillflow.workers import joined_rank
from rillflow.workers.backend import Place, Pool, RankCall, RankLost, Replacement, devices_of
from rillflow.workers.liveness import HeartbeatTarget
from rillflow.workers.multiprocess import MultiprocessBackend
from rillflow.workers.nodes import Seating

WAIT_S = 20.0
PORT = 4711
ALONE, PAIR = Place("alone", 0), [Place("pair", 0), Place("pair", 1)]
POOLS = [Pool(name="alone", size=1), Pool(name="pair", size=2)]


@dataclass(kw_only=True, eq=False)
class Recorded:
    """A process that records what it is asked."""

    node: str = "10.0.0.1"
    local_pid: int = 0
    target: HeartbeatTarget | None = None
    asked: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Names of setup functions, with their arguments."""
    waiting: list[Future[Any]] = field(default_factory=list)
    """Replies of its joins that wait."""
    ends: list[str] = field(default_factory=list)
    """Why it was ended."""

    @property
    def seating(self) -> Seating:
        """The message of its last join."""
        (seating,) = [words for name, words in self.asked if name == "join"][-1]
        assert isinstance(seating, Seating)
        return seating

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        return [words for each, words in self.asked if each == name]


class RecordingBackend(MultiprocessBackend[Recorded]):
    """A backend of such processes."""

    def __init__(self) -> None:
        super().__init__(WAIT_S, start_s=1.0, load_s=30.0, heartbeat_s=0.0)
        self.started: list[Recorded] = []
        self.left = set[Place]()
        """Ranks that have left their collectives."""
        self.unstartable: Sequence[int] = ()
        """Numbers of processes that cannot be started, in the order of their starts."""
        self.holds_joins = False
        """Whether joins wait."""
        self.released: list[Recorded] = []

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self.devices = devices_of(pools, device)
        for place in found:
            self._ranks[place] = self._spawned(place, None)
        self._join(self._ranks)

    def _spawned(self, place: Place, old: Recorded | None) -> Recorded:
        if len(self.started) in self.unstartable:
            raise ClusterError(f"{place} has no room")
        self.started.append(Recorded(node=f"10.0.0.{1 + place.rank}"))
        return self.started[-1]

    def _ask(self, process: Recorded, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        process.asked.append((work.__name__, arguments))
        reply = Future[Any]()
        if process.ends:
            reply.set_exception(RankLost("is gone", why=process.ends[0]))
        elif work is joined_rank.join and self.holds_joins:
            process.waiting.append(reply)
        else:
            (place,) = [at for at, each in self._ranks.items() if each is process] or [ALONE]
            reply.set_result({"host": PORT, "has_left": place in self.left}.get(work.__name__))
        return reply

    def let_join(self) -> None:
        """Answer every join that waits."""
        self.holds_joins = False
        for process in self.started:
            for reply in process.waiting:
                reply.set_result(None)
            process.waiting.clear()

    def _wait_for_all(self, references: Sequence[Any], deadline_s: float) -> None:
        assert deadline_s == 3.0
        wait({*references}, timeout=deadline_s)

    def _end(self, process: Recorded, reason: RankLost) -> None:
        process.ends.append(reason.what)
        for reply in process.waiting:
            reply.set_exception(RankLost("is gone", why=reason.what))
        process.waiting.clear()

    def _release(self, processes: Sequence[Recorded]) -> None:
        self.released = [*processes]

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        raise NotImplementedError

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        for each in wait({*references}, deadline_s, FIRST_EXCEPTION).done:
            each.result()
        return [each.result(0.0) for each in references]

    def is_ready(self, reference: Any) -> bool:
        return bool(reference.done())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        raise NotImplementedError

    @property
    def refused(self) -> int:
        return 0

    @property
    def ranks(self) -> Mapping[Place, Recorded]:
        """The present process of every rank."""
        return self._ranks


@pytest.fixture
def backend() -> RecordingBackend:
    made = RecordingBackend()
    made.open(POOLS)
    return made


def held(backend: RecordingBackend) -> Replacement:
    """Return the replacement of the pair, whose processes wait in their joins."""
    backend.holds_joins = True
    replacement, until = backend.replace([PAIR[0]]), time.monotonic() + WAIT_S
    while not all(each.waiting for each in backend.started[3:]) and time.monotonic() < until:
        time.sleep(0.001)
    return replacement


def test_ranks_learn_their_world_their_neighbours_and_the_port_of_its_first(
    backend: RecordingBackend,
) -> None:
    alone, first, second = (backend.ranks[place] for place in (ALONE, *PAIR))
    assert first.arguments("host") == [(2, 30.0)] and not alone.arguments("host")
    assert not second.arguments("host"), "the first rank of a world hosts its store"
    assert (alone.seating.port, first.seating.port, second.seating.port) == (0, PORT, PORT)
    assert [(each.seating.index, each.seating.size) for each in (alone, first, second)] == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]
    assert second.seating.host == first.node == "10.0.0.1"
    assert [each.seating.neighbours for each in (alone, first, second)] == [2, 2, 1]
    assert (first.seating.deadline_s, first.seating.collective_s) == (WAIT_S, 30.0)
    assert first.seating.pool_size == 2 and first.seating.backend == "gloo" and first.seating.era == 0


def test_a_replaced_world_joins_in_a_new_epoch_and_knows_how_often_calls_were_abandoned(
    backend: RecordingBackend,
) -> None:
    old, kept = [backend.ranks[place] for place in PAIR], backend.ranks[ALONE]
    assert backend.abandon() == 5.0
    replacement = backend.replace([PAIR[1]])
    replacement.read(WAIT_S)
    assert replacement.places == tuple(PAIR)
    assert [each.ends for each in old] == [["was replaced"]] * 2 and not kept.ends
    fresh = [backend.ranks[place] for place in PAIR]
    assert {*fresh} == {*backend.started[3:]}
    assert [each.seating.era for each in fresh] == [1, 1]
    assert fresh[0].seating.neighbours == 2, "ranks that stay count as neighbours"
    assert [backend.epochs[place] for place in (ALONE, *PAIR)] == [0, 1, 1]


def test_a_rank_is_not_replaced_twice_at_once(backend: RecordingBackend) -> None:
    replacement = held(backend)
    with pytest.raises(ClusterError, match="rank 0 of pool 'pair' is being replaced") as refused:
        backend.replace([PAIR[1]])
    assert refused.value.fix == "wait until the replacement is ready"
    backend.let_join()
    replacement.read(WAIT_S)
    backend.replace([PAIR[1]]).read(WAIT_S)


def test_processes_that_start_end_if_another_one_of_their_world_cannot(backend: RecordingBackend) -> None:
    backend.unstartable = [4]
    replacement = backend.replace([PAIR[0]])
    assert replacement.is_ready
    with pytest.raises(ClusterError, match="rank 1 of pool 'pair' has no room"):
        replacement.read(WAIT_S)
    assert backend.started[3].ends == ["could not be started"]
    assert backend.epochs[PAIR[0]] == 0
    backend.unstartable = []
    backend.replace([PAIR[0]]).read(WAIT_S)


def test_a_replacement_that_does_not_join_fails_and_can_be_tried_again(backend: RecordingBackend) -> None:
    replacement, old = held(backend), backend.ranks[PAIR[0]]
    backend._end(backend.started[4], RankLost("has died", why="killed"))
    with pytest.raises(ClusterError, match="rank 1 of pool 'pair' is gone"):
        replacement.read(WAIT_S)
    assert "could not be started" in backend.started[3].ends
    assert backend.ranks[PAIR[0]] is old and backend.epochs[PAIR[0]] == 0
    backend.holds_joins = False
    backend.replace([PAIR[0]]).read(WAIT_S)
    assert backend.epochs[PAIR[0]] == 1


def test_only_worlds_that_a_rank_has_left_are_connected_again(backend: RecordingBackend) -> None:
    backend.mend(["pair", "alone"], WAIT_S)
    assert not backend.ranks[PAIR[0]].arguments("meet_again")
    assert not backend.ranks[ALONE].asked[1:], "a rank alone has no collectives"
    backend.left = {PAIR[1]}
    backend.mend(["alone"], WAIT_S)
    assert not backend.ranks[PAIR[0]].arguments("meet_again")
    backend.mend(["pair"], WAIT_S)
    assert [backend.ranks[place].arguments("meet_again") for place in PAIR] == [[(PORT,)]] * 2


def test_close_ends_what_starts_before_ranks_leave_and_waits_for_both(backend: RecordingBackend) -> None:
    replacement = held(backend)
    ranks, starting = [*backend.ranks.values()], backend.started[3:]
    backend.close()
    with pytest.raises(ClusterError):
        replacement.read(WAIT_S)
    assert all(each.ends[0] == "was closed" for each in starting)
    assert all(each.asked[-1][0] == "leave" and each.ends[-1] == "was closed" for each in ranks)
    assert {*backend.released} == {*ranks, *starting}
    assert not (backend.ranks or backend.pools or backend.devices)
    backend.close()
    assert backend.released == [], "a second call has nothing to end"
