"""Rollouts in columns: the files that ranks wrote of one step, joined by row.

    step-N-0001-of-0003.safetensors   ids, tokens, versions, ...  what a rank sampled, with all that lay alike
    step-N-0003-of-0003.safetensors   ids, rewards, ...           what was computed elsewhere of the same rows

A text is UTF-8 bytes; a column of rows of different lengths has values and lengths. Reads without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from rillflow.errors import RunDirectoryError
from rillflow.observe.json_lines import JSON
from rillflow.records.row import RowId

_NAMES = {"sampler_logprobs": "logprobs", "rewards": "reward", "costs": "cost", "advantages": "advantage"}
_NAMES |= {"penalised": "penalised_reward"}
"""What a column is called where it is read."""


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One row of one step. The per-token tuples are aligned to ``tokens``; see ``sampled``."""

    row: RowId
    """The row's stable id."""
    prompt: str
    """The prompt's text; of chat messages, one paragraph each."""
    completion: str
    """The text of what was sampled."""
    tokens: tuple[int, ...]
    """Token ids: the prompt's and all after it."""
    token_texts: tuple[str, ...]
    """The text of each token; empty when it was not written."""
    logprobs: tuple[float, ...]
    """The sampler's log probability of each token, 0 where it was not sampled."""
    versions: tuple[int, ...]
    """The weight version that sampled each token, -1 where none did."""
    finish: str
    """Why it ended: stop, length or aborted."""
    reward: float | None
    """Its reward; None when the outcome is not a score."""
    outcome: str
    """What scoring gave: score, abstain, timeout or error; empty when nothing scored it."""
    message: str
    """What scoring said about an outcome that is not a score."""
    penalised_reward: float | None = None
    """What was made of its reward, where a penalty changed it."""
    advantage: float | None
    """Its advantage; None when it has none."""
    parts: Mapping[str, JSON] = field(default_factory=dict)
    """What each reward function said, by name and before its weight, where several are summed."""
    columns: Mapping[str, JSON]
    """The prompt's other columns."""

    @property
    def sampled(self) -> tuple[int, ...]:
        """The places of the sampled tokens."""
        return tuple(place for place, version in enumerate(self.versions) if version >= 0)


def read_columns(files: Sequence[Path]) -> dict[str, list[Any]]:
    """The rows of a step, an entry a row; None where a row has none.

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
            column = columns.setdefault(_NAMES.get(name, name), [None] * len(ids))
            for place, value in zip(here, values, strict=True):
                if place is not None:
                    column[place] = value
    return _spoken(columns)


def rollout_records(columns: Mapping[str, Sequence[Any]], texts: Sequence[str]) -> list[RolloutRecord]:
    """The same row by row; ``texts`` are those of all tokens."""
    given = {
        name: columns[name] for name in ("tokens", "logprobs", "versions", "finish", "prompt", "columns")
    }
    empty = [None] * len(columns["epoch"])
    known = ("completion", "reward", "outcome", "message", "penalised_reward", "advantage", "parts")
    told = {name: columns.get(name, empty) for name in known}
    return [
        RolloutRecord(
            row=RowId(columns["epoch"][index], columns["prompt_id"][index], columns["sample"][index]),
            prompt=prompt_text(given["prompt"][index]),
            completion=told["completion"][index] or "",
            tokens=tuple(tokens),
            token_texts=tuple(texts[token] for token in tokens)
            if max(tokens, default=0) < len(texts)
            else (),
            logprobs=tuple(given["logprobs"][index]),
            versions=tuple(given["versions"][index]),
            finish=given["finish"][index],
            reward=told["reward"][index],
            outcome=told["outcome"][index] or "",
            message=told["message"][index] or "",
            penalised_reward=told["penalised_reward"][index],
            advantage=told["advantage"][index],
            columns=given["columns"][index],
            parts=told["parts"][index] or {},
        )
        for index, tokens in enumerate(given["tokens"])
    ]


def _part(file: Path) -> dict[str, list[Any]]:
    """The columns of one file."""
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


def _spoken(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns as they are read: JSON opened, and None where a row has no score."""
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
    """A prompt as a text; of chat messages, one paragraph each."""
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
