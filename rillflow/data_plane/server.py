"""Server: the data plane's process, ``python -m rillflow.data_plane.server``; serves until its input ends.

    client ── Hello(token) ── request ──> one task a connection: read, carry out, answer ──> Plane
           <── ok, or an error's three sentences ──┘

The folder, 0700, has ``socket``, ``token`` (0600), ``segments``, and where it listens on TCP, ``address``.
A connection that ends is a holder that died. A frame that cannot be read is answered with its error, and the
connection is closed: what follows on it cannot be trusted. Shutdown: the input ends, as it does when whoever
started the server dies; then the folder is removed. A folder whose server was killed is removed by the next.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hmac
import logging
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from rillflow.data_plane.plane import Plane, sentences
from rillflow.data_plane.requests import Hello
from rillflow.data_plane.segments import Files
from rillflow.data_plane.session import Kind, Session, parsed
from rillflow.data_plane.store import Store
from rillflow.data_plane.wire import HEAD_BYTES, Message, WireError, head_of, message_of, packed
from rillflow.errors import RillflowError

HOME = Path("/dev/shm")
HELLO_WITHIN_S = 10.0
_log = logging.getLogger(__name__)


class _Connection:
    """Frames of one client, in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received, self._sent = count(), 0

    async def read(self, *, is_greeted: bool = True) -> Message:
        """The next frame."""
        head = head_of(await self._reader.readexactly(HEAD_BYTES), number=next(self._received))
        if not is_greeted and head.body_bytes:
            raise WireError("arrays came before the token")
        front = await self._reader.readexactly(head.body_at - HEAD_BYTES)
        return message_of(head, front[: head.json_bytes], await self._reader.readexactly(head.body_bytes))

    async def send(self, message: Message) -> None:
        """Write a frame."""
        frame = packed(message.kind, message.says, message.arrays, number=self._sent)
        self._sent += 1
        self._writer.write(frame.front)
        at = len(frame.front)
        for place, array in frame.places:
            self._writer.write(bytes(place - at) + array.tobytes())
            at = place + array.nbytes
        self._writer.write(bytes(frame.nbytes - at))
        await self._writer.drain()


class Server:
    """Listens, and gives every connection its task."""

    def __init__(self, plane: Plane, token: str) -> None:
        self._plane = plane
        self._token = token
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give a connection its task."""
        task = asyncio.ensure_future(self.serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its greeting to its end."""
        connection, session = _Connection(reader, writer), None
        try:
            session = await self._greeted(connection)
            while True:
                message = await connection.read()
                try:
                    answer = await session.answer(message)
                except WireError:
                    raise
                except RillflowError as error:
                    answer = Message(kind=Kind.ERROR, says=sentences(error))
                await connection.send(answer)
        except RillflowError as error:
            _log.warning("a connection is closed: %s", error.what)
            with suppress(OSError):
                await connection.send(Message(kind=Kind.ERROR, says=sentences(error)))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            if session is not None:
                session.end()
            writer.close()

    async def _greeted(self, connection: _Connection) -> Session:
        """Let a client in that knows the token."""
        async with asyncio.timeout(HELLO_WITHIN_S):
            hello = parsed(await connection.read(is_greeted=False))
        if not isinstance(hello, Hello) or not hmac.compare_digest(
            hello.token.encode(), self._token.encode()
        ):
            raise WireError("the token is wrong", why="who may ask has read the server's token file")
        await connection.send(Message(kind=Kind.OK, says={}))
        return Session(self._plane, f"{hello.name}#{next(self._numbers)}", is_local=hello.is_local)


async def _run(folder: Path, capacity_bytes: int, host: str, port: int) -> None:
    (folder / "segments").mkdir(mode=0o700)
    token = secrets.token_urlsafe(32)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token)
    plane = Plane(Store(Files(folder / "segments"), capacity_bytes=capacity_bytes))
    server = Server(plane, token)
    await asyncio.start_unix_server(server.accept, folder / "socket", limit=2**22)
    if host:
        listening = await asyncio.start_server(server.accept, host, port, limit=2**22)
        (folder / "address").write_text("{}:{}".format(*listening.sockets[0].getsockname()))
    sys.stdout.write(f"{folder}\n")
    sys.stdout.flush()
    expiring = asyncio.ensure_future(plane.expire())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    expiring.cancel()


@contextmanager
def own_folder(home: Path = HOME) -> Iterator[Path]:
    """A folder in shared memory that is gone when this process is done with it, or dead and another comes."""
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
    """Remove what servers that were killed left behind."""
    for ready in home.glob("rillflow-*/ready"):
        with suppress(OSError), (ready.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(ready.parent, ignore_errors=True)


def main() -> None:
    """Serve in a folder of its own, whose path is the one line of output once clients may come."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("capacity_bytes", type=int)
    parser.add_argument("--home", type=Path, default=HOME, help="where folders are made: shared memory")
    parser.add_argument("--host", default="", help="to listen on TCP besides, with the same token")
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()
    with own_folder(asked.home) as folder:
        asyncio.run(_run(folder, asked.capacity_bytes, asked.host, asked.port))


if __name__ == "__main__":
    main()
