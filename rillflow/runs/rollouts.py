"""Rollouts in columns: join the files that ranks wrote for one step, row by row.

    step-N-0001-of-0003.safetensors   ids, tokens, versions, ...  sampled data of one rank and its columns
    step-N-0003-of-0003.safetensors   ids, rewards, ...           values computed elsewhere for the same rows

Texts are UTF-8 bytes. A column with rows of different lengths has values and lengths. Reading needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from rillflow.errors import RunDirectoryError
from rillflow.records.row import RowId
from rillflow.runs.json_lines import JSON

NAMES = {"sampler_logprobs": "logprobs", "rewards": "reward", "costs": "cost", "advantages": "advantage"}
NAMES |= {"penalised": "penalised_reward"}
"""Names of columns for readers, by their name in the file."""


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One row of one step. The per-token tuples are aligned to ``tokens``; see ``sampled``."""

    row: RowId
    """Stable id of the row."""
    prompt: str
    """Text of the prompt; chat messages become one paragraph each."""
    completion: str = ""
    """Text of the sampled tokens."""
    tokens: tuple[int, ...]
    """Token ids of the prompt and everything after it."""
    token_texts: tuple[str, ...] = ()
    """Text of each token; empty if not recorded."""
    logprobs: tuple[float, ...]
    """The sampler's log probability of each token; 0 for tokens that were not sampled."""
    versions: tuple[int, ...]
    """Weight version that sampled each token; -1 for tokens that were not sampled."""
    finish: str
    """Reason for the end: stop, length or aborted."""
    reward: float | None = None
    """Reward; None if the outcome is not a score."""
    outcome: str = ""
    """Outcome of scoring: score, abstain, timeout or error; empty if nothing scored the row."""
    message: str = ""
    """Message of scoring for an outcome that is not a score."""
    penalised_reward: float | None = None
    """Reward after penalties; None if no penalty changed it."""
    advantage: float | None = None
    """Advantage; None without one."""
    parts: Mapping[str, JSON] = field(default_factory=dict)
    """Score of each reward function by name, before its weight, if several are summed."""
    columns: Mapping[str, JSON] = field(default_factory=dict)
    """Other columns of the prompt."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """Positions of the sampled tokens."""
        return tuple(place for place, version in enumerate(self.versions) if version >= 0)


def read_columns(files: Sequence[Path]) -> dict[str, list[Any]]:
    """Read the columns of a step, one entry per row; None for a row without a value.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    parts = [_part(file) for file in files]
    ids = [row for part in parts if "tokens" in part for row in part["ids"]]
    places = {row: place for place, row in enumerate(ids)}
    names = ("epoch", "prompt_id", "sample")
    columns: dict[str, list[Any]] = {name: [row[index] for row in ids] for index, name in enumerate(names)}
    before = 0
    for part in parts:
        rows = part.pop("ids")
        here: Sequence[int | None] = [places.get(row) for row in rows]
        if "tokens" in part:
            here, before = range(before, before + len(rows)), before + len(rows)
        for name, values in part.items():
            column = columns.setdefault(NAMES.get(name, name), [None] * len(ids))
            for place, value in zip(here, values, strict=True):
                if place is not None:
                    column[place] = value
    return spoken_columns(columns)


def rollout_records(columns: Mapping[str, Sequence[Any]], texts: Sequence[str]) -> list[RolloutRecord]:
    """Convert columns to one record per row; ``texts`` holds the text of every token id."""
    names = [each.name for each in fields(RolloutRecord) if each.name in columns]
    records = []
    for index, tokens in enumerate(columns["tokens"]):
        known: dict[str, Any] = {name: columns[name][index] for name in names}
        known = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
        known["row"] = RowId(*(columns[name][index] for name in ("epoch", "prompt_id", "sample")))
        known["prompt"] = prompt_text(columns["prompt"][index])
        if max(tokens, default=0) < len(texts):
            known["token_texts"] = tuple(texts[token] for token in tokens)
        records.append(RolloutRecord(**{name: each for name, each in known.items() if each is not None}))
    return records


def _part(file: Path) -> dict[str, list[Any]]:
    """Read the columns of one file."""
    try:
        arrays = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(f"cannot read {file}", why=str(error), fix="restore the file") from error
    found: dict[str, list[Any]] = {"ids": [tuple(row) for row in arrays.pop("ids").tolist()]}
    for key, array in arrays.items():
        name, _, kind = key.partition(":")
        if kind == "values":
            ends = np.concatenate([[0], np.cumsum(arrays[f"{name}:lengths"])]).tolist()
            data = array.tobytes() if array.dtype == np.uint8 else array.tolist()
            found[name] = [data[start:stop] for start, stop in pairwise(ends)]
            if isinstance(data, bytes):
                found[name] = [text.decode() for text in found[name]]
        elif not kind:
            found[name] = array.tolist()
    return found


def spoken_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Prepare columns for readers: decode JSON, and set None for a row without a score."""
    if "columns" in columns:
        opened = [json.loads(text) for text in columns["columns"]]
        columns |= {"prompt": [row.pop("prompt") for row in opened], "columns": opened}
    if "parts" in columns:
        columns["parts"] = [json.loads(text or "{}") for text in columns["parts"]]
    if (valid := columns.pop("valid", None)) is not None:
        scored = zip(columns["reward"], valid, strict=True)
        columns["reward"] = [value if good and value == value else None for value, good in scored]
    if "cost" in columns:
        columns["cost"] = [None if value != value else value for value in columns["cost"]]
    if "penalised_reward" in columns:
        pairs = zip(columns["penalised_reward"], columns["reward"], strict=True)
        columns["penalised_reward"] = [None if reward in (None, value) else value for value, reward in pairs]
    return columns


def prompt_text(prompt: JSON) -> str:
    """Return a prompt as text; chat messages become one paragraph each."""
    match prompt:
        case str():
            return prompt
        case [*messages]:
            return "\n\n".join(_message_text(message) for message in messages)
        case _:
            return "" if prompt is None else json.dumps(prompt, ensure_ascii=False)


def _message_text(message: JSON) -> str:
    match message:
        case {"role": str() as role, "content": str() as content}:
            return f"{role}: {content}"
        case _:
            return json.dumps(message, ensure_ascii=False)
