"""Phases: list what a recipe runs one after the other, before anything is built for it.

Recipe ─ listen ─> the calls of each phase's step ─ phase_plans ─> PhasePlan: the warm start, the algorithm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.algorithms.registry import warm_start
from rillflow.app.sections import Recipe
from rillflow.controller.schedules.in_order import InOrder
from rillflow.controller.schedules.schedule import Schedule
from rillflow.graph.trace import Listener
from rillflow.rollout.config import answering
from rillflow.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """A phase before anything is built for it."""

    name: str
    """Name of the phase in the records."""
    algorithm: Algorithm
    """Algorithm of the phase."""
    config: AlgorithmConfig
    """The algorithm's settings."""
    heard: Listener
    """The calls of its step under these settings."""
    train: TrainConfig
    """Its optimiser's settings."""
    first: int
    """Number of the run's steps before the phase."""
    schedule: Schedule
    """Order of its steps."""
    evaluated: bool
    """Whether the phase samples rows, and evaluates the model before, during and after it."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the phase calls, in order; the trained one is first."""
        return tuple(self.heard.heard)

    @property
    def answers(self) -> Mapping[str, Any] | None:
        """A step's ``samples`` and ``sampling``; None if it does not sample its data in one call."""
        calls = self.heard.calls.get("policy.generate", [])
        if len(calls) != 1 or calls[0][0][:1] != ["data"]:
            return None
        (_, *args), options = calls[0]
        return answering(args, options)


def listen(recipe: Recipe) -> tuple[Listener, ...]:
    """Return the calls of the step of each phase, in order."""
    return tuple(algorithm.listened(config) for algorithm, config in _configs(recipe))


def phase_plans(recipe: Recipe, heard: Sequence[Listener]) -> tuple[PhasePlan, ...]:
    """Return the recipe's phases in order: the warm start, if there is one, and the algorithm.

    Args:
        recipe: the settings.
        heard: the calls of the step of each phase; see ``listen``.
    """
    plans, first = list[PhasePlan](), 0
    for (algorithm, config), calls in zip(_configs(recipe), heard, strict=True):
        is_main = config is recipe.algorithm
        train = recipe.policy.as_train()
        if not is_main and recipe.warm_start is not None:
            train = recipe.policy.with_rate(recipe.warm_start)
        plans.append(
            PhasePlan(
                name=config.name if is_main else "warm_start",
                algorithm=algorithm,
                config=config,
                heard=calls,
                train=train,
                first=first,
                schedule=recipe.schedule if is_main else InOrder(),
                evaluated=is_main,
            )
        )
        first += config.steps
    return tuple(plans)


def _configs(recipe: Recipe) -> Iterator[tuple[Algorithm, AlgorithmConfig]]:
    if recipe.warm_start is not None:
        yield warm_start(recipe.warm_start)
    yield recipe.chosen, recipe.algorithm
