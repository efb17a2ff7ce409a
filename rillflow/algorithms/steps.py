"""Steps: code that the steps of several sampling algorithms share.

rollouts ─ with_logprobs ─> batches             the rollouts, and log probabilities that the loss reads
rewards ─┬─ kl_penalised_rewards ─────> rewards             shaped, less penalties (missing end, divergence)
         ├─ group_relative_advantages ─> advantages         the same, compared within groups
         └─ token_level_rewards ───────> token_rewards      the same token by token; token_level_costs
token_rewards ─ bootstrapped ─> token_rewards   a cut-off row is continued by the critic's value
batches, advantages ─ update_and_publish ─> report          trained_rows: leaves out cut-off rows
                      └ publish: the trained policy; a moving reference follows it
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from rillflow import formulas

if TYPE_CHECKING:
    from rillflow.algorithms.config import AnchoredConfig, OnlineConfig, SampledConfig, TokenConfig
    from rillflow.algorithms.grpo import GroupScaleConfig
    from rillflow.controller.flow import Flow
    from rillflow.controller.handles import CriticHandle
    from rillflow.graph.handle import Handle


def with_logprobs(flow: Flow, rollouts: Handle, config: OnlineConfig) -> list[Handle]:
    """Return the rollouts, with the reference's and old policy's log probabilities if the loss reads them."""
    batches, is_held = [rollouts], bool(config.loss.kl)
    is_own = is_held and config.reference == "previous"
    if is_held and not is_own:
        batches.append(flow.reference.logprobs(rollouts))
    if is_own or (config.is_off_policy and not config.reads_sampler):
        batches.append(flow.policy.logprobs(rollouts))
    if is_own:
        batches[-1] = flow.compute(formulas.previous_logprobs, batches[-1], into="reference_logprobs")
    return batches


def shaped(flow: Flow, rewards: Handle, rollouts: Handle, config: SampledConfig) -> Handle:
    """Return the rewards after the normalisation, clipping and length penalty of the settings."""
    shape = config.shape
    if shape is None:
        return rewards
    if shape.normalise == "batch":
        rewards = flow.compute(formulas.normalised_rewards, rewards, into="rewards")
    elif shape.normalise == "running":
        rewards = _rescaled(flow, rewards)
    if shape.clip is None and not shape.length_price:
        return rewards
    low, high = shape.clip or (-inf, inf)
    bounds = {"low": low, "high": high, "price": shape.length_price}
    return flow.compute(formulas.bounded_rewards, rewards, rollouts, into="rewards", **bounds)


def _rescaled(flow: Flow, rewards: Handle) -> Handle:
    """Normalise rewards by the running mean and deviation, and update both statistics."""
    count, mean, squares = (flow.recall(f"reward_{name}", 0.0) for name in ("count", "mean", "squares"))
    found = {
        "count": flow.number(formulas.next_reward_count, rewards, count=count),
        "mean": flow.number(formulas.next_reward_mean, rewards, count=count, mean=mean),
        "squares": flow.number(
            formulas.next_reward_squares, rewards, count=count, mean=mean, squares=squares
        ),
    }
    for name, number in found.items():
        flow.remember(f"reward_{name}", number)
    return flow.compute(formulas.rescaled_rewards, rewards, into="rewards", **found)


def missing_end_penalised(flow: Flow, rewards: Handle, rollouts: Handle, config: SampledConfig) -> Handle:
    """Return the shaped rewards, less the penalty of rows that were cut off."""
    rewards = shaped(flow, rewards, rollouts, config)
    if not config.missing_end_penalty:
        return rewards
    price = {"penalty": config.missing_end_penalty}
    return flow.compute(formulas.missing_end_rewards, rewards, rollouts, into="rewards", **price)


def kl_penalised_rewards(
    flow: Flow, rewards: Handle, batches: list[Handle], config: OnlineConfig, into: str = "rewards"
) -> Handle:
    """Return the shaped rewards, less the missing-end penalty, and the KL penalty if it is paid there."""
    rewards = missing_end_penalised(flow, rewards, batches[0], config)
    if config.loss.kl_paid != "reward":
        return rewards
    price = {"weight": config.loss.kl, "estimator": config.loss.estimator}
    return flow.compute(formulas.penalised_rewards, rewards, *batches, into=into, **price)


def group_relative_advantages(
    flow: Flow, rewards: Handle, batches: list[Handle], config: GroupScaleConfig
) -> Handle:
    """Return advantages within groups; a KL penalty in the reward does not change the dividing deviation."""
    penalised = kl_penalised_rewards(flow, rewards, batches, config, into="penalised")
    paid = config.loss.kl_paid == "reward"
    formula = formulas.penalised_group_advantages if paid else formulas.group_advantages
    return flow.compute(formula, penalised, into="advantages", scale=config.scale)


def token_level_rewards(
    flow: Flow, rewards: Handle, batches: list[Handle], config: OnlineConfig, weight: Any, share: float = 1.0
) -> Handle:
    """Return token rewards: the row's at its last token, less each token's divergence if it is paid there."""
    rewards = missing_end_penalised(flow, rewards, batches[0], config)
    if config.loss.kl_paid != "reward":
        return flow.compute(formulas.token_rewards, rewards, *batches, into="token_rewards")
    price = {"weight": weight, "estimator": config.loss.estimator, "share": share}
    return flow.compute(formulas.penalised_token_rewards, rewards, *batches, into="token_rewards", **price)


def token_level_costs(
    flow: Flow, costs: Handle, batches: list[Handle], config: OnlineConfig, weight: Any, share: float
) -> Handle:
    """Return token costs: the row's at its last token, plus each token's divergence if it is paid there."""
    if config.loss.kl_paid != "reward":
        return flow.compute(formulas.token_costs, costs, *batches, into="token_rewards")
    price = {"weight": weight, "estimator": config.loss.estimator, "share": share}
    return flow.compute(formulas.penalised_token_costs, costs, *batches, into="token_rewards", **price)


def bootstrapped(
    flow: Flow, critic: CriticHandle, token_rewards: Handle, rollouts: Handle, config: TokenConfig
) -> Handle:
    """Return the token rewards; with ``bootstrap``, cut-off rows also get the critic's final value."""
    if config.truncated != "bootstrap":
        return token_rewards
    given = (token_rewards, critic.final_values(rollouts), rollouts)
    return flow.compute(formulas.bootstrapped_rewards, *given, into="token_rewards", gamma=config.gamma)


def trained_rows(flow: Flow, batches: list[Handle], config: SampledConfig) -> list[Handle]:
    """Return the batches with the rows that losses use: all, or those that were not cut off."""
    if config.truncated != "mask":
        return batches
    whole = flow.compute(formulas.ended, batches[0], into="ended")
    return [flow.filter(each, "ended", by=whole) for each in batches]


def update_and_publish(flow: Flow, batches: list[Handle], config: OnlineConfig) -> Handle:
    """Train the policy on batches, one of which has the advantages, and publish it."""
    report = flow.policy.update(*trained_rows(flow, batches, config), loss=config.loss, passes=config)
    publish(flow, config, is_held=bool(config.loss.kl))
    return report


def publish(flow: Flow, config: AnchoredConfig, *, is_held: bool) -> None:
    """Publish the trained policy; a moving reference that the loss uses follows it."""
    if is_held and config.moves_reference:
        flow.reference.follow(rate=config.reference_rate, every=config.reference_every)
    flow.publish(flow.policy)
