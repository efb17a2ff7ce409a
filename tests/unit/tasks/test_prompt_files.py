"""Prompts files: valid content, and the error of every invalid row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow.errors import DataError
from rillflow.tasks.files import read_rows
from rillflow.tasks.kinds import PROMPTS

pyarrow = pytest.importorskip("pyarrow")
parquet_files = pytest.importorskip("pyarrow.parquet")

read_examples = partial(read_rows, make=PROMPTS.read)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*rows: object, name: str = "rows.jsonl") -> Path:
        text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(text) + "\n", encoding="utf-8")
        return tmp_path / name

    return lines


def problem_of(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        read_examples(path)
    assert str(path) in caught.value.what
    assert caught.value.why
    return caught.value


def test_rows_become_examples(write: Write) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    path = write(
        {"prompt": "1+1=", "answer": 2, "level": None},
        "",
        {"prompt": chat, "answer": "hello", "level": [1, {"a": 0.5}]},
    )
    first, second = read_examples(path)
    assert (first.index, first.prompt, first.completion) == (0, "1+1=", "2")
    assert dict(first.columns) == {"answer": 2, "level": None}
    assert (second.index, second.prompt, second.completion) == (1, tuple(chat), "hello")
    assert second.columns["level"] == [1, {"a": 0.5}]
    assert json.loads(second.as_json()) == {"prompt": chat, "answer": "hello", "level": [1, {"a": 0.5}]}


@pytest.mark.parametrize(
    ("row", "completion"),
    [
        ({"completion": "c", "answer": "a"}, "c"),
        ({"completion": None, "answer": "a"}, None),
        ({"answer": 0.5}, "0.5"),
        ({"answer": [1]}, None),
        ({"answer": True}, None),
        ({"answer": None}, None),
        ({}, None),
        ({"completion": ""}, ""),
    ],
)
def test_the_answer_to_learn_from(write: Write, row: dict, completion: str | None) -> None:
    (example,) = read_examples(write({"prompt": "p", **row}))
    assert example.completion == completion
    assert dict(example.columns) == {name: value for name, value in row.items() if name != "completion"}


def test_messages_may_have_names_calls_and_parts_of_text(write: Write) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": t} for t in ("what ", "is it?")],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (example,) = read_examples(write({"prompt": chat, "tools": tools, "completion": "two"}))
    assert example.prompt[0] == chat[0], "a reward sees what its author wrote"
    assert example.turns == [
        {"role": "user", "name": "ann", "content": "what is it?"},
        {"role": "assistant", "tool_calls": [call], "content": ""},
        chat[2],
    ]
    assert example.tools == tools == example.columns["tools"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("", {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("{cut", "{cut"),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_of_a_call_that_are_the_text_of_an_object_are_the_object_for_a_template(
    write: Write, written: object, read: object
) -> None:
    whole = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": written}}
    chat = [{"role": "assistant", "tool_calls": [whole, {"name": "add", "arguments": written}]}]
    chat.append({"role": "user", "content": "and?"})
    (example,) = read_examples(write({"prompt": chat, "tools": []}))
    first, second = example.turns[0]["tool_calls"]
    assert first == {**whole, "function": {"name": "add", "arguments": read}}
    assert second == {"name": "add", "arguments": read}
    assert example.prompt[0] == chat[0], "a reward sees what its author wrote"
    assert example.tools is None, "no tools"


def test_an_answer_may_be_a_message_of_the_assistant(write: Write) -> None:
    row = {"prompt": "p", "completion": [{"role": "assistant", "content": "c"}]}
    assert read_examples(write(row))[0].completion == "c"


def test_rows_know_their_lines(tmp_path: Path, write: Write) -> None:
    path = write({"prompt": "a"}, "", {"prompt": "b"})
    assert [example.place for example in read_examples(path)] == ["rows.jsonl line 1", "rows.jsonl line 3"]
    made = read_examples(parquet(tmp_path / "rows.parquet", prompt=["a", "b"]))
    assert [str(example) for example in made] == ['rows.parquet row 1 ("a")', 'rows.parquet row 2 ("b")']


def test_one_row_is_enough(write: Write) -> None:
    assert len(read_examples(write({"prompt": "only"}))) == 1


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [example.prompt for example in read_examples(path)] == ["a", "b"]


def test_text_that_spells_a_special_token_is_text(write: Write) -> None:
    (example,) = read_examples(write({"prompt": "say <|end|></s> and \u0000 too"}))
    assert example.prompt == "say <|end|></s> and \u0000 too"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.text(st.characters(codec="utf-8"), min_size=1),
                "x": st.none()
                | st.integers()
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(st.characters(codec="utf-8")),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_what_json_writes_is_what_is_read(tmp_path_factory: Any, rows: list[dict], ascii_only: bool) -> None:
    path = tmp_path_factory.mktemp("law") / "rows.jsonl"
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    path.write_text(text, encoding="utf-8", newline="")
    assert [{"prompt": e.prompt, **e.columns} for e in read_examples(path)] == rows


GOOD = {"prompt": "p", "a": 1}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"a": 1, "propmt": "x"}, ["line 1", "no column 'prompt'", "did you mean 'propmt'"]),
        ({}, ["line 1", "no column 'prompt'"]),
        ({"prompt": None}, ["line 1", "the prompt is null"]),
        ({"prompt": ""}, ["line 1", "the prompt is empty"]),
        ({"prompt": 5}, ["line 1", "the prompt is 5"]),
        ({"prompt": {"text": "x"}}, ["line 1", '{"text": "x"}']),
        ({"prompt": []}, ["line 1", "[]"]),
        ({"prompt": ["hi"]}, ["message 1", '"hi"']),
        ({"prompt": [{"role": "user"}]}, ["message 1", "'role'"]),
        ({"prompt": [{"role": "user", "content": "a", "mood": "b"}]}, ["message 1", "'mood'"]),
        ({"prompt": [{"role": "user", "content": "a", "name": 7}]}, ["message 1", "the name 7"]),
        ({"prompt": [{"role": "tool", "content": "a", "tool_call_id": [1]}]}, ["the tool_call_id [1]"]),
        ({"prompt": [{"role": "user", "content": "", "tool_calls": ["f"]}]}, ['tool_calls ["f"]']),
        ({"prompt": [{"role": "user", "content": None}]}, ["message 1", "'content'"]),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]},
            ["message 1 of the prompt", '"image_url"', "content is text"],
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            ["the content", "1"],
        ),
        ({"prompt": [{"role": "user", "content": "a"}], "tools": "f(x)"}, ["column 'tools'", '"f(x)"']),
        ({"prompt": "p", "completion": [{"role": "user", "content": "c"}]}, ["completion", "of user"]),
        ({"prompt": [{"role": "usr", "content": "a"}]}, ['"usr"', "did you mean 'user'"]),
        ({"prompt": [{"role": 3, "content": "a"}]}, ["the role 3"]),
        ({"prompt": [{"role": "user", "content": ["a"]}]}, ['content ["a"]']),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            ["assistant's"],
        ),
        ({"prompt": "p", "completion": 3}, ["the completion is 3", "one assistant message"]),
        ({"prompt": "p", "completions": "c"}, ["a column 'completions'", "'completion'"]),
        ({"prompt": "p", "prompts": "c"}, ["a column 'prompts'", "'prompt'"]),
        ({"prompt": "p", "id": [1]}, ["the id is [1]"]),
        ({"prompt": "p", "id": None}, ["the id is null"]),
        ('["prompt"]', ["line 1", "JSON object"]),
        ('"prompt"', ["line 1", "JSON object"]),
        ('{"prompt": "p",}', ["line 1", "not JSON", "column"]),
        ('{"prompt": "p"} {"prompt": "q"}', ["line 1", "not JSON"]),
        ("{'prompt': 'p'}", ["line 1", "{'prompt': 'p'}"]),
        ('{"prompt": "p", "a": NaN}', ["line 1", "NaN"]),
        ('{"prompt": "p", "a": [-Infinity]}', ["line 1", "-Infinity"]),
        ('{"prompt": "p", "a": 1e999}', ["line 1", "1e999"]),
        ('{"prompt": "a\\ud800b"}', ["line 1", "lone surrogate", "\\ud800"]),
        ('{"prompt": "p", "a": 1, "prompt": "q"}', ["line 1", "the key 'prompt' occurs twice"]),
        ('{"prompt": "p", "a": [{"b": 1, "b": 1}]}', ["line 1", "the key 'b' occurs twice"]),
        ('{"prompt": "p", "a": ' + "[" * 100_000, ["line 1", "nested too deeply"]),
    ],
)
def test_a_bad_row_is_named_with_its_value(write: Write, row: object, says: list[str]) -> None:
    text = str(problem_of(write(row)))
    assert all(part in text for part in says), text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "p"}, "line 3: there is no column 'a', which line 1 has"),
        ({**GOOD, "b": 2}, "line 3: there is a column 'b', which line 1 does not have"),
        ({**GOOD, "prompt": None}, "line 3: the prompt is null"),
    ],
)
def test_a_later_row_is_named_by_its_line(write: Write, row: dict, says: str) -> None:
    assert says in problem_of(write(GOOD, "", row)).what


def test_a_repeated_id_names_both_rows(write: Write) -> None:
    path = write({"prompt": "a", "id": "x1"}, {"prompt": "b", "id": "x2"}, {"prompt": "c", "id": "x1"})
    assert "line 3: the id 'x1' is also at line 1" in problem_of(path).what


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert "line 2: byte 16 is 0xe9" in problem_of(path).what


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert "has no rows" in problem_of(tmp_path / "rows.jsonl").what


def test_paths_that_are_no_prompts_file(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").write_text("prompt\n")
    assert "is a directory" in problem_of(tmp_path / "folder.jsonl").what
    assert "is a directory" in problem_of(tmp_path / "folder").what
    assert "ends in '.csv'" in problem_of(tmp_path / "rows.csv").what
    assert "is not there" in problem_of(tmp_path / "rows.jsonl").what
    error = problem_of(tmp_path / "folder" / ".." / ".." / "rows.jsonl")
    assert str((tmp_path.parent / "rows.jsonl").resolve()) in error.why, "'..' is resolved in the message"


def test_a_line_of_ten_megabytes(write: Write) -> None:
    text = "x" * 10_000_000
    assert len(read_examples(write({"prompt": text}, {"prompt": "short"}))[0].prompt) == 10_000_000
    assert len(str(problem_of(write(f'["{text}"]')))) < 1000, "a message shows an excerpt"
    assert len(str(problem_of(write(f'{{"prompt": "{text}" oops')))) < 1000


def test_a_hundred_thousand_rows_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = '{{"id": {0}, "prompt": "problem {0}: how much is it? Think.", "answer": "{0}", "level": 0.5}}'
    path.write_text("\n".join(row.format(number) for number in range(100_000)))
    started = time.process_time()
    assert len(read_examples(path)) == 100_000
    assert time.process_time() - started < 20, "about 1.2 s; minutes if a row is compared with all before"


def parquet(path: Path, **columns: list) -> Path:
    parquet_files.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_rows_are_those_of_the_same_json(tmp_path: Path, write: Write) -> None:
    rows = [
        {"prompt": f"p{n}", "answer": str(n), "tags": [n, n + 1], "about": {"level": n / 2}} for n in range(5)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert read_examples(parquet(tmp_path / "rows.parquet", **columns)) == read_examples(write(*rows))


def test_parquet_chats(tmp_path: Path) -> None:
    chat = [[{"role": "user", "content": "hi"}]]
    (example,) = read_examples(parquet(tmp_path / "rows.parquet", prompt=chat))
    assert example.prompt == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": ["a", None]}, "row 2: the prompt is null"),
        ({"text": ["a"]}, "row 1: there is no column 'prompt'"),
        ({"prompt": ["a", "b"], "x": [1.0, float("nan")]}, "row 2: column 'x' has nan"),
        ({"prompt": ["a"], "x": [[{"y": float("inf")}]]}, "row 1: column 'x' has inf"),
        ({"prompt": ["a"], "when": [date(2024, 5, 6)]}, "row 1: column 'when' has a date"),
        ({"prompt": ["a"], "raw": [b"\x00"]}, "row 1: column 'raw' has a bytes"),
        ({"prompt": ["a"], "cost": [Decimal("1.50")]}, "row 1: column 'cost' has a Decimal"),
        ({"prompt": ["a", "b"], "id": [7, 7]}, "row 2: the id 7 is also at row 1"),
        ({"prompt": []}, "has no rows"),
    ],
)
def test_a_bad_parquet_row_is_named(tmp_path: Path, columns: dict, says: str) -> None:
    assert says in problem_of(parquet(tmp_path / "rows.parquet", **columns)).what


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense PAR1", b'{"prompt": "a"}\n'])
def test_a_file_that_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(content)
    assert "cannot be read as Parquet" in problem_of(tmp_path / "rows.parquet").what


@pytest.mark.parametrize(
    ("begin", "told"),
    [(b"\x1f\x8b\x08\x00", "gunzip -c"), (b"\xff\xfe{\x00", "iconv -f utf-16"), (b"PK\x03\x04\xff", "unzip")],
)
def test_another_format_gets_its_own_advice(tmp_path: Path, begin: bytes, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(begin + b"\xff\x00" * 20)
    assert told in problem_of(path).fix


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.symlink_to(path)
    assert "is a link without a target" in problem_of(path).what
