"""Example: one row of data, validated once when it is read.

    a row of a file ── example_of ──> Example(index, prompt, completion, columns, place)
    a made problem ──────────────────^           └─ turns, tools ─> input of a chat template

A prompt is text or a conversation. All values are plain JSON data, so an example can be sent to a reward's
child and written to a run directory unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rillflow.errors import DataError, nearest
from rillflow.models.template_changes import THOUGHTS

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = {"prompts": "prompt", "completions": "completion"}
"""Reserved argument names of every reward function, with the column names to use instead."""


TAKEN_ARGUMENTS = {
    *(
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "strftime_now"),
}
"""Arguments of the rendering function: a variable with such a name would not reach the template."""

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, ``content`` and the other keys in ``_KEYS``."""
Answer = str | Message
"""An answer: its text, or the assistant's message if that has thoughts or calls of tools."""
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS)
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column of a row's own variables of the chat template, by TRL's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a task.

    Example:
        Example(index=3, prompt="17+25=", completion="42", columns={"answer": "42"})
    """

    index: int
    """Position of the row in its source, from 0; ``prompt`` of its row id."""
    prompt: str | tuple[Message, ...]
    """Text, or messages whose last one is not the assistant's; empty if all of the row is learnt."""
    completion: Answer | None = None
    """Answer to learn from: the column ``completion``, else ``answer``; None if there is neither."""
    others: tuple[Answer, ...] = ()
    """Further answers to the prompt, in the order of their samples, such as a pair's rejected one."""
    labels: Mapping[str, bool] = field(default_factory=dict)
    """Facts about the answer, such as ``label``: whether it is good. They become fields [B] of a batch."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns by name, as JSON values; the reward receives them."""
    place: str = field(default="", compare=False)
    """Location for the data's author, such as ``prompts.jsonl line 12``; empty if there is none."""

    def __str__(self) -> str:
        """Describe the row for a message. Example: ``prompts.jsonl line 12 ("17+25=")``."""
        return f"{self.place or f'prompt {self.index}'} ({shown(self.question)})"

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Messages for a chat template: parts joined, null content as empty text, arguments as objects."""
        assert not isinstance(self.prompt, str), "a text has no turns"
        return [turn_of(message) for message in self.prompt]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Tools that a conversation may call: its column ``tools``; None if that is empty."""
        return None if isinstance(self.prompt, str) else self.columns.get("tools") or None

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """The row's own variables of the chat template: its column ``chat_template_kwargs``."""
        return {} if isinstance(self.prompt, str) else self.columns.get(TEMPLATE_ARGUMENTS) or {}

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers that the row has."""
        return () if self.completion is None else (self.completion, *self.others)

    def plain(self) -> list[Any]:
        """Return the values that a digest of the data is computed from."""
        return [self.index, self.prompt, self.completion, self.columns, *self.others, *self.labels.values()]

    def as_json(self) -> str:
        """Return the prompt and the other columns, as the field ``columns`` of a batch holds them."""
        return json.dumps({"prompt": self.prompt, **self.columns})

    @property
    def key(self) -> str:
        """Prompt as text, or the whole text; rows with the same prompt have equal keys."""
        if isinstance(self.prompt, str):
            return self.prompt or answer_text(self.completion or "")
        return json.dumps(self.prompt)

    @property
    def question(self) -> str:
        """What a reader recognises the prompt by: its text, or that of a conversation's last user message."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message.get("content", "") for message in self.prompt if message["role"] == "user"]
        return _text(asked[-1], str(self.place)) if asked else self.key

    @property
    def compared(self) -> frozenset[str]:
        """Columns that distinguish rows with one prompt; ``id`` only names a row and is excluded.

        Compared or labelled answers to one prompt are held out together, so no column distinguishes them.
        """
        return frozenset() if self.others or self.labels else frozenset(self.columns) - {"id"}

    def identity(self, names: Collection[str]) -> str:
        """Return a text that two rows share if and only if their prompt and these columns are equal."""
        columns = {name: value for name, value in self.columns.items() if name in names}
        return json.dumps([self.prompt or self.key, columns], sort_keys=True)


def example_of(row: dict[str, Any], index: int, place: str) -> Example:
    """Return a row as an example, which keeps the row's dict as its columns.

    Raises:
        DataError: the prompt is missing, null, empty, or neither text nor messages; the completion is not
            text; tools are not a list of objects. The message does not say where the row is.
    """
    _split_messages(row)
    prompt = prompt_of(row)
    completion = _completion(row, prompt)
    return Example(index=index, prompt=prompt, completion=completion, columns=row, place=place)


