"""A row ends once one of its stop texts is complete, whatever its number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from rillflow.errors import ModelError
from rillflow.models.bare import BareTokenizer
from rillflow.models.config import ModelConfig, NewModel
from rillflow.models.language_model import LanguageModel, load_model
from rillflow.models.tokenizer import Tokenizer
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


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """A tokeniser that joins the end of a sentence with what follows, as those of Qwen and Llama 3 do."""
    words = ["a", "b", "c", ".", "Ċ", "ĊĊ", ".ĊĊ", "ab", "cab", "abc", "Ã", "©", "<|end|>"]
    merges = [("Ċ", "Ċ"), (".", "ĊĊ"), ("a", "b"), ("c", "ab"), ("ab", "c")]
    backend = Backend(BPE(vocab={word: place for place, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(BareTokenizer(backend, "<|end|>", []))


def test_a_text_of_one_byte_ends_a_row_in_whatever_token_it_is(merging: Tokenizer) -> None:
    stops = Stops(("\n",), merging)
    assert {*merging.pieces(sorted(stops.tokens))} == {"\n", "\n\n", ".\n\n", "<|end|>"}
    assert not stops.longest, "no text is searched"


@pytest.mark.parametrize(
    ("stop", "pieces", "ends"),
    [
        ("ab", ["cab"], True),
        ("ab", ["abc"], True),
        ("ab", ["a", "b"], True),
        ("ab", ["c", "b"], False),
        ("ab", ["cab", "b"], False),
        ("ab", ["ab", "a", "ab"], True),
        (".\n", ["a", ".\n\n"], True),
        ("\n\n", ["\n", "\n"], True),
        ("\n\na", ["\n\n", "abc"], True),
        ("é", ["Ã", "©"], True),
        ("é", ["Ã"], False),
    ],
)
def test_a_text_ends_a_row_with_the_token_that_completes_it(
    merging: Tokenizer, stop: str, pieces: list[str], ends: bool
) -> None:
    """A text that was complete before the newest token, in an earlier turn, does not end the row again."""
    vocabulary = {"Ã": 10, "©": 11} | {merging.decode([token]): token for token in range(10)}
    assert Stops((stop,), merging).ends([vocabulary[each] for each in pieces]) is ends


def test_an_empty_text_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ModelError, match="encodes to no token"):
        Stops(("",), model.tokenizer)
