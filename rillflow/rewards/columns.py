"""The rows of a batch as named columns.

    prompts, completions, columns ── parameters ──> those the function takes ──> call frame

TRL's rule: prompts and completions by those names, every column of the prompts file by its own.
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
    """What the user's function takes, all by name."""

    accepted: frozenset[str]
    """Its named parameters."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_any: bool
    """Whether it has a ``**columns``."""


def choose(columns: Columns, parameters: Parameters, function: object) -> Columns:
    """The columns the function takes.

    Raises:
        RewardError: it needs one that is not there.
    """
    for name in parameters.required:
        if name not in columns:
            raise RewardError(
                f"{function} needs a column {name!r}",
                why=f"the columns are {', '.join(sorted(columns))}",
                fix=f"{nearest(name, columns)}; or give the parameter a default",
            )
    if parameters.takes_any:
        return columns
    return {name: values for name, values in columns.items() if name in parameters.accepted}


def call_frame(columns: Columns, rows: Sequence[int]) -> Frame:
    """The frame that asks for the scores of these rows."""
    taken = {name: [values[row] for row in rows] for name, values in columns.items()}
    return {"type": "call", "rows": len(rows), "columns": taken}
