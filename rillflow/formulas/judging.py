"""Judging: what a judge's labels say of answers, and what many judgments say of two models.

log p(label) [N, K] ─ label_shares ─> p [N, K]
p(first is better) of both orders [N], [N] ─ both_orders ─> p(one beats other) [N]
p of pairs (i, j) ─ mean_wins ─> a number a row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rillflow.errors import FormulaError
from rillflow.formulas.interval import wilson
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


def win_rate(outcomes: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The share of prompts that are won, a tie counting half, with Wilson's 95% interval.

    The interval is that of so many wins in so many prompts; outcomes between 0 and 1 vary less than wins and
    losses of the same mean, so it is wide enough for ties and for means over several answers.

    Args:
        outcomes: of each prompt 1 where it is won, 0 where it is lost, between where it is neither.

    Raises:
        FormulaError: there is none, or one is not between 0 and 1.
    """
    _require_shares("win_rate", outcomes)
    return fmean(outcomes), wilson(math.fsum(outcomes), len(outcomes))


def length_controlled(
    outcomes: Sequence[float], longer: Sequence[float], *, deviation: float = 10.0, passes: int = 50
) -> float:
    """The win rate at equal length: sigmoid(a) of P(win) = sigmoid(a + b x longer / spread).

    A logistic regression on the difference of lengths, read where there is none (after length-controlled
    AlpacaEval, arXiv 2404.04475; no term for the prompt). ``spread`` is the root mean square of the
    differences. A normal prior of mean 0 and ``deviation`` on a and b keeps them finite where every prompt is
    won; it moves a share of 100 prompts by less than 0.001. Newton's method.

    Args:
        outcomes: as of ``win_rate``.
        longer: of each prompt by how much the one's answer is longer than the other's, in any unit.
        deviation: of the prior.
        passes: of Newton's method at most.

    Raises:
        FormulaError: there is none, the two differ in number, or a value is out of range.
    """
    _require_shares("length_controlled", outcomes)
    if len(longer) != len(outcomes) or not all(map(math.isfinite, longer)):
        raise FormulaError(
            f"length_controlled: {len(outcomes)} outcomes and {len(longer)} finite differences of length",
            why="each prompt has one of both",
        )
    spread = math.hypot(*longer) / math.sqrt(len(longer)) or 1.0
    apart, prior, a, b = [each / spread for each in longer], deviation**-2, 0.0, 0.0
    for _ in range(passes):
        likely = [_sigmoid(a + b * x) for x in apart]
        slope_a = math.fsum(y - p for y, p in zip(outcomes, likely, strict=True)) - prior * a
        slope_b = math.fsum((y - p) * x for y, p, x in zip(outcomes, likely, apart, strict=True)) - prior * b
        bends = [p * (1 - p) for p in likely]
        aa = math.fsum(bends) + prior
        bb = math.fsum(h * x * x for h, x in zip(bends, apart, strict=True)) + prior
        ab = math.fsum(h * x for h, x in zip(bends, apart, strict=True))
        scale = aa * bb - ab * ab
        step_a, step_b = (bb * slope_a - ab * slope_b) / scale, (aa * slope_b - ab * slope_a) / scale
        size = max(abs(step_a), abs(step_b), 1.0)  # a long step of Newton's would go past where it bends
        a, b = a + step_a / size, b + step_b / size
        if max(abs(step_a), abs(step_b)) < 1e-10:
            break
    return _sigmoid(a)


def pass_at(count: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, of ``right`` in ``count``: 1 - C(n - c, k) / C(n, k).

    Unbiased for k answers drawn anew: M. Chen and others, arXiv 2107.03374, equation 1.

    Raises:
        FormulaError: k is not between 1 and ``count``, or ``right`` is not between 0 and ``count``.
    """
    if not (1 <= k <= count and 0 <= right <= count):
        raise FormulaError(
            f"pass_at: {right} of {count} answers are right, and k is {k}",
            why="k answers are drawn of those that there are",
        )
    return 1 - math.comb(count - right, k) / math.comb(count, k)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _require_shares(formula: str, outcomes: Sequence[float]) -> None:
    if not outcomes or not all(0 <= each <= 1 for each in outcomes):
        raise FormulaError(
            f"{formula}: {len(outcomes)} outcomes, not all of them between 0 and 1",
            why="a prompt is won, lost or neither, and there is one at least",
        )
