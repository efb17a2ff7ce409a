"""Two losses in one optimiser step: their gradients add up, each over its own rows, for any split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.formulas.config import PolicyLossConfig
from rillflow.records.batch import Batch
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, SupervisedLoss
from rillflow.training.scorer import Scorer
from rillflow.training.trainer import Trainer
from rillflow.workers.arguments import piece
from rillflow.workers.collectives import Ranks, ThreadGroup, ThreadRanks

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]
POLICY = PolicyLoss(PolicyLossConfig(), max_tokens=16)


@pytest.fixture
def rollouts(make_module: MakeModule, make_rows: MakeRows) -> Batch:
    rows = make_rows(prompts=(5, 3, 4), samples=3)
    return rows.with_fields(sampler_logprobs=Scorer(make_module(), TrainConfig()).logprobs(rows))


@pytest.fixture
def demonstrations(make_rows: MakeRows) -> Batch:
    return make_rows(prompts=(2, 6, 3, 4, 2), samples=1, seed=7)


def gradient(
    make_module: MakeModule,
    known: Batch,
    shown: Batch,
    weights: Sequence[float],
    *,
    budget: int = 16384,
    ranks: Ranks | None = None,
) -> Tensor:
    """Return the gradient from the first step's moments, of the policy's and the demonstrations' losses."""
    config = TrainConfig(max_grad_norm=1e9, tokens_per_micro_batch=budget)
    parallel = Parallel.whole(make_module(), ranks)
    trainer = Trainer(parallel.module, config, total_steps=1, parallel=parallel)
    aims = [trainer.aim(known, POLICY, ratio_tolerance=1e-4, weight=weights[0])] if weights[0] else []
    aims += [trainer.aim(shown, SupervisedLoss(), weight=weights[1])] if weights[1] else []
    trainer.step(*aims)
    moments = trainer.optimizer.state()
    found = [each.flatten() for name, each in sorted(moments.items()) if name.startswith("exp_avg/")]
    return torch.cat(found) / (1 - config.beta1)


def test_the_gradient_of_a_sum_is_the_sum_of_gradients(
    make_module: MakeModule, rollouts: Batch, demonstrations: Batch
) -> None:
    policy = gradient(make_module, rollouts, demonstrations, (1, 0))
    shown = gradient(make_module, rollouts, demonstrations, (0, 1))
    both = gradient(make_module, rollouts, demonstrations, (1, 0.3))
    assert float(shown.norm()) > 0.1 < float(policy.norm())
    torch.testing.assert_close(both, policy + 0.3 * shown, rtol=1e-5, atol=1e-6)


def test_a_loss_of_weight_nothing_leaves_every_bit(
    make_module: MakeModule, rollouts: Batch, demonstrations: Batch
) -> None:
    found = []
    for nothing in (False, True):
        trainer = Trainer(module := make_module(), TrainConfig(lr=1e-3), total_steps=1)
        more = [trainer.aim(demonstrations, SupervisedLoss(), weight=0.0)] if nothing else []
        trainer.step(trainer.aim(rollouts, POLICY), *more)
        found.append(torch.cat([weight.detach().flatten() for weight in module.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("budget", [1, 30])
def test_micro_batches_of_both_change_nothing(
    make_module: MakeModule, rollouts: Batch, demonstrations: Batch, budget: int
) -> None:
    cut, whole = (
        gradient(make_module, rollouts, demonstrations, (1, 0.3), budget=tokens) for tokens in (budget, 16384)
    )
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("shown", [5, 1], ids=["uneven parts", "a rank without a demonstration"])
def test_two_ranks_take_the_step_of_one(
    make_module: MakeModule, rollouts: Batch, demonstrations: Batch, shown: int
) -> None:
    demonstrations = demonstrations.slice(0, shown)
    group = ThreadGroup(2, deadline_s=60)

    modules = [make_module(), make_module()]  # one after the other: both seed torch

    def on(rank: int) -> Tensor:
        parts = piece(rollouts, rank, 2), piece(demonstrations, rank, 2)
        return gradient(lambda: modules[rank], *parts, (1, 0.3), ranks=ThreadRanks(group, rank))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(on, range(2))
    assert torch.equal(first, second)
    whole = gradient(make_module, rollouts, demonstrations, (1, 0.3))
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=2e-6)


def test_one_clip_and_one_step_for_both(
    make_module: MakeModule, rollouts: Batch, demonstrations: Batch
) -> None:
    trainer = Trainer(make_module(), TrainConfig(lr=1e-3), total_steps=3)
    metrics = trainer.step(
        trainer.aim(rollouts, POLICY), trainer.aim(demonstrations, SupervisedLoss(), weight=0.3)
    )
    assert trainer.optimizer.steps == 1
    both = gradient(make_module, rollouts, demonstrations, (1, 0.3))
    assert metrics["train/grad_norm/mean"].value == pytest.approx(float(both.norm()), rel=1e-4)
    alone = Trainer(make_module(), TrainConfig(lr=1e-3), total_steps=3).update(
        demonstrations, SupervisedLoss()
    )
    for name in ("supervised/loss/mean", "supervised/nll/mean"):
        assert metrics[name].value == pytest.approx(alone[name].value), (
            "its weight is not in what is measured"
        )
