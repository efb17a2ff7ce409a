"""DAPO: two clips, only groups that differ, a price for long answers (Yu et al., arXiv 2503.14476).

prompts ─ generate ─> rollouts ─ score ─> overlong_rewards ─ group_advantages ─> advantages ─┐
                         └───────────────────────────────────────────── where varied_groups ──┴─> update
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, roles
from rillflow.algorithms.steps import charge, improve, look_back
from rillflow.formulas.config import PolicyLossConfig

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.records.batch import Batch
    from rillflow.records.metrics import Metrics


class DAPOLoss(PolicyLossConfig):
    """The upper clip is the higher one."""

    clip_high: float = Field(0.28, ge=0, description="The ratio is clipped above at 1 + clip_high.")


class DAPOConfig(GroupScaleConfig):
    """DAPO's settings."""

    name: Literal["dapo"]
    loss: DAPOLoss = DAPOLoss()
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before rollout.max_tokens from which length is priced; 0 for none."
    )


def step(flow: Flow, prompts: Batch, config: DAPOConfig) -> Metrics:
    """One iteration: sample groups, price their length, learn from those whose rewards differ."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    known = look_back(flow, rollouts, config)
    rewards = charge(flow, rewards, known, config)
    varied = flow.compute(formulas.varied_groups, rewards, into="varied", or_all=True)
    if config.overlong_buffer:
        length = {"buffer": config.overlong_buffer}
        varied = flow.compute(formulas.overlong_rewards, varied, rollouts, into="rewards", **length)
    advantages = flow.compute(formulas.group_advantages, varied, into="advantages", scale=config.scale)
    kept = [flow.filter(each, "varied", by=advantages) for each in (*known, advantages)]
    return improve(flow, kept, config)


ALGORITHM = Algorithm(config=DAPOConfig, step=step, data=Data.PROMPTS, roles=roles)
