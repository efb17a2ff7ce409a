"""Losses on a scalar head: formulas, gradients under any split, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.formulas.config import ValueLossConfig
from rillflow.records.batch import Batch, row_ids
from rillflow.records.metrics import merge_metrics
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.answers import PairLoss
from rillflow.training.config import TrainConfig
from rillflow.training.guards import loss_tokens
from rillflow.training.loss import TokenLoss, ValueLoss
from rillflow.training.scorer import ScalarReader, Scorer, micro_batches

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]


def with_returns(rows: Batch, seed: int = 0) -> Batch:
    generator, column = torch.Generator().manual_seed(seed), rows.ragged("tokens")
    drawn = torch.randn(2, len(column.values), generator=generator)
    return rows.with_fields(returns=column.with_values(drawn[0]), old_values=column.with_values(drawn[1]))


def gradient(
    module: PreTrainedModel, rows: Batch, loss: TokenLoss | PairLoss, budget: int
) -> dict[str, Tensor]:
    """Return the gradient accumulated over micro-batches, split as in the trainer."""
    module.zero_grad()
    prepared, scorer = loss.prepare(rows), Scorer(module, TrainConfig())
    units = prepared.dense("loss_units") if "loss_units" in prepared.fields else None
    for index in micro_batches(prepared, budget, units):
        part = prepared.select(index)
        terms = loss(scorer.forward(part, ScalarReader(back=loss.back)), loss_tokens(part)).terms
        (terms.sum() / float(part.dense("loss_denominator")[0])).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], relative: float) -> None:
    assert one.keys() == other.keys()
    size = torch.cat([grad.flatten() for grad in other.values()]).norm()
    gap = torch.cat([(one[name] - other[name]).flatten() for name in one]).norm()
    assert float(gap / size) < relative
    assert float(size) > 1e-3


LOSSES = [ValueLoss(ValueLossConfig()), ValueLoss(ValueLossConfig(clip=0)), PairLoss()]


@pytest.mark.parametrize("loss", LOSSES, ids=["clipped", "plain", "preference"])
def test_any_cut_gives_the_same_gradient_in_float64(
    make_exact: MakeModule, make_rows: MakeRows, loss: TokenLoss | PairLoss
) -> None:
    module = make_exact()
    rows = with_returns(make_rows(prompts=(5, 3, 8, 4, 6), samples=2))
    whole = gradient(module, rows, loss, 1 << 20)
    for budget in (1, 20, 45):
        assert_close(gradient(module, rows, loss, budget), whole, 1e-12)
    backwards = rows.select(list(range(len(rows)))[::-1])
    assert_close(gradient(module, backwards, loss, 30), whole, 1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_value_loss_is_its_formula(make_exact: MakeModule, make_rows: MakeRows, clip: float) -> None:
    module, rows = make_exact(), with_returns(make_rows())
    found = gradient(module, rows, ValueLoss(ValueLossConfig(clip=clip)), 1 << 20)
    module.zero_grad()
    terms = []
    for row in range(len(rows)):
        tokens, mask = rows.ragged("tokens").rows()[row], rows.ragged("loss_mask").rows()[row]
        heads = module.score(module.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state)
        value = heads[0, :-1, 0][mask[1:]]
        target, old = (rows.ragged(name).rows()[row][mask].double() for name in ("returns", "old_values"))
        loss = (value - target) ** 2
        if clip:
            near = torch.clip(value, old - clip, old + clip)
            loss = torch.maximum(loss, (near - target) ** 2)
        terms.append(loss / 2)
    torch.cat(terms).mean().backward()
    assert_close(found, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, 1e-12)


def test_the_preference_loss_is_its_formula(make_exact: MakeModule, make_rows: MakeRows) -> None:
    module, rows = make_exact(), make_rows(prompts=(5, 3, 8), samples=2)
    found = gradient(module, rows, PairLoss(), 1 << 20)
    module.zero_grad()
    scores = torch.cat([module(input_ids=row[None]).logits[:, 0] for row in rows.ragged("tokens").rows()])
    (-logsigmoid(scores[0::2] - scores[1::2])).mean().backward()
    assert_close(found, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, 1e-12)


def value_rows() -> Batch:
    """Return one row with two loss tokens."""
    column = Ragged(values=torch.tensor([5, 6, 7, 8]), lengths=torch.tensor([4]))
    return Batch(
        ids=row_ids([RowId(0, 0, 0)]),
        fields={
            "tokens": column,
            "loss_mask": column.with_values(torch.tensor([False, False, True, True])),
            "returns": column.with_values(torch.tensor([math.nan, 9.0, 1.0, 3.0])),
            "old_values": column.with_values(torch.tensor([math.inf, 9.0, 0.0, 0.0])),
        },
    )


def test_a_value_that_went_beyond_its_clip_towards_the_return_has_no_gradient() -> None:
    """Old values 0, returns 1 and 3, clip 0.5: the first moved too far, the second not far enough."""
    loss = ValueLoss(ValueLossConfig(clip=0.5))
    part = loss_tokens(loss.prepare(value_rows()))
    values = torch.tensor([0.75, 0.25], requires_grad=True)
    loss(values, part).terms.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, 0.25 - 3.0])
    away = torch.tensor([-0.75, -0.25], requires_grad=True)
    loss(away, part).terms.sum().backward()
    assert away.grad is not None and away.grad.tolist() == pytest.approx([-0.75 - 1, -0.25 - 3.0])


def test_value_metrics_say_what_they_are_named_for() -> None:
    loss = ValueLoss(ValueLossConfig(clip=0.5))
    found = loss(torch.tensor([1.0, 0.25]), loss_tokens(loss.prepare(value_rows())))
    assert found.terms.tolist() == pytest.approx(
        [0.125, 2.75**2 / 2]
    )  # clipped: (0.5 - 1)^2 / 2; not clipped
    assert {name: metric.value for name, metric in found.metrics.items()} == pytest.approx(
        {
            "critic/clipped/share": 0.5,
            "critic/value/mean": 0.625,
            "critic/return/mean": 2.0,
            "critic/squared_error/mean": 2.75**2 / 2,
            "critic/return/variance": 1.0,
        }
    )


def pair_rows(*ids: tuple[int, int, int]) -> Batch:
    return Batch(
        ids=row_ids([RowId(*row) for row in ids]),
        fields={"tokens": Ragged.from_rows([[index, 1, 2] for index in range(len(ids))])},
    )


def test_preference_metrics_say_what_they_are_named_for() -> None:
    rows = pair_rows((0, 7, 1), (0, 3, 0), (1, 3, 1), (0, 7, 0), (0, 3, 1), (1, 3, 0))
    loss = PairLoss()
    found = loss(torch.tensor([4.0, 1.0, 5.0, 5.0, 3.0, 5.0]), loss_tokens(loss.prepare(rows)))
    margins = torch.tensor([1.0, -2.0, 0.0])  # prompt 7, prompt 3, prompt 3 of epoch 1
    each = -logsigmoid(margins) / 2
    assert found.terms.tolist() == pytest.approx(each[[0, 1, 2, 0, 1, 2]].tolist())
    assert {name: metric.value for name, metric in found.metrics.items()} == pytest.approx(
        {
            "preference/accuracy/mean": 1 / 3,
            "preference/margin/mean": -1 / 3,
            "preference/centre/mean": 11.5 / 3,
        }
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9),
    budget=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_no_cut_parts_a_pair_and_metrics_add_up(
    lengths: list[tuple[int, int]], budget: int, seed: int
) -> None:
    ids = [RowId(0, prompt, sample) for prompt in range(len(lengths)) for sample in (0, 1)]
    rows = Batch(
        ids=row_ids(ids),
        fields={"tokens": Ragged.from_rows([[1] * (1 + size) for pair in lengths for size in pair])},
    )
    generator = torch.Generator().manual_seed(seed)
    rows = rows.select(torch.randperm(len(rows), generator=generator))
    scores = torch.randn(len(rows), generator=generator)
    loss = PairLoss()
    prepared = loss.prepare(rows.with_fields(scores=scores)).with_fields(scores=scores)
    parts = micro_batches(prepared, budget, prepared.dense("loss_units"))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(rows)))
    found = []
    for index in parts:
        part = loss_tokens(prepared.select(index))
        samples: dict[int, set[int]] = {}
        for row in part.row_ids():
            samples.setdefault(row.prompt, set()).add(row.sample)
        assert set(map(frozenset, samples.values())) == {frozenset({0, 1})}
        assert int(rows.ragged("tokens").lengths[index].sum()) <= budget or len(index) == 2
        found.append(loss(part.dense("scores"), part))
    whole = loss(prepared.dense("scores"), loss_tokens(prepared))
    total = sum(float(share.terms.sum()) for share in found)
    assert total == pytest.approx(float(whole.terms.sum()), rel=1e-4)
    merged = merge_metrics([share.metrics for share in found])
    for name, metric in whole.metrics.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("ids", "model_outputs", "why"),
    [
        ([(0, 0, 0), (0, 0, 1), (0, 4, 0)], "prompt 4 sample 0", "1 chosen and 0 rejected"),
        ([(0, 4, 1)], "prompt 4 sample 1", "0 chosen and 1 rejected"),
        ([(0, 4, 0), (1, 4, 1)], "prompt 4 sample 0", "1 chosen and 0 rejected"),
        ([(0, 4, 0), (0, 4, 1), (0, 4, 1)], "prompt 4 sample 0", "1 chosen and 2 rejected"),
        ([(0, 0, 0), (0, 0, 1), (0, 0, 2)], "prompt 0 sample 2", "sample 0 is the chosen"),
    ],
)
def test_rows_that_are_no_pairs_are_named(
    ids: list[tuple[int, int, int]], model_outputs: str, why: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        PairLoss().prepare(pair_rows(*ids))
    assert model_outputs in caught.value.what and why in caught.value.why


def test_an_empty_row_and_no_row_are_refused() -> None:
    rows = pair_rows((0, 0, 0), (0, 0, 1))
    empty = rows.with_fields(tokens=Ragged.from_rows([[1, 2], []]))
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 0 sample 1\) is empty"):
        PairLoss().prepare(empty)
    with pytest.raises(TrainingError, match="0 rows has no pair"):
        PairLoss().prepare(rows.slice(0, 0))


def test_a_minibatch_without_loss_tokens_is_refused(make_rows: MakeRows) -> None:
    rows = with_returns(make_rows())
    mask = rows.ragged("loss_mask")
    silent = rows.with_fields(loss_mask=mask.with_values(torch.zeros_like(mask.values)))
    with pytest.raises(TrainingError, match="minibatch of 6 rows has no loss token"):
        ValueLoss(ValueLossConfig()).prepare(silent)


@pytest.mark.parametrize("name", ["returns", "old_values"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_names_row_and_token(name: str, value: float) -> None:
    rows = value_rows()
    column = rows.ragged(name)
    broken = rows.with_fields(**{name: column.with_values(torch.tensor([0.0, 0.0, 0.0, value]))})
    with pytest.raises(TrainingError, match=rf"{name} is {value} at token 3 \(id 8\) of row \(epoch 0"):
        ValueLoss(ValueLossConfig()).prepare(broken)
    if name == "old_values":
        ValueLoss(ValueLossConfig(clip=0)).prepare(broken)  # never read
