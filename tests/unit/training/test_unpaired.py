"""The loss of single answers: its formula, one divergence for all, any split, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.formulas.preferences import AnswerTotals
from rillflow.formulas.unpaired import UnpairedLossConfig, unpaired_loss
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.answers import AnswerLoss
from rillflow.training.config import TrainConfig
from rillflow.training.guards import loss_tokens
from rillflow.training.scorer import LogprobReader, Scorer, micro_batches
from rillflow.training.trainer import Trainer
from rillflow.workers.collectives import SingleRank

GOOD = [True, False, False, True]
CONFIG = UnpairedLossConfig(beta=0.4, good_weight=1.5, bad_weight=0.5)


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    """Return a two-layer GPT-2 in float64."""
    register()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return made.to(torch.float64).eval()


def answers(module: PreTrainedModel, shift: float = 1.0) -> Batch:
    """Return four prompts, each with its answer and the previous prompt's; the reference is ``shift`` off."""
    numbers = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (5,), generator=numbers).tolist() for _ in GOOD]
    own = [torch.randint(64, (length,), generator=numbers).tolist() for length in (3, 1, 6, 2)]
    texts = [
        prompt + answer for place, prompt in enumerate(prompts) for answer in (own[place], own[place - 1])
    ]
    tokens = Ragged.from_rows(texts)
    rows = Batch(
        ids=row_ids([RowId(0, prompt, sample) for prompt in range(4) for sample in (0, 1)]),
        fields={
            "tokens": tokens,
            "loss_mask": tokens.with_values(tokens.positions >= 5),
            "label": torch.tensor([each for each in GOOD for _ in (0, 1)]),
        },
    )
    known = Scorer(module, TrainConfig()).logprobs(rows).sums().double()
    noise = torch.randn(len(rows), generator=numbers, dtype=torch.float64)
    return rows.with_fields(reference_totals=known - shift + noise / 10)


def totals(module: PreTrainedModel, rows: Batch) -> Tensor:
    """Return the totals, one row at a time."""
    found = []
    for tokens, mask in zip(rows.ragged("tokens").rows(), rows.ragged("loss_mask").rows(), strict=True):
        says = module(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(says.gather(1, tokens[1:, None]).squeeze(1)[mask[1:]].sum())
    return torch.stack(found)


def gradient(module: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("shift", [1.0, -1.0], ids=["moved", "clamped at 0"])
def test_gradient_and_divergence_are_those_of_the_formula(module: PreTrainedModel, shift: float) -> None:
    """1 - s(beta (d - z)) and 1 - s(beta (z - d)), with z from the mismatched answers, without a gradient."""
    rows, loss, scorer = answers(module, shift), AnswerLoss(CONFIG), Scorer(module, TrainConfig())
    whole = loss.settled(loss.prepare(rows), rows, scorer.logprobs, SingleRank())
    assert whole is not None and whole.ids[:, 2].tolist() == [0] * 4
    module.zero_grad()
    for index in micro_batches(whole, 9):
        part = whole.select(index)
        terms = loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).terms
        (terms.sum() / float(part.dense("loss_denominator")[0])).backward()
    found = gradient(module)

    module.zero_grad()
    apart = totals(module, rows) - rows.dense("reference_totals")
    z = float(apart[1::2].detach().mean().clamp(min=0))
    assert (z > 0) == (shift > 0)
    assert whole.dense("divergence").tolist() == pytest.approx([z] * 4, abs=1e-7)
    d = apart[0::2]
    terms = [
        1.5 * (1 - torch.sigmoid(0.4 * (each - z))) if good else 0.5 * (1 - torch.sigmoid(0.4 * (z - each)))
        for each, good in zip(d, GOOD, strict=True)
    ]
    torch.stack(terms).mean().backward()
    expected = gradient(module)
    assert float((found - expected).norm() / expected.norm()) < 1e-6  # float32 sampled totals give z
    assert float(expected.norm()) > 1e-4


def test_metrics_tell_good_answers_from_bad_ones() -> None:
    given = AnswerTotals(torch.tensor([-1.0, -5.0, -2.0]), torch.ones(3), torch.tensor([-2.0, -4.0, -4.0]))
    good, apart = torch.tensor([True, False, False]), torch.zeros(3)
    metrics = unpaired_loss(given, good, apart, config=UnpairedLossConfig(beta=0.5)).metrics
    assert metrics["answers/accuracy/mean"].tolist() == [True, True, False]
    assert metrics["answers/good_reward/mean"].tolist() == [0.5]
    assert metrics["answers/bad_reward/mean"].tolist() == [-0.5, 1.0]
    assert metrics["answers/bad_logprob/mean"].tolist() == [-5.0, -2.0]
    alone = unpaired_loss(given, torch.ones(3, dtype=torch.bool), apart, config=UnpairedLossConfig()).metrics
    assert "answers/bad_reward/mean" not in alone


def test_training_raises_what_is_good_and_lowers_what_is_bad(
    make_module: Callable[..., PreTrainedModel],
) -> None:
    policy = make_module()
    rows = answers(policy, 0.0)
    trainer = Trainer(policy, TrainConfig(lr=3e-3, tokens_per_micro_batch=12), total_steps=99)
    steps = [trainer.update(rows, AnswerLoss(CONFIG)) for _ in range(12)]
    assert steps[-1]["answers/loss/mean"].value < steps[0]["answers/loss/mean"].value - 0.05
    assert steps[-1]["answers/accuracy/mean"].value == 1.0
    assert steps[-1]["answers/accuracy/mean"].count == 4, "nobody learns another prompt's answer"


def test_what_an_answer_cannot_do_without_is_named(module: PreTrainedModel) -> None:
    rows, loss = answers(module), AnswerLoss(CONFIG)
    with pytest.raises(TrainingError, match="reads the field 'label'"):
        loss.prepare(rows.only("tokens", "loss_mask", "reference_totals"))
    mask = rows.ragged("loss_mask")
    silent = rows.with_fields(loss_mask=mask.with_values(mask.values & (mask.row_of != 2)))
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 1 sample 0\) has no loss token"):
        loss.prepare(silent)
    with pytest.raises(TrainingError, match="a minibatch has no loss token"):
        loss.prepare(rows.select([1, 3]))
