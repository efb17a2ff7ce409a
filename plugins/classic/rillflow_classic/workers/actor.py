"""Actor: steps a ring of vector environments, and records fragments.

                    ┌──────────── ring: environment 0, 1, ... ────────────┐
    observations ─ post ─> ActingClient (policy here, or a policy worker) ─ take ─> actions
          ^                                                                          │
          └──── Recording, row t + 1 <──── VectorEnvironment.step <──────────────────┘

The actor steps whichever environment of the ring has received its actions, so that it steps one environment
while others wait. With the policies here, actions are there at once, and a ring of 1 is enough.

Recurrent state: after an episode has ended at step t, row t + 1 only resets. The policy acts in that row with
the old state; row t + 2 begins with the initial state. A learner does the same: after a row where ``valid``
is False, the state is the initial one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rillflow.errors import ConfigError, StreamError
from rillflow_classic.environments.vector import Stepped, VectorEnvironment
from rillflow_classic.fragment import Array, FinishedEpisode, Fragment, joined
from rillflow_classic.policy import Acted, ActorPolicy, Learner, Weights
from rillflow_classic.streams.stream import ActingClient, FragmentSink, ParameterReader, refresh
from rillflow_classic.workers.recording import ActingLayout, Arrays, Recording, fragment_of, layout_of
from rillflow_classic.workers.work_report import WorkMeter, WorkReport

WAIT_S = 60.0
"""Longest wait of ``sample`` for actions."""
PAUSE_S = 0.05
"""Longest wait of ``poll`` before it looks at its streams again."""


class InlineClient:
    """A policy in the actor's own process: it acts at once."""

    def __init__(self, policy: ActorPolicy) -> None:
        self.policy = policy
        self._acted: dict[int, tuple[Acted, int]] = {}

    def layout(self, environment: VectorEnvironment, num_slots: int) -> ActingLayout:
        """See ActingClient."""
        return layout_of(self.policy, environment, num_slots)

    def post(self, lane: int, observations: Array, state: Array | None) -> None:
        """See ActingClient."""
        self._acted[lane] = self.policy.act(observations, state), self.policy.version

    def take(self, lane: int) -> tuple[Acted, int] | None:
        """See ActingClient."""
        return self._acted.pop(lane, None)

    def wait(self, seconds: float) -> None:
        """See ActingClient; actions are there at once."""


