"""Build: make the learners, the actors and the way between them from a recipe.

recipe ─┬─ spaces of one environment ─> LearnerInputs ─> learners ──────────────────────┐
        └─ backend ─ WorkerSet of actors, each with its environments and policies ──────┴─> System

An actor acts with the policy of a learner of its own: so every algorithm brings its way to act and to
explore, and a plan may compute gradients at the actors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rillflow.config.schema import Section
from rillflow.runs.json_lines import JSON
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.config import ActorsConfig
from rillflow_classic.data_parallel import DataParallelLearner, RankLearner
from rillflow_classic.environments.catalog import located
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import Space
from rillflow_classic.executor.system import StaticSystem
from rillflow_classic.fragment import Array
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import ActorPolicy, Learner
from rillflow_classic.streams.memory import MemoryTransport
from rillflow_classic.streams.sockets import SocketTransport
from rillflow_classic.streams.stream import StreamSpec, Transport
from rillflow_classic.system import CallSystem, StreamSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor, routed
from rillflow_classic.workers.policy_worker import PolicyWorker
from rillflow_classic.workers.recording import spec_of

if TYPE_CHECKING:
    from rillflow_classic.algorithm import System
    from rillflow_classic.recipe import LoadedClassicRecipe
    from rillflow_classic.workers.population import PopulationSystem

ACTORS, POLICIES, TRAINERS = "actors", "policies", "trainers"
"""Pools of the actors, the policy workers and the trainer's ranks."""
POLL_S = 5.0
"""Seconds of a call in which a worker polls its streams."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What workers are made from, in any process."""

    environment: EnvironmentSettings
    """Settings of the environment."""
    network: NetworkConfig
    """Settings of the network."""
    algorithm: str
    """Name of the algorithm."""
    settings: Section
    """Settings of the algorithm."""
    workers: ActorsConfig
    """Settings of the workers."""
    policies: tuple[str, ...]
    """Names of the policies."""
    routes: dict[str, str] | None
    """Policy by regular expression of its agents; None for one policy."""
    seed: int
    """Seed of the run."""

    observation_space: Space
    """Space of one observation, after the wrappers."""
    action_space: Space
    """Space of one action."""

    @classmethod
    def of(cls, loaded: LoadedClassicRecipe) -> Parts:
        """Return the parts of a recipe; an environment is made to learn its spaces.

        Raises:
            RillflowError: the environment cannot be made.
        """
        recipe = loaded.recipe
        settings = located(recipe.environment, loaded.base)
        environment = make_environment(settings, 1, seed=recipe.run.seed)
        try:
            for agent in environment.agents if recipe.routes else ():
                routed(agent, recipe.routes or {})
            spaces = environment.observation_space, environment.action_space
        finally:
            environment.close()
        return cls(
            environment=settings,
            network=recipe.network,
            algorithm=loaded.algorithm.name,
            settings=loaded.settings,
            workers=recipe.workers,
            policies=tuple(recipe.policies) or ("policy",),
            routes=recipe.routes,
            seed=recipe.run.seed,
            observation_space=spaces[0],
            action_space=spaces[1],
        )

    def learners(self, actor: int = 0, actors: int = 1) -> dict[str, Learner]:
        """Return new learners by policy; the same seed gives the same weights.

        Args:
            actor: index of the actor that acts with them.
            actors: number of such actors.

        Raises:
            RillflowError: the network does not fit the spaces.
        """
        made = algorithm_of(self.algorithm).learner
        return {
            name: made(
                LearnerInputs(
                    observation_space=self.observation_space,
                    action_space=self.action_space,
                    network=self.network,
                    settings=self.settings,
                    seed=self.seed + place,
                    policy=name,
                    actor=actor,
                    actors=actors,
                )
            )
            for place, name in enumerate(self.policies)
        }

    def acting(self) -> dict[str, ActorPolicy]:
        """Return policies that act with weights of their own, by name."""
        return {name: learner.policy for name, learner in self.learners().items()}


def make_actor(parts: Parts, transport: Transport | None, index: int) -> Actor:
    """Return actor ``index`` with its environments, its policies and its ends of the streams."""
    workers = parts.workers
    ring = [make_environment(parts.environment, workers.slots, seed=parts.seed) for _ in range(workers.ring)]
    is_apart = transport is not None and workers.inference != "actor"
    learners = {} if is_apart else parts.learners(index, workers.actors)
    return Actor(
        ring,
        {name: learner.policy for name, learner in learners.items()},
        workers.steps,
        routes=parts.routes,
        index=index,
        seed=parts.seed,
        clients={name: transport.acting_client(name, index) for name in parts.policies}
        if transport is not None and is_apart
        else None,
        sink=None if transport is None else transport.sink(index),
        parameters=None if transport is None else transport.reader(),
        learners=learners,
    )


def make_policy_worker(parts: Parts, transport: Transport, index: int) -> PolicyWorker:
    """Return policy worker ``index``, which acts for the actors."""
    servers = {name: transport.acting_server(name, index) for name in parts.policies}
    return PolicyWorker(parts.acting(), servers, transport.reader())


