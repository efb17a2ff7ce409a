"""CISPO: bounds on the weight of a token, never on its gradient (MiniMax, arXiv 2506.13585).

GRPO with - sg[clip(r)] A log pi as the loss of a token: one that moved beyond the bounds still teaches,
with the bound's weight. The weight lies in [0, 5] by default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, roles, step
from rillflow.formulas.config import PolicyLossConfig


class CISPOLoss(PolicyLossConfig):
    """The bounded weight."""

    surrogate: Literal["clip", "weight"] = Field(
        "weight",
        description="Bounds on the ratio: no gradient beyond them, or log pi weighed by the bounded ratio.",
    )
    clip_low: float = Field(1.0, ge=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(4.0, ge=0, description="The ratio is clipped above at 1 + clip_high.")


class CISPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["cispo"]
    loss: CISPOLoss = CISPOLoss()


ALGORITHM = Algorithm(config=CISPOConfig, step=step, data=Data.PROMPTS, roles=roles)
