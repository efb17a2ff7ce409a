"""Safe RLHF: maximise the reward while the cost stays below a limit (Dai et al., arXiv 2310.12773).

rollouts ─┬─ reward.score ─ gae with critic.values ─────> reward_advantages ─┐
          ├─ cost.score ─┬─ gae with cost_critic.values ─> cost_advantages ──┴─> advantages ─ policy.update
          │              └─ mean_cost ─> the next step's multiplier, which grows while cost exceeds the limit
          └─ critic.update, cost_critic.update <─ returns of each

PPO with a second critic; the multiplier mixes the two advantages. With ``pretrain_weight``, the policy's
optimiser steps also imitate demonstrations.
"""

from __future__ import annotations

from functools import partial
from math import log
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.ppo import CriticTrainedConfig, beside, kl_weight, update_with_pretraining
from rillflow.algorithms.steps import (
    bootstrapped,
    token_level_costs,
    token_level_rewards,
    trained_rows,
    with_logprobs,
)

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch

EACH = 0.5
"""Share of the KL penalty that reward and cost each pay; their mix does not depend on the multiplier."""


class SafeRLHFConfig(CriticTrainedConfig):
    """Safe RLHF's settings."""

    name: Literal["safe_rlhf"]
    cost_limit: float = Field(0.0, description="Largest allowed mean cost of a row.")
    cost_margin: float = Field(
        0.0,
        ge=0,
        description="Margin below cost_limit that the multiplier aims at, so that fluctuations stay "
        "within the limit.",
    )
    multiplier_lr: float = Field(
        0.1,
        gt=0,
        description="Learning rate of the logarithm of the Lagrange multiplier, per unit of cost above "
        "the limit.",
    )
    first_multiplier: float = Field(1.0, gt=0, description="Lagrange multiplier of the first step.")
    highest_multiplier: float = Field(10.0, gt=0, description="Upper bound of the Lagrange multiplier.")


def step(
    flow: Flow, prompts: Batch, config: SafeRLHFConfig, demonstrations: Batch | None = None
) -> tuple[Handle, Handle, Handle]:
    """Run one iteration: sample, score reward and cost, train on their mix, adapt the multiplier."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    costs = flow.cost.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    values, cost_values = flow.critic.values(rollouts), flow.cost_critic.values(rollouts)
    weight = kl_weight(flow, batches, config)
    token_rewards = token_level_rewards(flow, rewards, batches, config, weight, share=EACH)
    token_rewards = bootstrapped(flow, flow.critic, token_rewards, rollouts, config)
    token_costs = token_level_costs(flow, costs, batches, config, weight, share=EACH)
    token_costs = bootstrapped(flow, flow.cost_critic, token_costs, rollouts, config)
    gamma, lam = config.gamma, config.lam
    advantages = partial(flow.compute, formulas.gae, gamma=gamma, lam=lam)
    returns = partial(flow.compute, formulas.lambda_returns, into="returns", gamma=gamma, lam=lam)
    reward_advantages = advantages(token_rewards, values, rollouts, into="reward_advantages")
    cost_advantages = advantages(token_costs, cost_values, rollouts, into="cost_advantages")
    reward_returns = returns(token_rewards, values, rollouts)
    cost_returns = returns(token_costs, cost_values, rollouts)
    log_multiplier = flow.recall("log_multiplier", log(config.first_multiplier))
    price = flow.number(formulas.multiplier, log_multiplier=log_multiplier)
    both = (reward_advantages, cost_advantages)
    mixed = flow.compute(formulas.lagrangian_advantages, *both, into="advantages", multiplier=price)
    rows = trained_rows(flow, [rollouts, values, reward_returns], config)
    critic = flow.critic.update(*rows, loss=config.value_loss, passes=config)
    cost_rows = trained_rows(flow, [rollouts, cost_values, cost_returns], config)
    cost_critic = flow.cost_critic.update(*cost_rows, loss=config.value_loss, passes=config)
    policy = update_with_pretraining(flow, [*batches, mixed], config, demonstrations)
    aim = config.cost_limit - config.cost_margin
    ascent = {"limit": aim, "lr": config.multiplier_lr, "highest": config.highest_multiplier}
    observed = flow.number(formulas.mean_cost, costs, otherwise=aim)
    following = flow.number(
        formulas.next_log_multiplier, log_multiplier=log_multiplier, mean_cost=observed, **ascent
    )
    flow.remember("log_multiplier", following)
    return critic, cost_critic, policy


ALGORITHM = Algorithm(config=SafeRLHFConfig, step=step, beside=beside)
