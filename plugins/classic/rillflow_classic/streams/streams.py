"""Streams between actors, policy workers, buffer workers and the trainer, the same on every transport.

    actor ── samples: fragments ────────────> (buffer worker: computes anew) ──> trainer
    actor ── requests: observations ──> policy worker ── answers: actions ──> actor    │
      ^                                       ^                                        │
      └──── parameters: newest weights; stop; round ───────────────────────────────────┘

They are tables of records in memory, of one process or shared by processes. Every record has one writer at a
time, and there is no lock: a number that is written last says that what belongs to it is whole.

    samples     slots of fragments, ``depth`` for each lane, where a lane is one environment of an actor's
                ring. The actor writes its steps into a free slot and marks it written; the trainer reads it
                there and marks it free. A buffer worker changes it in between. Nothing is copied.
    requests    one of each lane, with a number and the worker that is asked
    answers     one of each lane from each policy worker, with the number of its request
    weights     two copies for each policy, written in turn: ``begun`` before, ``whole`` after. A reader
                copies the newest, and again if the writer began it meanwhile

This bounds every stream, and every wait has a deadline.

- Fragments: none is lost or delivered twice; those of a lane arrive in order. A killed actor's
  unfinished ones are not delivered, nor are those of an earlier round.
- Requests: an answer belongs to the present request of its lane, whichever worker gave it. A request
  without an answer after RETRY_S goes to the next worker, so a killed worker stops no actor.
- Parameters: a reader sees ascending versions and may skip some; a weight is never torn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import count
from typing import Literal

import numpy as np

from rillflow_classic.fragment import Array, FinishedEpisode, Fragment
from rillflow_classic.policy import Acted, ActorPolicy, Weights
from rillflow_classic.streams.layout import (
    ActingLayout,
    Record,
    acted_of,
    arrays_of_acted,
    columns_of,
    extended,
    fragment_of,
    row,
)
from rillflow_classic.streams.shared_tables import SharedTables

RETRY_S = 1.0
"""Seconds without an answer after which a request goes to the next policy worker."""
EndKind = Literal["trainer", "actor", "worker", "buffer"]
"""Kinds of ends; a worker is a policy worker. There are several of each but the trainer."""
FREE, WRITTEN, READY = 0, 1, 2
"""States of a slot; without buffer workers, the trainer takes what is written."""
_COPIES = 2
"""Copies of the weights: one is whole while the other one is written."""
_EPISODE = np.dtype([("total_reward", "f8"), ("length", "i8"), ("slot", "i8"), ("version", "i8")])
_MARK = np.dtype([("state", "i8"), ("number", "i8"), ("round", "i8")])
_COPY = np.dtype([("begun", "i8"), ("whole", "i8"), ("version", "i8")])
_CONTROL = np.dtype([("is_stopped", "i8"), ("round", "i8")])


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Sizes of all streams of a run; every process knows them."""

    actors: int
    """Number of actors."""
    ring: int = 1
    """Lanes of every actor."""
    steps: int
    """Steps T of a fragment."""
    layouts: Mapping[str, ActingLayout]
    """What every policy reads and returns for one lane, by policy."""
    weights: Mapping[str, Record] = field(default_factory=dict)
    """Weights of every policy."""
    workers: int = 0
    """Number of policy workers; 0 if the actors have the policies."""
    buffers: int = 0
    """Number of buffer workers between actors and trainer."""
    depth: int = 2
    """Fragments of a lane that are written or wait for the trainer."""

    @property
    def lanes(self) -> int:
        """Lanes of all actors."""
        return self.actors * self.ring

    @property
    def bells(self) -> list[str]:
        """Names of all ends, and of the thread that sends for the trainer over TCP."""
        numbers = {"actor": self.actors, "worker": self.workers, "buffer": self.buffers}
        return ["trainer", "hub"] + [f"{kind}/{index}" for kind in numbers for index in range(numbers[kind])]

    @property
    def tables(self) -> dict[str, tuple[Record, int]]:
        """Record and number of rows of every table."""
        slots = self.lanes * self.depth
        tables = {"control": (_CONTROL, 1), "marks": (_MARK, slots)}
        for policy, layout in self.layouts.items():
            most = layout.answer["actions"].shape[0] * (self.steps // 2 + 1)
            tables[f"{policy}/samples"] = layout.fragment(self.steps), slots
            tables[f"{policy}/episodes"] = np.dtype([("count", "i8"), ("played", _EPISODE, (most,))]), slots
            if self.workers:
                request = extended(layout.request, worker="i8", number="i8")
                answer = extended(layout.answer, version="i8", number="i8")
                tables[f"{policy}/requests"] = request, self.lanes
                tables[f"{policy}/answers"] = answer, self.lanes * self.workers
        for policy, record in self.weights.items():
            tables[f"{policy}/weights"] = extended(_COPY, arrays=record), _COPIES
        return tables

    @property
    def sample_tables(self) -> list[str]:
        """Tables of one fragment, the mark last."""
        return [f"{p}/{each}" for p in self.layouts for each in ("samples", "episodes")] + ["marks"]

    def slots_of(self, kind: str, index: int) -> Array:
        """Return the slots that an actor fills or a buffer worker changes; for the trainer, all."""
        slots: Array = np.arange(self.lanes * self.depth)
        if kind == "actor":
            slots = slots[slots // self.depth // self.ring == index]
        if kind == "buffer":
            slots = slots[slots // self.depth % self.buffers == index]
        return slots


@dataclass(frozen=True, kw_only=True)
class Received:
    """Fragments of one lane over the same steps."""

    actor: int
    """Index of the actor."""
    lane: int
    """Lane of the actor."""
    number: int
    """Number of the fragment in its lane, from 0; a replaced actor goes on with the next one."""
    fragments: Mapping[str, Fragment]
    """Fragment by policy; arrays are views of the stream's memory until ``release``."""
    release: Callable[[], None]
    """Passes the memory on: back to the actor, or from a buffer worker to the trainer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ActingRequests:
    """Requests that a policy worker answers with one batch."""

    observations: Array
    """[B, ...] observations of all requests."""
    state: Array | None
    """[B, ...] recurrent state; None without one."""
    lanes: Array
    """[R] lane of every request among those of all actors."""
    numbers: Array
    """[R] number of every request."""


class Streams:
    """One end of all streams, in memory; workers get their ends from the trainer's.

    Args:
        spec: the sizes.
        shared: the memory.
        kind: its kind.
        index: index of the worker.

    Example:
        streams = open_streams("shared_memory", spec)        # in the trainer's process
        actor = Actor(ring, policies, 128, streams=streams.end("actor", 0))    # in any process
    """

    def __init__(
        self, spec: StreamSpec, shared: SharedTables, kind: EndKind = "trainer", index: int = 0
    ) -> None:
        self.spec, self._shared, self._kind, self._index = spec, shared, kind, index
        self.name = kind if kind == "trainer" else f"{kind}/{index}"
        """Name of this end, and of its bell."""
        self._first = index * spec.ring
        self._slots: dict[int, int] = {}
        self._numbers = count(time.time_ns())  # a replaced actor does not ask under an old number
        self._asked_s: dict[tuple[str, int], float] = {}
        acting = spec.layouts if spec.workers else ()
        self._requests = {each: shared.columns[f"{each}/requests"] for each in acting}
        self._answers = {each: shared.columns[f"{each}/answers"] for each in acting}
        self._own = spec.slots_of(kind, index)
        self._is_taken = np.zeros(spec.lanes * spec.depth, np.bool_)

    def end(self, kind: EndKind, index: int) -> Streams:
        """Return the end of a worker, in its process."""
        return Streams(self.spec, self._shared, kind, index)

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to do here, at most this long."""
        self._shared.wait(self.name, seconds)

    def look(self) -> None:
        """Take in what others have written, where that needs a call."""

    def close(self) -> None:
        """Release the memory and the sockets of this process."""
        self._shared.close()

    # An actor's end

    def reserve(self, lane: int) -> Mapping[str, Mapping[str, Array]] | None:
        """Return arrays for a lane's next fragments, by policy; None while the stream is full.

        The same arrays until ``put``.
        """
        first = (self._first + lane) * self.spec.depth
        free = np.flatnonzero(self._shared.columns["marks"]["state"][first : first + self.spec.depth] == FREE)
        if not len(free):
            return None
        slot = self._slots[lane] = first + int(free[0])
        return {name: row(self._shared.columns[f"{name}/samples"], slot) for name in self.spec.layouts}

    def put(self, lane: int, fragments: Mapping[str, Fragment], round_: int) -> None:
        """Send the fragments whose arrays ``reserve`` gave, begun in a round of the trainer."""
        slot = self._slots.pop(lane)
        for policy, fragment in fragments.items():
            table, played = self._shared.columns[f"{policy}/episodes"], fragment.episodes
            table["count"][slot] = len(played)
            table["played"][slot, : len(played)] = [astuple(each) for each in played]
        marks, first = self._shared.columns["marks"], (self._first + lane) * self.spec.depth
        marks["number"][slot] = marks["number"][first : first + self.spec.depth].max() + 1
        marks["round"][slot], marks["state"][slot] = round_, WRITTEN
        buffer = (self._first + lane) % max(1, self.spec.buffers)
        self._tell(f"buffer/{buffer}" if self.spec.buffers else "trainer", self.spec.sample_tables, [slot])

    def post(self, policy: str, lane: int, observations: Array, state: Array | None) -> None:
        """Ask for actions for a lane."""
        at, request = self._first + lane, self._requests[policy]
        request["observations"][at] = observations
        if state is not None:
            request["state"][at] = state
        if (policy, lane) not in self._asked_s:
            request["worker"][at] = at % self.spec.workers
        request["number"][at] = next(self._numbers)
        self._ask(policy, lane)

    def actions(self, policy: str, lane: int) -> tuple[Acted, int] | None:
        """Return the actions for a lane and the version that acted; None while they are not there.

        The arrays are overwritten after the lane's next ``post``.
        """
        at, asked, answer = self._first + lane, self._requests[policy], self._answers[policy]
        found = int(asked["worker"][at]) * self.spec.lanes + at
        if answer["number"][found] != asked["number"][at]:
            late = np.flatnonzero(answer["number"][at :: self.spec.lanes] == asked["number"][at])
            if not len(late):
                if time.monotonic() - self._asked_s[policy, lane] > RETRY_S:
                    asked["worker"][at] = (asked["worker"][at] + 1) % self.spec.workers
                    self._ask(policy, lane)
                return None
            asked["worker"][at] = late[0]  # one that was asked before, and answers
            found = int(late[0]) * self.spec.lanes + at
        return acted_of(row(answer, found)), int(answer["version"][found])

    def _ask(self, policy: str, lane: int) -> None:
        at = self._first + lane
        worker = self._requests[policy]["worker"][at]
        is_sent = self._tell(f"worker/{worker}", [f"{policy}/requests"], [at])
        self._asked_s[policy, lane] = time.monotonic() if is_sent else -RETRY_S

    # A policy worker's end

    def requests(self, policy: str) -> ActingRequests | None:
        """Return all requests that have arrived and are not answered; None without one."""
        self.look()
        asked, own = self._requests[policy], self._index * self.spec.lanes
        done = self._answers[policy]["number"][own : own + self.spec.lanes]
        lanes = np.flatnonzero((asked["worker"] == self._index) & (asked["number"] != done))
        if not len(lanes):
            return None
        found = row(asked, lanes)
        rows = {
            name: found[name].reshape(-1, *found[name].shape[2:])
            for name in self.spec.layouts[policy].request.names or ()
        }
        return ActingRequests(
            observations=rows["observations"], state=rows.get("state"), lanes=lanes, numbers=found["number"]
        )

    def answer(self, policy: str, requests: ActingRequests, acted: Acted, version: int) -> None:
        """Send the actions to the actors."""
        answers, rows = self._answers[policy], self._index * self.spec.lanes + requests.lanes
        for name, array in arrays_of_acted(acted).items():
            answers[name][rows] = array.reshape(len(rows), *answers[name].shape[1:])
        answers["version"][rows] = version
        answers["number"][rows] = requests.numbers
        actors = (requests.lanes // self.spec.ring).tolist()
        for actor in set(actors):
            own = (at for at, owner in zip(rows, actors, strict=True) if owner == actor)
            self._tell(f"actor/{actor}", [f"{policy}/answers"], own)

    # Every worker's end

    @property
    def is_stopped(self) -> bool:
        """Whether the trainer wants all workers to end their present call."""
        self.look()
        return bool(self._shared.columns["control"]["is_stopped"][0])

    @property
    def round(self) -> int:
        """Present round: above 0, a lane begins one fragment in it; below, any number; at 0, none.

        Whoever sees a round also sees the weights that were published before it.
        """
        return int(self._shared.columns["control"]["round"][0])

    def newest(self, policy: str, version: int) -> tuple[int, Weights] | None:
        """Return a policy's newest weights, if they are newer than a version; the arrays are copies."""
        if (found := self._newest_record(policy, version)) is None:
            return None
        arrays = columns_of(found["arrays"])
        return int(found["version"][0]), {name: np.asarray(column[0]) for name, column in arrays.items()}

    def _newest_record(self, policy: str, version: int) -> Array | None:
        """Return a copy, [1], of a policy's newest weights with their version."""
        copies, table = self._shared.columns[f"{policy}/weights"], self._shared.tables[f"{policy}/weights"]
        while number := copies["whole"][at := int(copies["whole"].argmax())]:
            if copies["version"][at] <= version:
                break
            found: Array = table[at : at + 1].copy()
            if copies["begun"][at] == number:  # the writer had not come back to this copy
                return found
        return None

    def refresh(self, policies: Mapping[str, ActorPolicy]) -> bool:
        """Load the newest weights into policies; return whether each has received some."""
        for name, policy in policies.items():
            newest = self.newest(name, policy.version)
            if newest is not None:
                policy.load(*newest)
        return all(policy.version >= 0 for policy in policies.values())

    # The ends of the trainer and of buffer workers

    def take(self, wait_s: float) -> list[Received]:
        """Return all fragments that have arrived and were not taken; wait for the first at most this long."""
        slots = self._arrived()
        if not len(slots) and wait_s > 0:
            self.wait(wait_s)
            slots = self._arrived()
        self._is_taken[slots] = True
        marks, found = self._shared.columns["marks"], []
        for slot in slots[np.argsort(marks["number"][slots], kind="stable")].tolist():
            if marks["round"][slot] == self.round:
                found.append(self._received(slot))
            else:
                self._pass_on(slot)
        return found

    def publish(self, policy: str, version: int, weights: Weights) -> None:
        """Replace the newest weights of a policy."""
        copies = self._shared.columns[f"{policy}/weights"]
        number = int(copies["whole"].max()) + 1
        at = number % _COPIES
        copies["begun"][at] = number
        for name, column in columns_of(copies["arrays"]).items():
            column[at] = weights[name]
        copies["version"][at] = version
        copies["whole"][at] = number
        self._shared.ring("hub")

    def control(self, *, is_stopped: bool, round_: int) -> None:
        """Stop or start all workers, and set ``round``; fragments of other rounds are dropped."""
        control = self._shared.columns["control"]
        control["round"][0], control["is_stopped"][0] = round_, is_stopped
        for bell in self.spec.bells[1:]:
            self._shared.ring(bell)

    def _arrived(self) -> Array:
        self.look()
        wanted = READY if self.spec.buffers and self._kind == "trainer" else WRITTEN
        is_there = self._shared.columns["marks"]["state"][self._own] == wanted
        found: Array = self._own[is_there & ~self._is_taken[self._own]]
        return found

    def _received(self, slot: int) -> Received:
        actor, lane = divmod(slot // self.spec.depth, self.spec.ring)
        fragments = {}
        for policy in self.spec.layouts:
            table = self._shared.columns[f"{policy}/episodes"]
            played = table["played"][slot, : int(table["count"][slot])].tolist()
            episodes = [
                FinishedEpisode(**dict(zip(_EPISODE.names or (), each, strict=True))) for each in played
            ]
            arrays = row(self._shared.columns[f"{policy}/samples"], slot)
            fragments[policy] = fragment_of(arrays, episodes=episodes, policy=policy, actor=actor)
        number = int(self._shared.columns["marks"]["number"][slot]) - 1
        release = partial(self._pass_on, slot)
        return Received(actor=actor, lane=lane, number=number, fragments=fragments, release=release)

    def _pass_on(self, slot: int) -> None:
        """Free a slot for its actor, or mark it ready for the trainer."""
        if not self._is_taken[slot]:
            return
        self._is_taken[slot] = False
        state = self._shared.columns["marks"]["state"]
        if self._kind == "buffer":
            state[slot] = READY
            self._tell("trainer", self.spec.sample_tables, [slot])
        else:
            state[slot] = FREE
            self._tell(f"actor/{slot // self.spec.depth // self.spec.ring}", ["marks"], [slot])

    def _tell(self, to: str, tables: Sequence[str], rows: Iterable[int]) -> bool:  # noqa: ARG002
        """Let another end see rows of some tables, in this order; return whether it can be reached."""
        self._shared.ring(to)
        return True
