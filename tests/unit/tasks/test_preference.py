"""Pairs of answers: read, made, split, and as batches; every invalid row is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from rillflow.errors import DataError
from rillflow.models.bare import character_tokenizer
from rillflow.models.tokenizer import Tokenizer
from rillflow.records.row import RowId
from rillflow.tasks.arithmetic import arithmetic_examples
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.encoded import Encoded, Encoder
from rillflow.tasks.example import Example
from rillflow.tasks.files import read_rows
from rillflow.tasks.kinds import DEMONSTRATIONS, PROMPTS, DataKind
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.prompts import PromptStream, answered_batch
from rillflow.tasks.task import open_task

read_preferences = partial(read_rows, make=PREFERENCES.read)
Write = Callable[..., Path]
ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz:\n"
CHAT = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*rows: object, name: str = "pairs.jsonl") -> Path:
        text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(text) + "\n", encoding="utf-8")
        return tmp_path / name

    return lines


def tokenizer(template: str | None = None) -> Tokenizer:
    inner = character_tokenizer(ALPHABET, 64).library
    inner.chat_template = template
    return Tokenizer(inner)


def encoded(
    rows: Sequence[Example], template: str | None = None, kind: DataKind = PREFERENCES
) -> list[Encoded]:
    return Encoder(tokenizer=tokenizer(template)).rows(rows, kind)


def row(**changes: object) -> dict[str, object]:
    return {"prompt": "1+1=", "chosen": "2", "rejected": "3"} | changes


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_rows_become_pairs(write: Write) -> None:
    chat = [{"role": "user", "content": "hi"}]
    pairs = read_preferences(
        write(row(level=1), row(prompt=chat, chosen=assistant("yes"), rejected="no", level=None))
    )
    assert pairs == [
        Example(index=0, prompt="1+1=", completion="2", others=("3",), columns={"level": 1}),
        Example(index=1, prompt=(chat[0],), completion="yes", others=("no",), columns={"level": None}),
    ]


TALK = [{"role": "user", "content": "hi"}, *assistant("hello"), {"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": None}, {"prompt": "1+1?"}, {"prompt": "hi"}, {"prompt": TALK}]
)
def test_whole_conversations_become_a_prompt_and_two_answers(
    tmp_path: Path, write: Write, prompt: dict[str, object]
) -> None:
    rows = [{**prompt, "chosen": [*TALK, *assistant("2")], "rejected": [*TALK, *assistant("3")], "level": 1}]
    found = Example(index=0, prompt=tuple(TALK), completion="2", others=("3",), columns={"level": 1})
    assert read_preferences(write(*rows)) == [found]
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "pairs.parquet")
    assert read_preferences(tmp_path / "pairs.parquet") == [found]


def test_parquet_rows_become_the_same_pairs(tmp_path: Path, write: Write) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(), row(prompt="2+2=", chosen="4", rejected="22")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    assert read_preferences(tmp_path / "pairs.parquet") == read_preferences(write(*rows))
    bad = [row(), row(rejected=None)]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet, row 2: the answer 'rejected' is null"):
        read_preferences(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row(chosen=None), "the answer 'chosen' is null"),
        (row(rejected=7), "the answer 'rejected' is 7"),
        (row(rejected=["x"]), "message 1 of the answer 'rejected' \"x\""),
        (row(rejected=[{"role": "assistant"}]), "message 1 of the answer 'rejected' has the keys 'role'"),
        (row(chosen=[{"role": "asistant", "content": ""}]), "message 1 of the answer 'chosen' has the role"),
        (row(chosen=[{"role": "user", "content": "a"}]), "the answer 'chosen' has messages of user"),
        (row(chosen=assistant("a") * 2), "the answer 'chosen' has messages of assistant, assistant"),
        (row(chosen=[]), "the answer 'chosen' has messages of nobody"),
        (row(chosen="3"), 'chosen and rejected are both "3"'),
        (row(chosen=assistant("3")), 'chosen and rejected are both "3"'),
        (row(prompt=""), "the prompt is empty"),
        (row(chosen=[*TALK, *assistant("2")]), "the answer 'chosen' has messages of user, assistant, user"),
        (
            row(chosen=[*TALK, *assistant("2")], rejected=[*TALK[:1], *assistant("3")]),
            "chosen has 4 messages and rejected 2; they share only the first 1",
        ),
        (
            row(chosen=[*TALK, *assistant("2")], rejected=[*TALK, *assistant("3")]),
            'the prompt is "1+1=", and chosen and rejected answer ["hi", "1+1?"]',
        ),
        (
            row(prompt="hi", chosen=[*TALK, *assistant("2")], rejected=[*TALK, *assistant("2")]),
            'chosen and rejected are both "2"',
        ),
        (
            row(prompt="hi", chosen=[*TALK, *TALK[:1]], rejected=[*TALK, *assistant("2")]),
            "the answer 'chosen' has messages of user",
        ),
        (row(prompt=None), "the prompt is null"),
        (row(prompt=assistant("a")), "the prompt's last message is the assistant's"),
        (
            '{"prompt": "a", "chosen": "\\ud800", "rejected": "b"}',
            "the answer 'chosen' has the lone surrogate",
        ),
        ({"prompt": "a", "chosen": "b"}, "there is no column 'rejected', which line 1 has"),
        ('{"prompt": "a", ', "this is not JSON"),
    ],
)
def test_a_bad_row_is_named_with_its_line(write: Write, bad: object, says: str) -> None:
    path = write(row(), "", bad)
    with pytest.raises(DataError) as caught:
        read_preferences(path)
    assert f"{path}, line 3: " in caught.value.what and says in caught.value.what
    assert caught.value.why


@pytest.mark.parametrize("name", ["prompt", "chosen", "rejected"])
def test_a_missing_column_is_named_with_the_nearest(write: Write, name: str) -> None:
    full = row()
    full[f"{name}s"] = full.pop(name)
    if name == "prompt":
        full["promt"] = full.pop("prompts")  # 'prompts' is a reward's own argument and refused as such
    with pytest.raises(DataError, match=rf"line 1: there is no column '{name}'") as caught:
        read_preferences(write(full))
    assert "did you mean" in caught.value.fix


def test_texts_without_a_prompt_say_how_they_get_one(write: Write) -> None:
    with pytest.raises(DataError, match="no column 'prompt'") as caught:
        read_preferences(write({"chosen": "Flat is better.", "rejected": "Flat is worse."}))
    assert "task.format = 'hh'" in caught.value.fix


def test_an_empty_or_missing_file_is_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError, match="has no rows"):
        read_preferences(write(""))
    with pytest.raises(DataError, match="is not there"):
        read_preferences(tmp_path / "none.jsonl")


def test_made_pairs_are_right_wrong_and_the_seed_s() -> None:
    settings: dict = {"size": 300, "digits": 2, "operators": "+-*"}
    examples = arithmetic_examples(**settings, seed=4)
    pairs = PREFERENCES.made(examples, 4)
    assert [(p.index, p.prompt, p.completion) for p in pairs] == [
        (e.index, e.prompt, e.completion) for e in examples
    ]
    gaps = [int(pair.others[0]) - int(str(pair.completion)) for pair in pairs]
    assert 0 not in gaps and min(gaps) == -9 and max(gaps) == 9
    assert 100 < sum(gap > 0 for gap in gaps) < 200, "the larger number is as often right as wrong"
    assert PREFERENCES.made(examples, 4) == pairs
    assert PREFERENCES.made(examples, 5) != pairs


def test_a_pair_is_two_rows_of_one_prompt() -> None:
    pairs = [
        Example(index=7, prompt="17+25=", completion="42", others=("4",), columns={"level": 1}),
        Example(index=2, prompt="3-4=", completion="-1", others=("",)),
    ]
    batch = answered_batch(encoded(pairs), epoch=[3, 4])
    assert batch.row_ids() == [RowId(3, 7, 0), RowId(3, 7, 1), RowId(4, 2, 0), RowId(4, 2, 1)]
    texts = [tokenizer().decode(tokens.tolist()) for tokens in batch.ragged("tokens").rows()]
    assert texts == ["17+25=42", "17+25=4", "3-4=-1", "3-4="]
    assert batch.ragged("loss_mask").sums().tolist() == [3, 2, 3, 1]
    last = batch.ragged("tokens").bounds[1:] - 1
    assert batch.ragged("tokens").values[last].tolist() == [0] * 4, "every answer ends"
    columns = [json.loads(text) for text in batch.ragged("columns").to_text()]
    assert columns[0] == columns[1] == {"prompt": "17+25=", "level": 1}
    chosen = answered_batch(encoded(pairs, kind=DEMONSTRATIONS), epoch=[3, 4])
    assert batch.fields.keys() == chosen.fields.keys()
    assert torch.equal(batch.select([0, 2]).ragged("tokens").values, chosen.ragged("tokens").values)


def test_chats_share_their_template() -> None:
    chat = Example(index=1, prompt=({"role": "user", "content": "hi"},), completion="yes", others=("no",))
    batch = answered_batch(encoded([chat], CHAT), epoch=0)
    texts = [tokenizer().decode(tokens.tolist()) for tokens in batch.ragged("tokens").rows()]
    assert texts == ["user:hi\nassistant:yes\n", "user:hi\nassistant:no\n"]
    last = batch.ragged("tokens").bounds[1:] - 1
    assert batch.ragged("tokens").values[last].tolist() == [0, 0], "a template without an end token gets one"


def test_a_pair_is_as_long_as_its_longer_answer() -> None:
    pair = Example(index=4, prompt="1" * 60, completion="2", others=("2345",))
    assert [row.length(PREFERENCES, 7) for row in encoded([pair])] == [60 + 4 + 1]
    assert [row.length(DEMONSTRATIONS, 7) for row in encoded([pair])] == [60 + 1 + 1]
    assert [row.length(PROMPTS, 7) for row in encoded([pair])] == [60 + 7]


@pytest.mark.parametrize(("name", "says"), [("completion", "chosen"), ("rejected", "rejected")])
def test_an_answer_that_cannot_be_encoded_names_its_row(name: str, says: str) -> None:
    answers = {"completion": "2", "rejected": "3"} | {name: "Z"}
    bad = Example(index=5, prompt="1+1=", completion=answers["completion"], others=(answers["rejected"],))
    with pytest.raises(DataError, match=rf"the {says} answer of prompt 5 .*'Z'"):
        encoded([bad])


def test_pairs_are_split_streamed_and_digested_as_tasks_are(tmp_path: Path, write: Write) -> None:
    config = TaskConfig(size=60, held_out=10, digits=1)
    task = open_task(config, PREFERENCES, base=tmp_path, seed=0)
    assert (len(task.train), len(task.held_out), task.reward) == (50, 10, ())
    assert not {pair.key for pair in task.train} & {pair.key for pair in task.held_out}
    assert task.digest != open_task(config, PROMPTS, base=tmp_path, seed=0).digest
    drawn = PromptStream(encoded(task.train), seed=0).take(60)
    batch = answered_batch([draw.row for draw in drawn], epoch=[draw.epoch for draw in drawn])
    assert len(batch) == 120 and len(set(batch.row_ids())) == 120
    rows = [row(prompt=f"{number}=") for number in range(5)]
    files = TaskConfig(source=write(*rows).name, held_out=2)
    from_file = open_task(files, PREFERENCES, base=tmp_path, seed=0)
    assert (len(from_file.train), len(from_file.held_out)) == (3, 2)
    write(*[pair | {"rejected": "4"} for pair in rows])
    assert open_task(files, PREFERENCES, base=tmp_path, seed=0).digest != from_file.digest


def test_problems_with_one_answer_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'reasoning-gym:chain_sum'"):
        open_task(TaskConfig(source="reasoning-gym:chain_sum"), PREFERENCES, base=tmp_path, seed=0)
    with pytest.raises(DataError, match=r"task\.source is 'arithmetik'"):
        open_task(TaskConfig(source="arithmetik"), PREFERENCES, base=tmp_path, seed=0)
