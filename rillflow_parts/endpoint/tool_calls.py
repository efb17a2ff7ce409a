"""Tool calls: read the calls of an answer from its text, in the format of the model's chat template.

    format     text of a call
    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    qwen       as hermes, or <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    llama      {"name": ..., "parameters": {...}}, several separated by ";", after <|python_tag|> or nothing
    template   the tokeniser's own ``response_template``, read by transformers

    answer's text ── read ──> Answer(content, calls)    text outside the calls; calls in their order

A text that looks like a call and cannot be read stays in the content. While an answer is being sampled,
``read`` returns only what later text cannot change, so that an answer can be streamed.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rillflow.errors import DataError, ModelError
from rillflow.models.tokenizer import Tokenizer
from rillflow.tasks.example import no_number, object_in, with_object

Tools = Sequence[Mapping[str, Any]]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = "<function="
_XML = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_STRING_OR_CLOSE = re.compile(r'"(?:[^"\\]|\\.)*"?|</tool_call>', re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
THOUGHTS = "reasoning_content"
"""Key of an answer's thoughts, which a chat template may write."""


_JSON = json.JSONDecoder(strict=False, parse_constant=no_number)  # models write line breaks inside strings


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    """Name of the tool."""
    arguments: str
    """Arguments by name, as a JSON object."""

    @staticmethod
    def of(name: object, arguments: object) -> ToolCall | None:
        """Return a call; None unless the name is text, and the arguments an object or the JSON of one."""
        if isinstance(arguments, str):
            arguments = object_in(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            (name + text).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, from an escape
            return None
        return ToolCall(name=name, arguments=text)

    @property
    def same(self) -> tuple[str, Any]:
        """The call, comparable: two texts of the same arguments are equal."""
        return self.name, json.loads(self.arguments)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, or its beginning."""

    content: str
    """Text outside the calls."""
    calls: tuple[ToolCall, ...] = ()
    """The calls."""
    reasoning: str = ""
    """Text that the tokeniser's own format keeps apart as the model's thoughts."""

    def agrees(self, other: Answer) -> bool:
        """Return whether two answers have the same calls, and the same text except for white space."""
        mine, theirs = (
            ("".join((each.reasoning + each.content).split()), [call.same for call in each.calls])
            for each in (self, other)
        )
        return mine == theirs


class ToolFormat(ABC):
    """A way of writing tool calls."""

    ends: ClassVar[tuple[str, ...]] = ()
    """Texts at which a call has ended; sampling can stop there if only one call is wanted."""

    @abstractmethod
    def read(self, text: str, tools: Tools, *, prompt: str = "", is_over: bool = True) -> Answer:
        """Return an answer's content and calls.

        Args:
            text: the answer so far, special tokens included, without the end token.
            tools: the request's tools; their schemas give the types of untyped values.
            prompt: text of the prompt, once the text is complete.
            is_over: whether the text is complete; if not, text that may still become a call is left out.
        """


class Plain(ToolFormat):
    """No format: the text is the content."""

    def read(self, text: str, tools: Tools, *, prompt: str = "", is_over: bool = True) -> Answer:
        """See ToolFormat."""
        del tools, prompt, is_over
        return Answer(content=text)


class Tags(ToolFormat):
    """Calls between ``<tool_call>`` tags, as JSON.

    Args:
        has_xml: whether a call may also be ``<function=NAME>`` with parameters, with or without the tags.
    """

    ends = (_CLOSE,)

    def __init__(self, *, has_xml: bool) -> None:
        self._has_xml = has_xml
        self._begins = (_OPEN, _FUNCTION) if has_xml else (_OPEN,)

    def read(self, text: str, tools: Tools, *, prompt: str = "", is_over: bool = True) -> Answer:
        """See ToolFormat."""
        del prompt
        content, outside, calls, place = "", "", list[ToolCall](), 0
        while True:
            begin = min((at for tag in self._begins if (at := text.find(tag, place)) >= 0), default=-1)
            if begin < 0:
                outside += text[place:] if is_over else _settled(text[place:], self._begins)
                break
            end, call = self._call(text, begin, tools, is_over=is_over)
            if end is None:
                outside += text[place:begin]
                break
            if call is None:
                outside, place = outside + text[place:end], end
                continue
            before = (outside + text[place:begin]).rstrip()
            content, outside, place = _joined(content, before.lstrip() if calls else before), "", end
            calls.append(call)
        if not is_over:
            outside = outside.rstrip()
        content = _joined(content, outside.strip()) if calls else outside
        return Answer(content=content, calls=tuple(calls))

    def _call(
        self, text: str, begin: int, tools: Tools, *, is_over: bool
    ) -> tuple[int | None, ToolCall | None]:
        """Return the end of a call and the call; no end if later text decides, no call if it is text."""
        is_tagged = text.startswith(_OPEN, begin)
        inside = begin + len(_OPEN) * is_tagged
        if self._has_xml and text[inside:].lstrip().startswith(_FUNCTION):
            found = _XML.match(text, inside)
            if found is None:
                return (_after(text, _CLOSE, inside) if is_over else None), None
            call, end = _xml_call(found[1], found[2], tools), found.end()
            if not is_tagged and not _CLOSE.startswith(text[end : end + len(_CLOSE)]):
                return begin + len(found[0].rstrip()), call
        else:
            call, end = _json_call(text, inside)
        if text.startswith(_CLOSE, end) and (call is not None or end > inside):
            return end + len(_CLOSE), call
        if call is not None and end == len(text) and is_over:
            return end, call  # the end token stands in place of the closing tag
        if call is not None and not is_over and _CLOSE.startswith(text[end:]):
            return None, None
        close = next((at.end() for at in _STRING_OR_CLOSE.finditer(text, inside) if at[0] == _CLOSE), None)
        return (close or _after(text, _CLOSE, inside)) if is_over else close, None


class Llama(ToolFormat):
    """Calls as bare JSON objects: the whole answer, or all of it after ``<|python_tag|>``."""

    def read(self, text: str, tools: Tools, *, prompt: str = "", is_over: bool = True) -> Answer:
        """See ToolFormat."""
        del tools, prompt
        content, tag, rest = text.partition(_PYTHON_TAG)
        if not tag and content.lstrip()[:1] in ("{", ""):
            content, rest = "", text
        calls = _json_calls(rest) if is_over and rest.strip() else ()
        if calls:
            return Answer(content=content.rstrip(), calls=calls)
        if is_over:
            return Answer(content=text)
        return Answer(content=(content if tag else _settled(content, (_PYTHON_TAG,))).rstrip())


class Template(ToolFormat):
    """Calls as the tokeniser's ``response_template`` describes them.

    Args:
        tokenizer: tokeniser with a ``response_template``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, text: str, tools: Tools, *, prompt: str = "", is_over: bool = True) -> Answer:
        """See ToolFormat."""
        if not is_over:
            return Answer(content="")  # the fields are known at the end
        try:
            message = self._tokenizer.parsed(text, prompt, tools)
        except ModelError:
            return Answer(content=text)
        given = message.get("tool_calls") or []
        functions = [call.get("function", call) if isinstance(call, dict) else {} for call in given]
        calls = [ToolCall.of(each.get("name"), each.get("arguments", {})) for each in functions]
        found = tuple(call for call in calls if call is not None)
        if len(found) < len(calls):
            return Answer(content=text)
        thoughts = message.get("reasoning_content") or message.get("thinking") or ""
        return Answer(content=str(message.get("content") or ""), calls=found, reasoning=str(thoughts))


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of a setting; ``auto`` finds it in the tokeniser's chat template.

    Raises:
        DataError: the format is ``template``, and the tokeniser has no ``response_template``.
    """
    if name == "template" and not tokenizer.has_response_template:
        raise DataError(
            "rollout.tool_format is 'template', but the tokeniser has no response_template",
            why="response_template of tokenizer_config.json describes how an answer is read",
            fix="add it, or name the format of the chat template: hermes, qwen or llama",
        )
    chosen = detected(tokenizer) if name == "auto" else name
    if chosen == "template":
        return Template(tokenizer)
    if chosen in ("hermes", "qwen"):
        return Tags(has_xml=chosen == "qwen")
    return Llama() if chosen == "llama" else Plain()


def detected(tokenizer: Tokenizer) -> str | None:
    """Return the name of the format that the tokeniser's files show; None if they show none."""
    template = tokenizer.chat_template
    if tokenizer.has_response_template:
        return "template"
    if _FUNCTION in template:
        return "qwen"
    if _OPEN in template:
        return "hermes"
    return "llama" if _PYTHON_TAG in template or "ipython" in template else None


