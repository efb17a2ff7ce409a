"""Rows of Arrow tables are those of a JSON file with the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("pyarrow") is None:
    pytest.skip("pyarrow is not installed", allow_module_level=True)

import pyarrow
from pyarrow.parquet import write_table

from rillflow.errors import DataError
from rillflow.tasks.arrow_rows import is_plain, plain_rows, without_nulls
from rillflow.tasks.example import Example, example_of
from rillflow.tasks.files import read_rows
from rillflow.tasks.huggingface import HubSource, hub_rows

ASKED = [{"role": "user", "content": "Go."}]


def tool(name: str, **properties: str) -> dict[str, Any]:
    described = {"properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": described}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


ROWS = [
    {
        "prompt": [*ASKED, {"role": "assistant", "tool_calls": [call(city="Rome")]}, *ASKED],
        "tools": [tool("weather", city="string")],
        "facts": {"a": 1, "b": None},
    },
    {
        "prompt": [
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call(left=1, right=2)]},
            *ASKED,
        ],
        "tools": [tool("sum", left="integer", right="integer")],
        "facts": {"a": None, "b": 2},
    },
]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Example]]:
    """Write rows as JSON lines or as Parquet, and read them."""

    def read(rows: list[dict[str, Any]], ending: str) -> list[Example]:
        path = tmp_path / f"rows{ending}"
        if ending == ".parquet":
            write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_rows(path, example_of)

    return read


def test_a_parquet_file_gives_a_template_the_values_of_the_json_file(
    read: Callable[..., list[Example]],
) -> None:
    lines, table = read(ROWS, ".jsonl"), read(ROWS, ".parquet")
    assert [each.turns for each in table] == [each.turns for each in lines]
    assert [each.tools for each in table] == [each.tools for each in lines] == [row["tools"] for row in ROWS]
    assert [each.columns["facts"] for each in table] == [row["facts"] for row in ROWS], (
        "a reward has all fields"
    )


def test_nulls_of_objects_are_left_out_and_those_of_lists_stay() -> None:
    assert without_nulls({"a": None, "b": [None, {"c": None, "d": 0}], "e": ""}) == {
        "b": [None, {"d": 0}],
        "e": "",
    }


def test_a_whole_number_of_a_column_with_gaps_is_learnt_without_a_fraction(
    read: Callable[..., list[Example]],
) -> None:
    rows = [
        {"prompt": "6*7", "answer": 42.0},
        {"prompt": "?", "answer": None},
        {"prompt": "7/2", "answer": 3.5},
    ]
    assert [each.completion for each in read(rows, ".parquet")] == ["42", None, "3.5"]


def test_numbers_of_single_precision_are_their_shortest_decimals() -> None:
    numbers = pyarrow.array([0.1, None, 1e-7], pyarrow.float32())
    nested = pyarrow.array(
        [{"x": [0.1]}, None, {"x": None}], pyarrow.struct([("x", pyarrow.list_(pyarrow.float32()))])
    )
    batch = pyarrow.record_batch([numbers, nested], names=["n", "s"])
    assert [*plain_rows(batch, ())] == [
        {"n": 0.1, "s": {"x": [0.1]}},
        {"n": None, "s": None},
        {"n": 1e-7, "s": {"x": None}},
    ]


def test_json_values_are_parsed_also_in_lists_and_repeated_texts_are_texts() -> None:
    kind = pyarrow.json_()
    values = pyarrow.ExtensionArray.from_storage(
        kind, pyarrow.array(['{"a": [1, null]}', None, '"x"'], pyarrow.string())
    )
    texts = pyarrow.array(["t", "t", None]).dictionary_encode()
    batch = pyarrow.record_batch([values, texts], names=["j", "t"])
    assert [*plain_rows(batch, ())] == [
        {"j": {"a": [1, None]}, "t": "t"},
        {"j": None, "t": "t"},
        {"j": "x", "t": None},
    ]
    assert is_plain(kind) and is_plain(texts.type) and is_plain(pyarrow.large_list(kind))
    assert not is_plain(pyarrow.timestamp("s")) and not is_plain(pyarrow.struct([("x", pyarrow.binary())]))


def test_a_template_gets_the_nulls_of_json_values_and_not_those_that_fill_structs() -> None:
    schemas = pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(), pyarrow.array(['{"default": null}', '{"enum": [null]}'], pyarrow.string())
    )
    names = pyarrow.array(["f", None])
    tools = pyarrow.StructArray.from_arrays([names, schemas], names=["name", "schema"])
    batch = pyarrow.record_batch([tools, tools], names=["tools", "facts"])
    assert [*plain_rows(batch, ("tools",))] == [
        {
            "tools": {"name": "f", "schema": {"default": None}},
            "facts": {"name": "f", "schema": {"default": None}},
        },
        {"tools": {"schema": {"enum": [None]}}, "facts": {"name": None, "schema": {"enum": [None]}}},
    ]


class Split:
    """A split of a data set on the hub: the part of ``datasets.Dataset`` that reading its rows needs."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.table, self.features = table, SimpleNamespace(arrow_schema=table.schema)

    def select_columns(self, names: list[str]) -> Split:
        return Split(self.table.select(names))

    def with_format(self, kind: str) -> Split:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[pyarrow.Table]:
        assert batch_size > 0
        yield self.table


def test_a_column_of_pictures_is_left_out_unless_the_template_reads_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "picture": [b"1", b"2"]})
    monkeypatch.setattr("rillflow.tasks.huggingface._opened", lambda *_: Split(table))
    source = HubSource(name="owner/data", subset=None, split="train")
    assert [*hub_rows(source, Path())] == [(1, {"prompt": "a"}), (2, {"prompt": "b"})]
    assert "these columns are not read: 'picture'" in caplog.text
    with pytest.raises(DataError, match="'picture' of hf:owner/data has the type binary"):
        next(hub_rows(source, Path(), inputs=["picture"]))
