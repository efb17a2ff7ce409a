"""Bias notes: warn of settings with which training follows another gradient than the policy's own.

    recipe ─┬─ cuts, penalties, another temperature ─ rows are not samples of the policy that is trained
            ├─ rows that end first, groups dropped ── short answers are favoured
            ├─ keys and values of old weights ─────── log probabilities of no weights
            ├─ a mean of each row alone ───────────── long wrong answers are cheap
            └─ rows of older weights ──────────────── clipped, or weighed by a bounded correction

Every page that admits a bias has its warning here; for rewards that compare rows, in the part ``scorers``.
Each note gives the value, the reason and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rillflow.algorithms.config import OnlineConfig, SampledConfig
from rillflow.app.defaults import CORRECTION
from rillflow.formulas.config import PolicyLossConfig
from rillflow.rollout.config import SamplingConfig, answering

if TYPE_CHECKING:
    from rillflow.app.resolved import Resolved
    from rillflow.app.sections import Recipe
    from rillflow.formulas.config import Correction

_RESTRICTS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Settings that change the distribution of sampled tokens, but not the recorded log probabilities."""
_BIASES: Mapping[Correction, str] = {
    "tis": "A bound limits the weight of a token",
    "sequence_tis": "A bound limits the weight of a row",
    "icepop": "Tokens beyond the bounds have no gradient",
    "m2po": "Tokens beyond the limit have no gradient",
    "topr": "Rows with advantages of at least 0 have weight 1, and a bound limits the others",
}
"""Difference of each correction from the importance weight."""


def bias_notes(resolved: Resolved) -> list[str]:
    """Return a warning for each setting of the recipe that biases training."""
    notes = [*_sampling(resolved), *_rows(resolved.recipe), *_loss(resolved.recipe)]
    return [f"warning: {note}" for note in dict.fromkeys(notes)]


def correction_notes(resolved: Resolved) -> list[str]:
    """Return a note on the importance weight of off-policy tokens and its alternatives."""
    config = resolved.recipe.algorithm
    if not isinstance(config, OnlineConfig) or not config.freshness:
        return []
    bound = config.freshness
    old = f"schedule.freshness is {bound}: tokens may be {bound} version{'s' if bound > 1 else ''} old"
    if config.reads_sampler:
        return [
            f'{old}. algorithm.old_logprobs is "sampler": the clip bounds the ratio to the sampler, and no '
            "importance weight corrects the loss. Tokens beyond the clip have no gradient, so the update is "
            f'biased and shorter, and steadier; algorithm.old_logprobs = "trainer" selects {CORRECTION}'
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


def _sampling(resolved: Resolved) -> Iterator[str]:
    """Yield notes on training rows that are not samples of the trained policy."""
    recipe, usual, rollout = resolved.recipe, vars(SamplingConfig()), resolved.recipe.rollout
    for args, options in resolved.main.heard.calls.get("policy.generate", []):
        own = answering(args[1:], options).get("sampling")
        used, owner = (rollout, "rollout.") if own is None else (own, "sampling of policy.generate: ")
        given = {name: vars(used)[name] for name in _RESTRICTS}
        changed = [f"{owner}{name} is {value:g}" for name, value in given.items() if value != usual[name]]
        if changed:
            yield (
                f"{' and '.join(changed)}: the training rows are not samples of the policy, whose log "
                "probabilities cover the whole vocabulary. Nothing corrects the difference, so "
                f"{_harm(recipe)}. Remove {'it' if len(changed) == 1 else 'them'} in training; "
                "rollout.temperature below 1 makes unlikely tokens rarer too, and the trainer uses it"
            )
        if used.temperature != rollout.temperature:
            yield (
                f"{owner}temperature is {used.temperature:g}, and the trainer reads the rows at "
                f"rollout.temperature = {rollout.temperature:g}, so {_harm(recipe)}. Set both to one value"
            )


def _harm(recipe: Recipe) -> str:
    if isinstance(recipe.algorithm, OnlineConfig) or not isinstance(recipe.algorithm, SampledConfig):
        return "the gradient is biased"
    return f"{recipe.algorithm.name} learns from another distribution than the policy's"


def _rows(recipe: Recipe) -> Iterator[str]:
    """Yield the schedule's notes on the choice of training rows, and on their log probabilities."""
    if isinstance(recipe.algorithm, SampledConfig):
        yield from recipe.schedule.notes(recipe.algorithm)


def _loss(recipe: Recipe) -> Iterator[str]:
    """Yield a note on an aggregation that the recipe chose against the algorithm's own."""
    config = recipe.algorithm
    if not isinstance(config, OnlineConfig) or config.loss.aggregation != "sequence_mean":
        return
    usual = type(config).model_fields["loss"].default
    if isinstance(usual, PolicyLossConfig) and usual.aggregation != "sequence_mean":
        yield (
            'algorithm.loss.aggregation is "sequence_mean": a row\'s loss is divided by its own length, so '
            f"long wrong answers cost less per token than short ones. "
            f'Remove it for the default of {config.name}, "{usual.aggregation}"'
        )
