"""REINFORCE++: rewards to go, whitened over the whole batch; no critic, no group (Hu, arXiv 2501.03262).

prompts ─ generate ─> rollouts ─ score ─> rewards ─> token_rewards ─ whitened_returns ─> advantages
                         └── update ─> publish <──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import TokenConfig
from rillflow.algorithms.steps import token_level_rewards, update_and_publish, with_logprobs

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class ReinforcePPConfig(TokenConfig):
    """REINFORCE++'s settings."""

    name: Literal["reinforce_pp"]


def step(flow: Flow, prompts: Batch, config: ReinforcePPConfig) -> Handle:
    """Run one iteration: sample, score, prefer tokens that earn more than the batch."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    token_rewards = token_level_rewards(flow, rewards, batches, config, weight=config.loss.kl)
    advantages = flow.compute(
        formulas.whitened_returns, token_rewards, rollouts, into="advantages", gamma=config.gamma
    )
    return update_and_publish(flow, [*batches, advantages], config)


ALGORITHM = Algorithm(config=ReinforcePPConfig, step=step)
