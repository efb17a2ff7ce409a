"""Scoring gives the log probabilities of an ordinary forward pass, row by row, for any split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rillflow.errors import TrainingError
from rillflow.models.attention import ATTENTION, register
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import Scorer, micro_batches

MakeRows = Callable[..., Batch]


@torch.no_grad()
def expected(module: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
    """Return [T] log probabilities by the module's own attention, one row after the other."""
    found = []
    for tokens, mask in zip(batch.ragged("tokens").rows(), batch.ragged("loss_mask").rows(), strict=True):
        logs = (module(input_ids=tokens[None]).logits[0] / temperature).log_softmax(-1)
        row = torch.cat([torch.zeros(1), logs[:-1].gather(-1, tokens[1:, None])[:, 0]])
        found.append(torch.where(mask, row, 0.0))
    return torch.cat(found)


def test_rows_that_fill_the_budget_to_the_token_are_one_micro_batch() -> None:
    rows = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(3)]),
        fields={"tokens": Ragged.from_rows([[1, 2, 3, 4], [5, 6, 7, 8], [9]])},
    )
    assert [part.tolist() for part in micro_batches(rows, 8)] == [[0, 1], [2]]


@pytest.mark.parametrize("budget", [1, 17, 16384])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_each_row_alone(
    make_module: Callable[..., PreTrainedModel], make_rows: MakeRows, budget: int, temperature: float
) -> None:
    batch = make_rows(prompts=(5, 3, 20), samples=4)
    batch = batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    scorer = Scorer(make_module(), TrainConfig(tokens_per_micro_batch=budget))
    found = scorer.logprobs(batch, temperature)
    assert torch.equal(found.lengths, batch.ragged("tokens").lengths)
    assert found.values.dtype == torch.float32 and not found.values.requires_grad
    own = expected(make_module(attention="sdpa"), batch, temperature)
    torch.testing.assert_close(found.values, own, rtol=0, atol=3e-6)


def test_loss_tokens_in_the_middle_and_rows_without_any(module: PreTrainedModel) -> None:
    rows = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11], []]
    masks = [[False, True, False, False, True, False], [False, False], [False, False, True], []]
    batch = Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(4)]),
        fields={"tokens": Ragged.from_rows(rows), "loss_mask": Ragged.from_rows(masks, torch.bool)},
    )
    found = Scorer(module, TrainConfig()).logprobs(batch)
    own = expected(module, batch.slice(0, 3), 1.0)
    torch.testing.assert_close(found.values, own, rtol=0, atol=3e-6)
    silent = batch.slice(1, 2)
    assert Scorer(module, TrainConfig()).logprobs(silent).values.tolist() == [0.0, 0.0]
    assert len(Scorer(module, TrainConfig()).logprobs(batch.slice(0, 0))) == 0


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=12), budget=st.integers(1, 30))
def test_micro_batches_keep_to_the_budget_and_groups_together(lengths: list[int], budget: int) -> None:
    ids = [RowId(0, index % 3, index) for index in range(len(lengths))]
    batch = Batch(ids=row_ids(ids), fields={"tokens": Ragged.from_rows([[0] * length for length in lengths])})
    parts = [part.tolist() for part in micro_batches(batch, budget)]
    order = [row for part in parts for row in part]
    assert sorted(order) == list(range(len(lengths)))
    assert [ids[row] for row in order] == sorted(ids)
    for part in parts:
        assert part
        assert sum(lengths[row] for row in part) <= budget or len(part) == 1


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=12), budget=st.integers(1, 30))
def test_units_stay_in_one_micro_batch(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, units = [length for length, _ in rows], torch.tensor([unit for _, unit in rows])
    ids = [RowId(0, index % 3, index) for index in range(len(rows))]
    batch = Batch(ids=row_ids(ids), fields={"tokens": Ragged.from_rows([[0] * length for length in lengths])})
    parts = [part.tolist() for part in micro_batches(batch, budget, units)]
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    homes = [
        {place for place, part in enumerate(parts) for row in part if rows[row][1] == unit}
        for unit in range(5)
    ]
    assert all(len(home) <= 1 for home in homes)
    for part in parts:
        assert sum(lengths[row] for row in part) <= budget or len({rows[row][1] for row in part}) == 1
    alone = [part.tolist() for part in micro_batches(batch, budget, torch.arange(len(rows)))]
    assert alone == [part.tolist() for part in micro_batches(batch, budget)]


def test_a_first_token_cannot_be_a_loss_token(module: PreTrainedModel) -> None:
    batch = Batch(
        ids=row_ids([RowId(0, 4, 1), RowId(2, 5, 6)]),
        fields={
            "tokens": Ragged.from_rows([[1, 2], [3, 4]]),
            "loss_mask": Ragged.from_rows([[False, True], [True, True]], torch.bool),
        },
    )
    with pytest.raises(TrainingError, match="epoch 2 prompt 5 sample 6"):
        Scorer(module, TrainConfig()).logprobs(batch)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_rows_side_by_side_say_what_packed_ones_say_however_they_are_cut(
    make_module: Callable[..., PreTrainedModel], make_rows: MakeRows, budget: int
) -> None:
    rows = make_rows(prompts=(5, 3, 9), longest=20)
    packed = Scorer(make_module(), TrainConfig()).logprobs(rows)
    config = TrainConfig(tokens_per_micro_batch=budget)
    padded = Scorer(make_module(attention="sdpa"), config).logprobs(rows)
    torch.testing.assert_close(padded.values, packed.values, rtol=0, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    unit=st.integers(1, 3),
    budget=st.integers(1, 90),
)
def test_padded_parts_hold_what_they_may_with_what_rows_are_filled_up_with(
    lengths: list[int], unit: int, budget: int
) -> None:
    ids = row_ids([RowId(0, index, 0) for index in range(len(lengths))])
    batch = Batch(ids=ids, fields={"tokens": Ragged.from_rows([[0] * length for length in lengths])})
    units = torch.arange(len(lengths)) // unit
    parts = [part.tolist() for part in micro_batches(batch, budget, units, padded=True)]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        size = len(part) * max(lengths[row] for row in part)
        assert size <= budget or len({row // unit for row in part}) == 1
    homes = {row: at for at, part in enumerate(parts) for row in part}
    assert all(homes[row] == homes[row - row % unit] for row in homes)


def test_a_module_that_drops_the_plan_is_refused(make_rows: MakeRows) -> None:
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = AutoConfig.for_model("stablelm", **settings, num_attention_heads=4, num_key_value_heads=4)
    register()
    module = AutoModelForCausalLM.from_config(config)
    module.config._attn_implementation = ATTENTION
    with pytest.raises(TrainingError, match="StableLmForCausalLM does not use Rillflow's attention"):
        Scorer(module, TrainConfig()).logprobs(make_rows())
