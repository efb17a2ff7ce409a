"""GRPO: the answers to one prompt are each other's baseline (Shao et al., arXiv 2402.03300).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ group_advantages ─> advantages ─┐
                         └───────────────────────────────────────────────────────── update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.algorithms.steps import group_relative_advantages, update_and_publish, with_logprobs

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


ScaleSetting = Annotated[
    Literal["std", "off"],
    Field(description="Whether to divide advantages by the standard deviation of their group."),
]


class GroupScaleConfig(GroupConfig):
    """Settings that GRPO and its variants share."""

    scale: ScaleSetting = "std"


class GRPOConfig(GroupScaleConfig):
    """GRPO's settings."""

    name: Literal["grpo"]


def step(flow: Flow, prompts: Batch, config: GroupScaleConfig) -> Handle:
    """Run one iteration: sample groups, score them, prefer answers that beat their group."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    advantages = group_relative_advantages(flow, rewards, batches, config)
    return update_and_publish(flow, [*batches, advantages], config)


ALGORITHM = Algorithm(config=GRPOConfig, step=step)
