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
    from rillflow.formulas.aggregation import loss_weights as loss_weights
    from rillflow.formulas.controllers import multiplier as multiplier
    from rillflow.formulas.controllers import next_kl_weight as next_kl_weight
    from rillflow.formulas.controllers import next_log_multiplier as next_log_multiplier
    from rillflow.formulas.interval import wilson as wilson
    from rillflow.formulas.kl import divergence as divergence
    from rillflow.formulas.logprobs import token_logprobs as token_logprobs
    from rillflow.formulas.losses import TokenLosses as TokenLosses
    from rillflow.formulas.losses import clipped_policy_loss as clipped_policy_loss
    from rillflow.formulas.losses import cross_entropy as cross_entropy
    from rillflow.formulas.losses import importance_weights as importance_weights
    from rillflow.formulas.losses import policy_loss as policy_loss
    from rillflow.formulas.losses import preference_loss as preference_loss
    from rillflow.formulas.losses import sequence_log_ratio as sequence_log_ratio
    from rillflow.formulas.losses import value_loss as value_loss
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
    from rillflow.formulas.token_advantages import bootstrapped_rewards as bootstrapped_rewards
    from rillflow.formulas.token_advantages import gae as gae
    from rillflow.formulas.token_advantages import lambda_returns as lambda_returns
    from rillflow.formulas.token_advantages import returns_to_go as returns_to_go
    from rillflow.formulas.token_advantages import value_targets as value_targets
    from rillflow.formulas.token_advantages import whitened as whitened
    from rillflow.formulas.token_advantages import whitened_returns as whitened_returns

_NAMES = {
    "advantages": (
        "greedy_baseline group_advantages lagrangian_advantages leave_one_out over_greedy "
        "penalised_group_advantages varied_groups"
    ),
    "aggregation": "loss_weights",
    "controllers": "multiplier next_kl_weight next_log_multiplier",
    "interval": "wilson",
    "kl": "divergence",
    "logprobs": "token_logprobs",
    "losses": (
        "clipped_policy_loss cross_entropy importance_weights policy_loss "
        "preference_loss sequence_log_ratio TokenLosses value_loss"
    ),
    "penalty": (
        "ended mean_cost mean_divergence missing_end_rewards overlong_penalty overlong_rewards "
        "penalised_rewards penalised_token_costs penalised_token_rewards token_costs "
        "token_rewards"
    ),
    "token_advantages": (
        "bootstrapped_rewards gae lambda_returns returns_to_go value_targets whitened whitened_returns"
    ),
}
"""The public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted(_HOMES)
