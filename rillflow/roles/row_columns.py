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
    texts = rows.ragged("columns").to_text() if functions else []
    for name, function in functions.items():
        try:
            added = zip(texts, function(rows), strict=True)
            texts = [json.dumps({**json.loads(text), name: value}, allow_nan=False) for text, value in added]
        except (TypeError, ValueError) as error:
            raise RolloutError(
                f"the column {name!r} of a plugin has no value of JSON for each of {len(rows)} rows",
                why=str(error),
                fix="return a finite number, text, list, dict or None for each row",
            ) from error
    return rows.with_fields(columns=Ragged.from_text(texts)) if functions else rows
