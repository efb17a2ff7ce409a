"""What the steps of algorithms that sample have in common: lines of theirs that would be the same.

rollouts ─ look_back ─> known                          the rollouts, and what is known of their tokens
known, rewards ─┬─ charge ─> rewards                   less a missing end and the divergence
                ├─ compare ─> advantages               the same, compared within groups
                └─ earn ─> token_rewards               the same token by token; spend: of costs
token_rewards ─ bootstrap ─> token_rewards             a row that was cut off goes on into the critic's value
known, advantages ─ improve ─> report                  learnt_from: not cut off, if asked; update, publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow import formulas

if TYPE_CHECKING:
    from rillflow.algorithms.config import OnlineConfig
    from rillflow.algorithms.grpo import GroupScaleConfig
    from rillflow.dataflow.flow import Flow, RoleHandle
    from rillflow.records.metrics import Metrics


def look_back(flow: Flow, rollouts: Any, config: OnlineConfig) -> list[Any]:
    """The rollouts; the reference's log probabilities and the old policy's, where the loss asks for them."""
    known = [rollouts]
    if config.loss.kl:
        known.append(flow.reference.logprobs(rollouts))
    if config.reuses_rows and config.old_logprobs == "trainer":
        known.append(flow.policy.logprobs(rollouts))
    return known


def price_missing_end(flow: Flow, rewards: Any, rollouts: Any, config: OnlineConfig) -> Any:
    """The rewards of rows, less the penalty of those that were cut off, where there is one."""
    if not config.missing_end_penalty:
        return rewards
    price = {"penalty": config.missing_end_penalty}
    return flow.compute(formulas.missing_end_rewards, rewards, rollouts, into="rewards", **price)


def charge(flow: Flow, rewards: Any, known: list[Any], config: OnlineConfig, into: str = "rewards") -> Any:
    """The rewards of rows, less what a missing end costs, and the divergence where it is paid there."""
    rewards = price_missing_end(flow, rewards, known[0], config)
    if config.loss.kl_paid != "reward":
        return rewards
    price = {"weight": config.loss.kl, "estimator": config.loss.estimator}
    return flow.compute(formulas.penalised_rewards, rewards, *known, into=into, **price)


def compare(flow: Flow, rewards: Any, known: list[Any], config: GroupScaleConfig) -> Any:
    """Advantages within groups; a divergence paid in the reward is no part of the deviation that divides."""
    charged = charge(flow, rewards, known, config, into="penalised")
    paid = config.loss.kl_paid == "reward"
    formula = formulas.penalised_group_advantages if paid else formulas.group_advantages
    return flow.compute(formula, charged, into="advantages", scale=config.scale)


def earn(
    flow: Flow, rewards: Any, known: list[Any], config: OnlineConfig, weight: Any, share: float = 1.0
) -> Any:
    """The rewards of tokens: the row's at its last, less the divergence of each where it is paid there."""
    rewards = price_missing_end(flow, rewards, known[0], config)
    if config.loss.kl_paid != "reward":
        return flow.compute(formulas.token_rewards, rewards, *known, into="token_rewards")
    price = {"weight": weight, "estimator": config.loss.estimator, "share": share}
    return flow.compute(formulas.penalised_token_rewards, rewards, *known, into="token_rewards", **price)


def spend(flow: Flow, costs: Any, known: list[Any], config: OnlineConfig, weight: Any, share: float) -> Any:
    """The costs of tokens: the row's at its last, plus the divergence of each where it is paid there."""
    if config.loss.kl_paid != "reward":
        return flow.compute(formulas.token_costs, costs, *known, into="token_rewards")
    price = {"weight": weight, "estimator": config.loss.estimator, "share": share}
    return flow.compute(formulas.penalised_token_costs, costs, *known, into="token_rewards", **price)


def bootstrap(flow: Flow, critic: RoleHandle, earned: Any, rollouts: Any, config: Any) -> Any:
    """The rewards of tokens; where asked, those of rows that were cut off go on into the critic's value."""
    if config.truncated != "bootstrap":
        return earned
    final = critic.final_values(rollouts)
    return flow.compute(
        formulas.bootstrapped_rewards, earned, final, rollouts, into="token_rewards", gamma=config.gamma
    )


def learnt_from(flow: Flow, known: list[Any], config: OnlineConfig) -> list[Any]:
    """What is known of the rows that losses are taken over: all, or those that were not cut off."""
    if config.truncated != "mask":
        return known
    whole = flow.compute(formulas.ended, known[0], into="ended")
    return [flow.filter(each, "ended", by=whole) for each in known]


def improve(flow: Flow, known: list[Any], config: OnlineConfig) -> Metrics:
    """Train the policy on what is known of rows, their advantages among it, and publish it."""
    report: Metrics = flow.policy.update(*learnt_from(flow, known, config), loss=config.loss, passes=config)
    flow.publish(flow.policy)
    return report


def reference_roles(config: OnlineConfig) -> tuple[str, ...]:
    """The reference is there only where a divergence is paid."""
    return ("reference",) if config.loss.kl else ()
