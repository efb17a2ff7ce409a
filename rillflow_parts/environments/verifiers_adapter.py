"""Adapter of verifiers: its environments as a class with ``reset`` and ``step``.

    Env.run_episode(task) ─> harness ─> interception ─ HTTP ─> _Upstream ─ messages ─> reset, step return them
                                                         <─ HTTP ── answer <─ step(message)

The environment runs its own logic: harness, tools, judges, rewards. Only the model's answers come from the
policy. All episodes of a process share one event loop, one environment, and one HTTP server on the loopback
device. A conversation must only grow; one that rewrites its past fails its row.

It is loaded by path in a child process, as the module ``verifiers_adapter``, and needs the package verifiers.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import (
    builtin_harness_ids,
    default_harness_id,
    load_environment,
    resolve_env_config,
)

__all__ = ["ChatHarness"]

_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A conversation with the task's tools, in this process: the harness ``null`` without its program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask the policy until it calls no tool; a stop of the task ends the conversation too."""
        del trace, runtime
        system, prompt = self.resolve_prompt(data)
        turns: list[Any] = [{"role": "system", "content": system}] if system else []
        given = [] if prompt is None else prompt
        turns += (
            [{"role": "user", "content": given}] if isinstance(given, str) else map(message_to_wire, given)
        )
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, dispatch, open_servers = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            more: dict[str, Any] = {"tools": tools} if tools else {}
            while True:
                try:
                    answer = await client.chat.completions.create(model=ctx.model, messages=turns, **more)
                except openai.APIStatusError as error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
                message = answer.choices[0].message
                turns.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    said = await _called(open_servers, dispatch, call)
                    turns.append({"role": "tool", "tool_call_id": call.id, "content": said})


