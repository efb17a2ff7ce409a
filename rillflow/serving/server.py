"""LoopbackServer: serve an application on a loopback socket; connections are bounded in number and time.

LoopbackServer(app, bound(port)) ─┬─ run: until a signal ends it, in the main thread
                                  └─ with: in a background thread, until the block ends
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rillflow.errors import StreamError
from rillflow.runs.ending_signals import handled

HEAD_WITHIN_S = 10.0
"""Time of a request's head, from its first byte; of the first one, from the connection's beginning."""
KEEP_ALIVE_S = 120
"""Time of a connection without a request, longer than that of clients (httpx 5 s, aiohttp 15 s, Go 90 s), so
that no client writes a request into a connection that is being closed."""
MOST_CONNECTIONS, SPARE_FILES = 2048, 128
"""Connections of a server at once; open files that are kept for other uses."""
BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's own default."""
TRIED = 100
"""Ports that are tried for the one that an error suggests."""


class Impatient(H11Protocol):  # type: ignore[misc]
    """A connection that closes if a request's head does not arrive in time, however slowly bytes arrive.

    A connection without a request stays for ``KEEP_ALIVE_S``. If there are ``MOST_CONNECTIONS``, a new one
    closes the one that has been idle longest, or else the one whose request has been arriving longest.
    """

    _since = 0.0  # of the present head or body, or of the last answer's end
    _deadline: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_arriving(self) -> bool:
        """Whether the body of the present request is not whole."""
        return not self._is_idle and self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first head when the connection opens."""
        super().connection_made(transport)
        if len(self.connections) > most_connections() and not self._replaces_another():
            transport.close()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Start the timeout of a head at its first byte, and end the timeout when the head is whole."""
        before = self.cycle
        if self._is_idle and self._deadline is None:
            self._expect_head()
        super().data_received(data)
        if self.cycle is not before and self._deadline is not None:
            self._deadline.cancel()
            self._deadline, self._since = None, self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note when the connection became idle."""
        self._since = self.loop.time()
        super().on_response_complete()

    def _expect_head(self) -> None:
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(HEAD_WITHIN_S, self._close_unless_answering)

    def _close_unless_answering(self) -> None:
        self._deadline = None
        if self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def _replaces_another(self) -> bool:
        """Close an idle connection, or one whose request is arriving; return whether there was one."""
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        idle = [each for each in others if each._is_idle] or [each for each in others if each._is_arriving]
        if idle:
            min(idle, key=lambda each: each._since).transport.close()
        return bool(idle)


def most_connections() -> int:
    """Return the largest number of connections: ``MOST_CONNECTIONS``, or what the open files allow."""
    return min(MOST_CONNECTIONS, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES, 8))


HOW: dict[str, Any] = {
    "http": Impatient,
    "ws": "none",
    "timeout_keep_alive": KEEP_ALIVE_S,
    "log_level": "warning",
    "access_log": False,
    "timeout_graceful_shutdown": 1,
}
"""Uvicorn settings of every application."""


class SignalledServer(uvicorn.Server):  # type: ignore[misc]
    """A server that every ending signal ends as SIGTERM does: open requests are answered first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; uvicorn raises them again when it has ended."""
        with super().capture_signals(), handled(lambda number: self.handle_exit(number, None)):
            yield


def bound(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on an IPv4 address; port 0 selects a free port.

    Raises:
        StreamError: the port is taken.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(BACKLOG)  # a client that knows the address may connect before the server runs
    except (OSError, OverflowError) as error:
        made.close()
        free = _free_port(port, host)
        named = f"choose another port, such as --port {free}" if free else "choose another port"
        raise StreamError(
            f"cannot listen on {host}:{port}", why=str(error), fix=f"{named}, or 0 for any free one"
        ) from None
    return made


def _free_port(taken: int, host: str) -> int:
    """Return the first free port of the next TRIED ones, or 0."""
    for port in range(taken + 1, min(taken + TRIED, 2**16 - 1) + 1):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind((host, port))
            return port
    return 0


class LoopbackServer(AbstractContextManager["LoopbackServer"]):
    """A server on a bound socket.

    Args:
        app: the ASGI application.
        listening: the socket; closed at the end.
    """

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self._inner, self._socket = SignalledServer(uvicorn.Config(app, **HOW)), listening
        host, port = listening.getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"
        """Base URL for clients."""
        self._thread = Thread(target=self.run, name="rillflow-door", daemon=True)

    def run(self) -> None:
        """Serve until stopped."""
        self._inner.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop ``run`` after finished answers are sent; from any thread."""
        self._inner.should_exit = True

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        while not self._inner.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()
