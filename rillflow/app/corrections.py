"""Corrections: choose how the loss weighs tokens that another policy may have sampled.

    a recipe that sets algorithm.loss.correction ───────────────> its value
    old_logprobs = "sampler" ───────────────────────────────────> none: the clip bounds present / sampler
    freshness above 0, a clip of token ratios, native engine ───> old_logprobs = "sampler"
    freshness above 0 otherwise, or another engine ─────────────> tis
    anything else ──────────────────────────────────────────────> none: sampler and trainer agree

``benchmarks/results/stale.md`` compares the choices on stale rows. The formulas: ``formulas.losses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rillflow.algorithms.config import OnlineConfig, SampledConfig
from rillflow.rollout.config import NATIVE

if TYPE_CHECKING:
    from rillflow.app.recipe import Recipe
    from rillflow.formulas.config import Correction

DEFAULT: Correction = "tis"
"""Importance weight of off-policy tokens if the recipe names none and the sampler's clip does not apply."""


_BIASES: Mapping[Correction, str] = {
    "tis": "A bound limits the weight of a token",
    "sequence_tis": "A bound limits the weight of a row",
    "icepop": "Tokens beyond the bounds have no gradient",
    "m2po": "Tokens beyond the limit have no gradient",
    "topr": "Rows with advantages of at least 0 have weight 1, and a bound limits the others",
}
"""Difference of each correction from the importance weight."""


def with_correction(config: OnlineConfig, engine: str) -> OnlineConfig:
    """Return the settings, with the default for off-policy tokens if the recipe names none.

    The default is the clip of the ratio to the sampler where the loss clips token ratios. A clip of sequence
    ratios is too narrow for stale rows, and another engine's log probabilities differ at every token: there
    the default is an importance weight.

    Args:
        config: the algorithm's settings.
        engine: the value of ``rollout.engine``.
    """
    may_differ = config.freshness > 0 or engine != NATIVE
    if config.reads_sampler or not may_differ or "correction" in config.loss.model_fields_set:
        return config
    clips_tokens = config.loss.ratio == "token" and config.loss.surrogate == "clip"
    if engine == NATIVE and clips_tokens and "old_logprobs" not in config.model_fields_set:
        return config.model_copy(update={"old_logprobs": "sampler"})
    loss = type(config.loss).model_validate({**config.loss.model_dump(), "correction": DEFAULT})
    return config.model_copy(update={"loss": loss})


def correction_notes(recipe: Recipe) -> list[str]:
    """Return a note on the importance weight of off-policy tokens and its alternatives."""
    config = recipe.algorithm
    if not isinstance(config, OnlineConfig) or not config.freshness:
        return []
    bound = config.freshness
    old = f"algorithm.freshness is {bound}: tokens may be {bound} version{'s' if bound > 1 else ''} old"
    if config.reads_sampler:
        return [
            f'{old}. algorithm.old_logprobs is "sampler": the clip bounds the ratio to the sampler, and no '
            "importance weight corrects the loss. Tokens beyond the clip have no gradient, so the update is "
            f'biased and shorter, and steadier; algorithm.old_logprobs = "trainer" selects {DEFAULT}'
        ]
    name = config.loss.correction
    if name == "none":
        return [
            f'warning: {old}, and algorithm.loss.correction is "none": nothing corrects the loss. The ratio '
            "is taken against the trainer, so in a step's first minibatch it is 1 and the clip never binds. "
            "Remove algorithm.loss.correction and algorithm.old_logprobs to use the default"
        ]
    low, high = config.loss.bounds
    return [
        f'{old}. algorithm.loss.correction = "{name}" with bounds [{low:g}, {high:g}] weighs the loss by '
        f"trainer / sampler. {_BIASES[name]}, which biases the gradient (mismatch/bounded/share); "
        '"none" turns the weights off'
    ]


def bound_notes(recipe: Recipe) -> list[str]:
    """Return a warning if the phase has so few steps that the bound never applies."""
    config = recipe.algorithm
    if not isinstance(config, SampledConfig):
        return []
    oldest = config.steps * config.syncs_per_step - 1
    if config.freshness <= max(oldest, 0):
        return []
    return [
        f"warning: algorithm.freshness is {config.freshness}, and no token of this phase can be more than "
        f"{oldest} version{'' if oldest == 1 else 's'} old (algorithm.steps is {config.steps}): the bound "
        "never applies, and the first weights may sample every step. 1 to 4 is usual"
    ]