def _split_messages(row: dict[str, Any]) -> None:
    """Turn a column ``messages`` without ``prompt`` into the prompt; a last answer becomes the completion."""
    if "prompt" in row or not isinstance(row.get("messages"), list):
        return
    messages = row.pop("messages")
    is_answered = messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
    if is_answered and "completion" not in row:
        row["completion"] = messages[-1:]
        messages = messages[:-1]
    row["prompt"] = messages


def prompt_of(row: dict[str, Any]) -> str | tuple[Message, ...]:
    """Remove the prompt from a row and return it.

    Raises:
        DataError: the prompt is missing, null, empty, or neither text nor messages; it is messages, and
            ``tools`` is not a list of objects, or ``chat_template_kwargs`` no object.
    """
    require_column(row, "prompt")
    prompt = _prompt(row.pop("prompt"))
    if not isinstance(prompt, str):
        _read_tools(row)
        _read_template_arguments(row)
    return prompt


def _read_tools(row: dict[str, Any]) -> None:
    """Check a row's tools; JSON text, as data sets without a JSON type have it, becomes the list."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = row["tools"] = json.loads(tools, parse_constant=no_number) if tools.strip() else None
        except (ValueError, RecursionError):
            raise DataError(
                f"the column 'tools' has {shown(tools)}", why="a text of tools is JSON: a list of objects"
            ) from None
    if tools is not None and not _are_objects(tools):
        raise DataError(
            f"the column 'tools' has {shown(tools)}", why="with messages it must be a list of objects"
        )


def _read_template_arguments(row: dict[str, Any]) -> None:
    """Check a row's own variables of the chat template, and leave out those that are null."""
    arguments = row.get(TEMPLATE_ARGUMENTS)
    if arguments is None:
        return
    if not isinstance(arguments, dict):
        raise DataError(
            f"the column {TEMPLATE_ARGUMENTS!r} has {shown(arguments)}",
            why="it holds variables of the chat template, so it is an object",
            fix="rename the column if it means something else",
        )
    for name in sorted(TAKEN_ARGUMENTS & arguments.keys()):
        raise DataError(
            f"the column {TEMPLATE_ARGUMENTS!r} has {name!r}",
            why="the rendering itself sets it",
            fix="use a variable of your template",
        )
    row[TEMPLATE_ARGUMENTS] = {name: value for name, value in arguments.items() if value is not None}


def require_column(row: Mapping[str, Any], name: str, fix: str = "") -> None:
    """Raise DataError for a row without a column; the fix, if there is none, is the nearest name."""
    if name not in row:
        raise DataError(
            f"there is no column {name!r}",
            why=f"the columns are {', '.join(map(repr, row)) or 'none'}",
            fix=fix or nearest(name, row),
        )


def check_names(names: Iterable[str]) -> None:
    """Raise DataError for a column that no reward function could receive."""
    for name, other in RESERVED.items():
        if name in names:
            raise DataError(
                f"there is a column {name!r}",
                why="reward functions receive another value under this name",
                fix=f"rename it to {other!r} if it has that meaning, else to any other name",
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
            why="the policy would have nothing to answer",
            fix="move it to a column 'completion', as text; in a column 'messages' it is the answer to learn",
        )
    return messages


def message_of(item: object, number: int, place: str) -> Message:
    """Return the ``number``-th message (from 1) of ``place``, without null values.

    Raises:
        DataError: it is not an object with ``role`` and ``content``, or one of its values is invalid.
    """
    where = f"message {number} of the {place}"
    given = item if isinstance(item, dict) else {}
    found = {name: value for name, value in given.items() if value is not None}
    if "role" not in found or not found.keys() & {"content", "tool_calls"} or found.keys() - set(_KEYS):
        has = f"has the keys {', '.join(map(repr, given)) or 'none'}" if item == given else shown(item)
        why = f"a message has 'role' and 'content' (or 'tool_calls'), and may have {_KEYS[2:]}"
        raise DataError(f"{where} {has}", why=why)
    role = found["role"]
    if role not in ROLES:
        fix = nearest(role, ROLES) if isinstance(role, str) else ""
        raise DataError(f"{where} has the role {shown(role)}", why=f"roles are {', '.join(ROLES)}", fix=fix)
    for name in found.keys() - {"role", "content"}:
        value, is_list = found[name], name == "tool_calls"
        if not (_are_objects(value) if is_list else isinstance(value, str)):
            kind = "a list of objects" if is_list else "text"
            raise DataError(f"{where} has the {name} {shown(value)}", why=f"{name} is {kind}")
        text_of(json.dumps(value, ensure_ascii=False), f"message {number}")
    text_of(_text(found.get("content", ""), where), f"message {number}")
    return found


