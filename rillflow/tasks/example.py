"""Example: one row of data, checked once, at the door.

    a row of a file ── example_of ──> Example(index, prompt, completion, columns)
    a made problem ──────────────────^

A prompt is text or a conversation. Everything here is plain data that JSON can hold, so that it can
travel to a reward's child and into a run directory as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rillflow.errors import DataError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = {"prompts": "prompt", "completions": "completion"}
"""Arguments of every reward function, and what a column meant for them is called."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a task.

    Example:
        Example(index=3, prompt="17+25=", completion="42", columns={"answer": "42"})
    """

    index: int
    """The row's place in its source, from 0; a row id's ``prompt``."""
    prompt: str | tuple[Message, ...]
    """What is asked: text, or messages whose last one is not the assistant's."""
    completion: str | None = None
    """An answer to learn from: the column ``completion``, else ``answer``; None where there is neither."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns by name, values as JSON has them; the reward gets them."""

    def plain(self) -> list[Any]:
        """What a digest of the data is made of."""
        return [self.index, self.prompt, self.completion, self.columns]

    def as_json(self) -> str:
        """The prompt and the other columns, as the field ``columns`` of a batch holds them."""
        return json.dumps({"prompt": self.prompt, **self.columns})

    @property
    def key(self) -> str:
        """What two rows with the same prompt share."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt)


def example_of(row: dict[str, Any], index: int) -> Example:
    """A row as an example, which keeps the row's dict as its columns.

    Raises:
        DataError: the prompt is missing, null, empty, or neither text nor messages; the completion is no
            text. The message does not say where the row stands.
    """
    prompt = prompt_of(row)
    completion = _completion(row)
    return Example(index=index, prompt=prompt, completion=completion, columns=row)


def prompt_of(row: dict[str, Any]) -> str | tuple[Message, ...]:
    """Take the prompt out of a row.

    Raises:
        DataError: it is missing, null, empty, or neither text nor messages.
    """
    if "prompt" not in row:
        raise DataError(
            "there is no column 'prompt'",
            why=f"the columns are {', '.join(map(repr, row)) or 'none'}",
            fix=nearest("prompt", row),
        )
    return _prompt(row.pop("prompt"))


def check_names(names: Iterable[str]) -> None:
    """Refuse a column that no reward function could be given."""
    for name, other in RESERVED.items():
        if name in names:
            raise DataError(
                f"there is a column {name!r}",
                why="a reward function's argument of this name is the batch's own",
                fix=f"call it {other!r} if that is what it is, or give it another name",
            )


def _prompt(value: object) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise DataError("the prompt is empty", why="there is nothing to continue")
        return text_of(value, "prompt")
    if isinstance(value, list):
        return _messages(value)
    raise DataError(
        f"the prompt is {shown(value)}",
        why="a prompt is text, or a list of messages",
        fix="remove the row, or write the prompt",
    )


def _messages(value: list[object]) -> tuple[Message, ...]:
    if not value:
        raise DataError("the prompt is []", why="a conversation has at least one message")
    messages = tuple(message_of(item, number, "prompt") for number, item in enumerate(value, 1))
    if messages[-1]["role"] == "assistant":
        raise DataError(
            "the prompt's last message is the assistant's",
            why="then nothing is left to answer",
            fix="move it to a column 'completion', as text",
        )
    return messages


def message_of(item: object, number: int, place: str) -> Message:
    """One turn of a conversation, the ``number``-th (from 1) of what ``place`` says.

    Raises:
        DataError: it is no object of ``role`` and ``content``, or one of the two cannot be used.
    """
    where = f"message {number} of the {place}"
    if not isinstance(item, dict) or set(item) != {"role", "content"}:
        found = (
            f"has the keys {', '.join(map(repr, item)) or 'none'}" if isinstance(item, dict) else shown(item)
        )
        raise DataError(f"{where} {found}", why="a message has the keys 'role' and 'content', and no others")
    role, content = item["role"], item["content"]
    if role not in ROLES:
        fix = nearest(role, ROLES) if isinstance(role, str) else ""
        raise DataError(f"{where} has the role {shown(role)}", why=f"roles are {', '.join(ROLES)}", fix=fix)
    if not isinstance(content, str):
        raise DataError(f"{where} has the content {shown(content)}", why="the content of a message is text")
    return {"role": role, "content": text_of(content, f"message {number}")}


def _completion(row: dict[str, Any]) -> str | None:
    if "completion" not in row:
        answer = row.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return None
        return text_of(str(answer), "answer")
    value = row.pop("completion")
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"the completion is {shown(value)}", why="an answer to learn from is text")
    return text_of(value, "completion")


def text_of(text: str, name: str) -> str:
    """The text, refused where UTF-8 cannot hold it; ``name`` says what it is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the {name} has half a character, {text[error.start]!r}, at place {error.start}",
            why="a lone surrogate is no text; it comes from a \\u escape without its partner",
        ) from None
    return text


def shown(value: object) -> str:
    """A value as JSON has it, cut short, for an error."""
    text = "null" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
