"""SimulatedBackend: the ranks of a run in one thread, under a seeded scheduler and a fake clock.

    controller ── submit ──> delay ──> queue of the rank ── arguments there? ─> call ── duration ──> result
         ^                                                                                              │
         └────── read_all, is_ready, wait_for_any: run events until the result has arrived <── delay ───┘

A call really runs, as one Python function, when the scheduler begins it. Chance decides its duration and the
arrival of its result. A rank runs its calls in the order of submission, each at most once, as Ray's actors
do. Messages between the controller and one rank are delayed but never reordered or doubled. Messages of
different ranks overtake each other.

    kill    the process ends: its unfinished calls are lost, finished results stay in the store of its node
    stop    the process stands still for some time (SIGSTOP, SIGCONT)
    cut     no message passes between the rank and the others for some time; after ``HEALTH_S`` it counts as
            dead, although it continues with the calls that it has

Collectives are not simulated: ranks of one pool may only use groups of one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any

from rillflow.workers.arguments import Held
from rillflow.workers.backend import Backend, Place, Pool, RankCall, RankLost, Replacement, Site
from rillflow.workers.collectives import Ranks, SingleRank, Stranded
from tests.simulation.timeline import DriverKilled, Timeline

HEALTH_S = 30.0
"""Seconds without contact after which a rank counts as dead."""


class RankKilled(BaseException):
    """The rank that runs this call is gone."""


@dataclass(kw_only=True, eq=False)
class _Call:
    place: Place
    work: RankCall
    arguments: tuple[Any, ...]
    results: int
    arrival: float
    waits_for: list[Reference]
    value: Any = None
    error: BaseException | None = None
    ends: float = inf
    """Time at which its result exists."""
    readable: dict[Place | None, float] = field(default_factory=dict)
    """Time at which its result reaches a rank, or with None the controller."""


@dataclass(frozen=True, eq=False)
class Reference:
    """The result of a call, or one element of it."""

    call: _Call
    index: int

    def at(self, place: Place | None) -> float:
        """Return when a rank, or the controller, can read it."""
        return self.call.readable.get(place, inf)

    def value(self) -> Any:
        """Return the value, or raise the call's error."""
        if self.call.error is not None:
            raise self.call.error
        return self.call.value if self.call.results == 1 else self.call.value[self.index]


@dataclass(kw_only=True, eq=False)
class _Rank:
    site: Site
    seconds: float
    """Usual duration of a call."""
    queue: deque[_Call] = field(default_factory=deque)
    running: _Call | None = None
    reached: float = 0.0
    """Arrival time of the last message from the controller."""
    stopped_until: float = 0.0
    cut_until: float = 0.0
    is_lost: bool = False
    """True if the controller counts the rank as dead."""
    is_alive: bool = True


class _Apart(SingleRank):
    """One rank of several whose collectives are not simulated."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def part(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return this rank alone."""
        assert all(len(group) == 1 for group in groups), "a collective of several ranks is not simulated"
        return SingleRank()


class _Site(Site):
    """A site whose clock is the fake one: a call begins now and ends after its duration."""

    timeline: Timeline
    readings: Iterator[float]

    def clock(self) -> float:
        """See Site."""
        return next(self.readings, self.timeline.now)


