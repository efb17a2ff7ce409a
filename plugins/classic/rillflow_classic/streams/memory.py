"""Streams in memory: of one process (inline), or shared by the processes of one machine.

    sample      slots of fragments, ``depth`` for each lane. The actor writes its steps into a free slot, and
                marks it full; the trainer reads it there, and marks it free. Nothing is copied.
    inference   one request of each lane, and one answer of each lane from each policy worker. A worker
                gathers the requests into its batch, and writes the actions into its own answers.
    parameters  two copies of each policy's weights, written in turn; a reader copies the newest

There is no lock. Every array has one writer. A number that is written last says that what belongs to it is
whole. A killed process leaves slots that are free or full, requests with a number, or nothing at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import numpy as np

from rillflow_classic.fragment import Array, FinishedEpisode, Fragment
from rillflow_classic.policy import Acted, Weights
from rillflow_classic.streams.dock import Dock
from rillflow_classic.streams.stream import RETRY_S, UNLIMITED, ActingRequests, Received, StreamSpec
from rillflow_classic.workers.recording import (
    ActingLayout,
    Arrays,
    ArraySpec,
    acted_of,
    arrays_of_acted,
    fragment_of,
)

_SAMPLE = "sample"
_COPIES = 2


class MemoryTransport:
    """Streams in one block of memory.

    Args:
        spec: the sizes.
        is_shared: whether workers are other processes.
    """

    def __init__(self, spec: StreamSpec, *, is_shared: bool) -> None:
        self.spec = spec
        bells = [_SAMPLE, *(f"answer/{actor}" for actor in range(spec.actors))]
        bells += [f"request/{worker}" for worker in range(spec.workers)]
        self.dock = Dock(_specs(spec), bells, is_shared=is_shared)
        self.writer().control(is_stopped=False)

    def acting_client(self, policy: str, actor: int) -> MemoryClient:
        """See Transport."""
        return MemoryClient(self.dock, self.spec, policy, actor)

    def acting_server(self, policy: str, worker: int) -> MemoryServer:
        """See Transport."""
        return MemoryServer(self.dock, self.spec, policy, worker)

    def sink(self, actor: int) -> MemorySink:
        """See Transport."""
        return MemorySink(self.dock, self.spec, actor)

    def source(self) -> MemorySource:
        """See Transport."""
        return MemorySource(self.dock, self.spec)

    def reader(self) -> MemoryReader:
        """See Transport."""
        return MemoryReader(self.dock, self.spec)

    def writer(self) -> MemoryWriter:
        """See Transport."""
        return MemoryWriter(self.dock, self.spec)

    def close(self) -> None:
        """See Transport."""
        self.dock.close()


class MemorySink:
    """Writes fragments into the slots of one actor's lanes; see FragmentSink."""

    def __init__(self, dock: Dock, spec: StreamSpec, actor: int) -> None:
        self._dock, self._spec, self._actor = dock, spec, actor
        self._is_full, self._numbers = dock.arrays["full"], dock.arrays["numbers"]
        self._slots: dict[int, int] = {}
        self._next = [int(self._numbers[self._of(lane)].max()) + 1 for lane in range(spec.ring)]

    def reserve(self, lane: int) -> Mapping[str, Arrays] | None:
        """See FragmentSink."""
        free = np.flatnonzero(np.logical_not(self._is_full[self._of(lane)]))
        if not len(free):
            return None
        slot = self._slots[lane] = self._of(lane).start + int(free[0])
        return {policy: _slot_arrays(self._dock, policy, slot) for policy in self._spec.layouts}

    def put(self, lane: int, fragments: Mapping[str, Fragment]) -> None:
        """See FragmentSink."""
        slot = self._slots.pop(lane)
        for policy, fragment in fragments.items():
            rows = self._dock.arrays[f"{policy}/episodes"][slot]
            for row, episode in zip(rows, fragment.episodes, strict=False):
                row[:] = episode.total_reward, episode.length, episode.slot
            self._dock.arrays[f"{policy}/ended"][slot] = min(len(rows), len(fragment.episodes))
        self._numbers[slot] = self._next[lane]
        self._next[lane] += 1
        self._is_full[slot] = True
        self._dock.ring(_SAMPLE)

    def sent(self, lane: int) -> int:
        """See FragmentSink; counts what earlier processes of this actor sent."""
        return self._next[lane] - 1

    def wait(self, seconds: float) -> None:
        """See FragmentSink."""
        self._dock.wait(f"answer/{self._actor}", seconds)

    def _of(self, lane: int) -> slice:
        """Return the slots of a lane."""
        first = (self._actor * self._spec.ring + lane) * self._spec.depth
        return slice(first, first + self._spec.depth)


