"""Liveness: notice ranks that are stopped or cut off, and end a rank that is cut off from its driver.

    rank's thread ── TCP: its token, then a byte every BEAT_S ──> the driver's thread, one for all ranks
         │                                                            │ silent for heartbeat_s
         │ the connection ends, or the driver's kernel                v
         │ acknowledges nothing for fence_s               lost: unreachable, stopped or busy
         v
    the process ends itself (fence)

Only silence of a rank counts, and only while the driver's own thread is on time (``Silence``). So a driver
that was stopped or busy does not take ranks for lost: their bytes have waited for it in its kernel. A stopped
driver (Ctrl-Z, a debugger) does not end its ranks either, because its kernel still acknowledges their bytes.

The kernel of a stopped rank still answers TCP's keepalive probes, and that of an unreachable node does not.
This tells the two apart. A rank on the driver's machine that is not stopped gets BUSY times as long: one call
may hold Python's interpreter lock, and then no other thread of the process runs.

A token belongs to one process of a rank. A connection with another token is refused and counted.

Loop of the driver's thread
    consumes      connections of ranks and their bytes
    waits for     them, at most TICK_S at a time
    unblocked by  a byte, a connection, the tick
    produces      one call of ``lost`` for each lost rank
    shuts down    ``close``; the ranks that still live end with their connections. It ends with the driver
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rillflow.errors import ClusterError
from rillflow.runs.abandoning import ABANDON
from rillflow.workers.backend import Place, RankLost

BEAT_S = 0.5
"""Seconds between two bytes of a rank."""
TICK_S = 0.25
"""Time between two looks of the driver's thread; one look adds at most twice this to a silence."""
BUSY = 12
"""Factor of the heartbeat for a rank on the driver's machine that is silent and not stopped."""
_REACH_S = 30.0
"""Seconds that a rank tries to reach the driver."""
_TOKEN_BYTES = 16
_ABANDON = b"!"
"""Byte that the driver sends to a rank that is to end its running call."""
_PROBES_IN_TCP_INFO = 3
"""Index of ``tcpi_probes`` in Linux's ``struct tcp_info``."""


def fence_s(heartbeat_s: float) -> float:
    """Return after how many seconds a cut-off rank ends itself; the driver gives it up before."""
    return 3 * heartbeat_s + 15


class Silence:
    """How long a rank has been silent, in time during which the listener was on time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def hear(self) -> None:
        """Begin again."""
        self.seconds = 0.0

    def add(self, elapsed_s: float) -> float:
        """Add the time since the last look, as far as it is no delay of the listener; return the sum."""
        self.seconds += min(elapsed_s, 2 * TICK_S)
        return self.seconds


@dataclass(frozen=True, kw_only=True)
class HeartbeatTarget:
    """What a rank needs to send heartbeats; it goes to the rank's process alone."""

    host: str
    """Address of the driver's node."""
    port: int
    """Port of the driver's thread."""
    token: bytes
    """Secret of this process of the rank."""
    fence_s: float
    """Seconds without any answer of the driver's kernel after which the process ends itself."""


@dataclass(kw_only=True, eq=False)
class _Watched:
    """One process of a rank, as the driver's thread sees it."""

    place: Place
    lost: Callable[[RankLost], None]
    """Called once if the rank is lost."""
    node: str
    """Address of its node."""
    local_pid: int
    """Its process, if it is on the driver's machine; else 0."""
    silence: Silence = field(default_factory=Silence)
    connection: socket.socket | None = None


