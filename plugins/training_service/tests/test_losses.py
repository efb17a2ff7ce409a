"""Losses: their formulas against plain ones, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rillflow.errors import DataError
from rillflow.formulas.losses import clipped_policy_loss
from rillflow_training_service.losses import LOSSES, loss_of

GENERATOR = torch.Generator().manual_seed(0)
P, Q = (-3 * torch.rand(40, generator=GENERATOR) for _ in range(2))
A = torch.randn(40, generator=GENERATOR)
INPUTS = {"logprobs": Q, "advantages": A, "weights": A}


def terms(name: str, logprobs: Tensor = P, inputs: Mapping[str, Tensor] = INPUTS, **given: float) -> Tensor:
    loss = loss_of(name)
    return loss.terms(logprobs, inputs, loss.chosen(given))


def gradient(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor] = INPUTS) -> Tensor:
    logprobs = logprobs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(terms(name, logprobs, inputs).sum(), logprobs)
    return found


def test_the_formulas() -> None:
    ratio = (P - Q).exp()
    bounded = ratio.clamp(0.8, 1.2)
    expected = {
        "cross_entropy": -A * P,
        "importance_sampling": -ratio * A,
        "ppo": -torch.minimum(ratio * A, bounded * A),
        "cispo": -bounded * A * P,
        "dro": -(A * P - 0.5 * 0.05 * (P - Q) ** 2),
    }
    assert expected.keys() == LOSSES.keys()
    for name, each in expected.items():
        torch.testing.assert_close(terms(name), each)


def test_ppo_is_the_clipped_policy_loss() -> None:
    own = clipped_policy_loss(P - Q, A, clip_low=0.3, clip_high=0.1, dual_clip=0)
    torch.testing.assert_close(terms("ppo", clip_low_threshold=0.7, clip_high_threshold=1.1), own)


def test_at_equal_policies_every_policy_loss_has_one_gradient() -> None:
    inputs = {**INPUTS, "logprobs": P}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        torch.testing.assert_close(gradient(name, P, inputs), -A)


def test_a_threshold_for_each_token_replaces_the_setting() -> None:
    low, high = torch.full((40,), 0.9), torch.full((40,), 1.05)
    inputs = {**INPUTS, "clip_low_threshold": low, "clip_high_threshold": high}
    for name in ("ppo", "cispo"):
        set_once = terms(name, clip_low_threshold=0.9, clip_high_threshold=1.05)
        torch.testing.assert_close(terms(name, inputs=inputs), set_once)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("ppo", {"clip_low": 0.1}, ("clip_low", "clip_low_threshold")),
        ("ppo", {"clip_low_threshold": math.nan}, ("clip_low_threshold is nan",)),
        ("dro", {"beta": "much"}, ("beta is much",)),
        ("cross_entropi", {}, ("there is no loss 'cross_entropi'", "cross_entropy")),
        ("stable_reinforce", {}, ("not published", "importance_sampling")),
    ],
)
def test_what_is_refused(name: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as refused:
        loss_of(name).chosen(given)
    assert all(word in str(refused.value) for word in words)
