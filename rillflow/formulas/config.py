"""Settings of the losses."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.graph.loss import LossSection

Correction = Literal["none", "tis", "sequence_tis", "icepop", "m2po", "topr"]
"""Correction of tokens that another policy sampled."""
Estimator = Literal["k1", "k2", "k3"]
"""Estimators of a divergence from single tokens: ``formulas.divergence``."""
Surrogate = Literal["clip", "weight"]
"""Quantity that the bounds on the ratio clip: ``formulas.clipped_policy_loss``."""
Selector = Literal["max_min", "max_random", "max_max", "random"]
"""Rule that selects a prompt's pair: ``formulas.pair_places``."""
MOST_LOGITS = 1 << 26
"""Logits of one pass that are kept whole: 256 MiB in float32, and as much for their gradient."""
_BOUNDS = {"tis": (0, 2), "sequence_tis": (0, 5), "icepop": (0.5, 5), "m2po": (0, 0.04), "topr": (0, 1)}
"""Default bounds of each correction; ``formulas.losses`` describes what they bound."""


class PolicyLossConfig(LossSection):
    """The clipped policy loss and its further terms; see docs/algorithms/grpo.md for the equation."""

    loss_kind: ClassVar[str] = "policy"

    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="Importance ratio to the old policy: per token, or the geometric mean over the row.",
    )
    surrogate: Surrogate = Field(
        "clip",
        description="clip: no gradient beyond the bounds of the ratio; "
        "weight: log pi times the clipped, detached ratio.",
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above at 1 + clip_high.")
    dual_clip: float = Field(
        3.0,
        ge=0,
        description="Dual-clip bound c > 1 for negative advantages under the clip surrogate; 0 for none.",
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="Mean over all tokens; mean over rows of each row's token mean; or sum divided by "
        "rows x constant.",
    )
    constant: int = Field(
        0, ge=0, description="Divisor per row of the constant aggregation; 0 for rollout.max_tokens."
    )
    kl: float = Field(
        0.0, ge=0, description="Weight of the KL divergence from the reference; 0 needs no reference."
    )
    kl_estimator: Estimator | None = Field(
        None, description="Estimator of the KL divergence; left out, k1 in the reward and k3 in the loss."
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Where the KL divergence is added: to the loss or to the reward."
    )
    kl_bound: float = Field(
        100.0,
        gt=1,
        le=4e8,
        description="Bound on reference / policy in the gradient of k3, which is 1 - reference / policy "
        "for a token.",
    )
    entropy: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    correction: Correction = Field(
        "none",
        description="Importance weights trainer / sampler for stale or mismatched rows; left out, "
        "tis with another engine, or with freshness above 0 and old_logprobs of the trainer.",
    )
    correction_bounds: tuple[float, float] | None = Field(
        None, description="Bounds of the correction's weights; left out, those of its paper."
    )

    @field_validator("correction", mode="before")
    @classmethod
    def _null_is_none(cls, value: object) -> object:
        """Accept ``--set algorithm.loss.correction=none``, which arrives as null."""
        return "none" if value is None else value

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that the loss is computed from."""
        near = ("reference_logprobs",) if self.kl_paid == "loss" else ()
        return ("sampler_logprobs", "advantages", *near)

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the correction: the configured ones, else its defaults; ``none`` has no bounds."""
        return self.correction_bounds or _BOUNDS[self.correction]

    @property
    def kl_paid(self) -> Literal["loss", "reward"] | None:
        """Place where the divergence is paid; None if its weight is 0."""
        return self.kl_in if self.kl else None

    @property
    def estimator(self) -> Estimator:
        """Estimator in use: the configured one, else the one with the right gradient in that place."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @model_validator(mode="after")
    def _pulls_back(self) -> PolicyLossConfig:
        if self.kl_paid == "loss" and self.estimator == "k1":
            raise ValueError(
                f"kl is {self.kl:g} in the loss and kl_estimator is k1: the gradient of log pi - log ref "
                'does not depend on the reference and limits nothing; use k2 or k3, or kl_in = "reward"'
            )
        if self.kl_paid == "reward" and self.estimator != "k1":
            raise ValueError(
                f"kl is {self.kl:g} in the reward and kl_estimator is {self.estimator}: in a reward it does "
                'not reduce the divergence; use k1, or kl_in = "loss"'
            )
        return self

    @model_validator(mode="after")
    def _leaves_one_alone(self) -> PolicyLossConfig:
        low, high = self.bounds if self.correction != "none" else (0, 1)
        is_moment = self.correction == "m2po"
        if not (low == 0 < high if is_moment else 0 <= low <= 1 <= high):
            need = "0 and the largest mean of (log w)^2" if is_moment else "0 <= low <= 1 <= high"
            raise ValueError(f"correction_bounds are [{low:g}, {high:g}]; {self.correction} needs {need}")
        return self

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError(
                f"{value:g} would clip even an unchanged policy's loss: use more than 1, or 0 for none"
            )
        return value


class ValueLossConfig(LossSection):
    """The loss of a critic."""

    loss_kind: ClassVar[str] = "values"

    clip: float = Field(
        0.2,
        ge=0,
        description="Clip range of the value loss around the values at sampling; 0 for none.",
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that the loss is computed from."""
        return ("returns",)
