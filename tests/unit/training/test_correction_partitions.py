"""Corrections in the trainer: any split into micro-batches and ranks gives the same step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch
from rillflow.records.metrics import Histogram
from rillflow.records.ragged import Ragged
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss
from rillflow.training.scorer import Scorer
from rillflow.training.trainer import Trainer
from rillflow.workers.arguments import piece
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks

CORRECTIONS = ["tis", "sequence_tis", "icepop", "m2po", "topr"]


def module() -> torch.nn.Module:
    """Return a causal GPT-2 in float64."""
    register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).double().eval()


@pytest.fixture
def stale(make_rows: Callable[..., Batch]) -> Batch:
    """Return rows with different sampler, old and present policies."""
    rows = make_rows(prompts=(5, 3, 4), samples=3)
    found = Scorer(module(), TrainConfig()).logprobs(rows)
    generator = torch.Generator().manual_seed(5)

    def near() -> Tensor:
        noise = 0.4 * torch.randn(found.values.shape, generator=generator)
        return found.values + noise * rows.ragged("loss_mask").values

    return rows.with_fields(
        sampler_logprobs=found.with_values(near()), old_logprobs=found.with_values(near())
    )


def stepped(
    rows: Batch,
    correction: str,
    budget: int = 16384,
    ranks: Ranks | None = None,
    made: torch.nn.Module | None = None,
) -> tuple[Tensor, Histogram]:
    """Return the gradient of one step, and the histogram of log(old / sampler)."""
    config = TrainConfig(max_grad_norm=1e9, tokens_per_micro_batch=budget)
    parallel = Parallel.whole(made or module(), ranks)
    trainer = Trainer(parallel.module, config, total_steps=1, parallel=parallel)
    metrics = trainer.update(rows, PolicyLoss(PolicyLossConfig(correction=correction)))  # type: ignore[arg-type]
    moments = trainer.optimizer.state()
    found = [each.flatten() for name, each in sorted(moments.items()) if name.startswith("exp_avg/")]
    lies = metrics["mismatch/log_ratio/histogram"]
    assert isinstance(lies, Histogram)
    return torch.cat(found) / (1 - config.beta1), lies


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_micro_batches_and_two_ranks_make_the_step_of_one(stale: Batch, correction: str) -> None:
    whole, lies = stepped(stale, correction)
    plain = Trainer(module(), TrainConfig(), total_steps=1)
    assert "mismatch/weight/mean" not in plain.update(stale, PolicyLoss(PolicyLossConfig()))
    for budget in (1, 30):
        cut, same = stepped(stale, correction, budget)
        torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-12)
        assert same == lies
    group, modules = (
        ThreadGroup(2, deadline_s=60),
        [module(), module()],
    )  # one after the other: both seed torch

    def on(rank: int) -> tuple[Tensor, Histogram]:
        return stepped(piece(stale, rank, 2), correction, 30, ThreadRanks(group, rank), modules[rank])

    with ThreadPoolExecutor(2) as pool:
        (first, one), (second, other) = pool.map(on, range(2))
    assert torch.equal(first, second) and one.merge(other) == lies
    torch.testing.assert_close(first, whole, rtol=1e-9, atol=1e-12)


def unscored(_: Batch) -> Ragged:
    raise AssertionError("m2po needs no log probabilities of the present")


def test_m2po_keeps_the_same_tokens_to_the_bit_however_a_minibatch_lies_on_ranks(stale: Batch) -> None:
    """The limit follows from numpy's sort and sum; a rank has some of the rows, or none."""
    loss = PolicyLoss(PolicyLossConfig(correction="m2po"))
    prepared = loss.prepare(stale)
    whole = loss.settled(prepared, stale, unscored, SingleRank())
    assert whole is not None
    kept = whole.ragged("is_kept").values & stale.ragged("loss_mask").values
    drift = (stale.ragged("old_logprobs").values - stale.ragged("sampler_logprobs").values).double()
    squares = drift[stale.ragged("loss_mask").values].square().numpy()
    squares.sort()
    means = squares.cumsum() / range(1, len(squares) + 1)
    assert int(kept.sum()) == int((means < 0.04).sum()) and 0 < int(kept.sum()) < len(squares)
    group = ThreadGroup(3, deadline_s=60)

    def on(rank: int) -> Tensor:
        own = None if rank == 1 else loss.prepare(piece(stale, rank // 2, 2))
        found = loss.settled(own, stale, unscored, ThreadRanks(group, rank))
        return torch.zeros(0, dtype=torch.bool) if found is None else found.ragged("is_kept").values

    with ThreadPoolExecutor(3) as pool:
        parted = torch.cat(list(pool.map(on, range(3))))
    assert torch.equal(parted, whole.ragged("is_kept").values)


def test_where_nobody_made_old_logprobs_m2po_leaves_nothing_out(stale: Batch) -> None:
    loss = PolicyLoss(PolicyLossConfig(correction="m2po"))
    rows = loss.prepare(stale.only("tokens", "loss_mask", "advantages", "sampler_logprobs"))
    found = loss.settled(rows, stale, unscored, SingleRank())
    assert found is not None and bool(found.ragged("is_kept").values.all())
