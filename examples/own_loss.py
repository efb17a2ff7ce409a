"""A custom advantage and loss: ranks within a group, and a softly bounded importance ratio.

prompts ─ generate ─> rollouts ─ score ─> rewards ─ rank_advantages ─> advantages ─┐
                         └──────────────────────────────── update, by soft_loss ───┴─> publish

An algorithm that is not part of Rillflow, in one file, on one rank or on several:

    python examples/own_loss.py run examples/own_algorithm.toml --set algorithm.name=ranked --dir runs/ranked
    python examples/own_loss.py run examples/own_algorithm.toml --set algorithm.name=ranked \
        --dir runs/by_two --set placement.pools.main=2
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.algorithms.steps import with_logprobs
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.formulas import TokenLosses
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch


class RankedConfig(GroupConfig):
    """Settings of [algorithm], in addition to those of every algorithm that compares a prompt's answers."""

    name: Literal["ranked"]
    strength: float = Field(1.0, gt=0, description="Advantage of an answer that beats all others.")
    steepness: float = Field(4.0, gt=0, description="How soon a ratio that leaves 1 stops to count.")


def rank_advantages(rewards: Tensor, valid: Tensor, groups: Tensor, *, strength: float) -> Tensor:
    """Return [B]: the share of its prompt's other rows that a row beats, minus the share that beats it.

    Args:
        rewards: [B] float.
        valid: [B] bool, True if the row has a reward; other rows get 0 and are not compared.
        groups: [B] a number that the rows of one prompt share; every batch offers it to formulas.
        strength: factor on the result; the advantage of the best row.
    """
    fellows = (groups[:, None] == groups) & valid & valid[:, None]
    beaten = ((rewards[:, None] - rewards).sign() * fellows).sum(1)
    return strength * beaten / (fellows.sum(1) - 1).clamp(min=1)


def soft_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, steepness: float) -> TokenLosses:
    """Return [N] -(4 / s) sigmoid(s (r - 1)) A, whose gradient is that of -r A at r = 1 and decays elsewhere.

    Args:
        logprobs: [N] log probabilities in training, with gradient.
        old_logprobs: [N] log probabilities before the update.
        advantages: [N] advantages of the tokens' rows.
        steepness: s.
    """
    ratio = (logprobs - old_logprobs).exp()
    gate = (steepness * (ratio - 1)).sigmoid()
    counts = (4 * gate * (1 - gate)).detach()
    return TokenLosses(losses=-4 / steepness * gate * advantages, metrics={"policy/soft_gate/mean": counts})


def step(flow: Flow, prompts: Batch, config: RankedConfig) -> Handle:
    """Run one iteration: sample, score, prefer rows that beat others of their group."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    batches = with_logprobs(flow, rollouts, config)
    advantages = flow.compute(rank_advantages, rewards, into="advantages", strength=config.strength)
    report = flow.policy.update(
        *batches, advantages, loss=soft_loss, passes=config, steepness=config.steepness
    )
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=RankedConfig, step=step)

if __name__ == "__main__":
    raise SystemExit(main(algorithms=[ALGORITHM]))
