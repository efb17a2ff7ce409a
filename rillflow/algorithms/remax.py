"""ReMax: the baseline is the reward of the answer decoded greedily (Li et al., arXiv 2310.10505).

prompts ─┬─ greedy ──> answers  ─ score ─> greedy rewards ─┐
         └─ generate ─> rollouts ─ score ─> rewards ─ over_greedy ─> advantages ─┐
                           └──────────────────────────────────────────────────── update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import OnlineConfig
from rillflow.algorithms.steps import (
    kl_penalised_rewards,
    missing_end_penalised,
    update_and_publish,
    with_logprobs,
)

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class ReMaxConfig(OnlineConfig):
    """ReMax's settings."""

    name: Literal["remax"]

    @model_validator(mode="after")
    def _of_one_scale(self) -> Self:
        if self.shape is not None and self.shape.normalise is not None:
            raise ValueError(
                "shape.normalise would scale the rewards of greedy answers and of samples differently; "
                "leave it out"
            )
        return self


def step(flow: Flow, prompts: Batch, config: ReMaxConfig) -> Handle:
    """Run one iteration: sample, score, prefer answers that beat the greedy answer."""
    likeliest = flow.policy.greedy(prompts)
    greedy = missing_end_penalised(flow, flow.reward.score(likeliest), likeliest, config)
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    rewards = kl_penalised_rewards(flow, rewards, batches, config)
    advantages = flow.compute(formulas.over_greedy, rewards, into="advantages", greedy=greedy)
    return update_and_publish(flow, [*batches, advantages], config)


ALGORITHM = Algorithm(config=ReMaxConfig, step=step)
