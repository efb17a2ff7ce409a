"""REINFORCE++: rewards to go, whitened over the whole batch; no critic, no group (Hu, arXiv 2501.03262).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ earn ─> token_rewards ─ whitened_returns ─> advantages
                         └── update ─> publish <───────────────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import TokenConfig
from rillflow.algorithms.grpo import roles
from rillflow.algorithms.steps import earn, improve, look_back

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.records.batch import Batch
    from rillflow.records.metrics import Metrics


class ReinforcePPConfig(TokenConfig):
    """REINFORCE++'s settings."""

    name: Literal["reinforce_pp"]


def step(flow: Flow, prompts: Batch, config: ReinforcePPConfig) -> Metrics:
    """One iteration: sample, score, prefer what earned more than the batch."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    known = look_back(flow, rollouts, config)
    earned = earn(flow, rewards, known, config, weight=config.loss.kl)
    advantages = flow.compute(
        formulas.whitened_returns, earned, rollouts, into="advantages", gamma=config.gamma
    )
    return improve(flow, [*known, advantages], config)


ALGORITHM = Algorithm(config=ReinforcePPConfig, step=step, data=Data.PROMPTS, roles=roles)
