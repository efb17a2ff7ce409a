"""Host: the child's end of one environment process. It holds many environments, one for each row.

    a frame of calls ─ socket ─> reader ─> queue ─> thread: Class(**arguments), reset(**columns),
    a frame of answers <─ socket ── all that are there ──┘          step(text), close()

    reader        consumes frames of calls until the socket ends; waits for the next one. While calls or
                  answers wait, at most ``PATIENCE_MS``: then every waiting call gets a thread, and the
                  answers that are there are sent
    thread        consumes calls until none waits, then sends all answers in one frame
    shuts down    the socket ends, or the process is killed

Fast calls run one after the other, because a change of threads takes longer than they do. A slow call keeps
the other calls and answers waiting for ``PATIENCE_MS``; the driver kills the process of one that hangs.

It is loaded by path in a child process, whose functions load the user's class and describe its errors.
"""

from __future__ import annotations

import inspect
import json
import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rillflow.isolation.frames import FrameReader, encode
from rillflow.rewards.calling import Refused, describe, load_function
from rillflow.rewards.outcome import shown_value

TEXT_CHARACTERS = 1 << 20
"""Longest observation in characters."""
STACK_BYTES = 1 << 20
"""Stack of one thread in bytes: with the usual 8 MiB, many threads would fill the address space."""
PATIENCE_MS = 1
"""Milliseconds that a call may keep other calls and finished answers waiting."""
METHODS = ("reset", "step")


class Invalid(Exception):
    """A method returned something else than the protocol says."""


