"""Server: the data plane's process, ``python -m rillflow_service.server``; serves until its input ends.

    client ── Hello(token) ── request ──> one task per connection: read, run, answer ──> Plane
           <── ok, or an error's three sentences ──┘
    store of another machine ── Hello(token) ── Join ──> from then on the tables request, the store answers

The folder, 0700, has ``socket``, ``token`` (0600), ``segments``, and the TCP address in ``address``, if any.
A connection that ends counts as a dead holder. An unreadable frame is answered with its error, and the
connection is closed, because later bytes on it cannot be trusted. Shutdown: the input ends, for example when
the parent process dies, or the tables end that this store has joined; then the folder is removed. The next
server removes the folder of a killed server.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hmac
import logging
import os
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from rillflow.errors import RillflowError, StreamError
from rillflow.serving.body_limit import BodyLimit, within_s
from rillflow.serving.http_body import Declined
from rillflow.workers.wire import HEAD_BYTES, Message, WireError, head_of, message_of, packed
from rillflow_service.access import write_private
from rillflow_service.plane import Plane
from rillflow_service.remote_store import RemoteStore
from rillflow_service.requests import Hello, Join, Kind, raised, sentences
from rillflow_service.segments import Files
from rillflow_service.session import Session, parsed
from rillflow_service.store import Store

HOME = Path("/dev/shm")
HELLO_WITHIN_S = 10.0
SKIPPED_BYTES = 2**20
READ_AHEAD_BYTES = 2**22
"""Bytes of a connection that are read before they are wanted."""
_log = logging.getLogger(__name__)


class _Connection:
    """Frames in both directions."""

    def __init__(
        self,
        plane: Plane,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: tuple[BodyLimit, BodyLimit],
    ) -> None:
        self._plane, self._reader, self._writer = plane, reader, writer
        self._begins, self._others = limits
        self.held = AsyncExitStack()
        """Room of the last frame, if it begins groups."""
        self._received, self._sent = count(), count()

    async def read(self, *, is_greeted: bool = True) -> Message:
        """Read the next frame; a frame that begins groups keeps its room until the next call.

        Raises:
            WireError: there is no room for the frame, or it does not arrive in time.
            StreamError: the frame exceeds the store; it is read to its end, and the next one may follow.
        """
        await self.held.aclose()
        head = head_of(await self._reader.readexactly(HEAD_BYTES), number=next(self._received))
        if not is_greeted and head.body_bytes:
            raise WireError("arrays came before the token")
        is_begin, size = head.kind == Kind.BEGIN, head.body_bytes
        limit = self._begins if is_begin else self._others
        async with AsyncExitStack() as until_read:
            try:
                if size <= limit.most_bytes:
                    await (self.held if is_begin else until_read).enter_async_context(limit.room(size))
                async with asyncio.timeout(within_s(size)):
                    front = await self._reader.readexactly(head.body_at - HEAD_BYTES)
                    if size > limit.most_bytes:
                        await self._skip(size, limit)
                    body = await self._reader.readexactly(size)
            except TimeoutError:
                raise WireError(
                    f"a frame of {size} bytes is not whole after {within_s(size):g} s",
                    why="a frame has 30 s, and a second for each MiB",
                ) from None
            except Declined as error:
                raise WireError(error.what, error.why, error.fix) from None
        self._plane.carried_bytes += head.body_at + size
        return message_of(head, front[: head.json_bytes], body)

    async def _skip(self, num_bytes: int, limit: BodyLimit) -> None:
        """Read a body that fits into no store, part by part, and refuse it."""
        left = num_bytes
        while left:
            left -= len(await self._reader.readexactly(min(left, SKIPPED_BYTES)))
        why = f"the store has {limit.most_bytes}"
        fix = "write less at once"
        raise StreamError(f"a request with {num_bytes} bytes", why=why, fix=fix)

    async def send(self, message: Message) -> None:
        """Write a frame."""
        frame = packed(message.kind, message.says, message.arrays, number=next(self._sent))
        self._plane.carried_bytes += frame.nbytes
        whole = bytearray(frame.nbytes)
        frame.write_into(whole)
        self._writer.write(whole)
        await self._writer.drain()

    async def ask(self, kind: Kind, says: dict[str, Any]) -> dict[str, Any]:
        """Send a request without arrays, and return the JSON of its answer."""
        await self.send(Message(kind=kind, says=says))
        return raised(await self.read()).says

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class Server:
    """Greets every connection and answers its requests.

    Args:
        plane: the streams, or the store of other tables.
        token: token that clients must present.
        address: address for fetching columns from the store; empty if there is none.
    """

    def __init__(self, plane: Plane, token: str, address: str = "") -> None:
        self._plane = plane
        self._token = token
        self._address = address
        self._numbers = count()
        self._limits = BodyLimit(plane.store.capacity_bytes), BodyLimit(plane.store.capacity_bytes)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its greeting to its end."""
        connection = _Connection(self._plane, reader, writer, self._limits)
        async with AsyncExitStack() as stack:
            stack.callback(connection.close)
            stack.push_async_exit(connection.held)
            try:
                session = await self._greeted(connection)
                stack.push_async_callback(session.end)
                await self._answer(connection, session)
            except RillflowError as error:
                _log.warning("a connection is closed: %s", error.what)
                with suppress(OSError):
                    await connection.send(Message(kind=Kind.ERROR, says=sentences(error)))
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                pass

    async def join(self, address: str) -> asyncio.Task[None]:
        """Join this store to the tables of another process; return the task, which ends with them."""
        host, _, port = address.rpartition(":")
        connection = _Connection(
            self._plane, *await asyncio.open_connection(host, int(port), limit=READ_AHEAD_BYTES), self._limits
        )
        await connection.ask(Kind.HELLO, {"token": self._token, "name": "store"})
        await connection.ask(Kind.JOIN, {"address": self._address})
        self._plane.table_address = address
        session = Session(self._plane, "tables", is_table=True)
        return asyncio.ensure_future(self._answer(connection, session))

    async def _answer(self, connection: _Connection, session: Session) -> None:
        while True:
            try:
                message = await connection.read()
                if message.kind == Kind.JOIN:
                    return await self._joined(connection, message)
                answer = await session.answer(message)
            except WireError:
                raise
            except RillflowError as error:
                answer = Message(kind=Kind.ERROR, says=sentences(error))
            await connection.send(answer)

    async def _joined(self, connection: _Connection, message: Message) -> None:
        """Serve the connection of a remote store, which answers requests from now on, until it ends."""
        request = parsed(message)
        assert isinstance(request, Join)
        store = RemoteStore(request.address, connection.send, connection.close)
        number = self._plane.join(store)
        try:
            await connection.send(Message(kind=Kind.OK, says={}))
            while True:
                store.answered(await connection.read())
        finally:
            store.end()
            self._plane.lost(number)

    async def _greeted(self, connection: _Connection) -> Session:
        """Verify the token of a client and return its session."""
        async with asyncio.timeout(HELLO_WITHIN_S):
            hello = parsed(await connection.read(is_greeted=False))
        if not isinstance(hello, Hello) or not hmac.compare_digest(
            hello.token.encode(), self._token.encode()
        ):
            raise WireError(
                "the token is wrong", why="a client must send the token in the server's token file"
            )
        holder = f"{hello.name}#{next(self._numbers)}"
        if hello.store:
            self._plane.settle(holder, hello.store, hello.there)
        says = {"holder": holder, "address": self._address, "tables": self._plane.table_address}
        await connection.send(Message(kind=Kind.OK, says=says))
        return Session(self._plane, holder)