class Actor:
    """A ring of vector environments and the policies that act in them.

    Args:
        environments: the ring; all have the same spaces.
        policies: policies by name; empty if ``clients`` act.
        steps: number of steps T of a fragment.
        routes: policy by a regular expression of the agent's whole name, first match wins; None: the only
            policy acts for all agents.
        index: index of the actor.
        seed: seed of the first episodes; ``reset`` replaces it.
        clients: clients of inference streams by policy, for policies that act elsewhere.
        sink: sample stream, for ``poll``.
        parameters: parameter stream, for ``poll``.
        learners: learners that have these policies, for plans that compute gradients here.

    Raises:
        ConfigError: the ring is empty, or an agent matches no policy.

    Example:
        actor = Actor([make_environment(config, 64)], {"policy": policy}, steps=128)
        fragment = actor.sample()
    """

    def __init__(
        self,
        environments: Sequence[VectorEnvironment],
        policies: Mapping[str, ActorPolicy],
        steps: int,
        *,
        routes: Mapping[str, str] | None = None,
        index: int = 0,
        seed: int = 0,
        clients: Mapping[str, ActingClient] | None = None,
        sink: FragmentSink | None = None,
        parameters: ParameterReader | None = None,
        learners: Mapping[str, Learner] | None = None,
    ) -> None:
        if not environments or steps < 1:
            raise ConfigError(
                f"an actor with {len(environments)} environments in its ring and fragments of {steps} steps",
                why="it steps at least one environment, at least one step",
            )
        self.index = index
        self.policies, self.learners = policies, learners or {}
        self._clients = {name: InlineClient(policy) for name, policy in policies.items()} | dict(
            clients or {}
        )
        if routes is None and len(self._clients) == 1:
            routes = {".*": next(iter(self._clients))}
        self._ring = [
            _Lane(lane, environment, routes or {}, self._clients, steps)
            for lane, environment in enumerate(environments)
        ]
        self._sink, self._parameters = sink, parameters
        self._seed, self._is_reset = seed, False
        self._meter = WorkMeter("actor")

    @property
    def layouts(self) -> list[dict[str, ActingLayout]]:
        """What the policies of every lane read and return, by policy."""
        return [{name: group.layout for name, group in lane.groups.items()} for lane in self._ring]

    def reset(self, seed: int) -> None:
        """Begin new episodes in every environment and restart the policies' random numbers.

        The same seed and weights give the same fragments; unfinished fragments are dropped.
        """
        for lane in self._ring:
            lane.reset(_seed(seed, self.index, lane.number))
        for place, policy in enumerate(self.policies.values()):
            policy.seed(_seed(seed, self.index, -1 - place))
        self._is_reset = True

    def environment_states(self) -> list[dict[str, Array]]:
        """Return the running statistics of every environment of the ring."""
        return [dict(lane.environment.state()) for lane in self._ring]

    def restore_environments(self, states: Sequence[Sequence[Mapping[str, Array]]]) -> None:
        """Restore what ``environment_states`` of all actors returned."""
        for lane, state in zip(self._ring, states[self.index], strict=True):
            lane.environment.restore(state)

    def load(self, version: int, weights: Weights, policy: str = "policy") -> None:
        """Load weights into a policy."""
        self.policies[policy].load(version, weights)

    def sample(self) -> Fragment | dict[str, Fragment]:
        """Step every environment T times; return the fragment of all slots, by policy if there are several.

        Raises:
            StreamError: actions did not come in time.
        """
        self._begin()
        deadline = time.monotonic() + WAIT_S
        open_lanes = list(self._ring)
        for lane in open_lanes:
            lane.begin(None)
        while open_lanes:
            moved = [lane for lane in open_lanes if lane.advance()]
            if not moved:
                self._wait(deadline - time.monotonic())
                self._check(deadline, open_lanes)
            open_lanes = [lane for lane in open_lanes if not lane.is_done]
        done = [lane.finish(self.index) for lane in self._ring]
        by_policy = {name: joined([each[name] for each in done]) for name in done[0]}
        self._meter.rows += sum(each.valid.size for each in by_policy.values())
        self._meter.batches += len(done)
        return by_policy if len(self._clients) > 1 else next(iter(by_policy.values()))

    def poll(self, budget_s: float) -> WorkReport:
        """Step environments and send fragments for a while, or until the trainer stops all workers.

        Each environment has at least one turn, also with a budget of 0. While the sample stream is full, an
        environment waits at the end of its fragment.
        """
        assert self._sink is not None and self._parameters is not None, "the actor has no streams"
        self._begin()
        deadline = time.monotonic() + budget_s
        while not self._parameters.is_stopped:
            stepped = [self._turn(lane, self._sink, self._parameters) for lane in self._ring]
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not any(stepped):
                self._wait(min(left, PAUSE_S))
        return self._meter.report()

    def close(self) -> None:
        """Close all environments."""
        for lane in self._ring:
            lane.environment.close()

    def _turn(self, lane: _Lane, sink: FragmentSink, parameters: ParameterReader) -> bool:
        if not lane.has_recording:
            if sink.sent(lane.number) >= parameters.limit or not refresh(self.policies, parameters):
                return False
            arrays = sink.reserve(lane.number)
            if arrays is None:
                return False
            lane.begin(arrays)
        if not lane.advance():
            return False
        self._meter.rows += lane.environment.num_slots
        if lane.is_done:
            sink.put(lane.number, lane.finish(self.index))
            self._meter.batches += 1
        return True

    def _begin(self) -> None:
        if not self._is_reset:
            self.reset(self._seed)

    def _wait(self, seconds: float) -> None:
        """Wait for actions if an environment needs some, else for room in the sample stream."""
        with self._meter.idle():
            if self._sink is not None and not any(lane.has_recording for lane in self._ring):
                self._sink.wait(seconds)
            else:
                for client in self._clients.values():
                    client.wait(max(0.0, seconds / len(self._clients)))

    def _check(self, deadline: float, waiting: Sequence[_Lane]) -> None:
        if time.monotonic() > deadline:
            raise StreamError(
                f"actor {self.index} received no actions for {WAIT_S:g} s",
                why=f"environments {[lane.number for lane in waiting]} of its ring wait for a policy worker",
            )


class _Group:
    """The slots of one environment that one policy acts in."""

    def __init__(
        self, client: ActingClient, environment: VectorEnvironment, slots: Array, steps: int
    ) -> None:
        self.client = client
        self.slots: Array | slice = slice(None) if len(slots) == environment.num_slots else slots
        self.layout = client.layout(environment, len(slots))
        self.specs = self.layout.of_fragment(steps)
        self.state = self.layout.initial
        self.resets: Array = np.zeros(len(slots), np.bool_)
        """[N] slots that reset in the row that comes next."""


