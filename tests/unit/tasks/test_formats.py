"""Published layouts of data become conversations, or are refused by the place that is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rillflow.errors import DataError
from rillflow.tasks.config import TaskConfig
from rillflow.tasks.example import Example
from rillflow.tasks.kinds import DEMONSTRATIONS, DataKind
from rillflow.tasks.preference import PREFERENCES
from rillflow.tasks.task import open_task

CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def read(folder: Path, rows: list[dict[str, Any]], kind: DataKind, **settings: Any) -> list[Example]:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = TaskConfig(source="rows.jsonl", held_out=0, **settings)
    return [*open_task(config, kind, base=folder, seed=0).train]


def spoken(*turns: str) -> list[dict[str, str]]:
    """Return turns of a human and a model, in turn."""
    return [{"from": "gpt" if place % 2 else "human", "value": text} for place, text in enumerate(turns)]


def test_sharegpt_is_a_conversation_whose_last_turn_is_learnt(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "conversations": spoken("hi", "hello", "6 * 7?", "42"), "system": "Be brief."},
        {"id": "b", "conversations": spoken("1 + 1?", "2"), "system": ""},
    ]
    first, second = read(tmp_path, rows, DEMONSTRATIONS, format="sharegpt")
    assert [(turn["role"], turn["content"]) for turn in first.turns] == [
        *(("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "6 * 7?")),
    ]
    assert (first.completion, second.completion) == ("42", "2")
    assert [turn["role"] for turn in second.turns] == ["user"] and first.columns == {"id": "a"}


def test_calls_and_tools_of_sharegpt_are_read(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    (row,) = read(
        tmp_path, [{"conversations": turns, "tools": json.dumps(TOOLS)}], DEMONSTRATIONS, format="sharegpt"
    )
    assert [turn["role"] for turn in row.turns] == ["user", "assistant", "tool"]
    assert row.turns[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert row.tools == TOOLS and row.completion == "It is sunny."


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    first, second = read(tmp_path, rows, DEMONSTRATIONS, format="alpaca")
    assert first.turns == [{"role": "user", "content": "Add.\n\n1 and 2"}] and first.completion == "3"
    assert second.turns == [{"role": "user", "content": "Say hi."}]
    more = {**rows[0], "system": "Be brief.", "history": [["a", "b"]]}
    (third,) = read(tmp_path, [more], DEMONSTRATIONS, format="alpaca")
    assert [turn["content"] for turn in third.turns] == ["Be brief.", "a", "b", "Add.\n\n1 and 2"]
    renamed = [{"q": "Add.", "output": "3"}]
    (fourth,) = read(tmp_path, renamed, DEMONSTRATIONS, format="alpaca", columns={"instruction": "q"})
    assert fourth.turns == [{"role": "user", "content": "Add."}]


def test_hh_is_a_pair_of_conversations_with_one_prompt(tmp_path: Path) -> None:
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 6 * 7?\n\nAssistant:"
    rows = [{"chosen": f"{start} 42", "rejected": f"{start} 41, I think: 6\n7"}]
    (row,) = read(tmp_path, rows, PREFERENCES, format="hh")
    assert [turn["content"] for turn in row.turns] == ["hi", "hello", "6 * 7?"]
    assert (row.completion, row.others) == ("42", ("41, I think: 6\n7",))


@pytest.mark.parametrize(
    ("format_", "row", "said"),
    [
        ("sharegpt", {"messages": []}, "no column 'conversations'"),
        ("sharegpt", {"conversations": []}, "conversations is []"),
        ("sharegpt", {"conversations": [{"role": "user", "content": "x"}]}, "message 1 of conversations"),
        ("sharegpt", {"conversations": spoken("a", "b"), "tools": "{"}, "tools is"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, '"alien"'),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "x"}]}, "function_call"),
        ("alpaca", {"instruction": "x"}, "no column 'output'"),
        ("alpaca", {"instruction": "x", "output": 3}, "output is 3"),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a"]]}, "history has"),
        ("hh", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "b"}, "rejected is"),
    ],
)
def test_what_a_format_cannot_be_is_refused(
    tmp_path: Path, format_: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1") as refused:
        read(tmp_path, [row], PREFERENCES if format_ == "hh" else DEMONSTRATIONS, format=format_)
    assert said in f"{refused.value.what}; {refused.value.why}"


def test_a_text_is_learnt_whole(tmp_path: Path) -> None:
    rows = [{"text": "once upon a time"}, {"text": "the end"}]
    first, second = read(tmp_path, rows, DEMONSTRATIONS)
    assert (first.prompt, first.completion) == ("", "once upon a time")
    assert first.identity(()) != second.identity(()) and first.key == "once upon a time"
    with pytest.raises(DataError, match="the text is 3"):
        read(tmp_path, [{"text": 3}], DEMONSTRATIONS)
    with pytest.raises(DataError, match="there is no column 'prompt'"):
        read(tmp_path, rows, PREFERENCES)
