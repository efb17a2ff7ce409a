"""The clipped loss: golden values, the on-policy law, and tokens without gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rillflow.errors import FormulaError
from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.losses import clipped_policy_loss, correction_weights, held, sequence_log_ratio
from rillflow.records.ragged import Ragged

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
BOUNDS = st.fixed_dictionaries(
    {
        "clip_low": st.sampled_from([0.0, 0.2, 0.9]),
        "clip_high": st.sampled_from([0.0, 0.2, 0.28, 5.0]),
        "dual_clip": st.sampled_from([0.0, 1.5, 3.0]),
        "surrogate": st.sampled_from(["clip", "weight"]),
    }
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "objective"),
    [
        (1.1, 2.0, {}, 2.2),
        (1.5, 2.0, {}, 2.4),
        (0.5, 2.0, {}, 1.0),
        (0.5, -2.0, {}, -1.6),
        (1.5, -2.0, {}, -3.0),
        (5.0, -2.0, {}, -6.0),
        (5.0, -2.0, {"dual_clip": 0.0}, -10.0),
        (5.0, 2.0, {"dual_clip": 1.5}, 2.4),
        (1.25, 2.0, {"clip_high": 0.28}, 2.5),
        (3.0, 0.0, {}, 0.0),
    ],
)
def test_golden_values(ratio: float, advantage: float, options: dict[str, float], objective: float) -> None:
    loss = clipped_policy_loss(
        torch.tensor([math.log(ratio)], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        **{**OPTIONS, **options},
    )
    assert float(loss) == pytest.approx(-objective, rel=1e-12, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(advantages=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8), bounds=BOUNDS)
def test_on_policy_gradient_is_that_of_a_log_pi(advantages: list[float], bounds: dict[str, Any]) -> None:
    for by_row in (False, True):
        logprobs = torch.linspace(-3, -0.1, len(advantages), dtype=torch.float64, requires_grad=True)
        values = torch.tensor(advantages, dtype=torch.float64)
        log_ratio = logprobs - logprobs.detach()
        if by_row:
            lengths = torch.tensor([1, len(advantages) - 1])
            log_ratio = sequence_log_ratio(Ragged(values=log_ratio, lengths=lengths))
        clipped_policy_loss(log_ratio, values, **bounds).sum().backward()
        assert logprobs.grad is not None
        torch.testing.assert_close(logprobs.grad, -values, rtol=1e-12, atol=0)


def test_where_the_clip_binds_there_is_no_gradient() -> None:
    log_ratio = torch.tensor([0.5, -0.5, -0.5, 0.5, 2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    clipped_policy_loss(log_ratio, advantages, **OPTIONS).sum().backward()
    assert log_ratio.grad is not None
    expected = [0.0, 0.0, -math.exp(-0.5), math.exp(0.5), 0.0]
    assert log_ratio.grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_token_far_off_has_a_finite_loss_and_where_clipped_no_gradient() -> None:
    """exp overflows float32 above 88, and 0 x inf in the backward pass would be NaN."""
    log_ratio = torch.tensor([95.0, 95.0, 95.0, -95.0, -1.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0])
    losses = clipped_policy_loss(log_ratio, advantages, **OPTIONS)
    losses.sum().backward()
    assert log_ratio.grad is not None
    assert losses.tolist() == pytest.approx([-1.2, 3.0, 0.0, -math.exp(-20), -math.exp(-1)])
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, -math.exp(-1)])


def test_within_twenty_nats_not_a_bit_changes() -> None:
    log_ratio = torch.linspace(-20, 20, 401)
    raw = -torch.minimum(log_ratio.exp() * 0.7, log_ratio.exp().clamp(0.8, 1.2) * 0.7)
    assert torch.equal(clipped_policy_loss(log_ratio, torch.full((401,), 0.7), **OPTIONS), raw)
    assert torch.equal(held(log_ratio), log_ratio)


def test_a_row_far_off_is_finite_too() -> None:
    rows = Ragged(values=torch.tensor([200.0, 0.0], requires_grad=True), lengths=torch.tensor([2]))
    clipped_policy_loss(sequence_log_ratio(rows), torch.ones(2), **OPTIONS).sum().backward()
    assert rows.values.grad is not None and rows.values.grad.tolist() == [0.0, 0.0]


def test_advantages_and_weights_carry_no_gradient() -> None:
    log_ratio = torch.zeros(2, requires_grad=True)
    advantages = torch.ones(2, requires_grad=True)
    old = torch.full((2,), -1.0, requires_grad=True)
    sampler = torch.full((2,), -1.5, requires_grad=True)
    moved = Ragged(values=old - sampler, lengths=torch.tensor([2]))
    weights, _ = correction_weights(moved, advantages, PolicyLossConfig(correction="tis"))
    (clipped_policy_loss(log_ratio, advantages, **OPTIONS) * weights).sum().backward()
    assert log_ratio.grad is not None and bool((log_ratio.grad != 0).all())
    assert advantages.grad is None and old.grad is None and sampler.grad is None


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.0, 2.0, 1.0), (0.5, 2.0, 0.8), (1.1, -2.0, 1.1), (9.0, -2.0, 1.28)]
)
def test_a_bounded_weight_keeps_the_gradient_of_every_token(
    ratio: float, advantage: float, weight: float
) -> None:
    """CISPO: -sg[clip(r)] A log pi."""
    logprobs = torch.tensor([math.log(ratio) - 2], dtype=torch.float64, requires_grad=True)
    loss = clipped_policy_loss(
        logprobs + 2,
        torch.tensor([advantage], dtype=torch.float64),
        **{**OPTIONS, "clip_high": 0.28},
        surrogate="weight",
    )
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(-weight * advantage * math.log(ratio), rel=1e-12, abs=1e-12)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-weight * advantage, rel=1e-12)


def test_a_lower_bound_of_zero_leaves_small_weights_as_they_are() -> None:
    log_ratio = torch.tensor([-5.0, 9.0], dtype=torch.float64, requires_grad=True)
    options = {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": 3.0}
    clipped_policy_loss(log_ratio, -torch.ones(2), **options, surrogate="weight").sum().backward()  # type: ignore[arg-type]
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([math.exp(-5), 5.0], rel=1e-12)


def two_rows() -> Ragged:
    """Return log ratios of a row of three tokens and a row of one."""
    values = torch.tensor([0.3, -0.1, 0.4, -0.7], dtype=torch.float64, requires_grad=True)
    return Ragged(values=values, lengths=torch.tensor([3, 0, 1]))


def test_the_ratio_of_a_sequence_by_hand() -> None:
    found = sequence_log_ratio(two_rows())
    assert found.tolist() == pytest.approx([0.2, 0.2, 0.2, -0.7], rel=1e-12)


def test_its_terms_have_the_gradient_of_the_sequences_ratio() -> None:
    """GSPO's s A with s = exp(mean log r), compared with autograd through s itself."""
    rows, advantages = two_rows(), torch.tensor([1.5, 0.0, -2.0], dtype=torch.float64)
    free = {"clip_low": 0.99, "clip_high": 9.0, "dual_clip": 0.0}
    terms = clipped_policy_loss(sequence_log_ratio(rows), rows.expand(advantages), **free)
    (terms / rows.expand(rows.lengths)).sum().backward()
    direct = two_rows()
    means = direct.sums() / direct.lengths.clamp_min(1)
    (-means.exp() * advantages).sum().backward()
    assert rows.values.grad is not None and direct.values.grad is not None
    torch.testing.assert_close(rows.values.grad, direct.values.grad, rtol=1e-12, atol=0)