class Heartbeats:
    """The driver's side.

    Args:
        host: address of the driver's node; the only one that is listened on.
        heartbeat_s: seconds of silence after which a rank is lost.
    """

    def __init__(self, host: str, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self.refused = 0
        """Number of connections that were refused."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=1024)
        self._door.setblocking(False)
        self._watched: dict[bytes, _Watched] = {}
        self._strangers: dict[socket.socket, Silence] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeats", daemon=True)
        self._thread.start()

    def watch(
        self, place: Place, lost: Callable[[RankLost], None], *, node: str, local_pid: int = 0
    ) -> HeartbeatTarget:
        """Expect heartbeats of a new process of a rank; return what that process needs.

        Args:
            place: the rank.
            lost: called from another thread, with the reason, if the rank falls silent.
            node: address of its node.
            local_pid: number of its process, if it is on the driver's machine.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._lock:
            self._watched[token] = _Watched(place=place, lost=lost, node=node, local_pid=local_pid)
        host, port = self._door.getsockname()[:2]
        return HeartbeatTarget(host=host, port=port, token=token, fence_s=fence_s(self._heartbeat_s))

    def forget(self, target: HeartbeatTarget) -> None:
        """End the connection of a process that is no longer its rank; the process ends itself."""
        with self._lock:
            watched = self._watched.pop(target.token, None)
        if watched is not None and watched.connection is not None:
            with suppress(OSError):  # it has ended already
                watched.connection.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Have every rank end its running call."""
        with self._lock:
            there = [each.connection for each in self._watched.values() if each.connection is not None]
        for connection in there:
            with suppress(OSError):  # it has ended
                connection.send(_ABANDON)

    def close(self) -> None:
        """Stop listening; processes that still send end themselves."""
        self._is_closed.set()
        self._thread.join()
        for key in [*self._selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _listen(self) -> None:
        before = time.monotonic()
        while not self._is_closed.is_set():
            for key, _ in self._selector.select(TICK_S):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._door:
                    self._open()
                else:
                    self._read(key.fileobj, key.data)
            now = time.monotonic()
            if now - before >= TICK_S:  # after the reads: what came during a delay has been heard
                self._look(now - before)
                before = now

    def _open(self) -> None:
        with suppress(OSError):  # it has gone again
            connection, _ = self._door.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 127)  # ``_look`` counts them
            self._strangers[connection] = Silence()
            self._selector.register(connection, selectors.EVENT_READ, None)

    def _read(self, connection: socket.socket, token: bytes | None) -> None:
        try:
            said = connection.recv(_TOKEN_BYTES if token is None else 4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        with self._lock:
            watched = self._watched.get(said if token is None else token)
            if token is not None and not said:  # it has ended, and Ray tells of that
                watched = self._watched.pop(token, None)
        if token is None:
            del self._strangers[connection]
            self.refused += watched is None
        if not said or watched is None:
            self._end(connection)
            return
        watched.silence.hear()
        if token is None:
            watched.connection = connection
            self._selector.modify(connection, selectors.EVENT_READ, said)

    def _look(self, elapsed_s: float) -> None:
        """Count the silence of every connection."""
        for stranger in [
            each for each, silence in self._strangers.items() if silence.add(elapsed_s) > _REACH_S
        ]:
            del self._strangers[stranger]
            self.refused += 1
            self._end(stranger)
        with self._lock:
            there = [each for each in self._watched.items() if each[1].connection is not None]
        for token, watched in there:
            if watched.silence.add(elapsed_s) < self._heartbeat_s:
                continue
            reason = self._reason(watched)
            if reason is None:
                continue
            with self._lock:
                is_watched = self._watched.pop(token, None) is not None
            if is_watched:
                assert watched.connection is not None
                self._end(watched.connection)
                watched.lost(reason)

    def _reason(self, watched: _Watched) -> RankLost | None:
        """Return why a silent rank is lost; None if it may only be busy."""
        silent, connection = f"for {watched.silence.seconds:.1f} s", watched.connection
        assert connection is not None
        unanswered = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_PROBES_IN_TCP_INFO]
        if unanswered == 1:  # it may be on its way; in a second there are none, or two
            return None
        if unanswered:
            return RankLost(
                f"has not answered a heartbeat {silent}: its node cannot be reached",
                why=f"node {watched.node} does not answer TCP probes: it is down, or the network is cut",
                fix=f"check the node and the network; a process that is cut off ends itself after "
                f"{fence_s(self._heartbeat_s):g} s",
            )
        if not watched.local_pid:
            return RankLost(
                f"has not answered a heartbeat {silent}: its process is stopped",
                why=f"node {watched.node} answers TCP probes, so it is up; a signal or a debugger stopped "
                "the process, or one call holds Python's interpreter lock",
                fix="raise placement.heartbeat_s if a call holds the lock that long",
            )
        if _is_stopped(watched.local_pid):
            return RankLost(
                f"has not answered a heartbeat {silent}: its process is stopped",
                why=f"a signal or a debugger stopped process {watched.local_pid}",
                fix="find what stopped it; placement.heartbeat_s = 0 lets you debug a rank",
            )
        if watched.silence.seconds < BUSY * self._heartbeat_s:
            return None
        return RankLost(
            f"has not answered a heartbeat {silent}: its process hangs",
            why=f"process {watched.local_pid} is not stopped, but one call holds Python's interpreter lock",
            fix="raise placement.heartbeat_s if that call needs the time",
        )

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped, or gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TtZX"


def beat(place: Place, target: HeartbeatTarget) -> None:
    """Send heartbeats of this process, a rank, from a thread; end the process when the connection ends.

    Raises:
        ClusterError: the driver cannot be reached.
    """
    try:
        connection = socket.create_connection((target.host, target.port), _REACH_S)
    except OSError as error:
        raise ClusterError(
            f"{place} cannot reach the driver on node {target.host} at port {target.port}",
            why=f"{error}; a rank sends its heartbeats to the driver directly, not through Ray",
            fix="open every TCP port between the nodes",
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(target.fence_s * 1000))
    connection.sendall(target.token)
    threading.Thread(target=_beat, args=(place, connection), name="heartbeat", daemon=True).start()


def _beat(place: Place, connection: socket.socket) -> None:
    connection.settimeout(BEAT_S)
    why = "the driver has ended, or given this process up"
    try:
        while True:
            connection.sendall(b".")
            with suppress(TimeoutError):
                if not (said := connection.recv(1)):
                    break
                if said == _ABANDON:
                    signal.pthread_kill(threading.main_thread().ident or 0, ABANDON)
    except (ConnectionResetError, BrokenPipeError):
        pass
    except OSError as error:
        why = f"the driver cannot be reached: {error}"
    with suppress(OSError):  # its screen may have gone
        os.write(2, f"{place} ends: {why}\n".encode())
    os._exit(1)
