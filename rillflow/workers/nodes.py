"""Nodes: the machines of the ranks, and how ranks find each other there.

    rank's process ── ProcessSeat: node, device, room ──> driver ── by node, then device ──> its rank
           │                                         └── a world's first rank hosts a store on a free port
           └── refused in the process itself: package versions other than the driver's

The interface used before versions are compared (the constructor and ``seat``) must not change between
versions.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rillflow.errors import ClusterError
from rillflow.runs.environment import installed_versions, own_version
from rillflow.runs.formatting import size as bytes_text
from rillflow.workers.backend import Place, Site
from rillflow.workers.collectives import ProcessRanks, Ranks, SingleRank
from rillflow.workers.liveness import HeartbeatTarget

logger = logging.getLogger(__name__)

ALIKE = "install the same versions on every node: use one image, or one environment on a shared disk"
"""Advice about a node that runs other code."""
_BETWEEN = "the ranks of a pool connect to each other directly, not through Ray"
_OPEN = (
    "open every TCP port between the nodes; with several networks, pass the shared network's address to "
    "ray start --node-ip-address"
)
REACH_S = 30.0
"""Seconds that a rank tries to reach another node."""
_LOOKS = 5
"""Number of clock readings of a node; the quickest reply counts."""
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


@dataclass(frozen=True, kw_only=True)
class ProcessSeat:
    """The location of a rank's process.

    Example:
        ProcessSeat(node="10.0.0.2", device=3, shared_bytes=64 * 2**30)
    """

    node: str
    """Address of the node."""
    device: int
    """First accelerator that the process was given, -1 for none."""
    shared_bytes: int
    """Size of the node's /dev/shm in bytes."""
    pid: int
    """Number of the process on its node."""
    niceness: int = 0
    """Niceness of the process; above 0, other programs get the cores first."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: node, then device."""
        return int(ipaddress.ip_address(self.node)), self.device


@dataclass(frozen=True, kw_only=True)
class Seating:
    """The driver's message to a process that becomes a rank."""

    place: Place
    """The rank."""
    pool_size: int
    """Number of ranks of its pool."""
    index: int
    """Index of the rank in its world."""
    size: int
    """Number of ranks of its world."""
    host: str
    """Address of the node of the world's first rank."""
    port: int
    """Port of the store that the first rank hosts for the world; 0 if there is no other rank."""
    backend: str
    """Backend of torch.distributed: ``gloo``, or ``cpu:gloo,cuda:nccl`` for tensors on accelerators."""
    neighbours: int
    """Ranks of all pools on this node, including this one; they share its cores."""
    ahead_s: float
    """Seconds by which this node's clock is ahead of the driver's."""
    deadline_s: float
    """Longest wait, in seconds, of the rank for an argument."""
    collective_s: float
    """Longest wait, in seconds, of a collective for one of its ranks."""
    target: HeartbeatTarget | None
    """Where its heartbeats go; None if they are off."""
    era: int = 0
    """Number of times that the run has abandoned its calls."""


def seat_of(node: str, devices: list[str], driver: Mapping[str, str]) -> ProcessSeat:
    """Return this process's seat.

    Args:
        node: address of the node.
        devices: accelerators of this process, as Ray numbers them.
        driver: versions of the driver's packages.

    Raises:
        ClusterError: a package has another version here than on the driver.
    """
    here = versions()
    both = [name for name in driver if name in here]
    odd = [f"{name} {here[name]}, not {driver[name]}" for name in both if here[name] != driver[name]]
    if odd:
        raise ClusterError(
            f"node {node} has other versions than the driver: {'; '.join(odd)}",
            why="ranks with different versions may compute different numbers or fail to communicate",
            fix=ALIKE,
        )
    room = os.statvfs("/dev/shm")
    found = [int(device) for device in devices if device.isdigit()]
    shared_bytes = room.f_blocks * room.f_frsize
    return ProcessSeat(
        node=node,
        device=min(found, default=-1),
        shared_bytes=shared_bytes,
        pid=os.getpid(),
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
    )


def versions() -> dict[str, str]:
    """Return the versions that must be equal on every node, without build tags of devices."""
    found = {name: str(version).split("+")[0] for name, version in installed_versions().items()}
    return {**found, "python": platform.python_version(), "rillflow": own_version()}


