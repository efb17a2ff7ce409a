"""DAPO: asymmetric clip, dynamic sampling and an overlong penalty (Yu et al., arXiv 2503.14476).

prompts ─ generate ─> rollouts ─ score ─> where varied_groups ── enough? ── overlong_rewards ─> advantages
   └──────────── more of them <─────────────────────────────────── no ┘             update <────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.grpo import GroupScaleConfig
from rillflow.algorithms.steps import group_relative_advantages, update_and_publish, with_logprobs
from rillflow.formulas.config import PolicyLossConfig

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class DAPOConfig(GroupScaleConfig):
    """DAPO's settings."""

    name: Literal["dapo"]
    max_rounds: int = Field(
        4,
        ge=1,
        description="Sampling rounds at most until prompts_per_step groups have differing rewards; 1 "
        "never samples again.",
    )
    loss: PolicyLossConfig = PolicyLossConfig(clip_high=0.28)
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="Number of tokens before rollout.max_tokens in which the length penalty grows; 0 for "
        "none.",
    )

    @property
    def tails(self) -> Mapping[str, int]:
        """Number of tokens before the limit that are penalised."""
        return {"overlong_buffer": self.overlong_buffer}

    @property
    def draws_again(self) -> bool:
        """See SampledConfig."""
        return self.max_rounds > 1


def step(flow: Flow, prompts: Batch, config: DAPOConfig) -> Handle:
    """Run one iteration: sample groups until enough of them differ, penalise long answers, train."""

    def draw(prompts: Any) -> list[Any]:
        rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
        scores = flow.compute(formulas.varied_groups, flow.reward.score(rollouts), into="varied")
        return [flow.filter(each, "varied", by=scores) for each in (rollouts, scores)]

    size = {"groups": config.prompts_per_step, "samples": config.samples_per_prompt}
    rollouts, rewards = flow.refill(draw, prompts, **size, rounds=config.max_rounds)
    batches = with_logprobs(flow, rollouts, config)
    if config.overlong_buffer:
        length = {"buffer": config.overlong_buffer}
        rewards = flow.compute(formulas.overlong_rewards, rewards, rollouts, into="rewards", **length)
    advantages = group_relative_advantages(flow, rewards, batches, config)
    return update_and_publish(flow, [*batches, advantages], config)


ALGORITHM = Algorithm(config=DAPOConfig, step=step)
