"""The optimizer compared with torch's own: weights after scheduled steps, and interchangeable states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from rillflow.errors import NotFiniteError
from rillflow.sharding.mesh import Gradients, RankGroups
from rillflow.training.config import OptimizerConfig
from rillflow.training.optimizer import Optimizer
from rillflow.workers.collectives import SingleRank

ALONE = Gradients(groups=RankGroups.whole(SingleRank()))
"""Gradients of a single rank, which are already complete."""
PEAK, FINAL, WARM_UP, TOTAL = 0.1, 0.2, 3, 9

SHAPES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "constant": lambda steps: ConstantLR(steps, factor=1.0),
    "linear": lambda steps: LinearLR(steps, 1.0, FINAL, total_iters=TOTAL - WARM_UP),
    "cosine": lambda steps: CosineAnnealingLR(steps, TOTAL - WARM_UP, eta_min=FINAL * PEAK),
}
"""Torch's schedule after the warm-up."""


def module(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(5, 3, dtype=dtype)


def learn(made: nn.Module, seed: int) -> None:
    """Give every parameter a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def weights(made: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in made.parameters()]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_scheduled_steps_are_those_of_torchs_own_optimizer_and_schedulers(schedule: Any) -> None:
    ours, theirs = module(), module()
    config = OptimizerConfig(
        lr=PEAK,
        beta1=0.8,
        beta2=0.9,
        weight_decay=0.3,
        schedule=schedule,
        final_lr=FINAL,
        warmup_steps=WARM_UP,
        max_grad_norm=1e9,
    )
    optimizer = Optimizer(ours, config, total_steps=TOTAL, gradients=ALONE)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.3},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=PEAK, betas=(0.8, 0.9), fused=False, foreach=False)
    warm_up = LinearLR(adamw, 1 / WARM_UP, 1.0, total_iters=WARM_UP - 1)
    scheduler = SequentialLR(adamw, [warm_up, SHAPES[schedule](adamw)], milestones=[WARM_UP])
    for step in range(TOTAL):
        for made in (ours, theirs):
            learn(made, step)
        assert optimizer.lr == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        adamw.step()
        scheduler.step()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


def test_a_state_from_before_the_first_step_forgets_the_moments_of_later_ones() -> None:
    config = OptimizerConfig(lr=0.1)
    fresh, used = module(), module()
    start = Optimizer(fresh, config, total_steps=2, gradients=ALONE)
    optimizer = Optimizer(used, config, total_steps=2, gradients=ALONE)
    begun = optimizer.state()
    learn(used, seed=1)
    optimizer.step()
    used.load_state_dict(fresh.state_dict())
    optimizer.load_state(begun)
    for made, one in ((used, optimizer), (fresh, start)):
        learn(made, seed=2)
        one.step()
    torch.testing.assert_close(weights(used), weights(fresh), rtol=0, atol=0)


def test_bfloat16_weights_are_the_masters_of_a_loaded_state_whatever_they_were() -> None:
    one, other = module(0, torch.bfloat16), module(1, torch.bfloat16)
    state = Optimizer(one, OptimizerConfig(), total_steps=1, gradients=ALONE).state()
    Optimizer(other, OptimizerConfig(), total_steps=1, gradients=ALONE).load_state(state)
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_masters_are_the_weights_and_keep_the_moments(dtype: torch.dtype) -> None:
    made = module(dtype=dtype)
    optimizer = Optimizer(made, OptimizerConfig(lr=PEAK), total_steps=TOTAL, gradients=ALONE)
    learn(made, 1)
    optimizer.collect()
    optimizer.step()
    moments = {name: each.clone() for name, each in optimizer.state().items() if "exp_avg" in name}
    written = {name: each.clone() + 1 / 3 for name, each in optimizer.read_masters().items()}
    optimizer.write_masters(written)
    for name, parameter in made.named_parameters():
        assert torch.equal(optimizer.read_masters()[name], written[name])
        assert torch.equal(parameter.detach(), written[name].to(dtype))
    after = optimizer.state()
    assert moments and all(torch.equal(after[name], each) for name, each in moments.items())
    assert optimizer.steps == 1


def test_a_norm_that_overflows_is_told_apart_from_a_gradient_that_is_not_finite() -> None:
    linear = module()
    optimizer = Optimizer(linear, OptimizerConfig(), total_steps=TOTAL, gradients=ALONE)
    for parameter in linear.parameters():
        parameter.grad = torch.full_like(parameter, 3e38)
    with pytest.raises(NotFiniteError, match="the sum of finite gradients overflows"):
        optimizer.step()
    linear.bias.grad = torch.full_like(linear.bias, torch.nan)
    with pytest.raises(NotFiniteError, match="first in bias"):
        optimizer.step()
