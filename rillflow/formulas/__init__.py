"""Formulas: advantages, divergences, losses and their aggregation, as pure functions of tensors.

    rewards [B], groups [B] ──> advantages [B]
    logits [N, V] ──> log probabilities [N] ──> log ratios [N] ──> token losses [N] ──> (sum, denominator)

N are the loss tokens of all rows laid end to end; nothing is padded. Names are loaded at their first
use, so an algorithm file can say ``formulas.group_advantages`` without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow.formulas.advantages import group_advantages as group_advantages
    from rillflow.formulas.aggregation import LossWeights as LossWeights
    from rillflow.formulas.aggregation import loss_weights as loss_weights
    from rillflow.formulas.interval import wilson as wilson
    from rillflow.formulas.kl import divergence as divergence
    from rillflow.formulas.logprobs import TokenLogprobs as TokenLogprobs
    from rillflow.formulas.logprobs import token_logprobs as token_logprobs
    from rillflow.formulas.penalty import penalised_rewards as penalised_rewards
    from rillflow.formulas.policy_loss import clipped_policy_loss as clipped_policy_loss
    from rillflow.formulas.policy_loss import importance_weights as importance_weights

_HOMES = {
    "group_advantages": "advantages",
    "LossWeights": "aggregation",
    "loss_weights": "aggregation",
    "divergence": "kl",
    "wilson": "interval",
    "TokenLogprobs": "logprobs",
    "token_logprobs": "logprobs",
    "penalised_rewards": "penalty",
    "clipped_policy_loss": "policy_loss",
    "importance_weights": "policy_loss",
}
"""The module each public name is defined in."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted(_HOMES)
