"""Streams between actors, policy workers and the trainer, the same on every transport.

    actor ── sample stream: fragments ─────────────────────────────> trainer
    actor ── inference stream: observations ──> policy worker            │
      ^  └──────────── actions <───────────────────┘  ^                  │
      └──────────── parameter stream: newest weights ─┴──────────────────┘

A lane is one environment of an actor's ring. Each lane has at most one request and ``depth`` fragments under
way: this bounds every stream. Every wait has a deadline.

- Fragments: none is lost or delivered twice; those of a lane arrive in order. A killed actor's
  unfinished ones are not delivered.
- Requests: an answer belongs to the present request of its lane, whichever worker gave it. A request
  without an answer after RETRY_S goes to the next worker, so a killed worker stops no actor.
- Parameters: a reader sees ascending versions and may skip some; a weight is never torn.

transport ``inline``: one process. ``shared_memory``: processes of one machine. ``tcp``: several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.policy import Acted, ActorPolicy, Weights
from rillflow_classic.workers.recording import ActingLayout, Arrays, Specs

RETRY_S = 1.0
"""Seconds without an answer after which a request goes to the next policy worker."""
UNLIMITED = 2**62
"""Limit of the fragments of a lane while the trainer takes them as they come."""


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
    weights: Mapping[str, Specs] = field(default_factory=dict)
    """Arrays of every policy's weights, by policy."""
    workers: int = 0
    """Number of policy workers; 0 if the actors have the policies."""
    depth: int = 2
    """Fragments of a lane that are written or wait for the trainer."""

    @property
    def lanes(self) -> int:
        """Lanes of all actors."""
        return self.actors * self.ring


class ActingClient(Protocol):
    """The actor's side of one policy: here, or behind an inference stream."""

    def layout(self, environment: VectorEnvironment, num_slots: int) -> ActingLayout:
        """Return what the policy reads and returns."""

    def post(self, lane: int, observations: Array, state: Array | None) -> None:
        """Ask for actions for a lane, which is one environment of the ring."""

    def take(self, lane: int) -> tuple[Acted, int] | None:
        """Return the actions of a lane and the version that acted; None while they are not there.

        A request without an answer after RETRY_S goes to the next worker.
        """

    def wait(self, seconds: float) -> None:
        """Wait until an answer has come, at most this long."""


class FragmentSink(Protocol):
    """The actor's side of a sample stream."""

    def reserve(self, lane: int) -> Mapping[str, Arrays] | None:
        """Return arrays for a lane's next fragments, by policy; None while the stream is full.

        The same arrays until ``put``.
        """

    def put(self, lane: int, fragments: Mapping[str, Fragment]) -> None:
        """Send the fragments whose arrays ``reserve`` gave."""

    def sent(self, lane: int) -> int:
        """Return the number of fragments of a lane that were sent."""

    def wait(self, seconds: float) -> None:
        """Wait until there may be room, at most this long."""


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
    """Gives the memory back to the actor."""

    @property
    def version(self) -> int:
        """Oldest version of the weights that acted."""
        return min(int(each.versions.min()) for each in self.fragments.values())


class FragmentSource(Protocol):
    """The trainer's side of the sample stream."""

    def take(self, wait_s: float) -> list[Received]:
        """Return all fragments that have arrived and were not taken; wait for the first at most this long."""


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
    """[R] number of every request in its lane."""


class ActingServer(Protocol):
    """A policy worker's side of an inference stream."""

    def requests(self) -> ActingRequests | None:
        """Return all requests that have arrived and are not answered; None without one."""

    def answer(self, requests: ActingRequests, acted: Acted, version: int) -> None:
        """Send the actions to the actors."""

    def wait(self, seconds: float) -> None:
        """Wait until a request has come, at most this long."""


class ParameterReader(Protocol):
    """A worker's side of the parameter stream."""

    def newest(self, policy: str, version: int) -> tuple[int, Weights] | None:
        """Return a policy's newest weights, if they are newer than a version; the arrays are copies."""

    @property
    def is_stopped(self) -> bool:
        """Whether the trainer wants all workers to end their present call."""

    @property
    def limit(self) -> int:
        """Number of fragments that every lane may have begun since the start of the run.

        Whoever sees a limit also sees the weights that were published before it.
        """


class ParameterWriter(Protocol):
    """The trainer's side of the parameter stream."""

    def publish(self, policy: str, version: int, weights: Weights) -> None:
        """Replace the newest weights of a policy."""

    def control(self, *, is_stopped: bool, limit: int = UNLIMITED) -> None:
        """Stop or start all workers, and set the limit of ``ParameterReader``."""


class Transport(Protocol):
    """Both ends of all streams; workers receive it as an argument, and make their ends of it."""

    spec: StreamSpec
    """The sizes."""

    def acting_client(self, policy: str, actor: int) -> ActingClient:
        """Return an actor's end of a policy's inference stream."""

    def acting_server(self, policy: str, worker: int) -> ActingServer:
        """Return a policy worker's end of a policy's inference stream."""

    def sink(self, actor: int) -> FragmentSink:
        """Return an actor's end of the sample stream."""

    def source(self) -> FragmentSource:
        """Return the trainer's end of the sample stream."""

    def reader(self) -> ParameterReader:
        """Return a worker's end of the parameter stream."""

    def writer(self) -> ParameterWriter:
        """Return the trainer's end of the parameter stream."""

    def close(self) -> None:
        """Release the memory and the sockets of this process."""


def refresh(policies: Mapping[str, ActorPolicy], parameters: ParameterReader) -> bool:
    """Load the newest weights into policies; return whether each has received some."""
    for name, policy in policies.items():
        newest = parameters.newest(name, policy.version)
        if newest is not None:
            policy.load(*newest)
    return all(policy.version >= 0 for policy in policies.values())