async def _run(folder: Path, asked: argparse.Namespace) -> None:
    (folder / "segments").mkdir(mode=0o700)
    token = asked.token_file.read_text().strip() if asked.token_file else secrets.token_urlsafe(32)
    write_private(folder / "token", token)
    plane = Plane(Store(Files(folder / "segments"), capacity_bytes=asked.capacity_bytes))
    tcp = socket.create_server((asked.host, asked.port)) if asked.host else None
    server = Server(plane, token, "{}:{}".format(*tcp.getsockname()[:2]) if tcp else "")
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read_input() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(ended.set)

    if asked.join:
        async with asyncio.timeout(HELLO_WITHIN_S):
            tables = await server.join(asked.join)
        tables.add_done_callback(lambda _: ended.set())
    if tcp:
        await asyncio.start_server(server.serve, sock=tcp, limit=READ_AHEAD_BYTES)
        (folder / "address").write_text("{}:{}".format(*tcp.getsockname()[:2]))
    await asyncio.start_unix_server(server.serve, folder / "socket", limit=READ_AHEAD_BYTES)
    sys.stdout.write(f"{folder}\n")
    sys.stdout.flush()
    expiring = asyncio.ensure_future(plane.expire())
    threading.Thread(target=read_input, daemon=True).start()
    await ended.wait()
    expiring.cancel()


@contextmanager
def own_folder(home: Path = HOME) -> Iterator[Path]:
    """Yield a folder in shared memory that is removed at exit, or by the next server after a crash."""
    sweep(home)
    folder = home / f"rillflow-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "ready").touch()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(home: Path = HOME) -> None:
    """Remove the folders of killed servers."""
    for ready in home.glob("rillflow-*/ready"):
        with suppress(OSError), (ready.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(ready.parent, ignore_errors=True)


def main() -> None:
    """Serve in a new folder and print its path once clients can connect."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument(
        "--home", type=Path, default=HOME, help="parent of the server's folder, in shared memory"
    )
    parser.add_argument("--host", default="", help="address to listen on over TCP too, with the same token")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-file", type=Path, help="file with an existing token; default: a new token")
    parser.add_argument("--join", default="", help="HOST:PORT of the tables whose columns this store holds")
    asked = parser.parse_args()
    try:
        if asked.join and not (asked.host and asked.token_file):
            why = "readers on other machines fetch from this store with the tables' token"
            fix = "add --host ADDRESS --token-file FILE"
            raise StreamError(f"--join {asked.join} without --host and --token-file", why=why, fix=fix)
        with own_folder(asked.home) as folder:
            asyncio.run(_run(folder, asked))
    except (RillflowError, OSError, TimeoutError) as error:
        raise SystemExit(f"the data plane's server cannot start: {error}") from None


if __name__ == "__main__":
    main()