def require_room(seat: ProcessSeat, store_bytes: float) -> None:
    """Raise ClusterError if a node's object store does not fit into its shared memory.

    Raises:
        ClusterError: the store would be in files of /tmp.
    """
    if seat.shared_bytes < store_bytes:
        has, wanted = bytes_text(seat.shared_bytes), bytes_text(int(store_bytes))
        raise ClusterError(
            f"/dev/shm of node {seat.node} has {has}, but Ray's object store needs {wanted}",
            why="Ray then keeps the store in files under /tmp, and every batch goes through the disk",
            fix="enlarge it with docker run --shm-size or an emptyDir of medium Memory at /dev/shm, "
            "or shrink the store with ray start --object-store-memory",
        )


def warn_if_nice(seat: ProcessSeat) -> None:
    """Log a warning if any other program of a node takes its cores from the ranks there."""
    if seat.niceness > 0:
        logger.warning(
            "ranks on node %s run at niceness %d: any other program there takes their cores, and a start may "
            "exceed placement.start_s; export RAY_worker_niceness=0 before ray start",
            seat.node,
            seat.niceness,
        )


def clock_ahead_s(ask: Callable[[], float]) -> float:
    """Return seconds by which a node's clock is ahead of this one; 0 if the round trip hides the difference.

    Args:
        ask: returns the node's seconds since the epoch.
    """
    looks = []
    for _ in range(_LOOKS):
        began, theirs, ended = time.time(), ask(), time.time()
        looks.append(((ended - began) / 2, theirs - (began + ended) / 2))
    doubt_s, ahead_s = min(looks)
    return ahead_s if abs(ahead_s) > doubt_s else 0.0


def settle_interface(node: str) -> None:
    """Make collectives use the interface with the node's address, unless the user set another one."""
    there = "lo" if ipaddress.ip_address(node).is_loopback else _interface_of(node)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if there == "lo":
            os.environ[name] = there
        elif there:
            os.environ.setdefault(name, there)


def _interface_of(node: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(said[20:24]) == node:
                return name
    return ""


def listening(node: str) -> socket.socket:
    """Return a socket that listens on the node's address and a free port.

    Raises:
        OSError: this machine does not have the address.
    """
    return socket.create_server((node, 0), family=socket.AF_INET6 if ":" in node else socket.AF_INET)


def hosted_store(node: str, size: int, deadline_s: float) -> TCPStore:
    """Host the store of a world on this node's address and a free port."""
    with listening(node) as found:
        port, held = found.getsockname()[1], found.detach()
    wait = timedelta(seconds=deadline_s)
    return TCPStore(node, port, size, True, wait, wait_for_workers=False, master_listen_fd=held)


def joined_store(here: str, seating: Seating) -> TCPStore:
    """Connect to the store that the world's first rank hosts.

    Raises:
        ClusterError: its node cannot be reached from here.
    """
    try:
        socket.create_connection((seating.host, seating.port), REACH_S).close()
    except OSError as error:
        what = f"node {here} cannot reach node {seating.host} at port {seating.port}"
        raise ClusterError(what, why=f"{error}; {_BETWEEN}", fix=_OPEN) from None
    wait = timedelta(seconds=seating.collective_s)
    return TCPStore(seating.host, seating.port, seating.size, False, wait)


def meet(here: str, seating: Seating, store: TCPStore | None) -> Ranks:
    """Join the ranks of the world and return this rank.

    Args:
        here: address of this node.
        seating: the driver's message.
        store: the store that this rank hosts, if it is the world's first.

    Raises:
        ClusterError: the nodes of the world cannot all reach each other.
    """
    if seating.size == 1:
        return SingleRank()
    found = store or joined_store(here, seating)
    try:
        return ProcessRanks.join(
            seating.index, seating.size, found, seating.backend, deadline_s=seating.collective_s
        )
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        what = f"node {here} cannot reach every node of pool {seating.place.pool!r}"
        raise ClusterError(what, why=f"{told}; {_BETWEEN}", fix=_OPEN) from None


def leave_collectives(site: Site | None) -> None:
    """Let ranks that wait in a collective for this one fail: its call has failed."""
    if site is not None and isinstance(site.ranks, ProcessRanks):
        site.ranks.abort()


def has_left_collectives(site: Site | None) -> bool:
    """Return whether a call of this rank has failed since it met the others."""
    return site is not None and isinstance(site.ranks, ProcessRanks) and site.ranks.is_broken


def meet_again(here: str, seating: Seating, store: TCPStore | None, site: Site) -> None:
    """Connect the ranks of the world again after a failed call; see ``meet``."""
    if isinstance(site.ranks, ProcessRanks):
        site.ranks.mend(seating.backend, store or joined_store(here, seating))
