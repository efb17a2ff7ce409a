"""Best of n: imitate the best of a prompt's answers (RAFT: Dong et al., arXiv 2304.06767).

prompts ─ generate ─> rollouts ─ score ─> rewards ─ best_rows ─> best ─ filter ─> update ─> publish
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import SampledConfig
from rillflow.algorithms.steps import missing_end_penalised, trained_rows

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class BestOfNConfig(SampledConfig):
    """Best of n's settings."""

    name: Literal["best_of_n"]
    samples_per_prompt: int = Field(8, ge=2, description="Completions sampled for each prompt: n.")
    keep: int = Field(
        1, ge=1, description="Completions of a prompt to imitate: the ones with the highest rewards."
    )
    threshold: float | None = Field(None, description="Smallest reward that is imitated; left out, any.")
    measure_kl: bool = Field(
        False,
        description="Whether to measure the KL divergence of samples from the policy at the start of the "
        "phase.",
    )

    @model_validator(mode="after")
    def _leaves_some_out(self) -> BestOfNConfig:
        if self.keep >= self.samples_per_prompt:
            raise ValueError(
                f"keep is {self.keep} and samples_per_prompt {self.samples_per_prompt}: all rows would be "
                "imitated, good or bad; lower keep"
            )
        return self


def step(flow: Flow, prompts: Batch, config: BestOfNConfig) -> Handle:
    """Run one iteration: sample, score, imitate the best."""
    rollouts = flow.policy.generate(prompts, samples=config.samples_per_prompt)
    rewards = missing_end_penalised(flow, flow.reward.score(rollouts), rollouts, config)
    threshold = -math.inf if config.threshold is None else config.threshold
    kept = {"keep": config.keep, "threshold": threshold}
    judged = flow.compute(formulas.best_rows, rewards, into="best", **kept)
    flow.number(formulas.best_of_n_divergence, rewards, n=config.samples_per_prompt)
    flow.number(formulas.best_of_n_bound, n=config.samples_per_prompt)
    if config.measure_kl:
        flow.number(formulas.mean_divergence, rollouts, flow.reference.logprobs(rollouts), estimator="k1")
    best = flow.filter(rollouts, "best", by=judged)
    [best] = trained_rows(flow, [best], config)
    report = flow.policy.update(best, loss=formulas.cross_entropy, name="supervised", passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=BestOfNConfig, step=step)
