"""GSPO: GRPO whose ratio and clip are a whole row's (Zheng et al., arXiv 2507.18071).

GRPO with the geometric mean of a row's token ratios as the ratio of all its tokens, bounds that fit such
a mean, and the mean over rows. Rows have to be used more than once for the ratio to matter.
"""

from __future__ import annotations

from typing import Literal

from rillflow.algorithms.algorithm import Algorithm, Data
from rillflow.algorithms.grpo import GroupScaleConfig, step
from rillflow.formulas.config import PolicyLossConfig


class GSPOConfig(GroupScaleConfig):
    """GRPO's settings with other defaults."""

    name: Literal["gspo"]
    loss: PolicyLossConfig = PolicyLossConfig(
        ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"
    )


ALGORITHM = Algorithm(config=GSPOConfig, step=step, data=Data.PROMPTS)
