"""Build: make the learners, the actors and the way between them from a recipe.

recipe ─┬─ spaces of one environment ─> LearnerInputs ─> learners ──────────────────────┐
        └─ backend ─ WorkerSet of actors, each with its environments and policies ──────┴─> System

An actor acts with the policy of a learner of its own: so every algorithm brings its way to act and to
explore, and a plan may compute gradients at the actors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rillflow.config.schema import Section
from rillflow.workers.backend import Backend, Pool
from rillflow.workers.inline import InlineBackend
from rillflow_classic.algorithm import LearnerInputs
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.config import ActorsConfig
from rillflow_classic.environments.catalog import located
from rillflow_classic.environments.config import EnvironmentSettings
from rillflow_classic.environments.make import make_environment
from rillflow_classic.environments.vector import VectorEnvironment
from rillflow_classic.networks.config import NetworkConfig
from rillflow_classic.policy import Learner
from rillflow_classic.system import CallSystem
from rillflow_classic.worker_set import WorkerSet
from rillflow_classic.workers.actor import Actor

if TYPE_CHECKING:
    from rillflow_classic.recipe import LoadedClassicRecipe

ACTORS = "actors"
"""Pool of the actors."""


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

    @classmethod
    def of(cls, loaded: LoadedClassicRecipe) -> Parts:
        """Return the parts of a recipe."""
        recipe = loaded.recipe
        return cls(
            environment=located(recipe.environment, loaded.base),
            network=recipe.network,
            algorithm=loaded.algorithm.name,
            settings=loaded.settings,
            workers=recipe.workers,
            policies=tuple(recipe.policies) or ("policy",),
            routes=recipe.routes,
            seed=recipe.run.seed,
        )

    def learners(self, environment: VectorEnvironment) -> dict[str, Learner]:
        """Return new learners by policy; the same seed gives the same weights."""
        made = algorithm_of(self.algorithm).learner
        return {
            name: made(
                LearnerInputs(
                    observation_space=environment.observation_space,
                    action_space=environment.action_space,
                    network=self.network,
                    settings=self.settings,
                    seed=self.seed + place,
                    policy=name,
                )
            )
            for place, name in enumerate(self.policies)
        }


def make_actor(parts: Parts, index: int) -> Actor:
    """Return actor ``index`` with its environments and policies."""
    workers = parts.workers
    ring = [make_environment(parts.environment, workers.slots, seed=parts.seed) for _ in range(workers.ring)]
    learners = parts.learners(ring[0])
    policies = {name: learner.policy for name, learner in learners.items()}
    return Actor(ring, policies, workers.steps, routes=parts.routes, index=index, seed=parts.seed)


def new_learners(parts: Parts) -> dict[str, Learner]:
    """Return the learners of a run; an environment shows them its spaces.

    Raises:
        RillflowError: the environment cannot be made, or the network does not fit its spaces.
    """
    environment = make_environment(parts.environment, 1, seed=parts.seed)
    try:
        return parts.learners(environment)
    finally:
        environment.close()


def open_system(parts: Parts, stack: ExitStack) -> CallSystem:
    """Start the workers, which end with the stack, and return the system of a run."""
    learners = new_learners(parts)
    backend = BACKENDS[parts.workers.place]()
    stack.callback(backend.close)
    backend.open([Pool(name=ACTORS, size=parts.workers.actors, world=1)])
    actors = WorkerSet(backend, ACTORS, partial(make_actor, parts))
    return CallSystem(actors, learners)


def _processes() -> Backend:
    from rillflow.workers.processes import ProcessBackend

    return ProcessBackend()


def _ray() -> Backend:
    from rillflow.workers.start import ray_backend

    return ray_backend()


BACKENDS: dict[str, Callable[[], Backend]] = {"inline": InlineBackend, "process": _processes, "ray": _ray}
"""Makes the backend of every ``workers.place``."""
