"""Columns: the rows of a batch as named columns.

    prompts, completions, columns ── parameters ──> those the function takes ──> call frame

As in TRL, prompts and completions are passed by these names, every column of the prompts file by its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rillflow.errors import RewardError, nearest
from rillflow.rewards.frames import Frame

Text = str | Sequence[Mapping[str, object]]
"""A prompt or a completion: a text, or a list of chat messages."""

Columns = Mapping[str, Sequence[object]]
"""JSON values by column name, each column [B]."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of the user's function, all by name."""

    accepted: frozenset[str]
    """Named parameters."""
    required: tuple[str, ...]
    """Parameters without a default."""
    takes_any: bool
    """Whether the function has ``**columns``."""


def choose(columns: Columns, parameters: Parameters, function: object) -> Columns:
    """Return the columns that the function takes.

    Raises:
        RewardError: a required column is missing.
    """
    for name in parameters.required:
        if name not in columns:
            raise RewardError(
                f"{function} needs a column {name!r}",
                why=f"the columns are {', '.join(sorted(columns))}",
                fix=f"{nearest(name, columns)}; or give the parameter a default value",
            )
    if parameters.takes_any:
        return columns
    return {name: values for name, values in columns.items() if name in parameters.accepted}


def call_frame(columns: Columns, rows: Sequence[int]) -> Frame:
    """Return the frame that requests the scores of these rows."""
    taken = {name: [values[row] for row in rows] for name, values in columns.items()}
    return {"type": "call", "rows": len(rows), "columns": taken}
