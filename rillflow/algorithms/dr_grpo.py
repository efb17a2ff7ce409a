"""Dr.GRPO: GRPO without its two biases, of deviation and of length (Liu et al., arXiv 2503.20783).

GRPO with advantages that are not divided by the group's deviation, and a loss that divides every row's
sum by one constant, not by the row's length.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, roles, step
from rillflow.formulas.config import PolicyLossConfig


class DrGRPOLoss(PolicyLossConfig):
    """A row's sum over one constant."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "constant",
        description="Mean over tokens; mean over rows of each row's token mean; sum over rows x constant.",
    )


class DrGRPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["dr_grpo"]
    scale: Literal["std", "off"] = Field(
        "off", description="Whether advantages are divided by the group's deviation."
    )
    loss: DrGRPOLoss = DrGRPOLoss()


ALGORITHM = Algorithm(config=DrGRPOConfig, step=step, data=Data.PROMPTS, roles=roles)
