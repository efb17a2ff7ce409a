"""An algorithm of your own: REINFORCE, which is A2C with returns instead of advantages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

import rillflow
from rillflow.records.metrics import Metrics
from rillflow_classic.algorithm import ClassicAlgorithm
from rillflow_classic.algorithms.a2c import A2CConfig
from rillflow_classic.fragment import Fragment
from rillflow_classic.on_policy import Estimates, OnPolicyLearner
from rillflow_classic.operators.steps import train_one_step


class Reinforce(OnPolicyLearner):
    """Weights the log probability of an action with the return that follows, minus the mean return."""

    def estimates(self, data: Fragment, starts: Tensor) -> Estimates:
        """Return the estimates of A2C with other advantages."""
        found = super().estimates(data, starts)
        return replace(found, advantages=found.returns - found.returns.mean())


def plan(system: Any, settings: A2CConfig) -> Iterable[Metrics]:
    """Return the dataflow: one fragment of every actor, an update, new weights for the actors."""
    del settings
    found: Iterable[Metrics] = system.rollouts("bulk_sync").for_each(train_one_step(system))
    return found


REINFORCE = ClassicAlgorithm(name="reinforce", config=A2CConfig, learner=Reinforce, plan=plan)

if __name__ == "__main__":
    settings = {"algorithm": {"name": "reinforce.py:REINFORCE", "steps": 100, "lr": 3e-3}}
    folder = Path(__file__).parent
    run = rillflow.train(folder / "corridor.toml", settings=settings, dir="runs/reinforce")
    print(run.evaluations[-1].value)
