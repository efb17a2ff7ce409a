"""Tools over HTTP: calls in answers and streams, and the parameters that clients send."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="the door is the extra `service`")

from rillflow.models.tokenizer import Tokenizer
from rillflow.rollout.config import RolloutConfig
from rillflow.serving.server import LoopbackServer, bound
from rillflow.tasks.encoded import Encoder
from rillflow_parts.endpoint.engine_queue import EngineQueue
from rillflow_parts.endpoint.openai_protocol import NEUTRAL
from rillflow_parts.endpoint.openai_server import Door, NewRows
from rillflow_parts.endpoint.tool_calls import tool_format
from tests.clients.small_model import CALL, TOOLS, make_tokenizer
from tests.parts.endpoint.scripted import ScriptedEngine

KEY = "a key of sixteen letters"
ONE, TWO = CALL % (1, 2), CALL % (3, 4)
USER = {"messages": [{"role": "user", "content": "both sums"}], "tools": TOOLS}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A door with an engine that says what a test tells it to."""

    at: str
    engine: ScriptedEngine
    tokenizer: Tokenizer

    def asked(self, path: str, says: Any = None, key: str = KEY) -> tuple[int, Any]:
        """Return the status and the JSON, or the events of a stream."""
        at = urlsplit(self.at)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
        body, method = (None, "GET") if says is None else (json.dumps(says), "POST")
        connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.getheader("content-type", "").startswith("text/event-stream"):
            lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
            return answer.status, [json.loads(line) for line in lines if line != "[DONE]"]
        return answer.status, json.loads(text)

    def chat(self, answer: str, **more: Any) -> Any:
        """Return the answer to a chat, which the engine gives as told."""
        self.engine.answers.append(answer)
        status, found = self.asked("/v1/chat/completions", USER | more)
        assert status == 200, found
        return found


@pytest.fixture(scope="module")
def door() -> Iterator[Served]:
    tokenizer = Tokenizer(make_tokenizer())
    engine = ScriptedEngine(tokenizer)
    queue = EngineQueue(engine, tokenizer, max_rows=4)  # type: ignore[arg-type]
    visitor = NewRows(Encoder(tokenizer=tokenizer), RolloutConfig(max_tokens=400))
    tools = tool_format("auto", tokenizer)
    app = Door(queue, model="small", visitor={KEY: visitor}.get, tools=tools).app()
    going = True

    def passes() -> None:
        while going:
            if not queue.turn():
                time.sleep(0.002)

    thread = Thread(target=passes)
    thread.start()
    with LoopbackServer(app, bound(0)) as server:
        yield Served(at=server.url, engine=engine, tokenizer=tokenizer)
    going = False
    thread.join()
    queue.close()


def joined(events: list[Any]) -> dict[str, Any]:
    """Return the message that deltas make, as clients join them."""
    made: dict[str, Any] = {"content": "", "role": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        made["role"] += delta.get("role", "")
        made["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            assert call.pop("index") == len(made["tool_calls"])
            made["tool_calls"].append(call)
    made["content"] = made["content"] or None
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "content", "sums"),
    [(ONE, None, [(1, 2)]), (f"I add.\n{ONE}\n{TWO}", "I add.", [(1, 2), (3, 4)])],
)
def test_calls_are_in_the_message_and_not_in_its_text(
    door: Served, said: str, content: str | None, sums: list[Any], stream: bool
) -> None:
    found = door.chat(said, stream=stream)
    if stream:
        message, finish = joined(found), found[-1]["choices"][0]["finish_reason"]
    else:
        message, finish = found["choices"][0]["message"], found["choices"][0]["finish_reason"]
    calls = message["tool_calls"]
    assert (message["role"], message["content"], finish) == ("assistant", content, "tool_calls")
    assert [call["type"] for call in calls] == ["function"] * len(sums)
    assert len({call["id"] for call in calls}) == len(sums)
    told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert told == [("add", {"a": a, "b": b}) for a, b in sums]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "more"),
    [
        ('<tool_call>\n{"name": "add", "argum\n</tool_call>', {}),
        ("<tool_call>", {}),
        ("no call at all", {}),
        (ONE, {"tool_choice": "none"}),
        (ONE, {"tools": []}),
        (ONE, {"tools": None}),
    ],
)
def test_text_stays_text(door: Served, said: str, more: dict[str, Any], stream: bool) -> None:
    found = door.chat(said, **more, stream=stream)
    message = joined(found) if stream else found["choices"][0]["message"]
    finish = (found[-1] if stream else found)["choices"][0]["finish_reason"]
    assert (message["content"], finish) == (said, "stop") and not message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_row_after_the_first(door: Served, stream: bool) -> None:
    more = {"parallel_tool_calls": False, "return_token_ids": True, "stream": stream}
    found = door.chat(f"{ONE}\n{TWO}", **more)
    events = found if stream else [found]
    choices = [event["choices"][0] for event in events]
    calls = joined(found)["tool_calls"] if stream else choices[0]["message"]["tool_calls"]
    assert len(calls) == 1 and choices[-1]["finish_reason"] == "tool_calls"
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert door.tokenizer.decode(tokens) == ONE


