"""GRPO: a group of answers to one prompt is its own baseline (Shao et al., arXiv 2402.03300).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ group_advantages ─> advantages ─┐
                         └───────────────────────────────────────────────────────── update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import OnlineConfig
from rillflow.formulas.config import PolicyLossConfig

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.records.batch import Batch
    from rillflow.records.metrics import Metrics


class GRPOConfig(OnlineConfig):
    """GRPO's settings; Dr.GRPO, DAPO's loss and RLOO are reached by ``scale`` and ``loss``."""

    name: Literal["grpo"]
    samples_per_prompt: int = Field(
        8, ge=2, description="Rows sampled for each prompt: the group. A group of one has no baseline."
    )
    scale: Literal["std", "off"] = Field(
        "std", description="Whether advantages are divided by the group's deviation."
    )
    loss: PolicyLossConfig = PolicyLossConfig()


def step(flow: Flow, prompts: Batch, config: GRPOConfig) -> Metrics:
    """One iteration: sample groups, score them, prefer what beat its group."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    known = [rollouts]
    if config.loss.kl:
        known.append(flow.reference.logprobs(rollouts))
    if config.reuses_rows and config.old_logprobs == "trainer":
        known.append(flow.policy.logprobs(rollouts))
    if config.loss.kl and config.loss.kl_in == "reward":
        price = {"weight": config.loss.kl, "estimator": config.loss.kl_estimator}
        rewards = flow.compute(formulas.penalised_rewards, rewards, *known, into="rewards", **price)
    advantages = flow.compute(formulas.group_advantages, rewards, into="advantages", scale=config.scale)
    report: Metrics = flow.policy.update(*known, advantages, loss=config.loss, reuse=config)
    flow.publish(flow.policy)
    return report


def roles(config: GRPOConfig) -> tuple[str, ...]:
    """The reference is there only where a divergence is paid."""
    return ("policy", "reward", "reference") if config.loss.kl else ("policy", "reward")


ALGORITHM = Algorithm(config=GRPOConfig, step=step, data=Data.PROMPTS, roles=roles)