class _Lane:
    """One environment of the ring, and the recordings of its policies."""

    def __init__(
        self,
        number: int,
        environment: VectorEnvironment,
        routes: Mapping[str, str],
        clients: Mapping[str, ActingClient],
        steps: int,
    ) -> None:
        self.number, self.environment, self._steps = number, environment, steps
        names = np.array([routed(agent, routes) for agent in environment.agents])
        self.groups = {
            str(name): _Group(clients[name], environment, np.flatnonzero(names == name), steps)
            for name in dict.fromkeys(names.tolist())
        }
        only = list(self.groups.values())
        self._only = only[0] if len(only) == 1 else None
        self._observations: Array | None = None
        """[N, ...] observations of row 0 of the next recording."""
        self._recordings: list[tuple[_Group, Recording]] = []
        self._is_posted = False
        self._acted: dict[int, tuple[Acted, int]] = {}

    @property
    def has_recording(self) -> bool:
        """Whether ``begin`` was called since the last fragment."""
        return bool(self._recordings)

    @property
    def is_done(self) -> bool:
        """Whether the fragment has all its steps."""
        return self._recordings[0][1].at == self._steps

    def reset(self, seed: int) -> None:
        """Begin new episodes; drop what is not finished."""
        self._observations = self.environment.reset(seed)
        self._recordings, self._acted, self._is_posted = [], {}, False
        for group in self.groups.values():
            group.state = group.layout.initial
            group.resets = np.zeros_like(group.resets)

    def begin(self, arrays: Mapping[str, Arrays] | None) -> None:
        """Begin a fragment in given arrays, by policy, or in new ones."""
        assert self._observations is not None, "reset comes first"
        for name, group in self.groups.items():
            given = arrays[name] if arrays is not None else {n: s.empty() for n, s in group.specs.items()}
            recording = Recording(given, self._steps)
            recording.observations[0] = self._observations[group.slots]
            if group.state is not None:
                given["state"][...] = group.state
            self._recordings.append((group, recording))

    def advance(self) -> bool:
        """Step once if all actions are there, and ask for the next ones; return whether it stepped."""
        if not self._is_posted:
            self._post()
        for place, (group, _) in enumerate(self._recordings):
            if place not in self._acted:
                acted = group.client.take(self.number)
                if acted is None:
                    return False
                self._acted[place] = acted
        self._is_posted = False
        self._write(self.environment.step(self._actions()))
        self._acted = {}
        if not self.is_done:
            self._post()
        return True

    def finish(self, actor: int) -> dict[str, Fragment]:
        """Return the fragments by policy, and keep the last observations for the next ones."""
        made = {}
        for (name, group), (_, recording) in zip(self.groups.items(), self._recordings, strict=True):
            recording.finish(group.resets)
            group.resets = recording.ended(self._steps - 1)
            made[name] = fragment_of(recording.arrays, episodes=recording.episodes, policy=name, actor=actor)
        self._observations = self._last()
        self._recordings = []
        return made

    def _post(self) -> None:
        for group, recording in self._recordings:
            group.client.post(self.number, recording.observations[recording.at], group.state)
        self._is_posted = True

    def _actions(self) -> Array:
        if self._only is not None:
            return self._acted[0][0].actions
        first = self._acted[0][0].actions
        actions = np.empty((self.environment.num_slots, *first.shape[1:]), first.dtype)
        for place, (group, _) in enumerate(self._recordings):
            actions[group.slots] = self._acted[place][0].actions
        return actions

    def _write(self, stepped: Stepped) -> None:
        for place, (group, recording) in enumerate(self._recordings):
            acted, version = self._acted[place]
            at = recording.at
            recording.write(acted, version, stepped, group.slots)
            if acted.state is not None:
                resets = recording.ended(at - 1) if at else group.resets
                group.state = restarted(acted.state, group.layout.initial, resets)
            if stepped.episodes:
                recording.episodes += _episodes_of(stepped, group.slots)

    def _last(self) -> Array:
        first = self._recordings[0][1].observations
        if self._only is not None:
            last: Array = first[-1]
            return last
        observations: Array = np.empty((self.environment.num_slots, *first.shape[2:]), first.dtype)
        for group, recording in self._recordings:
            observations[group.slots] = recording.observations[-1]
        return observations


def routed(agent: str, routes: Mapping[str, str]) -> str:
    """Return the policy of an agent: the first whose regular expression matches its whole name.

    Raises:
        ConfigError: none does.
    """
    for pattern, policy in routes.items():
        if re.fullmatch(pattern, agent):
            return policy
    raise ConfigError(
        f"agent {agent!r} matches no policy" if agent else "the environment's only agent matches no policy",
        why=f"{'' if agent else 'it has no name, and '}the patterns are {', '.join(map(repr, routes))}",
        fix="add a pattern that matches its whole name, such as '.*' at the end"
        if agent
        else "remove [policies]",
    )


def restarted(state: Array, initial: Array | None, resets: Array) -> Array:
    """Return the state with the initial one where a row was a reset."""
    if initial is None or not resets.any():
        return state
    restarted: Array = np.where(resets.reshape(-1, *(1,) * (state.ndim - 1)), initial, state)
    return restarted


def _episodes_of(stepped: Stepped, slots: Array | slice) -> list[FinishedEpisode]:
    """Return the episodes of some slots, numbered as in the fragment."""
    if isinstance(slots, slice):
        return list(stepped.episodes)
    places = {slot: place for place, slot in enumerate(slots.tolist())}
    return [replace(each, slot=places[each.slot]) for each in stepped.episodes if each.slot in places]


def _seed(*parts: int) -> int:
    """Return a seed below 2^31 made of several numbers."""
    return int(np.random.SeedSequence([part & 0xFFFFFFFF for part in parts]).generate_state(1)[0] >> 1)
