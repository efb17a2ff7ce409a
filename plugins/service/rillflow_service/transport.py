"""Transport: send a client's requests to a plane, over a socket or by a call in the same process.

    Client ── ask(kind, request, arrays) ──> Socket ── frames ──> server ──> Session ──> Plane
                                         └─> Direct ─ the plane's thread ──> Session ──> Plane

A failed request raises the same error in both. A socket that ends, or a closed call interface, counts as a
dead holder.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from rillflow.errors import StreamError
from rillflow.serving.http_body import checked_request
from rillflow.workers.wire import Arrays, Channel, Message
from rillflow_service.plane import Plane
from rillflow_service.requests import Hello, Kind, raised
from rillflow_service.segments import Files, Memory
from rillflow_service.session import Session
from rillflow_service.store import Store

START_S = 20.0
Found = TypeVar("Found")
SLACK_S = 30.0
"""Seconds after a request's own limit at which a silent server counts as lost."""


class Transport(Protocol):
    """A connection of one holder to a plane."""

    segments: Files | Memory | None
    """Shared memory for columns; None if they travel with the requests."""

    def ask(self, kind: Kind, request: Mapping[str, Any], arrays: Arrays, wait_s: float) -> Message:
        """Return the answer to a request that may wait ``wait_s`` seconds.

        Raises:
            StreamError: the request failed, or there is no answer.
        """

    def close(self) -> None:
        """End the connection; the holder's groups become ready again."""


class Socket:
    """Frames to a server's process.

    Args:
        where: folder of a server on this machine, or ``host:port`` of a remote one.
        token: token of the server.
        name: name of the client.
        store: connection to the store that columns are written into, if it is another process.
    """

    def __init__(self, where: Path | str, token: str, name: str, store: Socket | None = None) -> None:
        self.segments: Files | Memory | None = None
        self._lock = threading.Lock()
        try:
            if isinstance(where, Path):
                self.segments = Files(where / "segments")
                connected = socket.socket(socket.AF_UNIX)
                connected.connect(str(where / "socket"))
            else:
                host, _, port = where.rpartition(":")
                connected = socket.create_connection((host, int(port)), timeout=START_S)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise StreamError(f"no data plane answers at {where}", why=str(error)) from None
        self._channel = Channel(connected)
        hello = {"token": token, "name": name}
        hello |= {"store": store.address, "there": store.holder} if store else {}
        says = self.ask(Kind.HELLO, hello, {}, START_S).says
        self.holder: str = says["holder"]
        """Name of this client in the server."""
        self.address: str = says["address"]
        """Address for fetching columns from its store."""
        self.tables: str = says["tables"]
        """Address of the tables, if they are in another process."""

    def ask(self, kind: Kind, request: Mapping[str, Any], arrays: Arrays, wait_s: float) -> Message:
        """Send a frame, and wait for its answer."""
        with self._lock:
            try:
                self._channel.wait_at_most(wait_s + SLACK_S)
                self._channel.send(kind, request, arrays)
                answer = self._channel.receive()
            except OSError as error:
                self._channel.close()
                raise StreamError(
                    f"the data plane does not answer {kind.name.lower()}", why=str(error)
                ) from None
        return raised(answer)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()


class InProcess:
    """A plane in a thread of this process, with segments in anonymous memory and no listener.

    Args:
        capacity_bytes: largest total size of all columns.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        self.plane = Plane(Store(Memory(), capacity_bytes=capacity_bytes))
        """The streams; only the thread may change them."""
        self._loop = asyncio.new_event_loop()
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="data plane", daemon=True)
        self._thread.start()

    def holder(self, name: str) -> str:
        """Return a unique holder name."""
        checked_request(Hello, {"token": "", "name": name})
        return f"{name}#{next(self._numbers)}"

    def submit(self, work: Coroutine[Any, Any, Found]) -> Future[Found]:
        """Run something in the thread; its result is cancelled if the plane has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            ended = Future[Found]()
            ended.cancel()
            return ended

    def close(self) -> None:
        """End the plane; waiting calls get an error."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        expiring = self._loop.create_task(self.plane.expire())
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop) | {expiring}
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()


class Direct:
    """A session of a plane in this process; the calling thread waits for the plane's thread.

    Args:
        home: the plane.
        name: name of the client.
    """

    def __init__(self, home: InProcess, name: str) -> None:
        self.segments: Files | Memory | None = home.plane.store.segments
        self._home, self._session = home, Session(home.plane, home.holder(name))

    def ask(self, kind: Kind, request: Mapping[str, Any], arrays: Arrays, wait_s: float) -> Message:
        """Have the plane's thread answer; the answer's arrays are copies."""
        found = self._home.submit(self._session.answer(Message(kind=kind, says=dict(request), arrays=arrays)))
        try:
            answer = found.result(wait_s + SLACK_S)
        except (CancelledError, TimeoutError):
            found.cancel()
            what = f"the data plane does not answer {kind.name.lower()}"
            raise StreamError(what, why="its thread has ended or hangs") from None
        return replace(answer, arrays={name: array.copy() for name, array in answer.arrays.items()})

    def close(self) -> None:
        """End the session of the holder."""
        self._home.submit(self._session.end())
