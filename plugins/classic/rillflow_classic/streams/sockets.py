"""Streams over TCP, between machines: every end has the tables in memory of its own, and sends what it wrote.

    worker ── DEALER ── rows of samples ─────────────────> ROUTER hub ── weights, control, free slots ──> all
    actor ─── DEALER ── rows of requests, answers ── ROUTER policy worker          (its address: from the hub)

A message is a token with a head in JSON that names tables and rows, and one frame for each row, as it is in
memory. A row has one writer at a time, so a reader's copy is what the writer has, a little later. A message
with another token, or a row of another size, is dropped; nothing is pickled. The hub sends weights and
control to a worker that has confirmed the last ones, so that a slow worker skips versions.

Loop of the hub's thread, in the trainer's process
    consumes      rows that workers wrote; those for a buffer worker it passes on
    waits for     a message, or a change in this process
    unblocked by  a worker; ``publish``, ``control`` and the release of a fragment
    produces      rows for the workers
    shuts down    ``close``. A worker that is replaced joins anew, and its predecessor is not heard any more
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from rillflow.errors import ConfigError
from rillflow_classic.streams.shared_tables import SharedTables
from rillflow_classic.streams.streams import WRITTEN, EndKind, Streams, StreamSpec

Rows = Sequence[tuple[str, int]]
"""Tables and their rows, in the order in which they are written."""


def open_streams(kind: str, spec: StreamSpec, host: str = "127.0.0.1") -> Streams:
    """Return the trainer's end of new streams.

    Args:
        kind: ``tcp``, or ``shared_memory``, which is also for the workers of one process.
        spec: the sizes.
        host: address of this machine that the others reach, for ``tcp``.
    """
    shared = SharedTables(spec.tables, spec.bells)
    return SocketHub(spec, shared, host) if kind == "tcp" else Streams(spec, shared)


@dataclass(kw_only=True)
class _Peer:
    """A worker that the hub knows."""

    identity: bytes
    """Its name at the hub's socket."""
    address: str
    """Where a policy worker takes requests."""
    waits_for_answer: bool = False
    """Whether it has not confirmed the last weights and control."""
    versions: dict[str, int] = field(default_factory=dict)
    """Versions of the weights that were sent, by policy."""
    known: object = None
    """Control and addresses that were sent."""


class SocketHub(Streams):
    """The trainer's end.

    Raises:
        ConfigError: ``host`` is no address of this machine.
    """

    def __init__(self, spec: StreamSpec, shared: SharedTables, host: str) -> None:
        super().__init__(spec, shared)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            why = f"no port can be opened at this address: {error.strerror}"
            fix = "set it to an address of this machine that the workers reach"
            raise ConfigError(f"workers.host is {host!r}", why=why, fix=fix) from error
        self.address, self.token = f"tcp://{host}:{port}", secrets.token_bytes(16)
        self._peers: dict[str, _Peer] = {}
        self._due: deque[tuple[str, Rows]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stream-hub", daemon=True)
        self._thread.start()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("spec", "address", "token")}

    def end(self, kind: EndKind, index: int) -> Streams:
        """Return the end of a worker, in its process."""
        return SocketEnd(self.spec, self.address, self.token, kind, index)

    def close(self) -> None:
        """End the thread and the sockets, and release the memory."""
        self._is_closed = True
        self._shared.ring("hub")
        self._thread.join()
        self._context.destroy(linger=0)
        super().close()

    def _tell(self, to: str, tables: Sequence[str], rows: Iterable[int]) -> bool:
        self._due.append((to, [(table, row) for row in rows for table in tables]))
        self._shared.ring("hub")
        return True

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._shared.descriptor("hub"), zmq.POLLIN)
        while not self._is_closed:
            poller.poll()
            self._shared.wait("hub", 0.0)
            for identity, *frames in received(self._socket):
                if (said := head_of(frames, self.token)) is not None:
                    self._heard(bytes(identity.buffer), said, frames)
            self._send_due()
            for name in self._peers:
                self._inform(name)

    def _heard(self, identity: bytes, said: dict[str, Any], frames: list[zmq.Frame]) -> None:
        name, to = said["from"], said["to"]
        if "joins" in said:
            self._send_due()
            self._peers[name] = _Peer(identity=identity, address=said["joins"])
            self._due.append((name, self._held_for(name)))
        if name not in self._peers or self._peers[name].identity != identity:
            return
        self._peers[name].waits_for_answer &= "has_control" not in said
        if write_rows(self._shared, said["rows"], frames) and said["rows"]:
            if to == "trainer":
                self._shared.ring("trainer")
            else:
                self._due.append((to, said["rows"]))

    def _held_for(self, name: str) -> Rows:
        """Return what a new worker must know: an actor, which slots are free; a buffer, its fragments."""
        kind, _, index = name.partition("/")
        if kind == "worker":
            return []
        slots = self.spec.slots_of(kind, int(index))
        if kind == "actor":
            return [("marks", slot) for slot in slots.tolist()]
        waiting = slots[self._shared.columns["marks"]["state"][slots] == WRITTEN]
        return [(table, slot) for slot in waiting.tolist() for table in self.spec.sample_tables]

    def _send_due(self) -> None:
        while self._due:
            self._send(*self._due.popleft())

    def _send(self, to: str, rows: Rows, frames: Sequence[Any] = (), **said: Any) -> None:
        if to in self._peers:
            frames = frames or [bytes(self._shared.rows[table][at]) for table, at in rows]
            head = message_head(self.token, {"from": "trainer", "to": to, "rows": rows, **said})
            self._socket.send_multipart([self._peers[to].identity, head, *frames], copy=False)

    def _inform(self, name: str) -> None:
        """Send a worker the newest weights, then control, unless it has them."""
        peer = self._peers[name]
        if peer.waits_for_answer:
            return
        control = bytes(self._shared.rows["control"][0])  # first, so that the weights are not older
        rows, frames = list[tuple[str, int]](), list[Any]()
        for policy in () if self.spec.workers and name.startswith("actor") else self.spec.weights:
            if (found := self._newest_record(policy, peer.versions.get(policy, -1))) is not None:
                peer.versions[policy] = int(found["version"][0])
                rows.append((f"{policy}/weights", 0))
                frames.append(found.view(np.uint8))
        known = (
            control,
            {each: self._peers[each].address for each in self._peers if each.startswith("worker")},
        )
        if rows or known != peer.known:
            peer.known, peer.waits_for_answer = known, True
            self._send(name, [*rows, ("control", 0)], [*frames, control], addresses=known[1])


