"""Safe RLHF: the most reward whose cost stays below a limit (Dai et al., arXiv 2310.12773).

rollouts ─┬─ reward.score ─ gae with critic.values ─────> reward_advantages ─┐
          ├─ cost.score ─┬─ gae with cost_critic.values ─> cost_advantages ──┴─> advantages ─ policy.update
          │              └─ mean_cost ─> the multiplier of the next step: dearer while cost exceeds the limit
          └─ critic.update, cost_critic.update <─ returns of each

PPO with a second critic; the two advantages are mixed at the multiplier's price. Demonstrations beside the
prompts, where ``pretrain_weight`` lets them count, are imitated in the policy's optimiser steps.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.ppo import CriticTrainedConfig, beside, kl_weight, learn
from rillflow.algorithms.ppo import roles as without_cost
from rillflow.algorithms.steps import bootstrap, earn, learnt_from, look_back, spend

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.records.batch import Batch
    from rillflow.records.metrics import Metrics

EACH = 0.5
"""The share of the divergence's price that reward and cost pay each; mixed, no multiplier changes it."""


class SafeRLHFConfig(CriticTrainedConfig):
    """Safe RLHF's settings."""

    name: Literal["safe_rlhf"]
    cost_limit: float = Field(0.0, description="Mean cost of a row that is allowed.")
    cost_margin: float = Field(
        0.0, ge=0, description="How far below the limit the multiplier aims, so that swings keep it too."
    )
    multiplier_lr: float = Field(
        0.1, gt=0, description="Step of the multiplier's logarithm for a cost one above the limit."
    )
    first_multiplier: float = Field(1.0, gt=0, description="The multiplier of the first step.")
    highest_multiplier: float = Field(
        10.0, gt=0, description="The multiplier grows no further, be the cost as high as it may."
    )


def step(
    flow: Flow, prompts: Batch, config: SafeRLHFConfig, demonstrations: Batch | None = None
) -> tuple[Metrics, Metrics, Metrics]:
    """One iteration: sample, score, price; reward over cost at the present price, and the next price."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    costs = flow.cost.score(rollouts)
    known = look_back(flow, rollouts, config)
    values, cost_values = flow.critic.values(rollouts), flow.cost_critic.values(rollouts)
    credit = {"gamma": config.gamma, "lam": config.lam}
    weight = kl_weight(flow, known, config)
    earned = earn(flow, rewards, known, config, weight, share=EACH)
    earned = bootstrap(flow, flow.critic, earned, rollouts, config)
    spent = spend(flow, costs, known, config, weight, share=EACH)
    spent = bootstrap(flow, flow.cost_critic, spent, rollouts, config)
    gains = flow.compute(formulas.gae, earned, values, rollouts, into="reward_advantages", **credit)
    harms = flow.compute(formulas.gae, spent, cost_values, rollouts, into="cost_advantages", **credit)
    earnings = flow.compute(formulas.lambda_returns, earned, values, rollouts, into="returns", **credit)
    expenses = flow.compute(formulas.lambda_returns, spent, cost_values, rollouts, into="returns", **credit)
    log_price = flow.recall("log_multiplier", log(config.first_multiplier))
    price = flow.number(formulas.multiplier, log_multiplier=log_price)
    mixed = flow.compute(formulas.lagrangian_advantages, gains, harms, into="advantages", multiplier=price)
    use = {"loss": config.value_loss, "passes": config}
    critic = flow.critic.update(*learnt_from(flow, [rollouts, values, earnings], config), **use)
    judged = learnt_from(flow, [rollouts, cost_values, expenses], config)
    cost_critic = flow.cost_critic.update(*judged, **use)
    policy = learn(flow, [*known, mixed], config, demonstrations)
    aim = config.cost_limit - config.cost_margin
    ascent = {"limit": aim, "lr": config.multiplier_lr, "highest": config.highest_multiplier}
    observed = flow.number(formulas.mean_cost, costs, otherwise=aim)
    following = flow.number(
        formulas.next_log_multiplier, log_multiplier=log_price, mean_cost=observed, **ascent
    )
    flow.remember("log_multiplier", following)
    return critic, cost_critic, policy


def roles(config: SafeRLHFConfig) -> tuple[str, ...]:
    """PPO's, and those of the cost."""
    return (*without_cost(config), "cost", "cost_critic")


ALGORITHM = Algorithm(config=SafeRLHFConfig, step=step, data=Data.PROMPTS, roles=roles, beside=beside)
