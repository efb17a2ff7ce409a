"""Every answer of `rillflow serve` is of openai-python's own type, validated strictly.

The client builds its objects without validation, so a missing or mistyped field would pass unseen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("openai")
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", "strict": True, **FUNCTION}]
CHATS: dict[str, dict[str, Any]] = {
    "text": {"content": "17+25"},
    "call": {"content": "17+25", "tools": TOOLS},
    "calls": {"content": "both sums", "tools": TOOLS},
    "log probabilities": {"content": "17+25", "logprobs": True},
    "cut": {"content": "17+25", "max_completion_tokens": 2},
    "several": {"content": "17+25", "n": 2, "temperature": 1},
    "usage": {"content": "17+25", "stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    head = {"Authorization": f"Bearer {served.token}"}
    with httpx.Client(base_url=served.url, headers=head, timeout=120) as client:
        yield client


def typed(kind: Any, value: Any) -> Any:
    """Return a value as openai's type; strictly, and with no field that the type does not know."""
    found = TypeAdapter(kind).validate_python(value)
    assert TypeAdapter(kind).validate_json(json.dumps(value), strict=True) == found
    return found


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yield the JSON of a stream's events."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_completion(http: httpx.Client, served: Any, case: str) -> None:
    asked = dict(CHATS[case])
    body = {"model": served.model, "messages": [{"role": "user", "content": asked.pop("content")}]}
    body |= {"temperature": 0, **asked}
    chunks = [typed(ChatCompletionChunk, each) for each in events(http, "chat/completions", body)]
    body.pop("stream_options", None)
    answer = http.post("chat/completions", json=body)
    whole = typed(ChatCompletion, answer.json())
    ends = [each.finish_reason for chunk in chunks for each in chunk.choices if each.finish_reason]
    assert sorted(ends) == sorted(each.finish_reason for each in whole.choices)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"echo": True, "max_tokens": 2}, {"n": 2}])
def test_a_completion(http: httpx.Client, served: Any, more: dict[str, Any]) -> None:
    body = {"model": served.model, "prompt": "17+25", "max_tokens": 4, **more}
    typed(Completion, http.post("completions", json=body).json())
    chunks = [*events(http, "completions", body)]
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [*filter(None, ends)] == ["length"] * more.get("n", 1)
    for chunk in chunks:  # the type has no null, which the protocol has before the end
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        typed(Completion, chunk)


@pytest.mark.parametrize("tools", [[], FLAT])
def test_a_response_and_its_events(http: httpx.Client, served: Any, tools: list[Any]) -> None:
    body = {"model": served.model, "input": [{"role": "user", "content": "17+25"}], "temperature": 0}
    body |= {"tools": tools} if tools else {}
    whole = typed(Response, http.post("responses", json=body).json())
    stream = [typed(ResponseStreamEvent, each) for each in events(http, "responses", body)]
    assert stream[0].type == "response.created" and stream[-1].type == "response.completed"
    assert [each.sequence_number for each in stream] == list(range(len(stream)))
    assert [each.type for each in stream[-1].response.output] == [each.type for each in whole.output]


def test_the_models(http: httpx.Client) -> None:
    listed = http.get("models").json()
    assert listed["object"] == "list" and [typed(Model, each) for each in listed["data"]]
    name = listed["data"][0]["id"]
    assert typed(Model, http.get(f"models/{name}").json()).id == name
