"""Preference: a reward or cost model learns from pairs of answers which is the better one.

pairs ─ update ─> report            -log sigmoid(s_chosen - s_rejected): Bradley and Terry, 1952
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.config import AlgorithmConfig

if TYPE_CHECKING:
    from rillflow.dataflow.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class PreferenceConfig(AlgorithmConfig):
    """Preference adds nothing to what every algorithm has; a prompt is a pair."""

    name: Literal["preference"]


def step(flow: Flow, pairs: Batch, config: PreferenceConfig) -> Handle:
    """One iteration: raise the chosen answers' scores above the rejected ones'."""
    return flow.reward_model.update(pairs, loss=formulas.preference_loss, passes=config)


ALGORITHM = Algorithm(config=PreferenceConfig, step=step, data=Data.PREFERENCES)
