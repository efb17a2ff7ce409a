"""Build: make the learners, the actors and the way between them from a recipe.

recipe ─┬─ spaces of one environment ─> LearnerInputs ─> learners ──────────────────────┐
        └─ backend ─ WorkerSet of actors, each with its environments and policies ──────┴─> System

An actor acts with the policy of a learner of its own: so every algorithm brings its way to act and to
explore, and a plan may compute gradients at the actors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from rillflow.config.schema import Section
from rillflow.errors import ConfigError
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.fork_server import ForkServer
from rillflow.workers.inline import InlineBackend
from rillflow.workers.processes import ProcessBackend
from rillflow.workers.start import ray_backend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.algorithms.registry import located as located_algorithm
from rillflow_classic.checkpointed import State
from rillflow_classic.config import ActorsConfig, EpisodesConfig
from rillflow_classic.data_parallel import DataParallelLearner, RankLearner
from rillflow_classic.environments.catalog import located
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import Space
from rillflow_classic.executor.rounds import static_rounds
from rillflow_classic.fragment import Array
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import Learner
from rillflow_classic.streams.layout import record_of
from rillflow_classic.streams.sockets import open_streams as streams_of
from rillflow_classic.streams.streams import Streams, StreamSpec
from rillflow_classic.system import CallSystem, StreamSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor, routed
from rillflow_classic.workers.buffer_worker import BufferWorker
from rillflow_classic.workers.evaluation_worker import EvaluationWorker
from rillflow_classic.workers.policy_worker import PolicyWorker
from rillflow_classic.workers.trainer_worker import FragmentQueue

if TYPE_CHECKING:
    from rillflow_classic.algorithm import System
    from rillflow_classic.recipe import LoadedClassicRecipe
    from rillflow_classic.workers.population import PopulationSystem

ACTORS, POLICIES, BUFFERS, EVALUATORS = "actors", "policies", "buffers", "evaluators"
"""Pools of the actors, the policy workers, the buffer workers and the evaluation worker."""
TRAINERS = "trainers"
"""Pool of the trainer's ranks."""
ENVIRONMENTS = "environments"
"""Name of the running statistics of environments in checkpoints."""
SLOW_IMPORTS = ("torch._dynamo", "envpool")
"""Modules that take long to import. Workers need those that the driver has imported for its own learners."""
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
    """Name of the algorithm, as in the recipe; that of a file with its absolute path."""
    settings: Section
    """Settings of the algorithm."""
    workers: ActorsConfig
    """Settings of the workers."""
    evaluate: EpisodesConfig
    """Settings of evaluations."""
    policies: tuple[str, ...]
    """Names of the policies."""
    agents: dict[str, int]
    """Number of agents of an environment, by policy."""
    routes: dict[str, str] | None
    """Policy by regular expression of its agents; None for one policy."""
    seed: int
    """Seed of the run."""

    observation_space: Space
    """Space of one observation, after the wrappers."""
    action_space: Space
    """Space of one action."""
    names: tuple[str, ...]
    """Names of the agents of an environment; one empty text without several."""
    plain_space: Space
    """Space of one observation, before the wrappers."""
    own_spaces: tuple[Space, Space]
    """Spaces of an observation and of an action, as the environment itself has them."""
    members: int = 1
    """Members of the population; 1 without one."""
    first_copy: int = 0
    """Number of the first environment of the first actor; members of a population have different ones."""

    @property
    def num_copies(self) -> int:
        """Number of environments of all actors."""
        return _num_copies(self.workers)

    @property
    def evaluation_copy(self) -> int:
        """Number of the first environment of evaluations and videos, after those of all members."""
        return self.members * self.num_copies

    @classmethod
    def of(cls, loaded: LoadedClassicRecipe, *, is_beside: bool = False) -> Parts:
        """Return the parts of a recipe; an environment is made to learn its spaces.

        Args:
            loaded: the recipe.
            is_beside: whether its run may train at the same time: then the environment has a number after
                those of the actors.

        Raises:
            RillflowError: the environment cannot be made.
        """
        recipe = loaded.recipe
        settings = located(recipe.environment, loaded.base)
        members = recipe.population.members if recipe.population else 1
        copy = members * _num_copies(recipe.workers) if is_beside else 0
        environment = make_environment(settings, 1, seed=recipe.run.seed, copy=copy)
        try:
            policies = tuple(recipe.policies) or ("policy",)
            acting = [routed(each, recipe.routes or {".*": policies[0]}) for each in environment.agents]
            spaces = environment.observation_space, environment.action_space
            plain, own = environment.plain_space, environment.own_spaces
        finally:
            environment.close()
        if idle := [name for name in policies if name not in acting]:
            raise ConfigError(
                f"policies.{idle[0]} is {recipe.policies[idle[0]]!r}, and no agent goes to this policy",
                why="each agent goes to the first policy that matches its name: "
                + ", ".join(map(repr, environment.agents)),
                fix="correct the regular expression, or the order of [policies]",
            )
        return cls(
            environment=settings,
            network=recipe.network,
            algorithm=str(located_algorithm(recipe.algorithm.name, loaded.base)),
            settings=loaded.settings,
            workers=recipe.workers,
            evaluate=recipe.evaluate,
            policies=policies,
            agents={name: acting.count(name) for name in policies},
            routes=recipe.routes,
            seed=recipe.run.seed,
            observation_space=spaces[0],
            action_space=spaces[1],
            names=tuple(environment.agents),
            plain_space=plain,
            own_spaces=own,
            members=members,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Import an own algorithm in the other process before the settings of its class are made."""
        return _parts, ({**vars(self), "settings": self.settings.model_dump()},)

    def learners(self, actor: int = 0, actors: int = 1) -> dict[str, Learner]:
        """Return new learners by policy; the same seed gives the same weights.

        Args:
            actor: index of the actor that acts with them.
            actors: number of actors.

        Raises:
            RillflowError: the network does not fit the spaces.
        """
        made = algorithm_of(self.algorithm).learner
        return {name: made(self.learner_inputs(name, actor, actors)) for name in self.policies}

    def learner_inputs(self, policy: str, actor: int = 0, actors: int = 1) -> LearnerInputs:
        """Return the arguments of the learner of a policy; see ``learners``."""
        return LearnerInputs(
            observation_space=self.observation_space,
            action_space=self.action_space,
            network=self.network,
            settings=self.settings,
            seed=self.seed + self.policies.index(policy),
            policy=policy,
            actor=actor,
            actors=actors,
        )


def _parts(fields: Mapping[str, Any]) -> Parts:
    settings = algorithm_of(fields["algorithm"]).config.model_validate(fields["settings"])
    return Parts(**{**fields, "settings": settings})


def _num_copies(workers: ActorsConfig) -> int:
    return workers.actors * workers.ring * workers.slots


def make_actor(parts: Parts, streams: Streams | None, index: int) -> Actor:
    """Return actor ``index`` with its environments, its policies and its end of the streams."""
    workers = parts.workers
    first, slots = parts.first_copy + index * workers.ring * workers.slots, workers.slots
    ring = [
        make_environment(parts.environment, slots, seed=parts.seed, copy=first + number * slots)
        for number in range(workers.ring)
    ]
    learners = {}
    if streams is None or workers.inference == "actor":
        learners = parts.learners(index, workers.actors)
    return Actor(
        ring,
        {name: learner.policy for name, learner in learners.items()},
        workers.steps,
        routes=parts.routes,
        index=index,
        seed=parts.seed,
        streams=None if streams is None else streams.end("actor", index),
        learners=learners,
    )


def make_policy_worker(parts: Parts, streams: Streams, index: int) -> PolicyWorker:
    """Return policy worker ``index``, which acts for the actors."""
    policies = {name: learner.policy for name, learner in parts.learners().items()}
    return PolicyWorker(policies, streams.end("worker", index))


def make_buffer_worker(parts: Parts, streams: Streams, index: int) -> BufferWorker:
    """Return buffer worker ``index``, which computes fragments anew."""
    reanalyse = algorithm_of(parts.algorithm).reanalyse
    assert reanalyse is not None, "the recipe was checked"
    return BufferWorker(parts.learners(), streams.end("buffer", index), reanalyse)


def make_evaluation_worker(parts: Parts, index: int) -> EvaluationWorker:
    """Return the evaluation worker."""
    del index
    return EvaluationWorker(parts.evaluate.episodes, parts.evaluate.success)


def make_trainer(parts: Parts, rank: int) -> RankLearner:
    """Return the learner of a trainer rank; all ranks have the same seed."""
    del rank
    return cast(RankLearner, next(iter(parts.learners().values())))


def pools_of(parts: Parts) -> list[Pool]:
    """Return the pools of all workers."""
    workers, further = parts.workers, algorithm_of(parts.algorithm).pools
    sizes = {
        ACTORS: workers.actors,
        POLICIES: workers.policy_workers if workers.inference == "policy" else 0,
        BUFFERS: workers.buffer_workers,
        EVALUATORS: int(parts.evaluate.from_training),
        **(further(parts.settings) if further else {}),
    }
    pools = [Pool(name=name, size=size, world=1) for name, size in sizes.items() if size]
    return pools + ([Pool(name=TRAINERS, size=workers.trainers)] if workers.trainers > 1 else [])


def open_backend(place: str, pools: Sequence[Pool], stack: ExitStack) -> Backend:
    """Return an open backend for ``workers.place``, which ends with the stack."""
    backend: Backend
    if place == "inline":
        backend = InlineBackend()
    elif place == "process":
        modules = [__name__, *(name for name in SLOW_IMPORTS if name in sys.modules)]
        backend = ProcessBackend(forks=stack.enter_context(ForkServer(modules)))
    else:
        backend = ray_backend()
    stack.callback(backend.close)
    backend.open(pools)
    return backend


def open_system(parts: Parts, stack: ExitStack) -> CallSystem | StreamSystem:
    """Start the workers, which end with the stack, and return the system of a run."""
    workers, pools = parts.workers, pools_of(parts)
    backend = open_backend(workers.place, pools, stack)
    learners = parts.learners()
    if workers.trainers > 1:
        make = partial(make_trainer, parts)
        learners = {
            name: DataParallelLearner(backend, TRAINERS, make, each.policy) for name, each in learners.items()
        }
    evaluator = None
    if parts.evaluate.from_training:
        evaluator = WorkerSet(backend, EVALUATORS, partial(make_evaluation_worker, parts))
    if workers.transport == "calls":
        actors = WorkerSet(backend, ACTORS, partial(make_actor, parts, None))
        is_static = workers.executor == "static"
        next_round = static_rounds(actors, workers.threads, stack) if is_static else None
        called = CallSystem(actors, learners, evaluator, next_round=next_round)
        if workers.place == "inline":  # other places end with their processes
            stack.callback(called.close_environments)
        return called
    streams = open_streams(parts, learners)
    stack.callback(streams.close)
    makers = {ACTORS: make_actor, POLICIES: make_policy_worker, BUFFERS: make_buffer_worker}
    polled = {
        name: WorkerSet[Any](backend, name, partial(make, parts, streams))
        for name, make in makers.items()
        if name in backend.pools
    }
    server = None
    if workers.inference == "trainer":
        policies = {name: each.policy for name, each in learners.items()}
        server = PolicyWorker(policies, streams.end("worker", 0), refreshes=False)
    is_threaded = workers.place != "inline" or sum(pool.size for pool in pools) > 1
    queue = FragmentQueue(
        streams.spec.lanes * streams.spec.depth,
        batch=workers.batch,
        reuses=workers.reuses,
        max_lag=workers.max_lag,
    )
    system = StreamSystem(
        streams,
        polled.pop(ACTORS),
        learners,
        others=list(polled.values()),
        server=server,
        queue=queue,
        prefetch=workers.prefetch,
        budget_s=POLL_S if is_threaded else 0.0,
        evaluator=evaluator,
    )
    stack.callback(system.close_environments if workers.place == "inline" else system.close)
    return system


def open_streams(parts: Parts, learners: Mapping[str, Learner]) -> Streams:
    """Open the streams of a run; an actor is made to learn the sizes."""
    workers = parts.workers
    copy = parts.first_copy
    environment = make_environment(parts.environment, workers.slots, seed=parts.seed, copy=copy)
    policies = {name: learner.policy for name, learner in parts.learners().items()}
    shown = Actor([environment], policies, workers.steps, routes=parts.routes)
    shown.close()
    spec = StreamSpec(
        actors=workers.actors,
        ring=workers.ring,
        steps=workers.steps,
        layouts=shown.layouts,
        weights={name: record_of(learner.weights()) for name, learner in learners.items()},
        workers={"policy": workers.policy_workers, "trainer": 1, "actor": 0}[workers.inference],
        buffers=workers.buffer_workers,
        depth=workers.depth,
    )
    return streams_of(workers.transport, spec, workers.host)


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

    def state(self) -> State:
        """Return the statistics by actor, environment and name."""
        return {
            str(actor): {
                str(lane): {name: torch.as_tensor(value) for name, value in found.items()}
                for lane, found in enumerate(ring)
            }
            for actor, ring in enumerate(self._system.ask_actors("environment_states"))
        }

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned."""
        rings = [state[str(actor)] for actor in range(len(state))]
        states = [
            [{name: value.numpy() for name, value in ring[str(lane)].items()} for lane in range(len(ring))]
            for ring in rings
        ]
        self._system.ask_actors("restore_environments", states)


def keep_state(
    system: System | PopulationSystem, environment: EnvironmentSettings
) -> EnvironmentStatistics | None:
    """Have checkpoints hold the learners and the running statistics of environments; return these."""
    for name, learner in system.learners.items():
        system.kept.put(name, learner)
    if not (environment.normalise_observations or environment.normalise_rewards):
        return None
    return system.kept.put(ENVIRONMENTS, EnvironmentStatistics(system))
