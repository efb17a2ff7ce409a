"""Formulas: advantages, divergences, losses and their aggregation, as pure functions of tensors.

    rewards [B], groups [B] ──> advantages [B]
    rewards [B], divergence [T] ──> token rewards [T], values [T] ──> advantages, returns [T]
    logits [N, V] ──> log probabilities [N] ──> log ratios [N] ──> token losses [N] ──> (sum, denominator)

T are the tokens of all rows laid end to end, N only their loss tokens; nothing is padded. A name is loaded at
its first use, and torch when a formula computes, so a step with ``formulas.group_advantages`` is read and
traced without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from rillflow.formulas.advantages import *
    from rillflow.formulas.config import *
    from rillflow.formulas.controllers import *
    from rillflow.formulas.interval import *
    from rillflow.formulas.logprobs import *
    from rillflow.formulas.losses import *
    from rillflow.formulas.penalty import *
    from rillflow.formulas.preferences import *
    from rillflow.formulas.selection import *
    from rillflow.formulas.shaping import *
    from rillflow.formulas.token_advantages import *
    from rillflow.formulas.unpaired import *

Formula = TypeVar("Formula", bound=Callable[..., Any])
_NAMES = {
    "advantages": (
        "group_advantages lagrangian_advantages leave_one_out over_greedy penalised_group_advantages "
        "varied_groups"
    ),
    "config": "PolicyLossConfig ValueLossConfig",
    "controllers": "multiplier next_kl_weight next_log_multiplier",
    "interval": "wilson",
    "logprobs": "token_logprobs",
    "losses": (
        "clipped_policy_loss cross_entropy divergence label_loss loss_weights m2po_limit "
        "margin_preference_loss policy_loss preference_loss sequence_log_ratio TokenLosses value_loss"
    ),
    "penalty": (
        "ended kept_totals mean_cost mean_divergence missing_end_rewards overlong_rewards "
        "penalised_rewards penalised_token_costs penalised_token_rewards previous_logprobs "
        "previous_totals token_costs token_rewards"
    ),
    "preferences": "implicit_rewards logprob_rewards pair_loss PairLossConfig",
    "selection": (
        "best_of_n_bound best_of_n_divergence best_rows is_paired is_preferred iterations_without_pairs "
        "pair_places paired_groups whole_scores"
    ),
    "shaping": (
        "bounded_rewards next_reward_count next_reward_mean next_reward_squares normalised_rewards "
        "rescaled_rewards"
    ),
    "token_advantages": (
        "bootstrapped_rewards gae lambda_returns returns_to_go value_targets whitened whitened_returns"
    ),
    "unpaired": "unpaired_loss UnpairedLossConfig",
}
"""The public names of each module."""
Granularity = Literal["row", "group", "batch"]
"""Rows that a formula must see for a row's result: the row, all rows of its prompt, or the batch."""
_SEEN: dict[Granularity, str] = {
    "row": (
        "bootstrapped_rewards bounded_rewards ended gae implicit_rewards is_paired is_preferred kept_totals "
        "lagrangian_advantages lambda_returns logprob_rewards missing_end_rewards overlong_rewards "
        "penalised_rewards penalised_token_costs penalised_token_rewards previous_logprobs previous_totals "
        "rescaled_rewards returns_to_go token_costs token_rewards value_targets whole_scores"
    ),
    "group": "best_rows group_advantages leave_one_out pair_places penalised_group_advantages varied_groups",
}
"""Formulas that run on the ranks that hold their rows; the others see the whole batch."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"{__name__}.{_HOMES[name]}"))[name]


def named(place: str) -> Any:
    """Return the public formula or settings of a loss at ``module:name``; None if there is none."""
    module, _, name = place.partition(":")
    return __getattr__(name) if module == f"{__name__}.{_HOMES.get(name)}" else None


def granularity(formula: Callable[..., Any]) -> Granularity:
    """Return the rows that a formula must see; a custom formula sets them with ``seeing``."""
    if formula.__module__.startswith(f"{__name__}."):
        return next((seen for seen, names in _SEEN.items() if formula.__name__ in names.split()), "batch")
    said: Granularity = vars(formula).get("granularity", "batch")
    return said


def seeing(what: Granularity) -> Callable[[Formula], Formula]:
    """Set the rows that a custom formula must see; with rows or groups it runs on every rank that holds some.

    Example:
        @formulas.seeing("group")
        def best_of_group(rewards, groups): ...
    """

    def said(formula: Formula) -> Formula:
        vars(formula)["granularity"] = what
        return formula

    return said


def __dir__() -> list[str]:
    return sorted(_HOMES)
