"""The openai client, unmodified, against `rillflow serve`: chats, tools, streams, responses, completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", "strict": True, **FUNCTION}]


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    return openai.OpenAI(base_url=served.url, api_key=served.token)


def result_of(call: Any) -> dict[str, Any]:
    values = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(values["a"] + values["b"])}


def test_a_chat_is_answered(client: Any, served: Any) -> None:
    turns = [{"role": "user", "content": "17+25"}]
    said = client.chat.completions.create(model=served.model, messages=turns, temperature=0)
    assert said.choices[0].message.content == "I think 42."
    assert (said.choices[0].finish_reason, said.choices[0].message.tool_calls) == ("stop", None)


@pytest.mark.parametrize(
    ("prompt", "sums", "last"),
    [("17+25", [(17, 25)], "It is 42."), ("both sums", [(17, 25), (3, 4)], "They are 42 and 7.")],
)
def test_tools_are_called_and_their_results_read(
    client: Any, served: Any, prompt: str, sums: list[Any], last: str
) -> None:
    turns: list[Any] = [{"role": "user", "content": prompt}]
    asked = {"model": served.model, "tools": TOOLS, "temperature": 0}
    said = client.chat.completions.create(messages=turns, **asked).choices[0]
    assert (said.finish_reason, said.message.content) == ("tool_calls", None)
    told = [json.loads(call.function.arguments) for call in said.message.tool_calls]
    assert told == [{"a": a, "b": b} for a, b in sums]
    turns += [said.message, *map(result_of, said.message.tool_calls)]
    said = client.chat.completions.create(messages=turns, **asked).choices[0]
    assert (said.finish_reason, said.message.content) == ("stop", last)


def test_a_stream_of_calls_is_joined_by_the_client(client: Any, served: Any) -> None:
    turns: list[Any] = [{"role": "user", "content": "both sums"}]
    asked = {"model": served.model, "tools": TOOLS, "temperature": 0}
    with client.chat.completions.stream(
        messages=turns, stream_options={"include_usage": True}, **asked
    ) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds and whole.usage.completion_tokens > 10
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls" and message.role == "assistant"
    assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls] == [17, 3]
    turns += [message.model_dump(), *map(result_of, message.tool_calls)]
    with client.chat.completions.stream(messages=turns, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == "They are 42 and 7."


def test_one_call_at_a_time(client: Any, served: Any) -> None:
    turns = [{"role": "user", "content": "both sums"}]
    asked = {"model": served.model, "tools": TOOLS, "temperature": 0, "parallel_tool_calls": False}
    said = client.chat.completions.create(messages=turns, **asked).choices[0]
    assert (len(said.message.tool_calls), said.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: Any, served: Any, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "17+25"}]
    asked = {"model": served.model, "tools": FLAT, "temperature": 0, "instructions": "Add."}

    def answer() -> Any:
        if not stream:
            return client.responses.create(input=items, **asked)
        with client.responses.stream(input=items, **asked) as events:
            assert {"response.created", "response.completed"} <= {event.type for event in events}
            return events.get_final_response()

    said = answer()
    (call,) = said.output
    assert (said.status, call.type, json.loads(call.arguments)) == (
        "completed",
        "function_call",
        {"a": 17, "b": 25},
    )
    items += [*said.output, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    said = answer()
    assert said.output_text == "It is 42." and said.usage.output_tokens > 2


def test_harmless_parameters(client: Any, served: Any) -> None:
    said = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "17+25"}],
        temperature=0,
        seed=1,
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        reasoning_effort="low",
        service_tier="auto",
        logprobs=True,
        top_logprobs=0,
        logit_bias={},
        user="me",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "skip_special_tokens": True},
    )
    assert said.choices[0].message.content == "I think 42."
    with pytest.raises(openai.BadRequestError, match="without grammar constraints"):
        client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "17+25"}],
            response_format={"type": "json_object"},
        )


def test_the_same_seed_gives_the_same_answer(client: Any, served: Any) -> None:
    def answer(seed: int | None) -> str:
        said = client.completions.create(
            model=served.model, prompt="17+25", temperature=3.0, max_tokens=20, seed=seed
        )
        return str(said.choices[0].text)

    assert answer(1) == answer(1) != answer(2) and answer(None) != answer(None)


def test_models(client: Any, served: Any) -> None:
    assert client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("another")


def test_a_client_that_leaves_takes_its_rows_along(client: Any, served: Any) -> None:
    """Other clients are answered at once, although the row that was left could run for long."""
    asked = {"model": served.model, "prompt": "17+25", "temperature": 3.0, "max_tokens": 1900}
    for _ in range(8):
        stream = client.completions.create(**asked, n=16, stream=True)
        next(iter(stream))
        stream.close()
    turns = [{"role": "user", "content": "17+25"}]
    said = client.chat.completions.create(model=served.model, messages=turns, temperature=0)
    assert said.choices[0].message.content == "I think 42."
