"""LoopbackServer: an application of ours behind a socket; connections that say nothing are closed.

LoopbackServer(app, bound(port)) ─┬─ run: until a signal ends it, in the main thread
                                  └─ with: in a thread of its own, until the block ends
"""

from __future__ import annotations

import socket
import time
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rillflow.errors import StreamError

HEAD_WITHIN_S = 10.0
BACKLOG = 2048
"""Connections that wait to be accepted; as many as uvicorn's own."""


class Impatient(H11Protocol):  # type: ignore[misc]
    """A connection that is closed where no whole head of a request comes, however slowly its bytes do."""

    def connection_made(self, transport: Any) -> None:
        """Watch the connection from its first moment."""
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
"""How every application is served."""


def bound(port: int) -> socket.socket:
    """A socket that listens on the loopback device; 0 takes a free port.

    Raises:
        StreamError: the port is taken.
    """
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen(BACKLOG)  # at once: a client that reads the address may connect before the server runs
    except (OSError, OverflowError) as error:
        made.close()
        raise StreamError(f"port {port} cannot be listened on", why=str(error), fix="--port 0") from None
    return made


class LoopbackServer(AbstractContextManager["LoopbackServer"]):
    """A server on a bound socket.

    Args:
        app: what answers.
        listening: where; closed at the end.
    """

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self._inner, self._socket = uvicorn.Server(uvicorn.Config(app, **HOW)), listening
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        """What clients are told."""
        self._thread = Thread(target=self.run, name="rillflow-door", daemon=True)

    def run(self) -> None:
        """Serve until told to end."""
        self._inner.run(sockets=[self._socket])

    def stop(self) -> None:
        """Tell ``run`` to end: answers that are ready still leave; from any thread."""
        self._inner.should_exit = True

    def __enter__(self) -> LoopbackServer:
        self._thread.start()
        while not self._inner.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()
