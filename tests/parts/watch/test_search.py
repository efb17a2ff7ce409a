"""Search: the same rows as a plain loop over them, whatever the texts and the query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rillflow_parts.watch import search as searching
from rillflow_parts.watch.index import Index, IndexedStep, PackedTexts, Writer
from rillflow_parts.watch.search import Query, occurrences, search
from rillflow_parts.watch.shown import CUT, excerpt

LETTERS = "abAB Äßé4\n\0"


@given(st.binary(max_size=60), st.binary(min_size=1, max_size=3))
def test_every_occurrence_is_found(data: bytes, text: bytes) -> None:
    wanted = [place for place in range(len(data)) if data.startswith(text, place)]
    assert occurrences(data, text).tolist() == wanted


@given(st.lists(st.text(LETTERS, max_size=8), max_size=6))
def test_a_packed_column_is_as_its_texts(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    values = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    column = PackedTexts.of_column(values, np.array([len(each) for each in encoded], dtype=np.int64))
    assert column.data == PackedTexts.of(texts).data
    assert column.ends.tolist() == PackedTexts.of(texts).ends.tolist()
    assert len(column.ends) == len(texts)


def indexed(folder: Path, steps: Sequence[Sequence[dict[str, Any]]]) -> Index:
    """Write steps of rows: text, prompt, reward, length, finish."""
    writer = Writer(folder, folder)
    for step, rows in enumerate(steps, 1):
        given = ("prompt", "reward", "length", "finish")
        columns = {name: np.array([row[name] for row in rows]) for name in given}
        rest = dict.fromkeys(("epoch", "sample", "outcome", "oldest", "newest"), np.zeros(len(rows)))
        prompts = {row["prompt"]: f"prompt {row['prompt']}" for row in rows}
        prompts = {prompt: text for prompt, text in prompts.items() if prompt not in writer.known_prompts}
        texts = PackedTexts.of([row["text"] for row in rows])
        writer.add(step, IndexedStep(columns={**columns, **rest}, texts=texts, prompts=prompts), step)
    writer.close()
    return Index(folder)


rows = st.fixed_dictionaries(
    {
        "text": st.text(LETTERS, max_size=6),
        "prompt": st.integers(0, 3),
        "reward": st.sampled_from([0.0, 0.5, 1.0, float("nan")]),
        "length": st.integers(0, 3),
        "finish": st.integers(0, 2),
    }
)
queries = st.builds(
    Query,
    text=st.text(LETTERS + "p2", max_size=3),
    first_step=st.integers(0, 3),
    last_step=st.integers(1, 5),
    finish=st.sampled_from(["", "stop", "length"]),
    reward_min=st.sampled_from([None, 0.5]),
    reward_max=st.sampled_from([None, 0.7]),
    prompt=st.sampled_from([None, 1]),
    sort=st.sampled_from(["step", "reward", "length"]),
    is_descending=st.booleans(),
)


def plainly(steps: Sequence[Sequence[dict[str, Any]]], query: Query) -> list[int]:
    """Return the numbers of all rows of a query, in its order."""
    numbered = [(step, row) for step, rows in enumerate(steps, 1) for row in rows]
    text = query.text.lower().replace("\0", " ")

    def passes(step: int, row: dict[str, Any]) -> bool:
        texts = (row["text"].lower().replace("\0", " "), f"prompt {row['prompt']}")
        low = query.reward_min is None or row["reward"] >= query.reward_min
        high = query.reward_max is None or row["reward"] <= query.reward_max
        finish = not query.finish or ("", "stop", "length")[row["finish"]] == query.finish
        inside = query.first_step <= step <= query.last_step and query.prompt in (None, row["prompt"])
        return inside and finish and low and high and any(text in each for each in texts)

    found = [place for place, (step, row) in enumerate(numbered) if passes(step, row)]
    if query.sort == "step":
        return found[::-1] if query.is_descending else found
    values = [numbered[place][1][query.sort] for place in found]
    sign = -1 if query.is_descending else 1
    keys = [(value != value, sign * value if value == value else 0) for value in values]
    return [place for _, place in sorted(zip(keys, found, strict=True))]


@settings(max_examples=60)
@given(
    steps=st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=5),
    query=queries,
    count=st.integers(1, 9),
    chunk=st.sampled_from([1, 2**22]),
)
def test_a_search_finds_what_a_loop_finds(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, query: Query, count: int, chunk: int
) -> None:
    index = indexed(tmp_path_factory.mktemp("index"), steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "CHUNK_BYTES", chunk)
        found = search(index, query, count)
    wanted = plainly(steps, query)
    assert (found.total, found.is_total_exact) == (len(wanted), True)
    assert found.rows.tolist() == wanted[:count]


def test_a_search_that_takes_long_says_that_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"text": "a", "prompt": 0, "reward": 1.0, "length": 1, "finish": 1}
    index = indexed(tmp_path, [[row]] * 5)
    monkeypatch.setattr(searching, "LIMIT_S", -1.0)
    monkeypatch.setattr(searching, "CHUNK_BYTES", 1)
    first = search(index, Query(text="a"), 10)
    assert (first.total, first.is_total_exact, first.rows.tolist()) == (1, False, [0])
    last = search(index, Query(text="a", is_descending=True), 10)
    assert last.rows.tolist() == [4], "the search begins where the order begins"


def test_an_excerpt_surrounds_the_first_match() -> None:
    text = "x" * 1000 + "Needle" + "y" * 1000
    shown, marks = excerpt(text, "NEEDLE")
    assert len(shown) <= CUT + 2 and shown[0] == shown[-1] == "…"
    assert [shown[start:stop] for start, stop in marks] == ["Needle"]
    assert excerpt("\U0001f600 a", "a") == ("\U0001f600 a", [[3, 4]]), "a browser counts UTF-16 units"
    assert excerpt("(a)", ")") == ("(a)", [[2, 3]])
    assert excerpt("abc", "") == ("abc", [])
