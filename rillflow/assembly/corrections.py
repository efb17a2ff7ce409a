"""Corrections: the importance weights that a loss gets where another policy may have sampled its tokens.

    a recipe that sets algorithm.loss.correction ────────────> that one
    old_logprobs = "sampler" ────────────────────────────────> none: the clip bounds present / sampler
    freshness above 0, or an engine that is not the native one ─> tis
    anything else ───────────────────────────────────────────> none: the sampler is the trainer

``benchmarks/results/stale.md`` compares the corrections on stale rows. The formulas: ``formulas.ratios``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rillflow.algorithms.config import OnlineConfig
from rillflow.rollout.config import NATIVE

if TYPE_CHECKING:
    from rillflow.assembly.recipe import Recipe
    from rillflow.formulas.config import Correction

DEFAULT: Correction = "tis"
"""The correction of off-policy tokens where a recipe names none."""


def with_correction(config: OnlineConfig, engine: str) -> OnlineConfig:
    """Return the settings with the default correction, or as they are where they name one or need none.

    Args:
        config: the algorithm's settings.
        engine: what ``rollout.engine`` names.
    """
    may_differ = config.freshness > 0 or engine != NATIVE
    if config.reads_sampler or not may_differ or "correction" in config.loss.model_fields_set:
        return config
    loss = type(config.loss).model_validate({**config.loss.model_dump(), "correction": DEFAULT})
    return config.model_copy(update={"loss": loss})


def correction_notes(recipe: Recipe) -> list[str]:
    """Say what weighs tokens of older versions, why, and how to choose otherwise."""
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
