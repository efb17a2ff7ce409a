"""CISPO: bounds on the weight of a token, never on its gradient (MiniMax, arXiv 2506.13585).

GRPO with - sg[clip(r)] A log pi as the loss of a token: one that moved beyond the bounds still teaches,
with the bound's weight. The weight lies in [0, 5] by default.
"""

from __future__ import annotations

from typing import Literal

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, roles, step
from rillflow.formulas.config import ClipHigh, ClipLow, PolicyLossConfig, SurrogateSetting


class CISPOLoss(PolicyLossConfig):
    """The bounded weight."""

    surrogate: SurrogateSetting = "weight"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class CISPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["cispo"]
    loss: CISPOLoss = CISPOLoss()


ALGORITHM = Algorithm(config=CISPOConfig, step=step, data=Data.PROMPTS, roles=roles)
