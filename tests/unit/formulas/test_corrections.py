"""Corrections: weights by hand, no gradient through them, and no effect at the present policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from rillflow.formulas.config import PolicyLossConfig
from rillflow.formulas.losses import TokenLosses, correction_weights, m2po_limit, policy_loss
from rillflow.records.ragged import Ragged

CORRECTIONS = ["tis", "sequence_tis", "icepop", "m2po", "topr"]
W = [0.25, 0.8, 1.0, 1.5, 8.0]
"""old / mu of five tokens: a row of three (product 0.2) and a row of two (product 12)."""
ADVANTAGES = [1.0, 1.0, -1.0, -2.0, 2.0]


def losses(correction: str, now: Tensor, old: Tensor, mu: Tensor, **settings: Any) -> TokenLosses:
    """Return the losses of five tokens in two rows."""
    kept = settings.pop("is_kept", None)
    config = PolicyLossConfig(correction=correction, **settings)  # type: ignore[arg-type]
    advantages, lengths = torch.tensor(ADVANTAGES, dtype=now.dtype), torch.tensor([3, 2])
    return policy_loss(now, now.detach(), advantages, mu, old, lengths, config=config, is_kept=kept)


def weights(correction: str, **settings: Any) -> list[float]:
    """Return the factor on each token's plain loss if old / mu is ``W``."""
    mu = torch.full((5,), -2.0, dtype=torch.float64)
    old = mu + torch.tensor(W, dtype=torch.float64).log()
    plain, corrected = (losses(each, old, old, mu, **settings).losses for each in ("none", correction))
    return (corrected / plain).tolist()


@pytest.mark.parametrize(
    ("correction", "settings", "expected"),
    [
        ("tis", {}, [0.25, 0.8, 1.0, 1.5, 2.0]),
        ("tis", {"correction_bounds": (0.5, 5.0)}, [0.5, 0.8, 1.0, 1.5, 5.0]),
        ("sequence_tis", {}, [0.2, 0.2, 0.2, 5.0, 5.0]),
        ("sequence_tis", {"correction_bounds": (0.0, 50.0)}, [0.2, 0.2, 0.2, 12.0, 12.0]),
        ("icepop", {}, [0.0, 0.8, 1.0, 1.5, 0.0]),
        ("m2po", {}, W),
        ("m2po", {"is_kept": torch.tensor([False, True, True, True, False])}, [0.0, 0.8, 1.0, 1.5, 0.0]),
        ("topr", {}, [1.0, 1.0, 0.2, 1.0, 1.0]),
        ("topr", {"correction_bounds": (0.5, 20.0)}, [1.0, 1.0, 0.5, 12.0, 1.0]),
    ],
)
def test_the_weights_of_each_correction_by_hand(
    correction: str, settings: dict[str, Any], expected: list[float]
) -> None:
    assert weights(correction, **settings) == pytest.approx(expected, rel=1e-9)


def test_metrics_say_how_much_is_weighed_and_where_old_and_sampler_lie() -> None:
    mu = torch.full((5,), -2.0, dtype=torch.float64)
    old = mu + torch.tensor(W, dtype=torch.float64).log()
    found = losses("icepop", old, old, mu)
    assert found.metrics["mismatch/weight/mean"].tolist() == pytest.approx([0.0, 0.8, 1.0, 1.5, 0.0])
    assert found.metrics["mismatch/bounded/share"].tolist() == [True, False, False, False, True]
    assert found.metrics["mismatch/log_ratio/histogram"].tolist() == pytest.approx([math.log(w) for w in W])
    assert "mismatch/log_ratio/histogram" not in losses("none", old, old, mu).metrics


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_no_gradient_flows_through_a_weight(correction: str) -> None:
    """Without separate old log probabilities they are the model's own; mu is always separate."""
    now, old, mu = (torch.linspace(low, -0.1, 5, requires_grad=True) for low in (-1.0, -2.0, -3.0))
    for fixed in (old, old.detach()):
        now.grad = old.grad = mu.grad = None
        found = losses(correction, now, fixed.detach(), mu).losses
        found.sum().backward()
        assert mu.grad is None or not mu.grad.any()
        plain = torch.autograd.grad(losses("none", now, fixed.detach(), mu).losses.sum(), now)[0]
        scale = found.detach() / losses("none", now, fixed.detach(), mu).losses.detach()
        assert now.grad is not None
        torch.testing.assert_close(now.grad, scale * plain)


