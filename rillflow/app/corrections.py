"""Corrections: choose the importance weights for tokens that another policy may have sampled.

    a recipe that sets algorithm.loss.correction ────────────> its value
    old_logprobs = "sampler" ────────────────────────────────> none: the clip bounds present / sampler
    freshness above 0, or an engine that is not the native one ─> tis
    anything else ───────────────────────────────────────────> none: the sampler is the trainer

``benchmarks/results/stale.md`` compares the corrections on stale rows. The formulas: ``formulas.losses``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.algorithms.config import OnlineConfig
from rillflow.rollout.config import NATIVE

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe
    from rillflow.formulas.config import Correction

DEFAULT: Correction = "tis"
"""Correction of off-policy tokens if the recipe names none."""


def with_correction(config: OnlineConfig, engine: str) -> OnlineConfig:
    """Return the settings, with the default correction if one is needed and the recipe names none.

    Args:
        config: the algorithm's settings.
        engine: the value of ``rollout.engine``.
    """
    may_differ = config.freshness > 0 or engine != NATIVE
    if config.reads_sampler or not may_differ or "correction" in config.loss.model_fields_set:
        return config
    loss = type(config.loss).model_validate({**config.loss.model_dump(), "correction": DEFAULT})
    return config.model_copy(update={"loss": loss})


def correction_notes(recipe: Recipe) -> list[str]:
    """Return notes on the importance weight of older versions' tokens, its reason, and its alternatives."""
    config = recipe.algorithm
    if not isinstance(config, OnlineConfig) or not config.freshness:
        return []
    bound = config.freshness
    old = f"algorithm.freshness is {bound}: tokens may be {bound} version{'s' if bound > 1 else ''} old"
    if config.reads_sampler:
        return [
            f'{old}. algorithm.old_logprobs is "sampler": the clip bounds the ratio to the sampler, and no '
            f'importance weight corrects the loss; algorithm.old_logprobs = "trainer" brings {DEFAULT}'
        ]
    name = config.loss.correction
    if name == "none":
        return [
            f'warning: {old}, and algorithm.loss.correction is "none": nothing corrects the loss. The ratio '
            "is taken against the trainer, so in a step's first minibatch it is 1 and the clip never binds. "
            f'Leave the setting out for the default, "{DEFAULT}"'
        ]
    low, high = config.loss.bounds
    return [
        f'{old}. algorithm.loss.correction = "{name}" with bounds [{low:g}, {high:g}] weighs the loss by '
        'trainer / sampler; "none" turns that off'
    ]
