"""Rows that datasets or pandas has written and read again are those of the JSON file; drawn rows.

Objects have no null: in a struct of a table, a null may be a key that the row lacks.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")

from rillflow.tasks.config import TaskConfig  # noqa: E402
from rillflow.tasks.example import Example  # noqa: E402
from rillflow.tasks.files import given_rows  # noqa: E402
from rillflow.tasks.kinds import DEMONSTRATIONS  # noqa: E402
from rillflow.tasks.task import open_task  # noqa: E402

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NUMBER = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False, width=64)
PLAIN = st.booleans() | st.integers(-(2**31), 2**31) | TEXT
ANY = st.recursive(
    PLAIN, lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXT.filter(bool), part, max_size=3)
)
ARGUMENTS = st.dictionaries(TEXT.filter(bool), ANY, min_size=1, max_size=3)
CALL = st.builds(lambda name, given: {"function": {"name": name, "arguments": given}}, TEXT, ARGUMENTS)
USER = st.builds(lambda text: {"role": "user", "content": text}, TEXT.filter(bool))
SAID = st.builds(lambda text: {"role": "assistant", "content": text}, TEXT)
CALLING = st.builds(
    lambda calls: {"role": "assistant", "tool_calls": calls}, st.lists(CALL, min_size=1, max_size=2)
)
RESULT = st.builds(lambda text, name: {"role": "tool", "content": text, "name": name}, TEXT, TEXT)
TURNS = st.builds(
    lambda first, pairs, last: [first, *(turn for pair in pairs for turn in pair), last],
    USER,
    st.lists(st.tuples(SAID | CALLING, RESULT | USER), max_size=2),
    SAID | CALLING,
)
COLUMNS = {
    "number": NUMBER,
    "whole": st.none() | st.integers(-(2**31), 2**31),
    "texts": st.lists(TEXT, max_size=3),
    "part": st.builds(lambda a, b: {"a": a, "b": b}, TEXT, st.integers(0, 9)),
    "tools": st.lists(
        st.builds(lambda given: {"type": "function", "function": given}, ARGUMENTS), max_size=2
    ),
}
ROWS = st.lists(
    st.builds(lambda turns, **more: {"messages": turns, **more}, TURNS, **COLUMNS), min_size=1, max_size=4
)


def read(source: str) -> list[Example]:
    return [*open_task(TaskConfig(source=source, held_out=0), DEMONSTRATIONS, base=Path("/"), seed=0).train]


def told(examples: list[Example]) -> list[Any]:
    return [
        (each.turns, each.completion, {name: value for name, value in each.columns.items() if value != []})
        for each in sorted(examples, key=lambda each: each.index)
    ]


def tabulated(rows: list[dict[str, Any]]) -> Any:
    """Return the rows as datasets infers their types; with JSON types for what it cannot infer."""
    try:
        return datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    except (pyarrow.ArrowInvalid, TypeError):
        names = ("messages", "tools")
        more = datasets.Dataset.from_list([{k: v for k, v in row.items() if k not in names} for row in rows])
        nested = {name: datasets.List(datasets.Json()) for name in names}
        return datasets.Dataset.from_list(rows, features=datasets.Features({**more.features, **nested}))


@settings(
    max_examples=100,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[*HealthCheck],
)
@given(rows=ROWS)
def test_a_table_has_the_values_of_its_json_file(rows: list[dict[str, Any]]) -> None:
    rows = json.loads(json.dumps(rows))
    if any(isinstance(row["number"], float) for row in rows):
        for row in rows:
            row["number"] = float(row["number"])
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = tabulated(rows)
        table.to_parquet(folder / "table.parquet")
        table.save_to_disk(folder / "saved")
        wanted = told(read(str(file)))
        assert told(read(str(folder / "table.parquet"))) == wanted
        assert told(read(f"hf:{folder / 'saved'}")) == wanted
        for held in (table, pandas.DataFrame(rows)):
            assert told(given_rows(held, DEMONSTRATIONS.read)) == wanted
    assert all(math.isfinite(row["number"]) for row in rows)
