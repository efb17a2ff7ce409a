"""Preference: train a reward or cost model on pairs of answers, one better than the other.

pairs ─ update ─> report            -log sigmoid(s_chosen - s_rejected): Bradley and Terry, 1952
                                    less a margin of the pair, plus centring x (s_chosen + s_rejected)^2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.tasks.preference import PREFERENCES

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class PreferenceConfig(AlgorithmConfig):
    """Settings of preference training; ``prompts_per_step`` counts pairs."""

    renamed: ClassVar[Mapping[str, str]] = {"centring": "center_coefficient"}

    name: Literal["preference"]
    margin: bool = Field(
        False, description="Whether the column margin gives the score difference that a pair should reach."
    )
    center_coefficient: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's two scores, which centres scores at 0."
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """Number columns that the loss reads."""
        return ("margin",) if self.margin else ()


def step(flow: Flow, pairs: Batch, config: PreferenceConfig) -> Handle:
    """Run one iteration: raise the chosen answers' scores above the rejected ones'."""
    loss = formulas.margin_preference_loss if config.margin else formulas.preference_loss
    return flow.reward_model.update(pairs, loss=loss, centring=config.center_coefficient, passes=config)


def score(flow: Flow, pairs: Batch, config: PreferenceConfig) -> Handle:
    """Return the scores of held-out answers."""
    del config
    return flow.reward_model.score(pairs)


ALGORITHM = Algorithm(config=PreferenceConfig, step=step, data=PREFERENCES, score=score)