def make_trainer(parts: Parts, rank: int) -> RankLearner:
    """Return the learner of a trainer rank; all ranks have the same seed."""
    del rank
    return cast(RankLearner, next(iter(parts.learners().values())))


def open_system(parts: Parts, stack: ExitStack) -> CallSystem | StreamSystem | StaticSystem:
    """Start the workers, which end with the stack, and return the system of a run."""
    workers = parts.workers
    if workers.executor == "static":
        made = [make_actor(parts, None, index) for index in range(workers.actors)]
        static = StaticSystem(made, parts.learners(), workers.threads)
        stack.callback(static.close)
        return static
    backend = BACKENDS[workers.place]()
    stack.callback(backend.close)
    pools = [Pool(name=ACTORS, size=workers.actors, world=1)]
    if workers.inference == "policy":
        pools.append(Pool(name=POLICIES, size=workers.policy_workers, world=1))
    if workers.trainers > 1:
        pools.append(Pool(name=TRAINERS, size=workers.trainers))
    further = algorithm_of(parts.algorithm).pools
    sizes = further(parts.settings) if further else {}
    backend.open([*pools, *(Pool(name=name, size=size, world=1) for name, size in sizes.items())])
    learners = parts.learners()
    if workers.trainers > 1:
        make = partial(make_trainer, parts)
        learners = {
            name: DataParallelLearner(backend, TRAINERS, make, each.policy) for name, each in learners.items()
        }
    if workers.transport == "calls":
        return CallSystem(WorkerSet(backend, ACTORS, partial(make_actor, parts, None)), learners)
    spec = _stream_spec(parts, learners)
    transport: Transport
    if workers.transport == "tcp":
        transport = SocketTransport(spec, host=workers.host)
    else:
        transport = MemoryTransport(spec, is_shared=workers.place != "inline")
    stack.callback(transport.close)
    actors = WorkerSet(backend, ACTORS, partial(make_actor, parts, transport))
    policy_workers = server = None
    if workers.inference == "policy":
        policy_workers = WorkerSet(backend, POLICIES, partial(make_policy_worker, parts, transport))
    elif workers.inference == "trainer":
        servers = {name: transport.acting_server(name, 0) for name in parts.policies}
        server = PolicyWorker({name: each.policy for name, each in learners.items()}, servers)
    is_threaded = workers.place != "inline" or sum(pool.size for pool in pools) > 1
    system = StreamSystem(
        transport,
        actors,
        learners,
        policy_workers=policy_workers,
        server=server,
        batch=workers.batch,
        budget_s=POLL_S if is_threaded else 0.0,
    )
    stack.callback(system.close)
    return system


def _stream_spec(parts: Parts, learners: Mapping[str, Learner]) -> StreamSpec:
    """Return the sizes of all streams; an actor is made to learn them."""
    workers = parts.workers
    ring = [make_environment(parts.environment, workers.slots, seed=parts.seed)]
    shown = Actor(ring, parts.acting(), workers.steps, routes=parts.routes)
    servers = {"policy": workers.policy_workers, "trainer": 1, "actor": 0}
    try:
        return StreamSpec(
            actors=workers.actors,
            ring=workers.ring,
            steps=workers.steps,
            layouts=shown.layouts[0],
            weights={
                name: {key: spec_of(value) for key, value in learner.weights().items()}
                for name, learner in learners.items()
            },
            workers=servers[workers.inference],
        )
    finally:
        shown.close()


class EnvironmentStatistics:
    """The running statistics of all environments, as an object with a state.

    Args:
        system: its actors have the environments.
    """

    def __init__(self, system: System | PopulationSystem) -> None:
        self._system = system

    def newest(self) -> Mapping[str, Array]:
        """Return the statistics of the first environment of the first actor."""
        found: Mapping[str, Array] = self._system.ask_actors("environment_states")[0][0]
        return found

    def state(self) -> tuple[Mapping[str, Tensor], Mapping[str, JSON]]:
        """Return the statistics by actor, environment and name."""
        states = self._system.ask_actors("environment_states")
        return {
            f"{actor}.{lane}.{name}": torch.as_tensor(value)
            for actor, ring in enumerate(states)
            for lane, found in enumerate(ring)
            for name, value in found.items()
        }, {"actors": len(states), "ring": len(states[0])}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, JSON]) -> None:
        """Restore what ``state`` returned."""
        states: Any = [[{} for _ in range(int(str(state["ring"])))] for _ in range(int(str(state["actors"])))]
        for key, value in tensors.items():
            actor, lane, name = key.split(".", 2)
            states[int(actor)][int(lane)][name] = value.numpy()
        self._system.ask_actors("restore_environments", states)


def _processes() -> Backend:
    from rillflow.workers.processes import ProcessBackend

    return ProcessBackend()


def _ray() -> Backend:
    from rillflow.workers.start import ray_backend

    return ray_backend()


BACKENDS: dict[str, Callable[[], Backend]] = {"inline": InlineBackend, "process": _processes, "ray": _ray}
"""Makes the backend of every ``workers.place``."""
