"""Systems of recipes, for tests of algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rillflow.records.metrics import Metrics
from rillflow_classic.build import Parts, open_system
from rillflow_classic.environments.make import make_environment
from rillflow_classic.operators.context import PlanContext
from rillflow_classic.policy import ActorPolicy
from rillflow_classic.recipe import LoadedClassicRecipe


class OpenedRecipe:
    """The workers of a recipe, and its plan.

    Args:
        stack: ends the workers.
        algorithm: the recipe's ``[algorithm]``.
        tables: its other tables.
    """

    def __init__(self, stack: ExitStack, algorithm: dict[str, Any], **tables: Any) -> None:
        data = {"kind": "classic", "algorithm": {"steps": 1, **algorithm}, **tables}
        self.loaded = LoadedClassicRecipe.of(Path("run.toml"), data, [])
        self.parts = Parts.of(self.loaded)
        self.system: Any = open_system(self.parts, stack)

    def steps(self, count: int, seed: int = 0) -> Iterator[Metrics]:
        """Reset the environments, and yield steps of a new plan."""
        self.system.reset(seed)
        context = PlanContext()
        items = self.loaded.algorithm.plan(self.system, self.loaded.settings).run(context)  # type: ignore[attr-defined]
        for _ in range(count):
            yield {**next(items), **context.take_metrics()}

    def evaluated(self, policy: ActorPolicy, episodes: int = 20, seed: int = 12345) -> float:
        """Return the mean return of greedy episodes."""
        environment = make_environment(self.parts.environment, episodes, seed=seed)
        found: dict[int, float] = {}
        observations = environment.reset(seed)
        while len(found) < episodes:
            stepped = environment.step(policy.act(observations, greedy=True).actions)
            observations = stepped.observations
            for each in stepped.episodes:
                found.setdefault(each.slot, each.total_reward)
        environment.close()
        return float(np.mean(list(found.values())))