async def _called(servers: Any, dispatch: Any, call: Any) -> Any:
    """Return a tool's answer, or what is wrong with the call."""
    name = call.function.name
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        given = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(given, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(servers, dispatch, name, given)


class VerifiersEnvironment:
    """One episode of a verifiers environment.

    Args:
        name: name of the taskset.
        arguments: the environment's config, such as ``taskset``, ``agent``, or ``id`` of an environment.
    """

    takes_messages = True

    def __init__(self, name: str, **arguments: Any) -> None:
        self._shared = _shared(name, json.dumps(arguments, sort_keys=True))
        self._inbox = SimpleQueue[Any]()
        self._reply: SimpleQueue[Any] | None = None
        self._said: list[dict[str, Any]] = []
        self._number = -1

    def reset(self, verifiers_task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of a task, as ``rows`` lists them; return its first messages."""
        self._number, self._running = self._shared.begin(verifiers_task, self._inbox)
        messages, tools = self._next()
        if not messages:
            raise RuntimeError(
                f"the episode ended without a request to the model: {self._fault or 'no error'}"
            )
        return messages, {"tools": tools}

    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Give the environment the policy's message."""
        assert self._reply is not None, "the environment waits for a message"
        self._said.append(message)
        self._reply.put(message)
        messages, tools = self._next()
        if messages:
            return messages, 0.0, False, False, {"tools": tools}
        if self._fault:
            raise RuntimeError(self._fault)
        metrics = {
            name: value for each in self._traces for name, value in each.metrics.items() if value is not None
        }
        return None, sum(each.reward for each in self._traces), True, False, {"metrics": metrics}

    def close(self) -> None:
        """End the episode."""
        if self._number >= 0:
            self._shared.end(self._number, self._running)

    def _next(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the new messages of the next request and its tools; no messages if the episode is over."""
        kind, what, self._reply = self._inbox.get()
        if kind == "over":
            self._traces = [] if isinstance(what, BaseException) else [*what.traces]
            self._fault = _fault(what)
            return [], None
        asked = [_compared(each) for each in what["messages"]]
        known = [_compared(each) for each in self._said]
        if asked[: len(known)] != known:
            raise ValueError("the environment's request does not begin with the earlier messages")
        new = what["messages"][len(known) :]
        self._said += new
        return [{key: each[key] for key in _COMPARED if each.get(key) is not None} for each in new], what.get(
            "tools"
        )


def _compared(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: message[key] for key in ("role", "content") if message.get(key)}
    if message.get("tool_calls"):
        found["tool_calls"] = [each["function"]["name"] for each in message["tool_calls"]]
    return found


def _fault(what: Any) -> str:
    """Return why an episode failed; empty if it did not."""
    if isinstance(what, BaseException):
        return f"{type(what).__name__}: {what}"
    errors = [*what.errors, *(error for each in what.traces for error in each.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors[:1])


class _Shared:
    """An environment, its event loop, and the HTTP server that stands for the model."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._numbers, self._inboxes = count(), dict[int, SimpleQueue[Any]]()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._inboxes))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.env = load_environment(resolve_env_config(_config(name, arguments)))
        self._stack = AsyncExitStack()
        serving = self._stack.enter_async_context(self.env.serving())
        asyncio.run_coroutine_threadsafe(_entered(serving), self._loop).result()

    def begin(self, data: dict[str, Any], inbox: SimpleQueue[Any]) -> tuple[int, Any]:
        """Begin an episode; return its number, and its handle."""
        number = next(self._numbers)
        self._inboxes[number] = inbox
        kind = type(self.env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self.env.taskset.config.task)
        url = f"http://127.0.0.1:{self._server.server_address[1]}/{number}"
        client = vf.EvalClientConfig(base_url=url, api_key_var="RILLFLOW_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)

        async def run() -> None:
            try:
                episode: Any = await self.env.run_episode(task, context)
            except Exception as error:  # noqa: BLE001  the environment may raise anything
                episode = error
            inbox.put(("over", episode, None))

        return number, asyncio.run_coroutine_threadsafe(run(), self._loop)

    def end(self, number: int, running: Any) -> None:
        """Forget an episode."""
        self._inboxes.pop(number, None)
        running.cancel()


async def _entered(serving: Any) -> None:
    await serving


@cache
def _shared(name: str, arguments: str) -> _Shared:
    return _Shared(name, json.loads(arguments))


def _config(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the environment's config: a task without a harness of its own has ``ChatHarness``."""
    taskset = {"id": name, **arguments.get("taskset", {})}
    agent = {"runtime": {"type": "subprocess"}, **arguments.get("agent", {})}
    if "harness" not in agent and default_harness_id(name) in builtin_harness_ids():
        agent["harness"] = {"id": "verifiers_adapter"}
    return {**arguments, "taskset": taskset, "agent": agent}


def _handler(inboxes: Mapping[int, SimpleQueue[Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """A request to the model: it waits until the policy has answered."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            number = int(self.path.split("/")[1])
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = SimpleQueue[Any]()
            if number not in inboxes:
                self.send_error(410)
                return
            inboxes[number].put(("asked", body, reply))
            self._send(_completion(reply.get(), is_chunk=bool(body.get("stream"))), bool(body.get("stream")))

        def _send(self, answer: dict[str, Any], is_stream: bool) -> None:
            text = json.dumps(answer)
            data = (f"data: {text}\n\ndata: [DONE]\n\n" if is_stream else text).encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Write nothing."""

    return Handler


def _completion(message: dict[str, Any], *, is_chunk: bool) -> dict[str, Any]:
    """Return the policy's message as an answer of OpenAI's protocol."""
    calls = message.get("tool_calls")
    said = (
        {**message, "tool_calls": [{**each, "index": place} for place, each in enumerate(calls)]}
        if calls
        else message
    )
    return {
        "id": "chatcmpl-policy",
        "object": "chat.completion.chunk" if is_chunk else "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "delta" if is_chunk else "message": said if is_chunk else message,
                "finish_reason": "tool_calls" if calls else "stop",
            }
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def rows(name: str, arguments: dict[str, Any], file: str) -> None:
    """Write the tasks of an environment to a file as JSON lines: ``prompt`` and ``verifiers_task``.

    Raises:
        ValueError: the taskset never ends.
    """
    env = load_environment(resolve_env_config(_config(name, arguments)))
    if not env.taskset.bounded:
        raise ValueError(f"the taskset {name} never ends; select tasks with taskset arguments")
    with Path(file).open("w", encoding="utf-8") as lines:
        for each in env.taskset:
            task = each.data.model_dump(mode="json", exclude_defaults=True)
            lines.write(json.dumps({"prompt": each.data.prompt_text or "?", "verifiers_task": task}) + "\n")
