"""PPO: a critic predicts returns, the policy prefers what does better (Schulman et al., arXiv 1707.06347).

prompts ─ generate ─> rollouts ─┬─ score ─> rewards ─ per token ─> token_rewards ─┐
                                ├─ critic.values ─> values ─────── gae ───────────┴─> advantages ─ whitened ─┐
                                ├─ critic.update <─ returns                                                  │
                                └─ policy.update ─> publish <────────────────────────────────────────────────┘

With ``pretrain_weight``, the policy's optimiser steps also imitate demonstrations: PPO-ptx (Ouyang et al.,
arXiv 2203.02155).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import TokenConfig
from rillflow.algorithms.steps import (
    bootstrapped,
    publish,
    token_level_rewards,
    trained_rows,
    update_and_publish,
    with_logprobs,
)
from rillflow.formulas.config import ValueLossConfig
from rillflow.graph.loss import over
from rillflow.tasks.kinds import DEMONSTRATIONS, DataKind

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch

PATIENCE = 10
"""Steps in which a relative error of 1 would double the KL weight (Ziegler et al.: K = 0.1 per step)."""


class CriticTrainedConfig(TokenConfig):
    """Settings that algorithms with a critic share."""

    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda.")
    kl_target: float = Field(
        0.0,
        ge=0,
        description="Target KL divergence of a row from the reference, in nats; loss.kl adapts to it. 0 "
        "keeps loss.kl fixed.",
    )
    value_loss: ValueLossConfig = ValueLossConfig()
    pretrain_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the demonstrations' mean negative log likelihood in each optimiser step "
        "(PPO-ptx); 0 for none.",
    )

    @model_validator(mode="after")
    def _priced(self) -> CriticTrainedConfig:
        if self.kl_target and self.loss.kl_paid != "reward":
            raise ValueError(
                f"kl_target is {self.kl_target:g}, and loss.kl is {self.loss.kl:g} "
                f"in the {self.loss.kl_in}: only a loss.kl above 0 with kl_in = 'reward' can adapt"
            )
        return self

    @model_validator(mode="after")
    def _shown(self) -> CriticTrainedConfig:
        if self.pretrain_weight and self.minibatches > self.prompts_per_step:
            raise ValueError(
                f"minibatches is {self.minibatches} and prompts_per_step {self.prompts_per_step}: with "
                f"pretrain_weight {self.pretrain_weight:g} every minibatch needs a demonstration, and a step "
                "has one per prompt"
            )
        return self


class PPOConfig(CriticTrainedConfig):
    """PPO's settings."""

    name: Literal["ppo"]


def step(
    flow: Flow, prompts: Batch, config: PPOConfig, demonstrations: Batch | None = None
) -> tuple[Handle, Handle]:
    """Run one iteration: sample, score, compare with the critic's prediction, train policy and critic."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    token_rewards = token_level_rewards(
        flow, rewards, batches, config, weight=kl_weight(flow, batches, config)
    )
    token_rewards = bootstrapped(flow, flow.critic, token_rewards, rollouts, config)
    values = flow.critic.values(rollouts)
    credit = {"gamma": config.gamma, "lam": config.lam}
    estimates = flow.compute(formulas.gae, token_rewards, values, rollouts, into="advantages", **credit)
    returns = flow.compute(formulas.value_targets, estimates, values, rollouts, into="returns")
    advantages = flow.compute(formulas.whitened, estimates, rollouts, into="advantages")
    critic_rows = trained_rows(flow, [rollouts, values, returns], config)
    critic = flow.critic.update(*critic_rows, loss=config.value_loss, passes=config)
    return critic, update_with_pretraining(flow, [*batches, advantages], config, demonstrations)


def update_with_pretraining(
    flow: Flow, batches: list[Handle], config: CriticTrainedConfig, demonstrations: Batch | None
) -> Handle:
    """Run ``update_and_publish``, with demonstrations in the same optimiser steps if they count (PPO-ptx)."""
    if demonstrations is None:
        return update_and_publish(flow, batches, config)
    policy_term = over(*trained_rows(flow, batches, config), loss=config.loss)
    weight, imitated = config.pretrain_weight, formulas.cross_entropy
    imitation_term = over(demonstrations, loss=imitated, weight=weight, name="supervised")
    report = flow.policy.update(policy_term, imitation_term, passes=config)
    publish(flow, config, is_held=bool(config.loss.kl))
    return report


def kl_weight(flow: Flow, batches: list[Handle], config: CriticTrainedConfig) -> Any:
    """Return the KL weight of this step, and remember the next one, moved towards ``kl_target``."""
    weight = flow.recall("kl_weight", config.loss.kl)
    if config.kl_target:
        estimator = config.loss.estimator
        observed = flow.number(formulas.mean_divergence, *batches, estimator=estimator)
        rows = config.rows_per_step
        pace = {"target": config.kl_target, "horizon": float(PATIENCE * rows), "rows": rows}
        following = flow.number(formulas.next_kl_weight, weight=weight, observed=observed, **pace)
        flow.remember("kl_weight", following)
    return weight


def beside(config: CriticTrainedConfig) -> DataKind | None:
    """Return demonstrations as the second batch, if they count."""
    return DEMONSTRATIONS if config.pretrain_weight else None


ALGORITHM = Algorithm(config=PPOConfig, step=step, beside=beside)
