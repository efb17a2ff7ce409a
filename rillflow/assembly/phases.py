"""Phases: what a recipe runs one after the other, before anything is built for it."""

from __future__ import annotations

from dataclasses import dataclass

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, SampledConfig
from rillflow.algorithms.registry import warm_start
from rillflow.assembly.recipe import Recipe
from rillflow.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """A phase before anything is built for it."""

    name: str
    """What the records call it."""
    algorithm: Algorithm
    """What it runs."""
    config: AlgorithmConfig
    """The algorithm's settings."""
    train: TrainConfig
    """Its optimiser's settings."""
    first: int
    """The run's steps before it."""
    evaluated: bool
    """Whether what is trained is judged around it."""
    samples: bool
    """Whether anything may be sampled in it or around it."""

    @property
    def freshness(self) -> int:
        """The policy versions that a trained token may be old."""
        return self.config.freshness if isinstance(self.config, SampledConfig) else 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles it calls."""
        return self.algorithm.called(self.config)


def phase_plans(recipe: Recipe) -> list[PhasePlan]:
    """The recipe's phases in order: the warm start, where there is one, and the algorithm."""
    plans, first = [], 0
    if recipe.warm_start is not None:
        algorithm, config = warm_start(recipe.warm_start)
        plans.append(
            PhasePlan(
                name="warm_start",
                algorithm=algorithm,
                config=config,
                train=recipe.policy.with_rate(recipe.warm_start),
                first=0,
                evaluated=False,
                samples=False,
            )
        )
        first = config.steps
    plans.append(
        PhasePlan(
            name=recipe.algorithm.name,
            algorithm=recipe.chosen,
            config=recipe.algorithm,
            train=recipe.policy.as_train(),
            first=first,
            evaluated=True,
            samples=True,
        )
    )
    return plans
