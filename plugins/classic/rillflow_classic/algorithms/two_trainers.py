"""Two trainers side by side: PPO and DQN in one multi-agent environment (RLlib Flow, arXiv 2011.12719, 5.3).

    fragments of both policies ─ duplicate(2) ─┬─ select ppo ─ train ─────────────────┐
                                               └─ select dqn ─ store, replay, train ──┴─ concurrently

The recipe's ``[policies]`` match agents to the policies ``ppo`` and ``dqn``, such as even agents to PPO and
odd ones to DQN. The losses are those of PPO and DQN. A step of the run is one fragment for each of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rillflow.config.schema import Section
from rillflow.records.metrics import Metrics, merge_metrics
from rillflow_classic.algorithm import ClassicAlgorithm, LearnerInputs, RolloutSize, System
from rillflow_classic.algorithms.dqn import DQNConfig, DQNLearner
from rillflow_classic.algorithms.ppo import ClassicPPOConfig
from rillflow_classic.off_policy import require_replay, train_from_replay
from rillflow_classic.on_policy import OnPolicyLearner, require_rows
from rillflow_classic.operators.iterators import concurrently
from rillflow_classic.operators.steps import select, train_one_step
from rillflow_classic.policy import Learner

PPO, DQN = "ppo", "dqn"
"""Names of the policies."""


class TwoTrainersConfig(Section):
    """``[algorithm]`` of two trainers."""

    ppo: ClassicPPOConfig = ClassicPPOConfig()
    dqn: DQNConfig = DQNConfig()


def learner_of(inputs: LearnerInputs) -> Learner:
    """Return the learner of a policy, which is named after its algorithm."""
    if inputs.policy == PPO:
        return OnPolicyLearner(replace(inputs, settings=inputs.settings.ppo))
    return DQNLearner(replace(inputs, settings=inputs.settings.dqn))


def require(inputs: LearnerInputs, size: RolloutSize) -> None:
    """Raise ConfigError if a fragment does not fit the minibatches, or the replay buffer."""
    if inputs.policy == PPO:
        require_rows(replace(inputs, settings=inputs.settings.ppo), size)
    else:
        require_replay(replace(inputs, settings=inputs.settings.dqn), size)


def plan(system: System, settings: TwoTrainersConfig) -> Iterator[Metrics]:
    """Return the dataflow: each fragment to both trainers."""
    del settings
    learner: Any = system.learners[DQN]
    for_ppo, for_dqn = system.rollouts("bulk_sync").duplicate(2)
    flows = [
        for_ppo.for_each(select(PPO)).for_each(train_one_step(system, PPO)),
        for_dqn.for_each(select(DQN)).for_each(train_from_replay(system, learner)),
    ]
    return concurrently(flows, "round_robin").batch(2).for_each(both)  # type: ignore[return-value]


def both(metrics: Sequence[Metrics]) -> Metrics:
    """Return the metrics of both trainers: each under its name, and those of acting together as well."""
    acting = ("episode/", "actor/")
    shared = merge_metrics({k: v for k, v in each.items() if k.startswith(acting)} for each in metrics)
    named = zip((PPO, DQN), metrics, strict=True)
    own = {renamed(name, key): value for name, each in named for key, value in each.items()}
    return {**shared, **own}


def renamed(policy: str, name: str) -> str:
    """Return a metric's name with the policy in it. Example: ``policy/ppo_loss/mean``."""
    area, thing, stat = name.split("/")
    return f"{area}/{policy}_{thing}/{stat}"


ALGORITHM = ClassicAlgorithm(
    name="two_trainers",
    config=TwoTrainersConfig,
    learner=learner_of,
    plan=plan,
    policies=(PPO, DQN),
    require=require,
)
