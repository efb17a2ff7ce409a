"""Judging: what a judge's labels say of answers, and what many judgments say of two models.

log p(label) [N, K] ─ label_shares ─> p [N, K]
p(first is better) of both orders [N], [N] ─ both_orders ─> p(one beats other) [N]
p of pairs (i, j) ─ mean_wins ─> a number a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rillflow.errors import FormulaError
from rillflow.formulas.shapes import same_length

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Preferences:
    """What a judge says of N pairs of answers, each read in both orders."""

    likely: Tensor
    """[N] that the one answer is better than the other."""
    contradicts: Tensor
    """[N] bool, True where the two orders name different answers."""
    bias: Tensor
    """[N] how much likelier the answer that stands first is taken to be better, -1/2 to 1/2."""


def label_shares(logprobs: Tensor) -> Tensor:
    """[N, K] the probability of each label among the labels: a softmax of their log probabilities [N, K]."""
    if logprobs.dim() != 2 or logprobs.shape[1] < 2:
        raise FormulaError(
            f"label_shares: shape {list(logprobs.shape)}", why="each row has a number for each of two labels"
        )
    return logprobs.double().softmax(1)


def both_orders(one_first: Tensor, other_first: Tensor) -> Preferences:
    """A preference without the bias of position: the mean over both orders (arXiv 2405.07863, section 2).

    p(one beats other) = (p(A | one, other) + p(B | other, one)) / 2. A judge that always says A gives 1/2.

    Args:
        one_first: [N] probability that the answer that stands first is better, where that is the one.
        other_first: [N] the same where the other stands first.

    Raises:
        FormulaError: shapes differ.
    """
    same_length("both_orders", one_first=one_first, other_first=other_first)
    return Preferences(
        likely=(one_first + 1 - other_first) / 2,
        contradicts=(one_first - 0.5) * (other_first - 0.5) > 0,
        bias=(one_first + other_first - 1) / 2,
    )


def expected_rating(shares: Tensor, ratings: tuple[float, ...]) -> Tensor:
    """[N] the mean rating, of labels' shares [N, K] and what each is worth."""
    return shares @ shares.new_tensor(ratings)
