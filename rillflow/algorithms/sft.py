"""SFT: supervised fine-tuning, the mean negative log probability of the answers' tokens.

demonstrations ─ update ─> publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rillflow import formulas
from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.config import AlgorithmConfig
from rillflow.tasks.kinds import DEMONSTRATIONS

if TYPE_CHECKING:
    from rillflow.controller.flow import Flow
    from rillflow.graph.handle import Handle
    from rillflow.records.batch import Batch


class SFTConfig(AlgorithmConfig):
    """SFT's settings: those of every algorithm."""

    name: Literal["sft"]


def step(flow: Flow, demonstrations: Batch, config: SFTConfig) -> Handle:
    """Run one iteration: raise the probability of the demonstrated answers."""
    report = flow.policy.update(demonstrations, loss=formulas.cross_entropy, name="supervised", passes=config)
    flow.publish(flow.policy)
    return report


ALGORITHM = Algorithm(config=SFTConfig, step=step, data=DEMONSTRATIONS)
