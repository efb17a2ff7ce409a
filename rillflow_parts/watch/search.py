"""Search: rows of a run by text, step, outcome, finish, reward and prompt, in an order.

    Query ─ columns ─> rows that pass the filters ─ text of their steps, chunk by chunk ─> rows with the text
                                                                       └─ order ─> one page of rows

The query is one text, found anywhere in a prompt or an answer, whatever the case of its letters. Words are
not cut, so ``42`` is also found in ``1425``. A search reads all text of the steps in question, at memory
speed; it stops after LIMIT_S, and then counts only what it read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rillflow_parts.watch.index import FINISHES, OUTCOMES, UNKNOWN, Index

LIMIT_S = 1.0
"""Seconds after which a search stops reading text."""
CHUNK_BYTES = 2**22
"""Bytes of text that are searched at once."""
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a row must have."""

    text: str = ""
    """Text in its prompt or answer; empty for any."""
    first_step: int = 0
    """First step."""
    last_step: int = 2**62
    """Last step."""
    outcome: str = ""
    """Outcome of scoring; empty for any."""
    finish: str = ""
    """Reason of its end; empty for any."""
    reward_min: float | None = None
    """Least reward; None for any, also without a reward."""
    reward_max: float | None = None
    """Largest reward."""
    prompt: int | None = None
    """Id of its prompt; None for any."""
    sort: Literal["step", "reward", "length"] = "step"
    """Order of the rows; equal rows are in order of step."""
    is_descending: bool = False
    """Whether the largest comes first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The rows that were found."""

    rows: Ints
    """Numbers of the first rows in the index, in the order of the query."""
    total: int
    """Number of all rows that were found."""
    is_total_exact: bool
    """Whether every row was looked at."""
    took_s: float
    """Seconds of the search."""


def search(index: Index, query: Query, count: int) -> Found:
    """Return the first ``count`` rows of a query, at least 1."""
    began, is_exact = time.monotonic(), True
    steps = index.blocks["step"]
    first = int(np.searchsorted(steps, query.first_step, "left"))
    last = int(np.searchsorted(steps, query.last_step, "right")) - 1
    if last < first:
        return Found(rows=np.zeros(0, dtype=np.int64), total=0, is_total_exact=True, took_s=0.0)
    start = int(index.blocks[first]["first"])
    stop = int(index.blocks[last]["first"] + index.blocks[last]["rows"])
    passing = _filtered(index, query, start, stop)
    text = query.text.lower().replace("\0", " ").encode("utf-8", "replace")
    if text:
        asked = _asked(index, text)[index.column("question", start, stop)]
        found = np.zeros(stop - start, dtype=bool)
        found[: len(asked)] = asked
        is_descending = query.sort == "step" and query.is_descending
        for low, high, hits in _searched(index, text, passing & ~found, start, (first, last), is_descending):
            found[low:high] |= hits
            if time.monotonic() - began > LIMIT_S:
                is_exact = False
                break
        passing &= found
    return Found(
        rows=_ordered(index, query, start, passing, count),
        total=int(np.count_nonzero(passing)),
        is_total_exact=is_exact,
        took_s=time.monotonic() - began,
    )


def _filtered(index: Index, query: Query, start: int, stop: int) -> Bools:
    """Return which rows pass everything but the text, [stop - start]."""
    passing = np.ones(stop - start, dtype=bool)

    def keep(column: str, test: Any) -> None:
        values = index.column(column, start, stop)
        passing[: len(values)] &= test(values)
        passing[len(values) :] = False

    if query.outcome:
        number = OUTCOMES.index(query.outcome) if query.outcome in OUTCOMES else UNKNOWN
        keep("outcome", lambda values: values == number)
    if query.finish:
        reason = FINISHES.index(query.finish) if query.finish in FINISHES else UNKNOWN
        keep("finish", lambda values: values == reason)
    if query.reward_min is not None:
        keep("reward", lambda values: values >= np.float32(query.reward_min))
    if query.reward_max is not None:
        keep("reward", lambda values: values <= np.float32(query.reward_max))
    if query.prompt is not None:
        keep("prompt", lambda values: values == query.prompt)
    return passing


