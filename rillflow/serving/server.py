"""LoopbackServer: serve an application on a loopback socket; idle connections are closed.

LoopbackServer(app, bound(port)) ─┬─ run: until a signal ends it, in the main thread
                                  └─ with: in a background thread, until the block ends
"""

from __future__ import annotations

import contextlib
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
BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's own default."""
TRIED = 100
"""Ports that are tried for the one that an error suggests."""


class Impatient(H11Protocol):  # type: ignore[misc]
    """A connection that closes if no complete request head arrives in time, however slowly bytes arrive."""

    def connection_made(self, transport: Any) -> None:
        """Start the timeout when the connection opens."""
        super().connection_made(transport)
        self.loop.call_later(HEAD_WITHIN_S, self._look, None)

    def _look(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is before:
            self.transport.close()
        else:
            self.loop.call_later(HEAD_WITHIN_S, self._look, self.cycle)


HOW: dict[str, Any] = {
    "http": Impatient,
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
