"""GSPO: GRPO with one ratio and one clip for a whole row (Zheng et al., arXiv 2507.18071).

GRPO in which every token has the geometric mean of its row's token ratios as its ratio, with clip bounds to
match and the mean over rows. The ratio matters only if rows are used more than once.
"""

from __future__ import annotations

from typing import Literal

from rillflow.algorithms.algorithm import Algorithm
from rillflow.algorithms.grpo import GroupScaleConfig, step
from rillflow.formulas.config import PolicyLossConfig


class GSPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["gspo"]
    loss: PolicyLossConfig = PolicyLossConfig(
        ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"
    )


ALGORITHM = Algorithm(config=GSPOConfig, step=step)