def with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call whose arguments are an object, if they are one or the JSON text of one.

    OpenAI's protocol and most recorded conversations have text, and chat templates expect the object.
    """
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        arguments = object_in(function["arguments"])
        return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}
    if isinstance(call.get("arguments"), str):
        arguments = object_in(call["arguments"])
        return call if arguments is None else {**call, "arguments": arguments}
    return call


def object_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is anything else. An empty text is no argument."""
    try:
        found = json.loads(text or "{}", strict=False, parse_constant=no_number)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def no_number(name: str) -> None:
    """Refuse NaN and infinity, which Python's JSON parser reads and JSON lacks."""
    raise ValueError(f"JSON has no {name}")


def turn_of(message: Message) -> dict[str, Any]:
    """Return a message for a chat template: parts joined, null content as "", arguments as objects."""
    turn = {**message, "content": _text(message.get("content", ""), "")}
    if "tool_calls" in turn:
        turn["tool_calls"] = [with_object(call) for call in turn["tool_calls"]]
    return turn


def answer_text(answer: Answer) -> str:
    """Return an answer's text, without thoughts and calls."""
    return answer if isinstance(answer, str) else str(answer["content"])


def answer_of(value: object, name: str, prompt: str | Sequence[Message] = "") -> Answer:
    """Return an answer, from text or one assistant message.

    Args:
        value: the text or the list of one message.
        name: name of the answer in errors.
        prompt: the prompt that it answers; thoughts and calls need messages, whose template writes them, so
            without it the answer is a text.

    Raises:
        DataError: the value is something else.
    """
    if isinstance(value, str):
        return text_of(value, name)
    if not isinstance(value, list):
        raise DataError(f"the {name} is {shown(value)}", why="an answer is text, or one assistant message")
    messages = [message_of(item, number, name) for number, item in enumerate(value, 1)]
    if [message["role"] for message in messages] != ["assistant"]:
        roles = ", ".join(message["role"] for message in messages) or "nobody"
        raise DataError(
            f"the {name} has messages of {roles}",
            why="an answer is one assistant message; the messages before it are the prompt",
            fix="move the other messages into the column 'prompt'",
        )
    turn = turn_of(messages[0])
    if not turn.keys() & {"tool_calls", *THOUGHTS}:
        return str(turn["content"])
    if isinstance(prompt, str):
        has = next(key for key in ("tool_calls", *THOUGHTS) if key in turn)
        raise DataError(
            f"the {name} has {has}, and the prompt is text",
            why="a chat template writes calls and thoughts, and it renders messages",
            fix="write the prompt as messages, or the whole answer as text",
        )
    return turn


def _are_objects(value: Any) -> bool:
    """Return whether a value is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _text(content: Any, where: str) -> str:
    """Return the text of a message's content, which is text or parts of type text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds = [(part.get("type"), type(part.get("text"))) for part in parts] if _are_objects(parts) else [None]
    if set(kinds) - {("text", str)}:
        why = "content is text, or a list of parts like {'type': 'text', 'text': '...'}"
        raise DataError(f"{where} has the content {shown(content)}", why=why)
    return "".join(part["text"] for part in parts)


def _completion(row: dict[str, Any], prompt: str | Sequence[Message]) -> Answer | None:
    if "completion" not in row:
        answer = row.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return None
        return text_of(value_text(answer), "answer")
    value = row.pop("completion")
    return None if value is None else answer_of(value, "completion", prompt)


def value_text(value: object) -> str:
    """Return a value of a row as text. A whole number is written without a fraction.

    Tables write the whole numbers of a column with gaps as floats.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def text_of(text: str, name: str) -> str:
    """Return the text; raise DataError if UTF-8 cannot encode it. ``name`` names the text in errors."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the {name} has the lone surrogate {text[error.start]!r} at position {error.start}",
            why="it is half a character, from a \\u escape without its partner; UTF-8 cannot encode it",
        ) from None
    return text


def shown(value: object) -> str:
    """Return a value as JSON, shortened, for an error."""
    text = "null" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
