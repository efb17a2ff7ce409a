"""Peer connections: let the other ranks of a world know at once that this one has left a collective.

    rank 1: a call fails ─ shut ─> its connections end ─> rank 0, which waits in a sum for rank 1: an error

Gloo has no way to abort a collective, and a rank that waits in one runs no Python. So the rank whose call
failed ends its side of gloo's TCP connections. Bytes that it has sent before still arrive, so a collective
that it has left in order ends well everywhere. Collectives of NCCL are not reached.

A gloo group listens on a port of its own, and one side of each of its connections has the port of a member.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PORTS = 4
"""Listening sockets that a process may open while it makes a group; gloo opens one."""


@dataclass(frozen=True, kw_only=True)
class _Socket:
    """A TCP socket of this process."""

    port: int
    """Its own port."""
    peer_port: int
    """Port of the other end; 0 if it listens."""
    descriptor: int
    """A descriptor of it."""


@dataclass(kw_only=True)
class NewSockets:
    """The TCP sockets that appeared while a group was made."""

    found: dict[int, _Socket] = field(default_factory=dict)
    """Sockets by number."""

    @property
    def listening(self) -> list[int]:
        """Ports that this process listens on, padded with zeros to ``PORTS``."""
        ports = [each.port for each in self.found.values() if not each.peer_port]
        return [*ports, *[0] * PORTS][:PORTS]


class PeerConnections:
    """The connections of this process's gloo groups."""

    def __init__(self) -> None:
        self.is_broken = False
        """Whether ``shut`` was called."""
        self._inodes = set[int]()

    @contextmanager
    def growing(self) -> Iterator[NewSockets]:
        """Find the sockets that appear meanwhile."""
        before, made = _sockets(), NewSockets()
        yield made
        made.found = {inode: each for inode, each in _sockets().items() if inode not in before}

    def keep(self, made: NewSockets, ports: Collection[int]) -> None:
        """Count those new connections that have one of the ports that members of a group listen on."""
        wanted = {*ports} - {0}
        connected = {inode: each for inode, each in made.found.items() if each.peer_port}
        self._inodes |= {inode for inode, each in connected.items() if wanted & {each.port, each.peer_port}}

    def shut(self) -> None:
        """End this side of every connection; what was sent before still arrives."""
        self.is_broken = True
        for inode, each in _sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as connection:
                    connection.shutdown(socket.SHUT_WR)
        self._inodes.clear()


def _sockets() -> dict[int, _Socket]:
    """Return the TCP sockets of this process that listen or are connected, by number."""
    found = dict[int, _Socket]()
    for descriptor in (int(each.name) for each in Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # of the listing itself, or another thread has closed it
            status = os.fstat(descriptor)
            each = _tcp(descriptor) if stat.S_ISSOCK(status.st_mode) else None
            if each is not None:
                found[status.st_ino] = each
    return found


def _tcp(descriptor: int) -> _Socket | None:
    """Return a socket that listens or is connected; None if it is not of TCP.

    Raises:
        OSError: it does neither.
    """
    with socket.socket(fileno=os.dup(descriptor)) as there:
        if there.family not in (socket.AF_INET, socket.AF_INET6) or there.type != socket.SOCK_STREAM:
            return None
        listens = there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        peer = 0 if listens else there.getpeername()[1]
        return _Socket(port=there.getsockname()[1], peer_port=peer, descriptor=descriptor)
