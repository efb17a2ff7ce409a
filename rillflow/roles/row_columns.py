"""Row columns: add the columns that plugins bring to the rows that a sampler returns.

rows ─ a function of each column ─> a value for each row ─> JSON in the field ``columns``
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rillflow.errors import RolloutError
from rillflow.records.batch import Batch
from rillflow.records.ragged import Ragged


def with_columns(rows: Batch, functions: Mapping[str, Callable[[Batch], Sequence[Any]]]) -> Batch:
    """Return rows with a further column for each function, which returns one value of JSON a row.

    Raises:
        RolloutError: a function returns something else.
    """
    if not functions or not len(rows):
        return rows
    columns = [json.loads(text) for text in rows.ragged("columns").to_text()]
    for name, function in functions.items():
        values = list(function(rows))
        if len(values) != len(rows):
            raise RolloutError(
                f"the column {name!r} of a plugin has {len(values)} values for {len(rows)} rows",
                why="each row has one value",
                fix="return None for a row without a value",
            )
        for row, value in zip(columns, values, strict=True):
            row[name] = value
    try:
        texts = [json.dumps(row, allow_nan=False) for row in columns]
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"a column of a plugin ({', '.join(functions)}) cannot be written as JSON",
            why=str(error),
            fix="return finite numbers, texts, lists and dicts",
        ) from error
    return rows.with_fields(columns=Ragged.from_text(texts))