class MemorySource:
    """Reads full slots; see FragmentSource."""

    def __init__(self, dock: Dock, spec: StreamSpec) -> None:
        self._dock, self._spec = dock, spec
        self._is_full, self._numbers = dock.arrays["full"], dock.arrays["numbers"]
        self._is_taken = np.zeros_like(self._is_full)

    def take(self, wait_s: float) -> list[Received]:
        """See FragmentSource."""
        slots = np.flatnonzero(np.greater(self._is_full, self._is_taken))
        if not len(slots) and self._dock.wait(_SAMPLE, wait_s):
            slots = np.flatnonzero(np.greater(self._is_full, self._is_taken))
        order = np.argsort(self._numbers[slots], kind="stable")
        return [self._received(slot) for slot in slots[order].tolist()]

    def _received(self, slot: int) -> Received:
        self._is_taken[slot] = True
        actor, lane = divmod(slot // self._spec.depth, self._spec.ring)
        return Received(
            actor=actor,
            lane=lane,
            number=int(self._numbers[slot]) - 1,
            fragments={name: self._fragment(name, slot, actor) for name in self._spec.layouts},
            release=partial(self._release, slot),
        )

    def _fragment(self, policy: str, slot: int, actor: int) -> Fragment:
        ended = int(self._dock.arrays[f"{policy}/ended"][slot])
        rows = self._dock.arrays[f"{policy}/episodes"][slot, :ended].tolist()
        episodes = [FinishedEpisode(total_reward=r, length=int(n), slot=int(s)) for r, n, s in rows]
        arrays = _slot_arrays(self._dock, policy, slot)
        return fragment_of(arrays, episodes=episodes, policy=policy, actor=actor)

    def _release(self, slot: int) -> None:
        if self._is_taken[slot]:
            self._is_taken[slot] = False
            self._is_full[slot] = False
            self._dock.ring(f"answer/{slot // self._spec.depth // self._spec.ring}")


class MemoryClient:
    """Asks for the actions of one actor's lanes; see ActingClient."""

    def __init__(self, dock: Dock, spec: StreamSpec, policy: str, actor: int) -> None:
        self._dock, self._spec, self._actor = dock, spec, actor
        self._layout = spec.layouts[policy]
        first = actor * spec.ring
        own = slice(first, first + spec.ring)
        self._asked = {n: array[own] for n, array in dock.under(f"{policy}/request/").items()}
        self._answers = {n: array[:, own] for n, array in dock.under(f"{policy}/answer/").items()}
        self._numbers, self._workers = self._asked.pop("number"), self._asked.pop("worker")
        self._answered = self._answers.pop("number")
        self._versions = self._answers.pop("version")
        self._workers[:] = (first + np.arange(spec.ring)) % spec.workers
        self._asked_at: dict[int, float] = {}

    def layout(self, *_: object) -> ActingLayout:
        """See ActingClient."""
        return self._layout

    def post(self, lane: int, observations: Array, state: Array | None) -> None:
        """See ActingClient."""
        self._asked["observations"][lane] = observations
        if state is not None:
            self._asked["state"][lane] = state
        self._numbers[lane] += 1
        self._ask(lane)

    def take(self, lane: int) -> tuple[Acted, int] | None:
        """See ActingClient; the arrays are overwritten after the lane's next ``post``."""
        worker = int(self._workers[lane])
        if self._answered[worker, lane] != self._numbers[lane]:
            late = np.flatnonzero(self._answered[:, lane] == self._numbers[lane])
            if not len(late):
                if time.monotonic() - self._asked_at[lane] > RETRY_S:
                    self._workers[lane] = (worker + 1) % self._spec.workers
                    self._ask(lane)
                return None
            worker = self._workers[lane] = int(late[0])  # one that was asked before
        answer = {name: array[worker, lane] for name, array in self._answers.items()}
        return acted_of(answer), int(self._versions[worker, lane])

    def wait(self, seconds: float) -> None:
        """See ActingClient."""
        self._dock.wait(f"answer/{self._actor}", seconds)

    def _ask(self, lane: int) -> None:
        self._asked_at[lane] = time.monotonic()
        self._dock.ring(f"request/{self._workers[lane]}")


class MemoryServer:
    """Answers the requests that a policy worker is asked; see ActingServer."""

    def __init__(self, dock: Dock, spec: StreamSpec, policy: str, worker: int) -> None:
        self._dock, self._worker, self._ring = dock, worker, spec.ring
        self._asked = dock.under(f"{policy}/request/")
        self._answers = {n: array[worker] for n, array in dock.under(f"{policy}/answer/").items()}
        self._numbers, self._workers = self._asked.pop("number"), self._asked.pop("worker")
        self._answered, self._versions = self._answers.pop("number"), self._answers.pop("version")

    def requests(self) -> ActingRequests | None:
        """See ActingServer."""
        lanes = np.flatnonzero((self._workers == self._worker) & (self._numbers > self._answered))
        if not len(lanes):
            return None
        numbers = self._numbers[lanes]
        gathered = {name: array[lanes] for name, array in self._asked.items()}
        rows = {name: array.reshape(-1, *array.shape[2:]) for name, array in gathered.items()}
        return ActingRequests(
            observations=rows["observations"], state=rows.get("state"), lanes=lanes, numbers=numbers
        )

    def answer(self, requests: ActingRequests, acted: Acted, version: int) -> None:
        """See ActingServer."""
        lanes, arrays = requests.lanes, arrays_of_acted(acted)
        for name, array in self._answers.items():
            array[lanes] = arrays[name].reshape(len(lanes), *array.shape[1:])
        self._versions[lanes] = version
        self._answered[lanes] = requests.numbers
        for actor in set((lanes // self._ring).tolist()):
            self._dock.ring(f"answer/{actor}")

    def wait(self, seconds: float) -> None:
        """See ActingServer."""
        self._dock.wait(f"request/{self._worker}", seconds)


class MemoryReader:
    """Copies the newest weights; see ParameterReader."""

    def __init__(self, dock: Dock, spec: StreamSpec) -> None:
        self._dock, self._spec, self._control = dock, spec, dock.arrays["control"]

    @property
    def is_stopped(self) -> bool:
        """See ParameterReader."""
        return bool(self._control[0])

    @property
    def limit(self) -> int:
        """See ParameterReader."""
        return int(self._control[1])

    def newest(self, policy: str, version: int) -> tuple[int, Weights] | None:
        """See ParameterReader."""
        written = self._dock.arrays[f"{policy}/written"]
        while (whole := int(written[0])) and (found := int(written[2 + whole % _COPIES])) > version:
            weights = {
                name: self._dock.arrays[f"{policy}/weights/{name}"][whole % _COPIES].copy()
                for name in self._spec.weights[policy]
            }
            if written[1] < whole + _COPIES:  # the writer had not come back to this copy
                return found, weights
        return None


class MemoryWriter:
    """Writes weights into two copies in turn; see ParameterWriter."""

    def __init__(self, dock: Dock, spec: StreamSpec) -> None:
        self._dock, self._spec = dock, spec

    def publish(self, policy: str, version: int, weights: Weights) -> None:
        """See ParameterWriter."""
        written = self._dock.arrays[f"{policy}/written"]
        written[1] = number = int(written[0]) + 1
        for name in self._spec.weights[policy]:
            self._dock.arrays[f"{policy}/weights/{name}"][number % _COPIES] = weights[name]
        written[2 + number % _COPIES] = version
        written[0] = number

    def control(self, *, is_stopped: bool, limit: int = UNLIMITED) -> None:
        """See ParameterWriter."""
        self._dock.arrays["control"][:] = is_stopped, limit
        for actor in range(self._spec.actors):
            self._dock.ring(f"answer/{actor}")


def _specs(spec: StreamSpec) -> dict[str, ArraySpec]:
    """Return the arrays of all streams."""
    slots, lanes = spec.lanes * spec.depth, spec.lanes
    specs = {
        "control": _spec("int64", 2),
        "full": _spec("bool", slots),
        "numbers": _spec("int64", slots),
    }
    for policy, layout in spec.layouts.items():
        for name, each in layout.of_fragment(spec.steps).items():
            specs[f"{policy}/fragment/{name}"] = _spec(each.dtype, slots, *each.shape)
        num_slots = layout.observations.shape[0]
        specs[f"{policy}/episodes"] = _spec("float64", slots, num_slots * (spec.steps // 2 + 1), 3)
        specs[f"{policy}/ended"] = _spec("int64", slots)
        if spec.workers:
            specs |= {f"{policy}/{name}": each for name, each in _acting_specs(spec, layout, lanes).items()}
    for policy, weights in spec.weights.items():
        specs[f"{policy}/written"] = _spec("int64", 2 + _COPIES)
        for name, each in weights.items():
            specs[f"{policy}/weights/{name}"] = _spec(each.dtype, _COPIES, *each.shape)
    return specs


def _acting_specs(spec: StreamSpec, layout: ActingLayout, lanes: int) -> dict[str, ArraySpec]:
    """Return the arrays of one policy's inference stream."""
    number = ArraySpec(shape=(), dtype="int64")
    asked = layout.of_request() | {"number": number, "worker": number}
    answered = layout.of_answer() | {"number": number, "version": number}
    specs = {f"request/{n}": _spec(each.dtype, lanes, *each.shape) for n, each in asked.items()}
    return specs | {
        f"answer/{n}": _spec(each.dtype, spec.workers, lanes, *each.shape) for n, each in answered.items()
    }


def _slot_arrays(dock: Dock, policy: str, slot: int) -> dict[str, Array]:
    return {name: array[slot] for name, array in dock.under(f"{policy}/fragment/").items()}


def _spec(dtype: str, *shape: int) -> ArraySpec:
    return ArraySpec(shape=shape, dtype=dtype)
