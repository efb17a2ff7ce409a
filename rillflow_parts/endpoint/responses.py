"""Responses: the newer form of OpenAI's protocol, as conversations and back, without state between requests.

    input items ── chat ──> ChatRequest      messages, calls and results of tools become turns
    Choice ── Output ──> items, or the events of a stream

The subset is what a client needs that sends the whole conversation each time: text, function tools, streams.
What refers to an earlier response is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rillflow.errors import DataError, StreamError
from rillflow.tasks.example import shown
from rillflow_parts.endpoint.openai_protocol import ChatRequest, NewTokens, SamplingRequest, checked
from rillflow_parts.endpoint.request_fields import Messages, Name, Notes, Text, Tools

_TEXTS = ("input_text", "output_text", "text", "summary_text")
_STATEFUL = ("previous_response_id", "conversation", "prompt")


class ResponsesRequest(SamplingRequest):
    """A conversation as items."""

    input: Text | Messages = Field(description="text of the user, or items")
    instructions: Text = Field(default="", description="system message before the input")
    tools: Tools = Field(default=[], description="functions for the chat template")
    tool_choice: Name | Notes = Field(default="auto", description="as in a chat")
    parallel_tool_calls: bool = Field(default=True, description="as in a chat")
    max_output_tokens: NewTokens | None = Field(default=None, description="largest number of new tokens")
    reasoning: Notes = Field(default={}, description="effort is a variable of the chat template")
    text: Notes = Field(default={}, description="format text; verbosity is a template variable")
    include: list[Name] = Field(
        default=[], max_length=64, fail_fast=True, description="ignored: there is nothing more to include"
    )
    truncation: Literal["disabled", "auto"] = Field(
        default="disabled", description="a conversation beyond the context is refused"
    )
    background: Literal[False] = Field(default=False, description="answers come in the response")
    max_tool_calls: NewTokens | None = Field(default=None, description="ignored: the client calls tools")
    chat_template_kwargs: Notes = Field(default={}, description="as in a chat")
    previous_response_id: Name | None = Field(default=None, description="refused: nothing is stored")
    conversation: Name | Notes | None = Field(default=None, description="refused: nothing is stored")
    prompt: Notes | None = Field(default=None, description="refused: nothing is stored")
    kind = "response"

    @field_validator("text")
    @classmethod
    def _is_text(cls, text: dict[str, Any]) -> dict[str, Any]:
        if text.get("format", {"type": "text"}) != {"type": "text"}:
            raise PydanticCustomError("text", "the format is text: tokens are sampled without constraints")
        return text

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(tool.get("type") != "function" for tool in tools):
            raise PydanticCustomError("tools", "a tool is {'type': 'function', 'name': ...}; none runs here")
        return tools

    def check(self) -> None:
        """See SamplingRequest."""
        given = self.model_dump(include={*_STATEFUL})
        for name in _STATEFUL:
            if given[name] is not None:
                why = "no response is stored"
                raise StreamError(f"{name} is not supported", why=why, fix="send the whole conversation")
        if self.n != 1:
            raise StreamError(f"n is {self.n}", why="a response has one answer", fix="send several requests")

    def chat(self) -> ChatRequest:
        """Return the conversation as a chat.

        Raises:
            DataError: an item is invalid.
        """
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        names = ("strict", "name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: tool[name] for name in names if name in tool}}
            for tool in self.tools
        ]
        same = self.model_dump(include=set(SamplingRequest.model_fields), exclude_unset=True)
        more = {
            "messages": [*system, *_turns(items)],
            "tools": tools or None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.get("effort"),
            "verbosity": self.text.get("verbosity"),
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return checked(ChatRequest, same | more)


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages that items are: calls belong to the assistant's message before them."""
    calling: dict[str, Any] | None = None
    for number, item in enumerate(items, 1):
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calling = calling or {"role": "assistant", "content": ""}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            calling.setdefault("tool_calls", []).append(call)
            continue
        if kind == "reasoning":
            continue
        if calling is not None:
            yield calling
            calling = None
        if kind == "message":
            turn = {"role": item.get("role"), "content": _content(item.get("content"))}
            if turn["role"] != "assistant":
                yield turn
            else:
                calling = turn
        elif kind == "function_call_output":
            answered = {"tool_call_id": str(item.get("call_id", "")), "content": _content(item.get("output"))}
            yield {"role": "tool", **answered}
        else:
            why = "items are messages, function_call and function_call_output"
            raise DataError(f"item {number} of the input has the type {shown(kind)}", why=why)
    if calling is not None:
        yield calling


