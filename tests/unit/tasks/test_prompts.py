"""Batches of prompts and demonstrations, and the stream of their order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from rillflow.errors import DataError
from rillflow.models.bare import END, character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.rollout import Finish, Rollout, completions, rollout_batch
from rillflow.records.row import RowId
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoded, Encoder
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import DEMONSTRATIONS, PROMPTS
from rillflow.tasks.prompts import PromptStream, StreamPosition, answered_batch, prompt_batch
from rillflow.tasks.task import open_task
from tests.unit.records.singles import rollouts_of

ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz:\n"


def tokenizer(template: str | None = None) -> Tokenizer:
    inner = character_tokenizer(ALPHABET, 64).library
    inner.chat_template = template
    return Tokenizer(inner)


def prompts(rows: list[Example], template: str | None = None) -> list[Encoded]:
    return Encoder(tokenizer=tokenizer(template)).rows(rows)


def learnt(rows: list[Example], letters: Tokenizer | None = None) -> list[Encoded]:
    return Encoder(tokenizer=letters or tokenizer()).rows(rows, DEMONSTRATIONS)


def example(index: int, prompt: str = "1+1=", completion: str | None = "2", **columns: object) -> Example:
    return Example(index=index, prompt=prompt, completion=completion, columns=columns)


def test_a_prompt_batch_has_ids_tokens_and_columns() -> None:
    rows = [example(7, "17+25=", answer="42"), example(2, "3-4=", answer="-1", level=[None, 0.5])]
    batch = prompt_batch(prompts(rows), epoch=3)
    assert batch.row_ids() == [RowId(3, 7, 0), RowId(3, 2, 0)]
    assert [tokenizer().decode(row.tolist()) for row in batch.ragged("tokens").rows()] == ["17+25=", "3-4="]
    assert [json.loads(text) for text in batch.ragged("columns").to_text()] == [
        {"prompt": "17+25=", "answer": "42"},
        {"prompt": "3-4=", "answer": "-1", "level": [None, 0.5]},
    ]
    assert set(batch.fields) == {"tokens", "columns"}


def test_rows_of_two_epochs_in_one_batch() -> None:
    drawn = PromptStream(prompts([example(0), example(1, "2+2=")]), seed=0).take(5)
    batch = prompt_batch([draw.row for draw in drawn], epoch=[draw.epoch for draw in drawn])
    assert [row.epoch for row in batch.row_ids()] == [0, 0, 1, 1, 2]
    assert len(set(batch.row_ids())) == 5


def test_chats_and_texts_keep_their_order() -> None:
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
    chat = Example(index=1, prompt=({"role": "user", "content": "hi"},), columns={"answer": "x"})
    batch = prompt_batch(prompts([example(0), chat, example(2, "a")], template), epoch=0)
    texts = [tokenizer().decode(row.tolist()) for row in batch.ragged("tokens").rows()]
    assert texts == ["1+1=", "user:hi\nassistant:", "a"]
    assert json.loads(batch.ragged("columns").to_text()[1])["prompt"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("prompt", "says"), [("1+X=", "'X'"), (f"1{END}", "'<'")])
def test_a_prompt_that_cannot_be_encoded_names_its_row(prompt: str, says: str) -> None:
    rows = [example(0), example(4, prompt), example(9)]
    with pytest.raises(DataError) as caught:
        prompts(rows)
    assert "the prompt of prompt 4" in caught.value.what and says in caught.value.what
    with pytest.raises(DataError, match=r"the completion of prompt 3 .*'Z'"):
        learnt([example(3, completion="Z")])


def test_a_chat_that_cannot_be_encoded_names_its_row() -> None:
    chat = Example(index=8, prompt=({"role": "user", "content": f"stop{END}"},))
    with pytest.raises(DataError, match=r"prompt 8 .*special token"):
        prompts([chat], "{{ messages[0]['content'] }}")
    with pytest.raises(DataError, match=r"prompt 8 .*no chat template"):
        prompts([chat])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["1+1=", "X", "a", "-Z-"]), max_size=12))
def test_rows_that_cannot_be_encoded_are_found_among_all_others(texts: list[str]) -> None:
    """A batch is halved until an invalid row is alone; every row returns in its order."""
    rows = [example(index, text) for index, text in enumerate(texts)]
    found = list(Encoder(tokenizer=tokenizer()).encode(rows, PROMPTS))
    for row, made in zip(rows, found, strict=True):
        bad = row.prompt in ("X", "-Z-")
        assert str(row) in made.what if isinstance(made, DataError) else made.example == row
        assert isinstance(made, DataError) == bad


def test_a_demonstration_is_prompt_answer_and_end() -> None:
    rows = [example(1, "17+25=", "42", answer="42"), example(0, "5-5=", ""), example(3, "a", "bcd")]
    made, letters = answered_batch(learnt(rows), epoch=2), tokenizer()
    expected = [
        Rollout.start(RowId(2, row.index, 0), letters.encode(str(row.prompt)), row.as_json()).sampled(
            tokens := letters.encode_completions([str(row.completion)])[0],
            [0.0] * len(tokens),
            -1,
            Finish.STOP,
        )
        for row in rows
    ]
    assert rollouts_of(made) == expected
    reference = rollout_batch(expected)
    assert made.fields.keys() == reference.fields.keys()
    for name in ("tokens", "loss_mask", "sampler_logprobs", "versions"):
        assert made.ragged(name).values.dtype == reference.ragged(name).values.dtype
    assert made.dense("finish").dtype == reference.dense("finish").dtype
    assert [row.tolist() for row in completions(made).rows()][1] == [0], "an empty answer is its end token"


def test_the_end_token_is_trained_although_it_pads_too() -> None:
    inner = character_tokenizer(ALPHABET, 64).library
    assert inner.pad_token_id == inner.eos_token_id
    batch = answered_batch(learnt([example(0), example(1, "1+1=", "22222")]), epoch=0)
    last = batch.ragged("tokens").bounds[1:] - 1
    assert batch.ragged("tokens").values[last].tolist() == [0, 0]
    assert batch.ragged("loss_mask").values[last].all()
    assert batch.ragged("loss_mask").sums().tolist() == [2, 6]


def test_a_begin_token_is_in_the_prompt_and_not_in_the_loss() -> None:
    inner = character_tokenizer(ALPHABET, 64).library
    inner.add_special_tokens({"bos_token": "<|begin|>"})
    begin = inner.bos_token_id
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    batch = answered_batch(learnt([example(0)], Tokenizer(inner)), epoch=0)
    assert batch.ragged("tokens").values.tolist().count(begin) == 1
    assert batch.ragged("tokens").values[0] == begin and not batch.ragged("loss_mask").values[0]


def test_a_demonstration_without_an_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"prompt 6 .*no answer"):
        learnt([example(0), example(6, completion=None)])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 25), max_size=8), st.integers(0, 2**40))
def test_every_epoch_has_every_row_once(size: int, takes: list[int], seed: int) -> None:
    stream = PromptStream([example(index) for index in range(size)], seed=seed)
    drawn = [draw for count in takes for draw in stream.take(count)]
    assert len(drawn) == sum(takes)
    assert [draw.epoch for draw in drawn] == [place // size for place in range(len(drawn))]
    seen = Counter((draw.epoch, draw.row.index) for draw in drawn)
    assert max(seen.values(), default=1) == 1
    assert stream.position.epoch * size + stream.position.offset == len(drawn)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 20), st.integers(0, 99))
def test_a_resumed_stream_goes_on_exactly(size: int, before: int, after: int, seed: int) -> None:
    examples = [example(index) for index in range(size)]
    whole = PromptStream(examples, seed=seed)
    first = PromptStream(examples, seed=seed)
    first.take(before)
    saved = json.loads(json.dumps(first.state()))
    resumed = PromptStream(examples, seed=seed, position=StreamPosition(**saved))
    assert resumed.take(after) == whole.take(before + after)[before:]
    assert resumed.state() == whole.state()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.integers(0, 99))
def test_rows_added_where_a_stream_is_resumed_join_at_the_next_epoch(
    size: int, more: int, before: int, between: int, seed: int
) -> None:
    rows = [example(index) for index in range(size + more)]
    first = PromptStream(rows[:size], seed=seed)
    first.take(before)
    place = StreamPosition(**json.loads(json.dumps(first.state())))
    left = first.take(size - place.offset)
    grown = PromptStream(rows, seed=seed, position=place)
    assert grown.take(len(left)) == left
    again = PromptStream(rows, seed=seed, position=place)
    again.take(between)
    again = PromptStream(rows, seed=seed, position=StreamPosition(**again.state()))
    found = PromptStream(rows, seed=seed, position=place).take(between + size + more)
    assert again.take(size + more) == found[between:]
    drawn = grown.take(size + more)
    assert {draw.epoch for draw in drawn} == {place.epoch + 1}
    assert sorted(draw.row.index for draw in drawn) == [*range(size + more)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 20), st.integers(0, 99))
def test_rows_that_are_left_out_change_nothing_of_the_others_order(
    kept: list[bool], count: int, seed: int
) -> None:
    kept = [*kept, True]
    rows = [example(index) for index in range(len(kept))]
    some = [row if keep else None for row, keep in zip(rows, kept, strict=True)]
    stream = PromptStream(some, seed=seed)
    found = stream.take(count)
    whole = PromptStream(rows, seed=seed).take(len(rows) * count)
    assert found == [draw for draw in whole if kept[draw.row.index]][:count]
    assert PromptStream(rows, seed=seed, position=stream.position), "with all rows again, it goes on there"


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    examples = [example(index) for index in range(50)]
    stream = PromptStream(examples, seed=0)
    first, second = ([draw.row.index for draw in stream.take(50)] for _ in range(2))
    other = [draw.row.index for draw in PromptStream(examples, seed=1).take(50)]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


@pytest.mark.parametrize(
    ("count", "position"),
    [
        (0, StreamPosition()),
        (3, StreamPosition(offset=4)),
        (3, StreamPosition(epoch=-1)),
        (3, StreamPosition(offset=-1)),
    ],
)
def test_a_position_of_other_data_is_refused(count: int, position: StreamPosition) -> None:
    with pytest.raises(DataError) as caught:
        PromptStream([example(index) for index in range(count)], seed=0, position=position)
    with pytest.raises(DataError):
        PromptStream([None] * count, seed=0)
    assert f"epoch {position.epoch}, row {position.offset} of {count} rows" in caught.value.what


def test_the_built_in_task_fits_the_new_model_s_default_alphabet() -> None:
    task = open_task(TaskConfig(size=200, held_out=20, operators="+-*"), PROMPTS, base=Path(), seed=0)
    letters = Tokenizer(character_tokenizer("0123456789+-*=", 32))
    batch = answered_batch(learnt(list(task.train), letters), epoch=0)
    assert len(batch) == 180
    assert torch.equal(batch.ids[:, 1], torch.tensor([row.index for row in task.train]))
