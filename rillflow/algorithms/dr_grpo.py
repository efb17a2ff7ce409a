"""Dr.GRPO: GRPO without its deviation bias and its length bias (Liu et al., arXiv 2503.20783).

GRPO with advantages that are not divided by the group's deviation, and a loss that divides every row's
sum by one constant instead of the row's length.
"""

from __future__ import annotations

from typing import Literal

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.grpo import GroupScaleConfig, ScaleSetting, step
from rillflow.formulas.config import PolicyLossConfig


class DrGRPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["dr_grpo"]
    scale: ScaleSetting = "off"
    loss: PolicyLossConfig = PolicyLossConfig(aggregation="constant")


ALGORITHM = Algorithm(config=DrGRPOConfig, step=step)
