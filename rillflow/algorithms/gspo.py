"""GSPO: GRPO whose ratio and clip are a whole row's (Zheng et al., arXiv 2507.18071).

GRPO with the geometric mean of a row's token ratios as the ratio of all its tokens, bounds that fit such
a mean, and the mean over rows. Rows have to be used more than once for the ratio to matter.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, roles, step
from rillflow.formulas.config import PolicyLossConfig


class GSPOLoss(PolicyLossConfig):
    """The ratio of rows, and its bounds."""

    ratio: Literal["token", "sequence"] = Field(
        "sequence",
        description="Ratio to the old policy: each token's own, or the geometric mean of its row's.",
    )
    clip_low: float = Field(3e-4, ge=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(4e-4, ge=0, description="The ratio is clipped above at 1 + clip_high.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "sequence_mean",
        description="Mean over tokens; mean over rows of each row's token mean; sum over rows x constant.",
    )


class GSPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["gspo"]
    loss: GSPOLoss = GSPOLoss()


ALGORITHM = Algorithm(config=GSPOConfig, step=step, data=Data.PROMPTS, roles=roles)
