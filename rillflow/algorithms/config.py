"""Settings that every algorithm shares; each algorithm's own file adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from rillflow.config.schema import Section
from rillflow.formulas.config import PolicyLossConfig
from rillflow.rewards.judge_prompt import FrameConfig
from rillflow.training.config import PassesConfig, RateConfig, UpdateConfig


class AlgorithmConfig(PassesConfig):
    """Settings of one phase of training: its steps and their batches."""

    name: str = Field(description="The algorithm.")
    steps: int = Field(gt=0, description="Steps of the algorithm.")
    prompts_per_step: int = Field(64, gt=0, description="Prompts of one step.")

    @property
    def updates(self) -> int:
        """Optimiser steps of the whole phase."""
        return self.steps * self.epochs * self.minibatches

    @property
    def rows_per_step(self) -> int:
        """Rows that one iteration trains on."""
        return self.prompts_per_step

    @property
    def columns(self) -> tuple[str, ...]:
        """Number columns that every row of the data has; they become fields of the same names."""
        return ()

    @property
    def judge_frame(self) -> FrameConfig | None:
        """Frame of the judge that the algorithm trains; None if it trains none."""
        return None

    @property
    def tails(self) -> Mapping[str, int]:
        """Settings that count tokens at the end of the longest answer, by name."""
        return {}


class ShapeConfig(Section):
    """Changes of rewards before training, in this order."""

    normalise: Literal["batch", "running"] | None = Field(
        None,
        description="Normalise rewards by mean and standard deviation, of the step or of all steps so far.",
    )
    clip: tuple[float, float] | None = Field(
        None, description="Smallest and largest reward; others are clipped to them."
    )
    length_price: float = Field(
        0.0, description="Length penalty: subtracted from the reward for each sampled token."
    )

    @field_validator("clip")
    @classmethod
    def _in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"{value[0]:g} is not below {value[1]:g}; write the smaller bound first")
        return value


class SampledConfig(AlgorithmConfig, UpdateConfig):
    """Settings of algorithms that sample from the policy they train, with any loss."""

    samples_per_prompt: int = Field(
        8, gt=0, description="Completions sampled for each prompt: the sample group."
    )
    truncated: Literal["keep", "mask", "bootstrap"] = Field(
        "keep",
        description="Rows cut off at the token limit: keep them, mask them from every loss, or bootstrap "
        "with the critic's value.",
    )
    missing_end_penalty: float = Field(
        0.0, ge=0, description="Subtracted from the reward of a row cut off at the token limit."
    )
    shape: ShapeConfig | None = Field(
        None, description="Normalisation, clipping and a length penalty of rewards; left out, none."
    )

    @property
    def rows_per_step(self) -> int:
        """Rows that one iteration trains on."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def draws_again(self) -> bool:
        """Whether a step may sample further prompts."""
        return False


class AnchoredConfig(SampledConfig):
    """Settings of algorithms that may penalise the divergence from a reference."""

    reference: Literal["first", "previous", "moving"] = Field(
        "first",
        description="Reference policy: as at the start of the phase, as at the start of the step, or a "
        "moving average of the policy.",
    )
    reference_rate: float = Field(
        0.6, gt=0, le=1, description="Rate a of a moving reference: ref <- (1 - a) ref + a policy."
    )
    reference_every: int = Field(1, gt=0, description="Steps between two updates of a moving reference.")

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is a mean that follows the policy."""
        return self.reference == "moving"


class OnlineConfig(AnchoredConfig):
    """Settings of algorithms with the policy loss: a ratio and an advantage for every token."""

    loss: PolicyLossConfig = PolicyLossConfig()


class GroupConfig(OnlineConfig):
    """Settings of algorithms that compare the answers to one prompt."""

    samples_per_prompt: int = Field(
        8,
        ge=2,
        description="Completions sampled for each prompt: the sample group. A group of one has no baseline.",
    )


class TokenConfig(OnlineConfig):
    """Settings of algorithms with token-level advantages."""

    gamma: float = Field(1.0, ge=0, le=1, description="Discount factor of rewards, per token.")
    loss: PolicyLossConfig = PolicyLossConfig(kl_in="reward")
    """Token-level rewards include the divergence penalty by default."""


class WarmStartConfig(RateConfig):
    """Supervised steps before the algorithm; their other optimiser settings are the policy's."""

    steps: int = Field(gt=0, description="Optimiser steps.")
    prompts_per_step: int = Field(256, gt=0, description="Rows of one step.")