def test_a_cut_answer_says_that_it_was_cut(door: Served) -> None:
    found = door.chat(ONE, max_tokens=6)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["message"]["content"].startswith("<tool_call>")


def test_calls_and_results_come_back_through_the_template(door: Served) -> None:
    call = door.chat(f"I add.\n{ONE}")["choices"][0]["message"]
    assert isinstance(call["tool_calls"][0]["function"]["arguments"], str)
    result = {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "3"}],
    }
    sent = call | {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    found = door.chat("It is 3.", messages=[*USER["messages"], sent, result])
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "It is 3."}
    text = "".join(door.tokenizer.pieces(door.engine.added[-1].tokens))
    assert text == (
        "<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\nboth sums<|im_end|>\n"
        f"<|im_start|>assistant\nI add.\n{ONE}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


HARMLESS: dict[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "seed": 1234,
    "response_format": {"type": "text"},
    "store": False,
    "metadata": {"run": "7"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "service_tier": "auto",
    "top_logprobs": 0,
    "logprobs": True,
    "logit_bias": {},
    "chat_template_kwargs": {"enable_thinking": False},
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "x",
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "modalities": ["text"],
    "skip_special_tokens": True,
    "best_of": 1,
    "stop": None,
    "functions": None,
}


def test_parameters_that_change_nothing_are_accepted(door: Served) -> None:
    plain = door.chat("hello", logprobs=True)["choices"]
    assert door.chat("hello", **HARMLESS)["choices"] == plain


TYPED = (
    *("seed", "store", "metadata", "reasoning_effort", "verbosity", "service_tier", "chat_template_kwargs"),
    *("parallel_tool_calls", "tool_choice", "prompt_cache_key", "safety_identifier", "request_id", "tools"),
)


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("value", [[1.5], 7.5])
def test_a_parameter_of_the_wrong_type_is_named(door: Served, name: str, value: Any) -> None:
    status, found = door.asked("/v1/chat/completions", USER | {name: value})
    assert status == 400 and name in found["error"]["message"]


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_parameter_that_would_change_something_is_refused_with_the_reason(door: Served, name: str) -> None:
    status, found = door.asked("/v1/chat/completions", USER | {name: {"type": "json_object"}})
    assert status == 400 and found["error"]["message"].startswith(f"{name} is not supported; why: ")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tool_choice": "required"}, "no call can be guaranteed"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "no call can be guaranteed"),
        ({"tools": [{"type": "web_search"}]}, "a tool is {'type': 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "has a name"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize is set by the server"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template is set by the server"),
        ({"chat_template_kwargs": {"a": ["<|im_end|>"]}}, "special token '<|im_end|>'"),
        ({"reasoning_effort": "<|im_end|>"}, "special token '<|im_end|>'"),
        ({"seed": 2**64}, "seed is"),
        ({"top_logprobs": 5}, "only the log probabilities of sampled tokens are kept"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"temprature": 1}, "did you mean 'temperature'?"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}, *USER["messages"]]}, "tool_calls is a list"),
        ({"messages": [{"role": "user", "content": "1", "refusal": "no"}]}, "message 1 of the prompt"),
    ],
)
def test_what_cannot_be_is_told(door: Served, more: dict[str, Any], told: str) -> None:
    status, found = door.asked("/v1/chat/completions", USER | more)
    assert status == 400 and told in found["error"]["message"], found


