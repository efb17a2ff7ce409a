"""RLOO: a row's baseline is the mean of the others in its group (Ahmadian et al., arXiv 2402.14740).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ leave_one_out ─> advantages ─┐
                         └────────────────────────────────────────────────────── update ─> publish

GRPO without division by the group's deviation, and with advantages multiplied by G / (G - 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.algorithms.steps import kl_penalised_rewards, update_and_publish, with_logprobs

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class RLOOConfig(GroupConfig):
    """RLOO's settings."""

    name: Literal["rloo"]


def step(flow: Flow, prompts: Batch, config: RLOOConfig) -> Handle:
    """Run one iteration: sample groups, score them, prefer answers that beat the others in their group."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    rewards = kl_penalised_rewards(flow, rewards, batches, config)
    advantages = flow.compute(formulas.leave_one_out, rewards, into="advantages")
    return update_and_publish(flow, [*batches, advantages], config)


ALGORITHM = Algorithm(config=RLOOConfig, step=step)