def _content(content: Any) -> Any:
    """Return content with its text parts under the name of a chat; anything else as it is."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in _TEXTS
        else part
        for part in content
    ]


class Output:
    """The output of one response, whole or as events.

    Args:
        asked: the request.
        name: id of the response.
        model: name of the model.
    """

    def __init__(self, asked: ResponsesRequest, name: str, model: str) -> None:
        self._asked, self._name, self._model, self._created = asked, name, model, time.time()
        self._items = list[dict[str, Any]]()
        self._number, self._finish, self._is_open = 0, "", False

    def events(self, choice: Mapping[str, Any]) -> Iterator[str]:
        """Yield the events of a chat's delta."""
        if not self._number:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self.response(None))
        delta = choice["delta"]
        if delta.get("content"):
            yield from self._text(delta["content"])
        for call in delta.get("tool_calls", ()):
            yield from self._end_of_text()
            yield from self._call(call)
        self._finish = choice["finish_reason"] or ""
        if self._finish:
            if not self._items:
                yield from self._text("")
            yield from self._end_of_text()

    def end(self, usage: Mapping[str, int]) -> Iterator[str]:
        """Yield the last event."""
        kind = "response.incomplete" if self._finish == "length" else "response.completed"
        yield self._event(kind, response=self.response(usage))

    def failed(self, error: Mapping[str, Any]) -> str:
        """Return the event of an error."""
        told = {"code": "server_error", "message": error["error"]["message"]}
        return self._event(
            "response.failed", response={**self.response(None), "status": "failed", "error": told}
        )

    def read(self, choice: Mapping[str, Any]) -> None:
        """Take a whole answer."""
        for _ in self.events({**choice, "delta": choice["message"]}):
            pass

    def response(self, usage: Mapping[str, int] | None) -> dict[str, Any]:
        """Return the response; without usage, it is still in progress."""
        asked, is_cut = self._asked, self._finish == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        counts = (
            None
            if usage is None
            else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        )
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions or None,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._model,
            "output": [*self._items],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": counts,
        }

    def _event(self, kind: str, **more: Any) -> str:
        told = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(told)}\n\n"

    def _at(self) -> dict[str, Any]:
        """Return the place of the newest text."""
        place = len(self._items) - 1
        return {"item_id": self._items[place]["id"], "output_index": place, "content_index": 0}

    def _text(self, new: str) -> Iterator[str]:
        if not self._is_open:
            name = f"msg_{self._name.partition('_')[2]}_{len(self._items)}"
            item = {
                "type": "message",
                "id": name,
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            place = len(self._items)
            yield self._event("response.output_item.added", output_index=place, item=item)
            part = {"type": "output_text", "text": "", "annotations": []}
            self._items.append({**item, "content": [part]})
            self._is_open = True
            yield self._event("response.content_part.added", **self._at(), part={**part})
        if new:
            self._items[-1]["content"][0]["text"] += new
            yield self._event("response.output_text.delta", **self._at(), delta=new, logprobs=[])

    def _end_of_text(self) -> Iterator[str]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        yield self._event("response.output_text.done", **self._at(), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._at(), part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: Mapping[str, Any]) -> Iterator[str]:
        function, place = call["function"], len(self._items)
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **function}
        self._items.append({**item, "status": "completed"})
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        at = {"item_id": item["id"], "output_index": place}
        arguments = function["arguments"]
        yield self._event("response.function_call_arguments.delta", **at, delta=arguments)
        told = {"name": function["name"], "arguments": arguments}
        yield self._event("response.function_call_arguments.done", **at, **told)
        yield self._event("response.output_item.done", output_index=place, item=self._items[place])
