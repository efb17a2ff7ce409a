"""Phases: list what a recipe runs one after the other, before anything is built for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig, SampledConfig
from rillflow.algorithms.registry import warm_start
from rillflow.training.config import TrainConfig

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """A phase before anything is built for it."""

    name: str
    """Name of the phase in the records."""
    algorithm: Algorithm
    """Algorithm of the phase."""
    config: AlgorithmConfig
    """The algorithm's settings."""
    train: TrainConfig
    """Its optimiser's settings."""
    first: int
    """Number of the run's steps before the phase."""
    evaluated: bool
    """Whether the phase samples rows, and evaluates the model before, during and after it."""

    @property
    def freshness(self) -> int:
        """Number of versions that a trained token may be old."""
        return self.config.freshness if isinstance(self.config, SampledConfig) else 0

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the phase calls."""
        return self.algorithm.called(self.config)


def phase_plans(recipe: Recipe) -> list[PhasePlan]:
    """Return the recipe's phases in order: the warm start, if there is one, and the algorithm."""
    main = PhasePlan(
        name=recipe.algorithm.name,
        algorithm=recipe.chosen,
        config=recipe.algorithm,
        train=recipe.policy.as_train(),
        first=0,
        evaluated=True,
    )
    if recipe.warm_start is None:
        return [main]
    algorithm, config = warm_start(recipe.warm_start)
    train = recipe.policy.with_rate(recipe.warm_start)
    warm = replace(main, name="warm_start", algorithm=algorithm, config=config, train=train, evaluated=False)
    return [warm, replace(main, first=config.steps)]
