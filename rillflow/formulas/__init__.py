"""Formulas: advantages, divergences, losses and their aggregation, as pure functions of tensors.

    rewards [B], groups [B] ──> advantages [B]
    rewards [B], divergence [T] ──> token rewards [T], values [T] ──> advantages, returns [T]
    logits [N, V] ──> log probabilities [N] ──> log ratios [N] ──> token losses [N] ──> (sum, denominator)

T are the tokens of all rows laid end to end, N their loss tokens alone; nothing is padded. Names are
loaded at their first use, so an algorithm file can say ``formulas.group_advantages`` without waiting for
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rillflow.formulas.advantages import greedy_baseline as greedy_baseline
    from rillflow.formulas.advantages import group_advantages as group_advantages
    from rillflow.formulas.advantages import lagrangian_advantages as lagrangian_advantages
    from rillflow.formulas.advantages import leave_one_out as leave_one_out
    from rillflow.formulas.advantages import over_greedy as over_greedy
    from rillflow.formulas.advantages import penalised_group_advantages as penalised_group_advantages
    from rillflow.formulas.advantages import varied_groups as varied_groups
    from rillflow.formulas.aggregation import LossWeights as LossWeights
    from rillflow.formulas.aggregation import loss_weights as loss_weights
    from rillflow.formulas.controllers import multiplier as multiplier
    from rillflow.formulas.controllers import next_kl_weight as next_kl_weight
    from rillflow.formulas.controllers import next_log_multiplier as next_log_multiplier
    from rillflow.formulas.interval import wilson as wilson
    from rillflow.formulas.kl import divergence as divergence
    from rillflow.formulas.logprobs import TokenLogprobs as TokenLogprobs
    from rillflow.formulas.logprobs import token_logprobs as token_logprobs
    from rillflow.formulas.penalty import ended as ended
    from rillflow.formulas.penalty import mean_cost as mean_cost
    from rillflow.formulas.penalty import mean_divergence as mean_divergence
    from rillflow.formulas.penalty import missing_end_rewards as missing_end_rewards
    from rillflow.formulas.penalty import overlong_penalty as overlong_penalty
    from rillflow.formulas.penalty import overlong_rewards as overlong_rewards
    from rillflow.formulas.penalty import penalised_rewards as penalised_rewards
    from rillflow.formulas.penalty import penalised_token_costs as penalised_token_costs
    from rillflow.formulas.penalty import penalised_token_rewards as penalised_token_rewards
    from rillflow.formulas.penalty import token_costs as token_costs
    from rillflow.formulas.penalty import token_rewards as token_rewards
    from rillflow.formulas.policy_loss import clipped_policy_loss as clipped_policy_loss
    from rillflow.formulas.policy_loss import importance_weights as importance_weights
    from rillflow.formulas.policy_loss import sequence_log_ratio as sequence_log_ratio
    from rillflow.formulas.preference import bradley_terry as bradley_terry
    from rillflow.formulas.preference import preference_accuracy as preference_accuracy
    from rillflow.formulas.token_advantages import bootstrapped_rewards as bootstrapped_rewards
    from rillflow.formulas.token_advantages import explained_variance as explained_variance
    from rillflow.formulas.token_advantages import gae as gae
    from rillflow.formulas.token_advantages import lambda_returns as lambda_returns
    from rillflow.formulas.token_advantages import returns_to_go as returns_to_go
    from rillflow.formulas.token_advantages import value_targets as value_targets
    from rillflow.formulas.token_advantages import whitened as whitened
    from rillflow.formulas.token_advantages import whitened_returns as whitened_returns
    from rillflow.formulas.value_loss import clipped_value_loss as clipped_value_loss

_HOMES = {
    "greedy_baseline": "advantages",
    "group_advantages": "advantages",
    "lagrangian_advantages": "advantages",
    "leave_one_out": "advantages",
    "over_greedy": "advantages",
    "penalised_group_advantages": "advantages",
    "varied_groups": "advantages",
    "LossWeights": "aggregation",
    "loss_weights": "aggregation",
    "multiplier": "controllers",
    "next_kl_weight": "controllers",
    "next_log_multiplier": "controllers",
    "wilson": "interval",
    "divergence": "kl",
    "TokenLogprobs": "logprobs",
    "token_logprobs": "logprobs",
    "ended": "penalty",
    "mean_cost": "penalty",
    "mean_divergence": "penalty",
    "missing_end_rewards": "penalty",
    "overlong_penalty": "penalty",
    "overlong_rewards": "penalty",
    "penalised_rewards": "penalty",
    "penalised_token_costs": "penalty",
    "penalised_token_rewards": "penalty",
    "token_costs": "penalty",
    "token_rewards": "penalty",
    "clipped_policy_loss": "policy_loss",
    "importance_weights": "policy_loss",
    "sequence_log_ratio": "policy_loss",
    "bradley_terry": "preference",
    "preference_accuracy": "preference",
    "bootstrapped_rewards": "token_advantages",
    "explained_variance": "token_advantages",
    "gae": "token_advantages",
    "lambda_returns": "token_advantages",
    "returns_to_go": "token_advantages",
    "value_targets": "token_advantages",
    "whitened": "token_advantages",
    "whitened_returns": "token_advantages",
    "clipped_value_loss": "value_loss",
}
"""The module each public name is defined in."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted(_HOMES)
