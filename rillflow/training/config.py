"""Settings of the training engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.section import Section


class RateConfig(Section):
    """What each phase has of its own: the learning rate, and how soon AdamW forgets."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second decay.")
    warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warm-up.")


class OptimizerConfig(RateConfig):
    """AdamW, its schedule and its clipping."""

    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape after the warm-up."
    )
    final_lr: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, as a share of lr.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first decay.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    moments: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type of AdamW's moments between steps; left out, float32, or the master's own."
    )
    offload: Literal["optimizer", "reference", "all"] | None = Field(
        None,
        description="What lies in host memory between its uses: moments and masters, a reference's weights.",
    )


class TrainConfig(OptimizerConfig):
    """The optimiser, and how a minibatch is cut."""

    tokens_per_micro_batch: int = Field(
        16384, gt=0, description="Tokens of one forward and backward pass; a longer row stands alone."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations to save memory.")
    balance: float | None = Field(
        None, gt=0, description="Factor of the loss that evens out a mixture's experts; left out, none."
    )

    def as_train(self) -> TrainConfig:
        """These settings without what a section adds to them."""
        return TrainConfig.model_validate(self.model_dump(include=set(TrainConfig.model_fields)))

    def with_rate(self, rate: RateConfig) -> TrainConfig:
        """These settings with another phase's learning rate, which stays as it is after the warm-up."""
        settings = rate.model_dump(include=set(RateConfig.model_fields))
        return self.as_train().model_copy(update={**settings, "schedule": "constant", "final_lr": 0.0})


class PassesConfig(Section):
    """How often a batch is gone through, and in how many optimiser steps."""

    epochs: int = Field(1, gt=0, description="Passes over each iteration's rows.")
    minibatches: int = Field(1, gt=0, description="Optimiser steps of one pass.")
    shuffle: bool = Field(
        True, description="Whether minibatches mix an iteration's rows, or take them as they come."
    )

    @property
    def is_off_policy(self) -> bool:
        """Whether some optimiser step uses rows of other weights than those it changes."""
        return self.epochs * self.minibatches > 1

    def goes_by(self, parts: int) -> bool:
        """Whether rows that come in so many parts are trained on part by part: whole minibatches of each."""
        return not self.shuffle and self.epochs == 1 and self.minibatches % parts == 0


class UpdateConfig(PassesConfig):
    """How sampled rows are used: what the ratio is taken against, and how exact it has to be."""

    old_logprobs: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="Whose log probabilities the ratio is taken against where rows are used off-policy.",
    )
    freshness: int = Field(
        0,
        ge=0,
        description="Policy versions that a trained token may be old; above 0 a sampler apart runs ahead.",
    )
    order: Literal["in_order", "ready_first"] = Field(
        "in_order",
        description="What a step ahead trains: prompts in the data's order, or whichever groups are ready.",
    )
    late: Literal["wait", "drop"] = Field(
        "wait",
        description="Ready first, what would become too old: waited for, or dropped and sampled again.",
    )
    publishes: int = Field(
        1,
        gt=0,
        description="Publishes of a step, ready first: one after each of so many parts of its minibatches.",
    )
    oversample_prompts: float | None = Field(
        None,
        ge=1,
        le=100,
        description="Prompts begun for each that is trained; the longest are left for a later step.",
    )
    oversample_samples: float | None = Field(
        None,
        ge=1,
        le=100,
        description="Rows begun for each of a prompt's that is trained: those that end first.",
    )
    ratio_tolerance: float = Field(
        1e-3,
        gt=0,
        description="Largest |trainer/sampler ratio - 1| of an on-policy float32 token; else the run stops.",
    )
    gap_tolerance: float = Field(
        0.05,
        gt=0,
        description="Largest mean |log(trainer/sampler)| of on-policy bfloat16 tokens; else the run stops.",
    )

    @property
    def oldest(self) -> int | None:
        """Versions behind that a trained token may be; None: any."""
        return self.freshness

    @property
    def is_off_policy(self) -> bool:
        """See PassesConfig; with a bound above 0 also the first step's rows are of older weights."""
        return self.freshness > 0 or super().is_off_policy

    @property
    def reads_sampler(self) -> bool:
        """Whether the ratio is taken against the sampler's own log probabilities."""
        return self.is_off_policy and self.old_logprobs == "sampler"
