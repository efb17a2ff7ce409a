"""Fork server: start ranks as forks of one process that has imported what they need.

    driver ── one Unix socket ──> fork server: imports torch and the roles' modules, once
                                     └── forks ──> rank, rank, ...

The imports take seconds of processor time and a fork takes milliseconds, so ranks start, and are replaced,
at once. They also share the memory of the imported modules. A run of a language model starts the server
before its own imports, so that both import at the same time.

Loop of the fork server
    consumes      requests: a descriptor for a new rank, or the number of a process that has ended
    waits for     a request
    unblocked by  the driver
    produces      the number of the new process, or the exit code
    shuts down    when the driver closes the socket or ends; its ranks end with it
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module

from rillflow.errors import ClusterError
from rillflow.isolation.child_process import ChildProcess, end_with, how_ended, start_python

_BOOT = "import sys; from rillflow.workers.fork_server import serve; serve(*map(int, sys.argv[1:]))"
_MOST_BYTES = 2**16
_START = 0
"""In a request, in place of the number of a process that has ended."""
_PAIR = struct.Struct("<qq")
"""Message: number of the request, then a process or the answer."""
_REAP_S = 60.0
"""Longest wait for the exit code of a process that has ended or was killed."""


class ForkedProcess:
    """A fork of the server; it has the part of Popen's interface that ``LocalRank`` uses.

    Args:
        pid: number of the process, which stays taken until ``wait`` or the end of the server.
        parent: number of the server's process.
        server: the server.
    """

    def __init__(self, pid: int, parent: int, server: ForkServer) -> None:
        self.pid, self.parent = pid, parent
        self._server, self._lock = server, threading.Lock()
        self._code: int | None = None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self._code is None:
            with suppress(ProcessLookupError):  # the server has ended, and the process with it
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or its signal's number below zero."""
        with self._lock:
            if self._code is None:
                self._code = self._server.exit_code(self)
            return self._code


class ForkServer(AbstractContextManager["ForkServer"]):
    """The driver's side of the server; a server that has ended is started again by the next ``start``.

    Ranks have the environment, working directory and ``sys.path`` of the driver at the start of the server.

    Args:
        modules: modules to import before the first fork.

    Example:
        with ForkServer(["rillflow.roles.policy"]) as forks:
            ProcessBackend(forks=forks).open([Pool(name="main", size=2)])
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules, self._lock = modules, threading.Lock()
        self._process: ChildProcess | None = None
        self._connection: socket.socket | None = None
        self._requests = 0

    def prepare(self) -> int:
        """Start the server, unless it runs, and return its process number; do not wait for its imports."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        self._end()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_python(_BOOT, theirs.fileno(), descriptors=[theirs.fileno()])
        with suppress(ConnectionError):  # it has ended, which the first request tells
            self._connection.send(" ".join(self._modules).encode() or b"rillflow")
        return self._process.pid

    def start(self, descriptor: int, timeout_s: float) -> ForkedProcess:
        """Start a rank that serves the driver at the other end of a socket.

        Args:
            descriptor: the rank's end of the socket.
            timeout_s: longest wait in seconds, imports included.

        Raises:
            ClusterError: an import fails, the server does not answer in time, or fork fails.
        """
        with self._lock:
            parent = self.prepare()
            pid = self._asked(_START, [descriptor], timeout_s)
        if pid < 0:
            raise ClusterError(
                "a rank cannot be started",
                why=f"fork: {os.strerror(-pid)}",
                fix="free memory, or raise the limit of processes",
            )
        return ForkedProcess(pid, parent, self)

    def exit_code(self, process: ForkedProcess) -> int:
        """Return the exit code of a rank that has ended or was killed; a server that ends kills its ranks."""
        with self._lock:
            if self._process is None or self._process.pid != process.parent:
                return -signal.SIGKILL
            try:
                return self._asked(process.pid, [], _REAP_S)
            except ClusterError:
                return -signal.SIGKILL

    def close(self) -> None:
        """End the server and its ranks."""
        with self._lock:
            self._end()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.end()
        self._process = self._connection = None

    def _asked(self, process: int, descriptors: Sequence[int], timeout_s: float) -> int:
        """Send a request and return its answer."""
        assert self._process is not None and self._connection is not None, "it has been started"
        self._requests += 1
        fix, until = "read the end of its output", time.monotonic() + timeout_s
        try:
            socket.send_fds(self._connection, [_PAIR.pack(self._requests, process)], descriptors)
            while True:
                self._connection.settimeout(max(1e-3, until - time.monotonic()))
                if not (answer := self._connection.recv(_PAIR.size)):
                    break
                request, found = _PAIR.unpack(answer)
                if request == self._requests:  # an earlier one was interrupted
                    return int(found)
        except TimeoutError:
            fix = f"raise placement.start_s if imports need more than {timeout_s:g} s"
            self._process.kill()
        except ConnectionError:
            pass
        how = how_ended(self._process.wait())
        raise ClusterError("the process that starts ranks has ended", why=f"it ended {how}", fix=fix)


def serve(driver: int, descriptor: int) -> None:
    """Serve the driver; in a fork, be the rank."""
    end_with(driver)
    requests, own = socket.socket(fileno=descriptor), os.getpid()
    gc.disable()  # collections take a fifth of the time of the imports
    import numpy as np
    import torch

    from rillflow.workers import process_rank

    for module in requests.recv(_MOST_BYTES).decode().split():
        import_module(module)
    gc.freeze()  # collections in a rank do not touch, and so do not copy, what all ranks share
    gc.enable()
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _PAIR.size, 1)
        if not message:
            return
        request, ended = _PAIR.unpack(message)
        answer = _forked() if ended == _START else _reaped(ended)
        if ended == _START and answer == 0:
            end_with(own)
            requests.close()
            os.setsid()
            np.random.seed()  # forks inherit the states of the global generators
            torch.seed()
            process_rank.main(descriptors[0])
            return
        for each in descriptors:
            os.close(each)
        requests.send(_PAIR.pack(request, answer))


def _forked() -> int:
    """Fork; return 0 in the fork, its process number in the server, or the system's error below zero."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


def _reaped(pid: int) -> int:
    """Wait for the end of a fork, and return its exit code."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # an interrupted request has reaped it
        return -signal.SIGKILL