class SimulatedBackend(Backend):
    """Backend that runs all ranks in this thread.

    Args:
        timeline: clock, chance and events.
        deadline_s: longest wait of a rank for another one, in fake seconds.
    """

    def __init__(self, timeline: Timeline, deadline_s: float = 3600.0) -> None:
        super().__init__(deadline_s)
        self._timeline, self._chance = timeline, timeline.chance
        self._ranks: dict[Place, _Rank] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._delay_s = self._chance.choice([1e-4, 1e-3, 2e-2])

    @property
    def places(self) -> list[Place]:
        """All ranks, in order."""
        return sorted(self._ranks)

    def now(self) -> float:
        """Return seconds on the fake clock."""
        return self._timeline.now

    def sleep(self, seconds: float) -> None:
        """Let ranks work for some fake seconds."""
        self._run_until(lambda: False, self.now() + seconds)

    def _start(self, pools: Sequence[Pool], found: Sequence[Place], device: str) -> None:
        self.devices = {pool.name: "cpu" for pool in pools}
        sizes = {pool.name: pool.size for pool in pools}
        for place in found:
            ranks = SingleRank() if sizes[place.pool] == 1 else _Apart(place.rank, sizes[place.pool])
            self._ranks[place] = self._new_rank(place, ranks)

    def _new_rank(self, place: Place, ranks: Ranks) -> _Rank:
        """Return a fresh process at a place; replacements also come from here."""
        site = _Site(place=place, ranks=ranks, fetch=partial(self._fetch, place))
        site.timeline, site.readings = self._timeline, iter(())
        return _Rank(site=site, seconds=self._chance.choice([2e-3, 1e-2, 5e-2, 0.3]))

    def submit(self, place: Place, work: RankCall, *arguments: Any, results: int = 1) -> tuple[Any, ...]:
        """See Backend."""
        self._spoken(f"submit to {place.pool}-{place.rank}: {_named(work, arguments)}")
        self.traffic.calls += 1
        rank = self._ranks[place]
        rank.reached = max(rank.reached, self._passes(rank, self.now()))
        call = _Call(
            place=place,
            work=work,
            arguments=arguments,
            results=results,
            arrival=rank.reached,
            waits_for=[*_references(arguments)],
        )
        if rank.is_lost:
            self._lose(call)
        else:
            rank.queue.append(call)
            self._at(rank.reached, lambda: self._begin(rank))
        return tuple(Reference(call, index) for index in range(results))

    def read_all(self, references: Sequence[Any], deadline_s: float) -> list[Any]:
        """See Backend."""
        self._spoken(f"read {len(references)}")

        def is_over() -> bool:
            here = [each for each in references if each.at(None) <= self.now()]
            return len(here) == len(references) or any(each.call.error is not None for each in here)

        is_late = not self._run_until(is_over, self.now() + deadline_s)
        for each in references:
            if each.at(None) <= self.now() and each.call.error is not None:
                raise each.call.error
        if is_late:
            raise TimeoutError
        return [each.value() for each in references]

    def is_ready(self, reference: Any) -> bool:
        """See Backend."""
        self._run_until(lambda: False, self.now())
        return bool(reference.at(None) <= self.now())

    def wait_for_any(self, references: Sequence[Any], deadline_s: float) -> bool:
        """See Backend."""
        self._spoken(f"wait for one of {len(references)}")
        return self._run_until(
            lambda: any(each.at(None) <= self.now() for each in references), self.now() + deadline_s
        )

    @property
    def refused(self) -> int:
        """See Backend; results of lost processes are never delivered."""
        return 0

    def replace(self, places: Collection[Place]) -> Replacement:
        """See Backend; the new processes take some time to start."""
        done = Future[None]()
        for place in places:
            self._lost(self._ranks[place])
            self._ranks[place].is_alive = False
            self._ranks[place] = self._new_rank(place, SingleRank())
            self.epochs[place] += 1
        self._at(self.now() + self._chance.uniform(0.1, 5.0), lambda: done.set_result(None))
        return Replacement([*places], done)

    def close(self) -> None:
        """See Backend."""
        for rank in self._ranks.values():
            rank.site.stack.close()
        self._ranks.clear()
        self._events.clear()
        self.pools.clear()

    def drain(self, most: int) -> None:
        """Run some more events of the ranks, which outlive a killed driver for a moment."""
        for _ in range(most):
            if not self._next(inf):
                return

    def kill(self, place: Place) -> None:
        """End the process of a rank."""
        rank = self._ranks[place]
        rank.is_alive = False
        self._lost(rank)
        if self._timeline.inside == place:
            raise RankKilled

    def stop(self, place: Place, seconds: float) -> None:
        """Pause a rank for some time."""
        rank = self._ranks[place]
        rank.stopped_until = max(rank.stopped_until, self.now() + seconds)
        self._at(rank.stopped_until, lambda: self._begin(rank))

    def cut(self, place: Place, seconds: float) -> None:
        """Cut a rank off from all others for some time."""
        rank = self._ranks[place]
        rank.cut_until = max(rank.cut_until, self.now() + seconds)
        if seconds > HEALTH_S:
            self._at(self.now() + HEALTH_S, lambda: self._lost(rank))

    def _lost(self, rank: _Rank) -> None:
        """Count a rank as dead: its unfinished calls fail at the controller and at other ranks."""
        if rank.is_lost:
            return
        rank.is_lost = True
        for call in [*([rank.running] if rank.running else []), *rank.queue]:
            self._lose(call)
        if not rank.is_alive:
            rank.queue.clear()

    def _lose(self, call: _Call) -> None:
        call.error = RankLost("has died", why="the simulation killed it or cut it off", fix="")
        self._deliver(call, self.now(), is_loss=True)

    def _begin(self, rank: _Rank) -> None:
        """Begin the next call of a rank, if the rank is idle and the call's arguments are there."""
        place, now = rank.site.place, self.now()
        if rank.running or not rank.queue or not rank.is_alive or rank.stopped_until > now:
            return
        call = rank.queue[0]
        if call.arrival > now or any(each.at(place) > now for each in call.waits_for):
            return  # the message or the last argument begins it
        rank.running = rank.queue.popleft()
        seconds = rank.seconds * self._chance.uniform(0.3, 3.0) * self._chance.choice([1, 1, 1, 1, 10])
        self._timeline.inside = place
        try:
            self._timeline.event(f"{place.pool}-{place.rank} begins {_named(call.work, call.arguments)}")
            rank.site.readings = iter((now, now + seconds))  # type: ignore[attr-defined]
            call.value = call.work(rank.site, *call.arguments)
        except RankKilled:
            return
        except Exception as error:  # noqa: BLE001  any error of a rank travels to the reader
            call.error = call.error or error
        finally:
            self._timeline.inside = None
        self._at(now + seconds, lambda: self._end(rank, call))

    def _end(self, rank: _Rank, call: _Call) -> None:
        if not rank.is_alive:
            return
        if rank.stopped_until > self.now():
            self._at(rank.stopped_until, lambda: self._end(rank, call))
            return
        rank.running = None
        if not rank.is_lost:
            self._deliver(call, self.now())
        self._begin(rank)

    def _deliver(self, call: _Call, now: float, *, is_loss: bool = False) -> None:
        """Send a result to the controller and to every other rank."""
        here = self._ranks[call.place]
        sent = now if is_loss else self._passes(here, now)
        call.ends = now
        call.readable[None] = sent
        self._at(sent, lambda: None)
        for place, rank in self._ranks.items():
            call.readable[place] = now if rank is here else self._passes(rank, sent)
            self._at(call.readable[place], partial(self._arrived, place))

    def _arrived(self, place: Place) -> None:
        """Begin a call that waited for a result, also of a process that replaced the one it was sent to."""
        if place in self._ranks:
            self._begin(self._ranks[place])

    def _passes(self, rank: _Rank, now: float) -> float:
        """Return when a message that is sent now has passed between a rank and the others."""
        return max(now, rank.cut_until) + self._delay_s * self._chance.uniform(0.1, 4.0)

    def _fetch(self, place: Place, references: Sequence[Any], fields: Any = None) -> list[Any]:
        late = [each for each in references if each.at(place) > self.now()]
        assert not late, "a call began before its arguments had arrived"
        try:
            return [each.value() for each in references]
        except RankLost as lost:
            raise Stranded(f"the rank of an argument {lost.what}", why=lost.why, fix=lost.fix) from None

    def _spoken(self, what: str) -> None:
        """Record an action of the controller; it takes a little time."""
        self._timeline.now += 1e-4 * self._chance.random()
        self._timeline.event(what)
        self._run_until(lambda: False, self.now())

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _next(self, until: float) -> bool:
        """Run the next event if it is not later than ``until``; return whether there was one."""
        if not self._events or self._events[0][0] > until:
            return False
        time, _, event = heapq.heappop(self._events)
        self._timeline.now = max(self._timeline.now, time)
        event()
        return True

    def _run_until(self, is_over: Callable[[], bool], until: float) -> bool:
        """Run events until a condition holds; return False if it does not hold by a time."""
        while not is_over():
            if not self._next(until):
                self._timeline.now = max(self._timeline.now, until)
                return is_over()
        return True


def _references(value: Any) -> Iterator[Reference]:
    """Find the references in the arguments of a call."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _references(each)
    elif isinstance(value, Mapping):
        yield from _references(list(value.values()))
    elif (
        is_dataclass(value) and not isinstance(value, type) and value.__class__.__module__ == Held.__module__
    ):
        yield from _references([vars(value)[each.name] for each in fields(value)])


def _named(work: RankCall, arguments: Sequence[Any]) -> str:
    """Return a description of a call, in the controller's terms."""
    said = next((str(each) for each in arguments if isinstance(each, str) or hasattr(each, "endpoint")), "")
    return said or work.__name__


__all__ = ["HEALTH_S", "DriverKilled", "RankKilled", "Reference", "SimulatedBackend"]
