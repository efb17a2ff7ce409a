"""What the steps of algorithms that sample have in common: lines of theirs that would be the same.

rollouts ─ look_back ─> known                          the rollouts, and what is known of their tokens
known, rewards ─┬─ charge ─> rewards                   less the divergence from the reference
                └─ earn ─> token_rewards               the same token by token
known, advantages ─ improve ─> report                  update, publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rillflow import formulas

if TYPE_CHECKING:
    from rillflow.algorithms.config import OnlineConfig
    from rillflow.dataflow.flow import Flow
    from rillflow.records.metrics import Metrics


def look_back(flow: Flow, rollouts: Any, config: OnlineConfig) -> list[Any]:
    """The rollouts; the reference's log probabilities and the old policy's, where the loss asks for them."""
    known = [rollouts]
    if config.loss.kl:
        known.append(flow.reference.logprobs(rollouts))
    if config.reuses_rows and config.old_logprobs == "trainer":
        known.append(flow.policy.logprobs(rollouts))
    return known


def charge(flow: Flow, rewards: Any, known: list[Any], config: OnlineConfig) -> Any:
    """The rewards of rows, less the divergence from the reference where that is paid in the reward."""
    if not config.loss.kl or config.loss.kl_in == "loss":
        return rewards
    price = {"weight": config.loss.kl, "estimator": config.loss.kl_estimator}
    return flow.compute(formulas.penalised_rewards, rewards, *known, into="rewards", **price)


def earn(flow: Flow, rewards: Any, known: list[Any], config: OnlineConfig, weight: Any) -> Any:
    """The rewards of tokens: the row's at its last, less the divergence of each where it is paid there."""
    if not config.loss.kl or config.loss.kl_in == "loss":
        return flow.compute(formulas.token_rewards, rewards, *known, into="token_rewards")
    price = {"weight": weight, "estimator": config.loss.kl_estimator}
    return flow.compute(formulas.penalised_token_rewards, rewards, *known, into="token_rewards", **price)


def improve(flow: Flow, known: list[Any], config: OnlineConfig) -> Metrics:
    """Train the policy on what is known of rows, their advantages among it, and publish it."""
    report: Metrics = flow.policy.update(*known, loss=config.loss, reuse=config)
    flow.publish(flow.policy)
    return report


def reference_roles(config: OnlineConfig) -> tuple[str, ...]:
    """The reference is there only where a divergence is paid."""
    return ("reference",) if config.loss.kl else ()
