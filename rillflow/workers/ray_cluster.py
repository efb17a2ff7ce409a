"""RayCluster: start a cluster of our own on this machine, or join one; the driver leaves it at the end.

    no address ─> private folder and token ─> watchdog ─> Ray's daemons, on the loopback device only
    address ────> a driver on a node that is up, with the protection that the cluster has

Files: the cluster's files and its token are below a folder of mode 0700, because Ray opens its own folder to
everybody, and wants a home directory for the token. The folder is in RAY_TMPDIR, or else in TMPDIR. Ray's
sockets are in it, and the system limits their paths, so a shorter folder is taken if TMPDIR is too long.

Signals: ``ray.init`` replaces the driver's handler of SIGTERM, and starts daemons that SIGTERM would end.
Slurm sends its signals to all processes of a job at once; a terminal that closes sends SIGHUP, and ``kill``
any signal, to a whole process group. The ranks must not be gone before the driver has saved their state, so

    driver       keeps its handler
    daemons      start with ending signals blocked; ``ray.shutdown`` and the watchdog end them
    ranks        ignore ending signals; programs that they start do not
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
import torch
from ray import exceptions as faults
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from rillflow.errors import ClusterError
from rillflow.runs.ending_signals import ENDING
from rillflow.workers import nodes
from rillflow.workers.ray_folder import private_folder, start_error
from rillflow.workers.watchdog import MARK, end, end_once, watch

logger = logging.getLogger(__name__)

_REACH_S = 10.0
"""Seconds to wait for a reply of a cluster's head."""
_LEAVE_S = 3.0
"""Seconds that the watchdog has to end the cluster's processes."""
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class RayCluster:
    """The cluster of a driver.

    Args:
        address: address of a running cluster; None starts one on this machine.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.folder: Path | None = None
        """Private folder of a cluster of our own."""
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._is_entered = False

    def enter(self, ranks: int) -> None:
        """Join the cluster, or start one for a number of ranks, which share the machine's cores.

        Raises:
            ClusterError: the cluster did not start, or this process cannot be part of it.
        """
        if ray.is_initialized():
            return
        self._is_entered = True
        if self._address is not None:
            join_cluster(self._address)
            return
        self.folder = private_folder()
        private_token(self.folder)
        self._watchdog = watch(self.folder)
        os.environ[MARK] = str(self.folder)
        try:
            start_cluster(self.folder, ranks)
        finally:
            del os.environ[MARK]

    def leave(self) -> None:
        """Leave the cluster, and end one of our own; a second call has no effect."""
        if self._is_entered:
            if self._watchdog is not None:
                end_once(self._watchdog, lambda: not ray.is_initialized())
            ray.shutdown()
            self._is_entered = False
        if self._watchdog is not None:
            end(self._watchdog, _LEAVE_S)
            self._watchdog = None
        if self.folder is not None:
            forget_token(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def start_cluster(folder: Path, ranks: int) -> None:
    """Start a cluster of our own.

    Raises:
        ClusterError: one of Ray's daemons did not start in time.
    """
    try:
        with kept_by_driver():
            ray.init(
                num_cpus=max(ranks, os.cpu_count() or 1),
                num_gpus=torch.cuda.device_count(),
                include_dashboard=False,
                log_to_driver=True,
                logging_level=logging.WARNING,
                _temp_dir=str(folder / "r"),
            )
    except ClusterError:
        raise
    except Exception as error:  # any class: Ray failed, or this machine
        raise start_error(error, folder) from error


def join_cluster(address: str) -> None:
    """Join a running cluster.

    Raises:
        ClusterError: nothing answers there, or this process cannot be part of the cluster.
    """
    host, _, port = address.rpartition(":")
    what = f"the cluster at {address} cannot be joined"
    fix = "check the address and ray status on that node; open every TCP port between the nodes"
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        if not _is_node():  # Ray would abort this process
            why = "Ray is not running on this machine, but a driver must run on a node of its cluster"
            raise ClusterError(what, why=why, fix=f"run ray start --address={address} first")
        fix = "use the same Python and Ray on all nodes; for a cluster with a token set RAY_AUTH_MODE=token"
        with kept_by_driver():
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
        warn_without_token(address)
    except (OSError, RuntimeError, ValueError, faults.RayError) as error:
        raise ClusterError(what, why=cause(error), fix=fix) from None


def cause(error: BaseException) -> str:
    """Return the cause of an error of Ray in a line: of a printed traceback, only the last line."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return (lines[-1] if any("Traceback" in line for line in lines) else " ".join(lines)) or type(
        error
    ).__name__


def _is_node() -> bool:
    """Return whether Ray is up on this machine; processes of neighbouring containers may be visible too."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended, or its address belongs to another machine
            if found := re.search(rb"raylet/raylet\0.*\0--node_ip_address=([^\0]+)", file.read_bytes(), re.S):
                nodes.listening(found[1].decode()).close()
                return True
    return False


def private_token(folder: Path) -> None:
    """Write a token for a cluster of our own into its folder, unless the environment has a token.

    Ray reads the path from the environment, here and in the processes that start from here.
    """
    if os.environ.get(_TOKEN) or os.environ.get(_TOKEN_PATH):
        return
    file = _token_file(folder)
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    os.environ[_TOKEN_PATH] = str(file)
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier cluster of this process


def forget_token(folder: Path) -> None:
    """Take the path of this cluster's token out of the environment; a user's own token stays."""
    if os.environ.get(_TOKEN_PATH) == str(_token_file(folder)):
        del os.environ[_TOKEN_PATH]


def _token_file(folder: Path) -> Path:
    return folder / "token"


def warn_without_token(address: str) -> None:
    """Log a warning that the joined cluster requires no token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the cluster at %s needs no token: anyone who reaches its ports can run code on it; start it "
            "with RAY_AUTH_MODE=token, and give the driver the same token",
            address,
        )


@contextmanager
def kept_by_driver() -> Iterator[None]:
    """Keep the driver's SIGTERM handler across ``ray.init``; processes started inside block ending signals.

    Ray itself blocks SIGINT in them, so Ctrl-C ends a start that hangs.

    A signal that arrives in between is handled afterwards.

    Raises:
        ClusterError: a signal ended Ray's start, and the driver's handler returned.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler, is_ended = signal.getsignal(signal.SIGTERM), False
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING} - {signal.SIGINT})
    try:
        yield
    except SystemExit:  # Ray's own handler: a thread without blocked SIGTERM took the signal
        is_ended = True
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if is_ended:
        signal.raise_signal(signal.SIGTERM)
        raise ClusterError(
            "Ray did not start", why="a SIGTERM arrived during the start", fix="run the command again"
        )