@settings(max_examples=60, deadline=None)
@given(
    correction=st.sampled_from(CORRECTIONS),
    logprobs=st.lists(st.floats(-30, -1e-6), min_size=5, max_size=5),
    ratio=st.sampled_from(["token", "sequence"]),
    surrogate=st.sampled_from(["clip", "weight"]),
)
def test_on_policy_every_correction_leaves_the_plain_gradient(
    correction: str, logprobs: list[float], ratio: str, surrogate: str
) -> None:
    """theta = old = mu."""
    found = []
    for each in ("none", correction):
        now = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
        fixed = now.detach()
        losses(each, now, fixed, fixed, ratio=ratio, surrogate=surrogate).losses.sum().backward()
        assert now.grad is not None
        found.append(now.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0], -torch.tensor(ADVANTAGES, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_tis_over_the_clipped_loss_is_decoupled_ppo() -> None:
    """-(old / mu) min(u A, clip(u) A), u = theta / old, worked token by token."""
    now, old, mu = (torch.tensor(each, dtype=torch.float64) for each in ([-1.0], [-1.3], [-1.6]))
    one = [each.expand(5) for each in (now, old, mu)]
    found = losses("tis", *one, correction_bounds=(0, 5), dual_clip=0).losses.tolist()
    u, w = math.exp(0.3), math.exp(0.3)
    assert found == pytest.approx([-w * min(u * a, min(u, 1.2) * a) for a in ADVANTAGES])


def test_the_second_moment_limit_by_hand() -> None:
    """Squares 0.01, 0.04, 0.09, 0.25, with means of the smallest ones 0.01, 0.025, 0.04667, 0.0975."""
    drift = torch.tensor([0.5, -0.2, 0.3, 0.1])
    assert m2po_limit(drift, bound=0.04) == pytest.approx(0.09)
    assert m2po_limit(drift, bound=0.05) == pytest.approx(0.25)
    assert m2po_limit(drift, bound=0.1) == math.inf
    assert m2po_limit(drift, bound=0.005) == pytest.approx(0.01)
    assert m2po_limit(torch.zeros(0), bound=0.04) == m2po_limit(torch.zeros(3), bound=1e-9) == math.inf


@settings(max_examples=60, deadline=None)
@given(
    drift=st.lists(st.sampled_from([0.0, 0.1, -0.1, 0.3, -0.7, 2.0]), min_size=1, max_size=12), data=st.data()
)
def test_what_m2po_keeps_has_a_mean_below_the_bound_is_the_most_that_can_and_knows_no_order(
    drift: list[float], data: st.DataObject
) -> None:
    bound = data.draw(st.sampled_from([0.005, 0.04, 0.2, 9.0]))
    limit = m2po_limit(torch.tensor(drift, dtype=torch.float64), bound=bound)
    squares = [each * each for each in drift]
    kept = [each for each in squares if each < limit]
    assert not kept or sum(kept) / len(kept) < bound
    left_out = sorted(each for each in squares if each >= limit)
    if left_out:
        ties = [each for each in squares if each == left_out[0]]
        assert (sum(kept) + sum(ties)) / (len(kept) + len(ties)) >= bound - 1e-12
    other = data.draw(st.permutations(drift))
    assert m2po_limit(torch.tensor(other, dtype=torch.float64), bound=bound) == limit


def test_a_weight_far_off_is_finite() -> None:
    config = PolicyLossConfig(correction="tis", correction_bounds=(0, 1e30))
    found, _ = correction_weights(Ragged.from_rows([[95.0]], torch.float32), torch.ones(1), config)
    assert found.tolist() == pytest.approx([math.exp(20)])


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ("tis", (0.0, 0.5)),
        ("icepop", (2.0, 3.0)),
        ("topr", (-1.0, 1.0)),
        ("m2po", (0.1, 0.2)),
        ("m2po", (0, 0)),
    ],
)
def test_bounds_that_would_not_leave_the_present_policy_alone_are_refused(
    correction: str, bounds: tuple[float, float]
) -> None:
    with pytest.raises(
        ValidationError, match=rf"correction_bounds are \[{bounds[0]:g}, .*{correction} needs"
    ):
        PolicyLossConfig(correction=correction, correction_bounds=bounds)  # type: ignore[arg-type]
