"""A custom algorithm with its own role: a verifier, whose verdict is the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import GroupConfig
from rillflow.algorithms.steps import update_and_publish
from rillflow.cli.main import main
from rillflow.controller.flow import Flow
from rillflow.formulas import group_advantages
from rillflow.graph.handle import Handle
from rillflow.records.batch import Batch
from rillflow.records.metrics import Metric, mean_of
from rillflow.records.rollout import completions
from rillflow.roles.setting import RoleSetting
from rillflow.workers.endpoint import endpoint
from rillflow.workers.transfer import DP


class VerifiedConfig(GroupConfig):
    """Settings of the whole algorithm."""

    name: Literal["verified"]
    digit: str = "1"
    """The digit that the verifier searches for."""


def verdict_metrics(verdicts: Batch) -> Mapping[str, Metric]:
    """Return the share of answers with the digit."""
    return {"verifier/found/share": mean_of(verdicts.dense("rewards").double())}


class Verifier:
    """Checks whether an answer has a digit."""

    def __init__(self, setting: RoleSetting) -> None:
        self._tokenizer = setting.tokenizer

    @endpoint(DP, reads=("tokens", "loss_mask"), writes=("rewards", "valid"), measures=verdict_metrics)
    def verify(self, rollouts: Batch, digit: str) -> Batch:
        """Return the field ``rewards`` [B]: 1 if the answer has the digit."""
        texts = [self._tokenizer.decode(tokens) for tokens in completions(rollouts).lists()]
        found = torch.tensor([float(digit in text) for text in texts])
        return Batch(
            ids=rollouts.ids, fields={"rewards": found, "valid": torch.ones(len(texts), dtype=torch.bool)}
        )


def step(flow: Flow, prompts: Batch, config: Any) -> Handle:
    """Run one iteration: sample, verify, prefer answers with the digit."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    verdicts = flow.verifier.verify(rollouts, digit=config.digit)
    advantages = flow.compute(group_advantages, verdicts, into="advantages", scale="off")
    return update_and_publish(flow, [rollouts, advantages], config)


ALGORITHM = Algorithm(config=VerifiedConfig, step=step, brings={"verifier": Verifier})

if __name__ == "__main__":
    raise SystemExit(main(algorithms=[ALGORITHM]))
