"""Transport: frames from a client to a server, in another process or in a thread of this one.

    Client ── ask(kind, request, arrays) ──> Socket ── frames ──> Server ──> Session ──> Plane

A socket that ends counts as a dead holder.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rillflow.errors import StreamError
from rillflow.workers.wire import Arrays, Channel, Message
from rillflow_service.plane import Plane
from rillflow_service.requests import Kind, raised
from rillflow_service.segments import Files, Memory
from rillflow_service.server import READ_AHEAD_BYTES, Server
from rillflow_service.store import Store

START_S = 20.0
SLACK_S = 30.0
"""Seconds after a request's own limit at which a silent server counts as lost."""


class InProcess:
    """A server in a thread of this process, with segments in anonymous memory and no listener.

    Args:
        capacity_bytes: largest total size of all columns.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        self.segments = Memory()
        """Memory of the columns."""
        self.token = secrets.token_urlsafe(32)
        """Token of the clients."""
        self._plane = Plane(Store(self.segments, capacity_bytes=capacity_bytes))
        self._server = Server(self._plane, self.token)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._serving: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._run, name="data plane", daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        """Return a connection to the server.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        if not self._thread.is_alive():
            raise ConnectionRefusedError("its thread has ended")
        serving = asyncio.run_coroutine_threadsafe(self._serve(theirs), self._loop)
        self._serving.add(serving)  # an event loop alone does not keep its tasks alive
        serving.add_done_callback(self._serving.discard)
        return ours

    def close(self) -> None:
        """End the server; waiting calls get an error."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        expiring = asyncio.ensure_future(self._plane.expire())
        await self._ended.wait()
        expiring.cancel()

    async def _serve(self, theirs: socket.socket) -> None:
        await self._server.serve(*await asyncio.open_unix_connection(sock=theirs, limit=READ_AHEAD_BYTES))


class Socket:
    """A connection of one holder to a server.

    Args:
        where: folder of a server on this machine, a server in this process, or ``host:port`` of a remote one.
        token: token of a remote server; the others tell it.
        name: name of the client.
        store: connection to the store that columns are written into, if it is another process.
    """

    def __init__(
        self, where: Path | InProcess | str, token: str, name: str, store: Socket | None = None
    ) -> None:
        self.segments: Files | Memory | None = None
        """Shared memory for columns; None if they travel with the requests."""
        self._lock = threading.Lock()
        self.token = token
        """Token of the server."""
        try:
            if isinstance(where, InProcess):
                self.token, self.segments, connected = where.token, where.segments, where.connect()
            elif isinstance(where, Path):
                self.token, self.segments = (where / "token").read_text(), Files(where / "segments")
                connected = socket.socket(socket.AF_UNIX)
                connected.connect(str(where / "socket"))
            else:
                host, _, port = where.rpartition(":")
                connected = socket.create_connection((host, int(port)), timeout=START_S)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            fix = "pass the folder that the server printed at its start, or host:port"
            raise StreamError(f"no data plane answers at {where}", why=str(error), fix=fix) from None
        self._channel = Channel(connected)
        hello = {"token": self.token, "name": name}
        hello |= {"store": store.address, "there": store.holder} if store else {}
        says = self.ask(Kind.HELLO, hello, {}, START_S).says
        self.holder: str = says["holder"]
        """Name of this client in the server."""
        self.address: str = says["address"]
        """Address for fetching columns from its store."""
        self.tables: str = says["tables"]
        """Address of the tables, if they are in another process."""

    def ask(self, kind: Kind, request: Mapping[str, Any], arrays: Arrays, wait_s: float) -> Message:
        """Return the answer to a request that may wait ``wait_s`` seconds.

        Raises:
            StreamError: the request failed, or there is no answer.
        """
        with self._lock:
            try:
                self._channel.wait_at_most(wait_s + SLACK_S)
                self._channel.send(kind, request, arrays)
                answer = self._channel.receive()
            except OSError as error:
                self._channel.close()
                what = f"the data plane does not answer {kind.name.lower()}"
                raise StreamError(what, why=str(error)) from None
        return raised(answer)

    def close(self) -> None:
        """End the connection; the holder's groups become ready again."""
        self._channel.close()