def test_a_model_and_the_server_s_health(door: Served) -> None:
    assert door.asked("/v1/models/small")[1]["id"] == "small"
    status, found = door.asked("/v1/models/a/b")
    assert status == 404 and "there is no model 'a/b'" in found["error"]["message"]
    assert door.asked("/health", key="none") == (200, {"status": "ok"})
    assert door.asked("/v1/models/small", key="none")[0] == 401


FLAT = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_tool_and_reads_its_result(door: Served, stream: bool) -> None:
    first = [{"role": "user", "content": [{"type": "input_text", "text": "both sums"}]}]
    says = {
        "input": first,
        "tools": FLAT,
        "instructions": "Add.",
        "store": False,
        "include": [],
        "stream": stream,
    }
    door.engine.answers += [f"I add.\n{ONE}", "It is 3."]
    status, found = door.asked("/v1/responses", says)
    response = found[-1]["response"] if stream else found
    assert (status, response["status"], response["object"]) == (200, "completed", "response")
    message, call = response["output"]
    assert message["content"][0]["text"] == "I add." and call["name"] == "add"
    if stream:
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        names = [event["type"].removeprefix("response.") for event in found]
        assert names[:3] == ["created", "in_progress", "output_item.added"] and names[-1] == "completed"
        assert "function_call_arguments.done" in names
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    _, found = door.asked("/v1/responses", says | {"input": [*first, message, call, result]})
    response = found[-1]["response"] if stream else found
    assert response["output"][0]["content"][0]["text"] == "It is 3."
    assert response["usage"]["output_tokens"] > 2
    text = "".join(door.tokenizer.pieces(door.engine.added[-1].tokens))
    assert f"<|im_start|>assistant\nI add.\n{ONE}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({}, "input is"),
        ({"input": 3}, "input"),
        ({"input": "1", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"input": "1", "background": True}, "background is True"),
        ({"input": "1", "text": {"format": {"type": "json_object"}}}, "the format is text"),
        ({"input": "1", "tools": [{"type": "web_search"}]}, "a tool is"),
        ({"input": [{"type": "image"}]}, 'item 1 of the input has the type "image"'),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "has the content"),
        ({"input": "1", "messages": []}, "there is no parameter 'messages'"),
        ({"input": "1", "n": 2}, "a response has one answer"),
    ],
)
def test_a_response_that_cannot_be_is_told(door: Served, says: dict[str, Any], told: str) -> None:
    status, found = door.asked("/v1/responses", says)
    assert status == 400 and told in found["error"]["message"], found


def test_the_same_seed_and_prompt_have_the_same_numbers_whoever_asks(door: Served) -> None:
    rows = []
    for seed, content in ((1, "a"), (1, "a"), (2, "a"), (1, "b"), (None, "a"), (None, "a")):
        door.chat("x", seed=seed, messages=[{"role": "user", "content": content}])
        rows.append(door.engine.added[-1].row)
    assert rows[0] == rows[1] and len(set(rows)) == 5
    door.engine.answers += ["x"] * 3
    status, found = door.asked("/v1/completions", {"prompt": ["a", "a", "b"], "seed": 5, "max_tokens": 3})
    assert status == 200 and len(found["choices"]) == 3, "equal rows run one after the other"


def test_a_prompt_is_echoed(door: Served) -> None:
    door.engine.answers += ["x"] * 2
    _, found = door.asked("/v1/completions", {"prompt": "both sums", "echo": True})
    assert found["choices"][0]["text"] == "both sumsx"
    _, found = door.asked("/v1/completions", {"prompt": "both sums", "echo": True, "max_tokens": 0})
    assert (found["choices"][0]["text"], found["usage"]["completion_tokens"]) == ("both sums", 0)
    status, found = door.asked("/v1/completions", {"prompt": "both sums", "echo": True, "logprobs": 1})
    assert status == 400 and "sampled tokens only" in found["error"]["message"]
    for more, told in (({"max_tokens": 0}, "max_tokens is 0"), ({"echo": 1}, "echo is 1")):
        status, found = door.asked("/v1/completions", {"prompt": "1", **more})
        assert status == 400 and told in found["error"]["message"]
