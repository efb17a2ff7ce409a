"""Losses: the losses of the Tinker API by name; a loss is the sum of its terms over tokens.

    p the present log probability of a token's target, q the input ``logprobs``, r = exp(p - q)
    A the input ``advantages``, w the input ``weights``

| name | term of a token | settings |
|---|---|---|
| ``cross_entropy`` | -w p | |
| ``importance_sampling`` | -r A | |
| ``ppo`` | -min(r A, clip(r, low, high) A) | ``clip_low_threshold`` 0.8, ``clip_high_threshold`` 1.2 |
| ``cispo`` | -sg[clip(r, low, high)] A p | the same |
| ``dro`` | -(A p - beta / 2 (p - q)^2) | ``beta`` 0.05 |

Both thresholds may also be inputs with one number for each token. Sources: arXiv 1707.06347 (ppo), 2506.13585
(cispo), 2405.19107 (dro). Legend: N tokens; sg[] no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rillflow.errors import DataError, nearest
from rillflow.formulas.losses import held

_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
Inputs = Mapping[str, Tensor]
"""[N] each: the inputs of a loss at the tokens."""


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """A loss by its name."""

    name: str
    """Name in the API."""
    terms: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    """Returns [N] the terms, from log probabilities, inputs and settings."""
    factor: str
    """The input that multiplies a term: where it is 0, a token has no gradient."""
    needs: tuple[str, ...] = ()
    """Inputs that a datum must have besides ``target_tokens``."""
    may: tuple[str, ...] = ()
    """Inputs that it may have."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings and their defaults."""

    def chosen(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """Return the defaults, overridden by the request.

        Raises:
            DataError: a setting is unknown, or not a finite number.
        """
        for name, value in given.items():
            if name not in self.settings:
                raise DataError(
                    f"loss_fn_config has {name!r}, which {self.name} does not read",
                    why=f"it reads {', '.join(self.settings) or 'no settings'}",
                    fix=nearest(name, self.settings),
                )
            if not isinstance(value, float) or not math.isfinite(value):
                raise DataError(f"loss_fn_config.{name} is {value}", why="it is a finite number")
        return {**self.settings, **{name: float(value) for name, value in given.items()}}


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return held(logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    low, high = (inputs.get(name, settings[name]) for name in (_LOW, _HIGH))
    return ratio.clamp(torch.as_tensor(low).to(ratio), torch.as_tensor(high).to(ratio))


def _cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    del settings
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    del settings
    return -(_ratio(logprobs, inputs) * inputs["advantages"])


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, inputs, settings) * advantages)


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    bounded = _clipped(_ratio(logprobs, inputs), inputs, settings)
    return -bounded.detach() * inputs["advantages"] * logprobs


def _dro(logprobs: Tensor, inputs: Inputs, settings: Mapping[str, float]) -> Tensor:
    apart = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * apart.square())


_SAMPLED = ("logprobs", "advantages")
_CLIP = {_LOW: 0.8, _HIGH: 1.2}
LOSSES: Mapping[str, NamedLoss] = {
    each.name: each
    for each in (
        NamedLoss(name="cross_entropy", terms=_cross_entropy, factor="weights", may=("weights",)),
        NamedLoss(
            name="importance_sampling", terms=_importance_sampling, factor="advantages", needs=_SAMPLED
        ),
        NamedLoss(
            name="ppo",
            terms=_ppo,
            factor="advantages",
            needs=_SAMPLED,
            may=tuple(_CLIP),
            settings=_CLIP,
        ),
        NamedLoss(
            name="cispo",
            terms=_cispo,
            factor="advantages",
            needs=_SAMPLED,
            may=tuple(_CLIP),
            settings=_CLIP,
        ),
        NamedLoss(name="dro", terms=_dro, factor="", needs=_SAMPLED, settings={"beta": 0.05}),
    )
}
"""Losses by name. In dro a token with advantage 0 still has a gradient, so no input is its factor."""
_HOSTED = {
    "stable_reinforce": "its formula is not published; it needs records of the hosted service",
    "gspo": "its thresholds and its mean over a sequence are not published",
    "custom": "losses that the server runs are not supported; the client runs custom losses itself",
}


def loss_of(name: str) -> NamedLoss:
    """Return a loss.

    Raises:
        DataError: there is none of this name.
    """
    if name in LOSSES:
        return LOSSES[name]
    why = _HOSTED.get(name, f"there are {', '.join(LOSSES)}")
    fix = "use importance_sampling, ppo or cispo" if name in _HOSTED else nearest(name, LOSSES)
    raise DataError(f"there is no loss {name[:40]!r}", why=why, fix=fix)
