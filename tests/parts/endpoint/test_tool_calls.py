"""Tool calls are read in each format; what cannot be read stays text; a stream only ever adds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rillflow_parts.endpoint.tool_calls import Answer, Llama, Tags, ToolFormat

HERMES, QWEN, LLAMA = Tags(has_xml=False), Tags(has_xml=True), Llama()
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "</tool_call>"]}}\n</tool_call>'
GET = '<tool_call>{"name": "get", "arguments": "{\\"x\\": null}"}</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=note>\nline 1\n\nline 2\n"
    '</parameter>\n<parameter=deep>\n{"k": [true]}\n</parameter>\n</function>\n</tool_call>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "note": {"type": "string"},
                    "deep": {"type": "object"},
                }
            },
        },
    }
]


def calls(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


A = ("add", {"a": 1, "b": [2, "</tool_call>"]})
G = ("get", {"x": None})
X = ("add", {"a": 7, "note": "line 1\n\nline 2", "deep": {"k": [True]}})


@pytest.mark.parametrize(
    ("form", "text", "content", "found"),
    [
        (HERMES, "no call", "no call", []),
        (HERMES, ADD, "", [A]),
        (HERMES, f"I add.\n\n{ADD}\n{GET}", "I add.", [A, G]),
        (HERMES, f"one {ADD} two {GET} three", "one\ntwo\nthree", [A, G]),
        (HERMES, ADD.removesuffix("\n</tool_call>"), "", [A]),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        (
            HERMES,
            '<tool_call>{"name": "say", "arguments": {"t": "a\nb"}}</tool_call>',
            "",
            [("say", {"t": "a\nb"})],
        ),
        (HERMES, XML, XML, []),
        (QWEN, XML, "", [X]),
        (QWEN, f"First.\n{XML}\n{ADD}", "First.", [X, A]),
        (QWEN, XML.removeprefix("<tool_call>\n"), "", [X]),
        (QWEN, XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") + " ok", "ok", [X]),
        (QWEN, "<function=now>\n</function>", "", [("now", {})]),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (
            LLAMA,
            'so:<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"x": 1}}',
            "so:",
            [("f", {}), ("g", {"x": 1})],
        ),
        (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA, '{"name": "Ann"}', '{"name": "Ann"}', []),
        (LLAMA, "no call", "no call", []),
    ],
)
def test_calls_are_read(form: ToolFormat, text: str, content: str, found: list[Any]) -> None:
    answer = form.read(text, TOOLS)
    assert (answer.content, calls(answer)) == (content, found)


BROKEN = [
    "<tool_call>{</tool_call>",
    "<tool_call>\n{'name': 'add'}\n</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "f", "argum',
    "<tool_call>",
    "</tool_call>",
    "<function=f>\n<parameter=a>1\n</function>",
    "<tool_call><function=f>loose</function></tool_call>",
    "<tool_call><function=></function></tool_call>",
    "<|python_tag|>print(1)",
    '{"name": "f", "parameters": {}} and more',
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("form", [HERMES, QWEN, LLAMA], ids=["hermes", "qwen", "llama"])
def test_what_cannot_be_read_stays_text(form: ToolFormat, text: str) -> None:
    assert form.read(text, TOOLS) == Answer(content=text)
    if not isinstance(form, Llama):
        after = form.read(f"{text.removesuffix('<tool_call>')} {ADD}", TOOLS)
        assert calls(after)[-1:] == [A] or "<tool_call>" in text


PARTS = ["a", " b\n", "<", "<tool", "\n", "{", *(ADD, GET, XML), *BROKEN[:3], *BROKEN[-8:]]


@given(st.lists(st.sampled_from(PARTS), max_size=6), st.sampled_from([HERMES, QWEN, LLAMA]))
def test_a_stream_only_ever_adds(parts: list[str], form: ToolFormat) -> None:
    """Every prefix's content and calls begin those of every longer one, and of the whole."""
    text = "".join(parts)
    whole = form.read(text, TOOLS)
    before = Answer(content="")
    for end in range(len(text) + 1):
        now = form.read(text[:end], TOOLS, is_over=False)
        assert now.content.startswith(before.content) and now.calls[: len(before.calls)] == before.calls
        before = now
    assert whole.content.startswith(before.content) and whole.calls[: len(before.calls)] == before.calls


def test_types_without_a_schema_are_text() -> None:
    text = "<function=other>\n<parameter=n>1</parameter>\n</function>"
    assert calls(QWEN.read(text, TOOLS)) == [("other", {"n": "1"})]
    text = "<function=add>\n<parameter=a>seven</parameter>\n</function>"
    assert calls(QWEN.read(text, TOOLS)) == [("add", {"a": "seven"})]


def test_answers_agree_whatever_the_white_space_and_the_text_of_the_json() -> None:
    one = HERMES.read(f"I add.\n\n{ADD}", TOOLS)
    assert one.agrees(HERMES.read(f"I  add. {ADD.replace(': ', ':')}", TOOLS))
    assert not one.agrees(HERMES.read(f"I add {ADD}", TOOLS))
    assert not one.agrees(HERMES.read(f"I add. {ADD.replace('1', '2')}", TOOLS))
