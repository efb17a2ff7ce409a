"""Best of n: sample n answers, imitate the best one of each prompt (RAFT; Dong et al., arXiv 2304.06767).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ is_best ─> best ─ filter ─> rollouts ─ update ─> publish

An algorithm that Rillflow does not know, in this one file: its settings, its formula, its step.

    python examples/best_of_n.py                                   # runs best_of_n.toml: a minute
    python examples/best_of_n.py graph examples/best_of_n.toml     # and all else that rillflow can
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.cli.main import main
from rillflow.dataflow.flow import Flow
from rillflow.formulas import cross_entropy
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch


class BestOfNConfig(AlgorithmConfig):
    """Settings of [algorithm], beside those that every algorithm has."""

    name: Literal["best_of_n"]
    samples_per_prompt: int = Field(8, ge=2, description="Answers of which the best one is imitated.")


def is_best(rewards: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """[B] bool, True for the first row with the highest reward of its prompt; never for one without a reward.

    Args:
        rewards: [B] float.
        valid: [B] bool, whether the row has one.
        groups: [B] a number that the rows of one prompt share; a formula may ask for it of any batch.
    """
    order = torch.argsort(rewards.masked_fill(~valid, -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    first = torch.diff(groups[order], prepend=groups.new_full((1,), -1)) != 0
    best = torch.zeros_like(valid)
    best[order[first]] = True
    return best & valid


def step(flow: Flow, prompts: Batch, config: BestOfNConfig) -> Handle:
    """One iteration: sample, score, imitate the best."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    judged = flow.compute(is_best, rewards, into="best")
    best = flow.filter(rollouts, "best", by=judged)
    report = flow.policy.update(best, loss=cross_entropy, name="supervised", passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=BestOfNConfig, step=step, data=Data.PROMPTS)

if __name__ == "__main__":
    words = sys.argv[1:] or ["run", str(Path(__file__).with_suffix(".toml"))]
    raise SystemExit(main(words, algorithms=[ALGORITHM]))
