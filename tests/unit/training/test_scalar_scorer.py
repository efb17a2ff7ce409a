"""Scoring with a scalar head gives the values of an ordinary forward pass, row by row, for any split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rillflow.errors import ModelError, TrainingError
from rillflow.models.attention import ATTENTION
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.row import RowId
from rillflow.sharding.packed_rows import pack
from rillflow.training.config import TrainConfig
from rillflow.training.scorer import Scorer

MakeModule = Callable[..., PreTrainedModel]
MakeRows = Callable[..., Batch]


@torch.no_grad()
def heads(module: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Return the head's values at every token by the module's own attention, one row after the other."""
    return [
        module.score(module.model(input_ids=row[None]).last_hidden_state)[0, :, 0]
        for row in batch.ragged("tokens").rows()
    ]


def shuffled(batch: Batch) -> Batch:
    return batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("attention", [ATTENTION, "sdpa"])
@pytest.mark.parametrize("budget", [1, 17, 16384])
def test_values_and_scores_are_those_of_each_row_alone(
    make_scalar: MakeModule, make_rows: MakeRows, budget: int, attention: str
) -> None:
    batch = shuffled(make_rows(prompts=(5, 3, 20), samples=4))
    scorer = Scorer(make_scalar(attention=attention), TrainConfig(tokens_per_micro_batch=budget))
    own = heads(make_scalar(attention="sdpa"), batch)
    before = torch.cat([torch.cat([torch.zeros(1), row[:-1]]) for row in own])
    values, scores = scorer.values(batch), scorer.scores(batch)
    mask = batch.ragged("loss_mask").values
    assert torch.equal(values.lengths, batch.ragged("tokens").lengths)
    assert values.values.dtype == scores.dtype == torch.float32
    assert not values.values.requires_grad and not scores.requires_grad
    torch.testing.assert_close(values.values, torch.where(mask, before, 0.0), rtol=0, atol=3e-6)
    torch.testing.assert_close(scores, torch.stack([row[-1] for row in own]), rtol=0, atol=3e-6)
    assert float(scores.std()) > 0.1, "the numbers say something"


def test_shared_beginnings_are_read_where_they_are_shared(
    make_scalar: MakeModule, make_rows: MakeRows
) -> None:
    """Every first value of a group comes from the single packed copy of the prompt's last token."""
    batch = make_rows(prompts=(6,), samples=5)
    assert len(pack(batch.ragged("tokens")).tokens) < len(batch.ragged("tokens").values) - 3 * 5
    values = Scorer(make_scalar(), TrainConfig()).values(batch)
    first = values.values[values.bounds[:-1] + 6]
    assert len(set(first.tolist())) == 1 and float(first[0]) != 0
    own = heads(make_scalar(attention="sdpa"), batch)
    assert float(first[0]) == pytest.approx(float(own[0][5]), abs=3e-6)


def rows_of(*rows: list[int], masks: list[list[bool]]) -> Batch:
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(len(rows))]),
        fields={"tokens": Ragged.from_rows(rows), "loss_mask": Ragged.from_rows(masks, torch.bool)},
    )


def test_loss_tokens_in_the_middle_and_rows_without_any(make_scalar: MakeModule) -> None:
    batch = rows_of(
        [1, 2, 3, 4, 5, 6],
        [7],
        [9, 10, 11],
        masks=[[False, True, False, False, True, False], [False], [False, False, True]],
    )
    scorer = Scorer(make_scalar(), TrainConfig())
    own = heads(make_scalar(attention="sdpa"), batch)
    expected = [0, own[0][0], 0, 0, own[0][3], 0, 0, 0, 0, own[2][1]]
    assert scorer.values(batch).values.tolist() == pytest.approx([float(x) for x in expected], abs=3e-6)
    last = [float(row[-1]) for row in own]
    assert scorer.scores(batch).tolist() == pytest.approx(last, abs=3e-6), "a row of one token has a score"
    assert scorer.values(batch.slice(1, 2)).values.tolist() == [0.0]
    assert len(scorer.values(batch.slice(0, 0))) == len(scorer.scores(batch.slice(0, 0))) == 0


def test_an_empty_row_has_no_score_and_a_first_token_no_value(make_scalar: MakeModule) -> None:
    scorer = Scorer(make_scalar(), TrainConfig())
    with pytest.raises(TrainingError, match=r"row \(epoch 0 prompt 1 sample 0\) is empty"):
        scorer.scores(rows_of([1, 2], [], masks=[[False, True], []]))
    with pytest.raises(TrainingError, match=r"first token of row .*prompt 1"):
        scorer.values(rows_of([1, 2], [3, 4], masks=[[False, True], [True, True]]))


def test_a_module_without_a_scalar_head_is_refused(
    make_module: MakeModule, make_scalar: MakeModule, make_rows: MakeRows
) -> None:
    with pytest.raises(ModelError, match="Qwen2ForCausalLM has no scalar head"):
        Scorer(make_module(), TrainConfig()).scores(make_rows())
    with pytest.raises(ModelError, match="32 to 2"):
        Scorer(make_scalar(num_labels=2), TrainConfig()).scores(make_rows())


def test_bfloat16_numbers_are_wide(make_scalar: MakeModule, make_rows: MakeRows) -> None:
    batch = make_rows()
    narrow = Scorer(make_scalar(dtype=torch.bfloat16), TrainConfig()).scores(batch)
    wide = Scorer(make_scalar(), TrainConfig()).scores(batch)
    torch.testing.assert_close(narrow, wide, rtol=0.2, atol=0.2)
    assert not torch.equal(narrow, narrow.bfloat16().float())
