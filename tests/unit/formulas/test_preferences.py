"""Preference losses of a policy's answers: the formula of each kind, and its reductions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rillflow.errors import FormulaError
from rillflow.formulas.preferences import (
    AnswerTotals,
    PairLossConfig,
    implicit_rewards,
    log_odds,
    logprob_rewards,
    pair_loss,
)
from rillflow.records.ragged import Ragged

CHOSEN, REJECTED = [-3.0, -8.0, -0.5], [-5.0, -6.0, -7.0]
OF_CHOSEN, OF_REJECTED = [-3.5, -7.0, -2.0], [-4.0, -7.5, -6.0]
LONG, SHORT = [2, 4, 3], [5, 3, 2]


def answers(totals: list[float], lengths: list[int], reference: list[float] | None) -> AnswerTotals:
    known = None if reference is None else torch.tensor(reference, dtype=torch.float64)
    own = torch.tensor(totals, dtype=torch.float64, requires_grad=True)
    return AnswerTotals(own, torch.tensor(lengths), known)


def found(**settings: Any) -> tuple[Tensor, dict[str, Tensor], AnswerTotals]:
    config = PairLossConfig(**settings)
    near = (OF_CHOSEN, OF_REJECTED) if config.has_reference else (None, None)
    chosen = answers(CHOSEN, LONG, near[0])
    made = pair_loss(chosen, answers(REJECTED, SHORT, near[1]), config=config)
    return made.losses, dict(made.metrics), chosen


def by_hand(kind: str, pair: int, beta: float, smoothing: float = 0.0, nll: float = 0.0) -> float:
    """Return the loss by the table of the module's docstring, one pair at a time, in plain Python."""
    better, worse = CHOSEN[pair], REJECTED[pair]
    long, short = LONG[pair], SHORT[pair]
    ratio = (better - OF_CHOSEN[pair], worse - OF_REJECTED[pair])
    h = ratio[0] - ratio[1]

    def logistic(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def odds(mean: float) -> float:
        return math.exp(mean) / (1 - math.exp(mean))

    margin = beta * (better / long - worse / short) - 1.0
    loss = {
        "dpo": -(1 - smoothing) * math.log(logistic(beta * h)) - smoothing * math.log(logistic(-beta * h)),
        "ipo": (ratio[0] / long - ratio[1] / short - 1 / (2 * beta)) ** 2,
        "hinge": max(0.0, 1 - beta * h),
        "simpo": -(1 - smoothing) * math.log(logistic(margin)) - smoothing * math.log(logistic(-margin)),
        "orpo": -beta * math.log(logistic(math.log(odds(better / long)) - math.log(odds(worse / short)))),
    }[kind]
    return loss - nll * better / long


@pytest.mark.parametrize("nll", [0.0, 0.7])
@pytest.mark.parametrize(
    ("kind", "beta", "smoothing"),
    [
        ("dpo", 0.1, 0.0),
        ("dpo", 0.4, 0.2),
        ("ipo", 0.3, 0.0),
        ("hinge", 0.6, 0.0),
        ("orpo", 0.2, 0.0),
        ("simpo", 2.0, 0.0),
        ("simpo", 1.5, 0.1),
    ],
)
def test_every_kind_is_its_formula(kind: str, beta: float, smoothing: float, nll: float) -> None:
    losses, metrics, _ = found(kind=kind, beta=beta, label_smoothing=smoothing, nll=nll)
    assert losses.tolist() == pytest.approx([by_hand(kind, i, beta, smoothing, nll) for i in range(3)])
    assert ("pairs/nll/mean" in metrics) == bool(nll)
    assert ("pairs/drift/mean" in metrics) == (kind in ("dpo", "ipo", "hinge"))


def test_the_gradient_is_the_weight_of_what_the_implicit_reward_gets_wrong() -> None:
    """beta s(-beta h), as in the paper's equation 7."""
    losses, metrics, chosen = found(beta=0.4)
    losses.sum().backward()
    assert chosen.totals.grad is not None
    expected = -0.4 * torch.sigmoid(-metrics["pairs/margin/mean"])
    torch.testing.assert_close(chosen.totals.grad, expected)


def test_metrics_say_what_they_are_named_for() -> None:
    _, metrics, _ = found(beta=0.5)
    assert metrics["pairs/accuracy/mean"].tolist() == [True, False, True]
    assert metrics["pairs/margin/mean"].tolist() == pytest.approx([0.75, -1.25, 1.25])
    assert metrics["pairs/chosen_reward/mean"].tolist() == pytest.approx([0.25, -0.5, 0.75])
    assert metrics["pairs/rejected_logprob/mean"].tolist() == REJECTED
    assert metrics["pairs/drift/mean"].tolist() == pytest.approx([-0.25, 0.25, 0.25])


def test_kinds_have_their_papers_settings_where_none_are_given() -> None:
    kinds = ("dpo", "ipo", "hinge", "simpo", "orpo")
    configs = {kind: PairLossConfig(kind=kind) for kind in kinds}
    assert [config.scale for config in configs.values()] == [0.1, 0.1, 0.1, 2.0, 0.1]
    assert [config.nll_weight for config in configs.values()] == [0, 0, 0, 0, 1]
    assert [config.by_token for config in configs.values()] == [False, True, False, True, True]
    assert [config.reads for config in configs.values()] == [("reference_totals",)] * 3 + [()] * 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gamma": 1.0}, "only simpo has a target margin"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "it applies only to dpo and simpo"),
        ({"kind": "orpo", "by_length": False}, "which uses token means"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"beta": 0.0}, "greater than 0"),
        ({"kind": "kto"}, "Input should be"),
    ],
)
def test_a_setting_that_the_kind_does_not_read_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PairLossConfig(**settings)


def test_odds_are_exact_at_both_ends() -> None:
    at = torch.tensor([-1e-9, -0.5, -40.0], dtype=torch.float64)
    expected = [math.log(1e9), math.log(math.exp(-0.5) / (1 - math.exp(-0.5))), -40.0]
    assert log_odds(at).tolist() == pytest.approx(expected, rel=1e-9)
    assert torch.isfinite(log_odds(torch.zeros(1)))


def test_held_out_rewards_are_those_of_the_loss() -> None:
    mask = Ragged.from_rows([[1] * (length + 2) for length in LONG], torch.bool)
    mask = mask.with_values(mask.positions >= 2)
    given, near = (torch.tensor(each, dtype=torch.float64) for each in (CHOSEN, OF_CHOSEN))
    for kind in ("dpo", "ipo"):
        config = PairLossConfig(kind=kind)
        _, metrics, _ = found(kind=kind)
        rewards = implicit_rewards(given, near, mask, config=config)
        torch.testing.assert_close(rewards, metrics["pairs/chosen_reward/mean"])
    _, metrics, _ = found(kind="simpo")
    rewards = logprob_rewards(given, mask, config=PairLossConfig(kind="simpo"))
    torch.testing.assert_close(rewards, metrics["pairs/chosen_reward/mean"])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(FormulaError, match="pair_loss"):
        pair_loss(answers([1.0], [1], None), answers(CHOSEN, LONG, None), config=PairLossConfig(kind="orpo"))
