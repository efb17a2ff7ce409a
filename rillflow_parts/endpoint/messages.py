"""Messages: read the conversations that clients send, in all forms that mean the same.

a client's message ── cleaned ──> a turn for the chat template
    null, missing or empty content               -> ""
    arguments of a call, JSON text               -> an object, which templates write as JSON
    empty keys of an answer, such as ``refusal`` -> left out
two turns ── same ──> whether they say the same: role, text and calls, whatever the ids
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rillflow.errors import DataError
from rillflow.tasks.example import Example, prompt_of, with_object
from rillflow_parts.endpoint.openai_protocol import ChatRequest

_ECHOED = ("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content", "parsed")
"""Keys of answers that clients send back; if they are empty, they say nothing."""


def chat_of(asked: ChatRequest) -> Example:
    """Return a request's conversation.

    Raises:
        DataError: a message is invalid.
    """
    messages = [cleaned(message) for message in asked.messages]
    prompt = prompt_of({"prompt": messages, "tools": asked.tools})
    return Example(index=0, prompt=prompt, columns={"tools": asked.tools}, place="the request")


def cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's message without what says nothing, and with the arguments of calls as objects."""
    found = {name: value for name, value in message.items() if value is not None}
    for name in _ECHOED:
        if not found.get(name, True):
            del found[name]
    calls = found.pop("tool_calls", None)
    if calls:
        is_list = isinstance(calls, list) and all(isinstance(each, dict) for each in calls)
        found["tool_calls"] = [with_object(each) for each in calls] if is_list else calls
    elif found.get("role") == "assistant":
        found.setdefault("content", "")
    return found


def same(now: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    """Return whether two turns say the same."""
    return _said(now) == _said(was)


def _said(turn: Mapping[str, Any]) -> tuple[str, str, Sequence[Any]]:
    calls = turn.get("tool_calls") or []
    return turn["role"], turn["content"], [each.get("function", each) for each in calls]


def require_ordinary(asked: ChatRequest, special_in: Callable[[str], str | None]) -> None:
    """Raise DataError for a template variable with the text of a special token."""
    for name, value in asked.variables.items():
        texts: list[Any] = [value]
        found: str | None = None
        while texts and found is None:
            part = texts.pop()
            if isinstance(part, str):
                found = special_in(part)
            elif isinstance(part, dict):
                texts += [*part, *part.values()]
            elif isinstance(part, list):
                texts += part
        if found is not None:
            why = "a rendered conversation would contain the token, which could end or forge a turn"
            raise DataError(f"{name} contains the text of the special token {found!r}", why=why)
