"""Settings of the training engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from rillflow.config.schema import Section


class RateConfig(Section):
    """Settings that each phase has of its own: learning rate, warm-up and AdamW's second decay."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warm-up.")


class OptimizerConfig(RateConfig):
    """AdamW, its schedule and its clipping."""

    renamed: ClassVar[Mapping[str, str]] = {"moments": "optimizer_dtype"}

    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate schedule after the warm-up."
    )
    final_lr: float = Field(
        0.0, ge=0, le=1, description="Final learning rate of linear and cosine schedules, as a share of lr."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, applied to matrices only.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")
    optimizer_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of AdamW's moments; left out, float32, or that of the master weights."
    )
    offload: Literal["optimizer", "reference", "all"] | None = Field(
        None,
        description="What to offload to host memory between uses: moments and master weights, or the "
        "reference's weights.",
    )


class TrainConfig(OptimizerConfig):
    """The optimiser, and the division of a minibatch into micro-batches."""

    tokens_per_micro_batch: int = Field(
        16384, gt=0, description="Tokens of one micro-batch; a longer row is a micro-batch of its own."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    balance: float = Field(
        0.0, ge=0, description="Coefficient of the load-balancing loss of a mixture of experts; 0 for none."
    )

    def as_train(self) -> TrainConfig:
        """Return only the settings of TrainConfig, without those of a subclass."""
        return TrainConfig.model_validate(self.model_dump(include=set(TrainConfig.model_fields)))

    def with_rate(self, rate: RateConfig) -> TrainConfig:
        """Return these settings with another phase's learning rate, constant after the warm-up."""
        settings = rate.model_dump(include=set(RateConfig.model_fields))
        return self.as_train().model_copy(update={**settings, "schedule": "constant", "final_lr": 0.0})


class PassesConfig(Section):
    """Passes over a batch, and optimiser steps in each."""

    epochs: int = Field(1, gt=0, description="Passes over the rows of a step.")
    minibatches: int = Field(1, gt=0, description="Optimiser steps in one pass.")
    shuffle: bool = Field(
        True, description="Whether to shuffle a step's rows before they are split into minibatches."
    )

    @property
    def is_off_policy(self) -> bool:
        """Whether some optimiser step uses rows that were sampled with other weights."""
        return self.epochs * self.minibatches > 1

    def goes_by(self, parts: int) -> bool:
        """Return whether rows that arrive in ``parts`` are trained on part by part, in whole minibatches."""
        return not self.shuffle and self.epochs == 1 and self.minibatches % parts == 0


class UpdateConfig(PassesConfig):
    """Use of sampled rows: the old policy of the ratio, and limits of staleness and mismatch."""

    renamed: ClassVar[Mapping[str, str]] = {
        "freshness": "schedule.freshness",
        "async_mode": "schedule.mode",
        "order": "schedule.mode",
        "on_stale": "schedule.on_stale",
        "late": "schedule.on_stale",
        "syncs_per_step": "schedule.syncs_per_step",
        "publishes": "schedule.syncs_per_step",
        "oversample_prompts": "schedule.oversample_prompts",
        "oversample_samples": "schedule.oversample_samples",
    }
    _freshness: int = PrivateAttr(0)

    old_logprobs: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="Source of the old log probabilities in the ratio of off-policy rows: trainer or "
        "sampler; left out with freshness above 0, sampler where the loss clips token ratios.",
    )
    ratio_tolerance: float = Field(
        1e-3,
        gt=0,
        description="Largest |trainer/sampler probability ratio - 1| of an on-policy float32 token; above "
        "it the run stops.",
    )
    gap_tolerance: float = Field(
        0.05,
        gt=0,
        description="Largest mean |log(trainer/sampler probability)| of on-policy bfloat16 tokens; above "
        "it, or five times it in the mean of a row, the run stops.",
    )

    @property
    def freshness(self) -> int:
        """Versions that a trained token may be behind, as the run's schedule bounds them."""
        return self._freshness

    def with_freshness(self, freshness: int) -> Self:
        """Return these settings for tokens that may be ``freshness`` versions behind."""
        config = self.model_copy()
        config._freshness = freshness
        return config

    @property
    def oldest(self) -> int | None:
        """Versions that a trained token may be behind; None for any number."""
        return self.freshness

    @property
    def is_off_policy(self) -> bool:
        """See PassesConfig; with freshness above 0, even the first step's rows come from older weights."""
        return self.freshness > 0 or super().is_off_policy

    @property
    def reads_sampler(self) -> bool:
        """Whether the ratio uses the sampler's own log probabilities."""
        return self.is_off_policy and self.old_logprobs == "sampler"
