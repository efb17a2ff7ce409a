"""Ranked: an answer's advantage is its rank among the answers to its prompt, whatever the rewards' scale.

prompts ─ generate ─> rollouts ─ score ─> rewards ─ rank_advantages ─> advantages ─┐
                         └──────────────────────────────────────────────────────── update ─> publish

Settings of its own, a loss's among them, and an update of the policy, on one rank or on several:

    python examples/ranked.py run examples/best_of_n.toml --set algorithm.name=ranked --dir runs/ranked
    python examples/ranked.py run examples/best_of_n.toml --set algorithm.name=ranked --dir runs/by_two \
        --set placement.pools.main=2
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import GroupConfig
from rillflow.cli.main import main
from rillflow.dataflow.flow import Flow
from rillflow.formulas.config import PolicyLossConfig
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metrics


class RankedLossConfig(PolicyLossConfig):
    """The policy's loss; good answers may gain more than bad ones lose."""

    clip_high: float = Field(0.28, ge=0, description="The ratio is clipped above at 1 + clip_high.")

    @model_validator(mode="after")
    def _wider_above(self) -> RankedLossConfig:
        if self.clip_high < self.clip_low:
            raise ValueError(
                f"clip_high is {self.clip_high:g}, and clip_low is {self.clip_low:g}: at least as much"
            )
        return self


class RankedConfig(GroupConfig):
    """Settings of [algorithm], beside those of every algorithm that compares a prompt's answers."""

    name: Literal["ranked"]
    strength: float = Field(1.0, gt=0, description="Advantage of an answer that beats all others.")
    loss: RankedLossConfig = RankedLossConfig()


def rank_advantages(rewards: Tensor, valid: Tensor, groups: Tensor, *, strength: float) -> Tensor:
    """[B] what share of its prompt's other answers a row beats, less what share beats it, times strength.

    Args:
        rewards: [B] float.
        valid: [B] bool, whether the row has one; a row without one gets 0 and is compared with none.
        groups: [B] a number that the rows of one prompt share; a formula may ask for it of any batch.
        strength: of the best.
    """
    fellows = (groups[:, None] == groups) & valid & valid[:, None]
    beaten = ((rewards[:, None] - rewards).sign() * fellows).sum(1)
    return strength * beaten / (fellows.sum(1) - 1).clamp(min=1)


def step(flow: Flow, prompts: Batch, config: RankedConfig) -> Metrics:
    """One iteration: sample, score, prefer what beat its fellows."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    advantages = flow.compute(rank_advantages, rewards, into="advantages", strength=config.strength)
    report: Metrics = flow.policy.update(rollouts, advantages, loss=config.loss, reuse=config)
    flow.publish(flow.policy)
    return report


def roles(_: RankedConfig) -> tuple[str, ...]:
    """Who takes part."""
    return ("policy", "reward")


ALGORITHM = Algorithm(config=RankedConfig, step=step, data=Data.PROMPTS, roles=roles)

if __name__ == "__main__":
    raise SystemExit(main(algorithms=[ALGORITHM]))
