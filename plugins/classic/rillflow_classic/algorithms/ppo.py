"""PPO: proximal policy optimisation (Schulman et al., arXiv 1707.06347).

    L = -E[min(rho A, clip(rho, 1 - c, 1 + c) A)] + w 0.5 E[(V - R)^2] - h E[entropy],  rho = pi / mu

A are generalised advantage estimates, R = A + V(acted), mu acted. Actors play one fragment each with the same
weights; the learner makes several passes over all of them in minibatches; then the actors get its weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from rillflow.records.metrics import Metrics
from rillflow_classic.algorithm import ClassicAlgorithm, System
from rillflow_classic.on_policy import OnPolicyConfig, OnPolicyLearner, require_rows
from rillflow_classic.operators.steps import train_one_step
from rillflow_classic.workers.buffer_worker import fresh_values


class ClassicPPOConfig(OnPolicyConfig):
    """``[algorithm]`` of PPO."""


def plan(system: System, settings: OnPolicyConfig) -> Iterator[Metrics]:
    """Return the dataflow: one fragment of every actor, an update, new weights for all actors."""
    del settings
    return system.rollouts("bulk_sync").for_each(train_one_step(system))  # type: ignore[no-any-return]


ALGORITHM = ClassicAlgorithm(
    name="ppo",
    config=ClassicPPOConfig,
    learner=OnPolicyLearner,
    plan=plan,
    sums_gradients=True,
    reanalyse=fresh_values,
    require=require_rows,
)
