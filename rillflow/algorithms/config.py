"""Settings every algorithm shares; each algorithm's own file adds to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.formulas.config import PolicyLossConfig
from rillflow.train.config import PassesConfig, ScheduleConfig, UpdateConfig


class AlgorithmConfig(PassesConfig):
    """What one phase of training does a step, and how often."""

    name: str = Field(description="The algorithm.")
    steps: int = Field(gt=0, description="Iterations.")
    prompts_per_step: int = Field(64, gt=0, description="Prompts of one iteration.")

    @property
    def updates(self) -> int:
        """Optimiser steps of the whole phase."""
        return self.steps * self.epochs * self.minibatches

    @property
    def rows_per_step(self) -> int:
        """Rows one iteration trains on."""
        return self.prompts_per_step


class OnlineConfig(AlgorithmConfig, UpdateConfig):
    """Algorithms that sample from the policy they train."""

    samples_per_prompt: int = Field(8, gt=0, description="Rows sampled for each prompt: the sample group.")
    loss: PolicyLossConfig = PolicyLossConfig()

    @property
    def rows_per_step(self) -> int:
        """Rows one iteration trains on."""
        return self.prompts_per_step * self.samples_per_prompt


class GroupConfig(OnlineConfig):
    """Algorithms that compare the answers to one prompt with each other."""

    samples_per_prompt: int = Field(
        8, ge=2, description="Rows sampled for each prompt: the sample group. A group of one has no baseline."
    )


class TokenLossConfig(PolicyLossConfig):
    """The loss of algorithms whose tokens earn rewards of their own: there the divergence is paid."""

    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="Estimator of the divergence.")
    kl_in: Literal["loss", "reward"] = Field("reward", description="Where the divergence is paid.")


class TokenConfig(OnlineConfig):
    """Algorithms that tell the tokens of a row apart."""

    gamma: float = Field(1.0, ge=0, le=1, description="What a later reward counts a token earlier.")
    loss: TokenLossConfig = TokenLossConfig()


class WarmStartConfig(ScheduleConfig):
    """Supervised steps before the algorithm; the rest of their optimiser's settings are the policy's."""

    steps: int = Field(gt=0, description="Optimiser steps.")
    prompts_per_step: int = Field(256, gt=0, description="Rows of one step.")
