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
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from rillflow.data_plane.instructions import Lease
from rillflow.data_plane.plane import Plane, sentences
from rillflow.data_plane.requests import MODELS, Begin, Done, Hello, Reserve, Return, Take, checked_request
from rillflow.data_plane.store import Store
from rillflow.data_plane.wire import HEAD_BYTES, Arrays, Message, WireError, head_of, message_of, packed
from rillflow.errors import RillflowError, StreamError

HOME = Path("/dev/shm")
EXPIRES_EVERY_S = 0.2
HELLO_WITHIN_S = 10.0
IDS, ROWS, TOKENS = ".ids", ".rows", ".tokens"
"""Arrays of a frame that are no columns."""
_log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    CREATE = 2
    RESERVE = 3
    BEGIN = 4
    TAKE = 5
    DONE = 6
    RETURN = 7
    DROP = 8
    LOOK = 9
    OK = 100
    ERROR = 101


REQUESTS = {int(Kind[model.__name__.upper()]): model for model in MODELS}


def parsed(message: Message) -> BaseModel:
    """The request in a frame.

    Raises:
        StreamError: there is no such request, or a value of it cannot be.
    """
    if message.kind not in REQUESTS:
        raise WireError(
            f"a frame of kind {message.kind}", why=f"requests are {', '.join(map(str, REQUESTS))}"
        )
    return checked_request(REQUESTS[message.kind], message.says)


def ids_and_tokens(arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The groups that a request is about, and their tokens; what is left in ``arrays`` are columns.

    Raises:
        StreamError: the groups are no numbers.
    """
    ids, tokens = arrays.pop(IDS, np.zeros(0, np.int64)), arrays.pop(TOKENS, None)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise StreamError(f"ids are {ids.dtype} {list(ids.shape)}", why="int64 [N] is expected")
    return ids, tokens


class _Connection:
    """One client, and what it may ask."""

    def __init__(self, plane: Plane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._plane = plane
        self._reader = reader
        self._writer = writer
        self._received, self._sent = count(), count()
        self._is_local = False
        self.holder = ""

    async def greet(self, token: str, number: int) -> None:
        """Let a client in that knows the token.

        Raises:
            WireError: it does not.
        """
        async with asyncio.timeout(HELLO_WITHIN_S):
            hello = parsed(await self.read())
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
            raise WireError("the token is wrong", why="who may ask has read the server's token file")
        self.holder, self._is_local = f"{hello.name}#{number}", hello.is_local
        await self.send(Kind.OK, {"segments": str(self._plane.store.folder)})

    async def read(self) -> Message:
        """The next frame."""
        head = head_of(await self._reader.readexactly(HEAD_BYTES), number=next(self._received))
        if not self.holder and head.body_bytes:
            raise WireError("arrays came before the token")
        front = await self._reader.readexactly(head.body_at - HEAD_BYTES)
        return message_of(head, front[: head.json_bytes], await self._reader.readexactly(head.body_bytes))

    async def send(self, kind: Kind, says: dict[str, Any], arrays: Arrays | None = None) -> None:
        """Write a frame."""
        frame = packed(kind, says, arrays, number=next(self._sent))
        self._writer.write(frame.front)
        at = len(frame.front)
        for place, array in frame.places:
            self._writer.write(bytes(place - at) + array.tobytes())
            at = place + array.nbytes
        self._writer.write(bytes(frame.nbytes - at))
        await self._writer.drain()

    async def answer(self, message: Message) -> None:
        """Carry a request out, and say what came of it."""
        plane, holder, request = self._plane, self.holder, parsed(message)
        arrays = dict(message.arrays)
        ids, tokens = ids_and_tokens(arrays)
        if arrays and isinstance(request, Begin | Done):
            request = request.model_copy(update={"segment": await plane.keep(arrays, holder)})
        says: dict[str, Any] = {}
        found: dict[str, NDArray[Any]] = {}
        match request:
            case Hello():
                raise WireError("a second greeting")
            case Reserve():
                says["segment"] = await plane.reserve(request, holder)
            case Begin():
                found[IDS] = await plane.begin(request, tokens, holder)
            case Take():
                if lease := await plane.take(request, holder):
                    return await self._grant(request.stream, lease)
                says["lease"] = None
            case _:
                says = plane.answer(request, ids, tokens, holder)
        return await self.send(Kind.OK, says, found)

    async def _grant(self, stream: str, lease: Lease) -> None:
        found: dict[str, NDArray[Any]] = {IDS: lease.ids, ROWS: lease.rows, TOKENS: lease.tokens}
        says: dict[str, Any] = {"lease": lease.number, "columns": []}
        for place, cells in enumerate(self._plane.located(stream, lease)):
            if self._is_local:
                says["columns"].append(list(cells.columns))
                found |= {f".segments{place}": cells.segments, f".places{place}": cells.places}
            else:
                found |= self._plane.gathered(cells)
        try:
            await self.send(Kind.OK, says, found)
        except WireError:
            self._plane.give_back(Return(stream=stream, lease=lease.number), self.holder)
            raise


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
        connection = _Connection(self._plane, reader, writer)
        try:
            await connection.greet(self._token, next(self._numbers))
            while True:
                message = await connection.read()
                try:
                    await connection.answer(message)
                except WireError:
                    raise
                except RillflowError as error:
                    self._plane.store.give_up(connection.holder)
                    await connection.send(Kind.ERROR, sentences(error))
        except RillflowError as error:
            _log.warning("a connection is closed: %s", error.what)
            with suppress(OSError):
                await connection.send(Kind.ERROR, sentences(error))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            self._plane.died(connection.holder)
            writer.close()

    async def expire(self) -> None:
        """End leases in time, for ever."""
        while True:
            await asyncio.sleep(EXPIRES_EVERY_S)
            self._plane.expire()


async def _run(folder: Path, capacity_bytes: int, host: str, port: int) -> None:
    (folder / "segments").mkdir(mode=0o700)
    token = secrets.token_urlsafe(32)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token)
    server = Server(Plane(Store(folder / "segments", capacity_bytes=capacity_bytes)), token)
    await asyncio.start_unix_server(server.accept, folder / "socket", limit=2**22)
    if host:
        listening = await asyncio.start_server(server.accept, host, port, limit=2**22)
        (folder / "address").write_text("{}:{}".format(*listening.sockets[0].getsockname()))
    sys.stdout.write(f"{folder}\n")
    sys.stdout.flush()
    expiring = asyncio.ensure_future(server.expire())
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