class SocketEnd(Streams):
    """A worker's end, with memory of its own."""

    def __init__(self, spec: StreamSpec, hub: str, token: bytes, kind: EndKind, index: int) -> None:
        super().__init__(spec, SharedTables(spec.tables, ()), kind, index)
        self._token, self._poller = token, zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        """To the hub, from an actor to each policy worker, and a policy worker's own for ``requests``."""
        self._addresses: dict[str, str] = {}
        self._asking: dict[str, bytes] = {}
        """Names of the actors at the socket for requests."""
        self._connect("trainer", hub)
        address = ""
        if kind == "worker":
            own = own_address(hub)
            requests = self._sockets["requests"] = self._opened(zmq.ROUTER)
            address = f"tcp://{own}:{requests.bind_to_random_port(f'tcp://{own}')}"
        self._say("trainer", [], joins=address)

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most this long, and take in what has arrived."""
        for source, _ in self._poller.poll(int(max(0.0, seconds) * 1000)):
            for frames in received(source) if not source.closed else ():
                identity = frames.pop(0) if source is self._sockets.get("requests") else None
                said = self._heard(frames)
                if identity is not None and said is not None:
                    self._asking[said["from"]] = identity.bytes

    def look(self) -> None:
        """Take in the messages that have arrived."""
        self.wait(0.0)

    def close(self) -> None:
        """Close the sockets, and release the memory."""
        for each in self._sockets.values():
            each.close()
        super().close()

    def _heard(self, frames: list[zmq.Frame]) -> dict[str, Any] | None:
        said = head_of(frames, self._token)
        if said is None or not write_rows(self._shared, said["rows"], frames):
            return None
        if "addresses" in said:
            for name, address in said["addresses"].items() if self._kind == "actor" else ():
                if self._addresses.get(name) != address:
                    self._connect(name, address)
            self._addresses = said["addresses"]
            self._say("trainer", [], has_control=True)
        return said

    def _tell(self, to: str, tables: Sequence[str], rows: Iterable[int]) -> bool:
        return self._say(to, [(table, int(row)) for row in rows for table in tables])

    def _say(self, to: str, rows: Rows, **said: Any) -> bool:
        """Send rows to another end, a fragment to a buffer worker by the hub; return whether it is known."""
        by = self._sockets.get(to if to.startswith("worker") else "trainer")
        message: list[Any] = [message_head(self._token, {"from": self.name, "to": to, "rows": rows, **said})]
        if to in self._asking:
            by, message = self._sockets["requests"], [self._asking[to], *message]
        if by is not None:
            message += [self._shared.rows[table][at] for table, at in rows]
            with contextlib.suppress(zmq.Again):  # a dead worker's queue is full
                by.send_multipart(message, zmq.NOBLOCK, copy=False)
        return by is not None

    def _connect(self, name: str, address: str) -> None:
        if name in self._sockets:
            self._poller.unregister(self._sockets[name])
            self._sockets[name].close()
        self._sockets[name] = self._opened(zmq.DEALER)
        self._sockets[name].connect(address)

    def _opened(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        self._poller.register(made, zmq.POLLIN)
        return made


def received(source: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that have arrived."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield source.recv_multipart(zmq.NOBLOCK, copy=False)


def message_head(token: bytes, said: Mapping[str, Any]) -> bytes:
    """Return the first frame of a message."""
    return token + json.dumps(said).encode()


def head_of(frames: Sequence[zmq.Frame], token: bytes) -> dict[str, Any] | None:
    """Return the head of a message; None if it has not the token."""
    first = frames[0].bytes if frames else b""
    if not secrets.compare_digest(first[: len(token)], token):
        return None
    said: dict[str, Any] = json.loads(first[len(token) :])
    return said


def write_rows(shared: SharedTables, rows: Rows, frames: Sequence[zmq.Frame]) -> bool:
    """Write the rows of a message into the tables; return False, and write none, if their sizes differ."""
    found = [shared.rows[table][at] for table, at in rows]
    if [len(frame.buffer) for frame in frames[1:]] != [len(each) for each in found]:
        return False
    for each, frame in zip(found, frames[1:], strict=True):
        each[:] = np.frombuffer(frame.buffer, np.uint8)
    return True


def own_address(hub: str) -> str:
    """Return this machine's address on the way to the hub; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((hub.removeprefix("tcp://").rpartition(":")[0], 1))
        return str(asked.getsockname()[0])
