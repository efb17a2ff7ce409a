"""A row ends once one of its stop texts is complete, whatever its number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rillflow.errors import ModelError
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.records.batch import Batch, row_ids
from rillflow.records.ragged import Ragged
from rillflow.records.rollout import Finish, Rollout
from rillflow.records.row import RowId
from rillflow.rollout.config import RolloutConfig
from rillflow.rollout.engine import Stops
from rillflow.rollout.native.engine import NativeEngine

NEW = NewModel(hidden=16, layers=1, heads=2, context=48, alphabet="abcd")
ROWS = 12


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model(ModelConfig(new=NEW), seed=0, device=torch.device("cpu"), base=Path())


def engine(model: LanguageModel, *texts: str, workers: int = 1) -> NativeEngine:
    stops = Stops(texts, model.tokenizer)
    config = RolloutConfig(max_tokens=40, max_rows=8, stop=texts)
    return NativeEngine(
        model.module, config, stop_tokens=stops.tokens, seed=5, context=48, workers=workers, stops=stops
    )


def prompts(model: LanguageModel) -> Batch:
    return Batch(
        ids=row_ids([RowId(0, index, 0) for index in range(ROWS)]),
        fields={
            "tokens": Ragged.from_rows([model.tokenizer.encode("abd")] * ROWS),
            "columns": Ragged.from_text(["{}"] * ROWS),
        },
    )


def answers(model: LanguageModel, rollouts: Batch) -> list[str]:
    """Return the text of every row's sampled tokens."""
    masks = rollouts.ragged("loss_mask").lists()
    return [
        model.tokenizer.decode([token for token, kept in zip(tokens, mask, strict=True) if kept])
        for tokens, mask in zip(rollouts.ragged("tokens").lists(), masks, strict=True)
    ]


def cut(text: str, *stops: str) -> str:
    """Return the text up to the end of the first stop text."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("texts", [("ab",), ("ca", "bbb"), ("d", "ab"), ("abcdabcd",)])
def test_rows_end_with_the_first_stop_and_are_the_same_up_to_there(
    texts: tuple[str, ...], workers: int, model: LanguageModel
) -> None:
    whole = answers(model, engine(model).generate(prompts(model)))
    found = engine(model, *texts, workers=workers).generate(prompts(model))
    assert answers(model, found) == [cut(text, *texts) for text in whole]
    stopped = [Finish(number) is Finish.STOP for number in found.dense("finish").tolist()]
    assert all(
        has_ended
        for has_ended, text in zip(stopped, whole, strict=True)
        if any(stop in text for stop in texts)
    )
    assert any(stopped) or texts == ("abcdabcd",)


def test_a_row_taken_out_in_the_middle_of_a_stop_ends_with_it_all_the_same(model: LanguageModel) -> None:
    text = next(each for each in answers(model, engine(model).generate(prompts(model))) if len(each) > 8)
    stop, row = text[4:7], RowId(0, 0, 0)
    index = answers(model, engine(model).generate(prompts(model))).index(text)
    row = RowId(0, index, 0)
    used = engine(model, stop)
    used.add(Rollout.start(row, model.tokenizer.encode("abd"), "{}"))
    for _ in range(6 if stop not in text[:6] else 1):
        assert not used.step()
    taken = used.abort(row)
    used.add(taken)
    ended: list[Rollout] = []
    while used.has_work:
        ended += used.step()
    sampled = [token for token, kept in zip(ended[0].tokens, ended[0].loss_mask, strict=True) if kept]
    assert model.tokenizer.decode(sampled) == cut(text, stop) and ended[0].finish is Finish.STOP


def test_an_empty_text_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ModelError, match="encodes to no token"):
        Stops(("",), model.tokenizer)
