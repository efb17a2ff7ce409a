"""The rows of a batch as named columns.

    prompts, completions, columns ── one length? ── parameters ──> those the function takes ──> call frame

TRL's rule: prompts and completions by those names, every column of the prompts file by its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rillflow.errors import RewardError, nearest
from rillflow.rewards.frames import FrameError, encode

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


def gather(prompts: Sequence[Text], completions: Sequence[Text], others: Columns) -> Columns:
    """All columns under their names.

    Raises:
        RewardError: another column is called prompts or completions, or the lengths differ.
    """
    columns: Columns = {"prompts": prompts, "completions": completions, **others}
    for name in ("prompts", "completions"):
        if name in others:
            raise RewardError(
                f"a column is called {name!r}",
                why=f"the function gets the {name} of the rollouts under that name",
                fix="rename the column in the prompts file",
            )
    for name, values in columns.items():
        if len(values) != len(prompts):
            raise RewardError(
                f"column {name!r} has {len(values)} values for {len(prompts)} prompts",
                why="every column has one value a row",
            )
    return columns


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


def encode_call(columns: Columns, rows: Sequence[int]) -> bytes:
    """The frame that asks for the scores of these rows.

    Raises:
        RewardError: a value is not JSON, or the frame is too long.
    """
    taken = {name: [values[row] for row in rows] for name, values in columns.items()}
    try:
        return encode({"type": "call", "rows": len(rows), "columns": taken})
    except FrameError as error:
        raise RewardError(
            f"{len(rows)} rows are too much for one call: {error}",
            why="a call is one message",
            fix="raise reward.workers, or take fewer rows a step",
        ) from None
    except (TypeError, ValueError, RecursionError):
        raise _not_json(taken, rows) from None


def _not_json(taken: Mapping[str, list[object]], rows: Sequence[int]) -> RewardError:
    for name, values in taken.items():
        for row, value in zip(rows, values, strict=True):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                return RewardError(
                    f"column {name!r} holds a {type(value).__name__} in row {row}",
                    why=f"it travels to the reward function as JSON: {error}",
                    fix="turn the column into texts, numbers, lists or objects",
                )
    raise AssertionError("a column that cannot be encoded has a value that cannot be encoded")