def test_a_sequence_beyond_its_bound_is_clipped_as_one() -> None:
    rows = two_rows()
    clipped_policy_loss(
        sequence_log_ratio(rows), torch.tensor([1.0, 1.0, 1.0, 1.0]), clip_low=0.2, clip_high=0.1, dual_clip=0
    ).sum().backward()
    assert rows.values.grad is not None
    assert rows.values.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -math.exp(-0.7)])


@settings(max_examples=50, deadline=None)
@given(ratios=st.lists(st.floats(-2, 2), min_size=1, max_size=8), bounds=BOUNDS)
def test_gspo_on_rows_of_one_token_is_ppo(ratios: list[float], bounds: dict[str, Any]) -> None:
    advantages = torch.linspace(-1, 1, len(ratios), dtype=torch.float64)
    found = []
    for by_row in (False, True):
        log_ratio = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
        rows = Ragged(values=log_ratio, lengths=torch.ones(len(ratios), dtype=torch.int64))
        losses = clipped_policy_loss(sequence_log_ratio(rows) if by_row else log_ratio, advantages, **bounds)
        losses.sum().backward()
        assert log_ratio.grad is not None
        found.append((losses.detach(), log_ratio.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data(), seed=st.integers(0, 99))
def test_a_sequences_ratio_does_not_depend_on_other_rows(
    lengths: list[int], data: st.DataObject, seed: int
) -> None:
    numbers = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    rows = Ragged(values=numbers, lengths=torch.tensor(lengths))
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    expected = rows.with_values(sequence_log_ratio(rows)).select(order).values
    assert torch.equal(sequence_log_ratio(rows.select(order)), expected)


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_a_dual_clip_that_would_bound_an_unchanged_policy_is_refused(bound: float) -> None:
    with pytest.raises(ValidationError, match=f"{bound:g} would clip"):
        PolicyLossConfig(dual_clip=bound)
    assert PolicyLossConfig(dual_clip=0).dual_clip == 0


def test_shapes_are_checked() -> None:
    with pytest.raises(FormulaError, match=r"advantages has shape \[2\] and log_ratio has \[3\]"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(2), **OPTIONS)
    with pytest.raises(FormulaError, match=r"surrogate is 'clap'.*\n.*did you mean 'clip'"):
        clipped_policy_loss(torch.zeros(1), torch.zeros(1), **OPTIONS, surrogate="clap")  # type: ignore[arg-type]
