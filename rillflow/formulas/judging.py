"""Judging: turn a judge's label probabilities into preferences and ratings, and outcomes into win rates.

log p(label) [N, K] ─ label_shares ─> p [N, K]
p(first is better) of both orders [N], [N] ─ both_orders ─> p(one beats other) [N]
outcome of every prompt ─ win_rate, length_controlled ─> share that is won
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
    """Preferences of a judge between N pairs of answers, each read in both orders."""

    likely: Tensor
    """[N] probability that the first answer is better than the second."""
    contradicts: Tensor
    """[N] bool, True if the two orders prefer different answers."""
    bias: Tensor
    """[N] position bias: how much likelier the first answer is judged better, -1/2 to 1/2."""


def label_shares(logprobs: Tensor) -> Tensor:
    """Return [N, K], each label's share of probability: a softmax of their log probabilities [N, K]."""
    if logprobs.dim() != 2 or logprobs.shape[1] < 2:
        raise FormulaError(
            f"label_shares: shape {list(logprobs.shape)}",
            why="each row needs one number per label, at least 2",
        )
    return logprobs.double().softmax(1)


def both_orders(one_first: Tensor, other_first: Tensor) -> Preferences:
    """Return preferences without position bias: the mean over both orders (arXiv 2405.07863, section 2).

    p(one beats other) = (p(A | one, other) + p(B | other, one)) / 2. A judge that always answers A gives 1/2.

    Args:
        one_first: [N] probability that the first answer is better, with the one shown first.
        other_first: [N] the same, with the other shown first.

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
    """Return [N], the mean rating under the labels' shares [N, K] and the labels' ratings."""
    return shares @ shares.new_tensor(ratings)


def win_rate(outcomes: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the share of prompts that are won, with ties as half, and Wilson's 95% interval.

    The interval treats all outcomes as wins or losses. Outcomes between 0 and 1 vary less than these, so the
    interval is wide enough for ties and for means over several answers.

    Args:
        outcomes: for each prompt 1 if it is won, 0 if it is lost, a value between otherwise.

    Raises:
        FormulaError: there is no outcome, or one is not between 0 and 1.
    """
    _require_shares("win_rate", outcomes)
    return fmean(outcomes), wilson(math.fsum(outcomes), len(outcomes))


def length_controlled(
    outcomes: Sequence[float], longer: Sequence[float], *, deviation: float = 10.0, passes: int = 50
) -> float:
    """Return the win rate at equal length: sigmoid(a) of P(win) = sigmoid(a + b x longer / spread).

    A logistic regression on the difference of lengths, evaluated at difference 0 (after length-controlled
    AlpacaEval, arXiv 2404.04475; without its prompt term). ``spread`` is the root mean square of the
    differences. A normal prior with mean 0 and ``deviation`` on a and b keeps them finite if every prompt is
    won; it moves a share of 100 prompts by less than 0.001. Solved by Newton's method.

    Args:
        outcomes: as in ``win_rate``.
        longer: for each prompt, how much longer the one's answer is than the other's, in any unit.
        deviation: standard deviation of the prior.
        passes: most iterations of Newton's method.

    Raises:
        FormulaError: there is no outcome, the two differ in number, or a value is out of range.
    """
    _require_shares("length_controlled", outcomes)
    if len(longer) != len(outcomes) or not all(map(math.isfinite, longer)):
        raise FormulaError(
            f"length_controlled: {len(outcomes)} outcomes and {len(longer)} finite differences of length",
            why="each prompt needs one of each",
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
        size = max(abs(step_a), abs(step_b), 1.0)  # a longer Newton step could overshoot
        a, b = a + step_a / size, b + step_b / size
        if max(abs(step_a), abs(step_b)) < 1e-10:
            break
    return _sigmoid(a)


def pass_at(count: int, right: int, k: int) -> float:
    """Return pass@k with ``right`` right answers in ``count``: 1 - C(n - c, k) / C(n, k).

    Unbiased for k new answers: M. Chen and others, arXiv 2107.03374, equation 1.

    Raises:
        FormulaError: k is not between 1 and ``count``, or ``right`` is not between 0 and ``count``.
    """
    if not (1 <= k <= count and 0 <= right <= count):
        raise FormulaError(
            f"pass_at: {right} of {count} answers are right, and k is {k}",
            why="k answers are drawn without replacement, so 1 <= k <= answers",
        )
    return 1 - math.comb(count - right, k) / math.comb(count, k)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _require_shares(formula: str, outcomes: Sequence[float]) -> None:
    if not outcomes or not all(0 <= each <= 1 for each in outcomes):
        raise FormulaError(
            f"{formula}: {len(outcomes)} outcomes, not all of them between 0 and 1",
            why="each prompt is won (1), lost (0) or tied, and there must be at least one",
        )
