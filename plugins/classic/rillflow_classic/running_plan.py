"""Running plan: the workers of a recipe, and the plan of its algorithm that moves them.

Parts ─ open_system ─> System ─ reset(seed) ─> a new plan ─ step ─> Metrics
          ^                                       │
          └──── states <── a checkpoint, or another member of a population

A run has one, a population one for each member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rillflow.config.schema import Section
from rillflow.records.metrics import Metrics
from rillflow.runs.reader import Evaluation
from rillflow_classic.algorithms.registry import algorithm_of
from rillflow_classic.build import Parts, keep_state, open_system
from rillflow_classic.checkpointed import CheckpointedObjects, State
from rillflow_classic.config import perturbed
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.policy import Learner


class RunningPlan:
    """The workers of a recipe and their plan, which begins anew with every ``reset``.

    Args:
        parts: what the workers are made from.
        stack: ends the workers.
    """

    def __init__(self, parts: Parts, stack: ExitStack) -> None:
        self._parts, self._stack = parts, stack.enter_context(ExitStack())
        self.context = PlanContext()
        """What the operators record."""
        self._open(parts.settings, {})

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learner of every policy, by name."""
        return self._system.learners

    @property
    def kept(self) -> CheckpointedObjects:
        """Everything with a state: learners, buffers, statistics of environments."""
        return self._system.kept

    def reset(self, seed: int) -> None:
        """Begin new episodes and a new plan."""
        self._system.reset(seed)
        plan: Any = algorithm_of(self._parts.algorithm).plan(self._system, self._settings)
        self.context = PlanContext()
        self._items: Iterator[Metrics] = plan.run(self.context)

    def step(self) -> Metrics:
        """Make a step of the plan."""
        return {**next(self._items), **self.context.take_metrics()}

    def change(self, values: Mapping[str, float], states: Mapping[str, State], seed: int) -> None:
        """Go on with other settings, and with the given states in place of its own.

        Learners and actors are made anew, because either may have read a setting when it was made.
        """
        self._open(perturbed(self._parts.settings, values), {**self.states(), **states})
        self.reset(seed)

    def states(self, names: Sequence[str] = ()) -> dict[str, State]:
        """Return the states of some objects; of all without names."""
        return self.kept.states(names)

    def evaluations(self) -> list[Evaluation]:
        """Return the results of the evaluation worker since the last call."""
        return self._system.evaluations()

    def ask_actors(self, method: str, *arguments: Any) -> list[Any]:
        """See System."""
        return self._system.ask_actors(method, *arguments)

    def close_environments(self) -> None:
        """Close the environments of all actors after the last step, so that others can take their place."""
        self._system.close_environments()

    def _open(self, settings: Section, states: Mapping[str, State]) -> None:
        self._settings = settings
        self._stack.close()
        self._system = open_system(replace(self._parts, settings=settings), self._stack)
        self.kept.take(states)
        self.statistics = keep_state(self._system, self._parts.environment)
        """Running statistics of the environments; None without normalisation."""
