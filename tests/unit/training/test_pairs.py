"""Preference losses over a policy's log probabilities: formula, any split, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from rillflow.errors import NotFiniteError, TrainingError
from rillflow.formulas.preferences import PairKind, PairLossConfig
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import merge_metrics
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.answers import AnswerLoss
from rillflow.training.config import TrainConfig
from rillflow.training.guards import loss_tokens
from rillflow.training.scorer import LogprobReader, Scorer, micro_batches
from rillflow.training.trainer import Trainer

MakeModule = Callable[..., PreTrainedModel]
KINDS: tuple[PairKind, ...] = ("dpo", "ipo", "hinge", "simpo", "orpo")


@pytest.fixture(scope="module")
def module() -> PreTrainedModel:
    """Return a two-layer GPT-2 in float64, in which any order of sums agrees to 12 digits."""
    register()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return made.to(torch.float64).eval()


def pairs(lengths: list[tuple[int, int]], seed: int = 0, prompt: int = 6) -> Batch:
    """Return pairs with separate prompts, and random reference totals."""
    numbers = torch.Generator().manual_seed(seed)
    rows, masks, ids = [], [], []
    for index, both in enumerate(lengths):
        asked = torch.randint(64, (prompt,), generator=numbers).tolist()
        for sample, length in enumerate(both):
            rows.append([*asked, *torch.randint(64, (length,), generator=numbers).tolist()])
            masks.append([False] * prompt + [True] * length)
            ids.append(RowId(0, index, sample))
    known = -2 * torch.rand(len(rows), generator=numbers, dtype=torch.float64) - 3
    return Batch(
        ids=row_ids(ids),
        fields={
            "tokens": Ragged.from_rows(rows),
            "loss_mask": Ragged.from_rows(masks, torch.bool),
            "reference_totals": known,
        },
    )


def gradient(module: PreTrainedModel, parts: list[Batch], loss: AnswerLoss, budget: int) -> Tensor:
    """Return the gradient accumulated over micro-batches of several ranks, with a common denominator."""
    module.zero_grad()
    scorer = Scorer(module, TrainConfig())
    prepared = [loss.prepare(part) for part in parts]
    whole = sum(float(part.dense("loss_denominator")[0]) for part in prepared)
    for rows in prepared:
        for index in micro_batches(rows, budget, rows.dense("loss_units")):
            part = rows.select(index)
            terms = loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).terms
            (terms.sum() / whole).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def assert_close(one: Tensor, other: Tensor) -> None:
    assert float((one - other).norm() / other.norm()) < 1e-11
    assert float(other.norm()) > 1e-4


@settings(max_examples=12)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=6),
    cut=st.integers(1, 5),
    budget=st.integers(1, 60),
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
)
def test_any_cut_gives_the_same_gradient(
    module: PreTrainedModel, lengths: list[tuple[int, int]], cut: int, budget: int, seed: int, kind: PairKind
) -> None:
    """Micro-batches of any size, rows in any order, pairs distributed over two ranks."""
    loss = AnswerLoss(PairLossConfig(kind=kind, nll=0.5))
    rows = pairs(lengths, seed)
    whole = gradient(module, [rows], loss, 1 << 20)
    mixed = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    flipped = rows.select([2 * int(pair) + side for pair in mixed for side in (1, 0)])
    place = 2 * min(cut, len(lengths) - 1)
    ranks = [flipped.slice(0, place), flipped.slice(place, len(rows))]
    assert_close(gradient(module, ranks, loss, budget), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_rows_taken_one_at_a_time(module: PreTrainedModel, kind: PairKind) -> None:
    rows = pairs([(3, 5), (2, 2), (6, 1)])
    config = PairLossConfig(kind=kind)
    found = gradient(module, [rows], AnswerLoss(config), 1 << 20)
    module.zero_grad()
    known, totals, lengths = rows.dense("reference_totals"), [], []
    masks = rows.ragged("loss_mask").rows()
    for tokens, mask in zip(rows.ragged("tokens").rows(), masks, strict=True):
        says = module(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        totals.append(says.gather(1, tokens[1:, None]).squeeze(1)[mask[1:]].sum())
        lengths.append(int(mask.sum()))
    losses = []
    for one in range(0, len(rows), 2):
        means = [totals[row] / lengths[row] for row in (one, one + 1)]
        ratios = [totals[row] - known[row] for row in (one, one + 1)]
        h = ratios[0] - ratios[1]
        near = ratios[0] / lengths[one] - ratios[1] / lengths[one + 1]
        odds = [mean - torch.log1p(-mean.exp()) for mean in means]
        losses.append(
            {
                "dpo": -logsigmoid(0.1 * h),
                "ipo": (near - 5) ** 2,
                "hinge": torch.relu(1 - 0.1 * h),
                "simpo": -logsigmoid(2 * (means[0] - means[1]) - 1),
                "orpo": -means[0] - 0.1 * logsigmoid(odds[0] - odds[1]),
            }[kind]
        )
    torch.stack(losses).mean().backward()
    assert_close(found, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))


def test_the_row_that_a_field_prefers_is_the_chosen_one(module: PreTrainedModel) -> None:
    """Sampled rows: two per prompt, with any sample numbers."""
    rows, loss = pairs([(3, 5), (2, 2), (6, 1)]), AnswerLoss(PairLossConfig())
    whole = gradient(module, [rows], loss, 1 << 20)
    ids = rows.ids.clone()
    ids[:, 2] = torch.tensor([7, 2, 0, 5, 3, 1])
    sampled = Batch(ids=ids, fields=rows.fields)
    first = torch.tensor([True, False] * 3)
    assert_close(gradient(module, [sampled.with_fields(preferred=first)], loss, 1 << 20), whole)
    other = gradient(module, [sampled.with_fields(preferred=~first)], loss, 1 << 20)
    assert float((other - whole).norm() / whole.norm()) > 0.5


def test_metrics_of_parts_merge_to_those_of_the_whole(module: PreTrainedModel) -> None:
    rows, loss = pairs([(3, 5), (2, 2), (6, 1), (4, 4)]), AnswerLoss(PairLossConfig(nll=0.1))
    scorer, prepared = Scorer(module, TrainConfig()), loss.prepare(rows)

    def measured(part: Batch) -> dict[str, float]:
        with torch.no_grad():
            return dict(loss(scorer.forward(part, LogprobReader()), loss_tokens(part)).metrics)  # type: ignore[arg-type]

    parts = [measured(prepared.slice(start, stop)) for start, stop in ((0, 2), (2, 8))]
    merged = merge_metrics(parts)  # type: ignore[arg-type]
    for name, metric in measured(prepared).items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-9)  # type: ignore[attr-defined]
        assert merged[name].count == 4  # type: ignore[union-attr]


def test_a_pair_s_prompt_is_computed_once(make_module: MakeModule) -> None:
    """The two answers stay together in every micro-batch, and share their prefix."""
    rows, seen = pairs([(3, 5), (2, 2)], prompt=40), []
    policy = make_module()
    policy.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    Trainer(policy, TrainConfig(tokens_per_micro_batch=50), total_steps=9).update(
        rows, AnswerLoss(PairLossConfig())
    )
    assert sorted(seen) == [40 + 1 + 1, 40 + 2 + 4], "nothing reads a row's last token"


def test_training_raises_the_chosen_over_the_rejected(make_module: MakeModule) -> None:
    rows = pairs([(3, 5), (2, 2), (6, 1), (4, 4)])
    trainer = Trainer(make_module(), TrainConfig(lr=3e-3), total_steps=99)
    steps = [trainer.update(rows, AnswerLoss(PairLossConfig(beta=0.5))) for _ in range(12)]
    assert steps[-1]["pairs/loss/mean"].value < 0.5 * steps[0]["pairs/loss/mean"].value
    assert steps[-1]["pairs/accuracy/mean"].value == 1.0


@pytest.mark.parametrize(
    ("keep", "preferred", "why"),
    [
        ([0, 1, 2], None, "1 chosen and 0 rejected"),
        ([0, 2], None, "1 chosen and 0 rejected"),
        ([0, 1], [True, True], "2 chosen and 0 rejected"),
        ([0, 1], [False, False], "0 chosen and 2 rejected"),
    ],
)
def test_rows_that_are_no_pairs_are_named(keep: list[int], preferred: list[bool] | None, why: str) -> None:
    rows = pairs([(3, 5), (2, 2)]).select(keep)
    if preferred is not None:
        rows = rows.with_fields(preferred=torch.tensor(preferred))
    with pytest.raises(TrainingError, match="has no partner") as caught:
        AnswerLoss(PairLossConfig()).prepare(rows)
    assert why in caught.value.why


def test_what_a_pair_cannot_do_without_is_named() -> None:
    rows, loss = pairs([(3, 5)]), AnswerLoss(PairLossConfig())
    with pytest.raises(TrainingError, match="reads the field 'reference_totals'"):
        loss.prepare(rows.only("tokens", "loss_mask"))
    mask = rows.ragged("loss_mask")
    silent = rows.with_fields(loss_mask=mask.with_values(mask.values & (mask.row_of == 0)))
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 0 sample 1\) has no loss token"):
        loss.prepare(silent)
    odd = rows.with_fields(reference_totals=torch.tensor([0.0, math.nan], dtype=torch.float64))
    with pytest.raises(NotFiniteError, match=r"reference_totals is nan at row \(epoch 0 prompt 0 sample 1"):
        loss.prepare(odd)
    assert loss.prepare(rows).dense("loss_denominator").tolist() == [1.0, 1.0]