class Host:
    """The environments of one process.

    Args:
        loaded: the class, as ``load_function`` returns it.
        file: its file.
        arguments: arguments of the class.
    """

    def __init__(self, loaded: Callable[..., Any], file: Path, arguments: Mapping[str, Any]) -> None:
        names = dir(loaded)
        lacking = [name for name in METHODS if name not in names]
        if not isinstance(loaded, type) or lacking:
            has = f"has no {lacking[0]}" if isinstance(loaded, type) else "is no class"
            raise Refused(f"{has}; an environment is a class with reset and step")
        self._class, self._file, self._arguments = loaded, file, arguments
        self._has_close, self._takes_messages = "close" in names, "takes_messages" in names
        self._running, self._loops = dict[int, Any](), dict[int, Any]()
        self._calls, self._answers = deque[list[Any]](), deque[list[Any]]()
        self._idle, self._begin = threading.Semaphore(0), SimpleQueue[list[Any]]()
        self._sending = threading.Lock()

    @property
    def interface(self) -> dict[str, Any]:
        """Return the columns that ``reset`` takes, and whether ``step`` takes messages."""
        found = [*inspect.signature(self._class.reset).parameters.values()][1:]  # type: ignore[attr-defined]
        named = [each for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        return {
            "accepted": [each.name for each in named],
            "required": [each.name for each in named if each.default is each.empty],
            "takes_any": any(each.kind is each.VAR_KEYWORD for each in found),
            "takes_messages": self._takes_messages,
        }

    def run(self, link: socket.socket) -> None:
        """Answer calls until the socket ends."""
        threading.stack_size(STACK_BYTES)
        reader, poller = FrameReader(), select.poll()
        poller.register(link, select.POLLIN)
        while True:
            # In this order: a thread puts its answer there before it takes the next call.
            is_waiting = self._calls or self._answers
            if not poller.poll(PATIENCE_MS if is_waiting else None):
                while call := self._next():
                    self._start(call, link)
                self._send(link)
                continue
            piece = link.recv(1 << 16)
            if not piece:
                return
            for frame in reader.feed(piece):
                self._calls += frame["calls"]
            if call := self._next():
                self._start(call, link)

    def _start(self, call: list[Any], link: socket.socket) -> None:
        """Give a call to an idle thread, or to a new one."""
        if self._idle.acquire(blocking=False):
            self._begin.put(call)
        else:
            threading.Thread(target=self._work, args=(call, link), daemon=True).start()

    def _work(self, call: list[Any] | None, link: socket.socket) -> None:
        while True:
            while call:
                self._answer(*call)
                call = self._next()
            self._send(link)
            self._idle.release()
            call = self._begin.get()

    def _next(self) -> list[Any] | None:
        try:
            return self._calls.popleft()
        except IndexError:
            return None

    def _answer(self, number: int, what: str, given: Any) -> None:
        """Call a method; an environment whose episode has ended, or that has failed, is closed."""
        try:
            answer = [number, *self._called(number, what, given)]
        except BaseException as error:  # noqa: BLE001  the user's class may raise anything
            answer = [number, self._reason(what, error)]
        if what == "close":
            return
        self._answers.append(answer)
        if len(answer) == 2 or answer[3]:
            self._calls.append([number, "close", None])

    def _send(self, link: socket.socket) -> None:
        with self._sending:
            answers = [self._answers.popleft() for _ in range(len(self._answers))]
            if answers:
                link.sendall(encode({"type": "answers", "answers": answers}))

    def _called(self, number: int, what: str, given: Any) -> list[Any]:
        """Return observation, reward, whether the episode has ended, metrics, tools."""
        if what == "close":
            environment = self._running.pop(number, None)
            if environment is not None and self._has_close:
                self._awaited(number, environment.close())
            if (loop := self._loops.pop(number, None)) is not None:
                loop.close()
            return []
        if what == "reset":
            environment = self._running[number] = self._class(**self._arguments)
            return self._reset(self._awaited(number, environment.reset(**given)))
        return self._stepped(self._awaited(number, self._running[number].step(given)))

    def _awaited(self, number: int, result: Any) -> Any:
        """Return the result of a method, which may be a coroutine; an environment has its own event loop."""
        if not inspect.iscoroutine(result):
            return result
        import asyncio  # imported only here: it doubles the start time of a child

        if number not in self._loops:
            self._loops[number] = asyncio.new_event_loop()
        return self._loops[number].run_until_complete(result)

    def _reset(self, result: Any) -> list[Any]:
        observation, info = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        return [self._observation("reset", observation), 0.0, False, *self._told("reset", info)]

    def _stepped(self, result: Any) -> list[Any]:
        if not isinstance(result, tuple | list) or len(result) != 5:
            raise self._invalid(
                "step", result, "the five values observation, reward, terminated, truncated, info"
            )
        observation, reward, terminated, truncated, info = result
        number = _number(reward)
        if number is None:
            raise self._invalid("step", reward, "a finite number as its reward")
        for value in (terminated, truncated):
            if type(value).__name__ not in ("bool", "bool_"):
                raise self._invalid("step", value, "True or False as terminated and truncated")
        said, is_over = self._observation("step", observation), bool(terminated or truncated)
        return [said, number, is_over, *self._told("step", info)]

    def _observation(self, method: str, value: Any) -> str | list[Any] | None:
        if value is None:
            return None
        is_text = isinstance(value, str)
        is_messages = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        if not is_text and not is_messages:
            raise self._invalid(method, value, "text or a list of messages as its observation")
        try:
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            text.encode()
        except (TypeError, ValueError) as error:
            raise self._invalid(method, value, f"text or messages of plain data ({error})") from None
        if len(text) > TEXT_CHARACTERS:
            limit = f"at most {TEXT_CHARACTERS:,} characters as its observation, not {len(text):,}"
            raise self._invalid(method, text[:40], limit)
        return text if is_text else list(value)

    def _told(self, method: str, info: Any) -> list[Any]:
        """Return the metrics and tools of an info."""
        if not isinstance(info, dict):
            raise self._invalid(method, info, "a dict as its info")
        metrics = info.get("metrics", {})
        numbers = {str(name): _number(value) for name, value in dict(metrics).items()}
        bad = [name for name, value in numbers.items() if value is None]
        if bad:
            raise self._invalid(method, metrics[bad[0]], f"a finite number as the metric {bad[0]!r}")
        tools = info.get("tools")
        return [numbers, tools if tools is None else json.loads(json.dumps(tools))]

    def _invalid(self, method: str, value: Any, wanted: str) -> Invalid:
        return Invalid(f"returned {shown_value(value)}, and must return {wanted} ({self._line(method)})")

    def _line(self, method: str) -> str:
        function = inspect.unwrap(vars(self._class).get(method, self._class.step))  # type: ignore[attr-defined]
        code = function.__code__ if inspect.isfunction(function) else None
        return self._file.name if code is None else f"{self._file.name}, line {code.co_firstlineno}"

    def _reason(self, method: str, error: BaseException) -> str:
        said = str(error) if isinstance(error, Invalid) else f"raised {describe(error, self._file)}"
        return f"{self._class.__name__}.{method} {said}"


def _number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None
    is_number = math.isfinite(number) and abs(number) < 3.4e38 and not isinstance(value, str | bytes)
    return number if is_number else None


def serve(port: int, key: str, load: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Hold the environments of a class for the driver that listens on a port, until it closes the socket.

    Args:
        port: port of the loopback device.
        key: sent first, so that the driver knows this process.
        load: ``file``, ``text``, ``name`` and ``path`` of the class.
        arguments: arguments of the class.
    """
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(key.encode())
        try:
            host = Host(load_function(load), Path(load["file"]), arguments)
            link.sendall(encode({"type": "ready", **host.interface}))
        except Refused as refusal:
            link.sendall(encode({"type": "refused", "what": str(refusal)}))
            return
        host.run(link)