def _after(text: str, tag: str, place: int) -> int:
    """Return the place behind the next tag; without one, the end of the text."""
    found = text.find(tag, place)
    return len(text) if found < 0 else found + len(tag)


def _joined(left: str, right: str) -> str:
    return f"{left}\n{right}" if left and right else left + right


def _settled(text: str, tags: Sequence[str]) -> str:
    """Return a text without an end that may be the beginning of a tag."""
    for length in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return text[:-length]
    return text


def _json_value(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at a place and the place behind it and white space; None if there is none."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        value, end = _JSON.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place
    while end < len(text) and text[end].isspace():
        end += 1
    return value, end


def _json_call(text: str, place: int) -> tuple[ToolCall | None, int]:
    """Return the call that stands as JSON at a place, and the place behind it."""
    value, end = _json_value(text, place)
    if not isinstance(value, dict):
        return None, end
    given = value.get("arguments", value.get("parameters", {}))
    return ToolCall.of(value.get("name"), {} if given is None else given), end


def _json_calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls that a text consists of; none if anything else is in it."""
    calls, place = list[ToolCall](), 0
    while place < len(text):
        value, _ = _json_value(text, place)
        call, place = _json_call(text, place)
        if call is None or not value.keys() & {"parameters", "arguments"}:
            return ()
        calls.append(call)
        place += text.startswith((";", ","), place)
    return tuple(calls)


def _xml_call(name: str, body: str, tools: Tools) -> ToolCall | None:
    """Return the call of a function with parameters, whose values have the types of the tool's schema."""
    kinds = _kinds(name.strip(), tools)
    if _PARAMETER.sub("", body).strip():
        return None
    arguments = {key: _typed(value, kinds.get(key)) for key, value in _PARAMETER.findall(body)}
    return ToolCall.of(name.strip(), arguments)


def _kinds(name: str, tools: Tools) -> dict[str, Any]:
    """Return the type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", {})
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            if isinstance(properties, dict):
                return {key: each.get("type") for key, each in properties.items() if isinstance(each, dict)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Return a value that was written without quotes: JSON if its type is known and is not text."""
    if kind is None or kind == "string":
        return value
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        return json.loads(words.get(value, value), parse_constant=no_number)
    except (ValueError, RecursionError):
        return value


def call_json(call: ToolCall, begin: int, place: int) -> dict[str, Any]:
    """Return a call as the protocol writes it.

    Args:
        call: the call.
        begin: place of the answer's first token in its row; calls of later answers have other ids.
        place: number of the call in its answer.
    """
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{begin}_{place}", "type": "function", "function": function}


def turn_of(answer: Answer, begin: int) -> dict[str, Any]:
    """Return a sampled answer as a turn of its conversation; ``begin`` as in ``call_json``."""
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        turn[THOUGHTS] = answer.reasoning
    if answer.calls:
        calls = [call_json(call, begin, place) for place, call in enumerate(answer.calls)]
        turn["tool_calls"] = [with_object(each) for each in calls]
    return turn
