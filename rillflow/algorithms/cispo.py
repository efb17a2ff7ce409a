"""CISPO: clip the weight of a token, never its gradient (MiniMax, arXiv 2506.13585).

GRPO with the token loss - sg[clip(r)] A log pi: a token beyond the bounds keeps a gradient, with the bound
as its weight. The weight lies in [0, 5] by default.
"""

from __future__ import annotations

from typing import Literal

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.grpo import GroupScaleConfig, step
from rillflow.formulas.config import PolicyLossConfig


class CISPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["cispo"]
    loss: PolicyLossConfig = PolicyLossConfig(surrogate="weight", clip_low=1.0, clip_high=4.0)


ALGORITHM = Algorithm(config=CISPOConfig, step=step)
