"""Pairwise: train a language model to name the better of two answers.

pairs ─ update ─> report        -log p(label): A where the first answer shown is the better one, else B
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.rewards.judge_prompt import FrameConfig
from rillflow.tasks.preference import PREFERENCES

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class PairwiseConfig(AlgorithmConfig):
    """Settings of how two answers are shown; ``prompts_per_step`` counts pairs."""

    name: Literal["pairwise"]
    frame: FrameConfig = FrameConfig()
    orders: Literal["both", "random"] = Field(
        "both", description="Show each pair in both orders, or in one order drawn by the seed."
    )

    @property
    def judge_frame(self) -> FrameConfig | None:
        """Frame of the judge that is trained."""
        return self.frame


def step(flow: Flow, pairs: Batch, config: PairwiseConfig) -> Handle:
    """Run one iteration: raise the probability of the label that names the better answer."""
    return flow.judge.update(pairs, loss=formulas.label_loss, orders=config.orders, passes=config)


def score(flow: Flow, pairs: Batch, config: PairwiseConfig) -> Handle:
    """Return the scores of held-out answers."""
    del config
    return flow.judge.score(pairs)


ALGORITHM = Algorithm(config=PairwiseConfig, step=step, data=PREFERENCES, score=score)
