"""Formats: turn rows of well-known layouts into columns of a task; ``task.format`` names the layout.

    sharegpt  conversations = [{from: human, value: ...}, {from: gpt, value: ...}]; system, tools ─> messages
    alpaca    instruction, input, output; system, history ────────────────────────────────────────> messages
    hh        chosen, rejected = "\\n\\nHuman: ...\\n\\nAssistant: ..." ──> conversations of the same names

Columns that a format does not read are kept, as the reward may read them. Source of the first two: the data
formats of LLaMA-Factory, which most published sets follow; of the third: Anthropic's hh-rlhf.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rillflow.errors import DataError, nearest
from rillflow.tasks.example import object_in, require_column, shown

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "tool": "tool",
    "observation": "tool",
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
}
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with ``messages`` for its ``conversations``."""
    require_column(row, "conversations")
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"conversations is {shown(turns)}", why="it is a list of objects with from and value")
    made = {name: value for name, value in row.items() if name not in ("conversations", "system", "tools")}
    if row.get("tools"):
        made["tools"] = row["tools"]
    return {
        **made,
        "messages": [*_system(row), *(_spoken(turn, place) for place, turn in enumerate(turns, 1))],
    }


def alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with ``messages`` for its ``instruction``, ``input`` and ``output``."""
    require_column(row, "instruction")
    require_column(row, "output")
    used = ("instruction", "input", "output", "system", "history")
    asked = "\n\n".join(text for text in (_said(row, "instruction"), _said(row, "input")) if text)
    turns = [("user", asked), ("assistant", _said(row, "output"))]
    messages = [{"role": role, "content": text} for role, text in (*_history(row), *turns)]
    made = {name: value for name, value in row.items() if name not in used}
    return {**made, "messages": [*_system(row), *messages]}


def hh(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with ``chosen`` and ``rejected`` as conversations."""
    return {**row, **{name: _dialogue(row, name) for name in ("chosen", "rejected")}}


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "hh": hh,
}
"""Function of each format, by its name."""


def _spoken(turn: object, place: int) -> dict[str, Any]:
    where = f"message {place} of conversations"
    if not isinstance(turn, dict) or {"from", "value"} - turn.keys():
        fix = "with role and content, rename the column to messages and leave task.format out"
        raise DataError(
            f"{where} is {shown(turn)}", why="sharegpt has from and value in each message", fix=fix
        )
    speaker, value = turn["from"], turn["value"]
    if speaker not in _SPEAKERS or not isinstance(value, str):
        fix = nearest(speaker, _SPEAKERS) if isinstance(speaker, str) else ""
        why = f"from is one of {', '.join(_SPEAKERS)}, and value a text"
        raise DataError(f"{where} is {shown(turn)}", why=why, fix=fix)
    if speaker == "function_call":
        call = object_in(value)
        if call is None or not isinstance(call.get("name"), str):
            raise DataError(
                f"{where} is {shown(turn)}", why="a function_call is JSON with name and arguments"
            )
        function = {"name": call["name"], "arguments": call.get("arguments") or {}}
        calls = [{"type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {"role": _SPEAKERS[speaker], "content": value}


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    text = _said(row, "system")
    return [{"role": "system", "content": text}] if text else []


def _said(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a column; empty if it is missing or null."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name} is {shown(value)}", why="it is text")
    return value or ""


def _history(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for pair in row.get("history") or ():
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError(f"history has {shown(pair)}", why="it is a list of pairs: a question, an answer")
        yield from zip(("user", "assistant"), pair, strict=True)


def _dialogue(row: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    require_column(row, name)
    text = row[name]
    parts = _TURN.split(text) if isinstance(text, str) else []
    if len(parts) < 3 or parts[0].strip():
        raise DataError(
            f"{name} is {shown(text)}", why="hh begins a turn with '\\n\\nHuman:' or '\\n\\nAssistant:'"
        )
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _ROLES[speaker], "content": said.strip()} for speaker, said in pairs]
