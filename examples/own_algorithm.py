"""Imitate answers that beat their group: rows with more than the mean reward of their prompt.

prompts ─ generate ─> rollouts ─ score ─> rewards ─ beats_group ─> better ─ filter ─> update ─> publish

An algorithm that is not part of Rillflow, in one file: its settings, its formula, its step.

    python examples/own_algorithm.py                                       # runs own_algorithm.toml: a minute
    python examples/own_algorithm.py graph examples/own_algorithm.toml     # any other command of rillflow
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.formulas import cross_entropy, group_advantages
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch


class AboveMeanConfig(AlgorithmConfig):
    """Settings of [algorithm], in addition to those of every algorithm."""

    name: Literal["above_mean"]
    samples_per_prompt: int = Field(8, ge=2, description="Answers of which the better ones are imitated.")


def beats_group(rewards: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """Return [B] bool, True for rows with more than the mean reward of their prompt; False without a reward.

    Args:
        rewards: [B] float.
        valid: [B] bool, True if the row has a reward.
        groups: [B] a number that the rows of one prompt share; every batch offers it to formulas.
    """
    return group_advantages(rewards, groups, valid, scale="off") > 0


def step(flow: Flow, prompts: Batch, config: AboveMeanConfig) -> Handle:
    """Run one iteration: sample, score, imitate the rows above the mean."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = flow.reward.score(rollouts)
    judged = flow.compute(beats_group, rewards, into="better")
    better = flow.filter(rollouts, "better", by=judged)
    report = flow.policy.update(better, loss=cross_entropy, name="supervised", passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=AboveMeanConfig, step=step)

if __name__ == "__main__":
    words = sys.argv[1:] or ["run", str(Path(__file__).with_suffix(".toml"))]
    raise SystemExit(main(words, algorithms=[ALGORITHM]))
