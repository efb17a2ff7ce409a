"""JSON requests: post many bodies to one HTTP address, and return a reply or an error for each.

    bodies ─ queue ─> at most ``concurrency`` threads, each with one connection ─ POST ─> reply | HttpFailure
                            └─ 429, 5xx, no connection: again, later          └─ deadline: TimeoutError

    consumes      the bodies
    waits for     a reply, or the time before the next try; the caller waits for all of them
    unblocked by  the deadline, which closes all connections
    produces      one entry per body, in order
    shuts down    threads end with their connection; they are daemons, and the child is killed with them

No proxy is used, and no redirect is followed. Standard library only: it runs in a reward's child.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

REPLY_BYTES = 1 << 24
"""Longest reply in bytes."""
FIRST_WAIT_S = 0.25
"""Seconds before the first repetition; each further one waits twice as long, and half as much by chance."""
MOST_WAIT_S = 10.0
"""Longest wait before a repetition, also if the server asks for more."""
_SHOWN = 300
_STACK_BYTES = 1 << 19


class HttpFailure(Exception):
    """A request without a usable reply; its text says why."""


class _Again(HttpFailure):
    """A failure that may pass."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass(frozen=True, kw_only=True)
class HttpAddress:
    """An address, and how it is called.

    Example:
        HttpAddress(url="http://localhost:8000/score", concurrency=8, retries=3, limit_s=10.0)
    """

    url: str
    """Address that bodies are posted to."""
    concurrency: int
    """Largest number of requests at the same time."""
    retries: int
    """Number of repetitions of a request that fails."""
    limit_s: float
    """Seconds after which all open requests time out."""
    key_variable: str | None = None
    """Environment variable with the key for ``Authorization: Bearer``; None: no key is sent."""

    def __post_init__(self) -> None:
        self.headers()

    def post_all(self, bodies: Sequence[object]) -> list[Any]:
        """Return the JSON of each reply; an HttpFailure or a TimeoutError where there is none."""
        work = _Work(self, bodies)
        threading.stack_size(_STACK_BYTES)  # else 256 threads exceed the child's address space
        count = min(self.concurrency, len(bodies))
        threads = [threading.Thread(target=work.run, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, work.until - time.monotonic()))
        return work.close()

    def headers(self) -> dict[str, str]:
        """Return the headers of a request, with the key."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is None:
            return headers
        if self.key_variable not in os.environ:
            raise RuntimeError(
                f"the environment variable {self.key_variable}, which holds the key, is not set"
            )
        return {**headers, "Authorization": f"Bearer {os.environ[self.key_variable]}"}


class _Work:
    """Requests of one ``post_all``, shared by its threads."""

    def __init__(self, address: HttpAddress, bodies: Sequence[object]) -> None:
        self.until = time.monotonic() + address.limit_s
        self._address, self._headers, self._bodies = address, address.headers(), bodies
        late = TimeoutError(f"{address.url} gave no answer within {address.limit_s:.3g} s")
        self._found: list[Any] = [late] * len(bodies)
        self._places: Iterator[int] = iter(range(len(bodies)))
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._connections: set[http.client.HTTPConnection] = set()

    def run(self) -> None:
        """Post bodies until none is left; one connection, opened again after a failure."""
        connection = self._connection()
        try:
            while (place := self._next()) is not None:
                answer = self._tried(connection, json.dumps(self._bodies[place]).encode())
                with self._lock:
                    if not self._closed.is_set() and answer is not None:
                        self._found[place] = answer
        finally:
            connection.close()

    def close(self) -> list[Any]:
        """End open requests and return what was found; later answers are dropped."""
        with self._lock:
            self._closed.set()
            found = [*self._found]
        for connection in [*self._connections]:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        return found

    def _next(self) -> int | None:
        with self._lock:
            return None if self._closed.is_set() else next(self._places, None)

    def _connection(self) -> http.client.HTTPConnection:
        to = urlsplit(self._address.url)
        host, left_s = to.hostname or "", max(0.1, self.until - time.monotonic())
        kind = http.client.HTTPSConnection if to.scheme == "https" else http.client.HTTPConnection
        connection = kind(host, to.port, timeout=left_s)
        self._connections.add(connection)
        return connection

    def _tried(self, connection: http.client.HTTPConnection, body: bytes) -> Any:
        """Return a reply's JSON or an HttpFailure; None if the time is over."""
        for turn in range(self._address.retries + 1):
            try:
                return self._posted(connection, body)
            except _Again as failure:
                last, wait_s = failure, max(failure.wait_s, FIRST_WAIT_S * 2**turn * random.uniform(1, 1.5))
            except HttpFailure as failure:
                return failure
            if turn < self._address.retries and self._closed.wait(min(wait_s, MOST_WAIT_S)):
                return None
        tries = f" ({turn + 1} tries)" if turn else ""
        return None if self._closed.is_set() else HttpFailure(f"{last}{tries}")

    def _posted(self, connection: http.client.HTTPConnection, body: bytes) -> Any:
        to = urlsplit(self._address.url)
        target = (to.path or "/") + (f"?{to.query}" if to.query else "")
        try:
            connection.request("POST", target, body, self._headers)
            reply = connection.getresponse()
            data = reply.read(REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _Again(f"{self._address.url}: {type(error).__name__}: {error}") from None
        if len(data) > REPLY_BYTES:
            connection.close()
            raise HttpFailure(f"{self._address.url} sent more than {REPLY_BYTES:,} bytes")
        if reply.status in (408, 429) or reply.status >= 500:
            raise _Again(self._said(reply, data), _seconds(reply.headers["Retry-After"]))
        if not 200 <= reply.status < 300:
            raise HttpFailure(self._said(reply, data))
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise HttpFailure(f"{self._address.url} sent no JSON: {self._shown(data)}") from None

    def _said(self, reply: http.client.HTTPResponse, data: bytes) -> str:
        to = f", to {reply.headers['Location']}; redirects are not followed" * (reply.status // 100 == 3)
        return f"{self._address.url} answered {reply.status} {reply.reason}{to}: {self._shown(data)}"

    def _shown(self, data: bytes) -> str:
        """Return the beginning of a reply, without the key: messages are recorded."""
        text = data[: 4 * _SHOWN].decode("utf-8", "replace")
        if "Authorization" in self._headers:
            text = text.replace(self._headers["Authorization"].removeprefix("Bearer "), "***")
        return " ".join(text.split())[:_SHOWN] or "(empty)"


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.strip().isdecimal() else 0.0