def _asked(index: Index, text: bytes) -> Bools:
    """Return which prompts contain a text, [prompts]."""
    data, ends = index.questions()
    return _rows_with(occurrences(data, text), ends)


def _rows_with(places: Ints, ends: Ints) -> Bools:
    """Return which rows hold one of the ascending places; ``ends`` are the rows' ends."""
    if len(places) > len(ends):
        return np.diff(np.searchsorted(places, ends, "left"), prepend=0) > 0
    found = np.zeros(len(ends) + 1, dtype=bool)
    found[np.searchsorted(ends, places, "right")] = True
    return found[:-1]


def _searched(
    index: Index, text: bytes, wanted: Bools, start: int, ends: tuple[int, int], is_descending: bool
) -> Iterator[tuple[int, int, Bools]]:
    """Yield parts of ``wanted`` in the order of the search: start, stop, and which rows have the text."""
    chunks = list(_chunks(index, *ends))
    for first, last in reversed(chunks) if is_descending else chunks:
        low = int(index.blocks[first]["first"]) - start
        high = int(index.blocks[last]["first"] + index.blocks[last]["rows"]) - start
        if not wanted[low:high].any():
            continue
        blocks = index.blocks[first : last + 1]
        bounds = index.column("end", low + start, high + start).astype(np.int64)
        bounds += np.repeat(blocks["start"] - blocks["start"][0], blocks["rows"])[: len(bounds)]
        yield low, high, _rows_with(occurrences(index.text(first, last), text), bounds)


def _chunks(index: Index, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last block of parts with about CHUNK_BYTES of text."""
    sums = np.cumsum(index.blocks["bytes"][first : last + 1])
    begun = first
    while begun <= last:
        before = int(sums[begun - first - 1]) if begun > first else 0
        reached = first + int(np.searchsorted(sums, before + CHUNK_BYTES, "left"))
        yield begun, min(reached, last)
        begun = reached + 1


def occurrences(data: bytes, text: bytes) -> Ints:
    """Return the places of a text in data.

    The rarest byte of the text is compared first; the others only where it is.
    """
    values = np.frombuffer(data, dtype=np.uint8)
    if len(values) < len(text):
        return np.zeros(0, dtype=np.int64)
    sample = np.bincount(values[:: max(1, len(values) // 4096)], minlength=256)
    order = sorted(range(len(text)), key=lambda place: sample[text[place]])
    reach = len(values) - len(text) + 1
    places = np.flatnonzero(values[order[0] : order[0] + reach] == text[order[0]])
    for place in order[1:]:
        if not len(places):
            break
        places = places[values[places + place] == text[place]]
    return places


def _ordered(index: Index, query: Query, start: int, passing: Bools, count: int) -> Ints:
    """Return the first ``count`` rows that pass in the order of the query."""
    if query.sort == "step":
        return start + _outermost(passing, count, is_last=query.is_descending)
    values = index.column(query.sort, start, start + len(passing)).astype(np.float32)
    keys = -values if query.is_descending else values
    keys[~passing[: len(keys)] | np.isnan(keys)] = np.inf
    if (
        len(keys) > count
    ):  # sort only the shown rows: those before the last one's key, and enough of its equals
        limit = np.partition(keys, count - 1)[count - 1]
        before = np.flatnonzero(keys < limit)
        equal = np.flatnonzero((keys == limit) & passing[: len(keys)])[: count - len(before)]
        kept = np.concatenate([before, equal])
    else:
        kept = np.flatnonzero(passing[: len(keys)])
    return start + kept[np.argsort(keys[kept], kind="stable")]


def _outermost(passing: Bools, count: int, *, is_last: bool) -> Ints:
    """Return the first places that pass; or the last ones, from the last on."""
    parts, found, size = list[Ints](), 0, 2**16
    for begun in range(0, len(passing), size):
        low = max(0, len(passing) - begun - size) if is_last else begun
        high = len(passing) - begun if is_last else begun + size
        part = low + np.flatnonzero(passing[low:high])
        parts.append(part[::-1] if is_last else part)
        found += len(part)
        if found >= count:
            break
    return np.concatenate(parts)[:count] if parts else np.zeros(0, dtype=np.int64)
