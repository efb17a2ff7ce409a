"""Algorithm: a learner and a plan, under a name that a recipe gives.

recipe ─> settings ─┬─ learner(LearnerInputs) ─> Learner         one for each policy
                    └─ plan(System, settings) ─> iterator        one item is one step of the run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium

from rillflow.config.schema import Section
from rillflow.records.metrics import Metrics
from rillflow_classic.checkpointed import CheckpointedObjects
from rillflow_classic.fragment import Array, Fragment
from rillflow_classic.policy import Learner
from rillflow_classic.worker_set import WorkerSet


@dataclass(frozen=True, kw_only=True)
class LearnerInputs:
    """Arguments of a learner's constructor."""

    observation_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one observation, after the recipe's wrappers."""
    action_space: gymnasium.Space  # type: ignore[type-arg]
    """Space of one action."""
    network: Any
    """Settings of the network, ``NetworkConfig``."""
    settings: Any
    """Settings of the algorithm."""
    seed: int
    """Seed of its first weights and of its random numbers."""
    policy: str = "policy"
    """Name of the policy."""
    actor: int = 0
    """Index of the actor that acts with it."""
    actors: int = 1
    """Number of actors that each act with a copy."""


@dataclass(frozen=True, kw_only=True)
class RolloutSize:
    """Size of the fragments of one policy that a plan receives at once."""

    slots: int
    """Slots that lie side by side, N."""
    steps: int
    """Steps of each slot, T."""
    is_one_machine: bool
    """Whether all workers run on this machine, and share its memory."""


class System(Protocol):
    """The actors and learners of a plan, and the transport between them, as the recipe chooses."""

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learner of every policy, by name."""

    @property
    def learner(self) -> Learner:
        """The learner, if there is one policy."""

    @property
    def kept(self) -> CheckpointedObjects:
        """Objects with a state that a resumed run needs; a plan takes its buffers from ``kept.keep``."""

    def rollouts(self, mode: str, *, num_async: int = 1) -> Any:
        """Return a LocalIterator of fragments from the actors.

        Args:
            mode: ``bulk_sync``: one fragment of each actor, joined, with no actor running in between;
                ``async``: fragments as they come.
            num_async: calls in flight at each actor in mode ``async``.
        """

    def publish(self, learner: Learner | None = None) -> None:
        """Send a learner's weights to the actors, or to the policy workers that act for them."""

    def start_workers(self, pool: str, make: Callable[[int], Any]) -> WorkerSet[Any]:
        """Start workers of another kind on one of the algorithm's ``pools``, beside the actors.

        Args:
            pool: name of the pool.
            make: makes worker ``index``; a module's function, or a partial of one.
        """

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of a method of every actor, between two plans or two fragments."""

    def reset(self, seed: int) -> None:
        """Begin new episodes in every environment, with the newest weights, and drop unfinished fragments.

        The run calls it between two plans: at the start, and after every checkpoint. With the same seed,
        weights and kept objects, the same steps follow, so a resumed run is equal to an uninterrupted one.
        """


@dataclass(frozen=True, kw_only=True)
class ClassicAlgorithm:
    """An algorithm that a recipe may name."""

    name: str
    """Name in ``algorithm.name``."""
    config: type[Section]
    """Its settings."""
    learner: Callable[[LearnerInputs], Learner]
    """Makes the learner of one policy."""
    plan: Callable[[Any, Any], Iterable[Metrics]]
    """``plan(system, settings)``: the dataflow; each item ends a step of the run."""
    policies: tuple[str, ...] = ()
    """Names of its policies, which a recipe matches to agents; empty: one policy acts for all agents."""
    is_in_step: bool = True
    """Whether a plan's steps depend on the seed alone; otherwise episodes go on after a checkpoint."""
    sums_gradients: bool = False
    """Whether the learner sums its gradients over trainer ranks (``data_parallel.RankLearner``)."""
    pools: Callable[[Any], Mapping[str, int]] | None = None
    """``pools(settings)``: number of further workers that the plan starts, by pool; None: none."""
    reanalyse: Callable[[Any, Fragment], Mapping[str, Array]] | None = None
    """``reanalyse(learner, fragment)``: outputs that replace the actor's, with newer weights, for
    ``workers.buffer_workers``; None: there is nothing to compute anew."""
    require: Callable[[LearnerInputs, RolloutSize], None] | None = None
    """``require(inputs, size)``: raises ConfigError before the start if settings do not fit the fragments of
    a policy; None: they always do."""
    remark: str = ""
    """Note on how its policy acts in evaluations, outside the plan; empty for most algorithms."""
    calls_actors: bool = False
    """Whether the plan calls the actors itself, beside ``System.rollouts``; it then needs a CallSystem."""


OneFragment = Mapping[str, Fragment]
"""Fragments of one actor, by policy."""
