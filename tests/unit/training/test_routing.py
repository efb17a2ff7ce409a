"""Routing of mixtures in training: counted, and balanced by one loss for every distribution of rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rillflow.formulas.config import PolicyLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import Metric
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.module import Parallel
from rillflow.training.config import TrainConfig
from rillflow.training.loss import PolicyLoss, SupervisedLoss
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import Ranks, SingleRank, ThreadGroup, ThreadRanks

FACTOR = 0.7
EXPERTS, TAKEN = 5, 2


def mixture(kind: str = "mixtral", layers: int = 2) -> PreTrainedModel:
    """Return a small decoder with unevenly loaded experts, in float64."""
    register()
    torch.manual_seed(0)
    count = {"num_local_experts": EXPERTS} if kind == "mixtral" else {"num_experts": EXPERTS}
    config = AutoConfig.for_model(
        kind,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts_per_tok=TAKEN,
        initializer_range=0.5,
        **count,
    )
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).double().eval()
    module.set_experts_implementation("eager")  # grouped products do not support float64
    return module


def rows(count: int = 6) -> Batch:
    """Return rows of prompts with two samples; those of the second prompt have no advantage."""
    draw = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 40, (count // 2, 5), generator=draw).tolist()
    answers = [torch.randint(0, 40, (2 + row,), generator=draw).tolist() for row in range(count)]
    tokens = Ragged.from_rows([[*prompts[row // 2], *answer] for row, answer in enumerate(answers)])
    advantages = torch.randn(count, generator=draw, dtype=torch.float64)
    advantages[2:4] = 0
    return Batch(
        ids=row_ids([RowId(0, row // 2, row % 2) for row in range(count)]),
        fields={
            "tokens": tokens,
            "loss_mask": tokens.with_values(tokens.positions >= 5),
            "advantages": advantages,
            "sampler_logprobs": tokens.with_values(torch.full(tokens.values.shape, -4.0)),
        },
    )


def stepped(
    module: PreTrainedModel,
    batch: Batch,
    budget: int,
    ranks: Ranks,
    balance: float,
    *,
    recomputes: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    """Return the gradient of one step, and its metrics."""
    config = TrainConfig(
        beta1=0.0,  # so that the first moment is the gradient itself
        max_grad_norm=1e9,
        tokens_per_micro_batch=budget,
        balance=balance,
        gradient_checkpointing=recomputes,
    )
    trainer = Trainer(module, config, total_steps=1, parallel=Parallel.whole(module, ranks))
    metrics = trainer.update(batch, PolicyLoss(PolicyLossConfig(), max_tokens=16))
    state = trainer.optimizer.state()
    return {name: state[f"exp_avg/{name}"] for name, _ in module.named_parameters()}, metrics


@cache
def at_once(balance: float) -> tuple[dict[str, Tensor], dict[str, Metric]]:
    return stepped(mixture(), rows(), 1000, SingleRank(), balance)


@settings(max_examples=8, deadline=None)
@given(
    budget=st.integers(1, 60),
    dealt=st.lists(st.integers(0, 1), min_size=6, max_size=6),
    recomputes=st.booleans(),
)
def test_one_loss_evens_out_however_rows_are_dealt_and_cut(
    budget: int, dealt: list[int], recomputes: bool
) -> None:
    group, batch = ThreadGroup(2, deadline_s=10), rows()
    modules = [mixture(), mixture()]

    def of(rank: int) -> tuple[dict[str, Tensor], dict[str, Metric]]:
        own = batch.select([row for row, each in enumerate(dealt) if each == rank])
        return stepped(modules[rank], own, budget, ThreadRanks(group, rank), FACTOR, recomputes=recomputes)

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(of, range(2))]
    expected, said = at_once(FACTOR)
    size = max(float(each.abs().max()) for each in expected.values())
    for gradients, metrics in results:
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6 * size)
        for name in [name for name in said if name.startswith("routing/")]:
            assert metrics[name].value == pytest.approx(said[name].value, rel=1e-6), name


def test_the_loss_is_that_of_transformers_over_rows_that_teach() -> None:
    batch = rows(2)
    module = mixture(layers=1)
    config = TrainConfig(beta1=0.0, max_grad_norm=1e9, balance=FACTOR)
    trainer = Trainer(module, config, total_steps=1)
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    found = trainer.update(batch, SupervisedLoss())
    plain = Trainer(module, config.model_copy(update={"balance": 0.0}), total_steps=1)
    module.load_state_dict(before, strict=False)
    said = plain.update(batch, SupervisedLoss())
    module.load_state_dict(before, strict=False)
    logits = []
    for row in batch.ragged("tokens").rows():
        out = module(input_ids=row[None, :-1], use_cache=False, output_router_logits=True)
        logits.append(out.router_logits[0])
    aux = FACTOR * load_balancing_loss_func((torch.cat(logits),), EXPERTS, TAKEN)
    assert found["routing/balance_loss/mean"].value == pytest.approx(float(aux.detach()), rel=1e-5)
    assert "routing/balance_loss/mean" not in said
    aux.backward()
    router = next(name for name in before if name.endswith("gate.weight"))
    own, without = (each.optimizer.state()[f"exp_avg/{router}"] for each in (trainer, plain))
    expected = dict(module.named_parameters())[router].grad
    torch.testing.assert_close(own - without, expected, rtol=1e-4, atol=1e-7)


def test_loads_are_those_of_every_token_of_every_row() -> None:
    metrics = at_once(0.0)[1]
    module, counts = mixture(), torch.zeros(2, EXPERTS)
    for row in rows().ragged("tokens").rows():
        logits = module(input_ids=row[None, :-1], use_cache=False, output_router_logits=True).router_logits
        for layer, each in enumerate(logits):
            counts[layer] += each.topk(TAKEN).indices.flatten().bincount(minlength=EXPERTS)
    shares = counts / counts.sum(1, keepdim=True)
    peaks = shares.max(1).values * EXPERTS
    assert metrics["routing/peak_load/mean"].value == pytest.approx(float(peaks.mean()))
    assert metrics["routing/peak_load/max"].value == pytest.approx(float(peaks.max()))
    entropy = -(torch.xlogy(shares, shares)).sum(1).mean() / torch.tensor(float(EXPERTS)).log()
    assert metrics["routing/entropy/mean"].value == pytest.approx(float(entropy), rel=1e-5)
    assert metrics["routing/idle/share"].value == pytest.approx(float((counts == 0).double().mean()))
    assert float(peaks.max()) > 1.2, "the loads of the test are uneven"
